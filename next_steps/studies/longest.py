"""How long may a sequence be?  `finetune_optimized.py --kernels all --longest`.

The script takes training steps on one random sequence.  The length doubles until the memory is full
or the model has no more positions.  Then it is halfway between what fitted and what did not.  With
--recompute layer and --offload it reaches LLaMA 3.1's 131,072 positions on one GPU.
"""

import torch

from harness.cli import tables
from harness.cli.command_line import ran_out_of_memory
from harness.cli.device import DEVICE, HAS_GPU, free_memory
from harness.cli.workload import Workload, kernels_in_words, model_line
from harness.data.dataset import random_batch
from harness.model.adapters import counts, flops_per_token
from harness.records import run_records
from harness.steps import stepping, timing
from next_steps.memory.memory_estimate import try_kernels
from next_steps.patches.apply_kernels import make_optimizer
from next_steps.patches.offload import HostMemoryError
from next_steps.patches.patched_model import load_patched
from next_steps.patches.projections import layers_in_fp8

LENGTH_STEP = 1024 if HAS_GPU else 16  # tokens: all lengths are multiples of it
POSITIONS = "the model's positions"
CPU_LENGTHS = 3  # no more on a CPU: a machine whose memory is full does not answer


def find(workload: Workload, record_to: str | None = None) -> None:
    """Find the longest sequence that fits and time a step of it; print and record both."""
    kernels, micro_batches = workload.kernels, workload.micro_batches
    try_kernels(workload)
    model = load_patched(workload)
    how = kernels, workload.stochastic_rounding, workload.moments
    optimizer = make_optimizer(model, 1e-5, *how)
    limit = model.config.max_position_embeddings
    first = round_up(workload.seq_len)
    record = {
        "kind": "longest",
        "environment": run_records.environment(),
        **workload.as_record(),
        **counts(model.config, workload),
        **layers_in_fp8(model, workload),
        "first_length": first,
        "length_step": LENGTH_STEP,
        "stopped_by": POSITIONS,
    }
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    # a first step makes the optimizer's state, which then exists for every length
    try_length(model, optimizer, LENGTH_STEP, micro_batches)
    fitting, too_long, length = {}, limit // LENGTH_STEP * LENGTH_STEP + LENGTH_STEP, first
    while length is not None and length < too_long:
        tried = try_length(model, optimizer, length, micro_batches)
        if isinstance(tried, str):
            too_long, record["stopped_by"] = length, tried
            found = f"more than {tried}"
        else:
            fitting[length] = seconds, peak = tried
            found = f"{seconds:6.2f} s, peak {peak / 1e9:.1f} GB"
        print(f"{length:>7,} tokens: {found}", flush=True)
        bisect = record["stopped_by"] != POSITIONS
        length = next_length(max(fitting, default=None), too_long, bisect)
        if not HAS_GPU and len(fitting) == CPU_LENGTHS and length is not None:
            record["stopped_by"] = f"the {CPU_LENGTHS} lengths that are tried without a GPU"
            break
    if fitting:
        longest = max(fitting)
        # the first step of a length compiles
        again = try_length(model, optimizer, longest, micro_batches)
        seconds, _ = fitting[longest] if isinstance(again, str) else again
        share = attention_share(model.config, workload, longest)
        record |= {"seconds": seconds, "attention_share": share}
    record["lengths"] = sorted(fitting)
    record["peaks"] = [fitting[length][1] for length in sorted(fitting)]
    print("\n" + render(record))
    run_records.write_record(record_to, record)


def round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def next_length(longest: int | None, too_long: int, bisect: bool) -> int | None:
    """Return the next length to try; None: no more."""
    if longest is None or too_long - longest <= LENGTH_STEP:
        return None
    if bisect:
        return round_up((longest + too_long) // 2 - LENGTH_STEP // 2)
    return min(2 * longest, too_long - LENGTH_STEP)


def try_length(model, optimizer, length: int, micro_batches: int) -> tuple[float, int] | str:
    """Return seconds and peak bytes of a step on so many tokens, or whose memory is too small."""
    batch = random_batch((1, length), model.config.vocab_size, DEVICE)
    batches = [batch] * micro_batches
    try:
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
        _, seconds = stepping.timed_step(model, optimizer, batches)
        return seconds, timing.peak_memory_bytes()
    except (RuntimeError, HostMemoryError) as error:
        on_host = isinstance(error, HostMemoryError)
        if not on_host and not ran_out_of_memory(error):
            raise
        model.zero_grad(set_to_none=True)  # the failed step may have left gradients
        return "the host's memory" if on_host else "the GPU's memory"
    finally:
        free_memory()  # blocks of this length do not fit the next


def attention_share(config, workload: Workload, length: int) -> float:
    """Return attention's share of a step's FLOPs, with nothing computed twice."""
    without, whole = (flops_per_token(config, workload, n) for n in (0, length))
    return 1 - without / whole


def render(record: dict) -> str:
    """Return what --longest prints at the end."""
    lengths = record["lengths"]
    longest = f"{lengths[-1]:,}" if lengths else f"less than {record['first_length']:,}"
    steps = f", {record['accumulate']} micro-batches a step" if "accumulate" in record else ""
    limit = f"in steps of {record['length_step']:,}; stopped by {record['stopped_by']}"
    lines = [
        run_records.environment_line(record["environment"]),
        f"{model_line(record)}; custom kernels: {kernels_in_words(record)}",
        f"Longest sequence that fits, batch 1{steps}: {longest} tokens ({limit})",
    ]
    if "seconds" in record:  # older records have none
        seconds, share = record["seconds"], record["attention_share"]
        tokens = lengths[-1] * record.get("accumulate", 1)
        limiter = "attention" if share > 0.5 else "matrix products with weights"
        lines.append(
            f"A step of it: {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s, limited by "
            f"{limiter}: attention has {share:.0%} of the FLOPs"
        )
    return "\n".join(lines)
