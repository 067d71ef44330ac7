"""Packing: several samples in one sequence, each trained on as if it were alone.

    sequence   | sample 7 | sample 2          | sample 9     | padding |
    positions  | 0 1 2 .. | 0 1 2 ..          | 0 1 2 ..     | 0 1 2 ..|
    attention  within a sample; padding is a sample of its own, which nobody learns

Without it every sample fills a row of its own, up to the batch's longest, and what is missing is
computed for nothing.

First-fit: a sample goes into the first of the open sequences that has room for it, in the order in
which samples are drawn.  A new sequence is opened where none has.  To sort the samples first would
leave less padding, but samples of like lengths would meet in each sequence, and the order would not
be random; to fill one sequence only, until a sample does not fit, leaves several times as much.
"""

from collections.abc import Iterable

import numpy as np
import torch

from harness.samples import IGNORE_INDEX

OPEN = 64  # sequences that are looked at for room; the oldest, which are the fullest, are closed


def first_fit(lengths: np.ndarray, order: Iterable[int], size: int, n: int) -> list[list[int]]:
    """Up to n sequences of at most `size` tokens, each the indices of its samples.

    It ends at the first sample for which there is no room any more.

    Args:
        lengths: of the samples, (N,), each at most `size`.
        order: in which they come, as indices; one may come again.
    """
    sequences, room, first_open = [], [], 0
    for i in order:
        length = int(lengths[i])
        for k in range(first_open, len(sequences)):
            if length <= room[k]:
                break
        else:
            k = len(sequences)
            if k == n:
                break
            sequences.append([])
            room.append(size)
            first_open = max(first_open, len(sequences) - OPEN)
        sequences[k].append(i)
        room[k] -= length
    return sequences


def lay_out(sequences: list[list[tuple[torch.Tensor, torch.Tensor]]], size: int) -> dict:
    """The fields of a Batch of these sequences in one row, their samples one after the other.

    Args:
        sequences: of each its samples, (input_ids, labels) of at most `size` tokens together.
    """
    ids, labels, lengths = [], [], []
    for samples in sequences:
        for sample_ids, sample_labels in samples:
            ids.append(sample_ids)
            # nothing before it, so it is no target
            labels += [torch.tensor([IGNORE_INDEX]), sample_labels[1:]]
            lengths.append(len(sample_ids))
        if padding := size - sum(len(sample_ids) for sample_ids, _ in samples):
            ids.append(torch.zeros(padding, dtype=torch.int64))
            labels.append(torch.full((padding,), IGNORE_INDEX))
            lengths.append(padding)
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "sample_lengths": tuple(lengths),
    }
