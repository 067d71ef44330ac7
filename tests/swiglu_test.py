"""Is SwiGLU right, and the MLP around it?

`python swiglu_test.py` prints, for each dtype, the activation's output and gradients and then the MLP's; on a GPU also
the memory they take.  `pytest swiglu_test.py` makes the same checks, and many more.  Without a GPU the kernels run on
the CPU, in Triton's interpreter, and the tests that need a GPU are skipped.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness import measure
from harness.checking import (
    DEVICE,
    DTYPE_NAME,
    FLOOR,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_checks,
    relative_error,
)
from next_steps import swiglu_kernel
from next_steps.llama_mlp import SwiGLUMLPFunction, TritonLlamaMLP
from next_steps.swiglu_kernel import (
    TritonSwiGLU,
    TritonSwiGLUFunction,
    swiglu_backward,
    swiglu_forward,
    swiglu_reference,
)
from tests.fixtures import (
    COMPILED_DTYPE,
    captured,
    compiled_once,
    needs_gpu,
    needs_two_gpus,
    pads_rows,
    poisoned_outputs,
    waiting_forbidden,
)

SHAPE = (2, 512, 14_336) if HAS_GPU else (2, 12, 250)  # (B, T, I); LLaMA 3.1 8B has I = 14,336 and H = 4096
MLP_SIZES = (1024, 4096, 14_336) if HAS_GPU else (24, 40, 112)  # N, H, I
MEMORY_SHAPE = (16_384, 14_336)
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
SHIPPED_BLOCK_SIZE = swiglu_kernel.BLOCK_SIZE
NAN, INF = float("nan"), float("inf")

# 0 * inf and 1 / 0 are the right answers in some tests; the interpreter's NumPy comments on them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let small tensors take several blocks too."""
    monkeypatch.setattr(swiglu_kernel, "BLOCK_SIZE", 128)


def act(gate, up):
    return TritonSwiGLUFunction.apply(gate, up, False)


def act_inplace(gate, up):
    """Of results, which may be overwritten."""
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return TritonSwiGLUFunction.apply(gate, up, True)


def make_inputs(shape, dtype=torch.float32, seed=0):
    """Gates of both signs, up and the gradient for y with a mean."""
    generator = torch.Generator().manual_seed(seed)
    gate = 0.3 + 2.0 * torch.randn(shape, generator=generator)
    up = 0.5 + torch.randn(shape, generator=generator)
    dy = 0.25 + torch.randn(shape, generator=generator)
    return tuple(t.to(DEVICE, dtype) for t in (gate, up, dy))


def run(function, *inputs):
    """Output and gradients, of one forward and one backward; the last input is the gradient for the output."""
    *inputs, dout = inputs
    leaves = [t.detach().requires_grad_() for t in inputs]  # with their strides
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def check_against_float64(name, inputs, function=act, reference=swiglu_reference, parts=("y", "dgate", "dup")):
    """One check for the output and each gradient."""
    with poisoned_outputs():
        ours = run(function, *inputs)
    ref64 = run(reference, *(t.double() for t in inputs))
    eager = run(reference, *inputs)
    return [compare(f"{name} {part}", *abc) for part, *abc in zip(parts, ours, ref64, eager)]


def make_mlp_inputs(dtype=torch.float32, sizes=MLP_SIZES, seed=0):
    """x (N, H), w_gate and w_up (I, H), w_down (H, I), dout (N, H)."""
    n_rows, H, I = sizes
    generator = torch.Generator().manual_seed(seed)
    x, dout = (0.2 + torch.randn((n_rows, H), generator=generator) for _ in range(2))
    w_gate, w_up = (torch.randn((I, H), generator=generator) / H**0.5 for _ in range(2))
    w_down = torch.randn((H, I), generator=generator) / I**0.5
    return tuple(t.to(DEVICE, dtype) for t in (x, w_gate, w_up, w_down, dout))


def mlp_reference(x, w_gate, w_up, w_down):
    return F.linear(swiglu_reference(F.linear(x, w_gate), F.linear(x, w_up)), w_down)


def mlp_checks(inputs, function=SwiGLUMLPFunction.apply, name="MLP") -> list[Check]:
    parts = ("out", "dx", "dW_gate", "dW_up", "dW_down")
    return check_against_float64(name, inputs, function, mlp_reference, parts)


def dtype_checks(dtype) -> list[Check]:
    name = DTYPE_NAME[dtype]
    return check_against_float64(name, make_inputs(SHAPE, dtype)) + mlp_checks(
        make_mlp_inputs(dtype), name=f"{name} MLP"
    )


# ---- The numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_activation_and_mlp_match_float64(dtype):
    assert_all_passed(dtype_checks(dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_backward_over_its_inputs_matches_float64(dtype):
    assert_all_passed(check_against_float64("in place", make_inputs((5, 150), dtype), act_inplace))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_is_rounded_before_up_multiplies_it(dtype):
    # The other order changes a quarter of the entries.
    gate, up, _ = make_inputs((32, 256), dtype)
    same = act(gate, up) == swiglu_reference(gate, up)
    assert same.float().mean() > 0.99


def test_bf16_forward_has_the_bits_of_eager():
    gate, up, _ = make_inputs(SHAPE, torch.bfloat16)
    same = act(gate, up) == swiglu_reference(gate, up)
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1000])
def test_no_element_is_lost_at_the_end_of_a_block(n):
    assert_all_passed(check_against_float64(f"{n} elements", make_inputs((n,))))


@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (5, 1), (4, 127), (3, 128), (2, 129), (3, 300), (1, 5000)])
def test_rows_with_gaps_between_them(n_rows, n_cols):
    gate_up, (_, _, dy) = make_inputs((n_rows, 2 * n_cols))[0], make_inputs((n_rows, n_cols), seed=1)
    assert_all_passed(check_against_float64("halves", (*gate_up.chunk(2, -1), dy)))


@pytest.mark.parametrize("halves", [False, True])
def test_shipped_block_size(halves, monkeypatch):
    monkeypatch.setattr(swiglu_kernel, "BLOCK_SIZE", SHIPPED_BLOCK_SIZE)
    gate, up, dy = make_inputs((3, 2100))
    if halves:
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    assert_all_passed(check_against_float64("shipped", (gate, up, dy)))


# Where fp32 holds exp(-gate) no more, where it is no longer added to 1, and where gate times log2(e) overflows.
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
    assert_all_passed(check_against_float64("offset", (gate + offset, up, dy)))


def test_nan_stays_in_its_element():
    inputs = make_inputs((5, 64))
    clean = run(act, *inputs)
    for changed in inputs:
        before = changed[2, 7].clone()
        changed[2, 7] = NAN
        for after, expected in zip(run(act, *inputs), clean):
            differs = after != expected
            assert differs.sum() <= 1 and torch.equal(after.isnan(), differs) and not differs.flatten()[:100].any()
        changed[2, 7] = before


def test_product_of_dy_and_up_may_leave_fp16():
    gate, up, dy = make_inputs((4, 64), torch.float16)
    _, dgate, _ = run(act, gate - 12.0, 1e3 * up, 1e3 * dy)  # dy * up is 1e6, times silu's slope of 1e-4
    _, expected, _ = run(swiglu_reference, *(t.double() for t in (gate - 12.0, 1e3 * up, 1e3 * dy)))
    assert relative_error(dgate, expected) < 1e-3


# ---- The checks can fail -----------------------------------------------------------------------------------


def wrong_answers(gate, up, dy):
    """name -> (which of y, dgate, dup it poses as, a float64 answer with one mistake); "right" has none."""
    gate, up, dy = gate.double(), up.double(), dy.double()
    s = gate.sigmoid()
    y, dgate, dup = gate * s * up, dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    last = torch.arange(y.numel(), device=y.device).view(y.shape) >= y.numel() - 16
    return {
        "right y": (0, y),
        "right dgate": (1, dgate),
        "right dup": (2, dup),
        "y zero": (0, 0 * y),
        "y without gate": (0, s * up),
        "y with gate and up swapped": (0, gate * up * up.sigmoid()),
        "y of GELU": (0, F.gelu(gate) * up),
        "y with its end unwritten": (0, y.where(~last, 0)),
        "dgate zero": (1, 0 * dgate),
        "dgate sign flipped": (1, -dgate),
        "dgate with sigmoid held constant": (1, dy * up * s),
        "dgate without up": (1, dgate / up),
        "dgate with s for 1 - s": (1, dy * up * s * (1 + gate * s)),
        "dgate with silu for s": (1, dy * up * s * gate * (1 + gate * (1 - s))),
        "dup zero": (2, 0 * dup),
        "dup of gate, not silu": (2, dy * gate),
        "dup of y": (2, dy * y),
        "dup and dgate swapped": (2, dgate),
        "dup off by one": (2, dup.roll(1)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparator_rejects_known_wrong_answers(dtype):
    inputs = make_inputs((8, 200), dtype)
    eager = run(swiglu_reference, *inputs)
    ref64 = run(swiglu_reference, *(t.double() for t in inputs))
    for name, (part, answer) in wrong_answers(*inputs).items():
        check = compare(name, answer.to(dtype), ref64[part], eager[part])
        assert check.passed == name.startswith("right"), str(check)


def test_comparator_rejects_outputs_that_were_never_written(monkeypatch):
    for kernel, unwritten in (("fwd", [0]), ("bwd", [1, 2])):
        with monkeypatch.context() as patch:
            patch.setattr(swiglu_kernel, f"_swiglu_{kernel}_kernel", mock.MagicMock())
            checks = check_against_float64(kernel, make_inputs((4, 64)))
        assert [i for i, check in enumerate(checks) if not check.passed] == unwritten


# ---- Shapes and layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (64,), (3, 64), (2, 3, 64), (2, 2, 3, 64)])
def test_zero_to_four_dimensions(shape):
    assert_all_passed(check_against_float64(f"{len(shape)}-D", make_inputs(shape)))


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 64), (3, 0)])
@pytest.mark.parametrize("function", [act, act_inplace])
def test_no_elements(shape, function):
    assert all(t.shape == shape for t in run(function, *make_inputs(shape)))


LAYOUTS = {  # name: (shape of the memory, the (..., 64) view of it)
    "transposed rows": ((5, 3, 64), lambda t: t.transpose(0, 1)),
    "transposed columns": ((3, 64, 5), lambda t: t.transpose(1, 2)),
    "permuted 4-D": ((2, 3, 4, 64), lambda t: t.permute(2, 0, 1, 3)),
    "columns from an odd offset": ((7, 131), lambda t: t[:, 3:67]),
    "contiguous from an odd offset": ((257,), lambda t: t[1:].view(4, 64)),
    "half of each row": ((2, 3, 128), lambda t: t[..., 64:]),
    "every second column": ((7, 128), lambda t: t[:, ::2]),
    "every third row": ((20, 64), lambda t: t[1::3]),
    "one row repeated (stride 0)": ((1, 64), lambda t: t.expand(6, 64)),
    "one column repeated (stride 0)": ((6, 1), lambda t: t.expand(6, 64)),
    "one number repeated (strides 0)": ((1, 1), lambda t: t.expand(6, 64)),
}


@pytest.mark.parametrize("which", [0, 1, 2], ids=["gate", "up", "dy"])
@pytest.mark.parametrize("shape, view", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides(shape, view, which):
    strided = view(make_inputs(shape)[which])
    inputs = list(make_inputs(tuple(strided.shape), seed=1))
    inputs[which] = strided
    assert_all_passed(check_against_float64("strides", inputs))


def test_halves_of_one_tensor_are_not_copied():
    gate, up = make_inputs((2, 3, 128))[0].chunk(2, -1)
    assert all(swiglu_kernel._as_rows(t).data_ptr() == t.data_ptr() for t in (gate, up))


def test_sum_backward_sends_a_gradient_of_stride_zero():
    gate, up, _ = make_inputs((3, 4, 64))
    leaves = gate.requires_grad_(), up.requires_grad_()
    act(*leaves).sum().backward()
    _, *expected = run(swiglu_reference, gate.double(), up.double(), torch.ones_like(up).double())
    assert all(relative_error(leaf.grad, grad) < FLOOR[torch.float32] for leaf, grad in zip(leaves, expected))


@pytest.mark.parametrize("far", [0, 1, 2], ids=["gate", "up", "dy"])
def test_rows_beyond_int32(far_apart, far):
    inputs = list(make_inputs((3, 64), torch.bfloat16))
    expected = run(act, *inputs)
    inputs[far] = far_apart(inputs[far])
    assert all(torch.equal(a, b) for a, b in zip(expected, run(act, *inputs)))


# ---- The contract with autograd ----------------------------------------------------------------------------


@pytest.fixture
def leaves():
    gate, up, dy = make_inputs((9, 64))
    _, dgate, dup = run(act, gate, up, dy)
    return gate.requires_grad_(), up.requires_grad_(), dy, dgate, dup


@contextlib.contextmanager
def saved_tensors():
    """Yields the list of what is saved for a backward meanwhile."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


def test_only_gate_and_up_are_saved(leaves):
    gate, up, *_ = leaves
    with saved_tensors() as saved:
        act(gate, up)
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


def test_gradients_accumulate_instead_of_overwriting(leaves):
    gate, up, dy, dgate, dup = leaves
    for _ in range(2):
        act(gate, up).backward(dy)
    assert torch.equal(gate.grad, 2 * dgate) and torch.equal(up.grad, 2 * dup)


@pytest.mark.parametrize("function", [act, act_inplace])
def test_second_backward_through_a_retained_graph(leaves, function):
    gate, up, dy, dgate, dup = leaves
    y = function(gate, up)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert torch.equal(gate.grad, 2 * dgate) and torch.equal(up.grad, 2 * dup)


def test_two_losses_on_one_tensor(leaves):
    gate, up, dy, dgate, dup = leaves
    y = act_inplace(gate, up)
    (y * dy).sum().backward(retain_graph=True)
    (y * -3.0 * dy).sum().backward()
    assert relative_error(gate.grad, -2.0 * dgate) < 1e-6 and relative_error(up.grad, -2.0 * dup) < 1e-6


def test_no_grad_gives_the_same_numbers(leaves):
    gate, up, *_ = leaves
    with torch.no_grad():
        y = TritonSwiGLU(inplace=True)(gate, up)
    assert not y.requires_grad and torch.equal(y, act(gate, up))


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_one_input_without_a_gradient(leaves, frozen, inplace):
    *inputs, dy, dgate, dup = leaves
    inputs[frozen].requires_grad_(False)
    results = [t * 1.0 for t in inputs]
    TritonSwiGLU(inplace)(*results).backward(dy)
    assert inputs[frozen].grad is None and torch.equal(inputs[1 - frozen].grad, (dgate, dup)[1 - frozen])
    assert all(torch.equal(a, b) for a, b in zip(results, inputs)), "overwritten, but somebody else's data"


def test_inputs_are_never_changed():
    inputs = make_inputs((9, 64), torch.bfloat16)
    before = [t.clone() for t in inputs]
    run(act, *inputs)
    swiglu_backward(inputs[2], *inputs[:2], need_y=True)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before))


@pytest.mark.parametrize("changed", [0, 1])
def test_input_changed_before_the_backward_is_noticed(leaves, changed):
    y = act(*leaves[:2])
    with torch.no_grad():
        leaves[changed].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(leaves[2])


def test_output_may_be_changed_in_place(leaves):
    gate, up, dy, dgate, dup = leaves
    act(gate, up).mul_(2.0).backward(dy)
    assert torch.equal(gate.grad, 2 * dgate) and torch.equal(up.grad, 2 * dup)


@pytest.mark.parametrize("dy_needs_grad", [True, False])
def test_second_derivative_is_refused_not_silently_zero(leaves, dy_needs_grad):
    gate, up, dy, *_ = leaves
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(act(gate, up), gate, dy.requires_grad_(dy_needs_grad), create_graph=True)


def test_every_run_gives_the_same_bits():
    inputs = make_inputs((9, 250), torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(run(act, *inputs), run(act, *inputs)))


# ---- In place ----------------------------------------------------------------------------------------------


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
    assert shapes == [(9, 64)] and given == {"gate": results[0].data_ptr(), "up": results[1].data_ptr()}
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


def refused_pairs():
    values = make_inputs((4, 64))[0]
    leaf, other = values.clone().requires_grad_(), values.clone()
    flat = torch.zeros(300, device=DEVICE)
    return {
        "gate is a leaf": (leaf, other, "gate has strides .* is a leaf: True"),
        "up is a leaf's view": (other, leaf.view(4, 64), "up has strides .* is a leaf: True"),
        "transposed": (values.t(), values.t().clone(), r"gate has strides \(1, 64\)"),
        "halves of rows": (*torch.zeros(4, 128, device=DEVICE).chunk(2, -1), r"gate has strides \(128, 1\)"),
        "expanded": (other[:1].expand(4, 64), other, r"gate has strides \(0, 1\)"),
        "gate is up": (other, other, "up has strides .* shares memory: True"),
        "up is gate's view": (other, other.view(4, 64), "up has strides .* shares memory: True"),
        "overlapping": (flat[:256].view(4, 64), flat[44:].view(4, 64), "up has strides .* shares memory: True"),
    }


@pytest.mark.parametrize("pair", refused_pairs())
def test_inplace_refuses_memory_that_cannot_hold_both_gradients(pair):
    gate, up, sentence = refused_pairs()[pair]
    before = gate.clone(), up.clone()
    with pytest.raises(ValueError, match=f"{sentence}.*expected a contiguous result of its own .* inplace=False"):
        swiglu_backward(torch.ones_like(gate), gate, up, inplace=True)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


def test_inplace_refusal_comes_in_the_forward(leaves):
    with pytest.raises(ValueError, match=r"gate has strides .* is a leaf: True"):
        TritonSwiGLU(inplace=True)(*leaves[:2])


def test_inplace_takes_two_parts_of_one_tensor():
    gate, up, dy = make_inputs((4, 64))
    expected = swiglu_backward(dy, gate, up)
    both = torch.stack([gate, up])
    swiglu_backward(dy, *both, inplace=True)
    assert torch.equal(both, torch.stack(expected[:2]))


# ---- The MLP -----------------------------------------------------------------------------------------------

SMALL = (9, 40, 112)


def llama_mlp(dtype=torch.float32, hidden_act="silu", bias=False):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    _, H, I = SMALL
    sizes = {"hidden_size": H, "intermediate_size": I, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, hidden_act=hidden_act, mlp_bias=bias)
    torch.manual_seed(0)
    return LlamaMLP(config).to(DEVICE, dtype)


def grads_of(module, x, dout, run_module=None):
    """out, dx and the parameters' gradients, by name."""
    x = x.detach().requires_grad_()
    out = (module if run_module is None else run_module)(x)
    names, parameters = zip(*module.named_parameters())
    grads = torch.autograd.grad(out, (x, *parameters), dout)
    return {"out": out.detach(), **dict(zip(("x", *names), grads))}


def compare_modules(theirs, ours, x, dout, run_ours=None) -> list[Check]:
    """One check for the output and each gradient of `ours`, which shares its parameters with `theirs`."""
    eager, found = grads_of(theirs, x, dout), grads_of(ours, x, dout, run_ours)
    assert found.keys() == eager.keys()
    dtype = x.dtype
    ref64 = grads_of(theirs.double(), x.double(), dout.double())
    theirs.to(dtype)
    return [compare(name, found[name], ref64[name], eager[name]) for name in found]


def is_fused(out):
    return type(out.grad_fn).__name__ == "SwiGLUMLPFunctionBackward"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_module_replaces_llama_mlp_and_shares_its_weights(dtype):
    theirs = llama_mlp(dtype).eval()
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and not ours.training
    assert all(ours.get_submodule(n) is theirs.get_submodule(n) for n in ("gate_proj", "up_proj", "down_proj"))
    x, *_, dout = make_mlp_inputs(dtype, SMALL)
    assert is_fused(ours(x))
    assert_all_passed(compare_modules(theirs, ours, x, dout))


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_mlp_of_another_activation_is_refused_with_a_sentence(hidden_act):
    with pytest.raises(ValueError, match=f"hidden_act is '{hidden_act}', expected 'silu'"):
        TritonLlamaMLP.from_llama_mlp(llama_mlp(hidden_act=hidden_act))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_mlp_of_any_batch(lead):
    _, *weights, _ = make_mlp_inputs(sizes=SMALL)
    x, dout, _ = make_inputs((*lead, SMALL[1]))
    checks = mlp_checks((x, *weights, dout))
    assert_all_passed(checks)


def test_mlp_of_unusual_strides():
    x, *weights, dout = make_mlp_inputs(sizes=SMALL)
    x, dout = (t.view(3, 3, -1).transpose(0, 1) for t in (x, dout))
    assert_all_passed(mlp_checks((x, *weights, dout.contiguous())))
    assert_all_passed(mlp_checks((x[:, :, :1].expand_as(x), *weights, dout[:1, :1, :1].expand_as(dout))))
    assert_all_passed(mlp_checks((x, *(w.t().contiguous().t() for w in weights), dout)))


def test_mlp_saves_gate_and_up_and_nothing_else_of_their_size():
    x, *weights, _ = (t.requires_grad_() for t in make_mlp_inputs(sizes=SMALL))
    with saved_tensors() as saved:
        SwiGLUMLPFunction.apply(x, *weights)
    N, _, I = SMALL
    assert [tuple(t.shape) for t in saved if t.shape == (N, I)] == 2 * [(N, I)]
    assert {t.data_ptr() for t in saved if t.shape != (N, I)} == {t.data_ptr() for t in (x, *weights)}


class Recorder(TorchDispatchMode):
    """Names of the operations that run meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WANTED = [wanted for wanted in itertools.product([False, True], repeat=4) if any(wanted)]


@pytest.mark.parametrize("wanted", WANTED, ids=lambda w: "".join("xgud"[i] for i in range(4) if w[i]))
def test_frozen_weights_get_no_gradient_and_no_matmul(wanted):
    *inputs, dout = make_mlp_inputs(sizes=SMALL)
    _, *expected = run(SwiGLUMLPFunction.apply, *inputs, dout)
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, wanted)]
    out = SwiGLUMLPFunction.apply(*leaves)
    with Recorder() as recorder, poisoned_outputs() as shapes:
        out.backward(dout)
    for leaf, need, grad in zip(leaves, wanted, expected):
        assert torch.equal(leaf.grad, grad) if need else leaf.grad is None
    # dy is one, dx one and one that adds; and nothing else adds
    assert recorder.names.count("mm") == 1 + sum(wanted) and recorder.names.count("addmm_") == wanted[0]
    assert not {"add", "add_", "addmm"} & set(recorder.names) and shapes == []


def test_mlp_second_backward_through_a_retained_graph():
    *inputs, dout = make_mlp_inputs(sizes=SMALL)
    _, *expected = run(SwiGLUMLPFunction.apply, *inputs, dout)
    leaves = [t.requires_grad_() for t in inputs]
    out = SwiGLUMLPFunction.apply(*leaves)
    for keep in (True, True, False):
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=keep)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, dout)


def test_mlp_backward_that_was_interrupted_cannot_be_repeated():
    *leaves, dout = (t.requires_grad_() for t in make_mlp_inputs(sizes=SMALL))
    out = SwiGLUMLPFunction.apply(*leaves)
    with (
        mock.patch.object(torch.Tensor, "addmm_", side_effect=MemoryError("out of memory")),
        pytest.raises(MemoryError),
    ):
        out.backward(dout.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout.detach())


def test_mlp_second_derivative_is_refused_not_silently_zero():
    *leaves, dout = (t.requires_grad_() for t in make_mlp_inputs(sizes=SMALL))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(SwiGLUMLPFunction.apply(*leaves), leaves[0], dout, create_graph=True)


def saving_on_the_cpu(mlp, x):
    with torch.autograd.graph.save_on_cpu():
        return mlp(x)


@pytest.mark.parametrize(
    "way",
    [
        lambda mlp, x: checkpoint(mlp, x, use_reentrant=False),
        lambda mlp, x: checkpoint(mlp, x, use_reentrant=True),
        saving_on_the_cpu,
    ],
    ids=["checkpoint", "reentrant checkpoint", "saved on the CPU"],
)
def test_mlp_recomputed_or_offloaded(way):
    mlp = TritonLlamaMLP.from_llama_mlp(llama_mlp())
    x, *_, dout = make_mlp_inputs(sizes=SMALL)
    expected = grads_of(mlp, x, dout)
    x.requires_grad_()
    out = way(mlp, x)
    out.backward(dout)  # the reentrant one refuses torch.autograd.grad
    found = {"out": out, "x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- The MLP, where it is not fused --------------------------------------------------------------------------


class LoRALinear(torch.nn.Module):
    """As the common libraries write it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False, device=DEVICE)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False, device=DEVICE)

    def forward(self, x):
        return self.base_layer(x) + 0.5 * self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("down_proj",), ("up_proj",)])
def test_lora_around_the_projections(names, inplace):
    theirs = llama_mlp()
    for name in names:
        setattr(theirs, name, LoRALinear(getattr(theirs, name)))
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    ours.act_fn.inplace = inplace
    x, *_, dout = make_mlp_inputs(sizes=SMALL)
    assert not is_fused(ours(x))
    assert_all_passed(compare_modules(theirs, ours, x, dout))


def test_bias_is_added():
    theirs = llama_mlp(bias=True)
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    x, *_, dout = make_mlp_inputs(sizes=SMALL)
    assert_all_passed(compare_modules(theirs, ours, x, dout))


@pytest.mark.parametrize("where", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_are_called_and_what_they_keep_is_not_overwritten(where, register):
    theirs = llama_mlp()
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    x, *_, dout = make_mlp_inputs(sizes=SMALL)
    kept = []

    def hook(module, *tensors):
        tensors = [t[0] if isinstance(t, tuple) else t for t in tensors]
        kept.extend((t, t.detach().clone()) for t in tensors)

    handle = getattr(getattr(ours, where), register)(hook)
    found = grads_of(ours, x, dout)
    handle.remove()
    assert kept and all(torch.equal(t, copy) for t, copy in kept)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found.values(), grads_of(theirs, x, dout).values()))


def test_global_hooks_are_called():
    ours = TritonLlamaMLP.from_llama_mlp(llama_mlp())
    x = make_mlp_inputs(sizes=SMALL)[0]
    called = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    ours(x)
    handle.remove()
    assert ours.gate_proj in called and ours.down_proj in called


def test_forward_that_a_library_replaced_is_called():
    ours = TritonLlamaMLP.from_llama_mlp(llama_mlp())
    x = make_mlp_inputs(sizes=SMALL)[0]
    called, forward = [], ours.up_proj.forward
    ours.up_proj.forward = lambda x: called.append(x) or forward(x)  # as offloading does it
    ours(x)
    assert called


def test_parametrized_weight_is_used():
    theirs = llama_mlp()
    torch.nn.utils.parametrizations.weight_norm(theirs.up_proj)
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    x, *_, dout = make_mlp_inputs(sizes=SMALL)
    assert_all_passed(compare_modules(theirs, ours, x, dout))


def test_autocast_casts_as_it_does_for_llama_mlp():
    theirs = llama_mlp()
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    x, *_, dout = make_mlp_inputs(sizes=SMALL)

    def autocast(module):
        return lambda x: torch.autocast(x.device.type, torch.bfloat16)(module)(x)

    found = grads_of(ours, x, dout.bfloat16(), autocast(ours))
    eager = grads_of(theirs, x, dout.bfloat16(), autocast(theirs))
    ref64 = grads_of(theirs.double(), x.double(), dout.double())
    assert found["out"].dtype == torch.bfloat16 and found["gate_proj.weight"].dtype == torch.float32
    assert_all_passed([compare(n, found[n], ref64[n], eager[n], dtype=torch.bfloat16) for n in found])


def test_layer_that_keeps_its_output_raises_in_place():
    mlp = TritonLlamaMLP.from_llama_mlp(llama_mlp())
    mlp.gate_proj = torch.nn.Sequential(mlp.gate_proj, torch.nn.Tanh())
    mlp.act_fn.inplace = True
    x, *_, dout = make_mlp_inputs(sizes=SMALL)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mlp(x).backward(dout)


# ---- Bad input ---------------------------------------------------------------------------------------------

ONES = torch.ones(4, 64, device=DEVICE)
BAD_INPUT = {  # name: (gate, up, exception, what its sentence says)
    "gate is a list": ([1.0], ONES, TypeError, "gate is a list, expected a tensor of torch.float16 or"),
    "up is a number": (ONES, 1.0, TypeError, "up is a float, expected a tensor of torch.float16 or"),
    "gate is float64": (ONES.double(), ONES, TypeError, "gate is torch.float64, expected a tensor of"),
    "up is int64": (ONES, ONES.long(), TypeError, "up is torch.int64, expected a tensor of"),
    "two dtypes": (ONES, ONES.half(), ValueError, "up has dtype torch.float16, expected gate's torch.float32"),
    "two shapes": (ONES, ONES[:1], ValueError, r"up has shape torch.Size\(\[1, 64\]\), expected gate's .*\[4, 64\]"),
    "two devices": (ONES, ONES.to("meta"), ValueError, f"up has device meta, expected gate's {DEVICE}"),
    "gate is sparse": (ONES.to_sparse(), ONES, TypeError, "gate is torch.sparse_coo, expected torch.strided"),
    "up is sparse": (ONES, ONES.to_sparse(), TypeError, "up is torch.sparse_coo, expected torch.strided"),
    "without memory": (ONES.to("meta"), ONES.to("meta"), ValueError, "gate is on meta, expected a GPU"),
}


@pytest.mark.parametrize("gate, up, error, sentence", BAD_INPUT.values(), ids=BAD_INPUT)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_input_is_refused_with_a_sentence(gate, up, error, sentence, inplace):
    with pytest.raises(error, match=sentence):
        TritonSwiGLU(inplace)(gate, up)


@pytest.mark.parametrize("dy, sentence", [(ONES[:3], "dy has shape"), (ONES.half(), "dy has dtype torch.float16")])
def test_dy_unlike_gate_is_refused_with_a_sentence(dy, sentence):
    with pytest.raises(ValueError, match=sentence):
        swiglu_backward(dy, ONES, ONES)


@pytest.mark.parametrize("which", range(3), ids=["dy", "gate", "up"])
def test_dtensor_is_refused_with_a_sentence(as_dtensor, which):
    name = ("dy", "gate", "up")[which]
    arguments = [ONES, ONES, ONES]
    arguments[which] = as_dtensor(ONES)
    sentence = rf"{name} is a DTensor, expected a plain tensor: pass its to_local\(\) or full_tensor"
    with pytest.raises(TypeError, match=sentence):
        swiglu_backward(*arguments)
    if name != "dy":
        with pytest.raises(TypeError, match=sentence):
            swiglu_forward(*arguments[1:])


def test_cpu_tensor_without_the_interpreter_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(swiglu_kernel, "INTERPRETED", False)
    with pytest.raises(ValueError, match="gate is on cpu, expected a GPU: move it, or export TRITON_INTERPRET=1"):
        act(ONES.cpu(), ONES.cpu())


# ---- torch.compile -----------------------------------------------------------------------------------------

# The width that is compiled first: the compiler leaves gaps only between rows whose length it knows.
PADDED_WIDTHS = [1289, 5000, 5001] if HAS_GPU else [1289]


def between_products(function):
    """gate, up, y and their gradients are neither inputs nor results of the graph."""

    def graph(x, w_gate, w_up, w_down):
        return function(x @ w_gate, x @ w_up) @ w_down

    return graph


def halves_of_a_product(function):
    def graph(x, w_gate_up, w_down):
        return function(*(x @ w_gate_up).chunk(2, -1)) @ w_down

    return graph


def before_a_product(function):
    """gate and up are inputs of the graph, and leaves."""

    def graph(gate, up, w_down):
        return function(gate, up) @ w_down

    return graph


def graph_inputs(make_graph, n_rows, I):
    """The inputs of a graph, and a gradient for its output."""
    x, dout = torch.randn(n_rows, 24), torch.randn(n_rows, 8)
    w_gate, w_up, w_down = torch.randn(24, I) / 5, torch.randn(24, I) / 5, torch.randn(I, 8) / I**0.5
    inputs = {
        between_products: (x, w_gate, w_up, w_down),
        halves_of_a_product: (x, torch.cat([w_gate, w_up], -1), w_down),
        before_a_product: (x @ w_gate, x @ w_up, w_down),
    }[make_graph]
    return [t.to(DEVICE, COMPILED_DTYPE) for t in (*inputs, dout)]


def graph_checks(make_graph, compiled, n_rows, I):
    inputs = graph_inputs(make_graph, n_rows, I)
    ours, eager = run(compiled, *inputs), run(make_graph(swiglu_reference), *inputs)
    ref64 = run(make_graph(swiglu_reference), *(t.double() for t in inputs))
    return [compare(f"compiled, {n_rows} x {I}, {i}", *abc) for i, abc in enumerate(zip(ours, ref64, eager))]


@pads_rows
@pytest.mark.parametrize("width", PADDED_WIDTHS)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "make_graph, inplace",
    [
        (between_products, False),
        (between_products, True),
        (halves_of_a_product, False),
        (before_a_product, False),
        (before_a_product, True),  # leaves: eager refuses to overwrite them, the compiled backward does not
    ],
)
def test_torch_compile_of_a_larger_graph(make_graph, inplace, dynamic, width):
    graph = make_graph(TritonSwiGLU(inplace))
    compiled = torch.compile(graph, fullgraph=True, dynamic=dynamic)
    assert_all_passed(graph_checks(make_graph, compiled, 5, width))
    with compiled_once() if dynamic else contextlib.nullcontext():
        for n_rows, I in ((4, 2048), (16, 48)):
            assert_all_passed(graph_checks(make_graph, compiled, n_rows, I))


@pads_rows
@pytest.mark.parametrize("width", PADDED_WIDTHS)
def test_torch_compile_of_a_forward_alone(width):
    *inputs, _ = graph_inputs(between_products, 5, width)
    with torch.no_grad():
        out = torch.compile(between_products(act), fullgraph=True)(*inputs)
        eager = between_products(swiglu_reference)(*inputs)
        ref64 = between_products(swiglu_reference)(*(t.double() for t in inputs))
    assert_all_passed([compare("no_grad", out, ref64, eager)])


@pads_rows
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_torch_compile_gives_eagers_bits(dynamic, inplace):
    module = TritonSwiGLU(inplace)
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for n_rows in (6, 5):
        inputs = make_inputs((2, n_rows, 100), torch.bfloat16)
        before = [t.clone() for t in inputs]
        assert all(map(torch.equal, run(compiled, *inputs), run(act, *inputs)))
        assert all(map(torch.equal, inputs, before))


@pads_rows
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("need_y", [False, True])
def test_torch_compile_of_the_backward_alone(need_y, inplace):
    gate, up, dy = make_inputs((5, 64))
    expected = swiglu_backward(dy, gate, up, need_y=need_y)
    sources = gate.clone(), up.clone(), dy.clone()

    @torch.compile(fullgraph=True)
    def backward(dy, gate, up):
        return swiglu_backward(dy, gate, up, inplace=inplace, need_y=need_y)

    results = backward(sources[2], *sources[:2])
    assert (results[2] is None) == (not need_y)
    n_results = 3 if need_y else 2
    assert all(map(torch.equal, results[:n_results], expected[:n_results]))
    written = n_results if inplace else 0
    assert all(map(torch.equal, sources, (*expected[:written], *(gate, up, dy)[written:])))


@pads_rows
def test_torch_compile_of_sum_sends_a_gradient_of_stride_zero():
    gate, up, _ = make_inputs((3, 4, 64))
    leaves = gate.requires_grad_(), up.requires_grad_()
    torch.compile(lambda gate, up: act(gate, up).sum(), fullgraph=True)(*leaves).backward()
    _, *expected = run(swiglu_reference, gate.double(), up.double(), torch.ones_like(up).double())
    assert all(relative_error(leaf.grad, grad) < FLOOR[torch.float32] for leaf, grad in zip(leaves, expected))


@pads_rows
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_of_the_mlp_in_one_graph(dynamic):
    theirs = llama_mlp(COMPILED_DTYPE)
    ours = TritonLlamaMLP.from_llama_mlp(theirs)
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic)
    for n_rows in (9, 6):
        x, *_, dout = make_mlp_inputs(COMPILED_DTYPE, (n_rows, *SMALL[1:]))
        assert_all_passed(compare_modules(theirs, ours, x, dout, compiled))


@pads_rows
@pytest.mark.parametrize("width", PADDED_WIDTHS)
def test_torch_compile_of_the_mlp_at_odd_widths(width):
    inputs = make_mlp_inputs(COMPILED_DTYPE, (5, 24, width))
    compiled = torch.compile(SwiGLUMLPFunction.apply, fullgraph=True)
    assert_all_passed(mlp_checks(inputs, compiled))


@pads_rows
def test_torch_compile_refuses_bad_input_with_the_same_sentence():
    with pytest.raises(Exception, match=r"up has shape torch.Size\(\[1, 64\]\), expected gate's"):
        torch.compile(act, fullgraph=True)(ONES, ONES[:1])


@pytest.mark.parametrize("need_y", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64), (0, 64), ()])
def test_operators_promise_torch_compile_what_they_return(shape, need_y):
    gate, up, dy = make_inputs(shape, torch.float16)
    gate = gate.transpose(0, -2).contiguous().transpose(0, -2) if gate.ndim == 3 else gate
    torch.library.opcheck(swiglu_kernel._forward_operator, (gate, up))
    torch.library.opcheck(swiglu_kernel._backward_operator, (dy, gate, up, need_y))


# ---- What only a GPU can show ------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("halves", [False, True])
def test_offsets_beyond_int32(halves, monkeypatch):
    monkeypatch.setattr(swiglu_kernel, "BLOCK_SIZE", SHIPPED_BLOCK_SIZE)
    n_cols, tail = 14_336, 3
    n_rows = 2**31 // n_cols + 8
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    last = make_inputs((tail, n_cols), torch.bfloat16)
    if halves:
        gate, up = torch.zeros(n_rows, 2 * n_cols, device=DEVICE, dtype=torch.bfloat16).chunk(2, -1)
    else:
        gate, up = (torch.zeros(n_rows, n_cols, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    dy = torch.zeros(n_rows, n_cols, device=DEVICE, dtype=torch.bfloat16)
    for whole, end in zip((gate, up, dy), last):
        whole[-tail:] = end
    y = swiglu_forward(gate, up)
    dgate, dup, _ = swiglu_backward(dy, gate, up, inplace=not halves)
    for ours, expected in zip((y, dgate, dup), run(act, *last)):
        assert torch.equal(ours[-tail:], expected) and not ours[:-tail].any()


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("odd", range(4), ids=["none", "gate", "up", "dy"])
def test_inplace_at_any_address(dtype, odd, monkeypatch):
    # An address that is no multiple of 16 bytes makes Triton spread that tensor's block over the threads otherwise.
    monkeypatch.setattr(swiglu_kernel, "BLOCK_SIZE", SHIPPED_BLOCK_SIZE)
    inputs = list(make_inputs((512, 14_336), dtype))
    expected = swiglu_backward(inputs[2], *inputs[:2], need_y=True)
    if odd > 0:
        memory = inputs[odd - 1].new_empty(inputs[0].numel() + 1)
        inputs[odd - 1] = memory[1:].view(inputs[0].shape).copy_(inputs[odd - 1])
    for _ in range(20):
        copies = [t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) if i + 1 == odd else t.clone()
                  for i, t in enumerate(inputs)]  # fmt: skip
        found = swiglu_backward(copies[2], *copies[:2], inplace=True, need_y=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


@needs_gpu
@pytest.mark.parametrize("function", [act_inplace, SwiGLUMLPFunction.apply], ids=["activation", "MLP"])
def test_forward_and_backward_can_be_captured_in_a_cuda_graph(function):
    def inputs(seed):
        of_mlp = function is not act_inplace
        return make_mlp_inputs(torch.bfloat16, seed=seed) if of_mlp else make_inputs((64, 1024), torch.bfloat16, seed)

    static = inputs(0)
    graph, results = captured(lambda: run(function, *static))
    for old, new in zip(static, inputs(1)):
        old.copy_(new)
    graph.replay()
    assert all(relative_error(a, b) <= FLOOR[torch.bfloat16] for a, b in zip(results, run(function, *static)))


@needs_gpu
def test_nothing_waits_for_the_gpu():
    inputs, mlp_inputs = make_inputs((64, 1024), torch.bfloat16), make_mlp_inputs(torch.bfloat16)

    def everything():
        run(act_inplace, *inputs)
        run(SwiGLUMLPFunction.apply, *mlp_inputs)

    everything()  # compiling may wait
    with waiting_forbidden():
        everything()


@needs_two_gpus
def test_tensors_on_a_gpu_that_is_not_the_current_one():
    inputs = make_inputs((64, 1024), torch.bfloat16)
    here = run(act, *inputs)
    with torch.cuda.device(0):
        there = run(act, *(t.to("cuda:1") for t in inputs))
    assert all(t.device == torch.device("cuda:1") for t in there)
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(here, there))


@needs_gpu
@pytest.mark.parametrize("halves", [False, True])
def test_new_row_counts_do_not_compile_new_kernels(halves, monkeypatch):
    def step(n_rows):
        gate, up, dy = make_inputs((n_rows, 320), torch.bfloat16)
        if halves and n_rows > 1:  # the halves of one row have no gap between their rows
            gate, up = torch.cat([gate, up], -1).chunk(2, -1)
        run(act, gate, up, dy)

    compiled = []
    runtime = swiglu_kernel.triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"]))
    for name in ("fwd", "bwd"):
        getattr(swiglu_kernel, f"_swiglu_{name}_kernel").device_caches.clear()
    step(48)
    assert len(compiled) == 2, "the hook must see the first compilation, or it proves nothing about the others"
    for n_rows in (2, 15, 16, 17, 1000, 1024) if halves else (1, 2, 15, 16, 17, 1000, 1024):
        step(n_rows)
    assert compiled[2:] == []


class Produce(torch.autograd.Function):
    """A copy of `values` that is an operation's result, as gate and up are; its backward takes no memory."""

    @staticmethod
    def forward(ctx, anchor, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(()), None


WAYS = {  # and how many tensors of gate's size it should take, beyond gate, up and dy
    "eager PyTorch": (swiglu_reference, 4),
    "ours": (act, 3),
    "ours, inplace=True": (TritonSwiGLU(inplace=True), 1),
}


def measure_extra_memory() -> tuple[int, dict[str, int]]:
    """Bytes of gate, and for each way the peak beyond gate, up and dy in forward and backward."""
    values = torch.randn(MEMORY_SHAPE, dtype=torch.bfloat16, device=DEVICE)
    dy = torch.randn_like(values)
    extra = {}
    for way, (function, _) in WAYS.items():
        anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        gate, up = Produce.apply(anchor, values), Produce.apply(anchor, values)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = function(gate, up)
        y.backward(dy)
        extra[way] = torch.cuda.max_memory_allocated() - before
        del gate, up, y
    return values.nbytes, extra


def measure_saved_memory() -> dict[str, int]:
    """Bytes that stay allocated between the forward and the backward of one MLP, its output apart."""
    x, *weights, _ = (t.requires_grad_() for t in make_mlp_inputs(torch.bfloat16))
    saved = {}
    for way, function in (("eager PyTorch", mlp_reference), ("ours", SwiGLUMLPFunction.apply)):
        function(x, *weights)  # the matmuls' workspace stays too, but is taken once
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = function(x, *weights)
        saved[way] = torch.cuda.memory_allocated() - before - out.nbytes
        del out
    return saved


def memory_is_as_promised(gate_bytes, extra, saved) -> bool:
    """In place the output and nothing else; and of an MLP gate and up alone are saved."""
    slack = 2**20
    mlp_gate_bytes = 2 * MLP_SIZES[0] * MLP_SIZES[2]
    promises = [extra[way] <= n * gate_bytes + slack for way, (_, n) in WAYS.items() if way != "eager PyTorch"]
    return all(promises) and saved["ours"] <= 2 * mlp_gate_bytes + slack


@needs_gpu
def test_memory_is_the_output_and_nothing_else():
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    (gate_bytes, extra), saved = measure_extra_memory(), measure_saved_memory()
    assert memory_is_as_promised(gate_bytes, extra, saved), (gate_bytes, extra, saved)


# ---- The table ---------------------------------------------------------------------------------------------


def print_memory() -> bool:
    print("\nMemory\n" + "-" * 60)
    if not HAS_GPU:
        print("  (on a GPU only)")
        return True
    (gate_bytes, extra), saved = measure_extra_memory(), measure_saved_memory()
    n_rows, n_cols = MEMORY_SHAPE
    shape = f"{n_rows:,} x {n_cols:,}, bf16"
    print(f"  Forward and backward, beyond gate, up and dy of {gate_bytes / 1e6:.1f} MB ({shape}):")
    for way, size in extra.items():
        print(f"    {way:<24}{size / 1e6:>9.1f} MB")
    n_rows, H, I = MLP_SIZES
    print(f"  Saved by one MLP for its backward, x apart ({n_rows:,} tokens, H = {H:,}, I = {I:,}, bf16):")
    for way, size in saved.items():
        print(f"    {way:<24}{size / 1e6:>9.1f} MB")
    passed = memory_is_as_promised(gate_bytes, extra, saved)
    print(f"  In place the output alone; of an MLP gate and up alone: {'PASSED' if passed else 'FAILED'}")
    return passed


def main() -> int:
    measure.Parser(__doc__).parse_args()
    if not HAS_GPU:
        print("No GPU found: the kernels run on the CPU, in Triton's interpreter, at smaller shapes.\n")
    print("SwiGLU Correctness Tests")
    print("=" * 60)
    passed = True
    for number, (title, dtype) in enumerate(DTYPES.items(), start=1):
        print(f"\nTest {number}: {title}")
        passed &= print_checks(dtype_checks(dtype))
    passed &= print_memory()
    print("\n" + "=" * 60)
    print(f"All SwiGLU correctness tests {'PASSED' if passed else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    measure.run_main(main)
