"""FP8 in a layer of LLaMA 3.1 8B: what does each cast cost, fused and apart, and what is it for?

    python -m next_steps.studies.fp8_costs --json runs/fp8_costs.json
    python -m next_steps.studies.fp8_costs --tokens 512,8192

Casts: the kernel of the bf16 layer, the same and quantize_rows after it, and the kernel that does
both; beside them the time in which a copy would move the fused one's bytes.  Where there is only
one column, the cast has no kernel to be fused with.  Products: PyTorch's in bf16, and in FP8 with
fast addition and without, of codes that are there.

Times are those of the GPU alone, replayed from a CUDA graph: what fits in its cache stays there, as
512 tokens do.
"""

import argparse

from harness.cli import command_line
from harness.cli.command_line import RunError
from harness.cli.output_files import check_outputs
from harness.cli.tables import number, table, title
from harness.records.run_records import environment, environment_line, write_record

GPU_TOKENS, CPU_TOKENS = (512, 8192), (16,)
LARGEST_ERROR = 2**-4  # of codes beside those of the separate kernels


def measured(fn) -> float:
    """us of the GPU; without one, of the host, where it means nothing."""
    from harness.cli.device import HAS_GPU
    from harness.steps import timing

    return timing.graph_time_us(fn) if HAS_GPU else timing.time_us(fn).p50


def check(cast) -> None:
    """Refuse to time a kernel that is wrong.

    Raises:
        RunError: fused and separate give other numbers.
    """
    import torch

    from harness.benchmark.checking import relative_error
    from next_steps.lessons.fp8_kernel import dequantize

    for ours, apart in zip(cast.fused(), cast.separate()):
        found, expected = (dequantize(rows, torch.float32) for rows in (ours, apart))
        error = relative_error(found, expected.double())
        if not error <= LARGEST_ERROR:
            raise RunError(
                f"{cast.name}: fused and separate differ by {error:.1e}, but only "
                f"{LARGEST_ERROR:.1e} is allowed; a wrong kernel is not timed"
            )


def cast_row(cast, tokens: int | None) -> dict:
    if cast.separate is not None:
        check(cast)
    times = {
        f"{way}_us": None if fn is None else measured(fn)
        for way, fn in (("alone", cast.alone), ("separate", cast.separate), ("fused", cast.fused))
    }
    return {"name": cast.name, "tokens": tokens, "bytes": cast.n_bytes, **times}


def product_row(product, tokens: int) -> dict:
    return {
        "name": product.name,
        "tokens": tokens,
        "shape": list(product.shape),
        "bf16_us": measured(product.bf16),
        "fast_us": measured(lambda: product.fp8(True)),
        "accurate_us": measured(lambda: product.fp8(False)),
    }


def measure(tokens: list[int]) -> dict:
    """The record.

    Raises:
        RunError: the GPU cannot multiply FP8, or a kernel is wrong.
    """
    from harness.steps import timing
    from next_steps.lessons.fp8_kernel import fp8_support
    from next_steps.studies import fp8_contenders

    reason = fp8_support()
    if reason is not None:
        raise RunError(reason)
    casts = [(cast, None) for cast in fp8_contenders.weight_casts()]
    record = {
        "kind": "fp8_costs",
        "environment": environment(),
        "copy_gbs": timing.copy_bandwidth(),
        "casts": [cast_row(*each) for each in casts],
        "products": [],
    }
    del casts
    for n_tokens in tokens:
        record["casts"] += [cast_row(cast, n_tokens) for cast in fp8_contenders.casts(n_tokens)]
        record["products"] += [
            product_row(product, n_tokens) for product in fp8_contenders.products(n_tokens)
        ]
    return record


def render(record: dict) -> str:
    mark = "" if record["environment"]["gpu"] else " (CPU: timings not meaningful)"
    casts = []
    for row in record["casts"]:
        floor = row["bytes"] / record["copy_gbs"] / 1e3  # us
        saved = None if row["separate_us"] is None else row["separate_us"] - row["fused_us"]
        times = [number(row[f"{way}_us"]) for way in ("alone", "separate", "fused")]
        share = number(100 * floor / row["fused_us"], ",.0f")
        tokens = number(row["tokens"], ",", missing="any")
        casts.append([row["name"], tokens, *times, number(saved), number(floor), share])
    products = []
    for row in record["products"]:
        M, N, K = row["shape"]
        times = [row[f"{way}_us"] for way in ("bf16", "fast", "accurate")]
        gains = [number(times[0] - us) for us in times[1:]]
        shape = f"{M:,} x {N:,} x {K:,}"
        products.append([row["name"], f"{row['tokens']:,}", shape, *map(number, times), *gains])
    cast_headers = ["Cast", "Tokens", "bf16 alone", "and cast", "Fused", "Saved", "Floor"]
    cast_headers += ["% of copy"]
    product_headers = ["Product", "Tokens", "M x N x K", "bf16", "FP8, fast", "FP8"]
    product_headers += ["Gain, fast", "Gain"]
    return "\n".join(
        [
            environment_line(record["environment"]),
            title(f"FP8 in a layer: casts and products, us{mark}"),
            f"Floor: the fused kernel's bytes at a copy's {record['copy_gbs']:,.0f} GB/s",
            "",
            table(cast_headers, casts, ["left"] + ["right"] * 7),
            "",
            table(product_headers, products, ["left"] + ["right"] * 7),
        ]
    )


def number_list(text: str) -> list[int]:
    """argparse type: multiples of 16 up to 32,768, separated by commas."""
    found = sorted({command_line.positive_int(part) for part in text.split(",")})
    for n in found:
        if n % 16 or n > 32_768:
            raise argparse.ArgumentTypeError(
                f"must be multiples of 16 up to 32,768, which FP8's products take, not {n:,}"
            )
    return found


def main() -> None:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    default = "512,8192, and 16 without a GPU"
    add("--tokens", type=number_list, metavar="N,N", help=f"multiples of 16 (default: {default})")
    add("--json", metavar="FILE", help="write the rows as a JSON record")
    args = parser.parse_args()
    check_outputs(args)
    from harness.cli.device import HAS_GPU, require_interpreter

    require_interpreter()
    record = measure(args.tokens or list(GPU_TOKENS if HAS_GPU else CPU_TOKENS))
    print(render(record))
    write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
