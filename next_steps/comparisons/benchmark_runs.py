"""What benchmark_kernels.py and the sweep share: sizes and their flags, refusals, the record."""

import argparse
import itertools
import math
from collections.abc import Callable, Iterable

from harness.benchmark import benchmark_specs as specs
from harness.cli.command_line import RunError, UserError, positive_int
from harness.cli.flags import row
from harness.records.run_records import environment


def number_list(text: str) -> list[int]:
    """argparse type: positive numbers with commas between. Return them sorted, each one once."""
    return sorted({positive_int(part) for part in text.split(",")})


def default_in_words(gpu: tuple[int, ...], cpu: tuple[int, ...]) -> str:
    """Return a default with a GPU and, in brackets, without."""
    with_gpu, without = (",".join(map(str, each)) for each in (gpu, cpu))
    return with_gpu if gpu == cpu else f"{with_gpu} ({without})"


def size_flags(kernels: Iterable[str]) -> dict[str, dict]:
    """Return the rows of --tokens, --hidden and --vocab, whose help has these kernels' defaults."""
    defaults = {"tokens": [], "hidden": [], "vocab": []}
    for name in kernels:
        spec = specs.SPECS[name]
        if spec.rows == "Tokens":
            defaults["tokens"].append(
                f"{name} {default_in_words(spec.gpu_tokens, spec.cpu_tokens)}"
            )
        for each in spec.dimensions:
            if each.flag:
                defaults[each.flag].append(f"{name} {default_in_words(each.gpu, each.cpu)}")
    return {
        f"--{flag}": row(
            f"{'rows of the input' if flag == 'tokens' else 'columns'} "
            f"(default, in brackets without a GPU: {'; '.join(words)})",
            type=number_list,
            metavar="N,N,...",
        )
        for flag, words in defaults.items()
    }


def benchmark_sizes(kernel: str, args: argparse.Namespace, on_gpu: bool) -> list[specs.Size]:
    """Return every combination of a kernel's dimensions, as the flags or the defaults say."""
    choices = [
        (each.flag and getattr(args, each.flag)) or (each.gpu if on_gpu else each.cpu)
        for each in specs.SPECS[kernel].dimensions
    ]
    return [size[0] if len(size) == 1 else size for size in itertools.product(*choices)]


def refuse_unused(args: argparse.Namespace) -> None:
    """Refuse a size that changes nothing for --kernel; with all kernels, each takes its own."""
    if args.kernel == "all":
        return
    spec = specs.SPECS[args.kernel]
    used = {each.flag for each in spec.dimensions} | ({"tokens"} & {spec.rows.lower()})
    for flag in ("tokens", "hidden", "vocab"):
        if getattr(args, flag) and flag not in used:
            raise UserError(f"--{flag} changes nothing for --kernel {args.kernel}: leave it out")


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
    from harness.cli.device import HAS_GPU

    n = tokens * math.prod(specs.numbers(size))
    if not HAS_GPU and n > specs.CPU_NUMBERS:
        shape = " x ".join(f"{each:,}" for each in (tokens, *specs.numbers(size)))
        minutes = math.ceil(n / specs.CPU_NUMBERS)
        raise UserError(
            f"no CUDA GPU was found, and Triton's interpreter would take some {minutes:,} minutes "
            f"for {shape} numbers, whose times mean nothing: lower --tokens, or --hidden and "
            "--vocab; without these flags it takes seconds"
        )


def measure_sizes(
    kind: str, kernels: Iterable[str], args: argparse.Namespace, measure: Callable
) -> dict:
    """Call measure(kernel, size, record) for each of the kernels' sizes; return the record."""
    import torch

    from harness.cli.device import HAS_GPU
    from harness.steps import timing

    refuse_width(args)
    record = {
        "kind": kind,
        "environment": environment(),
        "dtype": args.dtype,
        "copy_gbs": timing.copy_bandwidth(),
        "matmul_tflops": max(timing.matmul_rates().values()),
        "sections": [],
        "absent": [],
    }
    try:
        for kernel in kernels:
            for size in benchmark_sizes(kernel, args, HAS_GPU):
                measure(kernel, size, record)
    except torch.OutOfMemoryError as error:
        advice = "lower --tokens, or --hidden and --vocab"
        raise RunError(f"the GPU ran out of memory; {advice}") from error
    return record
