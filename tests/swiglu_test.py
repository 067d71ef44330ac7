"""SwiGLU's own tests: its rounding, its steep gates, and the backward in place.

tests/contracts_*_test.py test what every function has to do, tests/llama_mlp_test.py the MLP.
"""

import math

import pytest
import torch

from harness.benchmark.checking import Check, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons.swiglu_kernel import (
    TritonSwiGLU,
    swiglu_backward,
    swiglu_forward,
    swiglu_reference,
)
from subjects import subject
from subjects.swiglu import SWIGLU, make
from subjects.swiglu import swiglu as act
from tests import tiles
from tests.fixtures import needs_gpu, pads_rows, poisoned_outputs

DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
NAN, INF = float("nan"), float("inf")

# 0 * inf and 1 / 0 are the right answers in some tests; the interpreter's NumPy comments on them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poison_new_tensors", "small_tiles"),
]


def make_inputs(shape, dtype=torch.float32, seed=0):
    """gate, up and dy of any shape, each in memory of its own."""
    inputs, douts = make((), math.prod(shape), dtype, seed)
    return tuple(t.view(shape).clone() for t in (*inputs.values(), *douts.values()))


def run(function, gate, up, dy):
    """Return output and gradients."""
    return tuple(subject.run(SWIGLU, function, {"gate": gate, "up": up}, {"y": dy}).values())


def check_against_float64(gate, up, dy) -> list[Check]:
    """One check for the output and each gradient."""
    return subject.checks(SWIGLU, {"gate": gate, "up": up}, {"y": dy})


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_is_rounded_before_up_multiplies_it(dtype):
    # The other order changes a quarter of the entries.
    gate, up, _ = make_inputs((32, 256), dtype)
    same = act(gate, up) == swiglu_reference(gate, up)
    assert same.float().mean() > 0.99


# Where fp32 holds exp(-gate) no more, where it is no longer added to 1, and where gate times
# log2(e) overflows.
STEEP = [0.0, 1.0, 17.0, 50.0, 87.0, 88.0, 89.0, 104.0, 1e4, 3e38, INF]


def test_steep_infinite_and_nan_gates_are_as_in_pytorch():
    gate = torch.tensor([*STEEP, *(-g for g in STEEP), NAN], device=DEVICE)
    _, up, dy = make_inputs(gate.shape)
    for ours, eager in zip(run(act, gate, up, dy), run(swiglu_reference, gate, up, dy)):
        torch.testing.assert_close(ours, eager, equal_nan=True, rtol=1e-4, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("offset", [-15.0, 300.0])
def test_gates_far_from_zero(dtype, offset):
    gate, up, dy = make_inputs((6, 100), dtype)
    assert_all_passed(check_against_float64(gate + offset, up, dy))


def test_nan_stays_in_its_element():
    inputs = make_inputs((5, 64))
    clean = run(act, *inputs)
    for changed in inputs:
        before = changed[2, 7].clone()
        changed[2, 7] = NAN
        for after, expected in zip(run(act, *inputs), clean):
            differs = after != expected
            assert (
                differs.sum() <= 1
                and torch.equal(after.isnan(), differs)
                and not differs.flatten()[:100].any()
            )
        changed[2, 7] = before


def test_product_of_dy_and_up_may_leave_fp16():
    gate, up, dy = make_inputs((4, 64), torch.float16)
    steep = gate - 12.0, 1e3 * up, 1e3 * dy  # dy * up is 1e6, times silu's slope of 1e-4
    _, dgate, _ = run(act, *steep)
    _, expected, _ = run(swiglu_reference, *(t.double() for t in steep))
    assert relative_error(dgate, expected) < 1e-3


# ---- Shapes and layouts --------------------------------------------------------------------------


def test_single_numbers_are_taken():
    assert_all_passed(check_against_float64(*make_inputs(())))


def test_rows_without_columns():
    assert all(t.shape == (3, 0) for t in run(act, *make_inputs((3, 0))))


def test_halves_of_one_tensor_are_not_copied():
    gate, up = make_inputs((2, 3, 128))[0].chunk(2, -1)
    with poisoned_outputs() as shapes:
        swiglu_forward(gate, up)
    assert shapes == [(2, 3, 128 // 2)]


# ---- The contract with autograd ------------------------------------------------------------------


@pytest.fixture
def leaves():
    gate, up, dy = make_inputs((9, 64))
    _, dgate, dup = run(act, gate, up, dy)
    return gate.requires_grad_(), up.requires_grad_(), dy, dgate, dup


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_input_without_a_gradient(leaves, frozen):
    *inputs, dy, dgate, dup = leaves
    inputs[frozen].requires_grad_(False)
    results = [t * 1.0 for t in inputs]
    TritonSwiGLU(inplace=True)(*results).backward(dy)
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, (dgate, dup)[1 - frozen])
    assert all(torch.equal(a, b) for a, b in zip(results, inputs)), (
        "overwritten, but somebody else's data"
    )


# ---- In place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_launchers_write_over_what_they_were_given(dtype):
    gate, up, dy = make_inputs((5, 150), dtype)
    y = swiglu_forward(gate, up)
    new = swiglu_backward(dy, gate, up, need_y=True)
    assert torch.equal(new[2], y), "y made again has not the forward's bits"
    assert not {t.data_ptr() for t in new} & {t.data_ptr() for t in (gate, up, dy)}
    over = swiglu_backward(dy, gate, up, inplace=True, need_y=True)
    assert [t.data_ptr() for t in over] == [t.data_ptr() for t in (gate, up, dy)]
    assert all(torch.equal(a, b) for a, b in zip(over, new))


def test_y_that_is_not_needed_is_not_written():
    gate, up, dy = make_inputs((5, 150))
    before = dy.clone()
    with poisoned_outputs() as shapes:
        assert swiglu_backward(dy, gate, up)[2] is None
        assert swiglu_backward(dy, gate, up, inplace=True)[2] is None
    assert shapes == 2 * [(5, 150)] and torch.equal(dy, before)


def test_inplace_allocates_only_the_output(leaves):
    gate, up, dy, dgate, dup = leaves
    results = gate * 1.0, up * 1.0
    given = {}
    for name, t in zip(("gate", "up"), results):
        t.register_hook(lambda grad, name=name: given.update({name: grad.data_ptr()}))
    with poisoned_outputs() as shapes:
        TritonSwiGLU(inplace=True)(*results).backward(dy)
    assert shapes == [(9, 64)] and given == {
        "gate": results[0].data_ptr(),
        "up": results[1].data_ptr(),
    }
    assert torch.equal(gate.grad, dgate) and torch.equal(up.grad, dup)


def test_inplace_under_retain_graph_leaves_gate_and_up_alone(leaves):
    results = [t * 1.0 for t in leaves[:2]]
    before = [t.detach().clone() for t in results]
    TritonSwiGLU(inplace=True)(*results).backward(leaves[2], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(results, before))


@pytest.mark.parametrize("shared", [0, 1], ids=["gate", "up"])
def test_inplace_other_saved_use_raises(leaves, shared):
    results = [t * 1.0 for t in leaves[:2]]
    penalty = results[shared].square().sum()
    TritonSwiGLU(inplace=True)(*results).backward(leaves[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_inplace_result_saved_by_the_layer_before_raises(leaves):
    gate, up, dy, *_ = leaves
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        TritonSwiGLU(inplace=True)(gate.tanh(), up * 1.0).backward(dy)


def test_inplace_dy_that_became_y_is_noticed():
    gate, up, dy = make_inputs((5, 64))
    result = dy.requires_grad_() * 1.0
    penalty = result.square().sum()
    swiglu_backward(result, gate, up, inplace=True, need_y=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@pytest.mark.parametrize("refused", [0, 1, 2], ids=["gate", "up", "dy"])
def test_inplace_refuses_what_cannot_hold_a_gradient(refused):
    """kernel_support_test.py has the memory that is refused."""
    sources = list(make_inputs((4, 64)))
    sources[refused] = sources[refused].t().contiguous().t()
    before = [t.clone() for t in sources]
    name = ("gate", "up", "dy")[refused]
    with pytest.raises(ValueError, match=rf"{name} has strides \(1, 4\).*use inplace=False"):
        swiglu_backward(sources[2], *sources[:2], inplace=True, need_y=True)
    assert all(map(torch.equal, sources, before))


def test_inplace_refusal_comes_in_the_forward(leaves):
    with pytest.raises(ValueError, match=r"gate has strides .* is a leaf: True"):
        TritonSwiGLU(inplace=True)(*leaves[:2])


# ---- Bad input -----------------------------------------------------------------------------------

ONES = torch.ones(4, 64, device=DEVICE)


def test_dy_unlike_gate_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"dy has shape \(3, 64\), expected \(4, 64\)"):
        swiglu_backward(ONES[:3], ONES, ONES)
    with pytest.raises(TypeError, match=r"dy is torch\.float16, expected torch\.float32"):
        swiglu_backward(ONES.half(), ONES, ONES)


# ---- torch.compile -------------------------------------------------------------------------------


@pads_rows
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("need_y", [False, True])
def test_torch_compile_of_the_backward_alone(need_y, inplace):
    gate, up, dy = make_inputs((5, 64))
    expected = swiglu_backward(dy, gate, up, need_y=need_y)
    sources = gate.clone(), up.clone(), dy.clone()

    @torch.compile(fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
    def backward(dy, gate, up):
        return swiglu_backward(dy, gate, up, inplace=inplace, need_y=need_y)

    results = backward(sources[2], *sources[:2])
    assert (results[2] is None) == (not need_y)
    n_results = 3 if need_y else 2
    assert all(map(torch.equal, results[:n_results], expected[:n_results]))
    written = n_results if inplace else 0
    assert all(map(torch.equal, sources, (*expected[:written], *(gate, up, dy)[written:])))


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("odd", range(4), ids=["none", "gate", "up", "dy"])
def test_inplace_at_any_address(dtype, odd, monkeypatch):
    # An address that is no multiple of 16 bytes makes Triton spread that tensor's block over the
    # threads otherwise.
    tiles.shipped_tiles(monkeypatch)
    inputs = make_inputs((512, 14_336), dtype)
    expected = swiglu_backward(inputs[2], *inputs[:2], need_y=True)
    for _ in range(20):
        copies = [t.clone() for t in inputs]
        if odd > 0:
            memory = inputs[0].new_empty(inputs[0].numel() + 1)
            copies[odd - 1] = memory[1:].view(inputs[0].shape).copy_(inputs[odd - 1])
        found = swiglu_backward(copies[2], *copies[:2], inplace=True, need_y=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
