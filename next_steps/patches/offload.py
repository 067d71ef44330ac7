"""What a layer keeps for the backward waits in the host's memory: `--offload` (docs/recompute.md).

The GPU makes both copies beside its computing, on a stream of their own:

    forward    layer 1   layer 2   layer 3           backward   layer 3   layer 2   layer 1
    stream        out 1     out 2     out 3          stream  in 3    in 2      in 1

autograd gets, for each tensor that it wants to keep, a function that brings the tensor back from a
copy of its storage.  The first tensor of a layer that the backward asks for brings all of its
layer, and starts the copies of the layer before.

The host's memory is pinned, or a copy would need the processor.  PyTorch rounds such blocks up to
powers of two and keeps them for the next step.  Parameters, what all layers share (the rotary
embedding's angles), and small tensors stay.
"""

import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from harness.cli.command_line import HostMemoryError, ran_out_of_memory
from harness.cli.device import DEVICE, HAS_GPU

SMALL = 2**20 if HAS_GPU else 256  # a tensor of fewer bytes is not worth a copy
OF_THE_HOST = 0.9  # the share of the host's memory that may be taken, also by checkpoints' copies
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"  # a container's


def no_room(n_bytes: int) -> HostMemoryError:
    """Return the error of a host that has less memory than so many bytes."""
    return HostMemoryError(
        f"--offload needs {n_bytes / 1e9:,.1f} GB of the host's memory and more, and may take "
        f"{OF_THE_HOST * host_memory() / 1e9:,.1f}: lower --seq-len, or leave --offload out"
    )


def host_memory() -> int:
    """Return the bytes of the host's memory; in a container, the container's limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, LIMITS):
        said = path.read_text().strip() if path.exists() else "max"
        if said.isdigit():
            found.append(int(said))
    return min(found)


def pinned(n_bytes: int) -> torch.Tensor:
    """Return (n_bytes,) uint8 in the host's memory that a GPU can copy by itself."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=HAS_GPU)


def transfer(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class Offloader:
    """The stream of the copies and the account of the host's memory, for all layers of a model."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.streams = torch.get_device_module(DEVICE)
        self.stream = self.streams.Stream()
        self.resident = {
            t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())
        }
        self.n_layers = len(model.model.layers)
        self.on_meta = next(model.parameters()).is_meta  # an estimate: nothing is copied
        self.n_bytes, self.most_bytes = 0, 0  # in the host's memory: now, and the most so far
        self.leaving: list[torch.Tensor] = []  # the last layer's, until they are copied
        self.left = None  # the event after those copies
        self.layer: Layer | None = None  # the last one that ran

    def __getstate__(self) -> dict:
        """Return what a copy has until its model runs: a stream is not copied."""
        return {"model": self.model}

    def take(self, n_bytes: int) -> torch.Tensor:
        """Return pinned memory, or raise HostMemoryError if the host has less."""
        n_bytes_rounded = 1 << (n_bytes - 1).bit_length()
        self.n_bytes += n_bytes_rounded
        self.most_bytes = max(self.most_bytes, self.n_bytes)
        if self.on_meta:
            return torch.empty(n_bytes, dtype=torch.uint8)
        if self.n_bytes > OF_THE_HOST * host_memory():
            raise no_room(self.n_bytes)
        try:
            memory = pinned(n_bytes)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            raise no_room(self.n_bytes) from error
        weakref.finalize(memory, self.give_back, n_bytes_rounded).atexit = False
        return memory

    def give_back(self, n_bytes: int) -> None:
        self.n_bytes -= n_bytes

    def copying(self):
        """Copies in this context start after what the GPU was told until now."""
        self.stream.wait_stream(self.streams.current_stream())
        return self.streams.stream(self.stream)

    def wait(self, event) -> None:
        self.streams.current_stream().wait_event(event)

    def begin(self, number: int, shared: object) -> None:
        """Begin a layer's forward; `shared` are the tensors that it got beside its input."""
        if not hasattr(self, "stream"):  # a copy
            self.__init__(self.model)
        stay = {
            t.untyped_storage()._cdata for t in tree_leaves(shared) if isinstance(t, torch.Tensor)
        }
        self.layer = Layer(self, self.layer if number else None, stay | self.resident)

    def end(self, number: int) -> None:
        """End a layer's forward: wait for the layer before's copies; the last for its own too."""
        before, self.leaving, self.layer.leaving = self.leaving, self.layer.leaving, []
        if before:
            self.wait(self.left)
        before.clear()  # only now may the memory be used again
        self.left = self.stream.record_event()
        if number == self.n_layers - 1:
            self.wait(self.left)
            self.leaving.clear()


class Layer:
    """What one forward of one layer keeps."""

    def __init__(self, offloader: Offloader, before: "Layer | None", stay: set[int]):
        self.offloader, self.before, self.stay = offloader, before, stay
        self.copies = weakref.WeakValueDictionary()  # by storage and version
        self.leaving: list[torch.Tensor] = []

    def pack(self, t: torch.Tensor) -> torch.Tensor | Callable:
        storage = t.untyped_storage()
        if storage._cdata in self.stay or storage.nbytes() < SMALL:
            return t
        key = StorageWeakRef(storage), t._version
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = Copy(self, storage)
        copy.users += 1
        geometry = t.storage_offset(), t.size(), t.stride()
        return functools.partial(copy.tensor, t.dtype, *geometry)

    def fetch(self) -> None:
        """Start, once, the way back of all that somebody may still ask for, the last copy first."""
        for copy in reversed(list(self.copies.values())):
            copy.fetch()
        self.copies.clear()


class Copy:
    """A storage's bytes in the host's memory; from `fetch` to the last user on the GPU too."""

    def __init__(self, layer: Layer, storage: torch.UntypedStorage):
        self.layer, self.device, self.users = layer, storage.device, 0
        there = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.host = layer.offloader.take(storage.nbytes())  # (bytes,) uint8
        self.there, self.arrived, self.waiting = None, None, 0
        with layer.offloader.copying():
            transfer(self.host, there)
        layer.leaving.append(there)

    def fetch(self) -> None:
        offloader = self.layer.offloader
        n_bytes = self.host.numel()
        self.there = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        with offloader.copying():
            transfer(self.there, self.host)
        self.arrived, self.waiting = offloader.stream.record_event(), self.users

    def tensor(self, dtype: torch.dtype, *geometry) -> torch.Tensor:
        """Return a tensor on the GPU that lies in the storage as the packed one did.

        When all users have theirs, the copy on the GPU is forgotten.
        """
        self.layer.fetch()
        if self.layer.before is not None:
            self.layer.before.fetch()
        if self.there is None:  # a second backward
            self.fetch()
        self.layer.offloader.wait(self.arrived)
        storage, self.waiting = self.there.untyped_storage(), self.waiting - 1
        if self.waiting == 0:
            self.there = None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *geometry)
