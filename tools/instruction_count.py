"""Count the instructions of the compiled kernels beside the bytes that they move, without a GPU.

    python -m tools.instruction_count
    python -m tools.instruction_count --json results/instruction_count.json    # for the page

A GPU is done no sooner than its memory has moved the bytes, and no sooner than its multiprocessors
have issued the instructions.  The tool compiles each launch, computes both times, and prints the
quotient: issue over memory.  Above 1 the instructions come first.  docs/gb300.md says what the
quotient cannot tell.

Bytes: each tensor whose address is loaded from counts once, each whose address is stored to counts
once more.  The addresses are followed through Triton's own code (ttir).  What the kernel reads
again is taken from the cache, and counts as an instruction alone.

Instructions: of the longest way through the machine code that never goes back, for each warp of
each program; an outer loop once for each row.  The innermost loops that move the tensors turn until
they have stored what the launch stores in loops, or loaded it where they store nothing.  Left out:
rare loops, which load less than half as much in a turn, and warps that diverge.
"""

import itertools
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from harness.cli import command_line, output_files, tables
from harness.cli.command_line import UserError
from harness.profiling.kernel_facts import launch_of
from harness.records import run_records
from harness.steps import gpus
from harness.steps.gpus import THREADS, Gpu
from judging.compile_targets import COMPILING, access_of
from tools.compile_check import NARROW

COUNTED_GPUS = {
    name.partition(" ")[0]: gpus.GPUS[name] for name in ("H100 80GB HBM3", "H200", "GB300")
}
COUNTED_TARGETS = [*dict.fromkeys(gpu.target for gpu in COUNTED_GPUS.values())]
SORT_GPU = "GB300"  # the GPU that the rows are sorted by
COUNTED_CASES = {  # {lesson: cases}: of compile_cases.py, in the shapes of LLaMA 3.1 8B
    "rmsnorm": ["RMSNorm"],
    "cross_entropy": ["cross-entropy, mean", "cross-entropy in place, V = 128,256"],
    "swiglu": ["SwiGLU MLP", "SwiGLU with adapters, R = 16"],
    "adamw": ["AdamW", "AdamW, stochastic"],
    "adamw8": [f"AdamW, 8-bit moments, stochastic: {rounding}" for rounding in (False, True)],
    "rope": ["RoPE"],
    "qk_norm_rope": ["QK norm and RoPE, 32 and 8 heads"],
    "reverse_kl": ["reverse KL, batchmean, V = 131,072"],
    "nf4": ["NF4"],
    "fp8": ["FP8, H = 4,096"],
    "fp8_casts": ["RMSNorm in FP8, H = 4,096", "SwiGLU in FP8, I = 14,336"],
}


@dataclass(frozen=True)
class Count:
    """One launch, compiled for a target."""

    kernel: str
    case: str
    target: str
    instructions: float  # of warps, of the whole launch
    n_bytes: int

    def quotient(self, gpu: Gpu) -> float:
        """Return the time to issue the instructions over the time to move the bytes."""
        return self.instructions / gpu.warps_per_us / (self.n_bytes / (1e6 * gpu.tbs))


# ---------------------------------------------------------------- the machine code


class Instruction(NamedTuple):
    text: str
    goes_to: int | None = None  # a branch's destination, as the place of an instruction


def disassemble(binary: bytes) -> list[Instruction]:
    """Return the instructions of a compiled kernel, by the nvdisasm of Triton's wheels."""
    import triton

    tool = triton.knobs.nvidia.nvdisasm.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        run = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if run.returncode:
        said = run.stderr.strip().splitlines()[-1]
        raise UserError(f"nvdisasm cannot read the code ({said}): use Triton 3.7 or later")
    return parse(run.stdout)


def parse(listing: str) -> list[Instruction]:
    """Return the instructions of nvdisasm's listing of one kernel."""
    texts, labels = [], {}
    for line in map(str.strip, listing.splitlines()):
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(texts)
        elif code := re.match(r"/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            texts.append(code[1])
    destinations = (re.search(r"\bBRA\b(?!\.DIV).*`\((\.L_\w+)\)", text) for text in texts)
    return [
        Instruction(text, found and labels[found[1]]) for text, found in zip(texts, destinations)
    ]


class Loop(NamedTuple):
    start: int
    end: int  # its last instruction's
    loads: int  # bytes of a warp in one turn, without narrow ones: a row's statistic
    stores: int


def spans(code: list[Instruction]) -> list[tuple[int, int]]:
    """Return where each loop begins and ends: a branch goes back."""
    branches = ((each.goes_to, i) for i, each in enumerate(code) if each.goes_to is not None)
    return [(start, end) for start, end in branches if start < end]


def streaming_loops(code: list[Instruction]) -> list[Loop]:
    """Return the innermost loops that move the tensors."""
    found, all_loops = [], spans(code)
    for start, end in all_loops:
        if any(start <= s and e <= end for s, e in all_loops if (s, e) != (start, end)):
            continue  # another loop lies in it
        texts = [each.text for each in code[start : end + 1]]
        if any(re.search(r"\bUBLKCP|\bUTMA", text) for text in texts):
            raise UserError("a copy in bulk does not say how many bytes: count this kernel by hand")
        accesses = [*filter(None, map(access_of, texts))]
        stores = sum(width for kind, width in accesses if kind == "STG")
        loads = sum(width for kind, width in accesses if kind != "STG" and width >= NARROW)
        found.append(Loop(start, end, THREADS * loads, THREADS * stores))
    most = max((loop.loads for loop in found), default=0)
    return [loop for loop in found if most and loop.loads >= most / 2]


def longest_way(code: list[Instruction], weights: list[float]) -> float:
    """Return the weight of the instructions on the heaviest way that never goes back."""
    ways = [0.0] * (len(code) + 1)
    for i in reversed(range(len(code))):
        each, after = code[i], [0.0]
        if (each.goes_to or 0) > i:
            after.append(ways[each.goes_to])
        if not re.match(r"EXIT|RET\b|BRA `", each.text):  # the next instruction may follow
            after.append(ways[i + 1])
        ways[i] = weights[i] + max(after)
    return ways[0]


# ---------------------------------------------------------------- the tensors


class Traffic(NamedTuple):
    """Bytes of the tensors that a kernel loads and stores, and of those that it does in loops."""

    loads: int
    stores: int
    loads_in_loops: int
    stores_in_loops: int
    rows: int | None  # over which the programs walk together, in an outer loop; None: over none


def accesses(ttir: str) -> Iterator[tuple[str, int, bool]]:
    """Yield ("load" or "store", which of the pointers, whether in a loop) of Triton's own code."""
    header = next(line for line in ttir.splitlines() if "tt.func public" in line)
    pointers = re.findall(r"(%[\w.]+): !tt\.ptr", header)
    source = {name: name for name in pointers}
    loops = []  # how far the loops are indented that a line lies in
    for line in ttir.splitlines():
        indent = len(line) - len(line.lstrip())
        loops = [each for each in loops if each < indent]
        for name, initial in re.findall(r"(%[\w.]+) = (%[\w.#]+)", line):  # what a loop carries
            source[name] = source.get(initial)
        if "scf.for" in line or "scf.while" in line:
            loops.append(indent)
        if made := re.match(r"\s*(%[\w.]+) = (?!tt\.load|scf)\S+ (%[\w.#]+)", line):
            source[made[1]] = source.get(made[2])
        if found := re.search(r"tt\.(load|store) (%[\w.#]+)", line):
            if source.get(found[2]) is None:
                raise ValueError(f"no argument is the source of {found[2]} in: {line.strip()}")
            yield found[1], pointers.index(source[found[2]]), bool(loops)


def flat(arguments) -> Iterator[object]:
    for each in arguments:
        yield from flat(each) if isinstance(each, tuple) else [each]


def traffic(ttir: str, arguments: dict[str, object]) -> Traffic:
    """Return what a launch with these arguments moves."""
    sizes = [each.nbytes for each in flat(arguments.values()) if hasattr(each, "data_ptr")]
    found = set(accesses(ttir))

    def total(wanted: str, in_loops: bool) -> int:
        places = {place for kind, place, inside in found if kind == wanted and inside >= in_loops}
        return sum(sizes[place] for place in places)

    moved = (total(kind, in_loops) for in_loops in (False, True) for kind in ("load", "store"))
    first, step = (
        re.search(rf"(%\w+) = tt\.get_{what} x", ttir) for what in ("program_id", "num_programs")
    )
    walk = step and re.search(rf"scf\.for %\w+ = {first[1]} to %(\w+) step {step[1]}\b", ttir)
    return Traffic(*moved, rows=walk and arguments.get(walk[1]))


# ---------------------------------------------------------------- a launch


def instructions_of(code: list[Instruction], moved: Traffic, programs: int, warps: int) -> float:
    """Return the instructions that a launch issues.

    Args:
        warps: of a program.
    """
    loops = streaming_loops(code)
    weights = [float(programs)] * len(code)
    for start, end in spans(code):  # a loop around others: once for each row
        if any(start < loop.start and loop.end < end for loop in loops):
            if moved.rows is None:
                raise ValueError("how often the outer loop turns is not known")
            weights[start : end + 1] = [float(moved.rows)] * (end + 1 - start)
    in_loops = 0.0
    for loop in loops:
        length = loop.end + 1 - loop.start
        weights[loop.start : loop.end + 1] = [0.0] * length
        # Two loops may share the tensors: one for q, one for k; or each for a part of a row.
        share = 1 / sum(bool(other.stores) == bool(loop.stores) for other in loops)
        n_bytes = moved.stores_in_loops if loop.stores else moved.loads_in_loops
        in_loops += share * n_bytes / (loop.stores or loop.loads) * length
    return warps * longest_way(code, weights) + in_loops


def count_launches(cases: list, target: str) -> list[Count]:
    """Return a count of each launch of these `Case`s, compiled for a target.

    In a process that compiles for no other target.
    """
    import torch
    from triton.runtime.jit import JITFunction

    from harness.steps.launches import replaced
    from judging import pretended_gpu

    counts, case, run = [], None, JITFunction.run

    def counted(kernel, *arguments, grid, **options):
        compiled = run(kernel, *arguments, grid=grid, **options)
        moved = traffic(compiled.asm["ttir"], dict(zip(kernel.arg_names, arguments)))
        code = disassemble(compiled.asm["cubin"])
        n = instructions_of(code, moved, math.prod(grid), compiled.metadata.num_warps)
        counts.append(Count(kernel.__name__, case.name, target, n, moved.loads + moved.stores))
        return compiled

    with pretended_gpu.pretend_gpu(target), replaced(JITFunction, run=counted):
        for case in cases:
            pretended_gpu.launch(case, torch.bfloat16)
    return counts


def counts_of(job: tuple[str, str]) -> list[Count]:
    """Count a lesson's kernels for a target; of several launches of a case the nearest to issue."""
    from tools import compile_cases

    target, lesson = job
    cases = [case for case in compile_cases.CASES[lesson] if case.name in COUNTED_CASES[lesson]]
    found = {}
    for count in count_launches(cases, target):
        known = launch_of(count.kernel)
        # else another lesson's row has it, or it moves next to nothing in a step
        if known is not None and known[0].name == lesson and known[1].tensor:
            found.setdefault((count.kernel, count.case), []).append(count)
    return [
        max(each, key=lambda count: count.instructions / count.n_bytes) for each in found.values()
    ]


def count_all() -> list[Count]:
    """Return the counts of all lessons for all targets."""
    jobs = itertools.product(COUNTED_TARGETS, COUNTED_CASES)
    # In processes of their own: a process compiles a kernel for one target.
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        return [*itertools.chain.from_iterable(pool.imap(counts_of, jobs))]


# ---------------------------------------------------------------- what is printed


def rows(record: dict) -> list[dict[str, str | float]]:
    """Return the table's rows, the largest quotient on GB300 first."""
    found = {}
    for count in (Count(**each) for each in record["counts"]):
        row = {"Kernel": count.kernel.removesuffix("_kernel"), "launched by": count.case}
        row = found.setdefault((count.kernel, count.case), row)
        row[count.target] = 1e3 * count.instructions / count.n_bytes
        of_target = {name: gpu for name, gpu in COUNTED_GPUS.items() if gpu.target == count.target}
        row |= {name: count.quotient(gpu) for name, gpu in of_target.items()}
    return sorted(found.values(), key=lambda row: -row[SORT_GPU])


def render(record: dict) -> str:
    body = rows(record)
    headers = ["Kernel", "launched by", *COUNTED_TARGETS, *COUNTED_GPUS]
    cells = [
        [*list(row.values())[:2], *(f"{row[key]:.1f}" for key in COUNTED_TARGETS)]
        + [f"{row[name]:.2f}" for name in COUNTED_GPUS]
        for row in body
    ]
    first = [f"{row['Kernel']} ({row['launched by']})" for row in body if row[SORT_GPU] > 1]
    return "\n".join([
        tables.title(f"Instructions beside bytes, Triton {record['environment']['triton']}"),
        *(
            f"{name + ':':<6} {gpu.multiprocessors} multiprocessors x 4 schedulers x "
            f"{gpu.clock_ghz:.2f} GHz, {gpu.tbs:g} TB/s"
            for name, gpu in COUNTED_GPUS.items()
        ),
        "sm_90, sm_103: instructions of warps for 1,000 bytes.  By GPU: time to issue them over",
        "time to move the bytes, by published figures (GB300's multiprocessors: users' reports).",
        "Above 1 the instructions come first.",
        "",
        tables.table(headers, cells, ["left"] * 2 + ["right"] * 5),
        "",
        textwrap.fill(
            f"First on {SORT_GPU}: the instructions in {'; '.join(first) or 'none'}. "
            f"The memory in the other {len(body) - len(first)}.",
            tables.TERMINAL,
        ),
    ])  # fmt: skip


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the counts as a JSON record")
    args = parser.parse_args()
    output_files.check_outputs(args)
    # before PyTorch and Triton are imported
    os.environ.update(COMPILING)
    from judging import pretended_gpu  # noqa: F401  each process needs both
    from tools import compile_cases  # noqa: F401

    counts = [asdict(count) for count in count_all()]
    record = {"kind": "instructions", "environment": run_records.environment(), "counts": counts}
    print(render(record))
    if args.json:
        run_records.write_record(args.json, record)
    return 0


if __name__ == "__main__":
    command_line.run_main(main)
