"""What finetune_optimized.py can do beyond step 11: its flags, and where each of them leads.

    --kernels all               kernel_training.py: those that the profile asks for next
    --kernels all --cuda-graph  kernel_training.py: the whole step as one launch
    --kernels all --fp8         fp8_layer.py: the layers' matrix products in FP8
    --opponent liger            opponents.py: Liger-Kernel or another in the place of ours
    --ladder                    ladder.py: baseline and every rung, each in a process of its own
    --kernels all --longest     longest.py: the longest sequence that fits
    --teacher MODEL             distill.py: a model into the first half of its layers

Imports no PyTorch before a flag asks for it.
"""

import argparse

from harness.cli.command_line import (
    UserError,
    add_kernels_flag,
    flag_name,
    positive_float,
    positive_int,
    refuse_ignored,
    world_size,
)
from harness.cli.fp8_flags import add_fp8_flag
from harness.cli.workload import FLOAT8_OPPONENTS, OPPONENTS, Workload, finetune_parser
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS
from harness.training.resuming import Checkpoints

PAGES = {"Baseline": (), "Optimized": PLAYBOOK_KERNELS}  # a script's run: the kernels on its page
BASELINE, OPTIMIZED = PAGES
CHECKPOINTS = "checkpoint", "checkpoint_every", "keep", "resume"
OWN_GRAPHS = "compile-reduce-overhead"  # of OPPONENTS
COMPILED = "compile", OWN_GRAPHS, "unsloth", *FLOAT8_OPPONENTS
IGNORED = {  # by each of the flags below
    "ladder": [
        *("opponent", "longest", "kernels", "fp8", "stochastic_rounding"),
        *("recompute", "offload", "cuda_graph", "save", *CHECKPOINTS),
    ],
    "opponent": [
        *("longest", "kernels", "fp8", "stochastic_rounding", "recompute", "offload"),
        *CHECKPOINTS,
    ],
    "teacher": ["fp8", "recompute", "offload", "lora_rank", "adapter", *CHECKPOINTS],
    "longest": ["data", "batch_size", "pack", "steps", "lr", "cuda_graph", "save", *CHECKPOINTS],
}


def parse_args(doc: str, name: str = OPTIMIZED) -> argparse.Namespace:
    """The arguments of the script whose run has this name; --model is --teacher's unless told.

    Raises:
        UserError: a flag needs another one, or cannot be used with one that is there.
    """
    parser = finetune_parser(doc)
    if name == BASELINE:
        return parser.parse_args()
    add_flags(parser)
    args = parser.parse_args()
    if args.teacher is not None and "model" not in args.given:
        args.model = args.teacher
    for flag in ("student_layers", "temperature"):
        if getattr(args, flag) is not None and args.teacher is None:
            raise UserError(f"{flag_name(flag)} needs --teacher, the model to distil")
    for flag in ("ladder", "longest", "opponent"):
        if getattr(args, flag) and args.teacher is not None:
            ways = f"--{flag} trains on labels, --teacher does not"
            raise UserError(f"{ways}: leave one of the two out")
    refuse_ignored(args, IGNORED)
    if args.stochastic_rounding and "adamw" not in args.kernels:
        raise UserError("--stochastic-rounding needs the adamw kernel: --kernels all")
    if args.opponent == OWN_GRAPHS:
        own = f"--opponent {OWN_GRAPHS} records CUDA graphs of its own"
        if args.cuda_graph:
            raise UserError(f"{own}: leave --cuda-graph out")
        if (args.accumulate or 1) > 1:  # github.com/pytorch/pytorch/issues/169545
            fault = "which write over the gradients that are to be added up"
            raise UserError(f"{own}, {fault}: leave --accumulate out")
    if args.opponent in COMPILED and world_size() > 1:
        given = f"--opponent {args.opponent} is for one process and torchrun started {world_size()}"
        raise UserError(f"{given}: take fused-adamw, rms-norm or liger")
    if args.opponent == "unsloth" and args.merge and args.quantize:
        kept = "--merge cannot read the 4-bit weights that --opponent unsloth makes"
        raise UserError(f"{kept}: leave --merge or --quantize out")
    if args.pack and (args.ladder or args.opponent in COMPILED):
        flag = "--ladder" if args.ladder else f"--opponent {args.opponent}"
        prepared = f"{flag} records or compiles a step for those after it"
        changing = "with --pack samples end elsewhere in each"
        raise UserError(f"{prepared}, and {changing}: leave one of the two out")
    if args.plot and not args.ladder:
        wish = f"--plot {args.plot} draws the ladder"
        raise UserError(f"{wish}: add --ladder, or leave --plot out")
    return args


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those that finetune_baseline.py does not have."""
    add_kernels_flag(parser, KERNELS, default=",".join(PLAYBOOK_KERNELS))
    add_fp8_flag(parser)
    add = parser.add_argument
    add(
        "--stochastic-rounding",
        action="store_true",
        help="of the adamw kernel's bf16 weights and moments",
    )
    add(
        "--opponent",
        choices=OPPONENTS,
        help="what others offer in place of our kernels: PyTorch's fused AdamW alone, or with "
        "F.rms_norm, torch.compile, Liger-Kernel's patch, Unsloth or torchao's float8",
    )
    add(
        "--ladder",
        action="store_true",
        help="baseline and every rung up to all kernels, in one table",
    )
    add(
        "--longest",
        action="store_true",
        help="from --seq-len on, the longest sequence that fits, batch 1",
    )
    add(
        "--plot",
        metavar="FILE.png",
        help="with --ladder: the step's time and memory, rung by rung, as a picture",
    )
    add(
        "--teacher",
        metavar="ID|DIR|tiny",
        help="distil this model into --model, which is its own first half of layers unless told; "
        "the loss is the reverse KL, and its kernel replaces cross_entropy and "
        "linear_cross_entropy",
    )
    add(
        "--student-layers",
        type=positive_int,
        metavar="N",
        help="with --teacher: train the first N layers of --model (default: all; half if it is "
        "the teacher's model)",
    )
    add(
        "--temperature",
        type=positive_float,
        help="with --teacher: divides the logits of both models (default: 1)",
    )


def takes_over(args: argparse.Namespace, workload: Workload, name: str) -> bool:
    """Do what the flags ask for, if the script's page does not show it; return True if so.

    Args:
        name: of the script's run, in PAGES.

    Raises:
        UserError: the workload's dtype or this GPU cannot do it, or its kernels cannot take the
            model's config.json.
    """
    if name == BASELINE:
        return takes_steps(args, workload, name)
    if workload.stochastic_rounding and workload.dtype != "bf16":
        given = f"--stochastic-rounding is for bf16 and does nothing in {workload.dtype}"
        raise UserError(f"{given}: add --dtype bf16")

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
        return False
    from next_steps.finetuning import kernel_training

    kernel_training.train(workload, args.json, args.save, name, checkpoints)
    return True
