"""What finetune_optimized.py can do beyond step 11: `takes_over` finds the module that does it.

The flags: harness/cli/flags.py.  This module imports no PyTorch before a flag asks for it.
"""

import argparse

from harness.cli.flags import OF_KERNELS, OF_OPTIMIZED, Parser, finetune_parser
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS
from harness.training.resuming import Checkpoints

PAGES = {"Baseline": (), "Optimized": PLAYBOOK_KERNELS}  # a script's run: the kernels on its page
BASELINE, OPTIMIZED = PAGES


def parse_args(doc: str, name: str = OPTIMIZED) -> argparse.Namespace:
    """Return the arguments of a run's script.  --model is --teacher's unless told."""
    parser = finetune_parser(doc)
    if name == BASELINE:
        return parser.parse_args()
    add_flags(parser)
    args = parser.parse_args()
    if args.teacher is not None and "model" not in args.given:
        args.model = args.teacher
    return args


def add_flags(parser: Parser) -> None:
    """Add the flags that finetune_baseline.py does not have."""
    parser.add_kernels(KERNELS, default=",".join(PLAYBOOK_KERNELS))
    parser.add_flags(OF_KERNELS, OF_OPTIMIZED)


def takes_over(args: argparse.Namespace, workload: Workload, name: str) -> bool:
    """Do what the flags ask for, if the run's page does not show it; return True if so.

    Raises:
        UserError: this GPU cannot do it, or the kernels cannot take the model's config.json.
    """
    if name == BASELINE:
        return takes_steps(args, workload, name)
    if workload.fp8:
        from next_steps.patches.projections import require_fp8

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
        return takes_steps(args, workload, name)
    return True


def takes_steps(args: argparse.Namespace, workload: Workload, name: str) -> bool:
    """Train with kernel_training.py if the flags ask for a step that the page does not show."""
    checkpoints = Checkpoints.from_flags(args)
    on_the_page = workload.kernels == PAGES[name] and workload.is_on_the_page
    if on_the_page and not checkpoints.is_asked:
        if workload.kernels:
            from next_steps.memory.memory_estimate import try_kernels

            try_kernels(workload)
        from harness.data.dataset import look_at_data

        look_at_data(workload)
        return False
    from next_steps.finetuning import kernel_training

    kernel_training.train(workload, args.json, args.save, name, checkpoints)
    return True
