"""Every optimizer that is made as torch.optim.AdamW is takes AdamW's steps and keeps its promises.

The changes of parameters are compared: a step is so small beside a parameter that a wrong one would
hide behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryFile

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from harness.benchmark.checking import FLOOR, compare
from judging.circumstances import OTHER_DEFAULTS, default_dtype
from judging.comparing import expect_same, off_by
from judging.contract import Contract, NotTried, Wrong, contract
from next_steps.lessons.adamw_optimizer import TritonAdamW
from subjects.subject import normals

FP32, BF16 = torch.float32, torch.bfloat16
# lr and weight_decay so large that each term of the formula shows in bf16 too
STEP_SETTINGS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}
SHAPES = (5, 1001), (16, 256), (40,), ()
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class OptimizerSubject:
    """One optimizer, and what the contracts need to know of it."""

    name: str
    make: Callable[..., Optimizer]  # (parameters or groups, lr=, betas=, eps=, weight_decay=)
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)
    moment_error: float = 0.0  # what the format of its moments adds to a change's relative error
    rounds_at_random: bool = False  # bf16 parameters
    exempt: dict[str, str] = field(default_factory=dict)  # {contract: why it cannot apply}

    def __repr__(self) -> str:
        return self.name


OPTIMIZERS = {
    "adamw": OptimizerSubject("adamw", TritonAdamW),
    # a code of 8 bits is off by up to 5 % at the sizes that most elements have
    "adamw8": OptimizerSubject(
        "adamw8", partial(TritonAdamW, moments_dtype=torch.uint8), moment_error=0.05
    ),
}


# ---- Steps, and how they are compared -----------------------------------------------------------


def start_and_gradients(*shapes: tuple, dtype: torch.dtype = FP32, n_steps: int = 4):
    """Return parameters, and for each step a gradient of each."""
    normal = normals(0, dtype)
    starts = [normal(*shape) for shape in shapes]
    return starts, [[normal(*t.shape, mean=0.3) for t in starts] for _ in range(n_steps)]


def copied(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Return copies; None stays None."""
    return [None if t is None else t.detach().clone().to(dtype or t.dtype) for t in tensors]


def named(tensors: Tensors) -> dict[str, torch.Tensor]:
    dense = enumerate(
        t if t is None or t.layout == torch.strided else t.to_dense() for t in tensors
    )
    return {f"{number} of {len(tensors)}": t for number, t in dense if t is not None}


def new_optimizer(make: Callable, starts: Tensors, arrange=list, **settings):
    """Return parameters, which are these tensors themselves, and their optimizer."""
    params = [torch.nn.Parameter(t) for t in starts]
    return params, make(arrange(params), **STEP_SETTINGS | settings)


def step_through(params: Tensors, optimizer: Optimizer, grads: list[Tensors], schedule=None):
    """Return the parameters after a step for each list of gradients; None: it has none."""
    scheduler = schedule and schedule(optimizer)
    for of_step in grads:
        for p, g in zip(params, of_step):
            p.grad = g
        optimizer.step()
        if scheduler:
            scheduler.step()
    return params


def parameters_after(
    make: Callable, starts: Tensors, grads: list[Tensors], schedule=None, **how
) -> Tensors:
    return step_through(*new_optimizer(make, starts, **how), grads, schedule)


def match_steps(subject, starts: Tensors, grads: list[Tensors], given=None, **how) -> Tensors:
    """Return the parameters; raise Wrong unless their changes are as near to float64's as those of
    torch.optim.AdamW in the same dtype are.

    given: the gradients in the form in which the optimizer gets them; it may not change them.
    """
    dtype, before, given = starts[0].dtype, copied(starts), given or grads
    wide, kept = torch.promote_types(torch.float64, dtype), [copied(of_step) for of_step in given]
    right = parameters_after(AdamW, copied(starts, wide), [copied(g, wide) for g in grads], **how)
    eager = parameters_after(AdamW, copied(starts), [copied(of_step) for of_step in grads], **how)
    found = parameters_after(subject.make, starts, given, **how)
    for of_step, as_it_was in zip(given, kept):
        expect_bits(of_step, as_it_was, "gradients after a step")
    pieces = {"": slice(None)}
    if dtype == FP32:  # in which a few elements tell as much as many
        pieces["of the last elements "] = slice(-8, None)
    for name, piece in pieces.items():
        ours, exact, theirs = (
            torch.cat([(p.detach().to(wide) - t).flatten()[piece] for p, t in zip(params, before)])
            for params in (found, right, eager)
        )
        if dtype.is_complex:
            ours, exact, theirs = map(torch.view_as_real, (ours, exact, theirs))
        check = compare(name, ours, exact, theirs, dtype if dtype in FLOOR else FP32)
        allowed = check.allowed + subject.moment_error
        if not check.error <= allowed:
            label = f"after {len(grads)} steps {name}the change"
            raise off_by(label, ours, exact, (check.error, allowed), named(before))
    return found


def expect_bits(found: Tensors, expected: Tensors, what: str) -> None:
    expect_same(what, named(found), named(expected), exact=True)


# ---- The numbers --------------------------------------------------------------------------------


@contract("dtype", lambda subject: subject.dtypes)
def steps_match_float64(subject, dtype):
    match_steps(subject, *start_and_gradients(*SHAPES, dtype=dtype))


LENGTHS = 1, 2, 7, 8, 9, 15, 17, 255, 257, 2047, 2049


@contract("shape", lambda subject: [(), *((n,) for n in LENGTHS), (0,), (3, 0)])
def ragged_sizes_and_no_elements(subject, shape):
    match_steps(subject, *start_and_gradients(shape))


def in_groups(params: Tensors) -> list[dict]:
    parts = params[:2], params[2:3], params[3:]
    options = {"lr": 0.1, "weight_decay": 0.0}, {"eps": 0.1}, {"betas": (0.5, 0.6)}
    return [{"params": part, **own} for part, own in zip(parts, options)]


SETTINGS_IN_WORDS = {
    "PyTorch's defaults": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "betas of 0": {"betas": (0.0, 0.0)},
    "no eps": {"eps": 0.0},
    "no decay": {"weight_decay": 0.0},
    "no rate": {"lr": 0.0},
    "far": {"lr": 30.0, "weight_decay": 0.01},
    "a rate that falls": {"schedule": lambda optimizer: ExponentialLR(optimizer, 0.5)},
    "groups of their own": {"arrange": in_groups},
    "maximize": {"maximize": True},
}


@contract("settings", lambda subject: SETTINGS_IN_WORDS)
def settings_are_pytorchs(subject, settings):
    how = SETTINGS_IN_WORDS[settings]
    try:
        match_steps(subject, *start_and_gradients(*SHAPES), **how)
    except TypeError as error:
        if "maximize" in how:
            raise NotTried(str(error)) from error
        raise


@contract()
def parameters_without_a_gradient_are_skipped(subject):
    """Each counts its own steps."""
    starts, grads = start_and_gradients(*SHAPES)
    grads[0][0] = grads[1][1] = None
    for of_step in grads:
        of_step[2] = None
    match_steps(subject, starts, grads)


@contract("gradient", lambda subject: ("nan", "inf", "-inf"))
def what_is_not_finite_stays_in_its_element(subject, gradient):
    starts, grads = start_and_gradients((16, 256), n_steps=2)
    (clean,) = parameters_after(
        subject.make, copied(starts), [copied(of_step) for of_step in grads]
    )
    grads[0][0][0, 7] = float(gradient)
    (found,) = parameters_after(subject.make, starts, grads)
    if not found[0, 7].isnan():
        raise Wrong(f"the element is {found[0, 7].item()}, expected nan, as in PyTorch")
    found, clean = (torch.cat((t[:, :7], t[:, 8:]), 1) for t in (found, clean))
    expect_bits([found], [clean], f"elements beside a gradient of {gradient}")


@contract("dtype", lambda subject: [BF16] if subject.rounds_at_random else [])
def rounding_at_random_is_right_on_average(subject, dtype):
    start, sign = (normals(seed, FP32)(20_000) for seed in (0, 1))
    start, sign, lr, steps = (0.02 * start).to(dtype), sign.sign().to(dtype), 1e-5, 5
    before, grads = start.double(), [[sign]] * steps
    (p,) = parameters_after(subject.make, [start], grads, lr=lr, eps=1e-8, weight_decay=0.0)
    distance = sign * (before - p.detach()) / (steps * lr)
    mean, deviation = distance.mean().item(), distance.std().item() / len(distance) ** 0.5
    if not abs(mean - 1) <= 5 * deviation:
        raise Wrong(f"on average a step moves by {mean:.3f} lr, expected 1 +- {deviation:.3f}")


# ---- Where the tensors lie ----------------------------------------------------------------------

VIEWS = {  # shape of the memory, the parameter or gradient in it
    "transposed": ((30, 50), lambda t: t.t()),
    "permuted 3-D": ((5, 7, 11), lambda t: t.permute(2, 0, 1)),
    "part of a larger memory": ((10, 50), lambda t: t[3:7]),
    "columns": ((30, 50), lambda t: t[:, :5]),  # from here on with gaps between the elements
    "every second": ((30, 50), lambda t: t[:, ::2]),
    "transposed columns": ((30, 50), lambda t: t[:, 3:9].t()),
    "of a vector": ((2050,), lambda t: t[::2]),
}


@contract("view", lambda subject: VIEWS)
def views_are_stepped_in_their_memory_alone(subject, view):
    shape, view = VIEWS[view]
    memory = normals(1, FP32)(*shape)
    outside, before = torch.ones_like(memory, dtype=torch.bool), memory.clone()
    view(outside).fill_(False)
    params = match_steps(subject, [view(memory)], start_and_gradients(view(memory).shape)[1])
    expect_bits([view(memory)], params, "the parameter, read from its memory")
    expect_bits([memory[outside]], [before[outside]], "memory outside of the parameter")


REPEATED = {
    "one number repeated": ((1, 1), lambda t: t.expand(6, 5)),
    "held negated": ((6, 5), torch._neg_view),
}


@contract("view", lambda subject: VIEWS | REPEATED)
def gradients_of_any_layout(subject, view):
    shape, view = (VIEWS | REPEATED)[view]
    grads = [[view(normals(seed, FP32)(*shape))] for seed in range(3)]
    match_steps(subject, start_and_gradients(grads[0][0].shape)[0], grads)


# ---- What else an optimizer promises ------------------------------------------------------------


@contract("dtype", lambda subject: subject.dtypes)
def a_saved_run_continues_with_the_same_bits(subject, dtype):
    starts, grads = start_and_gradients(*SHAPES, dtype=dtype)
    params, optimizer = new_optimizer(subject.make, starts)
    step_through(params, optimizer, grads[:2])
    others, resumed = new_optimizer(subject.make, copied(starts))
    with TemporaryFile() as file:
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=False))
    for run in ((params, optimizer), (others, resumed)):
        torch.manual_seed(0)
        step_through(*run, [copied(of_step) for of_step in grads[2:]])
    expect_bits(others, params, "parameters of the run that was resumed")


@contract("dtype", lambda subject: subject.dtypes)
def every_run_steps_to_the_same_bits(subject, dtype):
    """Also with another default dtype."""
    expected = None
    for default in (FP32, FP32, *OTHER_DEFAULTS):
        torch.manual_seed(0)
        starts, grads = start_and_gradients(*SHAPES, dtype=dtype)
        with default_dtype(default):
            found = parameters_after(subject.make, starts, grads)
        expected = expected or found
        expect_bits(found, expected, f"parameters, with {default} as the default dtype")


@contract()
def a_closure_is_evaluated_and_its_loss_returned(subject):
    (p,), optimizer = new_optimizer(subject.make, start_and_gradients((40,))[0])
    before = p.detach().clone()

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    if loss is None or loss != before.square().sum() or torch.equal(p, before):
        raise Wrong(f"step(closure) returned {loss}, expected the closure's loss, and a step")


@contract()
def autograd_notices_that_a_parameter_was_changed(subject):
    (p,), optimizer = new_optimizer(subject.make, start_and_gradients((40,))[0])
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError:
        return
    raise Wrong("a backward used a parameter that step() had changed, expected a RuntimeError")


@contract("given", lambda subject: ("a sparse gradient", "float64", "complex64"))
def the_unusual_is_refused_or_right(subject, given):
    dtype = {"float64": torch.float64, "complex64": torch.complex64}.get(given, FP32)
    starts, grads = start_and_gradients((40, 4), dtype=dtype)
    sparse = [[g.to_sparse() for g in of_step] for of_step in grads]
    try:
        match_steps(subject, starts, grads, sparse if given == "a sparse gradient" else None)
    except Wrong:
        raise
    except Exception:  # whatever it says, it is refused
        return


OPTIMIZER_CONTRACTS = {each.name: each for each in vars().values() if isinstance(each, Contract)}
