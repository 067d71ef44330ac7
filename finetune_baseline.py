"""Step 11, baseline: fine-tune LLaMA 3.1 8B as Hugging Face and PyTorch ship it.

    python finetune_baseline.py                  # 20 steps of 1 x 512 tokens
    python finetune_baseline.py --random-init    # the same without access to the weights

finetune_optimized.py runs the same loop with custom kernels; compare_runs.py lays two runs side by side.
"""

# first: importing PyTorch takes seconds
from harness import quiet_interrupt  # noqa: F401  # isort: skip

from harness import command_line, loading, output_files
from harness.workload import finetune_parser


def main() -> None:
    args = finetune_parser(__doc__).parse_args()
    output_files.check_outputs(args)
    model = loading.load_model(args)
    llama.finetune(model, args, title="Baseline", kernels=[])


if __name__ == "__main__":
    command_line.run_main(main)
