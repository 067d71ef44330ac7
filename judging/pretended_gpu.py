"""A GPU that is not there: kernels are launched for it and compiled, but not run.

Two things are faked.  Tensors in PyTorch's FakeTensorMode have a shape, strides and a CUDA device,
but no memory.  Triton's driver names a target to compile for.
"""

import contextlib
import hashlib
import linecache
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from harness.steps.launches import replaced
from judging.compile_targets import COMPILE_TARGETS, CompiledKernel, widest_access
from judging.judged_file import Stopped, load_function, place_of, reason_of

Make = Callable[..., torch.Tensor]  # a maker of tensors of a shape, in the dtype under test
COMPILED_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One way to call a Function, or any other callable that launches kernels."""

    name: str
    function: type[torch.autograd.Function] | Callable
    arguments: Callable[[Make], tuple]
    needed: int | None = None  # how many arguments, the first ones, need a gradient; None: all
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    targets: str = ""  # a prefix of the targets' names


def gpu_target(name: str) -> GPUTarget:
    target = COMPILE_TARGETS[name]
    return GPUTarget(target.backend, target.arch, target.warp_size)


def stub_driver(target: str) -> SimpleNamespace:
    """Return the part of Triton's driver that a launch touches."""

    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        # module, function, registers and spills (`resources` reads these), most threads
        return 0, 0, 0, 0, 1024

    properties = {"max_shared_mem": COMPILE_TARGETS[target].max_shared}
    return SimpleNamespace(
        utils=SimpleNamespace(
            load_binary=load_binary, get_device_properties=lambda device: properties
        ),
        launcher_cls=lambda src, metadata: lambda *args: None,
        get_current_target=lambda: gpu_target(target),
        # kernels are kept by device: another one for each target
        get_current_device=lambda: list(COMPILE_TARGETS).index(target),
        get_current_stream=lambda device: 0,
    )


class StubContext(SimpleNamespace):
    """The `ctx` of a Function.  Autograd itself would need PyTorch with CUDA."""

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, *arguments) -> None:
        """Nothing depends on it here, nor on the two others."""

    mark_dirty = mark_non_differentiable = set_materialize_grads


@contextlib.contextmanager
def pretend_gpu(target: str):
    """Have CUDA tensors without memory, and compile for the named target.

    The GPU has an H100's multiprocessors and cache.  Triton keeps the target afterwards.
    """
    triton.runtime.driver.set_active(stub_driver(target))
    arch = COMPILE_TARGETS[target].arch  # 103 or "gfx942"
    major, minor = divmod(arch, 10) if isinstance(arch, int) else (9, 4)
    properties = SimpleNamespace(
        multi_processor_count=132, L2_cache_size=50 * 2**20, major=major, minor=minor
    )
    with (
        replaced(
            torch.cuda,
            device=lambda device: contextlib.nullcontext(),
            current_device=lambda: 0,
            get_device_properties=lambda device: properties,
            is_current_stream_capturing=lambda: False,
        ),
        replaced(torch.version, hip=None if isinstance(arch, int) else "0"),
        replaced(torch.Tensor, data_ptr=lambda tensor: 0),  # aligned
        FakeTensorMode(),
        torch.no_grad(),
    ):
        yield


def launch(case: Case, dtype: torch.dtype) -> None:
    """Call as in an evaluation, then forward and backward as in training."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def call() -> None:
        is_function = isinstance(case.function, type)
        (case.function.apply if is_function else case.function)(*arguments)

    def forward_and_backward(function: type, *arguments):
        needs_grad = (any(each is t for t in needed) for each in arguments)
        context = StubContext(needs_input_grad=tuple(needs_grad))
        with replaced(torch, is_grad_enabled=lambda: False):
            outputs = function.forward(context, *arguments)
            gradients = map(torch.empty_like, outputs if isinstance(outputs, tuple) else (outputs,))
            function.backward(context, *gradients)
        return outputs

    arguments = case.arguments(make)
    call()
    tensors = (a for a in arguments[: case.needed] if isinstance(a, torch.Tensor))
    needed = [t for t in tensors if t.is_floating_point()]
    trained = replaced(torch.autograd.Function, apply=classmethod(forward_and_backward))
    if needed:
        with trained, replaced(torch, is_grad_enabled=lambda: True):
            call()


# ---------------------------------------------------------------- does somebody's code compile?

JUDGED_TARGETS = "sm_90", "sm_103"


def compile_errors(call: Callable[[], object]) -> list[str]:
    """Return a sentence for each kernel that `call` launches and Triton does not compile.

    The process must have TRITON_INTERPRET=0.  `call` makes its tensors itself, on "cuda".

    Raises:
        Stopped: no kernel was launched.
        Exception: what `call` raises; code around kernels may read numbers, and here are none.
    """
    run, launched, found = JITFunction.run, set(), {}  # {kernel: (where, why, targets)}

    def noted(kernel: JITFunction, *arguments, **options) -> object:
        name, code = kernel.__name__, kernel.fn.__code__
        launched.add(name)
        try:
            return run(kernel, *arguments, **options)
        except Exception as error:  # MLIR, ptxas and Triton have different ones
            file, line = place_of(error, code.co_filename, code.co_firstlineno)
            where = f"line {line} of {Path(file).name} does not compile"
            why = f"`{linecache.getline(file, line).strip()}`: {reason_of(error)}"
            found.setdefault(name, (where, why, {}))[-1][target] = True

    for target in JUDGED_TARGETS:
        with pretend_gpu(target), replaced(JITFunction, run=noted):
            call()
    if not launched:
        raise Stopped("no Triton kernel was launched")
    return [f"{where} for {' and '.join(of)}: {why}" for where, why, of in found.values()]


def on_pretended_gpu(value: object) -> object:
    """Return a tensor of the same shape, strides and dtype; anything but a tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def compiler_of(file: str, name: str) -> Callable[[dict[str, object]], list[str]]:
    """Return a function for the compile errors of a file's function, given its arguments.

    For `Apart`, with COMPILING as its environment.
    """
    function = load_function(file, name)
    return lambda arguments: compile_errors(
        lambda: function(**{each: on_pretended_gpu(value) for each, value in arguments.items()})
    )


# ---------------------------------------------------------------- what the compiler reports


def resources(binary: bytes, gpu: GPUTarget) -> tuple[int, int]:
    """Return registers and spilled registers of a compiled kernel."""
    if gpu.backend == "hip":
        return amd_note(binary, b".vgpr_count"), amd_note(binary, b".vgpr_spill_count")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage).groups()
    return int(registers), (int(stack) + int(local)) // 4


def amd_note(binary: bytes, key: bytes) -> int:
    """Return a number from the metadata in an AMD binary.

    MessagePack: the key, then one byte below 128, or a marker and 1, 2 or 4 bytes.
    """
    value = binary[binary.index(key) + len(key) :]
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(value[0])
    return value[0] if width is None else int.from_bytes(value[1 : 1 + width], "big")


def compile_all(cases: Sequence[Case], target: str) -> list[CompiledKernel]:
    """Return a row for every different kernel that the cases launch on the named target."""
    rows, compiled = [], []

    def keep(metadata, metadata_group, **rest):
        compiled.append((metadata, metadata_group))

    with pretend_gpu(target), triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = keep  # called once a process for each kernel
        for case in (case for case in cases if target.startswith(case.targets)):
            for dtype_name in (dtype for dtype in case.dtypes if dtype in COMPILED_DTYPES):
                label = f"{case.name}, {dtype_name}"
                error = None
                try:
                    launch(case, COMPILED_DTYPES[dtype_name])
                except (TritonError, RuntimeError) as failure:  # MLIR's own are RuntimeErrors
                    error = f"{type(failure).__name__}: {str(failure).strip()}"
                rows += [kernel_row(*kernel, label, target) for kernel in compiled]
                compiled.clear()
                if error:
                    rows.append(CompiledKernel("(none)", label, target, error=error))
    return rows


def kernel_row(metadata: dict, files: dict[str, str], label: str, target: str) -> CompiledKernel:
    """Return the row of a kernel from what Triton says of it, and from the files that it wrote."""
    gpu, name = gpu_target(target), metadata["name"]
    code = {Path(file).suffix: Path(path) for file, path in files.items()}
    binary = code[".hsaco" if gpu.backend == "hip" else ".cubin"].read_bytes()
    widest = widest_access(code[".ptx"].read_text()) if ".ptx" in code else None
    digest = hashlib.sha256(binary).hexdigest()
    found = *resources(binary, gpu), metadata["shared"], widest
    return CompiledKernel(name, label, target, *found, binary=digest)
