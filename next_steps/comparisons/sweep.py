"""Would other launch settings than the files carry be faster on this GPU?  (docs/sweeps.md)

    python -m next_steps.comparisons.sweep --kernel rmsnorm

How a setting is tried: sweep_kernels.py.
"""

from harness.benchmark import benchmark_specs as specs
from harness.cli import command_line
from harness.cli.command_line import positive_int
from harness.cli.flags import FlagParser, row
from harness.cli.output_files import check_outputs
from harness.records.run_records import write_record
from next_steps.comparisons.benchmark_runs import (
    measure_sizes,
    refuse_interpreting,
    refuse_unused,
    size_flags,
)
from next_steps.comparisons.sweep_tables import render_sweep

SWEPT = {name: spec for name, spec in specs.SPECS.items() if spec.swept_tokens}
FLAGS = {
    "--kernel": row("whose launches", choices=[*SWEPT, "all"], default="all"),
    **size_flags(SWEPT),
    "--tokens": row("rows of the input", type=positive_int, metavar="N"),
    "--dtype": row("of inputs and gradients", choices=specs.TIMED_DTYPES, default="bf16"),
    "--json": row("write the measurements as a JSON record", metavar="FILE"),
}


def main() -> None:
    args = FlagParser(__doc__, FLAGS).parse_args()
    refuse_unused(args)
    check_outputs(args)
    from harness.cli.device import HAS_GPU
    from next_steps.comparisons import sweep_kernels

    def measure(kernel: str, size: int, record: dict) -> None:
        spec = SWEPT[kernel]
        tokens = args.tokens or (spec.swept_tokens if HAS_GPU else spec.cpu_tokens[-1])
        refuse_interpreting(tokens, size)
        record["sections"] += sweep_kernels.sweep(kernel, tokens, size, args.dtype)

    kernels = SWEPT if args.kernel == "all" else [args.kernel]
    record = measure_sizes("sweep", kernels, args, measure)
    print(render_sweep(record))
    write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
