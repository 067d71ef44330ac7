"""How much faster are several GPUs, and how much of that does communication cost?

    python -m next_steps.studies.scaling --random-init --json runs/scaling_1.json
    torchrun --nproc-per-node 2 -m next_steps.studies.scaling --random-init --parallel fsdp \\
        --json runs/scaling_fsdp_2.json
    python -m next_steps.studies.scaling --compare runs/scaling_1.json runs/scaling_fsdp_2.json

The baseline, all kernels, all kernels with FP8 and Liger-Kernel, each with a new model, take steps
of several sizes on random tokens.  The slowest process counts.  --ways and --sizes choose some:

    --ways kernels,fp8 --sizes 1x2048,4x2048,1x2048x4     # the last: 4 micro-batches of 1 x 2,048

--compare prints a GPU's speed among several beside its speed alone, from how many tokens on the
computation hides the communication, and what the time is lost to.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

from harness.cli import command_line, flags, processes, tables
from harness.cli.command_line import UserError, flag_name, positive_int
from harness.cli.flags import FP8_ALL
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records
from harness.records.spread import spread
from next_steps.studies import scaling_tables
from next_steps.studies.scaling_tables import IN_PROFILE, WAYS, StepSize

HOW = {  # the settings of each of WAYS
    "baseline": {},
    "kernels": {"kernels": tuple(KERNELS)},
    "fp8": {"kernels": tuple(KERNELS), "fp8": FP8_ALL},
    "liger": {"opponent": "liger"},
}
GPU, CPU = True, False
SIZES_BY_DEVICE = {
    GPU: [
        StepSize(1, 512),
        StepSize(1, 1024),
        StepSize(1, 2048),
        StepSize(2, 2048),
        StepSize(4, 2048),
    ],
    CPU: [StepSize(1, 4), StepSize(1, 8)],
}
STEPS_BY_DEVICE = {GPU: (2, 5), CPU: (1, 2)}  # (steps to warm up, timed steps)


def measure_size(called: Callable, optimizer, size: StepSize, vocabulary: int) -> dict:
    """Return a row's numbers, equal in all processes, or a `failure` if the step does not fit.

    What the profile says (`IN_PROFILE`) is of the process that waits least.
    """
    from harness.cli.device import DEVICE, HAS_GPU
    from harness.data.dataset import random_batch
    from harness.profiling import profiler
    from harness.steps import measured, parallel

    def draw(n_steps: int) -> list[list]:
        shape = size.batch_size, size.seq_len
        micro_batches = range(size.accumulate)
        return [
            [random_batch(shape, vocabulary, DEVICE) for _ in micro_batches] for _ in range(n_steps)
        ]

    row = measured.measure(called, optimizer, *map(draw, STEPS_BY_DEVICE[HAS_GPU]))
    if "failure" in row:
        return row
    row["median_ms"] = statistics.median(row["step_ms"])
    row["p20_ms"], row["p80_ms"] = spread(row["step_ms"])
    row["tokens_per_second_per_gpu"] = 1e3 * size.tokens / row["median_ms"]
    if HAS_GPU:
        _, times = profiler.timeline(called, optimizer, draw(2))
        row |= zip(IN_PROFILE, min(parallel.gather(*(times[key] for key in IN_PROFILE))))
    return row


def rows_of(workload: Workload, sizes: list[StepSize], record: dict) -> Iterator[dict]:
    """Yield the rows of one way, without its name, up to the first size that does not fit."""
    import torch

    from harness.steps import communication, measured
    from next_steps.finetuning import kernel_training, opponent_models

    prepare = (
        opponent_models.prepare_opponent if workload.opponent else kernel_training.prepare_kernels
    )
    try:
        model, called, optimizer = prepare(workload)
    except RuntimeError as error:
        yield sizes[0].as_record() | measured.failure_of(error)
        return
    record["parameters"] = sum(p.numel() for p in model.parameters())
    if workload.parallel and "communication" not in record:  # the same for all ways and sizes
        record["communication"] = communication.expected(model, workload)
    # all processes have the same model, and each its own tokens
    torch.manual_seed(workload.seed + processes.rank())
    for size in sizes:
        if workload.fp8:
            model.between_micro_batches.begin()  # other sizes leave other room
        row = size.as_record() | measure_size(called, optimizer, size, model.config.vocab_size)
        yield row
        if "failure" in row:
            return


def measure_ways(
    workload: Workload, record_to: str | None, ways: list[str], sizes: list[StepSize]
) -> None:
    """Measure every row in this process group, and write the record after each.

    `ways` are some of WAYS, in its order; `sizes` come with the smallest first.
    """
    from harness.cli.device import HAS_GPU, free_memory
    from harness.model.architecture import TORCH_DTYPES
    from harness.profiling import profiler
    from next_steps.memory import parallel_choice

    largest = replace(workload, **HOW[ways[0]])  # with the way that needs most memory
    workload = replace(workload, parallel=parallel_choice.start_processes(largest).parallel)
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = {
        "kind": "scaling",
        "environment": run_records.environment(),
        **workload.as_record(),
        "world_size": processes.world_size(),
        "parallel": workload.parallel,
        "ceilings": profiler.measure_ceilings(TORCH_DTYPES[workload.dtype]),
        "absent": [],
        "rows": [],
    }
    for way in ways:
        try:
            for row in rows_of(replace(workload, **HOW[way]), sizes, record):
                record["rows"].append({"way": WAYS[way], **row})
                print(scaling_tables.row_in_words(record["rows"][-1], HAS_GPU), flush=True)
                run_records.write_record(record_to, record, is_whole=False)
        except UserError as error:
            if way not in ("fp8", "liger"):
                raise
            record["absent"].append(f"{WAYS[way]} is left out: {error}")
            print(record["absent"][-1], flush=True)
        free_memory()  # of this way's model
    run_records.write_record(record_to, record)


def ways(text: str) -> list[str]:
    """argparse type: names of WAYS, in WAYS' order."""
    names = text.split(",")
    command_line.require_known("way", names, WAYS)
    return [way for way in WAYS if way in names]


def sizes(text: str) -> list[StepSize]:
    """argparse type: sizes such as 4x2048, or 4x2048x4 of four micro-batches, the smallest first.

    Memory decides: a micro-batch's tokens, and then the number of micro-batches.
    """
    numbers = [[*map(positive_int, word.split("x"))] for word in text.split(",")]
    if any(len(each) not in (2, 3) for each in numbers):
        raise argparse.ArgumentTypeError(f"expected sizes such as 4x2048 or 4x2048x4, not {text!r}")
    found = itertools.starmap(StepSize, numbers)
    return sorted(found, key=lambda size: (size.batch_size * size.seq_len, size.accumulate))


def main() -> None:
    shared = "--model", "--random-init", "--parallel"
    parser = flags.FlagParser(__doc__, {flag: flags.OF_TRAINING[flag] for flag in shared})
    add = parser.add_argument
    words = ", ".join(WAYS)
    add("--ways", type=ways, default=[*WAYS], metavar="NAME,NAME", help=f"some of {words}")
    words = "of a step in each process: sequences x tokens, or sequences x tokens x micro-batches"
    add("--sizes", type=sizes, metavar="BxT,BxTxN", help=words)
    add("--json", metavar="FILE", help="write the rows as a JSON record, after each of them")
    words = "measure nothing: print the tables of a record of one process and those of several"
    add("--compare", nargs="+", metavar="FILE", help=words)
    add("--plot", metavar="FILE.png", help="with --compare: what is exposed, against tokens")
    args = parser.parse_args()
    if args.plot and not args.compare:
        raise UserError("--plot draws what --compare reads: add --compare FILE FILE")
    if args.compare and (rest := args.given - {"compare", "plot"}):
        raise UserError(f"{flag_name(min(rest))} does nothing with --compare: leave it out")
    check_outputs(args)
    if args.compare:
        records = scaling_tables.read_scaling(args.compare)
        print(scaling_tables.render(*records))
        if args.plot:
            scaling_tables.plot(records[1:], args.plot)
        return
    from harness.cli.device import HAS_GPU

    workload = replace(Workload.from_flags(args, HAS_GPU), data="synthetic", lr=1e-5)
    taken = args.sizes or SIZES_BY_DEVICE[HAS_GPU]
    workload = replace(workload, batch_size=taken[-1].batch_size, seq_len=taken[-1].seq_len)
    measure_ways(workload, args.json, args.ways, taken)


if __name__ == "__main__":
    command_line.run_main(main)
