"""What FP8, NF4 and 8-bit moments cost in accuracy.

    python -m next_steps.studies.fp8_accuracy accuracy --model DIR --json runs/fp8_accuracy.json
    python -m next_steps.studies.fp8_accuracy lora --model DIR --json runs/lora_accuracy.json
    python -m next_steps.studies.fp8_accuracy moments --model DIR --json runs/moments_accuracy.json

accuracy: the same training in bf16 and in FP8, from several seeds.  A seed is an order of the data.
The runs of a seed see the same batches, so their losses differ by how the products are rounded,
and hardly by luck.  Each run computes its validation loss ten times, on the same held-out
sequences, with products in bf16.  A run in FP8 also validates with FP8's products.  Two numbers
come out for each way to train:

    difference   validation loss at the end, minus that of bf16 with the same seed
    more steps   how many steps before its end bf16 had the run's last loss, by a straight line
                 between two points of bf16's curve

lora: adapters of rank 16, beside weights that are frozen in bf16, in FP8 and in NF4.  Each point is
the validation loss of the adapters beside the original weights, in bf16, as --merge adds them up.
The loss beside the weights that they were trained with is printed too.

moments: bf16 moments and --moments 8bit, both also with --stochastic-rounding.  Two further ways
keep more of a weight: --dtype fp32, rounded to bf16 for each point alone, and FlashOptim with its 8
more bits (pip install flashoptim).

The time of a step is measured if one run follows the other.  With --jobs 5 five runs share the GPU.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from harness.cli import command_line, tables
from harness.cli.command_line import positive_float, positive_int
from harness.cli.flags import FP8_ALL, OF_FINETUNING, OF_TRAINING, FlagParser
from harness.cli.output_files import check_outputs
from harness.cli.tables import formatted
from harness.cli.workload import Workload, model_line, size_in_words
from harness.profiling.kernel_facts import KERNELS
from harness.records.run_records import environment_line, write_record

# ---------------------------------------------------------------- the runs


class Study(NamedTuple):
    title: str
    header: str  # of the first column
    ways: dict[str, dict]  # {name: values of flags}; the others are compared with the first
    as_trained: str | None = None  # how a run validates too, if not in the model's dtype alone
    lora_rank: int | None = None


IN_FP8, IN_8_BITS, ROUNDED = {"fp8": FP8_ALL}, {"moments": "8bit"}, {"stochastic_rounding": True}
ADAPTER_FLAGS = {"bf16": {}, "fp8": IN_FP8, "nf4": {"quantize": "nf4"}}
ROUNDED_TO_NEAREST = {"bf16": {}, "8bit": IN_8_BITS}
MOMENT_FLAGS = {
    **ROUNDED_TO_NEAREST,
    "fp32, fp32 weights": {"dtype": "fp32"},
    "8bit, 24-bit weights": {"opponent": "flashoptim"},  # beside our other kernels
    **{f"{way}, rounded randomly": flags | ROUNDED for way, flags in ROUNDED_TO_NEAREST.items()},
}
STUDIES = {
    "accuracy": Study("FP8", "Products", {"bf16": {}, "fp8": IN_FP8}, "with FP8's products"),
    "lora": Study("LoRA", "Frozen weights", ADAPTER_FLAGS, "beside its own frozen weights", 16),
    "moments": Study("8-bit moments", "Moments", MOMENT_FLAGS, "in fp32"),
}
LR = 5e-5  # of adapters ten times as much
POINTS = 10  # of a validation curve, after the one before the first step


def loss_curve(workload: Workload, every: int, dtype: str) -> dict:
    """Train silently; return the record: "curve" is the validation loss at steps 0, every, ...

    It is computed in `dtype`.  "curve_as_trained" is computed as the run trains, if that is in
    another dtype, in FP8 or beside quantized weights.
    """
    from harness.cli.device import free_memory
    from harness.training.training_run import Run, validation_loss
    from next_steps.finetuning import kernel_training, opponent_models
    from next_steps.patches import patched_model
    from next_steps.patches.projections import without_fp8

    class Validated(Run):
        """A run that validates every so many steps."""

        def end_step(self, loss):
            super().end_step(loss)
            if len(self.losses) % every == 0:
                self.add_point(validation_loss(self.model, self.data.validation))

        def add_point(self, validated):
            """Add to the curves; `validated` is the loss as the run trains."""
            if self.original is not None:
                self.curve_as_trained.append(validated)
                copy_trained(self.model, self.original)
                validated = validation_loss(self.original, self.data.validation)
            elif self.workload.fp8:
                self.curve_as_trained.append(validated)
                with without_fp8(self.model):
                    validated = validation_loss(self.model, self.data.validation)
            self.curve.append(validated)

    free_memory()  # of the run before
    with contextlib.redirect_stdout(io.StringIO()):  # a line for each step
        prepare = kernel_training.prepare_kernels
        if workload.opponent:
            prepare = opponent_models.prepare_opponent
        model, called, optimizer = prepare(workload)
        run = Validated(workload.dtype, workload, model)
        run.original, run.curve, run.curve_as_trained = None, [], []
        if workload.frozen_as or workload.dtype != dtype:
            plain = replace(workload, fp8=None, quantize=None, dtype=dtype)
            run.original = patched_model.load_patched(plain)
        run.add_point(run.validation_before)
        record = kernel_training.take_all_steps(run, optimizer, called)
    curves = {"curve": run.curve, "curve_as_trained": run.curve_as_trained}
    return record | curves | {"source": run.data.source}


def copy_trained(source, target) -> None:
    """Give a model what another has trained, all weights or adapters, in the model's own dtype."""
    found = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(found[name].data)


def train_all(workloads: list[Workload], every: int, n_jobs: int) -> Iterable[dict]:
    """Yield a record for each, in their order; of several jobs without the time of a step.

    All validate in the first one's dtype.
    """
    how = every, workloads[0].dtype
    if n_jobs == 1:
        yield from (loss_curve(workload, *how) for workload in workloads)
        return
    context = multiprocessing.get_context("spawn")  # a process that uses a GPU cannot be forked
    with ProcessPoolExecutor(min(n_jobs, len(workloads)), context) as jobs:
        for run in jobs.map(loss_curve, workloads, *map(itertools.repeat, how)):
            yield run | {"median_seconds": None}


def measure_accuracy(args: argparse.Namespace) -> dict:
    """Train every seed in every way; return the record."""
    from harness.cli.device import HAS_GPU
    from next_steps.patches.projections import require_fp8

    study = STUDIES[args.study]
    if any("fp8" in values for values in study.ways.values()):
        require_fp8()
    every = max(1, args.steps // POINTS)
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = {"kind": "fp8_accuracy", "study": args.study, "seeds": list(range(args.seeds))}
    record |= {"every": every, "runs": []}
    found = HAS_GPU and importlib.util.find_spec("flashoptim")
    ways = [way for way, values in study.ways.items() if found or "opponent" not in values]
    for way in study.ways.keys() - ways:
        print(f"{way}: left out, which needs FlashOptim (pip install flashoptim) and a GPU\n")
    each = list(itertools.product(record["seeds"], ways))
    flags = vars(args) | {"kernels": KERNELS, "lora_rank": study.lora_rank, "given": None}
    given = (flags | study.ways[way] | {"seed": seed} for seed, way in each)
    workloads = []
    for values in given:
        opponent = values.pop("opponent", None)  # which the rules of flags allow no kernels
        workload = Workload.from_flags(argparse.Namespace(**values), HAS_GPU)
        workloads.append(replace(workload, opponent=opponent))
    for (seed, way), run in zip(each, train_all(workloads, every, args.jobs)):
        if not record["runs"]:
            kept = "environment", "weights", "parameters", "dtype", "batch_size", "seq_len"
            record |= {key: run[key] for key in (*kept, "data", "steps", "lr", "kernels")}
            record |= {"model": args.model, "source": run["source"]}
        keys = "losses", "curve", "curve_as_trained", "median_seconds", "peak_memory_bytes"
        record["runs"].append({"seed": seed, "way": way} | {key: run[key] for key in keys})
        print(f"seed {seed}, {way}: validation loss {run['curve'][-1]:.4f}", flush=True)
    print()
    return record


# ---------------------------------------------------------------- the table


def more_steps(reference: list[float], curve: list[float], every: int) -> tuple[float, str]:
    """Return how many more steps than the reference a run needs for its last loss, and a word.

    "": the reference was at that loss; "<=": it has not reached it; ">=": it never was as high.
    """
    loss, last = curve[-1], float(every * (len(reference) - 1))
    if loss >= reference[0]:
        return last, ">=" if loss > reference[0] else ""
    for i, (before, after) in enumerate(itertools.pairwise(reference)):
        if after <= loss:  # the first time, on a straight line between the two
            return last - every * (i + (before - loss) / (before - after)), ""
    return 0.0, "<="


def table_row(way: str, found: list[dict], references: list[dict], every: int) -> list[str]:
    """Return a row of the table, from a way's runs and the first way's, in the seeds' order."""
    seconds = [run["median_seconds"] for run in found]
    ms = formatted(None if None in seconds else 1e3 * statistics.median(seconds))
    row = [way, f"{statistics.mean(run['curve'][-1] for run in found):.4f}"]
    if found is references:
        return [*row, *[""] * 6, ms]
    pairs = list(zip(references, found))
    apart = [run["curve"][-1] - other["curve"][-1] for other, run in pairs]
    row += [f"{each:+.4f}" for each in (statistics.mean(apart), min(apart), max(apart))]
    steps = sorted(more_steps(other["curve"], run["curve"], every) for other, run in pairs)
    words = [f"{known} {n:.1f}".strip() for n, known in (steps[0], steps[-1])]
    return [*row, f"{statistics.mean(n for n, _ in steps):.1f}", *words, ms]


def line_as_trained(way: str, found: list[dict], references: list[dict], how: str) -> str:
    """Say how far a way's losses are from the first way's if it validates as it trains."""
    curves = [(run["curve_as_trained"], other["curve"]) for other, run in zip(references, found)]
    before, after = (
        statistics.mean(own[at] - other[at] for own, other in curves) for at in (0, -1)
    )
    return (
        f"{way}, validated {how}: {before:+.4f} before the first step, {after:+.4f} after the last"
    )


def render(record: dict) -> str:
    """Return everything that is printed at the end."""
    study, runs = STUDIES[record["study"]], {}
    for run in record["runs"]:
        runs.setdefault(run["way"], []).append(run)
    references = next(iter(runs.values()))
    on_gpu = record["environment"]["gpu"] is not None
    headers = [study.header, "Validation loss", "Difference", "Smallest", "Largest", "More steps"]
    headers += ["Smallest", "Largest", "Step, ms"]
    rows = [table_row(way, found, references, record["every"]) for way, found in runs.items()]
    as_trained = [
        line_as_trained(way, found, references, study.as_trained)
        for way, found in runs.items()
        if found[0]["curve_as_trained"]
    ]
    beside = ", beside the original weights" if record["study"] == "lora" else ""
    censored = "<= 0: bf16 has not reached that loss; >= all steps: it was never as high."
    return "\n".join(
        [
            environment_line(record["environment"]),
            model_line(record),
            f"Data: {record['source']}; {size_in_words(record)}; {record['steps']} steps, learning "
            f"rate {record['lr']:g}",
            "",
            tables.title(f"Accuracy of {study.title}, {len(record['seeds'])} seeds"),
            tables.Table(headers, rows).columns(range(len(headers) - (not on_gpu))).text(),
            f"Means over the seeds, smallest and largest of one. {censored}",
            f"Validated in {record['dtype']}{beside}, whatever the run trained in.",
            *as_trained,
            tables.OF_STEPS if on_gpu else tables.not_shown("steps' times are"),
        ]
    )


# ---------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    shared = "--json", "--data", "--batch-size", "--seq-len", "--dtype"
    table = {flag: OF_TRAINING[flag] for flag in shared} | {"--steps": OF_FINETUNING["--steps"]}
    parser = FlagParser(__doc__, table)
    parser.set_defaults(batch_size=4, steps=200)
    add = parser.add_argument
    add("study", choices=STUDIES, help="what to measure")
    add("--model", metavar="ID|DIR|tiny", required=True, help="a model with trained weights")
    of_adapters = f"default: {LR:g}, of adapters {10 * LR:g}"
    add("--lr", type=positive_float, help=f"learning rate ({of_adapters})")
    add("--seeds", type=positive_int, default=5, metavar="N", help="default: %(default)s")
    add("--jobs", type=positive_int, default=1, metavar="N", help="runs at a time (default: 1)")
    args = parser.parse_args()
    args.lr = args.lr or LR * (10 if args.study == "lora" else 1)
    return args


def main() -> None:
    args = parse_args()
    check_outputs(args)
    record = measure_accuracy(args)
    print(render(record))
    write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
