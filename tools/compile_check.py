"""Compile every kernel for every supported GPU, on a machine that needs none.

    python -m tools.compile_check                      # sm_90, sm_100, sm_103 (GB300), sm_120, gfx942
    python -m tools.compile_check --targets sm_103

The kernels are reached through the autograd Functions that users call, at LLaMA 3.1 8B's shapes, so block
sizes, number of warps and specialization are those of a real run.  Two things are faked: the tensors (in
PyTorch's FakeTensorMode they have a shape, strides and a CUDA device, but no memory) and Triton's driver (it
names a target to compile for, and keeps the binary instead of loading it).

Exit code 1 if a kernel does not compile, needs more shared memory than the target has, or spills: a spilled
value did not fit in the registers and goes through memory, which is what a fused kernel is there to avoid.
(ALLOWED_SPILLS names the exceptions: two registers on targets that no figure of this project comes from.)
"""

# first: importing PyTorch takes seconds
from harness import quiet_interrupt  # noqa: F401  # isort: skip

import os

if __name__ == "__main__":
    # Before PyTorch and Triton are imported: compile, do not interpret, and leave a GPU alone.
    os.environ.update(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")

import argparse
import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cross_entropy_kernel import FusedCrossEntropyFunction
from harness import measure
from next_steps.adamw_kernel import TritonAdamW
from next_steps.linear_cross_entropy_kernel import LinearCrossEntropyFunction
from next_steps.llama_mlp import SwiGLUMLPFunction
from next_steps.reverse_kl_kernel import TritonReverseKLFunction
from next_steps.rope_kernel import TritonRoPEFunction
from next_steps.swiglu_kernel import TritonSwiGLUFunction
from rmsnorm_kernel import TritonRMSNormFunction

# after the kernels, which decide how Triton will run
import triton  # isort: skip
from triton.backends import backends  # isort: skip
from triton.backends.compiler import GPUTarget  # isort: skip
from triton.errors import TritonError  # isort: skip

B, T, H, V = 2, 2048, 4096, 128_256
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One way to call a Function, or any other callable that launches kernels.

    `arguments` gets a maker of tensors in the dtype under test.
    """

    name: str
    function: type[torch.autograd.Function] | Callable[..., None]
    arguments: Callable[[Callable[..., torch.Tensor]], tuple]
    frozen: tuple[int, ...] = ()  # positions of arguments that need no gradient
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    targets: str = ""  # a prefix of the targets' names


def rmsnorm_arguments(hidden: int, affine: bool = True) -> Callable[[Callable[..., torch.Tensor]], tuple]:
    return lambda t: (t(B, T, hidden), t(hidden) if affine else None, 1e-5)


def cross_entropy_arguments(
    reduction: str, vocab: int = V, inplace: bool = False
) -> Callable[[Callable[..., torch.Tensor]], tuple]:
    return lambda t: (t(B, T, vocab), torch.empty(B, T, dtype=torch.int64, device="cuda"), -100, reduction, inplace)


def linear_cross_entropy_arguments(reduction: str, vocab: int = V) -> Callable[[Callable[..., torch.Tensor]], tuple]:
    def arguments(t: Callable[..., torch.Tensor]) -> tuple:
        targets = torch.empty(B, T, dtype=torch.int64, device="cuda")
        return t(B, T, H), t(vocab, H), targets, -100, reduction, None, None, True

    return arguments


INTERMEDIATE = 14_336


def swiglu_halves(t: Callable[..., torch.Tensor]) -> tuple:
    return *t(B, T, 2 * INTERMEDIATE).chunk(2, -1), False


def mlp_arguments(t: Callable[..., torch.Tensor]) -> tuple:
    return t(B, T, H), t(INTERMEDIATE, H), t(INTERMEDIATE, H), t(H, INTERMEDIATE)


def adamw_step(p: torch.Tensor, grad: torch.Tensor, options: dict, tensors: dict) -> None:
    optimizer = TritonAdamW([p], **options)
    optimizer.param_groups[0].update(tensors)  # a constructor would look at their numbers
    p.grad = grad
    optimizer.step()


def adamw_arguments(**options) -> Callable[[Callable[..., torch.Tensor]], tuple]:
    return lambda t: (t(H, H), t(H, H), options, {})


def adamw_with_tensors(*names: str) -> Callable[[Callable[..., torch.Tensor]], tuple]:
    def arguments(t: Callable[..., torch.Tensor]) -> tuple:
        lr, beta1, beta2 = (torch.empty((), device="cuda") for _ in range(3))
        settings = {"lr": lr, "betas": (beta1, beta2)}
        return t(H, H), t(H, H), {}, {name: settings[name] for name in names}

    return arguments


def rope_arguments(n_heads: int = 32, n_kv_heads: int = 8, head_dim: int = 128) -> Callable[..., tuple]:
    def arguments(t: Callable[..., torch.Tensor]) -> tuple:
        q, k = (t(B, T, n, head_dim).transpose(1, 2) for n in (n_heads, n_kv_heads))
        return q, k, t(1, T, head_dim), t(1, T, head_dim)

    return arguments


def reverse_kl_arguments(
    reduction: str, vocab: int, masked: bool = False
) -> Callable[[Callable[..., torch.Tensor]], tuple]:
    def arguments(t: Callable[..., torch.Tensor]) -> tuple:
        mask = torch.empty(B, T, dtype=torch.bool, device="cuda") if masked else None
        return t(B, T, vocab), t(B, T, vocab), mask, 1.0, reduction, None, True

    return arguments


# 32-bit registers per thread, as Triton 3.7.1's assembler leaves them; for sm_90 and sm_103 there are none.
ALLOWED_SPILLS = {"sm_100": 2, "sm_120": 2}

# A new kernel file joins the check with a line here.  A kernel that two cases share is listed at the first.
CASES = [
    Case("RMSNorm", TritonRMSNormFunction, rmsnorm_arguments(H)),
    Case("RMSNorm, frozen weight", TritonRMSNormFunction, rmsnorm_arguments(H), frozen=(1,)),
    *(Case(f"RMSNorm, H = {h:,}", TritonRMSNormFunction, rmsnorm_arguments(h), targets="sm_") for h in (2048, 8192)),
    Case("RMSNorm, H = 16,384", TritonRMSNormFunction, rmsnorm_arguments(16_384), dtypes=("bf16",), targets="sm_"),
    *(
        Case(f"RMSNorm without weight, H = {h:,}", TritonRMSNormFunction, rmsnorm_arguments(h, affine=False))
        for h in (2048, H, 8192, 16_384)
    ),
    Case("cross-entropy, mean", FusedCrossEntropyFunction, cross_entropy_arguments("mean")),
    Case("cross-entropy, sum", FusedCrossEntropyFunction, cross_entropy_arguments("sum")),
    Case("cross-entropy, none", FusedCrossEntropyFunction, cross_entropy_arguments("none")),
    *(
        Case(f"cross-entropy in place, V = {v:,}", FusedCrossEntropyFunction, cross_entropy_arguments("mean", v, True))
        for v in (V, 50_257, 32_000)
    ),
    Case("linear + cross-entropy, mean", LinearCrossEntropyFunction, linear_cross_entropy_arguments("mean")),
    Case("linear + cross-entropy, none", LinearCrossEntropyFunction, linear_cross_entropy_arguments("none")),
    Case("linear + CE, V = 50,257", LinearCrossEntropyFunction, linear_cross_entropy_arguments("mean", 50_257)),
    Case("SwiGLU", TritonSwiGLUFunction, lambda t: (t(B, T, INTERMEDIATE), t(B, T, INTERMEDIATE), False)),
    Case("SwiGLU, halves of one tensor", TritonSwiGLUFunction, swiglu_halves),
    Case("SwiGLU MLP", SwiGLUMLPFunction, mlp_arguments),
    Case("AdamW", adamw_step, adamw_arguments()),
    Case("AdamW, stochastic", adamw_step, adamw_arguments(stochastic_rounding=True), dtypes=("bf16",)),
    *(
        Case(f"AdamW, fp32 moments, stochastic: {rounding}", adamw_step, arguments, dtypes=("bf16",))
        for rounding in (False, True)
        for arguments in [adamw_arguments(moments_dtype=torch.float32, stochastic_rounding=rounding)]
    ),
    Case("AdamW, maximize", adamw_step, adamw_arguments(maximize=True)),
    Case("AdamW, lr in a tensor", adamw_step, adamw_with_tensors("lr")),
    Case("AdamW, lr and betas in tensors", adamw_step, adamw_with_tensors("lr", "betas")),
    Case(
        "AdamW, size not divisible by 16",
        adamw_step,
        lambda t: (t(H + 1), t(H + 1), {"stochastic_rounding": True}, {}),
    ),
    Case("RoPE", TritonRoPEFunction, rope_arguments(), frozen=(2, 3)),
    *(
        Case(f"reverse KL, {name}, V = 131,072", TritonReverseKLFunction, arguments, frozen=(1,))
        for name, arguments in (
            ("batchmean", reverse_kl_arguments("batchmean", 131_072)),
            ("batchmean of a mask", reverse_kl_arguments("batchmean", 131_072, masked=True)),
            ("none", reverse_kl_arguments("none", 131_072)),
        )
    ),
    *(
        Case(f"reverse KL, {how}, V = 50,257", TritonReverseKLFunction, reverse_kl_arguments(how, 50_257), frozen=(1,))
        for how in ("sum", "none")
    ),
    *(
        Case(f"RoPE, {n} and {n_kv} heads of {d}", TritonRoPEFunction, rope_arguments(n, n_kv, d), frozen=(2, 3))
        for n, n_kv, d in ((32, 32, 128), (128, 8, 128), (32, 32, 80))
    ),
]


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    max_shared: int  # bytes of shared memory that one program may use, by the vendor's documentation


TARGETS = {
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 << 10),
    "sm_103": Target(GPUTarget("cuda", 103, 32), 227 << 10),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10),
}


@dataclass(frozen=True)
class Row:
    """One compiled kernel, or (with `error`) a case that did not compile."""

    kernel: str
    case: str
    target: str
    registers: int | None = None  # per thread
    spills: int | None = None  # 32-bit registers per thread that live in memory
    shared: int | None = None  # bytes per program
    error: str | None = None


# ---------------------------------------------------------------- the fakes


class StubDriver:
    """The part of Triton's driver that a launch touches.  Each target is a device of its own number, because
    Triton keeps the kernels it has compiled in a table per device number."""

    def __init__(self, names: list[str]):
        self.names, self.device = names, 0
        self.loaded: list[tuple[str, bytes, int]] = []
        self.utils = self  # Triton looks for the two functions after next in driver.utils

    def launcher_cls(self, src, metadata):
        return lambda *args: None

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        self.loaded.append((name, binary, shared))
        # module, function, registers, spills (`resources` reads these two), threads that a program may have
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict:
        return {"max_shared_mem": TARGETS[self.names[self.device]].max_shared}

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.names[self.device]].gpu

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


class StubContext(SimpleNamespace):
    """The `ctx` that autograd hands a Function; autograd itself would want a CUDA build of PyTorch."""

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors


@contextlib.contextmanager
def pretend_gpu():
    """CUDA tensors without memory, on a GPU of the target's generation, with an H100's multiprocessors and cache."""

    def properties(device) -> SimpleNamespace:
        arch = triton.runtime.driver.active.get_current_target().arch  # 103 or "gfx942"
        major, minor = divmod(arch, 10) if isinstance(arch, int) else (9, 4)
        return SimpleNamespace(multi_processor_count=132, L2_cache_size=50 * 2**20, major=major, minor=minor)

    with (
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.Tensor, "data_ptr", lambda tensor: 0),  # aligned, as every allocation is
        FakeTensorMode(),
        torch.no_grad(),
    ):
        yield


def launch(case: Case, dtype: torch.dtype) -> None:
    """Evaluation, then forward and backward as in training; or just the call."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    arguments = case.arguments(make)
    if not isinstance(case.function, type):
        case.function(*arguments)
        return
    needs_grad = [
        isinstance(a, torch.Tensor) and a.is_floating_point() and i not in case.frozen for i, a in enumerate(arguments)
    ]
    context = StubContext(needs_input_grad=tuple(needs_grad))
    case.function.apply(*arguments)
    outputs = case.function.forward(context, *arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    case.function.backward(context, *map(torch.empty_like, outputs))


# ---------------------------------------------------------------- what the compiler reports


def resources(binary: bytes, gpu: GPUTarget) -> tuple[int, int]:
    """(registers, spilled registers) of a compiled kernel."""
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
    """A number from the metadata in an AMD binary.

    It is MessagePack: the key, then either one byte below 128, or a marker and the number in 1, 2 or 4 bytes.
    """
    value = binary[binary.index(key) + len(key) :]
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(value[0])
    return value[0] if width is None else int.from_bytes(value[1 : 1 + width], "big")


def compile_all(names: list[str]) -> list[Row]:
    """A row for every different kernel that the cases launch on the named targets."""
    driver = StubDriver(names)
    triton.runtime.driver.set_active(driver)
    rows = []
    with pretend_gpu():
        for driver.device, name in enumerate(names):
            for case in (case for case in CASES if name.startswith(case.targets)):
                for dtype_name, dtype in ((dtype, DTYPES[dtype]) for dtype in case.dtypes if dtype in DTYPES):
                    label = f"{case.name}, {dtype_name}"
                    error = None
                    try:
                        launch(case, dtype)
                    except (TritonError, RuntimeError) as failure:  # MLIR's own errors are RuntimeErrors
                        error = f"{type(failure).__name__}: {str(failure).strip()}"
                    for kernel, binary, shared in driver.loaded:
                        registers, spills = resources(binary, driver.get_current_target())
                        rows.append(Row(kernel, label, name, registers, spills, shared))
                    driver.loaded.clear()
                    if error:
                        rows.append(Row("(none)", label, name, error=error))
    return rows


# ---------------------------------------------------------------- verdict and output


def failures(rows: list[Row]) -> list[str]:
    """One sentence per fault; empty if the check passes."""
    found = [] if rows else ["no kernel was compiled"]
    for row in rows:
        where = f"{row.kernel} ({row.case}) for {row.target}"
        if row.error is not None:
            found.append(f"{row.case} for {row.target} does not compile: {row.error}")
        elif row.spills and row.spills > ALLOWED_SPILLS.get(row.target, 0):
            found.append(f"{where} spills {row.spills} registers per thread to memory")
    return found


def render(rows: list[Row]) -> str:
    headers = ["Kernel", "First used by", "Target", "Registers", "Spills", "Shared (bytes)"]
    body = [
        [row.kernel, row.case, row.target]
        + (["error"] * 3 if row.error else [row.registers, row.spills, f"{row.shared:,}"])
        for row in rows
    ]
    return measure.table(headers, body, ["left"] * 3 + ["right"] * 3)


def parse_targets(text: str) -> list[str]:
    """argparse type: names of targets, separated by commas."""
    names = list(TARGETS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown target {', '.join(map(repr, unknown))}; choose from {', '.join(TARGETS)}, all"
        )
    return names


def main() -> int:
    parser = measure.Parser(__doc__)
    parser.add_argument(
        "--targets", type=parse_targets, default="all", metavar="NAME,NAME|all",
        help=f"of {', '.join(TARGETS)} (default: %(default)s)",
    )  # fmt: skip
    names = parser.parse_args().targets
    vendors = {"cuda": "nvidia", "hip": "amd"}  # GPUTarget's word for it: the name of Triton's backend
    missing = [name for name in names if vendors[TARGETS[name].gpu.backend] not in backends]
    names = [name for name in names if name not in missing]

    rows = compile_all(names)
    found = failures(rows)
    print(measure.title(f"Ahead-of-time compilation, Triton {triton.__version__}, {', '.join(names)}"))
    print(render(rows))
    print()
    if missing:
        print(f"Not checked, because this Triton was built without their backend: {', '.join(missing)}")
    for sentence in found:
        print(f"FAILED: {sentence}")
    if not found:
        spilling = sum(bool(row.spills) for row in rows)
        exceptions = f"{spilling} spill no more than two registers" if spilling else "none spills"
        print(f"{len(rows)} kernels compiled, {exceptions}: PASSED")
    return 1 if found else 0


if __name__ == "__main__":
    measure.run_main(main)
