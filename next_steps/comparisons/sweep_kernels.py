"""Why do the kernel files carry these settings?  Every launch with others, each checked and timed.

    python benchmark_kernels.py --sweep                                   # both files' launches
    python benchmark_kernels.py --kernel rmsnorm --hidden 8192 --sweep    # another size or GPU

A kernel runs with some number of warps, on tiles of some shape, in some number of programs.  None
of that changes its result, but all of it changes how fast it is.  The kernel files carry what was
fastest where they were measured.

Nothing in those files knows of this one: for each setting a stand-in takes the kernel's place in
its module, and launches the kernel as its launcher asks, but for the setting.  So what a file
carries is observed, not copied.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from harness.benchmark.checking import FLOOR
from harness.cli.command_line import RunError
from harness.cli.device import HAS_GPU, synchronize
from harness.cli.tables import describe
from harness.steps import timing
from next_steps.comparisons.benchmark_problems import TORCH_DTYPES
from next_steps.comparisons.sweep_launches import LAUNCHES, Launch, processors
from next_steps.comparisons.sweep_tables import Setting, words

# after the kernels, which decide how Triton will run
from triton.errors import TritonError  # isort: skip
from triton.runtime.errors import OutOfResources  # isort: skip

HANDFUL = 4  # settings per launch on the CPU, beside the file's own


class StandIn:
    """Takes a kernel's place: launches it with these options in place of the launcher's.

    It keeps what it saw.
    """

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
    """Meanwhile the launch has this setting, as if its file carried it; with {}, what the file does
    carry.
    """
    options = {knob: value for knob, value in setting.items() if knob != "n_programs"}
    n_programs = setting.get("n_programs")
    with contextlib.ExitStack() as patches:
        if launch.programs_from and n_programs:
            # its launcher makes room for what each program leaves, so it must be told before the
            # launch
            told = n_programs, setting["STAGES"]
            patches.enter_context(
                mock.patch.object(launch.module, launch.programs_from, lambda *args: told)
            )
        asked = None if launch.programs_from else n_programs
        stand_in = StandIn(getattr(launch.module, launch.kernel), options, asked)
        patches.enter_context(mock.patch.object(launch.module, launch.kernel, stand_in))
        yield stand_in


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """New tensors are full of NaN, so that what a kernel forgets to write cannot be the last
    setting's result.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def carried(launch: Launch) -> tuple[Setting, dict[str, torch.Tensor]]:
    """The setting that the file carries, and what it computes."""
    with carrying(launch, {}) as kernel, poisoned_outputs():
        outputs = launch.outputs()
    return {knob: kernel.launched[knob] for knob in launch.knobs}, outputs


def settings_to_try(launch: Launch, shipped: Setting) -> list[Setting]:
    """The file's own first, none twice; on the CPU a handful."""
    others = []
    for setting in launch.others(shipped):
        if setting not in [shipped, *others]:
            others.append(setting)
    return [shipped, *(others if HAS_GPU else others[:: -(-len(others) // HANDFUL)])]


def difference(found: torch.Tensor, shipped: torch.Tensor) -> float:
    """||found - shipped|| / ||shipped||, on the GPU, because these are gigabytes."""
    if torch.equal(found, shipped):
        return 0.0
    far, size = (
        torch.linalg.vector_norm(t, dtype=torch.float32) for t in (found - shipped, shipped)
    )
    return (far / size).item()


def try_setting(launch: Launch, setting: Setting, expected: dict[str, torch.Tensor]) -> dict:
    """The setting's row: its time, or why it has none.

    Raises:
        RunError: the launcher did not take the setting, which then must not be timed under its
            name.
    """
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
        # Sums in another order are rounded otherwise, so not bit for bit.
        errors = {name: difference(found[name], tensor) for name, tensor in expected.items()}
        wrong = [
            f"{name} {e:.1e}" for name, e in errors.items() if not e <= FLOOR[expected[name].dtype]
        ]  # or NaN
        if wrong:
            return row | {"fault": f"WRONG, relative difference of {', '.join(wrong)}"}
        del found
        return row | {"us": timing.time_us(launch.run).p50}


def sweep(kernel: str, n_rows: int, size: int, dtype_name: str) -> list[dict]:
    """One section of the record for each launch of the kernel's file."""
    sections, dtype = [], TORCH_DTYPES[dtype_name]
    for launch in LAUNCHES[kernel](n_rows, size, dtype):
        shipped, expected = carried(launch)
        to_try = settings_to_try(launch, shipped)
        if HAS_GPU:
            print(
                f"trying {len(to_try)} settings of {launch.name}, {n_rows:,} x {size:,}",
                file=sys.stderr,
            )
        tried = [try_setting(launch, setting, expected) for setting in to_try]
        if tried[0]["fault"]:
            raise RunError(
                f"{launch.name}: what the file carries, launched a second time: {tried[0]['fault']}"
            )
        sections.append({
            "launch": launch.name, "file": f"{launch.module.__name__.replace('.', '/')}.py",
            "rows": n_rows, "size": size,
            "processors": processors(), "bytes": launch.passes * n_rows * size * dtype.itemsize,
            "shipped": shipped, "tried": tried,
        })  # fmt: skip
    return sections
