"""Circumstances in which a test runs, as fixtures and context managers.

tests/conftest.py hands the fixtures to all tests; tests/mutation_test.py loads this file itself.
"""

import contextlib
import functools
import gc
import importlib
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from filelock import FileLock  # PyTorch needs it too

from harness.cli.device import DEVICE, HAS_GPU

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
needs_two_gpus = pytest.mark.several_gpus(2)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """What a test draws does not depend on the tests before it: which those are changes where
    several run at a time.
    """
    torch.manual_seed(0)


def return_unused_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def unused_memory_returned():
    """Several processes test on one GPU: none keeps what its largest test took."""
    yield
    if HAS_GPU and torch.cuda.memory_reserved() > 2**30:
        return_unused_memory()


def shared_folder(tmp_path_factory) -> Path:
    """The temporary folder that all workers of pytest-xdist have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def gpu_memory(tmp_path_factory):
    """gpu_memory(gib) before a test takes so much: one test of a GPU has it at a time.

    The test is skipped if less is free even so.  Without a GPU nothing happens.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    lock = FileLock(shared_folder(tmp_path_factory) / f"memory_of_gpu_{gpu}.lock")

    def take(gib: float) -> None:
        if not HAS_GPU:
            return
        lock.acquire()
        return_unused_memory()
        if torch.cuda.mem_get_info()[0] < gib * 2**30:
            pytest.skip(f"needs {gib:.0f} GiB of free GPU memory")

    yield take
    if lock.is_locked:
        return_unused_memory()
        lock.release()


def is_freed(p: torch.Tensor) -> bool:
    """Has nobody a gradient of p?  In place of one may lie what says that it was used."""
    return type(p.grad).__name__ in ("NoneType", "UsedGradient")


@pytest.fixture
def poison_new_tensors():
    """judging's poisoned_memory, for a whole test."""
    from judging import circumstances  # not for tests that need no kernel

    with circumstances.poisoned_memory():
        yield


@pytest.fixture
def fp8_references(monkeypatch):
    """Let references round in the layers, without a GPU: Triton's interpreter is slow."""
    if not HAS_GPU:
        from next_steps.layers import fp8_layer, frozen_fp8  # of this test, as below
        from tests.fp8_layer_test import REFERENCES

        for name, reference in REFERENCES.items():
            monkeypatch.setattr(fp8_layer, name, reference)
            if hasattr(frozen_fp8, name):
                monkeypatch.setattr(frozen_fp8, name, reference)


@pytest.fixture
def small_tiles(monkeypatch):
    """Let small tensors take several tiles too."""
    from tests import tiles  # of the kernels of this test: mutation_test exchanges them

    tiles.small_tiles(monkeypatch)


class CountedKernel:
    def __init__(self, kernel, name, counter):
        self.kernel, self.name, self.counter = kernel, name, counter

    def __getitem__(self, grid):
        self.counter[self.name] += 1
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch) -> Counter:
    """How often each kernel of a model was launched, by its name without `_kernel`."""
    counter = Counter()
    for module, names in {
        "rmsnorm_kernel": ["rmsnorm_fwd", "rmsnorm_bwd"],
        "cross_entropy_kernel": ["cross_entropy_fwd", "cross_entropy_inplace"],
        "next_steps.lessons.linear_cross_entropy_kernel": ["scale"],
        "next_steps.lessons.swiglu_kernel": ["swiglu_fwd", "swiglu_bwd"],
        "next_steps.lessons.rope_kernel": ["rope"],
        "next_steps.lessons.qk_norm_rope_kernel": ["qk_norm_rope_fwd", "qk_norm_rope_bwd"],
        "next_steps.lessons.reverse_kl_kernel": ["reverse_kl_fwd"],
        "next_steps.lessons.adamw_kernel": ["adamw"],
    }.items():
        for name in names:
            place = f"{module}._{name}_kernel"
            kernel = getattr(importlib.import_module(module), f"_{name}_kernel")
            monkeypatch.setattr(place, CountedKernel(kernel, name, counter))
    return counter


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[list[tuple[int, ...]]]:
    """Fill what new_empty and empty_like return with NaN, so that nothing a kernel forgets to
    write can look right.

    Yields the list of the shapes that were allocated meanwhile.
    """
    shapes = []

    def nan_filled(allocate):
        def allocate_and_fill(*args, **kwargs):
            out = allocate(*args, **kwargs).fill_(math.nan)
            if out.numel() > 0:  # the interpreter allocates empty ones of its own
                shapes.append(tuple(out.shape))
            return out

        return allocate_and_fill

    with (
        mock.patch.object(torch.Tensor, "new_empty", nan_filled(torch.Tensor.new_empty)),
        mock.patch.object(torch, "empty_like", nan_filled(torch.empty_like)),
    ):
        yield shapes


@pytest.fixture
def compiled_kernels(monkeypatch) -> list[str]:
    """The kernels that Triton compiles from now on; clear it where those do not count."""
    from triton import knobs

    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **details: compiled.append(details["repr"])
    )
    return compiled


@pytest.fixture
def pyplot(monkeypatch):
    """matplotlib's, whose figures stay open until the test ends."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        yield pyplot
    pyplot.close("all")


@pytest.fixture
def far_apart(gpu_memory):
    """judging's far_apart, where the test may have a GPU's memory."""
    from judging import contract, layouts  # of this test, as above

    gpu_memory(layouts.FAR_GIB)
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(layouts.far_apart())
        except contract.NotTried as why:
            pytest.skip(str(why))
        yield place


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 64 KB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be made here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def as_dtensor(tmp_path):
    """as_dtensor(t, placement): t as a DTensor, in a group of this one process."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(DEVICE, (1,))
    yield lambda t, placement=None: DTensor.from_local(
        t, mesh, [placement or Replicate()], run_check=False
    )
    torch.distributed.destroy_process_group()


@pytest.fixture
def compiler_pads_rows():
    """torch.compile from anew; it leaves gaps between long rows inside of a graph, on a CPU too."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(disable_padding_cpu=False, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def pads_rows(test):
    """A kernel's own test of compiled graphs.

    A reader runs one graph of each function: tests/contracts_compile_test.py.
    """
    return pytest.mark.exhaustive(pytest.mark.usefixtures("compiler_pads_rows")(test))


COMPILED_DTYPE = (
    torch.bfloat16 if HAS_GPU else torch.float32
)  # a CPU multiplies matrices of bf16 in its own way


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """What has been compiled must do for other sizes too: to compile it once more is an error."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture(scope="session")
def saved_tiny(tmp_path_factory) -> Path:
    """A good saved model; tests damage copies of it."""
    from harness.model import architecture

    folder = tmp_path_factory.mktemp("saved_tiny")
    model = architecture.build_model(architecture.tiny_config(), torch.float32, "cpu")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved_tiny, tmp_path) -> Path:
    return Path(shutil.copytree(saved_tiny, tmp_path / "checkpoint"))


@pytest.fixture
def small_model(monkeypatch):
    """tiny, but of one layer: Triton's interpreter is slow."""
    from tests.small_workloads import smaller_config  # with transformers, which not all tests need

    monkeypatch.setattr("harness.model.architecture.tiny_config", smaller_config)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Tokens are not kept where those of the user's own runs are."""
    monkeypatch.setattr("harness.data.token_cache.folder", lambda: tmp_path / "token_cache")


@pytest.fixture
def flashoptim(monkeypatch) -> list:
    """FlashOptim as it computes without a GPU, or a stand-in if it is not installed; its calls."""
    calls, adamw, release = [], torch.optim.AdamW, lambda model, optimizer: None
    with contextlib.suppress(ImportError):
        package = importlib.import_module("flashoptim")
        plain = {"quantize": False, "fused": False, "master_weight_bits": None}
        adamw, release = (
            functools.partial(package.FlashAdamW, **plain),
            package.enable_gradient_release,
        )

    def make(params, lr, master_weight_bits):
        calls.append(master_weight_bits)
        return adamw(params, lr=lr)

    def step_in_the_backward(model, optimizer):
        calls.append("released")
        return release(model, optimizer)

    stands = SimpleNamespace(FlashAdamW=make, enable_gradient_release=step_in_the_backward)
    monkeypatch.setitem(sys.modules, "flashoptim", stands)
    monkeypatch.setattr("next_steps.finetuning.opponent_models.HAS_GPU", True)
    return calls
