"""Circumstances in which a contract is asked: memory that nobody wrote, defaults, what is kept."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

OTHER_DEFAULTS = torch.bfloat16, torch.float16, torch.float64


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch.empty and its kin return NaN (and huge integers), so that what a kernel forgets to
    write is seen.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            # NumPy's, of what masked lanes compute; PyTorch's, of sums in no certain order
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors have this dtype, as scripts do that set it for the whole process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class saved_tensors(torch.autograd.graph.saved_tensors_hooks):
    """A context that yields the list of the tensors that are kept for a backward meanwhile."""

    def __init__(self):
        self.saved = []
        super().__init__(lambda t: self.saved.append(t) or t, lambda t: t)

    def __enter__(self):
        super().__enter__()
        return self.saved


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """An error wherever the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(
    step: Callable[[], object], steps_before: int = 1
) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of step(), and what step() returned while it was recorded.

    The steps before, on a stream of their own, compile the kernels and make what a capture must
    not.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps_before):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
