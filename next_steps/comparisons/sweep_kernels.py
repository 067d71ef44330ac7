"""Why do the kernel files carry these settings?  This checks and times each launch with others.

The kernel files carry the number of warps, the tiles and the number of programs that were fastest
where they were measured (docs/sweeps.md).  They do not know of this file.  For each setting a
stand-in takes the kernel's place in its module, and launches the kernel as the launcher asks,
except for the setting.  So the setting that a file carries is observed, not copied.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from harness.benchmark.checking import FLOOR
from harness.cli.command_line import RunError
from harness.cli.device import HAS_GPU, synchronize
from harness.cli.tables import describe
from harness.steps import timing
from next_steps.comparisons.benchmark_problems import TORCH_DTYPES
from next_steps.comparisons.sweep_launches import LAUNCHES, Launch, processors
from next_steps.comparisons.sweep_tables import Setting, words

HANDFUL = 4  # settings per launch on the CPU, beside the file's own


class StandIn:
    """Take a kernel's place: launch it with these options in place of the launcher's, keep both."""

    def __init__(self, kernel, options: Setting, n_programs: int | None):
        self.kernel, self.options, self.n_programs = kernel, options, n_programs

    def __getitem__(self, grid: tuple[int]) -> Callable:
        n_programs = self.n_programs or grid[0]

        def launch(*args, enable_fp_fusion, **options):
            options |= self.options
            self.launched = options | {"n_programs": n_programs}
            self.compiled = self.kernel[(n_programs,)](
                *args, **options, enable_fp_fusion=enable_fp_fusion
            )

        return launch


@contextlib.contextmanager
def carrying(launch: Launch, setting: Setting) -> Iterator[StandIn]:
    """Give the launch this setting, as if its file carried it; with {} the file's own setting."""
    options = {knob: value for knob, value in setting.items() if knob != "n_programs"}
    n_programs = setting.get("n_programs")
    with contextlib.ExitStack() as patches:

        def replace(name: str, value: object) -> None:
            patches.enter_context(mock.patch.object(launch.module, name, value))

        if launch.programs_from and n_programs:
            # The launcher makes room for what each program leaves, so it must know the number.
            told, n_programs = (n_programs, setting["STAGES"]), None
            replace(launch.programs_from, lambda *args: told)
        stand_in = StandIn(getattr(launch.module, launch.kernel), options, n_programs)
        replace(launch.kernel, stand_in)
        yield stand_in


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
