"""The ceilings of a GPU: the fastest that a run has seen it copy and multiply.

Before its steps a run measures a copy, matrix products back to back, which bring the GPU to its
power limit, and a short burst of products on a GPU that has rested.  Parts of a step can be faster
than all of these: other shapes, pauses between the products, more reads than writes.  A ceiling is
the best of them all, so nothing is above it, except what comes from the cache.
"""

from collections.abc import Mapping
from typing import NamedTuple

from harness.profiling.kernel_facts import CATEGORIES
from harness.steps.gpus import best_copy_gbs

BURST = "_burst"  # in the key of a rate that a rested GPU reached


class Ceilings(NamedTuple):
    """By the keys copy_gbs, matmul_tflops and, where FP8 was measured, fp8_tflops."""

    rates: dict[str, float]
    reached_by: dict[str, str]  # in words


def flops_at_ceilings_us(flops: float, fp8_flops: float, rates: Mapping[str, float]) -> float:
    """Return the time of FLOPs at the matmul rate; FP8's at the rate of FP8, if measured."""
    matmul = rates["matmul_tflops"]
    fp8 = rates.get("fp8_tflops", matmul)
    return (flops - fp8_flops) / (1e6 * matmul) + fp8_flops / (1e6 * fp8)


def ceilings_of(*records: dict) -> Ceilings:
    """Return the best rates of these records of one GPU: measured, or reached by parts of a step.

    Args:
        records: profiles, or others with the key "ceilings".
    """
    best: dict[str, tuple[float, str]] = {}

    def offer(key: str, rate: float, by: str) -> None:
        best[key] = max(best.get(key, (0.0, "")), (rate, by))

    parts = []
    for record in records:
        for key, rate in record["ceilings"].items():
            how = "read + write" if key == "copy_gbs" else "back to back"
            offer(key.replace(BURST, ""), rate, "a burst" if BURST in key else how)
        named = [*record.get("categories", {}).items()]
        named += [(row["name"], row) for row in record.get("operations", [])]
        parts += [(name, part) for name, part in named if part["bytes"] and part["us"]]
    # without operations of ours: their bytes are estimated, not from their shapes
    counted = ((name, part) for name, part in parts if name.startswith(("aten::", *CATEGORIES)))
    moved = [(part["bytes"] / part["us"] / 1e3, name) for name, part in counted]
    gpu = records[0].get("environment", {}).get("gpu")
    copy_gbs = best_copy_gbs(best["copy_gbs"][0], (gbs for gbs, _ in moved), gpu)
    for gbs, name in moved:
        if gbs == copy_gbs:
            offer("copy_gbs", gbs, f"the step's {name}")
    for name, part in sorted(parts, key=lambda each: multiplies_in_both(each[1])):
        fp8 = part.get("fp8_flops", 0.0) if "fp8_tflops" in best else 0.0
        rates = {key: rate for key, (rate, _) in best.items()}
        share = flops_at_ceilings_us(part["flops"], fp8, rates) / part["us"]
        for key, flops in (("matmul_tflops", part["flops"] - fp8), ("fp8_tflops", fp8)):
            if flops and share > 1:
                offer(key, share * rates[key], f"the step's {name}")
    return Ceilings(*({key: each[i] for key, each in best.items()} for i in (0, 1)))


def multiplies_in_both(part: dict) -> bool:
    """Return True if only some of a part's FLOPs are FP8's: others tell more of either rate."""
    return 0.0 < part.get("fp8_flops", 0.0) < part["flops"]
