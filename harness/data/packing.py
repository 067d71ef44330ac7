"""Packing: several samples in one sequence, each trained on as if it were alone.

    sequence   | sample 7 | sample 2          | sample 9     | padding |
    positions  | 0 1 2 .. | 0 1 2 ..          | 0 1 2 ..     | 0 1 2 ..|
    attention  within a sample; padding is a sample of its own, which nobody learns

Without packing each sample has a row of its own, as long as the batch's longest.  The rest of the
row is computed for nothing.

First-fit: samples are drawn in random order, and each goes into the first open sequence that has
room for it.  If none has, a new sequence is opened.  To sort the samples first would leave less
padding, but samples of like lengths would meet in each sequence, and the order would not be random.
To fill one sequence only, until a sample does not fit, leaves several times as much padding.
"""

from collections.abc import Iterable

import numpy as np
import torch

from harness.data.samples import Samples
from harness.model.architecture import IGNORE_INDEX

OPEN = 64  # sequences in which room is searched; the oldest, which are the fullest, are closed


def first_fit(lengths: np.ndarray, order: Iterable[int], size: int, n: int) -> list[list[int]]:
    """Return up to n sequences of at most `size` tokens, each the indices of its samples.

    The first sample for which there is no room ends the search.

    Args:
        lengths: (N,) of the samples, each at most `size`.
        order: the samples' indices, as they are drawn; an index may come again.
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


def lay_out(samples: Samples, sequences: list[list[int]], size: int) -> dict:
    """Return the fields of a Batch of `first_fit`'s sequences, one after the other in one row."""
    ids, labels, lengths = [], [], []
    for indices in sequences:
        rows = [samples[i] for i in indices]
        if padding := size - sum(len(tokens) for tokens, _ in rows):
            unused = torch.zeros(padding, dtype=torch.int64)
            rows.append((unused, unused + IGNORE_INDEX))
        for tokens, wanted in rows:
            wanted[0] = IGNORE_INDEX  # nothing is before the first one, so it is no target
            ids.append(tokens)
            labels.append(wanted)
            lengths.append(len(tokens))
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(n, dtype=torch.int64) for n in lengths])[None],
        "cu_seq_lens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "sample_lengths": tuple(lengths),
    }
