"""Lesson 1: is everything here, and do the kernels run?

    python check_toolchain.py

The script prints the versions and the GPU.  Then it launches both kernels, forward and backward, on
small inputs and compares them with PyTorch.  At last it launches every kernel of the project
several times on the same inputs and compares the bits.  Exit code 0: the kernels run here, are
right, and give the same bits each time.  Exit code 1: they do not, and the script says what to do.
"""

from dataclasses import replace

from harness.cli import command_line, tables
from harness.cli.command_line import PICK_A_GPU, RunError
from harness.records import run_records

ON_CPU = "on the CPU through Triton's interpreter (no CUDA GPU found)"
# what a failed launch says: what to do about it; the first match wins
REMEDIES = {
    "C compiler": "Triton needs one: `apt-get install gcc`, or set CC",
    "non-zero exit status": "the C compiler failed, see above; often `apt-get install python3-dev` "
    "helps",
    "ptxas": "this Triton does not know the GPU: use a newer one, or the NGC container 26.01 or "
    "later",
    "no kernel image": "this PyTorch was not built for the GPU: use a newer one",
    "out of memory": "nvidia-smi shows which process holds the GPU",
}


def gpu_remedy() -> str:
    """Return why no GPU was found and what to do."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        advice = "to use a GPU, install a CUDA build (https://pytorch.org)"
        return f"This PyTorch is built for the CPU alone; {advice}."
    return (
        "No GPU is visible: start the container with `docker run --gpus ...`, as README's lesson 1 "
        "does (with nvidia-container-toolkit installed); outside a container, see whether "
        "nvidia-smi lists a GPU."
    )


def several_gpus(gpus: list) -> list[str]:
    """Return lines that name these `VisibleGpu`s and the one that scripts use; [] for one or none.

    Processes that torchrun starts use several.
    """
    if len(gpus) < 2:
        return []
    lines = [f"{'Visible GPU:':<20} {gpu.name}, {gpu.uuid}" for gpu in gpus]
    differ = "The visible GPUs differ. " if len({gpu.name for gpu in gpus}) > 1 else ""
    used = f"{differ}Scripts use the first, {gpus[0].name}. To use another: {PICK_A_GPU}."
    return [*lines, used]


def check_kernels() -> list:
    """Launch both kernels and return a `Check` of each result, against twice eager's error."""
    import torch

    from harness.benchmark.checking import DTYPE_NAME
    from subjects import cross_entropy, rmsnorm
    from subjects.subject import checks

    sizes = (rmsnorm.RMSNORM, 256), (cross_entropy.MEAN, 1000)
    return [
        replace(check, name=f"{check.name}, {DTYPE_NAME[dtype]}")
        for dtype in (torch.float32, torch.bfloat16)
        for subject, size in sizes
        for check in checks(subject, *subject.make((8,), size, dtype))
    ]


def repeat_kernels() -> tuple[str, list[str]]:
    """Launch every kernel several times; return what to print, and a sentence for each fault."""
    from next_steps.comparisons import repeats

    found = repeats.repeat_all(repeats.RUNS)
    agree = f"{len(found)} kernels gave the same bits in {repeats.RUNS} runs on the same inputs"
    faults = repeats.faults(found, repeats.RUNS)
    return "see the last line" if faults else agree, faults


def explain(error: Exception) -> str:
    """Return one line about a failed launch: what it said and what to do."""
    text = f"{type(error).__name__}: {error}".strip()
    found = (advice for words, advice in REMEDIES.items() if words in text)
    advice = next(found, "see the README's troubleshooting table")
    return f"{text.splitlines()[0]} ({advice})"


def inspect() -> dict:
    """Return versions, GPU and, as "reason", why the kernels do not run here (None: they do)."""
    try:
        found = run_records.environment()  # imports PyTorch, Triton and transformers
    except (ImportError, OSError) as error:
        package = getattr(error, "name", None) or "a package"
        raise RunError(
            f"{package} cannot be imported ({error}): install it with "
            "`pip install -r requirements.txt`, or use the container of the README's lesson 1"
        ) from error
    import torch

    from harness.cli.device import list_gpus

    repeated = "not tried"
    try:
        faults = [str(check) for check in check_kernels() if not check.passed]
        if not faults:
            repeated, faults = repeat_kernels()
        reason = "; ".join(faults) or None
    except Exception as error:  # this script is here to find whatever stops a launch
        reason = explain(error)
    memory = torch.cuda.get_device_properties(0).total_memory if found["gpu"] else None
    of_gpu = {"environment": found, "gpu_memory_bytes": memory, "gpus": list_gpus()}
    return of_gpu | {"repeated": repeated, "reason": reason}


def render(found: dict) -> str:
    env, memory = found["environment"], found["gpu_memory_bytes"]
    facts = {
        "Triton": env["triton"],
        "PyTorch": env["torch"],
        "CUDA": env["cuda"] or "none in this PyTorch",
        "transformers": env["transformers"],
        "GPU": env["gpu"] or "none found",
        "Compute capability": env["compute_capability"] or "n/a",
        "GPU memory": "n/a" if memory is None else f"{memory / 1e9:.1f} GB",
    }
    lines = [] if env["gpu"] else [tables.NO_GPU_NOTE, ""]
    lines += [f"{name + ':':<20} {value}" for name, value in facts.items()]
    lines += several_gpus(found["gpus"]) if env["gpu"] else [gpu_remedy()]
    lines.append(f"Repeated launches:   {found['repeated']}")
    verdict = "yes" if env["gpu"] else f"yes, {ON_CPU}"
    verdict = f"no: {found['reason']}" if found["reason"] else verdict
    return "\n".join([*lines, f"These kernels run here: {verdict}"])


def main() -> int:
    command_line.Parser(__doc__).parse_args()
    found = inspect()
    print(render(found))
    return 1 if found["reason"] else 0


if __name__ == "__main__":
    command_line.run_main(main)
