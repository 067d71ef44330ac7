"""What tells one model's frozen weights from another's, in a line that a file can hold.

Each number's bits are multiplied with an odd number that belongs to its place, and added up modulo
2**64.  To change one number always changes the sum, to exchange two nearly always.  The sum is the
same wherever the parts of a tensor are: several processes add up theirs.  A GPU sums 16 GB in less
than a second, where a cryptographic digest would need them in the host's memory.
"""

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by an element's bytes
# elements at a time, whose products take 8 bytes each: on a CPU so few that its cache holds them
CHUNK = {"cuda": 2**24, "cpu": 2**15}
FACTOR = 0x1E3779B97F4A7C15  # large and odd: its multiples modulo 2**64 differ in all their bits


def frozen_digest(model: torch.nn.Module) -> str | None:
    """Of all frozen parameters and saved buffers, 4-bit weights among them; None: none is frozen.

    All processes call it, and all get the same.  So does a model with adapters beside fewer
    projections.  Buffers that are not saved are computed, on another machine to another last bit.
    """
    tensors = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    if not tensors:
        return None
    saved = model.state_dict().keys()
    tensors += [(name, t) for name, t in model.named_buffers() if name in saved]
    sums = torch.stack([checksum(t) for _, t in tensors])  # (n,) int64
    parted = torch.tensor([isinstance(t, DTensor) for _, t in tensors], device=sums.device)
    if parted.any():
        whole = sums.where(parted, 0)
        dist.all_reduce(whole)
        sums = whole.where(parted, sums)
    digest = hashlib.sha256()
    for (name, t), each in zip(tensors, sums.tolist()):
        name = name.replace(".base_layer", "")  # so peft calls a weight that has an adapter
        digest.update(f"{name} {tuple(t.shape)} {t.dtype} {each}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def checksum(t: torch.Tensor) -> torch.Tensor:
    """() int64: the sum over what this process holds of it."""
    first = 0  # the place of this process's first number
    if isinstance(t, DTensor):
        _, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        t, first = t.to_local(), offsets[0] * t.shape[1:].numel()
    bits = t.detach().contiguous().view(-1).view(BITS[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for part in bits.split(CHUNK[t.device.type]):
        places = torch.arange(first, first + len(part), device=t.device)
        total += (part.to(torch.int64) * (2 * places * FACTOR + 1)).sum()
        first += len(part)
    return total
