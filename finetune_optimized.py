"""Lesson 11, optimized: the same fine-tuning with the custom Triton kernels patched in.

    python finetune_optimized.py                  # the playbook's two kernels
    python finetune_optimized.py --kernels all    # those after lesson 12: see --help

What the kernels change, `diff finetune_baseline.py finetune_optimized.py` shows: not the loop.
compare_runs.py lays two runs side by side.
"""

from harness.cli import command_line
from harness.cli.workload import Workload
from next_steps import finetune_options

NAME = "Optimized"


def main() -> None:
    args, workload = Workload.read(__doc__, finetune_options.FLAGS[NAME])
    if finetune_options.trains_otherwise(args, workload, NAME):  # flags that lead beyond this page
        return

    import torch

    from cross_entropy_kernel import TritonCrossEntropyLoss
    from harness.model.families import family_of
    from harness.model.loading import load_model
    from harness.model.patching import causal_lm_loss, replace_modules
    from harness.training.training_run import Run
    from rmsnorm_kernel import TritonRMSNorm

    def cross_entropy(logits, targets, ignore_index):
        return TritonCrossEntropyLoss(ignore_index, inplace=True)(logits, targets)

    model = load_model(workload)
    norm = family_of(model).part("RMSNorm")  # transformers' LlamaRMSNorm
    replace_modules(model, norm, TritonRMSNorm.from_llama_rmsnorm)
    model.loss_function = causal_lm_loss(cross_entropy)
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
