"""Why do the kernel files carry these settings?  This checks and times each launch with others.

The kernel files carry the number of warps, the tiles and the number of programs that were fastest
where they were measured (docs/sweeps.md).  They do not know of this file.  For each setting a
stand-in takes the kernel's place in its module, and launches the kernel as the launcher asks,
except for the setting.  So the setting that a file carries is observed, not copied.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

import cross_entropy_kernel
import rmsnorm_kernel
from harness.benchmark.checking import FLOOR
from harness.cli.command_line import RunError
from harness.cli.device import DEVICE, HAS_GPU, synchronize
from harness.cli.tables import describe
from harness.steps import timing
from harness.steps.launches import intercepted, replaced
from next_steps.comparisons.benchmark_problems import TORCH_DTYPES
from next_steps.comparisons.sweep_tables import Setting, words

HANDFUL = 4  # settings per launch on the CPU, beside the file's own


# ---------------------------------------------------------------- what is launched


@dataclass(frozen=True)
class Launch:
    """A launcher on inputs of its own, and the settings of its kernel that may be tried."""

    name: str
    module: ModuleType
    kernel: str  # its name in the module
    knobs: tuple[str, ...]
    passes: int  # tensors as large as the input that must be read or written
    others: Callable[[Setting], list[Setting]]  # what to try beside the file's setting
    run: Callable[[], object]  # is timed; in place, it may find the logits overwritten
    outputs: Callable[[], dict[str, torch.Tensor]]  # what it computes from fresh inputs
    programs_from: str | None = None  # the module's function that gives (n_programs, STAGES)


def processors() -> int:
    """Return the number of multiprocessors; without a GPU 2, so programs have several rows each."""
    return torch.cuda.get_device_properties().multi_processor_count if HAS_GPU else 2


def rmsnorm_launches(n_rows: int, H: int, dtype: torch.dtype) -> list[Launch]:
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "device": DEVICE}
    x, dy = (torch.randn(n_rows, H, **options).to(dtype) for _ in range(2))  # (B*T, H)
    weight = (1 + 0.1 * torch.randn(H, **options)).to(dtype)  # (H,)
    _, rstd = rmsnorm_kernel.rmsnorm_forward(x, weight, 1e-5)
    forward = functools.partial(rmsnorm_kernel.rmsnorm_forward, x, weight, 1e-5)
    backward = functools.partial(rmsnorm_kernel.rmsnorm_backward, dy, x, weight, rstd)
    # rows of the backward's scratch buffer, one per program
    room = rmsnorm_kernel.MAX_DW_PARTIAL_BYTES // (4 * H)
    knobs = "num_warps", "STAGES", "n_programs"

    def backward_settings(shipped: Setting) -> list[Setting]:
        programs = [max(1, min(n_rows, room, int(shipped["n_programs"] * n))) for n in (0.5, 1, 2)]
        choices = itertools.product((4, 8, 16), (1, 3, 4), programs)
        found = [dict(zip(knobs, values)) for values in choices]
        found.append(shipped | {"num_warps": 2})
        return found + [shipped | {"STAGES": stages} for stages in (2, 6)]

    return [
        Launch(
            *("RMSNorm forward", rmsnorm_kernel, "_rmsnorm_fwd_kernel", ("num_warps",), 2),
            lambda shipped: [{"num_warps": n} for n in (1, 2, 4, 8, 16, 32)],
            forward,
            lambda: dict(zip(("y", "rstd"), forward())),
        ),
        Launch(
            *("RMSNorm backward", rmsnorm_kernel, "_rmsnorm_bwd_kernel", knobs, 3),
            backward_settings,
            backward,
            lambda: dict(zip(("dx", "dw"), backward())),
            programs_from="_backward_options",
        ),
    ]


def tiles(
    shipped: Setting, warps: tuple[int, ...], shapes: list[tuple[float, float]]
) -> list[Setting]:
    """Return tiles: the file's rows, and columns per thread, times each pair of factors."""
    columns, found = shipped["TILE_COLS"] // shipped["num_warps"], []
    for w, (r, c) in itertools.product(warps, shapes):
        tile = {"TILE_ROWS": int(shipped["TILE_ROWS"] * r), "TILE_COLS": int(columns * c) * w}
        if shipped["TILE_ROWS"] * r >= 1:
            found.append(shipped | {"num_warps": w} | tile)
    return found


def cross_entropy_launches(n_rows: int, V: int, dtype: torch.dtype) -> list[Launch]:
    torch.manual_seed(0)
    logits = torch.randn(n_rows, V, device=DEVICE, dtype=dtype)  # (B*T, V)
    targets = torch.randint(V, (n_rows,), device=DEVICE)  # (B*T,)
    one = torch.ones((), dtype=torch.float32, device=DEVICE)
    kernels = cross_entropy_kernel
    _, stats, n_valid = kernels.cross_entropy_forward(logits, targets)
    overwritten = torch.empty_like(logits)
    forward = functools.partial(kernels.cross_entropy_forward, logits, targets)
    saved = one, logits, targets, stats, n_valid
    backward = functools.partial(kernels.cross_entropy_backward, *saved)
    in_place = functools.partial(kernels.cross_entropy_inplace, overwritten, targets)

    def forward_outputs() -> dict[str, torch.Tensor]:
        loss, found, _ = forward()
        return {"loss": loss, "m": found[:, 0], "d": found[:, 1]}

    def parts(dlogits: torch.Tensor) -> dict[str, torch.Tensor]:
        # Apart, because the targets' entries carry nearly all of the norm. They would hide the
        # errors of the others.
        columns = targets[:, None]
        return {"target": dlogits.gather(1, columns), "other": dlogits.scatter(1, columns, 0.0)}

    def in_place_outputs() -> dict[str, torch.Tensor]:
        overwritten.copy_(logits)
        return {"loss": in_place(), **parts(overwritten)}

    def one_program_per_row(shipped: Setting) -> list[Setting]:
        found = tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (2, 1), (1, 0.5)])
        return found + tiles(shipped, (32,), [(1, 1)])

    def in_place_settings(shipped: Setting) -> list[Setting]:
        found = [
            setting | {"n_programs": min(n_rows, warps // setting["num_warps"] * processors())}
            for setting in tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (1, 0.5)])
            for warps in (8, 16, 32)
            if warps >= setting["num_warps"]  # else fewer than one program per processor
        ]
        found += tiles(shipped, (shipped["num_warps"],), [(2, 1)])
        return [*found, shipped | {"n_programs": n_rows}]

    knobs = "num_warps", "TILE_ROWS", "TILE_COLS"
    return [
        Launch(
            *("Cross-entropy forward", kernels, "_cross_entropy_fwd_kernel", knobs, 1),
            one_program_per_row,
            forward,
            forward_outputs,
        ),
        Launch(
            *("Cross-entropy backward", kernels, "_cross_entropy_bwd_kernel", knobs, 2),
            one_program_per_row,
            backward,
            lambda: parts(backward()),
        ),
        Launch(
            *("Cross-entropy in place, loss and gradient", kernels),
            *("_cross_entropy_inplace_kernel", (*knobs, "n_programs"), 2),
            in_place_settings,
            in_place,
            in_place_outputs,
        ),
    ]


LAUNCHES = {"rmsnorm": rmsnorm_launches, "cross_entropy": cross_entropy_launches}


# ---------------------------------------------------------------- how a setting is tried


@contextlib.contextmanager
def carrying(launch: Launch, setting: Setting) -> Iterator[SimpleNamespace]:
    """Give the launch this setting, as if its file carried it; with {} the file's own setting.

    Yields what the last launch of the kernel left: `launched`, its options, and `compiled`.
    """
    chosen = {knob: value for knob, value in setting.items() if knob != "n_programs"}
    n_programs, told, last = setting.get("n_programs"), {}, SimpleNamespace()
    if launch.programs_from and n_programs:
        # The launcher makes room for what each program leaves, so it must know the number.
        number_and_stages, n_programs = (n_programs, setting["STAGES"]), None
        told[launch.programs_from] = lambda *args: number_and_stages

    def with_setting(run, kernel, grid, arguments, options):
        if kernel.__name__ != launch.kernel:
            return run(kernel, grid)(*arguments, **options)
        programs = n_programs or grid[0]
        last.launched = options | chosen | {"n_programs": programs}
        last.compiled = run(kernel, (programs,))(*arguments, **options | chosen)

    with intercepted(with_setting), replaced(launch.module, **told):
        yield last


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill new tensors with NaN: what a kernel does not write must not be an earlier result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def carried(launch: Launch) -> tuple[Setting, dict[str, torch.Tensor]]:
    """Return the setting that the file carries, and the outputs."""
    with carrying(launch, {}) as kernel, poisoned_outputs():
        outputs = launch.outputs()
    return {knob: kernel.launched[knob] for knob in launch.knobs}, outputs


def settings_to_try(launch: Launch, shipped: Setting) -> list[Setting]:
    """Return the file's setting, then the others without repetition; on the CPU a handful."""
    others = []
    for setting in launch.others(shipped):
        if setting not in [shipped, *others]:
            others.append(setting)
    return [shipped, *(others if HAS_GPU else others[:: -(-len(others) // HANDFUL)])]


def difference(found: torch.Tensor, shipped: torch.Tensor) -> float:
    """Return ||found - shipped|| / ||shipped||, computed on the GPU: these are gigabytes."""
    if torch.equal(found, shipped):
        return 0.0
    norm = torch.linalg.vector_norm
    far, size = (norm(t, dtype=torch.float32) for t in (found - shipped, shipped))
    return (far / size).item()


def try_setting(launch: Launch, setting: Setting, expected: dict[str, torch.Tensor]) -> dict:
    """Return the setting's row: its time, or the reason why it has none."""
    row = {"setting": setting, "us": None, "registers": None, "spills": None, "fault": None}
    with carrying(launch, setting) as kernel:
        try:
            with poisoned_outputs():
                found = launch.outputs()
            synchronize()
        except torch.OutOfMemoryError:
            raise
        except OutOfResources as error:
            fault = f"out of {error.name}: needs {error.required:,}, this GPU has {error.limit:,}"
            return row | {"fault": fault}
        except (TritonError, RuntimeError) as error:  # MLIR's own errors are RuntimeErrors
            synchronize()  # raises once more if the GPU itself failed, and not the compiler
            return row | {"fault": f"does not compile: {describe(error)}"}
        taken = {knob: kernel.launched[knob] for knob in setting}
        if taken != setting:
            raise RunError(
                f"{launch.name}: asked for {words(setting)}, it was launched with {words(taken)}"
            )
        if kernel.compiled is not None:  # the interpreter compiles nothing
            row |= {"registers": kernel.compiled.n_regs, "spills": kernel.compiled.n_spills}
        # Sums in another order are rounded in another way, so bits may differ.
        errors = {name: difference(found[name], tensor) for name, tensor in expected.items()}
        allowed = {name: FLOOR[tensor.dtype] for name, tensor in expected.items()}
        wrong = [f"{n} {e:.1e}" for n, e in errors.items() if not e <= allowed[n]]  # or NaN
        if wrong:
            return row | {"fault": f"WRONG, relative difference of {', '.join(wrong)}"}
        del found
        return row | {"us": timing.time_us(launch.run).p50}


def sweep(kernel: str, n_rows: int, size: int, dtype_name: str) -> list[dict]:
    """Return a section of the record for each launch of the kernel's file."""
    sections, dtype = [], TORCH_DTYPES[dtype_name]
    for launch in LAUNCHES[kernel](n_rows, size, dtype):
        shipped, expected = carried(launch)
        to_try = settings_to_try(launch, shipped)
        if HAS_GPU:
            n_settings = f"trying {len(to_try)} settings of {launch.name}"
            print(f"{n_settings}, {n_rows:,} x {size:,}", file=sys.stderr)
        tried = [try_setting(launch, setting, expected) for setting in to_try]
        if fault := tried[0]["fault"]:
            again = "what the file carries, launched a second time"
            raise RunError(f"{launch.name}: {again}: {fault}")
        sections.append({
            "launch": launch.name, "file": f"{launch.module.__name__.replace('.', '/')}.py",
            "rows": n_rows, "size": size,
            "processors": processors(), "bytes": launch.passes * n_rows * size * dtype.itemsize,
            "shipped": shipped, "tried": tried,
        })  # fmt: skip
    return sections
