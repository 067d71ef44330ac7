"""Launch each kernel several times on the same inputs, and compare the bits of what it writes.

    faults(repeat_all(RUNS), RUNS)    # a sentence for each kernel whose runs differ

A compiler can be wrong in a way that shows in some launches alone: Triton 3.7.0 gave other bits in
3 of 5 trials on a B200.  No kernel of this project adds by atomics, the one thing that may change
the order of a sum between two launches.  So each must give the same bits, and none is exempt.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from harness.benchmark.benchmark_specs import (
    BANDWIDTH,
    LLAMA_HIDDEN,
    LLAMA_INTERMEDIATE,
    NORM_APART,
    SEPARATE,
    SPECS,
    WIDE_MOMENTS,
)
from harness.benchmark.benchmarking import prepare
from harness.cli.device import HAS_GPU
from harness.steps.launches import intercepted
from next_steps.comparisons.benchmark_contenders import CONTENDERS
from next_steps.comparisons.benchmark_problems import PROBLEMS
from next_steps.lessons.fp8_casts import rmsnorm_fp8
from next_steps.lessons.fp8_kernel import quantize_rows, quantize_transposed, transpose_rows
from subjects import SUBJECTS, lora_linear, rmsnorm
from subjects.subject import run

RUNS = 10 if HAS_GPU else 3  # of each launch; the interpreter takes seconds
TOKENS = 512 if HAS_GPU else 2  # rows of the inputs
N_PARAMETERS = 2**24 if HAS_GPU else 2**9
MADE_OF_OTHERS = NORM_APART, SEPARATE, WIDE_MOMENTS  # they launch the kernels of other rows


def memory_of(arguments: tuple) -> dict[int, torch.Tensor]:
    """Return the bytes of the memory that these arguments point to, once each, by address."""
    found = {}
    for each in arguments:
        if isinstance(each, tuple):
            found |= memory_of(each)
        elif isinstance(each, torch.Tensor):
            memory, empty = each.untyped_storage(), torch.empty(0, dtype=torch.uint8)
            found[memory.data_ptr()] = empty.to(each.device).set_(memory)
    return found


@contextlib.contextmanager
def repeated(runs: int) -> Iterator[dict[str, int]]:
    """Launch each Triton kernel `runs` times, each time with the memory as it was before.

    Yields:
        {kernel: different results}, of the launch that had most of them; each launch fills it in.
    """
    found = {}

    def launch(run, kernel, grid, arguments, options):
        memory = [*memory_of((*arguments, *options.values())).values()]
        before, results = [each.clone() for each in memory], []
        for _ in range(runs):
            for each, as_it_was in zip(memory, before):
                each.copy_(as_it_was)
            last = run(kernel, grid)(*arguments, **options)
            if not any(all(map(torch.equal, memory, result)) for result in results):
                results.append([each.clone() for each in memory])
        name = kernel.__name__
        found[name] = max(found.get(name, 0), len(results))
        return last

    with intercepted(launch):
        yield found


def launch_all() -> None:
    """Launch every kernel by the functions that users call, forward and backward."""
    for name, spec in SPECS.items():
        # linear + cross-entropy at its real size would need 10 GB; cross_entropy has the real one
        large = HAS_GPU and spec.rate is BANDWIDTH
        sizes = tuple((each.gpu if large else each.cpu)[0] for each in spec.dimensions)
        size = sizes[0] if len(sizes) == 1 else sizes
        rows = {"Tokens": TOKENS, "Parameters": N_PARAMETERS}.get(
            spec.rows, spec.tokens(HAS_GPU)[0]
        )
        problem = PROBLEMS[name](rows, size, torch.bfloat16)
        for implementation in CONTENDERS[name]("bf16").ours:
            if implementation.name not in MADE_OF_OTHERS:
                prepare(problem, implementation).results()
    launch_others(TOKENS, *((LLAMA_HIDDEN, LLAMA_INTERMEDIATE) if HAS_GPU else (64, 128)))


def launch_others(tokens: int, hidden: int, inner: int) -> None:
    """Launch the kernels that no benchmark has a row for: FP8's others, and SwiGLU's adapters."""
    of_norm, _ = rmsnorm.make((tokens,), hidden, torch.bfloat16)
    rows = quantize_rows(of_norm["x"])
    transpose_rows(rows)
    quantize_transposed(of_norm["x"], scale=rows.scales.amax())
    rmsnorm_fp8(*of_norm.values(), rmsnorm.EPS)
    ranks = {"ranks": (16, 16), "rank_of_down": 16}
    adapted = lora_linear.make_both((tokens,), (hidden, inner), torch.bfloat16, **ranks)
    run(SUBJECTS["lora_swiglu"], lora_linear.lora_swiglu, *adapted)


def repeat_all(runs: int) -> dict[str, int]:
    """Launch every kernel `runs` times; return {kernel: different results}."""
    # masked columns overflow in the interpreter, as they do on a GPU, and are not used
    with repeated(runs) as found, np.errstate(over="ignore", invalid="ignore"):
        launch_all()
    return found


def faults(found: dict[str, int], runs: int) -> list[str]:
    """Return a sentence for each kernel whose runs differ."""
    return [
        f"{kernel} gave {different} different results in {runs} runs on the same inputs: install "
        "the versions of constraints.txt or another Triton and run this script again; until the "
        "runs agree, do not train with this kernel (--kernels leaves it out)"
        for kernel, different in found.items()
        if different > 1
    ]
