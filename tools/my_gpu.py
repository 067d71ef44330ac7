"""Measure on this machine's GPU what the pages tell of an H200; pack the records into one file.

    make gb300                                 # on any GPU; make my-gpu is the same
    python -m tools.my_gpu tests ladder_1x512  # these again: records and groups of make_records

The most valuable run comes first.  After a run that fails, or is not over in its time, the next one
begins.  Ctrl-C ends the list.  runs/my_gpu/ keeps the records, and in .txt files what runs print.
At last the predictions for this GPU stand beside the measurements, if next_steps/studies/predict.py
knows it, and the last line is the path of the file to send.  Exit code 1 if a run failed.
"""

import contextlib
import json
import tarfile

from harness.cli import command_line
from next_steps.studies import predict
from tools import run_tests
from tools.make_records import HERE, RUNS, commands_of, make_records

FOLDER = HERE / "runs" / "my_gpu"
ORDER = f"""check_toolchain tests {" ".join(RUNS["kernels"])}
profile_1x512 profile_1x512_rmsnorm profile_1x512_both
profile_4x2048 profile_4x2048_both profile_4x2048_all
finetune_baseline_4x2048 finetune_optimized_4x2048 finetune_baseline_1x512 finetune_optimized_1x512
lora_baseline_4x2048 lora_all_4x2048 lora_baseline_1x512 lora_all_1x512
fp8_bf16_4x2048 fp8_all_4x2048 lora_fp8_all_4x2048 profile_fp8_4x2048
ladder_1x512 ladder_4x2048""".split()
LONGER = "tests", "ladder_1x512", "ladder_4x2048"


def scoreboard() -> str:
    """Return what was predicted for this GPU beside what FOLDER's records measured."""
    records = predict.read_records(FOLDER)
    gpus = [name for name in predict.PREDICTED.values() if predict.of_gpu(records, name)]
    if not gpus:
        return f"No scoreboard: predictions are for {', '.join(predict.PREDICTED)} alone."
    record = predict.prediction_of(gpus[0])
    predict.add_score(record, records)
    (FOLDER / "predicted.json").write_text(json.dumps(record, indent=1))
    return predict.render(record)


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="GROUP|RECORD", help="which (default: all)")
    commands = commands_of(parser.parse_args().names or ORDER)
    if not run_tests.visible_gpus():
        raise command_line.UserError("PyTorch sees no GPU here: check_toolchain.py says more")
    for name in commands:  # of an earlier call
        (FOLDER / f"{name}.json").unlink(missing_ok=True)
    missing = True
    with contextlib.suppress(KeyboardInterrupt):
        missing = make_records(commands, FOLDER, lambda n: 900 if n in LONGER else 240, FOLDER)
    (FOLDER / "scoreboard.txt").write_text(board := scoreboard())
    path = FOLDER.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as file:
        file.add(FOLDER, FOLDER.name)
    print(f"\n{board}\nSend this file, which also says which runs failed:\n{path}")
    return int(missing > 0)


if __name__ == "__main__":
    command_line.run_main(main)
