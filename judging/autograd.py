"""Every function does with its tensors what autograd expects: no more, no less, and never silently
wrong.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from harness.cli.device import DEVICE
from judging.circumstances import saved_tensors
from judging.comparing import (
    copies,
    expect_error,
    expect_same,
    gradients_of,
    match_float64,
    outputs_of,
    parts_of,
)
from judging.contract import Wrong, contract
from subjects.subject import Parts, Subject, as_tuple, leaves_of


def drawn_for(subject: Subject, dtype: torch.dtype = torch.float32) -> tuple[Parts, Parts]:
    """Return inputs and upstream gradients, the same at each call."""
    return subject.make((2, 3), subject.size, dtype)


@functools.cache
def parts_of_one_call(subject: Subject) -> Parts:
    """Return the outputs and the gradients that most contracts compare with."""
    return parts_of(subject, *drawn_for(subject))


def called_once(
    subject: Subject, needed: Iterable[str] | None = None
) -> tuple[Parts, Parts, Parts, Parts]:
    """Return leaves, outputs, the gradients of the outputs, and the parts that are expected."""
    expected = parts_of_one_call(subject)
    inputs, douts = drawn_for(subject)
    leaves = leaves_of(subject, inputs, needed)
    return leaves, outputs_of(subject, leaves, douts), douts, expected


def backward(outputs: Parts, douts: Parts, **options) -> None:
    """Add to the leaves' gradients; a function that overwrites `douts` gets copies."""
    pairs = [p for p in zip(outputs.values(), copies(douts).values()) if p[0].requires_grad]
    torch.autograd.backward(*zip(*pairs), **options)


def expect_grads(
    what: str, subject: Subject, leaves: Parts, expected: Parts, factor=1, exact: bool | None = None
) -> None:
    """Raise Wrong unless each leaf has `factor` times the gradient of one backward.

    exact: to the bit; unless told, where a second backward goes the way of the first.
    """
    exact = subject.exact_again if exact is None else exact
    for name in (name for name, leaf in leaves.items() if leaf.requires_grad):
        if leaves[name].grad is None:
            raise Wrong(f"{what}: {name} has no gradient")
        part = f"d{name}"
        expect_same(what, {part: leaves[name].grad}, {part: factor * expected[part]}, exact)


def is_noticed(what: str, subject: Subject, call: Callable[[], None], sentence: str) -> bool:
    """Return True if autograd refuses the call.

    sentence: what a record says that autograd says; "": a function of this project is not refused.
    """
    if sentence:
        expect_error(what, call, RuntimeError, sentence)
        return True
    try:
        call()
    except Exception as error:
        if subject.recorded or isinstance(error, Wrong):
            raise
        return True
    return False


# ---- More than one backward, more than one loss --------------------------------------------------


@contract()
def second_backward_through_a_retained_graph(subject):
    leaves, outputs, douts, expected = called_once(subject)
    for number, keep in enumerate((True, True, False), start=1):
        found = gradients_of(outputs, leaves, copies(douts), retain_graph=keep)
        expect_same(f"backward number {number}", found, expected, subject.exact_again)
    if subject.recorded:
        again = functools.partial(gradients_of, outputs, leaves, douts)
        expect_error("a backward without a graph", again, RuntimeError, "second time")


@contract()
def second_backward_adds_to_the_leaves_own_gradients(subject):
    leaves, outputs, douts, expected = called_once(subject)
    backward(outputs, douts, retain_graph=True)
    # autograd adds to these very tensors
    backward(outputs, {name: 2 * dout for name, dout in douts.items()})
    expect_grads("1 and 2 times the gradient", subject, leaves, expected, 3, exact=False)


@contract()
def gradients_accumulate_instead_of_overwriting(subject):
    leaves, outputs, douts, expected = called_once(subject)
    backward(outputs, douts)
    backward(outputs_of(subject, leaves, douts), douts)
    expect_grads("after two forwards and backwards", subject, leaves, expected, 2)


@contract()
def two_losses_on_one_result(subject):
    leaves, outputs, douts, expected = called_once(subject)
    sum((out * douts[name]).sum() for name, out in outputs.items()).backward(retain_graph=True)
    sum((out * -3.0 * douts[name]).sum() for name, out in outputs.items()).backward()
    expect_grads("of a loss and of -3 times it", subject, leaves, expected, -2, exact=False)


@contract()
def two_calls_on_the_same_inputs(subject):
    """The second call gets the targets, masks and other constants of other rows."""
    inputs, douts = drawn_for(subject)

    def of_other_rows(tensors):
        named = zip(inputs, tensors)
        return [t if name in subject.differentiable else t.flip(0) for name, t in named]

    def twice(*tensors):
        calls = subject.function(*tensors), subject.function(*of_other_rows(tensors))
        return tuple(a + 3 * b for a, b in zip(*map(as_tuple, calls)))

    second = parts_of(subject, dict(zip(inputs, of_other_rows(inputs.values()))), douts)
    expected = {name: t + 3 * second[name] for name, t in parts_of_one_call(subject).items()}
    found = parts_of(replace(subject, function=twice), *drawn_for(subject))
    expect_same("of two calls, the second 3 times", found, expected, False)


# ---- Which gradients are computed ----------------------------------------------------------------


def one_needed_or_one_frozen(subject: Subject) -> Iterable[tuple[str, ...]]:
    """Return tuples of names: each input alone, and all inputs but one."""
    names = subject.differentiable
    left = [tuple(name for name in names if name != frozen) for frozen in names]
    return dict.fromkeys([*((name,) for name in names), *left])


@contract("needed:", one_needed_or_one_frozen)
def frozen_inputs_leave_the_others_their_gradients(subject, needed):
    leaves, outputs, douts, expected = called_once(subject, needed)
    backward(outputs, douts)
    expect_grads("beside frozen inputs", subject, leaves, expected, exact=subject.recorded)


@contract()
def outputs_that_nobody_uses_send_no_gradient(subject):
    for used in drawn_for(subject)[1]:
        inputs, douts = drawn_for(subject)
        alone = {name: dout * (name == used) for name, dout in douts.items()}
        expected = parts_of(subject, inputs, alone)
        leaves, outputs, *_ = called_once(subject)
        outputs[used].backward(douts[used])
        for name in subject.differentiable:
            if leaves[name].grad is None:
                leaves[name].grad = torch.zeros_like(leaves[name])
        expect_grads(f"where {used} alone is used", subject, leaves, expected, exact=False)


@contract()
def no_grad_and_inference_mode_give_the_same_numbers_and_keep_nothing(subject):
    expected = parts_of_one_call(subject)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        inputs, douts = drawn_for(subject)
        needing = mode is not torch.enable_grad  # else nothing needs a gradient
        with mode(), saved_tensors() as saved:
            outputs = outputs_of(subject, leaves_of(subject, inputs) if needing else inputs, douts)
        what = f"under {mode.__name__}" if needing else "where no input needs a gradient"
        if saved or any(t.grad_fn is not None for t in outputs.values()):
            raise Wrong(f"{what}: there is a graph, or {len(saved)} tensors are kept for one")
        expect_same(what, outputs, expected, subject.recorded)


@contract("upstream gradients need one:", lambda subject: (True, False))
def second_derivative_is_refused_not_silently_zero(subject, upstream_needs_grad):
    """Others may compute it, where their numbers are right."""

    def penalty(function):
        def of_gradients(*tensors):
            outputs = as_tuple(function(*tensors))
            ones = [torch.ones_like(out, requires_grad=upstream_needs_grad) for out in outputs]
            leaves = [t for t in tensors if t.requires_grad]
            first = torch.autograd.grad(outputs, leaves, ones, create_graph=True)
            return sum(t.square().sum() for t in (*outputs, *first))

        return of_gradients

    penalized, (inputs, _) = subject.called_as(penalty), drawn_for(subject)
    one = {"penalty": torch.ones((), dtype=torch.float32, device=DEVICE)}
    sentence = "no second derivative" if subject.recorded else ""
    twice = functools.partial(match_float64, penalized, inputs, one)
    is_noticed("the gradients' own gradients", subject, twice, sentence)


# ---- What is changed, and when autograd notices --------------------------------------------------


@contract()
def inputs_and_upstream_gradients_are_never_changed(subject):
    for dtype in (torch.float32, torch.bfloat16):
        inputs, douts = drawn_for(subject, dtype)
        given = inputs | {f"d{name}": dout for name, dout in douts.items()}
        before = copies(given)
        parts_of(subject, inputs, douts)
        expect_same("after forward and backward", given, before, True)


@contract("of", lambda subject: list(drawn_for(subject)[1]))
def output_changed_in_place_is_allowed_or_noticed(subject, name):
    inputs, douts = drawn_for(subject)
    expected = parts_of(subject, inputs, douts | {name: 2 * douts[name]})
    leaves, outputs, *_ = called_once(subject)

    def change_and_go_back():
        outputs[name].mul_(2.0)
        backward(outputs, douts)

    what, sentence = f"{name} was doubled in place", subject.fixed_outputs.get(name, "")
    if not is_noticed(what, subject, change_and_go_back, sentence):
        expect_grads(what, subject, leaves, expected)


@contract("of", lambda subject: list(drawn_for(subject)[0]))
def input_changed_before_the_backward_is_noticed_or_does_not_count(subject, name):
    leaves, outputs, douts, expected = called_once(subject)
    with torch.no_grad():
        leaves[name].copy_(leaves[name].flip(0))
    what = f"{name} changed between forward and backward"
    # autograd says the latter of an input whose view is an output
    noticed = "modified by an inplace operation|its base .* has been modified inplace"
    sentence = noticed if name in subject.saved else ""
    if not is_noticed(what, subject, functools.partial(backward, outputs, douts), sentence):
        expect_grads(what, subject, leaves, expected)


@contract(of_record=True)
def saved_tensors_are_what_the_record_says(subject):
    inputs, douts = drawn_for(subject)
    leaves = leaves_of(subject, inputs)
    with saved_tensors() as saved:
        outputs = outputs_of(subject, leaves, douts)
    places = {t.untyped_storage().data_ptr(): name for name, t in leaves.items()}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    kept = {places[place] for place in found if place in places}
    known = {*places, *(out.untyped_storage().data_ptr() for out in outputs.values())}
    others = sum(size for place, size in found.items() if place not in known)
    expected = set(subject.saved), subject.saved_bytes(inputs)
    if (kept, others) != expected:
        raise Wrong(f"kept (inputs, other bytes): {(kept, others)}, by the record {expected}")


# ---- In the company of other parts of PyTorch ----------------------------------------------------


def offloaded(function: Callable, *inputs):
    with torch.autograd.graph.save_on_cpu():
        return function(*inputs)


RECOMPUTING = {
    "checkpoint": lambda *call: checkpoint(*call, use_reentrant=False),
    "reentrant checkpoint": lambda *call: checkpoint(*call, use_reentrant=True),
    "saved on the CPU": offloaded,
}


@contract("by", lambda subject: RECOMPUTING)
def recomputed_or_offloaded(subject, way):
    inputs, douts = drawn_for(subject)
    expected, leaves = parts_of_one_call(subject), leaves_of(subject, inputs)
    again = functools.partial(RECOMPUTING[way], subject.function)
    outputs = outputs_of(replace(subject, function=again), leaves, douts)
    backward(outputs, douts)  # the reentrant checkpoint refuses torch.autograd.grad
    expect_same(way, outputs, expected, subject.recorded)
    expect_grads(way, subject, leaves, expected)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


@contract("of a", lambda subject: ("parameter", "subclass"))
def parameters_and_subclasses_with_memory_of_their_own_are_taken(subject, kind):
    inputs, douts = drawn_for(subject)
    leaves = leaves_of(subject, inputs)
    for name in subject.differentiable:
        if kind == "parameter":
            leaves[name] = torch.nn.Parameter(inputs[name])
        else:
            leaves[name] = inputs[name].detach().as_subclass(Named).requires_grad_()
    outputs = outputs_of(subject, leaves, douts)
    found = outputs | gradients_of(outputs, leaves, douts)
    expect_same(f"of a {kind}", found, parts_of_one_call(subject), subject.recorded)


@contract("of", lambda subject: ("inputs", "gradients"))
def tensors_that_are_held_negated(subject, of):
    """A loss that goes through complex numbers sends such gradients back."""
    inputs, douts = drawn_for(subject)
    held = {
        name: torch._neg_view(-t) if t.is_floating_point() else t
        for name, t in (inputs if of == "inputs" else douts).items()
    }
    found = parts_of(subject, *((held, douts) if of == "inputs" else (inputs, held)))
    expect_same(f"{of} held negated", found, parts_of_one_call(subject), subject.recorded)


@contract(of_record=True)  # PyTorch's own products round there
def backward_under_autocast_has_the_forwards_dtypes(subject):
    leaves, outputs, douts, expected = called_once(subject)
    with torch.autocast(DEVICE, torch.bfloat16):
        backward(outputs, douts)
    expect_grads("under autocast to bf16", subject, leaves, expected)
