"""Step 11, optimized: the same fine-tuning with the custom Triton kernels patched in.

    python finetune_optimized.py                 # the playbook's two kernels
    python finetune_optimized.py --kernels rmsnorm

Everything that differs from finetune_baseline.py is on this page.
"""

import llama
import measure
from cross_entropy_kernel import TritonCrossEntropyLoss
from rmsnorm_kernel import TritonRMSNorm

KERNELS = ["rmsnorm", "cross_entropy"]


def apply_kernels(model, names: list[str]) -> None:
    """Surgical replacement: swap modules and the loss of a Hugging Face LLaMA, leave its source alone."""
    if "rmsnorm" in names:
        llama.replace_modules(model, "LlamaRMSNorm", TritonRMSNorm.from_llama_rmsnorm)
    if "cross_entropy" in names:
        # inplace: nothing reads the logits after the loss, so the gradient may take their memory
        model.loss_function = llama.causal_lm_loss(TritonCrossEntropyLoss(inplace=True))


def main() -> None:
    parser = llama.finetune_parser(__doc__)
    llama.add_kernels_flag(parser, KERNELS, default="all")
    args = parser.parse_args()
    llama.check_outputs(args)
    model = llama.load_model(args)
    apply_kernels(model, args.kernels)
    llama.finetune(model, args, title="Optimized", kernels=args.kernels)


if __name__ == "__main__":
    measure.run_main(main)
