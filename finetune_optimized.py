"""Step 11, optimized: the same fine-tuning with the custom Triton kernels patched in.

    python finetune_optimized.py                             # the playbook's two kernels
    python finetune_optimized.py --kernels all               # and those that the profile asks for next
    python finetune_optimized.py --kernels all --cuda-graph  # the whole step as one launch, for launch-bound sizes
    python finetune_optimized.py --ladder                    # baseline and every rung, each in a process of its own
    python finetune_optimized.py --kernels all --longest     # the longest sequence that fits

Everything that differs from finetune_baseline.py is on this page and in apply_kernels.py.
"""

import functools

import ladder
import llama
import measure
from apply_kernels import KERNELS, MODEL_KERNELS, apply_kernels, triton_adamw
from measure import HAS_GPU, UserError

PLAYBOOK_KERNELS = "rmsnorm,cross_entropy"


def parse_args():
    parser = llama.finetune_parser(__doc__)
    llama.add_kernels_flag(parser, KERNELS, default=PLAYBOOK_KERNELS)
    add = parser.add_argument
    # fmt: off
    add("--stochastic-rounding", action="store_true", help="of the adamw kernel's bf16 weights and moments")
    add("--cuda-graph", action="store_true", help="one launch per step; needs the adamw kernel")
    add("--opponent", choices=["liger"], help="Liger-Kernel's patch and PyTorch's fused AdamW in place of our kernels")
    add("--ladder", action="store_true", help="baseline and every rung up to all kernels, in one table")
    add("--longest", action="store_true", help="find the longest sequence that fits with these --kernels, batch 1")
    # fmt: on
    args = parser.parse_args()
    for flag in ("stochastic_rounding", "cuda_graph"):
        if getattr(args, flag) and "adamw" not in args.kernels:
            raise UserError(f"--{flag.replace('_', '-')} needs the adamw kernel: --kernels all")
    if args.cuda_graph and not HAS_GPU:
        raise UserError("--cuda-graph needs a CUDA GPU and none was found")
    llama.check_outputs(args)
    return args


def main() -> None:
    args = parse_args()
    if args.ladder:
        return ladder.climb(args)
    if args.opponent:
        return ladder.train_opponent(args)
    model = llama.load_model(args)
    apply_kernels(model, [name for name in MODEL_KERNELS if name in args.kernels])
    with_adamw = functools.partial(triton_adamw, stochastic_rounding=args.stochastic_rounding)
    choose_optimizer = with_adamw if "adamw" in args.kernels else llama.make_optimizer
    if args.longest:
        return ladder.find_longest(args, model, choose_optimizer(model, 1e-5))
    options = [name for name in ("stochastic_rounding", "cuda_graph") if getattr(args, name)]
    llama.finetune(
        model, args, title="Optimized", kernels=args.kernels + options,
        make_optimizer=choose_optimizer, cuda_graph=args.cuda_graph,
    )  # fmt: skip


if __name__ == "__main__":
    measure.run_main(main)
