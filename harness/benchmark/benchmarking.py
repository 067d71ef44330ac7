"""How an implementation is called, judged and timed. The same for every kernel."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness.benchmark.benchmark_specs import EAGER, HOST_FLOOR, OURS
from harness.benchmark.checking import FLOOR, relative_error
from harness.cli import device
from harness.cli.command_line import RunError
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.tables import describe
from harness.steps import timing

STEPS_DONE = 9.0  # before the judged step of an optimizer, so that its bias corrections matter


@dataclass(frozen=True)
class Implementation:
    """`function` is called with a problem's inputs: (x, weight) -> y or (logits, targets) -> loss.

    The function may destroy its inputs. It is then timed on what it left, which is as much work.
    For AdamW it makes an optimizer: (list of parameters) -> torch.optim.Optimizer.
    """

    name: str
    function: Callable
    backward_again: bool = True  # may the backward of one forward run more than once?
    waits: bool = False  # does a call wait for the GPU? A CUDA graph cannot record that.


@dataclass(frozen=True)
class Problem:
    """One kernel at one size: inputs, upstream gradient, and exact results."""

    inputs: list[torch.Tensor]
    # the number of inputs with a gradient, the first ones; 0: no backward; None: an optimizer
    wrt: int | None
    dy: tuple[torch.Tensor, ...] | None  # for each output; None: 1, as loss.backward() has it
    parts: Callable[..., dict[str, torch.Tensor]]  # (output, gradients) -> the checked parts
    exact: dict[str, torch.Tensor]  # the same parts in float64


class Activations(torch.autograd.Function):
    """Turn tensors into activations: leaves, which are none, may not be overwritten in place."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("only gradients of the activations are asked for")


class Call:
    """An implementation on its own copy of a problem's inputs, which it may destroy."""

    def __init__(self, problem: Problem, implementation: Implementation):
        self.problem, self.function = problem, implementation.function
        self.copies = [t.clone() for t in problem.inputs]
        self.dy = problem.dy and tuple(t.clone() for t in problem.dy)
        self.anchor = torch.zeros((), dtype=torch.float32, device=DEVICE, requires_grad=True)
        self.activate()

    def activate(self) -> None:
        """Begin a new graph: a CUDA graph captures a backward only from where the capture began."""
        n = self.problem.wrt
        self.wrt = Activations.apply(self.anchor, *self.copies[:n]) if n else ()
        self.inputs = [*self.wrt, *self.copies[n:]]

    def forward(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.function(*self.inputs)

    def backward(self, output, retain_graph: bool = False) -> tuple[torch.Tensor, ...]:
        if not self.wrt:
            return ()
        # autograd.grad returns the gradients; .backward() would add them to .grad.
        return torch.autograd.grad(output, self.wrt, self.dy, retain_graph=retain_graph)

    def both(self) -> tuple[torch.Tensor, ...]:
        return self.backward(self.forward())

    def from_new_graph(self) -> tuple[torch.Tensor, ...]:
        self.activate()
        return self.both()

    def results(self) -> tuple:
        """Return (output, gradients) of the first call."""
        output = self.forward()
        return output, self.backward(output)


class OptimizerStep:
    """The same for an optimizer, on its own parameter: a call is one step."""

    def __init__(self, problem: Problem, implementation: Implementation):
        self.p, gradient, m, v = (t.clone() for t in problem.inputs)
        self.p.grad = gradient
        self.optimizer = implementation.function([self.p])
        step = torch.tensor(STEPS_DONE, dtype=torch.float32)
        state = {"step": step, "exp_avg": m, "exp_avg_sq": v}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: state}})

    def both(self) -> tuple[()]:
        self.optimizer.step()
        return ()

    from_new_graph = both  # there is none

    def results(self) -> tuple:
        return self.p, self.both()


def prepare(problem: Problem, implementation: Implementation) -> Call | OptimizerStep:
    if HAS_GPU:
        device.free_memory()  # which the implementation before held; on a CPU it is little
    return (OptimizerStep if problem.wrt is None else Call)(problem, implementation)


def gradient_errors(problem: Problem, implementation: Implementation) -> dict[str, float]:
    """Return the relative error of each part of the results against float64."""
    found = problem.parts(*prepare(problem, implementation).results())
    return {name: relative_error(found[name], exact) for name, exact in problem.exact.items()}


def check_ours(
    errors: dict[str, dict[str, float]], dtype: torch.dtype, tokens: int, judge: str = EAGER
) -> None:
    """Allow ours twice the error of eager PyTorch (`judge`) in the same dtype, plus a floor."""
    if judge not in errors:
        fault = f"PyTorch itself fails at {tokens:,} tokens, so nothing is there to compare with"
        raise RunError(f"{fault}; lower --tokens")
    for name in (name for name in errors if name.startswith(OURS)):
        for part, error in errors[name].items():
            allowed = 2 * errors[judge][part] + FLOOR[dtype]
            if not error <= allowed:  # NaN fails too
                raise RunError(
                    f"{name}: {part!r} at {tokens:,} tokens has an error of {error:.1e}, but only "
                    f"{allowed:.1e} is allowed; a wrong kernel is not timed"
                )


def measure_times(problem: Problem, implementation: Implementation) -> dict:
    """Return a row's times in microseconds, by each possible clock, and its memory in bytes."""
    call = prepare(problem, implementation)
    launches = implementation.name != HOST_FLOOR
    capturable = launches and not implementation.waits
    extra = timing.peak_extra_bytes(call.both) if launches else None
    total = timing.time_us(call.both)
    forward = backward = None
    if problem.wrt:
        forward = timing.time_us(call.forward).p50
    if problem.wrt and implementation.backward_again:
        output = call.forward()
        backward = timing.time_us(lambda: call.backward(output, retain_graph=True)).p50
        del output
    return {
        "forward_us": forward,
        "backward_us": backward,
        "total_us": list(total),
        # The host matters where calls are short. A batch of long calls would take seconds.
        "host_us": timing.queued_time_us(call.both, calls=max(2, min(20, int(3e5 / total.p50)))),
        "kernels_us": timing.graph_time_us(call.from_new_graph) if capturable else None,
        "extra_bytes": extra,
    }


@contextlib.contextmanager
def others_may_fail(
    implementation: Implementation, shape: str, absent: list[str]
) -> Iterator[None]:
    """Note another's failure (out of memory, an unknown GPU) in `absent`; raise our own."""
    try:
        yield
    except Exception as error:
        if implementation.name.startswith(OURS):
            raise
        absent.append(f"{implementation.name}: failed at {shape} ({describe(error)})")
