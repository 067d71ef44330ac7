"""Make the records that the pages' figures come from, on this machine's GPU.

    python -m tools.make_records                          # list the runs
    python -m tools.make_records kernels steps lora lora_fp8 moments published families fp8 checks
    python -m tools.make_records estimates predictions    # without a GPU
    python -m tools.make_records several                  # on four GPUs; with the lines above: all
    python -m tools.make_records lora --into runs/lora --seconds 600
    python -m tools.fill_pages --pictures && python -m tools.fill_pages

Each record is a run of a script in a process of its own.  Most train the 8B at its real size with
random weights; the largest needs 130 GB of GPU memory.  fp8_accuracy needs a model with trained
weights in runs/smollm2 (docs/fp8.md).  While one process runs, the next two import PyTorch and
wait, so that the GPU does not wait.  After --seconds the current run and all others are ended.
So the most important runs come first in each group.  Exit code 1 if a run failed or was ended.
"""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.benchmark.benchmark_specs import SPECS
from harness.cli import command_line
from harness.cli.command_line import UserError, positive_int
from harness.cli.processes import DDP, FSDP
from next_steps.studies.predict import measured_in
from next_steps.studies.prepared import prepared

HERE = Path(__file__).parents[1]
ACCURACY = "next_steps.studies.fp8_accuracy --model runs/smollm2"
SMALL, LARGE = "--random-init", "--random-init --batch-size 4 --seq-len 2048"
PROFILE, BASELINE, OPTIMIZED = (
    f"{name}.py" for name in ("profile_baseline", "finetune_baseline", "finetune_optimized")
)
ESTIMATE, LADDER = "next_steps.memory.estimate", "next_steps.studies.ladder"
OPPONENT = "next_steps.finetuning.opponents"
LONG = "--random-init --batch-size 1 --seq-len 8192 --accumulate 16"
AUTOMODEL = "--random-init --batch-size 2 --seq-len 4096 --accumulate 16"
STATION = "--random-init --batch-size 4 --seq-len 4096 --accumulate 16"
QWEN3 = f"{LARGE} --model Qwen/Qwen3-8B"
ALL, LORA, QLORA = "--kernels all", "--lora-rank 16", "--lora-rank 16 --quantize nf4"
BOTH = "--kernels rmsnorm,cross_entropy"
SCALING = "next_steps.studies.scaling --random-init --sizes 4x2048"
BY_SEVERAL = "torch.distributed.run --nproc-per-node"
CHECKS = "check_toolchain", "rmsnorm_test", "cross_entropy_test"  # their printed lines are recorded
STEP_SIZES = {"1x512": SMALL, "4x2048": LARGE}
ESTIMATED = {  # what is trained, as a record's name says it
    f"{model}_{size}{trained}": f"{words} --model meta-llama/{model} {how}{ALL}"
    for model in ("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-3B")
    for trained, how in {"": "", "_lora": f"{LORA} ", "_qlora": f"{QLORA} "}.items()
    for size, words in STEP_SIZES.items()
}
ESTIMATED |= {
    "Llama-3.1-8B_1x512_8bit": f"{SMALL} {ALL} --moments 8bit",
    "Llama-3.1-8B_4_times_1x2048": f"{SMALL} --seq-len 2048 --accumulate 4 {ALL}",
}
# of what a run prints, what matters: the first line like this, else the last line
MATTERS = r"(These kernels run here|Median time|\+ cuda_graph).*|Largest recoverable.*?-bound"

# {group: {record: what writes it}}
RUNS: dict[str, dict[str, str]] = {
    "kernels": {f"benchmark_{name}": f"benchmark_kernels.py --kernel {name}" for name in SPECS},
    "steps": {
        "profile_1x512": f"{PROFILE} {SMALL}",
        "profile_1x512_rmsnorm": f"{PROFILE} {SMALL} --kernels rmsnorm",
        "profile_1x512_both": f"{PROFILE} {SMALL} {BOTH}",
        "profile_4x2048": f"{PROFILE} {LARGE}",
        "profile_4x2048_both": f"{PROFILE} {LARGE} {BOTH}",
        "profile_4x2048_all": f"{PROFILE} {LARGE} {ALL}",
        "finetune_baseline_1x512": f"{BASELINE} {SMALL}",
        "finetune_optimized_1x512": f"{OPTIMIZED} {SMALL}",
        "finetune_baseline_4x2048": f"{BASELINE} {LARGE}",
        "finetune_optimized_4x2048": f"{OPTIMIZED} {LARGE}",
        "ladder_1x512": f"{LADDER} {SMALL}",
        "ladder_4x2048": f"{LADDER} {LARGE}",
        "full_baseline_4x2048": f"{BASELINE} {LARGE} --steps 12",
        "full_all_4x2048": f"{OPTIMIZED} {LARGE} {ALL} --steps 12",
        "full_unsloth_4x2048": f"{OPPONENT} {LARGE} --opponent unsloth --steps 12",
        "full_compile_4x2048": f"{OPPONENT} {LARGE} --opponent compile --steps 12",
    },
    "lora": {
        "lora_baseline_4x2048": f"{BASELINE} {LARGE} {LORA} --steps 12",
        "lora_all_4x2048": f"{OPTIMIZED} {LARGE} {LORA} {ALL} --steps 12",
        "lora_unsloth_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent unsloth --steps 12",
        "lora_compile_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent compile --steps 12",
        "lora_baseline_1x512": f"{BASELINE} {SMALL} {LORA}",
        "lora_all_1x512": f"{OPTIMIZED} {SMALL} {LORA} {ALL} --cuda-graph",
        "lora_unsloth_1x512": f"{OPPONENT} {SMALL} {LORA} --opponent unsloth",
        "qlora_bf16_1x512": f"{OPTIMIZED} {SMALL} {LORA} {ALL} --cuda-graph",  # beside the next
        "qlora_all_1x512": f"{OPTIMIZED} {SMALL} {QLORA} {ALL} --cuda-graph",
        "qlora_bf16_4x2048": f"{OPTIMIZED} {LARGE} {LORA} {ALL} --steps 12",
        "qlora_all_4x2048": f"{OPTIMIZED} {LARGE} {QLORA} {ALL} --steps 12",
        "profile_full_4x2048": f"{PROFILE} {LARGE}",  # of the same run as those below
        "profile_lora_4x2048": f"{PROFILE} {LARGE} {LORA}",
        "profile_lora_1x512": f"{PROFILE} {SMALL} {LORA}",
        "profile_lora_4x2048_all": f"{PROFILE} {LARGE} {LORA} {ALL}",
        "profile_lora_fp8_4x2048": f"{PROFILE} {LARGE} {LORA} {ALL} --fp8",
        "profile_lora_1x512_all": f"{PROFILE} {SMALL} {LORA} {ALL}",
        "profile_qlora_4x2048_all": f"{PROFILE} {LARGE} {QLORA} {ALL}",
        "profile_qlora_1x512_all": f"{PROFILE} {SMALL} {QLORA} {ALL}",
        "lora_liger_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent liger --steps 12",
    },
    "lora_fp8": {
        "lora_fp8_bf16_4x2048": f"{OPTIMIZED} {LARGE} {LORA} {ALL} --steps 12",
        "lora_fp8_all_4x2048": f"{OPTIMIZED} {LARGE} {LORA} {ALL} --fp8 --steps 12",
        "lora_fp8_compact_4x2048": f"{OPTIMIZED} {LARGE} {LORA} {ALL} --fp8 compact --steps 12",
        "lora_fp8_torchao_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent torchao-tensorwise "
        "--steps 12",
        "lora_fp8_compile_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent compile --steps 12",
        "lora_fp8_unsloth_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent unsloth --steps 12",
        "lora_fp8_unsloth_fp8_4x2048": f"{OPPONENT} {LARGE} {LORA} --opponent unsloth-fp8 "
        "--steps 12",
        "lora_fp8_baseline_4x2048": f"{BASELINE} {LARGE} {LORA} --steps 12",
        "lora_accuracy": f"{ACCURACY} lora --jobs 15",
        "lora_fp8_bf16_2x4096_times_16": f"{OPTIMIZED} {AUTOMODEL} {LORA} {ALL} --steps 4",
        "lora_fp8_all_2x4096_times_16": f"{OPTIMIZED} {AUTOMODEL} {LORA} {ALL} --fp8 --steps 4",
    },
    "published": {  # the shapes of others' published figures, docs/how_good.md
        "full_all_1x8192_times_16": f"{OPTIMIZED} {LONG} {ALL} --steps 4",
        "fp8_all_1x8192_times_16": f"{OPTIMIZED} {LONG} {ALL} --fp8 --steps 4",
        "full_all_4x4096_times_16": f"{OPTIMIZED} {STATION} {ALL} --steps 4",
        "fp8_all_4x4096_times_16": f"{OPTIMIZED} {STATION} {ALL} --fp8 --steps 4",
        "lora_all_2x4096_times_16": f"{OPTIMIZED} {AUTOMODEL} {LORA} {ALL} --steps 4",
    },
    "moments": {
        "moments_fused_1x512": f"{OPPONENT} {SMALL} --opponent fused-adamw",
        "moments_flashoptim_1x512": f"{OPPONENT} {SMALL} --opponent flashoptim",
        "moments_bf16_1x512": f"{OPTIMIZED} {SMALL} {ALL} --cuda-graph",  # beside the next
        "moments_8bit_1x512": f"{OPTIMIZED} {SMALL} {ALL} --moments 8bit --cuda-graph",
        "profile_moments_1x512": f"{PROFILE} {SMALL} {ALL} --moments 8bit",
        "moments_accuracy": f"{ACCURACY} moments --jobs 15",
    },
    "families": {
        "qwen3_baseline_4x2048": f"{BASELINE} {QWEN3} --steps 12",
        "qwen3_all_4x2048": f"{OPTIMIZED} {QWEN3} {ALL} --steps 12",
        "qwen3_liger_4x2048": f"{OPPONENT} {QWEN3} --opponent liger --steps 12",
        "qwen3_compile_4x2048": f"{OPPONENT} {QWEN3} --opponent compile --steps 12",
        "qwen3_unsloth_4x2048": f"{OPPONENT} {QWEN3} --opponent unsloth --steps 12",
    },
    "fp8": {
        "fp8_bf16_4x2048": f"{OPTIMIZED} {LARGE} {ALL} --steps 12",
        "fp8_all_4x2048": f"{OPTIMIZED} {LARGE} {ALL} --fp8 --steps 12",
        "fp8_torchao_tensorwise_4x2048": f"{OPPONENT} {LARGE} --opponent torchao-tensorwise "
        "--steps 12",
        "fp8_torchao_rowwise_4x2048": f"{OPPONENT} {LARGE} --opponent torchao-rowwise --steps 12",
        "fp8_baseline_4x2048": f"{BASELINE} {LARGE} --steps 12",
        "fp8_bf16_1x512": f"{OPTIMIZED} {SMALL} {ALL} --cuda-graph",
        "fp8_all_1x512": f"{OPTIMIZED} {SMALL} {ALL} --fp8 --cuda-graph",
        "profile_fp8_4x2048": f"{PROFILE} {LARGE} {ALL} --fp8",
        "profile_fp8_1x512": f"{PROFILE} {SMALL} {ALL} --fp8",
        "fp8_accuracy": f"{ACCURACY} accuracy --jobs 15",
    },
    "several": {
        "scaling_lost_1": SCALING,
        **{
            f"scaling_lost_{way}_{n}": f"{BY_SEVERAL} {n} -m {SCALING} --parallel {way}"
            for n in (2, 4)
            for way in (FSDP, DDP)
        },
    },
    "tests": {"tests": "tools.run_tests --gpu"},  # they leave no record
    "checks": {name: f"{name}.py" for name in CHECKS},
    "estimates": {f"estimate_{e}": f"{ESTIMATE} {w}" for e, w in ESTIMATED.items()},
    "predictions": {  # of a GPU from the other one's records, beside its own
        f"predicted_{gpu.lower()}": f"next_steps.studies.predict --gpu {gpu} --score results"
        for gpu in ("H100", "H200")
    },
}
RECORD_COMMANDS = {name: command for group in RUNS.values() for name, command in group.items()}


def make_records(
    commands: dict[str, str], folder: Path, seconds_of: Callable[[str], float], aside: Path
) -> int:
    """Make these records; return how many of the runs failed or were not over in their time.

    seconds_of(name): the time that a run has now.  ASIDE gets what each run prints, and log.txt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = len(commands)
    with prepared(aside, list(commands)) as processes:
        for i, (name, command) in enumerate(commands.items(), start=1):
            start, limit = time.monotonic(), seconds_of(name)
            print(begun := f"{i} of {len(commands)}: {name}:", end=" ", flush=True)
            words, record = command.split(), str(folder / f"{name}.json")
            if name in CHECKS:
                words = ["tools.fill_pages", "--record", record, *words]
            elif name not in RUNS["tests"]:
                words += ["--json", record]
            if words[0] == PROFILE:
                words += ["--trace", os.devnull]
            done = (process := next(processes)).run(words, limit)
            missing -= done
            lines = process.lines() or ["nothing was printed"]
            took = time.monotonic() - start
            told = what_matters(lines, Path(record)) if done else lines[-1]
            how = "" if done else "failed: " if took < limit else "time is over: "
            ended = f"{took:.0f} s, {how}{' '.join(told.split())}"
            print(ended, flush=True)
            with (aside / "log.txt").open("a") as log:
                print(begun, ended, file=log)
    return missing


def what_matters(lines: list[str], path: Path) -> str:
    """Return our kernel's time at the last size of a benchmark's record, or a line of a run."""
    if path.exists() and (record := json.loads(path.read_text()))["kind"] == "benchmark":
        *_, last = (row for row in measured_in(record) if row.kind == "kernel")
        return f"{last.name}: {last.us:,.1f} us alone"
    return [*(found[0] for line in lines if (found := re.match(MATTERS, line))), lines[-1]][0]


def commands_of(names: list[str]) -> dict[str, str]:
    """Return the commands of these groups and records, in this order."""
    if unknown := [name for name in names if name not in RECORD_COMMANDS | RUNS]:
        raise UserError(f"there is no {', '.join(unknown)}: make_records lists all without names")
    return {each: RECORD_COMMANDS[each] for name in names for each in RUNS.get(name, [name])}


def main() -> int:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="GROUP|RECORD", help="which (default: list them)")
    add("--into", type=Path, default=HERE / "results", metavar="DIR", help="default: results/")
    add("--seconds", type=positive_int, metavar="N", help="the time for all runs")
    args = parser.parse_args()
    if not args.names:
        for group, runs in RUNS.items():
            print(f"{group}:", *(f"    {name:<32}{runs[name]}" for name in runs), sep="\n")
        return 0
    end_at = time.monotonic() + (args.seconds or math.inf)
    with tempfile.TemporaryDirectory() as aside:
        how = args.into.resolve(), lambda _: end_at - time.monotonic(), Path(aside)
        return int(make_records(commands_of(args.names), *how) > 0)


if __name__ == "__main__":
    command_line.run_main(main)
