"""How much faster are several GPUs, and how much of that does communication cost?

    python -m next_steps.studies.scaling --random-init --json runs/scaling_1.json
    torchrun --nproc-per-node 2 -m next_steps.studies.scaling --random-init \\
        --json runs/scaling_fsdp_2.json
    python -m next_steps.studies.scaling --compare runs/scaling_1.json runs/scaling_fsdp_2.json

The baseline, all kernels, all kernels with FP8 and Liger-Kernel, each with a new model, take steps
of several sizes on random tokens.  The slowest process counts.  --ways and --sizes choose some:

    --ways kernels,fp8 --sizes 1x2048,4x2048,1x2048x4     # the last: 4 micro-batches of 1 x 2,048

--compare prints a GPU's speed among several beside its speed alone, and from how many tokens on the
computation hides the communication.
"""

import argparse
import itertools
from dataclasses import replace

from harness.cli import command_line, flags
from harness.cli.command_line import UserError, positive_int
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload
from next_steps.studies import scaling_tables
from next_steps.studies.scaling_tables import WAYS, Size


def ways(text: str) -> list[str]:
    """argparse type: names of WAYS, in WAYS' order."""
    if unknown := [word for word in text.split(",") if word not in WAYS]:
        words = f"unknown way {', '.join(map(repr, unknown))}; choose from {', '.join(WAYS)}"
        raise argparse.ArgumentTypeError(words)
    return [way for way in WAYS if way in text.split(",")]


def sizes(text: str) -> list[Size]:
    """argparse type: sizes such as 4x2048, or 4x2048x4 of four micro-batches, in order."""
    numbers = [[*map(positive_int, word.split("x"))] for word in text.split(",")]
    if any(len(each) not in (2, 3) for each in numbers):
        raise argparse.ArgumentTypeError(f"expected sizes such as 4x2048 or 4x2048x4, not {text!r}")
    found = itertools.starmap(Size, numbers)
    return sorted(found, key=Size.needs)


def main() -> None:
    shared = "--model", "--random-init", "--parallel"
    parser = flags.Parser(__doc__, {flag: flags.OF_TRAINING[flag] for flag in shared})
    add = parser.add_argument
    words = ", ".join(WAYS)
    add("--ways", type=ways, default=[*WAYS], metavar="NAME,NAME", help=f"some of {words}")
    words = "of a step in each process: sequences x tokens, or sequences x tokens x micro-batches"
    add("--sizes", type=sizes, metavar="BxT,BxTxN", help=words)
    add("--json", metavar="FILE", help="write the rows as a JSON record, after each of them")
    add(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="measure nothing: print the tables of a record of one process and those of several",
    )
    add("--plot", metavar="FILE.png", help="with --compare: what is exposed, against tokens")
    args = parser.parse_args()
    if args.plot and not args.compare:
        raise UserError("--plot draws what --compare reads: add --compare FILE FILE")
    check_outputs(args)
    if args.compare:
        records = scaling_tables.read(args.compare)
        print(scaling_tables.render(*records))
        if args.plot:
            scaling_tables.plot(records[1:], args.plot)
        return
    from harness.cli.device import HAS_GPU
    from next_steps.studies import scaling_steps

    workload = replace(Workload.from_flags(args, HAS_GPU), data="synthetic", lr=1e-5)
    taken = args.sizes or scaling_steps.SIZES[HAS_GPU]
    workload = replace(workload, batch_size=taken[-1].batch_size, seq_len=taken[-1].seq_len)
    scaling_steps.walk(workload, args.json, args.ways, taken)


if __name__ == "__main__":
    command_line.run_main(main)
