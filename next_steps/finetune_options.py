"""What finetune_optimized.py can do beyond step 11: which module does what a flag asks for.

    --kernels all               kernel_training.py: the kernels that the profile asks for next
    --kernels all --cuda-graph  kernel_training.py: the whole step as one launch
    --kernels all --fp8         fp8_layer.py: the layers' matrix products in FP8
    --opponent liger            opponents.py: Liger-Kernel or another library in place of ours
    --ladder                    ladder.py: baseline and every rung, each in a process of its own
    --kernels all --longest     longest.py: the longest sequence that fits
    --teacher MODEL             distill.py: a model into the first half of its layers

The flags themselves: harness/cli/flags.py.  This module imports no PyTorch before a flag asks for
it.
"""

import argparse

from harness.cli.flags import OF_KERNELS, OF_OPTIMIZED, Parser, finetune_parser
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS
from harness.training.resuming import Checkpoints


def parse_args(doc: str) -> argparse.Namespace:
    """Return finetune_optimized.py's arguments, in which --model is --teacher's unless told."""
    parser = finetune_parser(doc)
    add_flags(parser)
    args = parser.parse_args()
    if args.teacher is not None and "model" not in args.given:
        args.model = args.teacher
    return args


def add_flags(parser: Parser) -> None:
    """Add the flags that finetune_baseline.py does not have."""
    parser.add_kernels(KERNELS, default=",".join(PLAYBOOK_KERNELS))
    parser.add_flags(OF_KERNELS, OF_OPTIMIZED)


def takes_over(args: argparse.Namespace, workload: Workload) -> bool:
    """Return True if the flags ask for more than the playbook's two kernels, after doing it.

    Raises:
        UserError: this GPU cannot do it.
    """
    if workload.fp8:
        from next_steps.patches.fp8_model import require_fp8

        require_fp8()
    if args.ladder:
        from next_steps.studies import ladder

        ladder.climb(workload, record_to=args.json, plot_to=args.plot)
    elif args.longest:
        from next_steps.studies import longest

        longest.find(workload, record_to=args.json)
    elif args.opponent:
        from next_steps.finetuning import opponents

        opponents.train(workload, record_to=args.json, save_to=args.save)
    elif args.teacher is not None:
        from next_steps.finetuning import distill

        distill.train(workload, record_to=args.json, save_to=args.save)
    else:
        return takes_steps(args, workload, "Optimized", PLAYBOOK_KERNELS)
    return True


def takes_steps(
    args: argparse.Namespace, workload: Workload, name: str, page_kernels: tuple[str, ...] = ()
) -> bool:
    """Return True after training with kernel_training.py, False where the page shows it all.

    Args:
        page_kernels: the kernels of the loop on the script's own page.
    """
    checkpoints = Checkpoints.from_flags(args)
    on_the_page = workload.kernels == page_kernels and workload.is_on_the_page
    if on_the_page and not checkpoints.is_asked:
        return False
    from next_steps.finetuning import kernel_training

    kernel_training.train(workload, args.json, args.save, name, checkpoints)
    return True
