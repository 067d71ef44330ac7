"""Step 1: is everything here, and do the kernels run?

    python check_toolchain.py

The script prints the versions and the GPU.  Then it launches both kernels, forward and backward, on
small inputs and compares them with PyTorch.  At last it runs every kernel of this tutorial several
times on the same inputs and compares the bits.  Each kernel adds in a fixed order, so they must be
the same.  Exit code 0: the kernels run here, are right, and repeat themselves.  Exit code 1: they
do not, and the script says what to do.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

from harness.cli import command_line, tables
from harness.cli.command_line import RunError
from harness.records import run_records

EPS = 1e-5
RUNS = {True: 20, False: 2}  # of each kernel, with a GPU and without
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
        "No GPU is visible: start the container with `docker run --gpus all` (with "
        "nvidia-container-toolkit installed); outside a container, see whether nvidia-smi lists "
        "a GPU."
    )


def output_and_gradients(function: Callable, tensors: Sequence, last: object) -> list:
    """Return [function(*inputs, last), gradient of each input]; `tensors`: inputs, then dy."""
    import torch

    *inputs, dy = (t.detach().requires_grad_() for t in tensors)
    output = function(*inputs, last)
    return [output, *torch.autograd.grad(output, inputs, dy.to(output.dtype))]


def check_kernels() -> list:
    """Launch both kernels and return a `Check` of each result, against twice eager's error."""
    import torch

    from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
    from harness.benchmark.checking import DEVICE, DTYPE_NAME, compare
    from rmsnorm_kernel import TritonRMSNormFunction, rmsnorm_reference

    torch.manual_seed(0)
    x, weight, dy = (torch.randn(shape, device=DEVICE) for shape in ((8, 256), (256,), (8, 256)))
    logits = torch.randn(8, 1000, device=DEVICE)
    targets = torch.randint(1000, (8,), device=DEVICE)

    def eager_loss(logits, targets):
        at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
        return cross_entropy_reference(logits.to(at_least_fp32), targets)

    of_norm = ["RMSNorm y", "RMSNorm dx", "RMSNorm dw"]
    of_loss = ["cross-entropy loss", "cross-entropy dlogits"]
    one = torch.ones((), device=DEVICE)
    cases = [  # names of the results, ours, eager, tensors, the last argument
        (of_norm, TritonRMSNormFunction.apply, rmsnorm_reference, [x, weight, dy], EPS),
        (of_loss, TritonCrossEntropyLoss(), eager_loss, [logits, one], targets),
    ]
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        for names, ours, eager, tensors, last in cases:
            rounded = [t.to(dtype) for t in tensors]
            results = zip(
                output_and_gradients(ours, rounded, last),
                output_and_gradients(eager, [t.double() for t in rounded], last),
                output_and_gradients(eager, rounded, last),
            )
            for name, result in zip(names, results):
                checks.append(compare(f"{name}, {DTYPE_NAME[dtype]}", *result, dtype))
    return checks


def tensors_in(results: object) -> Iterator:
    """Yield the bytes of each tensor in results, which may be tuples of tuples."""
    import torch

    if isinstance(results, torch.Tensor):
        yield results.detach().contiguous().view(-1).view(torch.uint8)
    for each in results if isinstance(results, tuple) else ():
        yield from tensors_in(each)


def count_results(make: Callable[[], object], n_runs: int) -> int:
    """Return how many different results so many calls of `make` have."""
    import torch

    seen = []
    for _ in range(n_runs):
        found = [*tensors_in(make())]
        if not any(all(map(torch.equal, found, other)) for other in seen):
            seen.append(found)
    return len(seen)


def check_repeats() -> dict[str, int]:
    """Run each kernel on the same inputs, as the benchmark does; return its number of results."""
    import torch

    from harness.benchmark.benchmark_specs import SPECS
    from harness.benchmark.benchmarking import Call, Step
    from harness.cli.device import HAS_GPU
    from next_steps.comparisons.benchmark_contenders import CONTENDERS
    from next_steps.comparisons.benchmark_problems import PROBLEMS
    from next_steps.lessons.fp8_kernel import fp8_support

    found = {}
    for kernel, spec in SPECS.items():
        if kernel.startswith("fp8") and fp8_support():
            continue
        tokens = spec.tokens(HAS_GPU)[0]
        sizes = [(each.gpu if HAS_GPU else each.cpu)[0] for each in spec.dimensions]
        size = sizes[0] if len(sizes) == 1 else tuple(sizes)
        problem = PROBLEMS[kernel](tokens, size, torch.bfloat16)
        for ours in CONTENDERS[kernel]("bf16").ours:

            def make(problem=problem, ours=ours) -> tuple:
                call = Step if problem.wrt is None else Call  # on a copy of the inputs
                return call(problem, ours).results()

            with warnings.catch_warnings():  # numpy's, of Triton's interpreter
                warnings.simplefilter("ignore", RuntimeWarning)
                found[f"{kernel}, {ours.name}"] = count_results(make, RUNS[HAS_GPU])
    return found


def unlike(repeats: dict[str, int], n_runs: int) -> str | None:
    """Return a sentence about the kernels with more than one result; None if there are none."""
    several = {name: n for name, n in repeats.items() if n > 1}
    if not several:
        return None
    counts = ", ".join(f"{n} different results of {name}" for name, n in several.items())
    return (
        f"{counts} in {n_runs} runs of the same inputs: do not train with this Triton on this GPU; "
        "try another version of Triton and the driver"
    )


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
            "`pip install -r requirements.txt`, or use the container of the README's step 1"
        ) from error
    import torch

    from harness.cli.device import HAS_GPU

    repeats = {}
    try:
        reason = "; ".join(str(check) for check in check_kernels() if not check.passed) or None
        if reason is None:
            repeats = check_repeats()
            reason = unlike(repeats, RUNS[HAS_GPU])
    except Exception as error:  # this script is here to find whatever stops a launch
        reason = explain(error)
    memory = torch.cuda.get_device_properties(0).total_memory if found["gpu"] else None
    repeats = {"runs": RUNS[HAS_GPU], "results": repeats}
    return {"environment": found, "gpu_memory_bytes": memory, "reason": reason, "repeats": repeats}


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
    lines += [] if env["gpu"] else [gpu_remedy()]
    repeats = found["repeats"]
    if repeats["results"] and not found["reason"]:
        n_kernels = len(repeats["results"])
        lines += [f"{'Repeats:':<20} {n_kernels} kernels, {repeats['runs']} runs each, equal bits"]
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
