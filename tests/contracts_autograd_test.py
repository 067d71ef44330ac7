"""Every function does with its tensors what autograd expects: no more, no less, and never silently
wrong.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harness.benchmark.checking import FLOOR, assert_all_passed, relative_error
from harness.cli.device import DEVICE
from subjects import SUBJECTS
from subjects.subject import as_tuple, checks, gradients, leaves_of, run, same_bits
from tests.contracts import contract
from tests.fixtures import saved_tensors

# Masked lanes compute inf - inf.  The interpreter's NumPy warns about that.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poison_new_tensors", "small_tiles"),
]


def make(subject, dtype=torch.float32):
    return subject.make((2, 3), subject.size, dtype)


@functools.cache
def parts_of(name):
    """Return the outputs and the gradients of one call.  Most tests compare with them."""
    subject = SUBJECTS[name]
    return run(subject, subject.function, *make(subject))


def made(subject):
    """Return the inputs, the gradients of the outputs, and the parts that belong to them."""
    return *make(subject), parts_of(subject.name)


def call(subject, leaves):
    return as_tuple(subject.function(*leaves.values()))


def backward(outputs, douts, **options):
    torch.autograd.backward(outputs, list(douts.values()), **options)


def assert_near(subject, leaves, expected, factor):
    """Each leaf has `factor` times the gradient of one backward."""
    for name in subject.differentiable:
        error = relative_error(leaves[name].grad, factor * expected[f"d{name}"])
        assert error <= FLOOR[torch.float32], name


def assert_grads(subject, leaves, expected, factor=1):
    """The same to the bit, unless a second backward takes another way than the first."""
    if not subject.exact_again:
        return assert_near(subject, leaves, expected, factor)
    for name in subject.differentiable:
        assert torch.equal(leaves[name].grad, factor * expected[f"d{name}"]), name


# ---- More than one backward, more than one loss --------------------------------------------------


@contract()
def test_second_backward_through_a_retained_graph(subject):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    outputs = call(subject, leaves)
    for keep in (True, True, False):
        for name, grad in gradients(outputs, leaves, douts, retain_graph=keep).items():
            leaves[name.removeprefix("d")].grad = grad
        assert_grads(subject, leaves, expected)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(outputs, leaves, douts)


@contract()
def test_second_backward_adds_to_the_leaves_own_gradients(subject):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    outputs = call(subject, leaves)
    backward(outputs, douts, retain_graph=True)
    kept = [leaves[name].grad for name in subject.differentiable]
    backward(outputs, {name: 2 * dout for name, dout in douts.items()})
    # autograd adds to these very tensors
    assert all(leaves[name].grad is grad for name, grad in zip(subject.differentiable, kept))
    assert_near(subject, leaves, expected, 3)


@contract()
def test_gradients_accumulate_instead_of_overwriting(subject):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    for _ in range(2):
        backward(call(subject, leaves), douts)
    assert_grads(subject, leaves, expected, 2)


@contract()
def test_two_losses_on_one_result(subject):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    pairs = list(zip(call(subject, leaves), douts.values()))
    sum((out * dout).sum() for out, dout in pairs).backward(retain_graph=True)
    sum((out * -3.0 * dout).sum() for out, dout in pairs).backward()
    assert_near(subject, leaves, expected, -2.0)


@contract()
def test_two_calls_on_the_same_inputs(subject):
    """The second call gets the targets, masks and other constants of other rows."""

    def twice(function):
        def both(*tensors):
            others = [
                t if name in subject.differentiable else t.flip(0)
                for name, t in zip(inputs, tensors)
            ]
            pairs = zip(as_tuple(function(*tensors)), as_tuple(function(*others)))
            return tuple(a + 3 * b for a, b in pairs)

        return both

    inputs, douts = make(subject)
    assert_all_passed(checks(subject.called_as(twice), inputs, douts))


# ---- Which gradients are computed ----------------------------------------------------------------


def one_needed_or_one_frozen(subject):
    """Return tuples of names: each input alone, and all inputs but one."""
    names = subject.differentiable
    left = [tuple(name for name in names if name != frozen) for frozen in names]
    return dict.fromkeys([*((name,) for name in names), *left])


@contract("needed", one_needed_or_one_frozen)
def test_frozen_inputs_leave_the_others_their_gradients(subject, needed):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs, needed)
    pairs = [pair for pair in zip(call(subject, leaves), douts.values()) if pair[0].requires_grad]
    torch.autograd.backward(*zip(*pairs))
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(needed)
    for name in needed:
        assert torch.equal(leaves[name].grad, expected[f"d{name}"])


@contract()
def test_outputs_that_nobody_uses_send_no_gradient(subject):
    inputs, douts = make(subject)
    for index, dout in enumerate(douts.values()):
        leaves, wide = leaves_of(subject, inputs), leaves_of(subject, inputs)
        call(subject, leaves)[index].backward(dout)
        as_tuple(subject.reference(*wide.values()))[index].backward(dout)
        for found, expected in zip(leaves.values(), wide.values()):
            if expected.grad is None:
                assert found.grad is None or not found.grad.any()
            else:
                assert relative_error(found.grad, expected.grad) < 1e-5


@contract()
def test_no_grad_and_inference_mode_give_the_same_numbers_and_keep_nothing(subject):
    inputs, douts, parts = made(subject)
    expected = [parts[name] for name in douts]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, saved_tensors() as saved:
            outputs = call(subject, leaves_of(subject, inputs))
        assert not saved and all(t.grad_fn is None for t in outputs)
        assert all(map(torch.equal, outputs, expected))
    frozen = call(subject, inputs)
    assert all(t.grad_fn is None for t in frozen) and all(map(torch.equal, frozen, expected))


@contract("upstream_needs_grad", lambda subject: (True, False))
def test_second_derivative_is_refused_not_silently_zero(subject, upstream_needs_grad):
    inputs, douts = make(subject)
    leaves = leaves_of(subject, inputs)
    douts = {name: dout.requires_grad_(upstream_needs_grad) for name, dout in douts.items()}
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradients(call(subject, leaves), leaves, douts, create_graph=True)


# ---- What is changed, and when autograd notices --------------------------------------------------


@contract()
def test_inputs_and_upstream_gradients_are_never_changed(subject):
    inputs, douts = make(subject, torch.bfloat16)
    tensors = [*inputs.values(), *douts.values()]
    before = [t.clone() for t in tensors]
    run(subject, subject.function, inputs, douts)
    assert all(map(torch.equal, tensors, before))


@contract("name", lambda subject: list(make(subject)[1]))
def test_output_changed_in_place_is_allowed_or_noticed(subject, name):
    inputs, douts = make(subject)
    leaves = leaves_of(subject, inputs)
    outputs = dict(zip(douts, call(subject, leaves)))
    if name in subject.fixed_outputs:
        with pytest.raises(RuntimeError, match=subject.fixed_outputs[name]):
            outputs[name].mul_(2.0)
    else:
        outputs[name].mul_(2.0)
        backward(list(outputs.values()), douts)
        douts[name] = 2 * douts[name]
        assert_grads(subject, leaves, run(subject, subject.function, inputs, douts))


@contract("name", lambda subject: list(make(subject)[0]))
def test_input_changed_before_the_backward_is_noticed_or_does_not_count(subject, name):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    outputs = call(subject, leaves)
    with torch.no_grad():
        leaves[name].copy_(leaves[name].flip(0))
    if name in subject.saved:
        # autograd says the latter of an input whose view is an output
        noticed = "modified by an inplace operation|its base .* has been modified inplace"
        with pytest.raises(RuntimeError, match=noticed):
            backward(outputs, douts)
    else:
        backward(outputs, douts)
        assert_grads(subject, leaves, expected)


@contract()
def test_saved_tensors_are_what_the_record_says(subject):
    inputs, _ = make(subject)
    leaves = leaves_of(subject, inputs)
    with saved_tensors() as saved:
        outputs = call(subject, leaves)
    places = {t.untyped_storage().data_ptr(): name for name, t in leaves.items()}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert {places[place] for place in found if place in places} == set(subject.saved)
    known = {*places, *(out.untyped_storage().data_ptr() for out in outputs)}
    others = sum(size for place, size in found.items() if place not in known)
    assert others == subject.saved_bytes(inputs)


# ---- In the company of other parts of PyTorch ----------------------------------------------------


def offloaded(function, *inputs):
    with torch.autograd.graph.save_on_cpu():
        return function(*inputs)


WAYS = {
    "checkpoint": lambda *call: checkpoint(*call, use_reentrant=False),
    "reentrant checkpoint": lambda *call: checkpoint(*call, use_reentrant=True),
    "saved on the CPU": offloaded,
}


@contract("way", lambda subject: WAYS)
def test_recomputed_or_offloaded(subject, way):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    outputs = as_tuple(WAYS[way](subject.function, *leaves.values()))
    backward(outputs, douts)  # the reentrant checkpoint refuses torch.autograd.grad
    assert all(map(torch.equal, outputs, expected.values()))
    assert_grads(subject, leaves, expected)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


@contract("kind", lambda subject: ("parameter", "subclass"))
def test_parameters_and_subclasses_with_memory_of_their_own_are_taken(subject, kind):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    for name in subject.differentiable:
        if kind == "parameter":
            leaves[name] = torch.nn.Parameter(inputs[name])
        else:
            leaves[name] = inputs[name].detach().as_subclass(Named).requires_grad_()
    outputs = call(subject, leaves)
    found = dict(zip(douts, outputs)) | gradients(outputs, leaves, douts)
    assert same_bits(found, expected)


@contract("of", lambda subject: ("inputs", "gradients"))
def test_tensors_that_are_held_negated(subject, of):
    """A loss that goes through complex numbers sends such gradients back."""
    inputs, douts, expected = made(subject)
    held = {
        name: torch._neg_view(-t) if t.is_floating_point() else t
        for name, t in (inputs if of == "inputs" else douts).items()
    }
    tensors = (held, douts) if of == "inputs" else (inputs, held)
    assert same_bits(run(subject, subject.function, *tensors), expected)


@contract()
def test_backward_under_autocast_has_the_forwards_dtypes(subject):
    inputs, douts, expected = made(subject)
    leaves = leaves_of(subject, inputs)
    outputs = call(subject, leaves)
    with torch.autocast(DEVICE, torch.bfloat16):
        backward(outputs, douts)
    assert_grads(subject, leaves, expected)
