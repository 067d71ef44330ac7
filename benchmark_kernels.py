"""Steps 7 and 10: how fast are the kernels, what memory do they take, and how far are they from the limit?

    python benchmark_kernels.py                          # both kernels, LLaMA 3.1 8B's sizes, bf16
    python benchmark_kernels.py --kernel rmsnorm --hidden 2048,4096,8192
    python benchmark_kernels.py --json run.json --plot run.png
    python benchmark_kernels.py --sweep                  # why the files carry their settings: other ones, timed

Against PyTorch as Hugging Face calls it, PyTorch's own operator, torch.compile, and Liger-Kernel and QuACK
where they are installed.  All get the same inputs in the same dtype in the same run and are timed in the same
way, and every gradient is compared with float64 before anything is timed.
"""

import argparse
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import measure
import sweep_kernels
from checking import DEVICE, FLOOR, relative_error
from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
from measure import HAS_GPU, NOT_MEANINGFUL, RunError, UserError, describe, number, positive_int
from rmsnorm_kernel import MAX_HIDDEN_SIZE, TritonRMSNormFunction, rmsnorm_reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LLAMA_HIDDEN, LLAMA_VOCAB = 4096, 128_256
# On the CPU: what Triton's interpreter does in seconds.
HIDDEN, VOCAB = (LLAMA_HIDDEN, LLAMA_VOCAB) if HAS_GPU else (256, 1000)
TOKENS = {
    "rmsnorm": [256, 1024, 4096, 16_384, 65_536] if HAS_GPU else [4, 16],
    "cross_entropy": [128, 256, 512, 1024, 8192] if HAS_GPU else [4, 16],
}
EPS = 1e-5  # LLaMA 3.1's rms_norm_eps
# Tensors as large as the input that must be read or written, forward and backward together.  Every
# implementation is given the same count, so that a column of GB/s compares times and nothing else.
#   RMSNorm, 5: the forward reads x and writes y, the backward reads x and dy and writes dx.  The weight and
#   one number per row are less than 0.1 % of that.
#   Cross-entropy, 3: the forward reads the logits; the backward reads them again, since nothing stays on the
#   chip between the two, and writes their gradient.  Who computes the gradient in the forward can have part
#   of the second read from the cache, and so come closer to the copy rate, or pass it.
MINIMUM_PASSES = {"rmsnorm": 5, "cross_entropy": 3}
CHECKED_ROWS = 64  # of each gradient; float64 of all rows would not fit beside the largest inputs
REFERENCE_CHUNK = 4096  # rows of RMSNorm differentiated in float64 at a time

EAGER = "PyTorch, as Hugging Face writes it"
OURS = "ours"
IN_PLACE = f"{OURS}, in place"
COMPILED = "torch.compile"
HOST_FLOOR = "autograd Function that does nothing"


# ---------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Implementation:
    """`function` is called with a problem's inputs: (x, weight) -> y or (logits, targets) -> loss.

    It may destroy them.  It is then timed on what it left of them, which is as much work.
    """

    name: str
    function: Callable[..., torch.Tensor]
    backward_again: bool = True  # may the backward of one forward run more than once?
    waits: bool = False  # does a call wait for the GPU?  A CUDA graph cannot record that.


class Nothing(torch.autograd.Function):
    """Allocates what every RMSNorm returns and launches no kernel: the time of Python and autograd alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class NothingLoss(torch.autograd.Function):
    """The same for a loss."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits)
        return torch.empty((), dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx, grad_output):
        (logits,) = ctx.saved_tensors
        return torch.empty_like(logits), None


def eager_rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rmsnorm_reference(x, weight, EPS)


def eager_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Hugging Face's loss: the logits are converted to fp32 first."""
    return cross_entropy_reference(logits.float(), targets)


def implementations(kernel: str, dtype: str, peers: list[Implementation]) -> list[Implementation]:
    """In the order of the table's rows; a new list for each size, so that torch.compile specializes to it."""
    if kernel == "rmsnorm":
        eager, nothing = eager_rmsnorm, Nothing.apply
        operator = Implementation("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w, EPS))
        ours = [Implementation(OURS, lambda x, w: TritonRMSNormFunction.apply(x, w, EPS))]
    else:
        eager, nothing = eager_cross_entropy, NothingLoss.apply
        operator = Implementation(f"F.cross_entropy, {dtype} logits", F.cross_entropy)
        ours = [
            Implementation(OURS, TritonCrossEntropyLoss()),
            Implementation(IN_PLACE, TritonCrossEntropyLoss(inplace=True), backward_again=False),
        ]
    compiled = []
    if HAS_GPU:
        torch.compiler.reset()  # it gives up after eight shapes; forget those before this one
        compiled = [Implementation(COMPILED, compile_function(eager))]
        ours.append(Implementation(f"{OURS} under torch.compile", compile_function(ours[0].function)))
    return [
        Implementation(EAGER, eager),
        operator,
        *compiled,
        *peers,
        *ours,
        Implementation(HOST_FLOOR, nothing),
    ]


def compile_function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.compile for one shape, all of it or an error."""
    import torch._functorch.config

    # Donation lets a compiled backward reuse the memory of what the forward saved for it, here a few bytes a
    # row.  Without it the backward can run more than once, and so be timed by itself.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False, fullgraph=True)


def liger(kernel: str) -> list[Implementation]:
    from liger_kernel.ops import LigerRMSNormFunction
    from liger_kernel.transformers import LigerCrossEntropyLoss

    if kernel == "rmsnorm":
        # in_place=False, because in place it writes dx over dy, which the timing loop uses again
        return [Implementation("Liger-Kernel", lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False))]
    # It has no mode that keeps the logits, and it reads the number of valid targets back to the host.
    return [Implementation("Liger-Kernel, in place", LigerCrossEntropyLoss(), waits=True)]


def quack(kernel: str) -> list[Implementation]:
    import quack

    if kernel == "rmsnorm":
        return [Implementation("QuACK", lambda x, w: quack.rmsnorm(x, w, eps=EPS))]
    return [
        Implementation("QuACK", quack.cross_entropy),
        Implementation(
            "QuACK, in place",
            lambda logits, targets: quack.cross_entropy(logits, targets, inplace_backward=True),
            backward_again=False,
        ),
    ]


# name: (package, module, implementations)
PEERS = {
    "Liger-Kernel": ("liger-kernel", "liger_kernel", liger),
    "QuACK": ("quack-kernels", "quack", quack),
}


def find_peers(kernel: str) -> tuple[list[Implementation], list[str]]:
    """(the other libraries' implementations, a sentence for each library that is absent)."""
    found, absent = [], []
    for name, (package, module, make) in PEERS.items():
        try:
            peers = make(kernel)
        except Exception as error:  # whatever another library's import raises, ours can still be measured
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                absent.append(f"{name}: not installed (pip install {package} to add it)")
            else:
                absent.append(f"{name}: cannot be imported ({describe(error)})")
            continue
        if HAS_GPU:
            found += peers
        else:
            absent.append(f"{name}: needs a CUDA GPU")
    return found, absent


# ---------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """One kernel at one size: inputs, upstream gradient, and what the gradients should be."""

    inputs: list[torch.Tensor]  # gradients are wanted of those that are floating point
    dy: torch.Tensor | None  # None: 1, what loss.backward() starts with
    parts: Callable[[tuple[torch.Tensor, ...]], dict[str, torch.Tensor]]  # of the gradients, to be checked
    exact: dict[str, torch.Tensor]  # the same parts in float64


def rmsnorm_problem(tokens: int, hidden: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)  # (B*T, H)
    weight = (1 + 0.1 * torch.randn(hidden, device=DEVICE)).to(dtype)  # (H,)
    dy = torch.randn(tokens, hidden, device=DEVICE).to(dtype)  # (B*T, H)

    def parts(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        dx, dw = gradients
        return {"dx": dx[:CHECKED_ROWS], "dW": dw}

    dx, dw = None, 0.0
    for rows, dy_rows in zip(x.split(REFERENCE_CHUNK), dy.split(REFERENCE_CHUNK)):
        inputs = [t.double().requires_grad_() for t in (rows, weight)]
        dx_rows, dw_rows = torch.autograd.grad(eager_rmsnorm(*inputs), inputs, dy_rows.double())
        dx, dw = dx_rows[:CHECKED_ROWS] if dx is None else dx, dw + dw_rows
    return Problem([x, weight], dy, parts, parts((dx, dw)))


def cross_entropy_problem(tokens: int, vocab: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab, device=DEVICE, dtype=dtype)  # (B*T, V)
    targets = torch.randint(vocab, (tokens,), device=DEVICE)  # (B*T,)

    def parts(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        # Apart, because the targets' entries carry nearly all of the norm and would hide the others' errors.
        rows, columns = gradients[0][:CHECKED_ROWS], targets[:CHECKED_ROWS, None]
        return {"target": rows.gather(1, columns), "other": rows.scatter(1, columns, 0.0)}

    rows = logits[:CHECKED_ROWS].double().requires_grad_()
    total = cross_entropy_reference(rows, targets[:CHECKED_ROWS], reduction="sum")
    exact = torch.autograd.grad(total / tokens, [rows])  # rows are independent but for the mean's 1 / tokens
    return Problem([logits, targets], None, parts, parts(exact))


PROBLEMS = {"rmsnorm": rmsnorm_problem, "cross_entropy": cross_entropy_problem}


class Activations(torch.autograd.Function):
    """Turns tensors into activations: computed from something (`anchor`) that requires grad.

    A leaf will not do, because implementations that work in place refuse to destroy one.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("only gradients of the activations are asked for")


class Call:
    """An implementation on its own copy of a problem's inputs, which it may destroy."""

    def __init__(self, problem: Problem, implementation: Implementation):
        gc.collect()  # what the implementation before this one held
        if HAS_GPU:
            torch.cuda.empty_cache()
        self.problem, self.function = problem, implementation.function
        self.copies = [t.clone() for t in problem.inputs]
        self.anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        self.activate()

    def activate(self) -> None:
        """Begin a new graph: a CUDA graph can capture a backward only from where the capture began."""
        floating = [t for t in self.copies if t.is_floating_point()]
        self.wrt = Activations.apply(self.anchor, *floating)
        self.inputs = [*self.wrt, *(t for t in self.copies if not t.is_floating_point())]

    def forward(self) -> torch.Tensor:
        return self.function(*self.inputs)

    def backward(self, output: torch.Tensor, retain_graph: bool = False) -> tuple[torch.Tensor, ...]:
        # autograd.grad hands gradients out; .backward() would add them to .grad
        return torch.autograd.grad(output, self.wrt, self.problem.dy, retain_graph=retain_graph)

    def both(self) -> tuple[torch.Tensor, ...]:
        return self.backward(self.forward())

    def from_new_graph(self) -> tuple[torch.Tensor, ...]:
        self.activate()
        return self.both()


# ---------------------------------------------------------------- measuring


def gradient_errors(problem: Problem, implementation: Implementation) -> dict[str, float]:
    """Relative error of each part of the gradient against float64."""
    found = problem.parts(Call(problem, implementation).both())
    return {name: relative_error(found[name], exact) for name, exact in problem.exact.items()}


def check_ours(errors: dict[str, dict[str, float]], dtype: torch.dtype, tokens: int) -> None:
    """Ours may be twice as wrong as eager PyTorch in the same dtype, plus a floor.

    Raises:
        RunError: it is worse, or there is no eager result to judge it by.
    """
    if EAGER not in errors:
        raise RunError(
            f"PyTorch itself fails at {tokens:,} tokens, so nothing is there to compare with; lower --tokens"
        )
    for name in (name for name in errors if name.startswith(OURS)):
        for part, error in errors[name].items():
            allowed = 2 * errors[EAGER][part] + FLOOR[dtype]
            if not error <= allowed:  # NaN fails too
                raise RunError(
                    f"{name}: gradient {part!r} at {tokens:,} tokens has an error of {error:.1e}, but only "
                    f"{allowed:.1e} is allowed; a wrong kernel is not timed"
                )


def measure_times(problem: Problem, implementation: Implementation) -> dict:
    call = Call(problem, implementation)
    launches = implementation.name != HOST_FLOOR
    capturable = launches and not implementation.waits
    extra = measure.peak_extra_bytes(call.both) if launches else None
    total = measure.time_us(call.both)
    forward = measure.time_us(call.forward).p50
    backward = None
    if implementation.backward_again:
        output = call.forward()
        backward = measure.time_us(lambda: call.backward(output, retain_graph=True)).p50
        del output
    return {
        "forward_us": forward,
        "backward_us": backward,
        "total_us": [total.p20, total.p50, total.p80],
        "host_us": measure.queued_time_us(call.both),
        "kernels_us": measure.graph_time_us(call.from_new_graph) if capturable else None,
        "extra_bytes": extra,
    }


def first_call(kernel: str, size: int, dtype_name: str) -> float:
    """Seconds from our first call, of forward + backward, to its result.  Of use in a new process only."""
    problem = PROBLEMS[kernel](TOKENS[kernel][0], size, DTYPES[dtype_name])
    ours = next(each for each in implementations(kernel, dtype_name, []) if each.name == OURS)
    call = Call(problem, ours)
    measure.synchronize()  # the problem is made: PyTorch, autograd and the GPU are awake
    start = time.perf_counter()
    call.both()
    measure.synchronize()
    return time.perf_counter() - start


def first_call_seconds(kernel: str, size: int, dtype_name: str, absent: list[str]) -> float | None:
    """The same in a process of its own, where Triton has compiled nothing yet; None, and a sentence, if it fails."""
    code = f"import benchmark_kernels; print(benchmark_kernels.first_call({kernel!r}, {size}, {dtype_name!r}))"
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "TRITON_CACHE_DIR": empty}
        here = Path(__file__).parent
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=here)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        absent.append(f"first call: its process failed ({reason.splitlines()[-1]})")
        return None
    return float(child.stdout.split()[-1])


@contextlib.contextmanager
def others_may_fail(implementation: Implementation, shape: str, absent: list[str]) -> Iterator[None]:
    """Another's failure (out of memory, a GPU it does not know) is a result; ours is an error."""
    try:
        yield
    except Exception as error:
        if implementation.name.startswith(OURS):
            raise
        absent.append(f"{implementation.name}: failed at {shape} ({describe(error)})")


def benchmark(kernel: str, tokens: list[int], size: int, dtype_name: str) -> tuple[dict, list[str]]:
    """(the kernel's section of the record, sentences about what is absent from it)."""
    dtype = DTYPES[dtype_name]
    bytes_per_element = MINIMUM_PASSES[kernel] * dtype.itemsize
    peers, absent = find_peers(kernel)
    compilation = first_call_seconds(kernel, size, dtype_name, absent) if HAS_GPU else None
    rows = []
    for n_tokens in tokens:
        shape = f"{n_tokens:,} x {size:,}"
        if HAS_GPU:
            print(f"measuring {kernel}, {shape}", file=sys.stderr)
        problem = PROBLEMS[kernel](n_tokens, size, dtype)
        contenders = implementations(kernel, dtype_name, peers)
        errors: dict[str, dict[str, float]] = {HOST_FLOOR: {}}
        for contender in contenders[:-1]:
            with others_may_fail(contender, shape, absent):
                errors[contender.name] = gradient_errors(problem, contender)
        check_ours(errors, dtype, n_tokens)
        for contender in contenders:
            if contender.name in errors:
                with others_may_fail(contender, shape, absent):
                    row = {"tokens": n_tokens, "implementation": contender.name}
                    row |= measure_times(problem, contender) | {"errors": errors[contender.name]}
                    n_bytes = bytes_per_element * n_tokens * size
                    row["gbs"] = n_bytes / row["total_us"][1] / 1e3 if contender.name != HOST_FLOOR else None
                    rows.append(row)
    section = {"kernel": kernel, "size": size, "bytes_per_element": bytes_per_element, "rows": rows}
    return section | {"first_call_seconds": compilation}, absent


# ---------------------------------------------------------------- output


def gpu_line(env: dict) -> str:
    return f"GPU: {env['gpu'] or 'none (CPU ' + env['cpu'] + ')'}"


def sections_of(record: dict, kernel: str) -> list[dict]:
    return [section for section in record["sections"] if section["kernel"] == kernel]


def copy_share(record: dict, row: dict | None) -> str:
    """The row's GB/s as a percentage of the measured copy rate."""
    return number(None if row is None or row["gbs"] is None else 100 * row["gbs"] / record["copy_gbs"], ".0f")


def rows_by_tokens(section: dict) -> dict[int, dict[str, dict]]:
    """{tokens: {implementation: row}}, in the order measured."""
    found: dict[int, dict[str, dict]] = {}
    for row in section["rows"]:
        found.setdefault(row["tokens"], {})[row["implementation"]] = row
    return found


def ratio(above: float | None, below: float | None, spec: str) -> str:
    return "n/a" if above is None or not below else f"{above / below:{spec}}x"


def megabytes(n_bytes: int | None) -> str:
    return number(None if n_bytes is None else n_bytes / 1e6, ",.0f")


def microseconds(time: float | None) -> str:
    return number(time, ",.1f" if time is not None and time < 1000 else ",.0f")


def playbook_table(record: dict, section: dict) -> str:
    """The playbook's table: our kernel against PyTorch as Hugging Face calls it, forward + backward."""
    env = record["environment"]
    mark = "" if env["gpu"] else NOT_MEANINGFUL
    if section["kernel"] == "rmsnorm":
        heading = [
            measure.title(f"RMSNorm Benchmark — Custom Triton vs. PyTorch Reference{mark}"),
            gpu_line(env),
        ]
        if len(sections_of(record, "rmsnorm")) > 1:
            heading.append(f"Hidden size: {section['size']:,}")
        headers = ["Tokens", "Custom (us)", "PyTorch (us)", "Custom (GB/s)", "PyTorch (GB/s)", "Speedup"]
    else:
        name = " (LLaMA 3.1)" if section["size"] == LLAMA_VOCAB else ""
        heading = [
            measure.title(f"Cross-Entropy Benchmark — Custom Triton (online softmax) vs. PyTorch{mark}"),
            gpu_line(env),
            f"Vocabulary size: {section['size']:,}{name}",
        ]
        headers = ["Tokens", "Custom (us)", "PyTorch (us)", "Speedup"]
        headers += ["Custom Mem (MB)", "PyTorch Mem (MB)", "Mem Reduction"]
    missing = {"total_us": [None] * 3, "gbs": None, "extra_bytes": None}
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        ours, eager = rows[OURS], rows.get(EAGER, missing)
        us, eager_us = ours["total_us"][1], eager["total_us"][1]
        times = [f"{tokens:,}", number(us), number(eager_us)]
        speedup = ratio(eager_us, us, ".2f")
        if section["kernel"] == "rmsnorm":
            body.append([*times, number(ours["gbs"], ",.0f"), number(eager["gbs"], ",.0f"), speedup])
        else:
            extra, eager_extra = ours["extra_bytes"], eager["extra_bytes"]
            memory = [megabytes(extra), megabytes(eager_extra), ratio(eager_extra, extra, ".1f")]
            body.append([*times, speedup, *memory])
    return "\n".join([*heading, "", measure.table(headers, body, ["right"] * len(headers))])


def full_table(record: dict, section: dict) -> str:
    """Every implementation at every size."""
    mark = "" if record["environment"]["gpu"] else NOT_MEANINGFUL
    rmsnorm = section["kernel"] == "rmsnorm"
    parts = ["dx", "dW"] if rmsnorm else ["target", "other"]
    dimension, passes = ("hidden", 5) if rmsnorm else ("vocabulary", 3)
    compilation = section.get("first_call_seconds")  # a record may be older than a measurement
    heading = [
        measure.title(f"{'RMSNorm' if rmsnorm else 'Cross-Entropy'}: every implementation{mark}"),
        f"{record['dtype']}; {dimension} {section['size']:,}; times in us; gradients' errors against float64",
        f"GB/s: {passes} x tokens x {dimension} x {section['bytes_per_element'] // passes} bytes / total p50",
        *([] if rmsnorm else ["in place: the gradient overwrites the logits, which are lost"]),
        "Total: one call at a time after flushing the cache, which hides part of the host's work; "
        "Host: calls queued back to back",
        f"First call (compilation): {'n/a' if compilation is None else f'{compilation:.1f} s'}",
    ]
    headers = ["Tokens", "Implementation", "Forward", "Backward", "Total p20 / p50 / p80", "Host", "Kernels only"]
    headers += ["GB/s", "% of copy", "Extra MB", *(f"Error {part}" for part in parts)]
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        if body:
            body.append([""] * len(headers))
        for row in rows.values():
            times = [row["forward_us"], row["backward_us"], *row["total_us"], row.get("host_us"), row["kernels_us"]]
            forward, backward, *total, host, kernels = (microseconds(t) for t in times)
            errors = [number(row["errors"].get(part), ".1e") for part in parts]
            body.append(
                [f"{tokens:,}", row["implementation"], forward, backward, " / ".join(total), host, kernels]
                + [number(row["gbs"], ",.0f"), copy_share(record, row), megabytes(row["extra_bytes"]), *errors]
            )
    align = ["right", "left"] + ["right"] * (len(headers) - 2)
    return "\n".join([*heading, "", measure.table(headers, body, align)])


def summary_table(record: dict, kernel: str) -> str:
    """All sizes of one kernel: ours beside the copy rate and torch.compile."""
    mark = "" if record["environment"]["gpu"] else NOT_MEANINGFUL
    rmsnorm = kernel == "rmsnorm"
    shown = [OURS] if rmsnorm else [OURS, IN_PLACE]
    headers = ["Hidden" if rmsnorm else "Vocabulary", "Tokens"]
    for name in shown:
        headers += [f"{name} (us)", "% of copy"]
    headers += [f"{COMPILED} (us)", f"{COMPILED} / {OURS}"]
    body = []
    for section in sections_of(record, kernel):
        if body:
            body.append([""] * len(headers))
        for tokens, rows in rows_by_tokens(section).items():
            us = {name: rows[name]["total_us"][1] if name in rows else None for name in (*shown, COMPILED)}
            cells = [f"{section['size']:,}", f"{tokens:,}"]
            for name in shown:
                cells += [microseconds(us[name]), copy_share(record, rows.get(name))]
            body.append([*cells, microseconds(us[COMPILED]), ratio(us[COMPILED], us[OURS], ".2f")])
    name = "RMSNorm" if rmsnorm else "Cross-Entropy"
    heading = measure.title(f"{name}: all sizes, forward + backward, {record['dtype']}{mark}")
    return "\n".join([heading, measure.table(headers, body, ["right"] * len(headers))])


def render(record: dict) -> str:
    """Everything the script prints about its measurements, from their record."""
    env = record["environment"]
    blocks = [] if env["gpu"] else [measure.NO_GPU_NOTE]
    blocks.append(measure.ceilings_card(env, record["copy_gbs"], record["matmul_tflops"]))
    for section in record["sections"]:
        blocks += [playbook_table(record, section), full_table(record, section)]
    blocks += [summary_table(record, kernel) for kernel in TOKENS if len(sections_of(record, kernel)) > 1]
    if record["absent"]:
        blocks.append("; ".join(record["absent"]))
    return "\n\n".join(blocks)


# One colour per library, dashed where in place; apart for colour-blind readers too (Okabe and Ito, 2008).
COLOURS = {
    OURS: "#D55E00", EAGER: "#999999", "F.": "#56B4E9", COMPILED: "#0072B2",
    "Liger": "#CC79A7", "QuACK": "#009E73", HOST_FLOOR: "#000000",
}  # fmt: skip


def line_style(name: str) -> dict:
    colour = next(colour for prefix, colour in COLOURS.items() if name.startswith(prefix))
    dashes = {HOST_FLOOR: ":", f"{OURS} under {COMPILED}": "-."}
    return {
        "color": colour,
        "linestyle": dashes.get(name, "--" if name.endswith("in place") else "-"),
        "linewidth": 2.5 if name.startswith(OURS) else 1.5,
        "label": name,
    }


def plot(record: dict, path: str) -> None:
    """Per kernel: latency over tokens, and GB/s beside the measured copy rate."""
    import matplotlib

    matplotlib.use("Agg")  # to a file, no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    sections = record["sections"]
    figure, axes = plt.subplots(len(sections), 2, figsize=(14, 5 * len(sections)), squeeze=False, layout="constrained")
    for section, (latency, bandwidth) in zip(sections, axes):
        name = "RMSNorm, hidden" if section["kernel"] == "rmsnorm" else "Cross-entropy, vocabulary"
        name = f"{name} {section['size']:,}"
        for implementation in dict.fromkeys(row["implementation"] for row in section["rows"]):
            rows = [row for row in section["rows"] if row["implementation"] == implementation]
            style = {"marker": "o", "markersize": 4, **line_style(implementation)}
            tokens = [row["tokens"] for row in rows]
            latency.plot(tokens, [row["total_us"][1] for row in rows], **style)
            if implementation != HOST_FLOOR:
                bandwidth.plot(tokens, [row["gbs"] for row in rows], **style)
        bandwidth.axhline(record["copy_gbs"], color="black", linewidth=1)
        bandwidth.annotate(
            "measured copy rate", (0, record["copy_gbs"]), (4, 4), xycoords=("axes fraction", "data"),
            textcoords="offset points",
        )  # fmt: skip
        latency.set(yscale="log", ylabel="forward + backward, median (us)", title=f"{name}: latency, lower is better")
        bandwidth.set(
            ylim=(0, None),
            ylabel="GB/s (minimum traffic / median)",
            title=f"{name}: bandwidth, higher is better",
        )
        for panel in (latency, bandwidth):
            panel.set_xscale("log", base=2)
            panel.set_xticks(sorted({row["tokens"] for row in section["rows"]}))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            panel.set_xlabel("tokens")
            panel.grid(alpha=0.3)
        bandwidth.margins(y=0.12)
        bandwidth.legend(*latency.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.02, 0.5))
    env = record["environment"]
    mark = "" if env["gpu"] else NOT_MEANINGFUL
    figure.suptitle(f"{gpu_line(env)}, {record['dtype']}, PyTorch {env['torch']}, Triton {env['triton']}{mark}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"Plot written to {path}")


# ---------------------------------------------------------------- command line


def number_list(text: str) -> list[int]:
    """argparse type: positive numbers, separated by commas; sorted, and each one once."""
    return sorted({positive_int(part) for part in text.split(",")})


def parse_arguments() -> argparse.Namespace:
    parser = measure.Parser(__doc__)
    add = parser.add_argument
    sizes = "; ".join(f"{kernel} {','.join(map(str, tokens))}" for kernel, tokens in TOKENS.items())
    add("--kernel", choices=[*TOKENS, "all"], default="all", help="what to measure (default: %(default)s)")
    add("--tokens", type=number_list, metavar="N,N,...", help=f"rows of the input (default here: {sizes})")
    add("--hidden", type=number_list, default=str(HIDDEN), metavar="N,N,...",
        help="columns of RMSNorm (default here: %(default)s)")  # fmt: skip
    add("--vocab", type=number_list, default=str(VOCAB), metavar="N,N,...",
        help="of cross-entropy (default here: %(default)s)")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bf16", help="of inputs and gradients (default: %(default)s)")
    add("--sweep", action="store_true", help="time our kernels alone, with other settings than their files carry")
    add("--json", metavar="FILE", help="write the measurements as a JSON record")
    add("--plot", metavar="FILE.png", help="write latency and bandwidth over tokens as a picture")
    args = parser.parse_args()
    if max(args.hidden) > MAX_HIDDEN_SIZE:
        allowed = f"the {MAX_HIDDEN_SIZE:,} columns that the kernel allows"
        raise UserError(f"--hidden {max(args.hidden)} is more than {allowed}")
    if args.sweep and args.plot:
        raise UserError("--plot draws the benchmark; --sweep prints tables alone, so give one of the two")
    if args.sweep and args.tokens and len(args.tokens) > 1:
        raise UserError(f"--sweep takes one number of --tokens, not {len(args.tokens)}")
    if args.plot and not args.plot.endswith(".png"):
        raise UserError(f"--plot {args.plot} must end in .png")
    measure.require_writable(args.json)
    measure.require_writable(args.plot)
    return args


def main() -> None:
    args = parse_arguments()
    record = {
        "kind": "sweep" if args.sweep else "benchmark", "environment": measure.environment(), "dtype": args.dtype,
        "copy_gbs": measure.copy_bandwidth(), "matmul_tflops": measure.matmul_rate(),
        "sections": [], "absent": [],
    }  # fmt: skip
    sizes = {"rmsnorm": args.hidden, "cross_entropy": args.vocab}
    asked = [(kernel, size) for kernel in sizes if args.kernel in (kernel, "all") for size in sizes[kernel]]
    try:
        for kernel, size in asked:
            if args.sweep:
                tokens = args.tokens or [sweep_kernels.TOKENS[kernel]]
                record["sections"] += sweep_kernels.sweep(kernel, tokens[0], size, DTYPES[args.dtype])
                continue
            section, absent = benchmark(kernel, args.tokens or TOKENS[kernel], size, args.dtype)
            record["sections"].append(section)
            record["absent"] += [sentence for sentence in absent if sentence not in record["absent"]]
    except torch.OutOfMemoryError as error:
        raise RunError("the GPU ran out of memory; lower --tokens, or --hidden and --vocab") from error
    print(sweep_kernels.render_sweep(record) if args.sweep else render(record))
    measure.write_record(args.json, record)
    if args.plot:
        plot(record, args.plot)


if __name__ == "__main__":
    measure.run_main(main)
