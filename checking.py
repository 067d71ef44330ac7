"""The one comparator that every test uses.

A kernel is judged against float64, computed from the same rounded inputs, and
it may be at most twice as wrong as eager PyTorch in the kernel's own dtype:

    error(t)  = ||t - ref64|| / ||ref64||
    allowed   = 2 * error(eager) + floor
    passed    = error(kernel) <= allowed

The floor covers the case where eager happens to be exact.  There is no `atol`
to choose, so there is none to loosen when a kernel is wrong.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

FLOOR = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}

DTYPE_NAME = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; 0.0 when both are zero, inf when only ref is.

    NaN anywhere gives NaN, which no allowance accepts.
    """
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    distance, scale = (out - ref).norm().item(), ref.norm().item()
    if scale == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / scale


@dataclass(frozen=True)
class Check:
    """One comparison: what was measured, what was allowed, and the verdict."""

    name: str
    error: float  # ||out - ref64|| / ||ref64||
    allowed: float
    max_diff: float  # max |out - ref64|

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN compares false: NaN never passes

    def __str__(self) -> str:
        verdict = "PASSED" if self.passed else "FAILED"
        return (
            f"{self.name} — max diff: {self.max_diff:.2e}  "
            f"error: {self.error:.2e}  allowed: {self.allowed:.2e}  {verdict}"
        )


def compare(
    name: str,
    out: torch.Tensor | None,
    ref64: torch.Tensor,
    eager: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> Check:
    """Compare a kernel's output with float64, allowing twice eager's own error.

    Args:
        name: what is being compared; it begins the printed line.
        out: the kernel's output or gradient, any dtype.
        ref64: the same quantity computed in float64 from the same inputs.
        eager: the same quantity from eager PyTorch in the kernel's dtype.
        dtype: whose floor applies; `eager.dtype` unless told.

    Raises:
        AssertionError: `out` is None, or its shape or dtype is not eager's.
    """
    assert out is not None, f"{name}: there is no output (None) to compare"
    assert out.shape == eager.shape == ref64.shape, (
        f"{name}: shape {tuple(out.shape)}, eager {tuple(eager.shape)}, ref64 {tuple(ref64.shape)}"
    )
    assert out.dtype == eager.dtype, f"{name}: dtype {out.dtype}, eager gives {eager.dtype}"
    assert ref64.dtype == torch.float64, f"{name}: the reference is {ref64.dtype}, not float64"
    allowed = 2.0 * relative_error(eager, ref64) + FLOOR[dtype or eager.dtype]
    difference = out.detach().double().cpu() - ref64.detach().cpu()
    max_diff = difference.abs().max().item() if difference.numel() else 0.0
    return Check(name, relative_error(out, ref64), allowed, max_diff)


def assert_all_passed(checks: list[Check]) -> None:
    """For pytest: fail with every line that is over its allowance."""
    assert checks, "no comparison was made"
    failed = [str(check) for check in checks if not check.passed]
    assert not failed, "\n" + "\n".join(failed)


def print_checks(checks: list[Check], indent: str = "  ") -> bool:
    """Print one line per check; True when all passed."""
    for check in checks:
        print(indent + str(check))
    return all(check.passed for check in checks)


def print_loss(check: Check, reference: torch.Tensor, custom: torch.Tensor) -> bool:
    """Print the line of a check of two scalars, with their values; True when it passed."""
    values = f"ref: {reference.item():.6f}  custom: {custom.item():.6f}  diff: {check.max_diff:.2e}"
    print(f"  {check.name} — {values}  {'PASSED' if check.passed else 'FAILED'}")
    return check.passed


# ---------------------------------------------------------------- circumstances in which a test runs


@pytest.fixture(autouse=True)
def same_random_numbers():
    """What a test draws does not depend on the tests before it: which those are changes where several run at a time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unused_memory_returned():
    """Several processes test on one GPU: none keeps what its largest test took."""
    yield
    if HAS_GPU and torch.cuda.memory_reserved() > 2**30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def poison_new_tensors():
    """Make torch.empty and its kin return NaN (and huge integers), so that what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[list[tuple[int, ...]]]:
    """Fill what new_empty returns with NaN, so that nothing a kernel forgets to write can look right.

    Yields the list of the shapes that were allocated meanwhile.
    """
    new_empty, shapes = torch.Tensor.new_empty, []

    def nan_filled(*args, **kwargs):
        out = new_empty(*args, **kwargs).fill_(math.nan)
        if out.numel() > 0:  # the interpreter allocates empty ones of its own
            shapes.append(tuple(out.shape))
        return out

    with mock.patch.object(torch.Tensor, "new_empty", nan_filled):
        yield shapes


def captured(step: Callable[[], object], steps_before: int = 1) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of step(), and what step() returned while it was recorded.

    The steps before, on a stream of their own, compile the kernels and make what a capture must not.
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


@pytest.fixture
def compiled_kernels(monkeypatch) -> list[str]:
    """The kernels that Triton compiles from now on; clear it where those do not count."""
    from triton import knobs  # whoever uses this has imported a kernel file, which decides how Triton runs

    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **details: compiled.append(details["repr"]))
    return compiled


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """An error wherever the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def far_apart(tmp_path):
    """far_apart(values, dim=0): a bf16 view of them, 2**30 elements apart in that dimension, the third beyond int32.

    The memory is a file of 8 GB, nearly all of it a hole that takes no space.  The view begins in its middle, so that
    an offset that wraps to -2**31 reads the zeros at the file's beginning, where else it would end the process.
    """
    if HAS_GPU:
        pytest.skip("on a GPU this is done in its memory, by the test of offsets beyond int32")
    elements, file = 2**32 + 2**12, tmp_path / "hole"

    def place(values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        with open(file, "wb") as empty:
            empty.truncate(2 * elements)
        if file.stat().st_blocks * 512 > 2**20:
            pytest.skip("this file system cannot leave a hole in a file")
        memory = torch.from_file(str(file), shared=True, size=elements, dtype=torch.bfloat16)
        strides = [2**30 if i == dim else stride for i, stride in enumerate(values.contiguous().stride())]
        return memory.as_strided(values.shape, strides, 2**31).copy_(values)

    yield place
    file.unlink(missing_ok=True)


@pytest.fixture
def as_dtensor(tmp_path):
    """as_dtensor(t): t as a DTensor, in a group of this one process."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(DEVICE, (1,))
    yield lambda t: DTensor.from_local(t, mesh, [Replicate()], run_check=False)
    torch.distributed.destroy_process_group()


@pytest.fixture
def compiler_pads_rows():
    """torch.compile from anew; it leaves gaps between long rows inside of a graph, on a CPU too."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(disable_padding_cpu=False, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


pads_rows = pytest.mark.usefixtures("compiler_pads_rows")
COMPILED_DTYPE = torch.bfloat16 if HAS_GPU else torch.float32  # a CPU multiplies matrices of bf16 in its own way


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """What has been compiled must do for other sizes too: to compile it once more is an error."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
