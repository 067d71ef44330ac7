"""What a run writes down, as JSON: the machine and versions it ran on, and what it measured."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from harness.cli.command_line import UserError
from harness.cli.output_files import write_output
from harness.cli.tables import NO_GPU_NOTE
from harness.records.schema import Predicate, keys_of

# what a run may use, or be compared with, besides PyTorch, Triton and transformers
OTHERS = (
    *("peft", "bitsandbytes", "liger-kernel", "nvidia-cutlass-dsl", "quack-kernels", "torchao"),
    *("trl", "unsloth"),
)


def commit() -> str:
    """Return this checkout's commit, with '+' if files differ from it; 'unknown' without git.

    GIT_COMMIT overrides it.
    """
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    describe = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]  # by no tag
    places = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(describe, text=True, **places).strip()
    return "unknown"


def environment() -> dict:
    """Return what a record must say about where it was made."""
    import torch
    import transformers
    import triton

    from harness.cli.device import HAS_GPU, list_gpus

    gpu = torch.cuda.get_device_name() if HAS_GPU else None
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if HAS_GPU else None
    others = {}
    for package in OTHERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            others[package] = importlib.metadata.version(package)
    return {
        "gpu": gpu,
        "other_gpus": [each.name for each in list_gpus() if each.name != gpu],
        "compute_capability": capability,
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "others": others,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def gpu_line(env: dict) -> str:
    device = env["gpu"] or f"none (CPU {env['cpu']})"
    others = env.get("other_gpus")  # visible ones of other kinds; older records have no such key
    return f"GPU: {device}" + (f" (not used: {', '.join(others)})" if others else "")


def environment_line(env: dict) -> str:
    """Return one line: GPU, versions, date, commit."""
    return (
        f"{gpu_line(env)} | PyTorch {env['torch']} | Triton {env['triton']} | "
        f"transformers {env['transformers']} | {env['date']} | commit {env['commit']}"
    )


def ceilings_card(env: dict, copy_gbs: float, matmul_tflops: float) -> str:
    """Return the line of the environment, and one of the ceilings of this GPU, if it is one."""
    if env["gpu"] is None:
        return f"{NO_GPU_NOTE}\n\n{environment_line(env)}"
    return (
        f"{environment_line(env)}\n"
        f"Ceilings: copy {copy_gbs:,.0f} GB/s (read + write), "
        f"bf16 matmul {matmul_tflops:,.1f} TFLOP/s"
    )


def write_record(path: str | None, record: dict, is_whole: bool = True) -> None:
    """Write a run as JSON, so that a printed figure can always be traced to where it was measured.

    A line says so, unless the record is still growing.

    Raises:
        RunError: the file cannot be written (any more).
    """
    if path is not None:
        write_output(path, (json.dumps(record, indent=1) + "\n").encode(), "the record")
        if is_whole:
            print(f"Record written to {path}")


def read_record(path: str, kind: str, **more: Predicate) -> dict:
    """Read a record of the given kind; `more`: keys that this reader checks more closely.

    Raises:
        UserError: the file is missing, is not JSON, is a record of another kind, or a value in it
            is missing or does not fit.
    """
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the last: thousands of brackets
        raise UserError(f"{path} is not a JSON record: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != kind:
        found = record.get("kind") if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{path} is not a {kind!r} record (it is {found!r})")
    keys = keys_of(record) | more
    damaged = [key for key, fits in keys.items() if key not in record or not fits(record[key])]
    if damaged:
        missing = f"without a usable {', '.join(damaged)}"
        raise UserError(f"{path} is a damaged record, {missing}; run its script again")
    return record


def relative_differences(first: dict, other: dict) -> list[float]:
    """Return |loss - loss of the first run| / loss of the first run, for each step.

    From 0, every other number is infinitely far.
    """
    pairs = zip(first["losses"], other["losses"])
    return [abs(b - a) / abs(a) if a else math.inf if b else 0.0 for a, b in pairs]
