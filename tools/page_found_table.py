"""The table of docs/found.md: ten findings, each with a figure that its records give.

tests/found_page_test.py asks whether the records still say what each sentence says.
"""

from statistics import mean

from harness.benchmark.benchmark_specs import IN_PLACE
from next_steps.studies import ladder
from tools.page_kernel_tables import by_size
from tools.page_records import StepTime, gb, load_record, page_table, per_cent
from tools.page_step_tables import base_ours_and_strongest

SMALL_STEP, LARGE_STEP = "1x512", "4x2048"


def category_ms(profile: str) -> dict[str, float]:
    """Return the GPU's time by category of a profile's record."""
    return {name: part["us"] / 1e3 for name, part in load_record(profile)["categories"].items()}


def shares_of_the_small_step() -> tuple[float, float]:
    """Return the optimizer's share of the GPU's time, and that of the playbook's two targets."""
    ms = category_ms(f"profile_{SMALL_STEP}")
    targets_ms = ms["normalization"] + ms["loss"]
    return ms["optimizer"] / sum(ms.values()), targets_ms / sum(ms.values())


def norms_and_steps_ms() -> list[tuple[float, float]]:
    """Return the norms' time and the step's, before and after RMSNorm's kernel."""
    names = f"profile_{SMALL_STEP}", f"profile_{SMALL_STEP}_rmsnorm"
    return [
        (category_ms(name)["normalization"], load_record(name)["median_step_ms"]) for name in names
    ]


def saved_and_lost_ms() -> tuple[float, float]:
    """Return what two kernels save of their categories, and what the products take longer."""
    before, after = (category_ms(f"profile_{LARGE_STEP}{which}") for which in ("", "_both"))
    saved_ms = sum(before[name] - after[name] for name in ("normalization", "loss"))
    return saved_ms, after["matmul"] - before["matmul"]


def in_place_and_three_trips() -> tuple[float, float]:
    """Return the us that the loss in place takes, and three trips to memory at the copy rate."""
    row = by_size("cross_entropy", 8192)[0][IN_PLACE]
    n_bytes = row.section["bytes_per_element"] * row["tokens"] * row.section["size"]
    return row.total, n_bytes / row.record["copy_gbs"] / 1e3


def graph_gains() -> list[str]:
    """Return what a CUDA graph gains over all kernels without one, at both sizes."""
    found = []
    for size in (SMALL_STEP, LARGE_STEP):
        *_, eager, graph = (StepTime.of(r) for r in ladder.blocks(load_record(f"ladder_{size}"))[0])
        found.append(eager.over(graph))
    return found


def peak_of_the_small_step() -> dict:
    """Return the memory's record: the peak, what it is made of, and the operation it is in."""
    return load_record(f"memory_baseline_{SMALL_STEP}")


def judged_functions() -> list[bool]:
    """Return of each function that is not ours whether it broke a contract of the judge."""
    return [
        any(verdict["outcome"] == "wrong" for verdict in verdicts)
        for name, verdicts in load_record("judged")["judged"].items()
        if not name.partition(": ")[0].endswith("_rows") and not name.endswith(": ours")
    ]


def losses_by_rounding() -> list[float]:
    """Return the mean validation losses of bf16 weights, rounded to the nearest and at random."""
    runs = load_record("moments_accuracy")["runs"]
    ways = "bf16", "bf16, rounded randomly"
    return [mean(run["curve"][-1] for run in runs if run["way"] == way) for way in ways]


def fp8_gains() -> list[str]:
    """Return what --fp8 gains over all kernels in bf16, at both sizes."""
    found = []
    for size in (LARGE_STEP, SMALL_STEP):
        bf16, fp8 = (StepTime.of(load_record(f"fp8_{way}_{size}")) for way in ("bf16", "all"))
        found.append(bf16.over(fp8))
    return found


def compiled_and_ours() -> list[dict]:
    """Return the runs at 4 x 2,048 tokens of the strongest other and of all kernels."""
    _, ours, strongest = base_ours_and_strongest(LARGE_STEP)
    return [strongest, ours]


def found_table() -> str:
    """What surprised, and its figure."""
    optimizer, targets = map(per_cent, shares_of_the_small_step())
    (norm, step), (norm_after, step_after) = norms_and_steps_ms()
    saved, lost = saved_and_lost_ms()
    peak, broken = peak_of_the_small_step(), judged_functions()
    roots, whole = gb(peak["parts"]["temporaries"]), gb(peak["peak_memory_bytes"])
    nearest, at_random = losses_by_rounding()
    both = compiled_and_ours()
    times_ms = " and ".join(f"{run['step_ms']:.0f}" for run in both)
    peaks = " and ".join(gb(run["peak_memory_bytes"]) for run in both)
    found = [
        (
            "The optimizer takes most of a step of 1 × 512 tokens",
            f"{optimizer}; norms and loss together {targets}",
        ),
        (
            "A norm ten times as fast made that step longer",
            f"{norm:.1f} → {norm_after:.1f} ms; step {step:.0f} → {step_after:.0f} ms",
        ),
        (
            "Faster kernels make the matrix products slower",
            f"kernels -{saved:.1f} ms, products +{lost:.1f} ms",
        ),
        (
            "In place, the loss beats three trips to memory",
            "{:,.0f} µs; they take {:,.0f}".format(*in_place_and_three_trips()),
        ),
        ("A CUDA graph gains at 1 × 512 tokens, not at 4 × 2,048", "; ".join(graph_gains())),
        ("Square roots make the peak of memory at 1 × 512 tokens", f"{roots} of {whole} GB"),
        ("Most other functions break a contract of the judge", f"{sum(broken)} of {len(broken)}"),
        (
            "bf16 weights train better if they are rounded at random",
            f"loss {nearest:.3f} → {at_random:.3f}",
        ),
        ("FP8 gains at 4 × 2,048 tokens, not at 1 × 512", "; ".join(fp8_gains())),
        (
            "torch.compile comes near all kernels in time, not in memory",
            f"{times_ms} ms; {peaks} GB",
        ),
    ]
    rows = [(f"{i}. {what}", figure) for i, (what, figure) in enumerate(found, start=1)]
    return page_table(rows, "what was found | figure")
