"""Cross-entropy of a split vocabulary that is one slice: what is asked of every function."""

from dataclasses import replace

from next_steps.layers.split_cross_entropy import TritonSplitCrossEntropyLoss
from subjects import cross_entropy


def bytes_of_rows(inputs):
    """Three numbers, the target's column, and whether it lies in another slice."""
    return (3 * 4 + 8 + 1) * inputs["targets"].numel()


CHANGED = {
    "saved": ("logits",),  # of the targets their columns, which are the function's own
    "exact_compiled": False,  # the loss comes from the statistics in PyTorch's operations
}

SUBJECTS = (
    replace(
        cross_entropy.MEAN,
        name="split_cross_entropy",
        function=TritonSplitCrossEntropyLoss(),
        saved_bytes=lambda inputs: bytes_of_rows(inputs) + 8,  # the number of valid rows
        **CHANGED,
    ),
    replace(
        cross_entropy.ROWS,
        name="split_cross_entropy_rows",
        function=TritonSplitCrossEntropyLoss(reduction="none"),
        saved_bytes=bytes_of_rows,
        **CHANGED,
    ),
)
