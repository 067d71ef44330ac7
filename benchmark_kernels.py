"""Steps 7 and 10: how fast are the kernels, what memory do they take, how far from the limit?

    python benchmark_kernels.py                          # all kernels, LLaMA 3.1 8B's sizes, bf16
    python benchmark_kernels.py --kernel rmsnorm --hidden 2048,4096,8192
    python benchmark_kernels.py --json run.json --plot run.png
    python benchmark_kernels.py --sweep    # time other launch settings than two files carry

Ours runs against PyTorch as Hugging Face calls it, PyTorch's own operator, torch.compile, and
other libraries where they are installed.  All get the same inputs in the same dtype in the same
run.  All are timed in the same way.  Every result is compared with float64 before any timing.

    harness/benchmark/benchmark_specs.py             sizes, and the launches behind each limit
    harness/benchmark/benchmarking.py                how one is called, judged and timed
    next_steps/comparisons/benchmark_problems.py     inputs, and the exact results
    next_steps/comparisons/benchmark_contenders.py   the implementations: PyTorch's and ours
    next_steps/comparisons/benchmark_peers.py        those of other libraries
"""

import argparse
import itertools
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
from harness.cli.command_line import RunError, UserError, positive_int
from harness.cli.flags import Parser, row, switch
from harness.cli.output_files import check_outputs
from harness.records.run_records import environment, write_record

SWEPT = [name for name, spec in specs.SPECS.items() if spec.swept_tokens]


def first_call(kernel: str, size: specs.Size, dtype_name: str) -> float:
    """Return the seconds from our first forward + backward to its result, in a new process."""
    from harness.benchmark.benchmarking import prepare
    from harness.cli.device import HAS_GPU, synchronize
    from next_steps.comparisons.benchmark_contenders import implementations
    from next_steps.comparisons.benchmark_problems import PROBLEMS, TORCH_DTYPES

    tokens = specs.SPECS[kernel].tokens(HAS_GPU)[0]
    problem = PROBLEMS[kernel](tokens, size, TORCH_DTYPES[dtype_name])
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
    from next_steps.comparisons.benchmark_problems import PROBLEMS, TORCH_DTYPES

    spec, dtype = specs.SPECS[kernel], TORCH_DTYPES[dtype_name]
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


def number_list(text: str) -> list[int]:
    """argparse type: positive numbers with commas between. Return them sorted, each one once."""
    return sorted({positive_int(part) for part in text.split(",")})


def in_words(gpu: tuple[int, ...], cpu: tuple[int, ...]) -> str:
    """Return a default with a GPU and, in brackets, without."""
    with_gpu, without = (",".join(map(str, each)) for each in (gpu, cpu))
    return with_gpu if gpu == cpu else f"{with_gpu} ({without})"


def sizes_of(kernel: str, args: argparse.Namespace, on_gpu: bool) -> list[specs.Size]:
    """Return every combination of a kernel's dimensions, as the flags or the defaults say."""
    choices = [
        (each.flag and getattr(args, each.flag)) or (each.gpu if on_gpu else each.cpu)
        for each in specs.SPECS[kernel].dimensions
    ]
    return [size[0] if len(size) == 1 else size for size in itertools.product(*choices)]


def refusal(kernel: str, args: argparse.Namespace) -> str | None:
    """Return why these flags are refused for this kernel; None if they are not."""
    spec = specs.SPECS[kernel]
    flags = {each.flag for each in spec.dimensions}
    flags |= {"tokens"} if spec.rows == "Tokens" else set()
    sizes = "tokens", "hidden", "vocab"
    unused = [flag for flag in sizes if getattr(args, flag) and flag not in flags]
    if args.sweep and kernel not in SWEPT:
        return f"--sweep knows the settings of {' and '.join(SWEPT)} alone, not of {kernel}"
    if args.dtype == "fp16" and kernel == "adamw":
        return "adamw is not measured in fp16: PyTorch's moments would be fp16 and ours fp32"
    if args.dtype != "bf16" and kernel == "adamw8":
        return f"adamw8 is measured in bf16, not in {args.dtype}: PyTorch has no 8-bit moments"
    if unused and args.kernel == kernel:  # with all kernels, each takes what concerns it
        return f"--{unused[0]} changes nothing for --kernel {kernel}: leave it out"
    return None


def parse_arguments() -> argparse.Namespace:
    defaults = {"tokens": [], "hidden": [], "vocab": []}
    for name, spec in specs.SPECS.items():
        if spec.rows == "Tokens":
            defaults["tokens"].append(f"{name} {in_words(spec.gpu_tokens, spec.cpu_tokens)}")
        for each in spec.dimensions:
            if each.flag:
                defaults[each.flag].append(f"{name} {in_words(each.gpu, each.cpu)}")
    sizes = {
        f"--{flag}": row(
            f"{'rows of the input' if flag == 'tokens' else 'columns'} "
            f"(default, in brackets without a GPU: {'; '.join(words)})",
            type=number_list,
            metavar="N,N,...",
        )
        for flag, words in defaults.items()
    }
    kernels = [*specs.SPECS, "all"]
    parser = Parser(
        __doc__,
        {"--kernel": row("what to measure", choices=kernels, default="all")},
        sizes,
        {
            "--dtype": row("of inputs and gradients", choices=specs.DTYPES, default="bf16"),
            "--sweep": switch("time our kernels alone, with other settings than their files carry"),
            "--json": row("write the measurements as a JSON record", metavar="FILE"),
            "--plot": row(
                "write latency and bandwidth over tokens as a picture", metavar="FILE.png"
            ),
        },
    )
    args = parser.parse_args()
    if args.kernel != "all" and (reason := refusal(args.kernel, args)):
        raise UserError(reason)
    if args.sweep and args.tokens and len(args.tokens) > 1:
        raise UserError(f"--sweep takes one number of --tokens, not {len(args.tokens)}")
    check_outputs(args)
    return args


def refuse_width(args: argparse.Namespace) -> None:
    """Refuse a --hidden that is more than RMSNorm's kernel takes."""
    from rmsnorm_kernel import MAX_HIDDEN_SIZE

    if args.kernel in ("rmsnorm", "all") and args.hidden and max(args.hidden) > MAX_HIDDEN_SIZE:
        allowed = f"the {MAX_HIDDEN_SIZE:,} columns that the kernel allows"
        raise UserError(f"--hidden {max(args.hidden)} is more than {allowed}")


def refuse_interpreting(tokens: int, size: specs.Size) -> None:
    """Refuse an input that Triton's interpreter would need minutes or hours for.

    Raises:
        UserError: there is no GPU, and the input has more than CPU_NUMBERS numbers.
    """
    n = tokens * math.prod(specs.numbers(size))
    if n > specs.CPU_NUMBERS:
        shape = " x ".join(f"{each:,}" for each in (tokens, *specs.numbers(size)))
        minutes = math.ceil(n / specs.CPU_NUMBERS)
        raise UserError(
            f"no CUDA GPU was found, and Triton's interpreter would take some {minutes:,} minutes "
            f"for {shape} numbers, whose times mean nothing: lower --tokens, or --hidden and "
            "--vocab; without these flags it takes seconds"
        )


def measure_all(args: argparse.Namespace) -> dict:
    """Measure what the flags ask for; return the record."""
    import torch

    from harness.cli.device import HAS_GPU
    from harness.steps import timing
    from next_steps.comparisons import sweep_kernels

    record = {
        "kind": "sweep" if args.sweep else "benchmark",
        "environment": environment(),
        "dtype": args.dtype,
        "copy_gbs": timing.copy_bandwidth(),
        "matmul_tflops": timing.matmul_rate(),
        "sections": [],
        "absent": [],
    }
    every = SWEPT if args.sweep else specs.SPECS
    kernels = [args.kernel] if args.kernel != "all" else every
    refused = {name: reason for name in kernels if (reason := refusal(name, args))}
    record["absent"] += refused.values()
    try:
        for kernel in (name for name in kernels if name not in refused):
            spec = specs.SPECS[kernel]
            for size in sizes_of(kernel, args, HAS_GPU):
                if args.sweep:
                    default = spec.swept_tokens if HAS_GPU else spec.cpu_tokens[-1]
                    (tokens,) = args.tokens or [default]
                    if not HAS_GPU:
                        refuse_interpreting(tokens, size)
                    record["sections"] += sweep_kernels.sweep(kernel, tokens, size, args.dtype)
                    continue
                tokens = args.tokens if spec.rows == "Tokens" else None
                tokens = tokens or spec.tokens(HAS_GPU)
                if not HAS_GPU:
                    refuse_interpreting(max(tokens), size)
                section, absent = benchmark(kernel, tokens, size, args.dtype)
                record["sections"].append(section)
                record["absent"] += [each for each in absent if each not in record["absent"]]
    except torch.OutOfMemoryError as error:
        advice = "lower --tokens, or --hidden and --vocab"
        raise RunError(f"the GPU ran out of memory; {advice}") from error
    return record


def main() -> None:
    args = parse_arguments()
    refuse_width(args)
    record = measure_all(args)
    if args.sweep:
        from next_steps.comparisons.sweep_tables import render_sweep

        print(render_sweep(record))
    else:
        print(render(record))
    write_record(args.json, record)
    if args.plot:
        from harness.benchmark.benchmark_picture import plot

        plot(record, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
