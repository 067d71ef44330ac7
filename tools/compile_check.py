"""Compile every kernel for every supported GPU, on a machine that needs none.

    python -m tools.compile_check    # sm_89, sm_90, sm_100, sm_103 (GB300), sm_120, gfx942: minutes
    python -m tools.compile_check --targets sm_103
    python -m tools.compile_check --kernel rmsnorm    # one file's, as you change it: seconds

The autograd Functions that users call (compile_cases.py) launch the kernels on a GPU that is not
there (pretended_gpu.py).

Exit code 1 if a kernel does not compile, needs more shared memory than the target has, or spills.
A spilled value did not fit in the registers and goes through memory, which a fused kernel is there
to avoid.  (compile_targets.py names the exceptions: two registers on targets that no figure of this
project comes from.)

Exit code 1 also if no thread loads or stores at least 8 bytes at once.  With 2 bytes at a time
AdamW took 1.8 times as long (results/log.md).  Triton joins neighbours only if it can prove that
their addresses are multiples of 16 bytes.  One `%` more in an index may end the proof.  (Sizes that
no power of two divides are exempt.)
"""

import itertools
import multiprocessing
import os
import sys

from harness.benchmark.benchmark_specs import SPECS
from harness.cli import command_line, tables
from judging.compile_targets import COMPILE_TARGETS, COMPILING, UNALIGNED, CompiledKernel

NARROW = 8  # bytes; every kernel has an access of at least so many
SPILLS = "_obvious_kernel"  # reverse_kl_kernel.py shows why it is not used


def failures(rows: list[CompiledKernel]) -> list[str]:
    """Return a sentence for each fault; none if the check passes."""
    found = [] if rows else ["no kernel was compiled"]
    for row in rows:
        where = f"{row.kernel} ({row.case}) for {row.target}"
        if row.error is not None:
            found.append(f"{row.case} for {row.target} does not compile: {row.error}")
        elif row.spills and row.spills > COMPILE_TARGETS[row.target].allowed_spills:
            found.append(f"{where} spills {row.spills} registers per thread to memory")
        elif row.widest is not None and row.widest < NARROW and UNALIGNED not in row.case:
            found.append(f"{where} loads and stores at most {row.widest} bytes at once")
    return found


def left_out(rows: list[CompiledKernel]) -> list[str]:
    """Return a sentence for each kernel of the lessons that no case launches."""
    from triton.runtime.jit import JITFunction

    written = {
        name
        for module in [*sys.modules.values()]
        for name, function in [*vars(module).items()]
        if name.endswith("_kernel") and isinstance(function, JITFunction)
    }
    unseen = written - {row.kernel for row in rows} - {SPILLS}
    return [f"{name} is launched by no case of compile_cases.py" for name in sorted(unseen)]


def render(rows: list[CompiledKernel]) -> str:
    headers = ["First used by, kernel", "Target", "Registers", "Spills", "Shared, B"]
    body = []
    for (_, case), kernels in itertools.groupby(rows, key=lambda row: (row.target, row.case)):
        body.append([case])
        for row in kernels:
            cells = ["error"] * 4
            if not row.error:
                widest = "n/a" if row.widest is None else row.widest
                cells = [row.registers, row.spills, f"{row.shared:,}", widest]
            body.append([row.kernel, row.target, *cells])
    return tables.table([*headers, "Access, B"], body, ["left"] * 2 + ["right"] * 4)


def parse_targets(text: str) -> list[str]:
    """argparse type: names of targets, separated by commas."""
    names = list(COMPILE_TARGETS) if text == "all" else text.split(",")
    command_line.require_known("target", names, COMPILE_TARGETS, "all")
    return names


def compiled_kernels(job: tuple[str, str]) -> list[CompiledKernel]:
    """Compile the cases of a lesson for a target."""
    from judging import pretended_gpu
    from tools import compile_cases

    target, lesson = job
    return pretended_gpu.compile_all(compile_cases.CASES[lesson], target)


def compile_side_by_side(jobs: list[tuple[str, str]]) -> list[CompiledKernel]:
    """Return the rows of all (target, lesson), with as many processes at a time as cores.

    A kernel that a lesson before has launched, too, is listed once.
    """
    rows, seen = [], set()
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for found in pool.imap(compiled_kernels, jobs):
            rows += [row for row in found if row.error or (row.target, row.binary) not in seen]
            seen |= {(row.target, row.binary) for row in found}
    return rows


def main() -> int:
    parser = command_line.Parser(__doc__)
    named = {"type": parse_targets, "default": "all", "metavar": "NAME,NAME|all"}
    parser.add_argument(
        "--targets", **named, help=f"of {', '.join(COMPILE_TARGETS)} (default: all)"
    )
    kernels = {"choices": [*SPECS, "all"], "default": "all", "metavar": "NAME|all"}
    parser.add_argument("--kernel", **kernels, help=f"of {', '.join(SPECS)} (default: all)")
    args = parser.parse_args()
    names = args.targets
    # before PyTorch and Triton are imported
    os.environ.update(COMPILING)
    import triton
    from triton.backends import backends

    from judging import pretended_gpu  # noqa: F401  each process needs both
    from tools import compile_cases

    vendors = {"cuda": "nvidia", "hip": "amd"}  # as Triton's backends are called
    missing = [name for name in names if vendors[COMPILE_TARGETS[name].backend] not in backends]
    names = [name for name in names if name not in missing]
    lessons = compile_cases.CASES if args.kernel == "all" else [args.kernel]
    rows = compile_side_by_side(list(itertools.product(names, lessons)))
    found = failures(rows) + (left_out(rows) if args.kernel == "all" else [])
    version = f"Triton {triton.__version__}"
    print(tables.title(f"Ahead-of-time compilation, {version}, {', '.join(names)}"))
    print(render(rows))
    print()
    if missing:
        without = "because this Triton was built without their backend"
        print(f"Not checked, {without}: {', '.join(missing)}")
    for sentence in found:
        print(f"FAILED: {sentence}")
    if not found:
        spilling = sum(bool(row.spills) for row in rows)
        exceptions = f"{spilling} spill no more than two registers" if spilling else "none spills"
        print(f"{len(rows)} kernels compiled, {exceptions}: PASSED")
    return 1 if found else 0


if __name__ == "__main__":
    command_line.run_main(main)
