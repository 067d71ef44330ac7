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

Instructions: of the longest way through the machine code (nvdisasm) that takes no loop twice, for
each warp of each program.  The innermost loops that move the tensors are repeated until they have
stored what the launch stores in loops, or loaded it where they store nothing.  Left out: the rare
loops that load less than half as much at once, and warps that diverge.
"""

import itertools
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from unittest import mock

from harness.cli import command_line, output_files, tables
from harness.cli.command_line import UserError
from harness.profiling.kernel_facts import launch_of
from harness.records import run_records
from tools.compile_check import NARROW

THREADS = 32  # of a warp
LANES, FLOPS_OF_FMA = 128, 2  # fp32 lanes of a multiprocessor: 4 schedulers, each issues to 32


@dataclass(frozen=True)
class Gpu:
    """Published figures.  LANES * multiprocessors * clock is half of the fp32 peak."""

    target: str
    multiprocessors: int
    fp32_tflops: float
    tbs: float

    @property
    def clock_ghz(self) -> float:
        return self.fp32_tflops / (FLOPS_OF_FMA * LANES * self.multiprocessors) * 1e3

    def quotient(self, instructions: float, n_bytes: float) -> float:
        """Return the time to issue these instructions of warps over the time to move the bytes."""
        issued = instructions * THREADS / (LANES * self.multiprocessors * self.clock_ghz * 1e9)
        return issued / (n_bytes / (self.tbs * 1e12))


# H100, H200: NVIDIA's data sheets.  GB300: multiprocessors of the full chip and rate of the memory
# https://developer.nvidia.com/blog/inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era
# fp32: https://verda.com/blog/gb300-nvl72-architecture, which repeats NVIDIA's figure.
GPUS = {
    "H100": Gpu("sm_90", 132, 67, 3.35),
    "H200": Gpu("sm_90", 132, 67, 4.8),
    "GB300": Gpu("sm_103", 160, 80, 8),
}
OURS = "GB300"  # the GPU that the rows are sorted by
CASES = {  # {lesson: cases}: of compile_cases.py, in the shapes of LLaMA 3.1 8B
    "rmsnorm": ["RMSNorm"],
    "cross_entropy": ["cross-entropy, mean", "cross-entropy in place, V = 128,256"],
    "swiglu": ["SwiGLU", "SwiGLU with adapters, R = 16"],
    "adamw": ["AdamW", "AdamW, stochastic"],
    "adamw8": ["AdamW, 8-bit moments, stochastic: True"],
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


# ---------------------------------------------------------------- the machine code


@dataclass(frozen=True)
class Instruction:
    text: str
    goes_to: int | None = None  # a branch's destination, as the place of an instruction

    @property
    def width(self) -> tuple[str, int] | None:
        """Return ("load" or "store", bytes of a thread) of an access to the GPU's memory."""
        if re.search(r"\b(UBLKCP|UTMA\w+)\b", self.text):
            raise UserError(
                f"{self.text.split()[0]} copies in bulk, and how many bytes is not in the code: "
                "count this kernel by hand"
            )
        if not (found := re.search(r"\b(LDG|STG|LDGSTS)\.E([.\w]*)", self.text)):
            return None
        bits = re.search(r"\.[US]?(\d+)\b", found[2])  # 32 bits are not written
        return "store" if found[1] == "STG" else "load", int(bits[1] if bits else 32) // 8

    @property
    def ends(self) -> bool:
        """Return True if the next instruction never follows."""
        return bool(re.match(r"EXIT|RET\b|BRA `", self.text))


def disassemble(binary: bytes) -> list[Instruction]:
    """Return the instructions of a compiled kernel.

    Raises:
        UserError: this Triton brings no nvdisasm, or one that does not know the target.
    """
    import triton

    tool = triton.knobs.nvidia.nvdisasm
    if tool is None:
        raise UserError(
            "nvdisasm is not beside Triton, where its wheels for Linux have it: install Triton by "
            "pip, or export TRITON_NVDISASM_PATH"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        run = subprocess.run([tool.path, "-c", file.name], capture_output=True, text=True)
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


@dataclass(frozen=True)
class Loop:
    start: int
    end: int  # its last instruction's
    loads: int  # bytes of a warp in one turn, of accesses that are not narrow
    stores: int

    def __contains__(self, place: int) -> bool:
        return self.start <= place <= self.end


def streaming_loops(code: list[Instruction]) -> list[Loop]:
    """Return the innermost loops that move the tensors."""
    spans = [(to.goes_to, i) for i, to in enumerate(code) if to.goes_to is not None]
    spans = [(start, end) for start, end in spans if start < end]
    found = []
    for start, end in spans:
        if any(start <= s and e <= end for s, e in spans if (s, e) != (start, end)):
            continue  # another loop lies in it
        moved = {"load": 0, "store": 0}
        for kind, width in filter(None, (each.width for each in code[start : end + 1])):
            moved[kind] += THREADS * width * (width >= NARROW)
        found.append(Loop(start, end, moved["load"], moved["store"]))
    most = max((loop.loads for loop in found), default=0)
    return [loop for loop in found if most and loop.loads >= most / 2]


def longest_way(code: list[Instruction], loops: list[Loop]) -> tuple[int, frozenset[int]]:
    """Return how many instructions the longest way forward has outside of the loops.

    And the loops that lie on the way, by their place in the list: of two ways the one through more
    loops is the longer one.
    """
    nothing = 0, frozenset()
    ways = [nothing] * (len(code) + 1)
    for i in reversed(range(len(code))):
        each, after = code[i], []
        if each.goes_to is not None and each.goes_to > i:
            after.append(ways[each.goes_to])
        if not each.ends:
            after.append(ways[i + 1])
        inside = frozenset(number for number, loop in enumerate(loops) if i in loop)
        n, passed = max(after, key=lambda way: (len(way[1]), way[0]), default=nothing)
        ways[i] = n + (not inside), passed | inside
    return ways[0]


# ---------------------------------------------------------------- the tensors


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors that a kernel loads and stores, and of those that it does in loops."""

    loads: int
    stores: int
    loads_in_loops: int
    stores_in_loops: int


def accesses(ttir: str) -> Iterator[tuple[str, int, bool]]:
    """Yield ("load" or "store", which of the pointers, whether in a loop) of Triton's own code."""
    header = next(line for line in ttir.splitlines() if "tt.func public" in line)
    pointers = re.findall(r"(%\w+): !tt\.ptr", header)
    source = {name: name for name in pointers}
    loops = []  # how far the loops are indented that a line lies in
    for line in ttir.splitlines():
        indent = len(line) - len(line.lstrip())
        loops = [each for each in loops if each < indent]
        for name, initial in re.findall(r"(%\w+) = (%[\w#]+)", line):  # what a loop carries
            source[name] = source.get(initial)
        if "scf.for" in line or "scf.while" in line:
            loops.append(indent)
        if made := re.match(r"\s*(%\w+) = (?!tt\.load|scf)\S+ (%[\w#]+)", line):
            source[made[1]] = source.get(made[2])
        if found := re.search(r"tt\.(load|store) (%[\w#]+)", line):
            if source.get(found[2]) is None:
                raise ValueError(f"no argument is the source of {found[2]} in: {line.strip()}")
            yield found[1], pointers.index(source[found[2]]), bool(loops)


def flat(arguments) -> Iterator[object]:
    for each in arguments:
        yield from flat(each) if isinstance(each, tuple) else [each]


def traffic(ttir: str, arguments: tuple) -> Traffic:
    """Return the bytes that a launch with these arguments moves."""
    sizes = [each.nbytes for each in flat(arguments) if hasattr(each, "data_ptr")]
    found = set(accesses(ttir))

    def total(kind: str, in_loops: bool) -> int:
        places = {place for k, place, in_loop in found if k == kind and in_loop >= in_loops}
        return sum(sizes[place] for place in places)

    return Traffic(*(total(kind, inside) for inside in (False, True) for kind in ("load", "store")))


# ---------------------------------------------------------------- a launch


def instructions_of(code: list[Instruction], moved: Traffic, warps: int) -> float:
    """Return the instructions that all warps of a launch issue.

    Args:
        warps: of all programs together.
    """
    loops = streaming_loops(code)
    once, passed = longest_way(code, loops)
    # loops of which a program runs one, as for q or for k, share the tensors
    share = len(passed) / len(loops) if loops else 1
    repeated = 0.0
    for loop in loops:
        of_launch, of_turn = (
            (moved.stores_in_loops, loop.stores)
            if loop.stores
            else (moved.loads_in_loops, loop.loads)
        )
        repeated += share * of_launch / of_turn * (loop.end - loop.start + 1)
    return warps * once + repeated


def counts_of(job: tuple[str, str]) -> list[Count]:
    """Compile the chosen cases of a lesson for a target, and count."""
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    from tools import compile_cases, pretended_gpu

    target, lesson = job
    launched = []
    run = JITFunction.run

    def kept(kernel, *arguments, grid, **options):
        compiled = run(kernel, *arguments, grid=grid, **options)
        launched.append((kernel.__name__, compiled, math.prod(grid), arguments))
        return compiled

    cases = {case.name: case for case in compile_cases.CASES[lesson]}
    triton.runtime.driver.set_active(pretended_gpu.stub_driver(target, []))
    counts = {}
    for name in CASES[lesson]:
        with pretended_gpu.pretend_gpu(), mock.patch.object(JITFunction, "run", kept):
            pretended_gpu.launch(cases[name], torch.bfloat16)
        for kernel, compiled, programs, arguments in launched:
            known = launch_of(kernel)
            if known is None or known[0].name != lesson or known[1].tensor is None:
                continue  # another lesson's row has it, or it moves next to nothing in a step
            moved = traffic(compiled.asm["ttir"], arguments)
            code = disassemble(compiled.asm["cubin"])
            n = instructions_of(code, moved, programs * compiled.metadata.num_warps)
            count = Count(kernel, name, target, n, moved.loads + moved.stores)
            # an evaluation's launch, which writes no gradient, moves less
            before = counts.get((kernel, name))
            counts[kernel, name] = max(before or count, count, key=lambda each: each.n_bytes)
        launched.clear()
    return [*counts.values()]


def count_all() -> list[Count]:
    """Return the counts of all lessons for all targets."""
    jobs = itertools.product(dict.fromkeys(gpu.target for gpu in GPUS.values()), CASES)
    # In processes of their own: a process compiles a kernel for one target.
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        return [*itertools.chain.from_iterable(pool.imap(counts_of, jobs))]


# ---------------------------------------------------------------- what is printed


def rows(record: dict) -> list[dict[str, str]]:
    """Return the table's rows, the largest quotient on GB300 first."""
    found = {}
    for count in (Count(**each) for each in record["counts"]):
        found.setdefault((count.kernel, count.case), {})[count.target] = count
    body = []
    for (kernel, case), counts in found.items():
        per_kb = {t: 1e3 * each.instructions / each.n_bytes for t, each in counts.items()}
        quotients = {name: gpu.quotient(per_kb[gpu.target], 1e3) for name, gpu in GPUS.items()}
        body.append((quotients[OURS], kernel, case, per_kb, quotients))
    return [
        {"Kernel": kernel.removesuffix("_kernel"), "launched by": case}
        | {target: f"{n:.1f}" for target, n in per_kb.items()}
        | {name: f"{quotient:.2f}" for name, quotient in quotients.items()}
        | {f"first on {OURS}": "issue" if largest > 1 else "memory"}
        for largest, kernel, case, per_kb, quotients in sorted(body, reverse=True)
    ]


def render(record: dict) -> str:
    body = rows(record)
    lines = [
        tables.title(f"Instructions beside bytes, Triton {record['environment']['triton']}"),
        *(
            f"{name + ':':<6} {gpu.multiprocessors} multiprocessors x 4 schedulers x "
            f"{gpu.clock_ghz:.2f} GHz, {gpu.tbs:g} TB/s"
            for name, gpu in GPUS.items()
        ),
        "sm_90, sm_103: instructions of warps for 1,000 bytes.  By GPU: time to issue them over",
        "time to move the bytes, by published figures.  Above 1 the instructions come first.",
        "",
        tables.table(
            [*body[0]], [[*row.values()] for row in body], ["left"] * 2 + ["right"] * 6, keys=2
        ),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the counts as a JSON record")
    args = parser.parse_args()
    output_files.check_outputs(args)
    # Before PyTorch and Triton are imported: compile, do not interpret, and leave a GPU alone.
    os.environ.update(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    from tools import compile_cases, pretended_gpu  # noqa: F401  each process needs both

    counts = [asdict(count) for count in count_all()]
    record = {"kind": "instructions", "environment": run_records.environment(), "counts": counts}
    print(render(record))
    if args.json:
        run_records.write_record(args.json, record)
    return 0


if __name__ == "__main__":
    command_line.run_main(main)
