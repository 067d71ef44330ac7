"""What a run prints, from its record alone: what runs, a line for each step, the result block."""

import statistics

from harness.cli.flags import FP8_OPPONENTS
from harness.cli.tables import NO_GPU_NOTE, OF_STEPS, not_shown, title
from harness.cli.workload import kernels_in_words, model_line, size_in_words, teacher_line
from harness.profiling.diagnose import saved_by_a_graph_ms
from harness.profiling.profile_tables import ceilings_line
from harness.records.run_records import environment_line
from harness.records.spread import spread, timed, waited
from harness.steps.power import joules_per_token, power_in_words


def opening(record: dict, data_source: str) -> str:
    """Return what is printed before the first step, when the record has no steps yet."""
    on_gpu = record["environment"]["gpu"] is not None
    lines = [] if on_gpu else [NO_GPU_NOTE + "\n"]
    lines += [environment_line(record["environment"]), model_line(record)]
    lines += [teacher_line(record)] if "teacher" in record else []
    lines += [f"Data: {data_source}"]
    lines += [f"Step: {size_in_words(record)}"] if "parallel" in record else []
    kernels, lr = kernels_in_words(record), record["lr"]
    lines += [f"Custom kernels: {kernels}; AdamW, learning rate {lr:g}", ""]
    return "\n".join(lines)


def step_line(step: int, n_steps: int, columns: dict[str, list], on_gpu: bool) -> str:
    """Return what is printed after a step, counted from 1; `columns` are those of a record."""
    names = "losses", "seconds", "tokens", "peaks"
    loss, seconds, tokens, peak = (columns[name][step - 1] for name in names)
    left = statistics.median(columns["seconds"][:step]) * (n_steps - step)
    words = f"step {step:>{len(str(n_steps))}}/{n_steps}  loss {loss:8.4f}  "
    if on_gpu:
        words += f"{seconds:7.3f} s  {tokens / seconds:>9,.0f} tokens/sec  "
        words += f"peak {peak / 1e9:6.1f} GB  "
    return f"{words}ETA {left:4.0f} s"


def share_of_step(record: dict, key: str, of_what: str) -> str:
    """Return some milliseconds of a record and their share of its median step, or "n/a"."""
    ms = record.get(key)
    if ms is None:
        return "n/a"
    share = ms / (1e3 * record["median_seconds"])
    if share > 1 and key == "least_ms":
        return f"{ms:,.1f} ms {of_what}: more than a step takes, so no floor"
    share = min(1.0, share)  # the profiled step may be a little longer than the median step
    return f"{100 * share:.0f} % of the median step: {ms:,.1f} ms {of_what}"


def rounding_advice(record: dict) -> list[str]:
    """Return the sentence for a run that rounds bf16 weights to the nearest, if it may decide.

    Such a run trains all weights on a user's own data.  The tutorial's runs and an opponent's
    compare PyTorch as it is, so nothing is advised there.  What adapters gain was not measured.
    """
    own_data = record.get("data") not in (None, "stdlib", "synthetic")
    otherwise = "stochastic_rounding", "opponent", "lora_rank", "teacher"
    if not own_data or record["dtype"] != "bf16" or any(record.get(key) for key in otherwise):
        return []
    flags = "finetune_optimized.py --kernels all --stochastic-rounding"
    return [f"bf16 weights round small updates away: {flags} keeps them (docs/own_data.md)."]


def result_block(record: dict) -> str:
    """Return the playbook's result block, from a record; older records lack some of its lines."""
    on_gpu = record["environment"]["gpu"] is not None
    rows = times_of(record) if on_gpu else {}
    if padding := record.get("padding"):
        rows["Padding:"] = f"{100 * padding:.1f} % of what is computed; its tokens do not count"
    if waits := record.get("checkpoint_seconds"):
        rows["Waiting for checkpoints:"] = f"{sum(waits):.1f} s in all, for {len(waits)}"
    before, after = record["validation_loss_before"], record["validation_loss_after"]
    rows["Validation loss:"] = f"{before:.4f} before, {after:.4f} after"
    more = [OF_STEPS] if on_gpu else [not_shown("speeds are")]
    more += [ceilings_line(record)] if on_gpu and record.get("ceilings") else []
    if "teacher" in record:
        begin, end = record["losses"][0], record["losses"][-1]
        change = f"{begin:.4f} in step 1, {end:.4f} in step {record['steps']}"
        rows["Distillation loss:"] = change
        more.append(teacher_line(record))
    lines = [f"{name:<25} {text}" for name, text in rows.items()]
    return "\n".join([title(f"{record['title']} Results"), *lines, *more, *rounding_advice(record)])


def times_of(record: dict) -> dict[str, str]:
    """Return the rows of the result block that only a GPU has: times, memory, power."""
    last_step = record["steps"]
    mfu = record["model_flops_utilization"]
    of_rate = "of the data sheet's dense bf16 rate"
    first, last = record["warmup_steps"] + 1, last_step - record.get("profiled_steps", 0)
    low, high = spread(timed(record))
    around = f"20th to 80th percentile: {low:.3f} to {high:.3f} s"
    throughput = f"{record['tokens_per_second']:,.0f} tokens/sec"
    if "tokens_per_second_per_gpu" in record:
        throughput += f", {record['tokens_per_second_per_gpu']:,.0f} in each process"
    profiled = f"of kernels in step {last_step}, which was profiled"
    rows = {
        "Average time per step:": f"{record['average_seconds']:.3f} s (steps {first} to {last})",
        "Median time per step:": f"{record['median_seconds']:.3f} s ({around})",
        "Average throughput:": throughput,
        "Peak GPU memory:": f"{record['peak_memory_bytes'] / 1e9:.1f} GB",
        "GPU busy:": share_of_step(record, "busy_ms", profiled),
    }
    if saved_ms := saved_by_a_graph_ms(record):
        saved = f"up to {saved_ms:,.0f} ms less a step, in which the GPU waits for the host"
        # a step of another library may wait for the GPU
        where = "; if the step can be recorded" if record.get("opponent") else ""
        rows["With --cuda-graph:"] = saved + where
    if "power" in record:
        rows["Power and clock:"] = power_in_words(record["power"])
        if joules := joules_per_token(record):
            rows["Energy:"] = f"{1e3 * joules:.1f} mJ a token"
    if record.get("opponent") not in FP8_OPPONENTS:  # least_ms is of products in bf16
        ceilings = "at the measured ceilings, without the host"
        rows["Speed of light:"] = share_of_step(record, "least_ms", ceilings)
    if "data_seconds" in record:
        rows["Waiting for data:"] = f"at most {100 * waited(record):.2f} % of the steps' time"
    rows["Model FLOPs utilization:"] = "n/a" if mfu is None else f"{100 * mfu:.1f} % {of_rate}"
    return rows
