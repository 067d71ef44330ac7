"""Lesson 11, baseline: fine-tune LLaMA 3.1 8B as Hugging Face and PyTorch ship it.

    python finetune_baseline.py                  # 20 steps of 1 x 512 tokens
    python finetune_baseline.py --random-init    # the same without access to the weights

What the kernels change, `diff finetune_baseline.py finetune_optimized.py` shows: not the loop.
compare_runs.py lays two runs side by side.
"""

from harness.cli import command_line
from harness.cli.workload import Workload
from next_steps import finetune_options

NAME = "Baseline"


def main() -> None:
    args, workload = Workload.read(__doc__, finetune_options.FLAGS[NAME])
    if finetune_options.trains_otherwise(args, workload, NAME):  # flags that lead beyond this page
        return

    import torch

    from harness.model.loading import load_model
    from harness.training.training_run import Run

    model = load_model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)

    run = Run(NAME, workload, model, record_to=args.json, save_to=args.save)
    for batch in run.batches():
        loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.end_step(loss)
    run.finish()


if __name__ == "__main__":
    command_line.run_main(main)
