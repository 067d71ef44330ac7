"""Lessons 7 and 10: how fast are the kernels, what memory do they take, how far from the limit?

    python benchmark_kernels.py                          # all kernels, LLaMA 3.1 8B's sizes, bf16
    python benchmark_kernels.py --kernel rmsnorm --hidden 2048,4096,8192
    python benchmark_kernels.py --json run.json --plot run.png

Ours runs against PyTorch as Hugging Face calls it, PyTorch's own operator, torch.compile, and
other libraries where they are installed.  All get the same inputs in the same dtype in the same
run.  All are timed in the same way.  Every result is compared with float64 before any timing.

    harness/benchmark/benchmark_specs.py             sizes, and the launches behind each limit
    harness/benchmark/benchmarking.py                how one is called, judged and timed
    next_steps/comparisons/benchmark_runs.py         sizes, their flags, the record
    next_steps/comparisons/benchmark_problems.py     inputs, and the exact results
    next_steps/comparisons/benchmark_contenders.py   the implementations: PyTorch's and ours
    next_steps/comparisons/benchmark_peers.py        those of other libraries
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.benchmark import benchmark_specs as specs
from harness.benchmark.benchmark_tables import render
from harness.cli import command_line
from harness.cli.command_line import UserError
from harness.cli.flags import FlagParser, row
from harness.cli.output_files import check_outputs
from harness.records.run_records import write_record
from next_steps.comparisons.benchmark_runs import (
    measure_sizes,
    refuse_interpreting,
    refuse_unused,
    size_flags,
)


def first_call(kernel: str, size: specs.Size, dtype_name: str) -> float:
    """Return the seconds from our first forward + backward to its result, in a new process."""
    from harness.benchmark.benchmarking import prepare
    from harness.cli.device import HAS_GPU, synchronize
    from next_steps.comparisons.benchmark_contenders import implementations
    from next_steps.comparisons.benchmark_problems import PROBLEMS, TIMED_TORCH_DTYPES

    tokens = specs.SPECS[kernel].tokens(HAS_GPU)[0]
    problem = PROBLEMS[kernel](tokens, size, TIMED_TORCH_DTYPES[dtype_name])
    ours = next(each for each in implementations(kernel, dtype_name, []) if each.name == specs.OURS)
    call = prepare(problem, ours)
    synchronize()  # the problem is made: PyTorch, autograd and the GPU are awake
    start = time.perf_counter()
    call.both()
    synchronize()
    return time.perf_counter() - start


def first_call_seconds(kernel: str, size: specs.Size, dtype: str, absent: list) -> float | None:
    """Return the same, measured in a process of its own, where Triton has compiled nothing yet.

    If that process fails, return None and add a sentence to `absent`.
    """
    arguments = f"{kernel!r}, {size}, {dtype!r}"
    code = f"import benchmark_kernels; print(benchmark_kernels.first_call({arguments}))"
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "TRITON_CACHE_DIR": empty}
        here = Path(__file__).parent
        child = subprocess.run(command, capture_output=True, text=True, env=env, cwd=here)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        absent.append(f"first call: its process failed ({reason.splitlines()[-1]})")
        return None
    return float(child.stdout.split()[-1])


def benchmark(
    kernel: str, tokens: list[int], size: specs.Size, dtype_name: str
) -> tuple[dict, list[str]]:
    """Return the kernel's section of the record, and sentences about what is absent from it."""
    from harness.benchmark import benchmarking
    from harness.cli.device import HAS_GPU
    from next_steps.comparisons.benchmark_contenders import implementations
    from next_steps.comparisons.benchmark_peers import find_peers
    from next_steps.comparisons.benchmark_problems import PROBLEMS, TIMED_TORCH_DTYPES

    spec, dtype = specs.SPECS[kernel], TIMED_TORCH_DTYPES[dtype_name]
    per_element = spec.per_element(dtype.itemsize)
    peers, absent = find_peers(kernel)
    compilation = first_call_seconds(kernel, size, dtype_name, absent) if HAS_GPU else None
    rows = []
    for n_tokens in tokens:
        shape = " x ".join(f"{n:,}" for n in (n_tokens, *specs.numbers(size)))
        if HAS_GPU:
            print(f"measuring {kernel}, {shape}", file=sys.stderr)
        problem = PROBLEMS[kernel](n_tokens, size, dtype)
        contenders = implementations(kernel, dtype_name, peers)
        errors: dict[str, dict[str, float]] = {specs.HOST_FLOOR: {}}
        for contender in contenders:
            if contender.name != specs.HOST_FLOOR:
                with benchmarking.others_may_fail(contender, shape, absent):
                    errors[contender.name] = benchmarking.gradient_errors(problem, contender)
        benchmarking.check_ours(errors, dtype, n_tokens, judge=contenders[0].name)
        work = per_element * n_tokens * math.prod(specs.numbers(size))
        for contender in (each for each in contenders if each.name in errors):
            with benchmarking.others_may_fail(contender, shape, absent):
                row = {"tokens": n_tokens, "implementation": contender.name}
                row |= benchmarking.measure_times(problem, contender)
                row["errors"] = errors[contender.name]
                rate = work / row["total_us"][1] / spec.rate.per_us
                row[spec.rate.key] = rate if contender.name != specs.HOST_FLOOR else None
                rows.append(row)
    section = {
        "kernel": kernel,
        "size": size,
        spec.rate.per_element: per_element,
        "rows": rows,
        "first_call_seconds": compilation,
    }
    return section, absent


def refusal(kernel: str, dtype: str) -> str | None:
    """Return why a kernel is not measured in this dtype; None if it is."""
    if dtype == "fp16" and kernel == "adamw":
        return "adamw is not measured in fp16: PyTorch's moments would be fp16 and ours fp32"
    if dtype != "bf16" and kernel == "adamw8":
        return f"adamw8 is measured in bf16, not in {dtype}: PyTorch has no 8-bit moments"
    return None


def parse_arguments() -> argparse.Namespace:
    table = {
        "--kernel": row("what to measure", choices=[*specs.SPECS, "all"], default="all"),
        **size_flags(specs.SPECS),
        "--dtype": row("of inputs and gradients", choices=specs.TIMED_DTYPES, default="bf16"),
        "--json": row("write the measurements as a JSON record", metavar="FILE"),
        "--plot": row("write latency and bandwidth over tokens as a picture", metavar="FILE.png"),
    }
    args = FlagParser(__doc__, table).parse_args()
    if reason := refusal(args.kernel, args.dtype):
        raise UserError(reason)
    refuse_unused(args)
    check_outputs(args)
    return args


def measure_all(args: argparse.Namespace) -> dict:
    """Measure what the flags ask for; return the record."""
    from harness.cli.device import HAS_GPU

    def measure(kernel: str, size: specs.Size, record: dict) -> None:
        spec = specs.SPECS[kernel]
        tokens = args.tokens if spec.rows == "Tokens" else None
        tokens = tokens or spec.tokens(HAS_GPU)
        refuse_interpreting(max(tokens), size)
        section, absent = benchmark(kernel, tokens, size, args.dtype)
        record["sections"].append(section)
        record["absent"] += [each for each in absent if each not in record["absent"]]

    kernels = [args.kernel] if args.kernel != "all" else specs.SPECS
    refused = {name: reason for name in kernels if (reason := refusal(name, args.dtype))}
    measured = [name for name in kernels if name not in refused]
    record = measure_sizes("benchmark", measured, args, measure)
    return record | {"absent": [*refused.values(), *record["absent"]]}


def main() -> None:
    args = parse_arguments()
    record = measure_all(args)
    print(render(record))
    write_record(args.json, record)
    if args.plot:
        from harness.benchmark.benchmark_picture import plot

        plot(record, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
