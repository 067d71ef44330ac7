"""Does the speed of a step depend on the values of the weights?

    python -m next_steps.studies.weight_values --random-init --kernels all \\
        --batch-size 4 --seq-len 2048 --json runs/weight_values.json

At its power limit a GPU's clock depends on how many bits flip, and so on the numbers that are
multiplied.  The records of this project were made with random weights.  This study draws the same
model's weights in two ways, in turns, in one process:

    random   as every run with --random-init draws them
    trained  normal numbers with the mean and the spread of a trained model's weights

A trained model's weights also have outliers and structure, which this study does not imitate.
"""

import argparse
import itertools
import statistics
from dataclasses import replace

from harness.cli import command_line, flags, tables
from harness.cli.command_line import RunError, UserError
from harness.cli.flags import OF_TRAINING
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload, kernels_in_words, model_line, size_in_words
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records
from harness.records.spread import spread
from harness.steps.power import PowerMeter

# Mean and standard deviation of SmolLM2-135M's weights, over its layers: tests/packaged_model.py
# makes the model, and weight_values_test.py compares.  Its head is its embedding.
TRAINED = {
    "embed_tokens": (0.0, 0.136),
    "q_proj": (0.0, 0.202),
    "k_proj": (0.0, 0.212),
    "v_proj": (0.0, 0.197),
    "o_proj": (0.0, 0.179),
    "gate_proj": (0.0, 0.188),
    "up_proj": (0.0, 0.199),
    "down_proj": (0.0, 0.192),
    "input_layernorm": (0.302, 0.122),
    "post_attention_layernorm": (0.234, 0.076),
    "norm": (1.803, 0.295),
    "lm_head": (0.0, 0.136),
}
WAYS = "random", "trained"
GPU, CPU = True, False
ROUNDS = {GPU: 5, CPU: 2}  # each way once
STEPS = {GPU: (3, 4), CPU: (0, 1)}  # (to warm up, until power is steady; timed), of a round
HEADERS = ["Weights", "Step, ms", "p20 to p80", "W", "MHz", "Loss"]


def draw(model, way: str) -> None:
    """Draw all weights in place, as the model draws them or with a trained model's spread.

    Raises:
        UserError: the model is no LLaMA.
    """
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if (kind := name.split(".")[-2]) not in TRAINED or name.endswith("bias"):
                raise UserError(f"the model has {name}, which LLaMA has not: name a LLaMA model")
            own = (1.0, 0.0) if "norm" in kind else (0.0, model.config.initializer_range)
            weight.normal_(*(own if way == "random" else TRAINED[kind]))


def measure(workload: Workload) -> dict:
    """Take steps with the weights of each way, in turns; return the record."""
    from harness.cli.device import DEVICE, HAS_GPU
    from harness.data.dataset import random_batch
    from harness.steps import stepping
    from next_steps.finetuning import kernel_training

    model, called, optimizer = kernel_training.prepare(workload)
    shape = workload.batch_size, workload.seq_len
    batch = random_batch(shape, model.config.vocab_size, DEVICE)
    n_warmup, n_timed = STEPS[HAS_GPU]
    stepping.timed_step(called, optimizer, [batch])  # compiles, and makes the optimizer's state
    record = {
        "kind": "weight_values",
        "environment": run_records.environment(),
        **workload.as_record(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": [],
    }
    for _, way in itertools.product(range(ROUNDS[HAS_GPU]), WAYS):
        draw(model, way)
        with PowerMeter() as meter:
            for _ in range(n_warmup):
                stepping.timed_step(called, optimizer, [batch])
            meter.restart()
            steps = [stepping.timed_step(called, optimizer, [batch]) for _ in range(n_timed)]
        loss = steps[-1][0].item()
        if not abs(loss) < float("inf"):
            raise RunError(f"the loss with {way} weights is {loss}: their time says nothing")
        seconds = [each for _, each in steps]
        done = {"way": way, "seconds": seconds, "loss": loss, "power": meter.reading()}
        record["rounds"].append(done)
    return record


def render(record: dict) -> str:
    """Return everything that is printed at the end."""
    rounds = {way: [r for r in record["rounds"] if r["way"] == way] for way in WAYS}
    medians, body = {}, []
    for way, found in rounds.items():
        ms = [1e3 * each for r in found for each in r["seconds"]]
        medians[way] = [statistics.median(r["seconds"]) for r in found]
        low, high = spread(ms)
        read = [r["power"] for r in found if r["power"]]
        power = [
            tables.number(statistics.median(p[k] for p in read) if read else None, ",.0f")
            for k in ("watts", "mhz")
        ]
        loss = f"{statistics.median(r['loss'] for r in found):.2f}"
        body.append([way, f"{statistics.median(ms):,.1f}", f"{low:,.1f} to {high:,.1f}"])
        body[-1] += [*power, loss]
    random, trained = medians.values()
    ratios = [after / before for before, after in zip(random, trained)]
    gpu = record["environment"]["gpu"]
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            model_line(record),
            f"Custom kernels: {kernels_in_words(record)}; {size_in_words(record)}",
            "",
            tables.title("Steps with other values in the weights", gpu),
            tables.table(HEADERS, body),
            f"trained / random, time of a step: {statistics.median(ratios):.4f} (of {len(ratios)} "
            f"rounds: {min(ratios):.4f} to {max(ratios):.4f})",
            *([] if gpu else [tables.NO_GPU_NOTE]),
        ]
    )


def parse_args() -> argparse.Namespace:
    names = "--model", "--random-init", "--batch-size", "--seq-len", "--dtype", "--json"
    parser = flags.Parser(__doc__, {flag: OF_TRAINING[flag] for flag in names})
    parser.add_kernels(KERNELS, default="all")
    parser.add_flags({"--fp8": flags.OF_KERNELS["--fp8"]})
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_outputs(args)
    from harness.cli.device import HAS_GPU
    from next_steps.patches.fp8_model import require_fp8

    if args.fp8:
        require_fp8()
    workload = replace(Workload.from_flags(args, HAS_GPU), data="synthetic", lr=1e-5)
    record = measure(workload)
    print(render(record))
    run_records.write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
