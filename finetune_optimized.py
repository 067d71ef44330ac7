"""Step 11, optimized: the same fine-tuning with the custom Triton kernels patched in.

    python finetune_optimized.py                             # the playbook's two kernels
    python finetune_optimized.py --kernels all               # and those that the profile asks for next
    python finetune_optimized.py --kernels all --cuda-graph  # the whole step as one launch, for launch-bound sizes
    python finetune_optimized.py --ladder                    # baseline and every rung, each in a process of its own
    python finetune_optimized.py --kernels all --longest     # the longest sequence that fits
    python finetune_optimized.py --teacher MODEL             # distil a model into the first half of its layers

Everything that differs from finetune_baseline.py is on this page and in apply_kernels.py (with a teacher, distill.py).
"""

# first: importing PyTorch takes seconds
from harness import quiet_interrupt  # noqa: F401  # isort: skip

import functools

from harness import command_line, loading, output_files, training_run
from harness.command_line import UserError
from harness.device import HAS_GPU
from harness.workload import finetune_parser
from next_steps import distill, ladder
from next_steps.apply_kernels import KERNELS, apply_kernels, make_optimizer, model_kernels
from next_steps.memory_estimate import step_tryer

PLAYBOOK_KERNELS = "rmsnorm,cross_entropy"


def parse_args():
    parser = finetune_parser(__doc__)
    command_line.add_kernels_flag(parser, KERNELS, default=PLAYBOOK_KERNELS)
    add = parser.add_argument
    add("--stochastic-rounding", action="store_true", help="of the adamw kernel's bf16 weights and moments")
    add("--cuda-graph", action="store_true", help="one launch per step; needs the adamw kernel")
    ladder.add_flags(parser)
    distill.add_flags(parser)
    args = distill.parse_args(parser)
    command_line.refuse_ignored(args, ladder.IGNORED)
    for flag in ("stochastic_rounding", "cuda_graph"):
        if getattr(args, flag) and "adamw" not in args.kernels:
            raise UserError(f"{command_line.flag_name(flag)} needs the adamw kernel: --kernels all")
    if args.stochastic_rounding and args.dtype != "bf16":
        raise UserError(f"--stochastic-rounding is for bf16 and does nothing in {args.dtype}: add --dtype bf16")
    if args.cuda_graph and not HAS_GPU:
        raise UserError("--cuda-graph needs a CUDA GPU and none was found")
    if args.cuda_graph and args.steps <= training_run.WARMUP_STEPS:
        raise UserError(
            f"--cuda-graph starts after {training_run.WARMUP_STEPS} steps, so with --steps {args.steps} it "
            "does nothing: take more steps"
        )
    output_files.check_outputs(args)
    return args


def train(model, args, title: str, kernels: list[str], **teacher) -> None:
    options = [name for name in ("stochastic_rounding", "cuda_graph") if getattr(args, name)]
    llama.finetune(
        model, args, title=title, kernels=kernels + options, cuda_graph=args.cuda_graph, **teacher,
        make_optimizer=functools.partial(
            make_optimizer, kernels=kernels, stochastic_rounding=args.stochastic_rounding
        ),
    )  # fmt: skip


def main() -> None:
    args = parse_args()
    if ladder.takes_over(args) or distill.takes_over(args, train):
        return
    model = loading.load_model(args, step_tryer(args.kernels))
    apply_kernels(model, model_kernels(args.kernels))
    train(model, args, "Optimized", args.kernels)


if __name__ == "__main__":
    command_line.run_main(main)
