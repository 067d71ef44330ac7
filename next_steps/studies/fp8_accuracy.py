"""What does FP8 cost in accuracy?  The same training in bf16 and in FP8, from several seeds.

    python -m next_steps.studies.fp8_accuracy --json runs/fp8_accuracy.json

Real weights on real text, 200 steps.  A seed is an order of the data.  Each seed's runs see the
same batches, so their losses differ by what the products are rounded to, and hardly by luck.  Each
run computes its validation loss before the first step and after every twentieth, on the same
held-out sequences: in bf16 whatever it trains in, which is what the weights are worth that it
saves.  A run in FP8 does so with FP8's products too, which is what they are worth to whoever goes
on computing in FP8.

Two numbers come out for each way to compute:

    difference   validation loss at the end, minus that of bf16 with the same seed
    more steps   how many more it needs for the same loss.  Its last validation loss is one that
                 bf16 had so many steps before the end, by a straight line between two points of its
                 curve.  If bf16 has not reached that loss, then no more are needed, and how many
                 fewer is not known; if bf16 never was as high, all of the steps and more

One run after another, so that the time of a step means something; with --jobs 5 five at a time,
whose steps are not timed.

The model is SmolLM2-135M out of a package of PyPI, if that is installed; --model names another.
"""

import argparse
import contextlib
import io
import itertools
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from harness.cli import command_line
from harness.cli.command_line import UserError, positive_float, positive_int
from harness.cli.flags import DTYPES, FP8_ALL, FP8_INPUTS
from harness.cli.tables import number
from harness.cli.workload import Workload, model_line, size_in_words
from harness.profiling.kernel_facts import KERNELS

MODES = None, FP8_INPUTS, FP8_ALL  # of --fp8; the first is what the others are compared with
POINTS = 10  # of a validation curve, after the one before the first step
HEADERS = (
    *("Products", "Validation loss", "Difference", "Smallest", "Largest", "More steps"),
    *("Smallest", "Largest", "Step, ms"),
)
CENSORED = "<= 0: bf16 has not reached that loss; >= all steps: it was never as high."


def train(workload: Workload, every: int) -> dict:
    """One run: its record, in which "curve" is the validation loss at steps 0, every, ...

    "curve_in_fp8" is the same with FP8's products, of a run that trains so.
    """
    from harness.training.training_run import Run, validation_loss
    from next_steps.finetuning import kernel_training
    from next_steps.patches.fp8_model import without_fp8

    class Validated(Run):
        """A run that validates every so many steps."""

        def end_step(self, loss):
            super().end_step(loss)
            if len(self.losses) % every == 0:
                self.add_point(validation_loss(self.model, self.data.validation))

        def add_point(self, validated):
            """To the curves, what the model in the way that it trains was validated as."""
            if self.workload.fp8:
                self.curve_in_fp8.append(validated)
                with without_fp8(self.model):
                    validated = validation_loss(self.model, self.data.validation)
            self.curve.append(validated)

    model, called, optimizer = kernel_training.prepare(workload)
    run = Validated(words_of(workload.fp8, workload.dtype), workload, model)
    run.curve, run.curve_in_fp8 = [], []
    run.add_point(run.validation_before)
    return kernel_training.take_steps(run, optimizer, called) | {
        "curve": run.curve,
        "curve_in_fp8": run.curve_in_fp8,
        "source": run.data.source,
    }


def words_of(mode: str | None, dtype: str) -> str:
    return dtype if mode is None else f"fp8 {mode}"


# ---------------------------------------------------------------- what comes out


def reached(curve: list[float], loss: float, every: int) -> tuple[float, str]:
    """The step at which a falling curve is first at this loss, and how that is known.

    The word is "" where it was seen, "<=" where the loss is above the first point, ">=" where the
    curve ends above the loss.
    """
    if loss >= curve[0]:
        return 0.0, "<=" if loss > curve[0] else ""
    for i, (before, after) in enumerate(itertools.pairwise(curve)):
        if after <= loss:
            return every * (i + (before - loss) / (before - after)), ""
    return float(every * (len(curve) - 1)), ">="


def more_steps(reference: list[float], curve: list[float], every: int) -> tuple[float, str]:
    """How many more than the reference a run needs for the same loss, and "", "<=" or ">="."""
    step, known = reached(reference, curve[-1], every)
    last = every * (len(reference) - 1)
    return last - step, {"": "", ">=": "<=", "<=": ">="}[known]


def row_of(mode: str | None, runs: dict, every: int, dtype: str) -> list[str]:
    """A row of the table.

    Args:
        runs: of each mode, in the order of the seeds: curve and median_seconds.
    """
    found, references = runs[mode], runs[None]
    losses = [run["curve"][-1] for run in found]
    seconds = [run["median_seconds"] for run in found]
    ms = number(None if None in seconds else 1e3 * statistics.median(seconds))
    row = [words_of(mode, dtype), f"{statistics.mean(losses):.4f}"]
    if mode is None:
        return [*row, *[""] * 6, ms]
    pairs = list(zip(references, found))
    apart = [run["curve"][-1] - other["curve"][-1] for other, run in pairs]
    row += [f"{each:+.4f}" for each in (statistics.mean(apart), min(apart), max(apart))]
    steps = sorted(more_steps(other["curve"], run["curve"], every) for other, run in pairs)
    words = [f"{known} {n:.1f}".strip() for n, known in (steps[0], steps[-1])]
    mean = f"{statistics.mean(n for n, _ in steps):.1f}"
    return [*row, mean, *words, ms]


def line_in_fp8(mode: str, runs: dict, dtype: str) -> str:
    """How far a mode's losses are from the first mode's if FP8's products validate them."""
    pairs = list(zip(runs[None], runs[mode]))
    before, after = (
        statistics.mean(run["curve_in_fp8"][at] - other["curve"][at] for other, run in pairs)
        for at in (0, -1)
    )
    return (
        f"{words_of(mode, dtype)}, validated with FP8's products too: {before:+.4f} before the "
        f"first step, {after:+.4f} after the last"
    )


def render(record: dict) -> str:
    """Everything that is printed at the end, from the record."""
    from harness.cli import tables
    from harness.records import run_records

    runs, every = runs_of(record), record["every"]
    rows = [row_of(mode, runs, every, record["dtype"]) for mode in runs]
    n_seeds = len(record["seeds"])
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            model_line(record),
            f"Data: {record['source']}; {size_in_words(record)}; {record['steps']} steps, learning "
            f"rate {record['lr']:g}",
            "",
            tables.title(f"Accuracy of FP8, {n_seeds} seeds"),
            tables.table(list(HEADERS), rows),
            f"Means over the seeds, smallest and largest of one. {CENSORED}",
            f"Validated in {record['dtype']}, whatever the run trained in.",
            *(line_in_fp8(mode, runs, record["dtype"]) for mode in runs if mode),
            tables.OF_STEPS if record["environment"]["gpu"] else tables.NO_GPU_NOTE,
        ]
    )


def runs_of(record: dict) -> dict:
    """Of each mode the runs, in the order of the seeds."""
    modes = dict.fromkeys(run["fp8"] for run in record["runs"])
    return {mode: [run for run in record["runs"] if run["fp8"] == mode] for mode in modes}


# ---------------------------------------------------------------- the runs


def train_silently(workload: Workload, every: int) -> dict:
    from harness.cli.device import free_memory

    with contextlib.redirect_stdout(io.StringIO()):  # a line for each step
        run = train(workload, every)
    free_memory()
    return run


def train_all(workloads: list[Workload], every: int, n_jobs: int) -> Iterable[dict]:
    """A record for each, in their order; of several jobs without the time of a step."""
    if n_jobs == 1:
        yield from (train_silently(workload, every) for workload in workloads)
        return
    context = multiprocessing.get_context("spawn")  # a GPU is not to be forked
    with ProcessPoolExecutor(min(n_jobs, len(workloads)), context) as jobs:
        for run in jobs.map(train_silently, workloads, itertools.repeat(every)):
            yield run | {"median_seconds": None}


def walk(workload: Workload, name: str, n_seeds: int, n_jobs: int, record_to: str | None) -> None:
    """Train every seed in every mode, print the table, write the record."""
    from harness.cli import tables
    from harness.cli.device import HAS_GPU
    from harness.records import run_records

    every = max(1, workload.steps // POINTS)
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = {"kind": "fp8_accuracy", "seeds": list(range(n_seeds)), "every": every, "runs": []}
    workloads = [
        replace(workload, seed=seed, fp8=mode)
        for seed, mode in itertools.product(range(n_seeds), MODES)
    ]
    for trained, run in zip(workloads, train_all(workloads, every, n_jobs)):
        if not record["runs"]:
            kept = "environment", "weights", "parameters", "dtype", "batch_size", "seq_len"
            record |= {key: run[key] for key in (*kept, "data", "steps", "lr", "kernels")}
            record |= {"model": name, "source": run["source"]}
        keys = "losses", "curve", "curve_in_fp8", "median_seconds", "peak_memory_bytes"
        how = {"seed": trained.seed, "fp8": trained.fp8}
        record["runs"].append(how | {key: run[key] for key in keys})
        words = words_of(trained.fp8, trained.dtype)
        print(f"seed {trained.seed}, {words}: validation loss {run['curve'][-1]:.4f}", flush=True)
    print("\n" + render(record))
    run_records.write_record(record_to, record)


def parse_args() -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="ID|DIR|tiny", help="default: SmolLM2-135M, where it is installed")
    add("--data", default="stdlib", metavar="stdlib|FILE", help="as in every script")
    add("--batch-size", type=positive_int, default=4, help="default: %(default)s")
    add("--seq-len", type=positive_int, help="tokens per sequence (default: 512; 64 without a GPU)")
    add("--dtype", choices=DTYPES, help="of what is no FP8 (default: bf16; fp32 without a GPU)")
    add("--steps", type=positive_int, default=200, help="of each run (default: %(default)s)")
    add("--lr", type=positive_float, default=5e-5, help="learning rate (default: %(default)s)")
    add(
        "--seeds", type=positive_int, default=5, metavar="N", help="how many (default: %(default)s)"
    )
    add("--jobs", type=positive_int, default=1, metavar="N", help="runs at a time (default: 1)")
    add("--json", metavar="FILE", help="write all curves as a JSON record")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.kernels, args.fp8 = KERNELS, FP8_ALL  # so that what refuses FP8 refuses it now
    from harness.cli.device import HAS_GPU
    from harness.cli.output_files import check_outputs
    from harness.model.packaged_model import NAME, PACKAGES, is_installed, unpack
    from next_steps.patches.fp8_model import require_fp8

    check_outputs(args)
    require_fp8()
    with tempfile.TemporaryDirectory() as folder:
        name = args.model
        if name is None:
            if not is_installed():
                needed = f"{NAME} needs the packages {' and '.join(PACKAGES)}"
                raise UserError(f"{needed}: install them, or name a --model")
            name, args.model = NAME, str(unpack(Path(folder)))
        walk(Workload.from_flags(args, HAS_GPU), name, args.seeds, args.jobs, args.json)


if __name__ == "__main__":
    command_line.run_main(main)
