"""Work for several processes of parallel_test.py: torchrun starts this file in each.

torchrun --nproc-per-node 2 -m tests.several_processes train FOLDER BATCH_SIZE CASE CASE ...
torchrun --nproc-per-node 2 -m tests.several_processes small|exact SCRIPT FLAG ...
torchrun --nproc-per-node 2 -m tests.several_processes raise|fault|die
"""

import contextlib
import os
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

from harness.cli import command_line, processes
from harness.cli.command_line import RunError
from next_steps import finetune_options
from tests.small_workloads import TINY, in_float64, smaller_config

KERNEL_FLAGS = {
    "baseline": ["--kernels", "none"],
    "exact": ["--kernels", "none"],
    "kernels": ["--kernels", "all"],
    "fp8": ["--kernels", "all", "--fp8"],
}


def two_layers():
    """The smallest model that has more than one unit of the same kind."""
    config = smaller_config()
    config.num_hidden_layers = 2
    return config


def exact():
    """Let models compute in float64 meanwhile, from the weights that they have in fp32."""
    from harness.model import loading

    load_model = loading.load_model
    return mock.patch.object(loading, "load_model", lambda *args: in_float64(load_model(*args)))


def train(folder: Path, case: str, batch_size: int) -> None:
    """Train a case, such as fsdp-kernels-3 with three micro-batches; recompute levels may follow.

    exact in the place of kernels: in float64, without kernels.
    The record becomes FOLDER/CASE.json and the model FOLDER/CASE.  The data lie beside FOLDER.  One
    process ignores how processes share a step; fsdp_kept stands for fsdp-kept.
    """
    from harness.cli.device import HAS_GPU
    from harness.cli.flags import FlagParser
    from harness.cli.workload import Workload
    from next_steps.finetuning import kernel_training

    way, kernels, accumulate, *more = case.split("-")
    flags = ["--data", f"{folder.parent}/data.jsonl", "--batch-size", str(batch_size)]
    flags += ["--steps", "4" if kernels == "fp8" else "2", "--lr", "5e-4"]
    flags += [*KERNEL_FLAGS[kernels], "--accumulate", accumulate]
    flags += ["--parallel", way.replace("_", "-")] if processes.world_size() > 1 else []
    flags += [word for level in more for word in ("--recompute", level)]
    flags += ["--dtype", "bf16"] if kernels == "fp8" and HAS_GPU else []  # fp32 is refused there
    args = FlagParser("", finetune_options.OPTIMIZED).parse_args([*TINY, "--seq-len", "8", *flags])
    workload = Workload.from_flags(args, HAS_GPU)
    with exact() if kernels == "exact" else contextlib.nullcontext():
        kernel_training.train_with_kernels(workload, f"{folder}/{case}.json", f"{folder}/{case}")


def fail(how: str) -> None:
    """Rank 1 fails in its second step, while the others wait for it.

    The way is named: on GPUs auto takes steps of its own before the first one, to predict memory.
    """
    from harness.steps import stepping

    real, calls = stepping.training_step, []

    def training_step(*arguments):
        calls.append(arguments)
        if processes.rank() == 1 and len(calls) == 2:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"raise": RunError, "fault": ValueError}[how]("planted")
        return real(*arguments)

    stepping.training_step = training_step
    sys.argv = ["finetune_baseline.py", *TINY, "--steps", "4", "--parallel", "ddp"]
    import finetune_baseline

    finetune_baseline.main()


def main() -> None:
    from harness.cli.device import HAS_GPU
    from harness.data import dataset
    from harness.model import architecture

    what, *rest = sys.argv[1:]
    if what not in ("train", "small", "exact"):
        return fail(what)
    architecture.tiny_config = two_layers
    dataset.VALIDATION_BATCHES = 2  # no multiple of three, and Triton's interpreter is slow
    if not HAS_GPU:  # Triton's interpreter is slow: see fp8_layer_test.py
        from next_steps.layers import fp8_layer
        from tests.fp8_layer_test import REFERENCES

        vars(fp8_layer).update(REFERENCES)
    if what != "train":
        sys.argv = rest
        with exact() if what == "exact" else contextlib.nullcontext():
            return runpy.run_path(rest[0], run_name="__main__")
    folder, batch_size, *cases = rest
    for case in cases:
        train(Path(folder), case, int(batch_size))


if __name__ == "__main__":
    command_line.run_main(main)
