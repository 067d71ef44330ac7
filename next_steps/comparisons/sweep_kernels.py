"""Why do the kernel files carry these settings?  This checks and times each launch with others.

The kernel files carry the number of warps, the tiles and the number of programs that were fastest
where they were measured (docs/sweeps.md).  They do not know of this file.  For each setting the
launch is intercepted (harness/steps/launches.py), and made as the launcher asks, except for the
setting.  So the setting that a file carries is observed, not copied.
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
from harness.cli.device import HAS_GPU, synchronize
from harness.cli.tables import describe
from harness.profiling.kernel_facts import launch_of
from harness.steps import timing
from harness.steps.launches import intercepted, replaced
from next_steps.comparisons.benchmark_problems import TIMED_TORCH_DTYPES
from next_steps.comparisons.sweep_tables import Setting, words
from subjects import cross_entropy, rmsnorm
from subjects.subject import Parts

HANDFUL = 4  # settings per launch on the CPU, beside the file's own


# ---------------------------------------------------------------- what is launched


@dataclass(frozen=True)
class SweptLaunch:
    """A launcher on inputs of its own, and the settings of its kernel that may be tried."""

    name: str
    module: ModuleType
    kernel: str  # its name in the module
    knobs: tuple[str, ...]
    others: Callable[[Setting], list[Setting]]  # what to try beside the file's setting
    run: Callable[[], object]  # is timed; in place, it may find the logits overwritten
    named: Callable[[object], Parts]  # what `run` returns, in parts that are compared
    before: Callable[[], object] = lambda: None  # makes the inputs fresh
    programs_from: str | None = None  # the module's function that gives (n_programs, STAGES)

    def outputs(self) -> Parts:
        """Return what the launcher computes from fresh inputs."""
        self.before()
        return self.named(self.run())


def processors() -> int:
    """Return the number of multiprocessors; without a GPU 2, so programs have several rows each."""
    return torch.cuda.get_device_properties().multi_processor_count if HAS_GPU else 2


def rmsnorm_launches(n_rows: int, H: int, dtype: torch.dtype) -> list[SweptLaunch]:
    kernels, (inputs, douts) = rmsnorm_kernel, rmsnorm.make((n_rows,), H, dtype)
    x, weight, dy = *inputs.values(), douts["y"]
    forward = functools.partial(kernels.rmsnorm_forward, x, weight, rmsnorm.EPS)
    _, rstd = forward()
    # rows of the backward's scratch buffer, one per program
    room = kernels.MAX_DW_PARTIAL_BYTES // (4 * H)
    knobs = "num_warps", "STAGES", "n_programs"

    def backward_settings(shipped: Setting) -> list[Setting]:
        programs = [max(1, min(n_rows, room, int(shipped["n_programs"] * n))) for n in (0.5, 1, 2)]
        choices = itertools.product((4, 8, 16), (1, 3, 4), programs)
        found = [dict(zip(knobs, values)) for values in choices]
        found.append(shipped | {"num_warps": 2})
        return found + [shipped | {"STAGES": stages} for stages in (2, 6)]

    return [
        SweptLaunch(
            *("RMSNorm forward", kernels, "_rmsnorm_fwd_kernel", ("num_warps",)),
            lambda shipped: [{"num_warps": n} for n in (1, 2, 4, 8, 16, 32)],
            forward,
            lambda outputs: dict(zip(("y", "rstd"), outputs)),
        ),
        SweptLaunch(
            *("RMSNorm backward", kernels, "_rmsnorm_bwd_kernel", knobs, backward_settings),
            functools.partial(kernels.rmsnorm_backward, dy, x, weight, rstd),
            lambda outputs: dict(zip(("dx", "dw"), outputs)),
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


def one_program_per_row(shipped: Setting) -> list[Setting]:
    found = tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (2, 1), (1, 0.5)])
    return found + tiles(shipped, (32,), [(1, 1)])


def cross_entropy_launches(n_rows: int, V: int, dtype: torch.dtype) -> list[SweptLaunch]:
    kernels, (inputs, douts) = cross_entropy_kernel, cross_entropy.make_plain((n_rows,), V, dtype)
    logits, targets = inputs.values()
    forward = functools.partial(kernels.cross_entropy_forward, logits, targets)
    _, stats, n_valid = forward()
    overwritten, columns = torch.empty_like(logits), targets[:, None]

    def parts(dlogits: torch.Tensor) -> Parts:
        # Apart, because the targets' entries carry nearly all of the norm. They would hide the
        # errors of the others.
        return {"target": dlogits.gather(1, columns), "other": dlogits.scatter(1, columns, 0.0)}

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
        SweptLaunch(
            *("Cross-entropy forward", kernels, "_cross_entropy_fwd_kernel", knobs),
            one_program_per_row,
            forward,
            lambda outputs: {"loss": outputs[0], "m": outputs[1][:, 0], "d": outputs[1][:, 1]},
        ),
        SweptLaunch(
            *("Cross-entropy backward", kernels, "_cross_entropy_bwd_kernel", knobs),
            one_program_per_row,
            functools.partial(
                kernels.cross_entropy_backward, douts["loss"], logits, targets, stats, n_valid
            ),
            parts,
        ),
        SweptLaunch(
            *("Cross-entropy in place, loss and gradient", kernels),
            *("_cross_entropy_inplace_kernel", (*knobs, "n_programs"), in_place_settings),
            functools.partial(kernels.cross_entropy_inplace, overwritten, targets),
            lambda loss: {"loss": loss, **parts(overwritten)},
            before=lambda: overwritten.copy_(logits),
        ),
    ]


LAUNCHES = {"rmsnorm": rmsnorm_launches, "cross_entropy": cross_entropy_launches}


# ---------------------------------------------------------------- how a setting is tried


@contextlib.contextmanager
def carrying(launch: SweptLaunch, setting: Setting) -> Iterator[SimpleNamespace]:
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


def carried(launch: SweptLaunch) -> tuple[Setting, Parts]:
    """Return the setting that the file carries, and the outputs."""
    with carrying(launch, {}) as kernel, poisoned_outputs():
        outputs = launch.outputs()
    return {knob: kernel.launched[knob] for knob in launch.knobs}, outputs


def settings_to_try(launch: SweptLaunch, shipped: Setting) -> list[Setting]:
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


def try_setting(launch: SweptLaunch, setting: Setting, expected: Parts) -> dict:
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
    sections, dtype = [], TIMED_TORCH_DTYPES[dtype_name]
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
        per_number = launch_of(launch.kernel)[1].bytes_per_number(dtype.itemsize)
        sections.append({
            "launch": launch.name, "file": f"{launch.module.__name__.replace('.', '/')}.py",
            "rows": n_rows, "size": size,
            "processors": processors(), "bytes": per_number * n_rows * size,
            "shipped": shipped, "tried": tried,
        })  # fmt: skip
    return sections
