"""Why do the kernel files carry these settings?  Every launch with others, each checked and timed.

    python benchmark_kernels.py --sweep                                   # the five launches of both files
    python benchmark_kernels.py --kernel rmsnorm --hidden 8192 --sweep    # or for another size, on another GPU

A kernel runs with some number of warps, on tiles of some shape, in some number of programs.  None of that changes
its result, but all of it changes how fast it is.  The kernel files carry what was fastest where they were measured.

Nothing in those files knows of this one: for each setting a stand-in takes the kernel's place in its module, and
launches the kernel as its launcher asks, but for the setting.  So what a file carries is observed, not copied.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch

import cross_entropy_kernel
import rmsnorm_kernel
from harness import tables, timing
from harness.checking import DEVICE, FLOOR
from harness.command_line import RunError
from harness.device import HAS_GPU, synchronize
from harness.tables import NOT_MEANINGFUL, number

# after the kernels, which decide how Triton will run
from triton.errors import TritonError  # isort: skip
from triton.runtime.errors import OutOfResources  # isort: skip

Setting = dict[str, int]  # some of KNOBS

KNOBS = {
    "num_warps": "groups of 32 threads per program",
    "STAGES": "rows in flight per program, one computed and the others being loaded",
    "TILE_ROWS": "a step of the loop takes TILE_ROWS x TILE_COLS logits",
    "TILE_COLS": "a thread has TILE_COLS / (32 x num_warps) of these columns",
    "n_programs": "how many share the rows; given in multiples of the GPU's multiprocessors",
}
TOKENS = {"rmsnorm": 16_384 if HAS_GPU else 16, "cross_entropy": 8192 if HAS_GPU else 16}
HANDFUL = 4  # settings per launch on the CPU, beside the file's own
WORTH_A_CHANGE = 1.02  # below that it may be noise


@dataclass(frozen=True)
class Launch:
    """A launcher on inputs of its own, and the settings of its kernel that may be tried."""

    name: str
    module: ModuleType
    kernel: str  # its name in the module
    knobs: tuple[str, ...]
    others: Callable[[Setting], list[Setting]]  # what to try beside the file's setting
    run: Callable[[], object]  # this is timed; in place, it may find the logits overwritten
    outputs: Callable[[], dict[str, torch.Tensor]]  # what it computes from fresh inputs
    passes: int  # tensors as large as the input that must be read or written
    programs_from: str | None = None  # the module's function that gives (n_programs, STAGES), if there is one


# ---------------------------------------------------------------- what may be tried


def processors() -> int:
    """Multiprocessors; without a GPU 2, so that programs have several rows each."""
    return torch.cuda.get_device_properties().multi_processor_count if HAS_GPU else 2


def combinations(**choices) -> list[Setting]:
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def rmsnorm_launches(n_rows: int, H: int, dtype: torch.dtype) -> list[Launch]:
    torch.manual_seed(0)
    x, dy = (torch.randn(n_rows, H, device=DEVICE).to(dtype) for _ in range(2))  # (B*T, H)
    weight = (1 + 0.1 * torch.randn(H, device=DEVICE)).to(dtype)  # (H,)
    _, rstd = rmsnorm_kernel.rmsnorm_forward(x, weight, 1e-5)

    def forward() -> tuple[torch.Tensor, ...]:
        return rmsnorm_kernel.rmsnorm_forward(x, weight, 1e-5)

    def backward() -> tuple[torch.Tensor, ...]:
        return rmsnorm_kernel.rmsnorm_backward(dy, x, weight, rstd)

    room = rmsnorm_kernel.MAX_DW_PARTIAL_BYTES // (4 * H)  # rows of the backward's scratch buffer, one per program

    def backward_settings(shipped: Setting) -> list[Setting]:
        programs = [max(1, min(n_rows, room, int(shipped["n_programs"] * n))) for n in (0.5, 1, 2)]
        found = combinations(num_warps=(4, 8, 16), STAGES=(1, 3, 4), n_programs=programs)
        return found + [shipped | {"num_warps": 2}, *(shipped | {"STAGES": stages} for stages in (2, 6))]

    return [
        Launch(
            "RMSNorm forward", rmsnorm_kernel, "_rmsnorm_fwd_kernel", ("num_warps",),
            lambda shipped: combinations(num_warps=(1, 2, 4, 8, 16, 32)),
            forward, lambda: dict(zip(("y", "rstd"), forward())), passes=2,
        ),
        Launch(
            "RMSNorm backward", rmsnorm_kernel, "_rmsnorm_bwd_kernel", ("num_warps", "STAGES", "n_programs"),
            backward_settings, backward, lambda: dict(zip(("dx", "dw"), backward())), passes=3,
            programs_from="_backward_options",
        ),
    ]  # fmt: skip


def tiles(shipped: Setting, warps: tuple[int, ...], shapes: list[tuple[float, float]]) -> list[Setting]:
    """Tiles whose rows, and columns per thread, are the file's times each pair of factors."""
    columns = shipped["TILE_COLS"] // shipped["num_warps"]
    return [
        shipped | {"num_warps": w, "TILE_ROWS": int(shipped["TILE_ROWS"] * r), "TILE_COLS": int(columns * c) * w}
        for w, (r, c) in itertools.product(warps, shapes)
        if shipped["TILE_ROWS"] * r >= 1
    ]


def cross_entropy_launches(n_rows: int, V: int, dtype: torch.dtype) -> list[Launch]:
    torch.manual_seed(0)
    logits = torch.randn(n_rows, V, device=DEVICE, dtype=dtype)  # (B*T, V)
    targets = torch.randint(V, (n_rows,), device=DEVICE)  # (B*T,)
    one = torch.ones((), device=DEVICE)
    _, stats, n_valid = cross_entropy_kernel.cross_entropy_forward(logits, targets)
    overwritten = torch.empty_like(logits)

    def forward() -> tuple[torch.Tensor, ...]:
        return cross_entropy_kernel.cross_entropy_forward(logits, targets)

    def backward() -> torch.Tensor:
        return cross_entropy_kernel.cross_entropy_backward(one, logits, targets, stats, n_valid)

    def in_place() -> tuple[torch.Tensor, ...]:
        return cross_entropy_kernel.cross_entropy_forward(overwritten, targets, overwrite=True)

    def forward_outputs() -> dict[str, torch.Tensor]:
        loss, found, _ = forward()
        return {"loss": loss, "m": found[:, 0], "d": found[:, 1]}

    def parts(dlogits: torch.Tensor) -> dict[str, torch.Tensor]:
        # Apart, because the targets' entries carry nearly all of the norm and would hide the others' errors.
        columns = targets[:, None]
        return {"target": dlogits.gather(1, columns), "other": dlogits.scatter(1, columns, 0.0)}

    def in_place_outputs() -> dict[str, torch.Tensor]:
        overwritten.copy_(logits)
        return {"loss": in_place()[0], **parts(overwritten)}

    def per_processor(*counts: int) -> list[int]:
        return [min(n_rows, n * processors()) for n in counts]

    def one_program_per_row(shipped: Setting) -> list[Setting]:
        return tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (2, 1), (1, 0.5)]) + tiles(shipped, (32,), [(1, 1)])

    def in_place_settings(shipped: Setting) -> list[Setting]:
        found = [
            setting | {"n_programs": n}
            for setting in tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (1, 0.5)])
            for n in per_processor(*(warps // setting["num_warps"] for warps in (8, 16, 32)))
            if n > 0  # else fewer than one program per processor
        ]
        return [*found, *tiles(shipped, (shipped["num_warps"],), [(2, 1)]), shipped | {"n_programs": n_rows}]

    tile = "num_warps", "TILE_ROWS", "TILE_COLS"
    return [
        Launch(
            "Cross-entropy forward", cross_entropy_kernel, "_cross_entropy_fwd_kernel", tile,
            one_program_per_row, forward, forward_outputs, passes=1,
        ),
        Launch(
            "Cross-entropy backward", cross_entropy_kernel, "_cross_entropy_bwd_kernel", tile,
            one_program_per_row, backward, lambda: parts(backward()), passes=2,
        ),
        Launch(
            "Cross-entropy in place, loss and gradient", cross_entropy_kernel, "_cross_entropy_inplace_kernel",
            (*tile, "n_programs"), in_place_settings, in_place, in_place_outputs, passes=2,
        ),
    ]  # fmt: skip


LAUNCHES = {"rmsnorm": rmsnorm_launches, "cross_entropy": cross_entropy_launches}


# ---------------------------------------------------------------- trying


class StandIn:
    """Takes a kernel's place: launches it with these options in place of the launcher's, and keeps what it saw."""

    def __init__(self, kernel, options: Setting, n_programs: int | None):
        self.kernel, self.options, self.n_programs = kernel, options, n_programs

    def __getitem__(self, grid: tuple[int]) -> Callable:
        n_programs = self.n_programs or grid[0]

        def launch(*args, **options):
            options |= self.options
            self.launched = options | {"n_programs": n_programs}
            self.compiled = self.kernel[(n_programs,)](*args, **options)

        return launch


@contextlib.contextmanager
def carrying(launch: Launch, setting: Setting) -> Iterator[StandIn]:
    """Meanwhile the launch has this setting, as if its file carried it; with {}, what the file does carry."""
    options = {knob: value for knob, value in setting.items() if knob != "n_programs"}
    n_programs = setting.get("n_programs")
    with contextlib.ExitStack() as patches:
        if launch.programs_from and n_programs:
            # its launcher makes room for what each program leaves, so it must be told before the launch
            told = n_programs, setting["STAGES"]
            patches.enter_context(mock.patch.object(launch.module, launch.programs_from, lambda *args: told))
        asked = None if launch.programs_from else n_programs
        stand_in = StandIn(getattr(launch.module, launch.kernel), options, asked)
        patches.enter_context(mock.patch.object(launch.module, launch.kernel, stand_in))
        yield stand_in


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """New tensors are full of NaN, so that what a kernel forgets to write cannot be the last setting's result."""
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
    far, size = (torch.linalg.vector_norm(t, dtype=torch.float32) for t in (found - shipped, shipped))
    return (far / size).item()


def try_setting(launch: Launch, setting: Setting, expected: dict[str, torch.Tensor]) -> dict:
    """The setting's row: its time, or why it has none.

    Raises:
        RunError: the launcher did not take the setting, which then must not be timed under its name.
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
            return row | {"fault": f"does not compile: {tables.describe(error)}"}
        taken = {knob: kernel.launched[knob] for knob in setting}
        if taken != setting:
            raise RunError(f"{launch.name}: asked for {words(setting)}, it was launched with {words(taken)}")
        if kernel.compiled is not None:  # the interpreter compiles nothing
            row |= {"registers": kernel.compiled.n_regs, "spills": kernel.compiled.n_spills}
        # Sums in another order are rounded otherwise, so not bit for bit.
        errors = {name: difference(found[name], tensor) for name, tensor in expected.items()}
        wrong = [f"{name} {e:.1e}" for name, e in errors.items() if not e <= FLOOR[expected[name].dtype]]  # or NaN
        if wrong:
            return row | {"fault": f"WRONG, relative difference of {', '.join(wrong)}"}
        del found
        return row | {"us": timing.time_us(launch.run).p50}


def sweep(kernel: str, n_rows: int, size: int, dtype: torch.dtype) -> list[dict]:
    """One section of the record for each launch of the kernel's file."""
    sections = []
    for launch in LAUNCHES[kernel](n_rows, size, dtype):
        shipped, expected = carried(launch)
        to_try = settings_to_try(launch, shipped)
        if HAS_GPU:
            print(f"trying {len(to_try)} settings of {launch.name}, {n_rows:,} x {size:,}", file=sys.stderr)
        tried = [try_setting(launch, setting, expected) for setting in to_try]
        if tried[0]["fault"]:
            raise RunError(f"{launch.name}: what the file carries, launched a second time: {tried[0]['fault']}")
        sections.append({
            "launch": launch.name, "file": f"{launch.module.__name__.replace('.', '/')}.py",
            "rows": n_rows, "size": size,
            "processors": processors(), "bytes": launch.passes * n_rows * size * dtype.itemsize,
            "shipped": shipped, "tried": tried,
        })  # fmt: skip
    return sections


# ---------------------------------------------------------------- output


def words(setting: Setting) -> str:
    return ", ".join(f"{knob} = {value}" for knob, value in setting.items())


def programs(n_programs: int, section: dict) -> str:
    """As a number, and where it comes from."""
    if n_programs == section["rows"]:
        return f"{n_programs:,} (rows)"
    per_processor, rest = divmod(n_programs, section["processors"])
    return f"{n_programs:,}" if rest else f"{n_programs:,} ({per_processor} x {section['processors']})"


def advice(section: dict) -> str:
    """Keep what the file carries, or what to set in it."""
    timed = [row for row in section["tried"] if row["us"] is not None]
    shipped = next(row for row in section["tried"] if row["setting"] == section["shipped"])
    best = min(timed, key=lambda row: row["us"])
    said = (
        f"The file carries {words(shipped['setting'])} ({shipped['us']:,.1f} us), "
        f"the fastest here is {words(best['setting'])} ({best['us']:,.1f} us): "
    )
    if shipped["us"] <= WORTH_A_CHANGE * best["us"]:
        return said + "keep."
    changes = [f"`{knob} = {v}`" for knob, v in best["setting"].items() if v != shipped["setting"][knob]]
    return said + f"set {', '.join(changes)} in {section['file']} for this GPU and size."


def section_table(record: dict, section: dict) -> str:
    """All settings of one launch, the fastest first, those without a time last."""
    gpu = record["environment"]["gpu"]
    title = f"Sweep: {section['launch']}, {section['rows']:,} x {section['size']:,}, {record['dtype']}"
    knobs = list(section["shipped"])
    body = []
    for row in sorted(section["tried"], key=lambda row: (row["us"] is None, row["us"])):
        share = None if row["us"] is None else 100 * section["bytes"] / row["us"] / 1e3 / record["copy_gbs"]
        note = row["fault"] or ("<- in the file" if row["setting"] == section["shipped"] else "")
        cells = [programs(v, section) if knob == "n_programs" else v for knob, v in row["setting"].items()]
        times = [number(row["us"]), number(share, ".0f")]
        body.append([*cells, *times, number(row["registers"], "d"), number(row["spills"], "d"), note])
    headers = [*knobs, "us", "% of copy", "Registers", "Spilled", ""]
    align = ["right"] * (len(headers) - 1) + ["left"]
    mb = f"{section['bytes'] / 1e6:,.0f} MB" if section["bytes"] >= 1e6 else f"{section['bytes']:,} bytes"
    return "\n".join(
        [
            tables.title(title + ("" if gpu else NOT_MEANINGFUL)),
            *(f"{knob}: {KNOBS[knob]}" for knob in knobs),
            f"us: median of one launcher's call; % of copy: {mb} over that time, of the measured copy rate",
            "",
            tables.table(headers, body, align),
            "",
            advice(section) if gpu else "These are times of the interpreter: nothing follows from them for the file.",
        ]
    )


def render_sweep(record: dict) -> str:
    """Everything that a sweep prints about its measurements, from their record."""
    env = record["environment"]
    blocks = [] if env["gpu"] else [tables.NO_GPU_NOTE]
    blocks.append(timing.ceilings_card(env, record["copy_gbs"], record["matmul_tflops"]))
    blocks += [section_table(record, section) for section in record["sections"]]
    return "\n\n".join(blocks)
