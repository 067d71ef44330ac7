"""What is the fused layer's alone: what it saves, which products it leaves out, what swiglu_linear
writes over.

    python -m tests.fused_layer_test    # results, gradients, and what is saved

What every function has to do is asked in tests/contracts_*_test.py, of norm_linear, swiglu_linear
and both together.
"""

from harness.cli import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

import contextlib
import itertools
from unittest import mock

import pytest
import torch

import rmsnorm_kernel
from harness.benchmark.checking import (
    DEVICE,
    DTYPE_NAME,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_tests,
    print_title,
    print_verdict,
    relative_error,
)
from next_steps.layers import fused_layer
from next_steps.layers.fused_layer import (
    NormLinearFunction,
    norm_linear,
    norm_linear_reference,
    swiglu_linear,
    swiglu_linear_reference,
)
from next_steps.lessons import swiglu_kernel
from tests.calls import Calls
from tests.fixtures import needs_gpu, poisoned_outputs
from tests.subjects import fused_layer as subjects
from tests.subjects import lora_linear as lora_subjects
from tests.subjects.fused_layer import norm_linear as fused_norm
from tests.subjects.fused_layer import norm_reference as reference_norm
from tests.subjects.fused_layer import swiglu_linear_inplace

EPS = 1e-5
SIZES = (64, 256, 896) if HAS_GPU else (6, 24, 40)  # N, H, I
TABLE_SIZES = (
    (1024, 4096, 14_336) if HAS_GPU else SIZES
)  # H and I of LLaMA 3.1 8B; in float64 that takes a while
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
NORM_NAMES = "x", "norm_weight", "w_gate", "w_up"
SWIGLU_NAMES = "gate", "up", "w_down"


def fused_swiglu(*inputs):
    return (subjects.swiglu_linear(*inputs),)


def reference_swiglu(gate, up, weight):
    return (swiglu_linear_reference(gate, up, weight),)


def fused_mlp(*inputs):
    return (subjects.layer(fused_norm, swiglu_linear_inplace)(*inputs),)


def reference_mlp(*inputs):
    return (subjects.layer(reference_norm, swiglu_linear_reference)(*inputs),)


def made(make):
    """The record's inputs and gradients of the outputs, as lists."""

    def of_sizes(dtype=torch.float32, sizes=SIZES):
        n_rows, *size = sizes
        return tuple(list(tensors.values()) for tensors in make((n_rows,), size, dtype))

    return of_sizes


make_norm_inputs = made(subjects.make_norm)
make_swiglu_inputs = made(subjects.make_swiglu)
make_mlp_inputs = made(subjects.make_layer)


def run(function, inputs, douts, needed=None, used=None):
    """(outputs, gradients) of one forward and one backward.

    needed: which inputs need a gradient, all unless told; None stands for the others' gradient.
    used: which outputs something is computed from, all unless told.
    """
    needed, used = needed or [True] * len(inputs), used or [True] * len(douts)
    leaves = [
        t.detach().requires_grad_(need) for t, need in zip(inputs, needed)
    ]  # with their strides
    outputs = function(*leaves)
    pairs = [
        (out, dout) for out, dout, use in zip(outputs, douts, used) if use and out.requires_grad
    ]
    torch.autograd.backward(*zip(*pairs))
    return [out.detach() for out in outputs], [leaf.grad for leaf in leaves]


def check_against_float64(name, ours, reference, names, inputs, douts, **options) -> list[Check]:
    """One check for each output that was used and each gradient that was asked for."""
    with poisoned_outputs():
        outputs, grads = run(ours, inputs, douts, **options)
    wide = [t.double() for t in inputs], [t.double() for t in douts]
    ref_outputs, ref_grads = run(reference, *wide, **options)
    eager_outputs, eager_grads = run(reference, inputs, douts, **options)
    checks = [
        compare(f"{name} output {i}", *three)
        for i, three in enumerate(zip(outputs, ref_outputs, eager_outputs))
    ]
    for part, grad, ref64, eager in zip(names, grads, ref_grads, eager_grads):
        assert (grad is None) == (ref64 is None), f"{name} d{part}: {grad}, expected {ref64}"
        if ref64 is not None:
            checks.append(compare(f"{name} d{part}", grad, ref64, eager))
    return checks


def norm_checks(name, inputs, douts, ours=fused_norm, **options):
    return check_against_float64(name, ours, reference_norm, NORM_NAMES, inputs, douts, **options)


def swiglu_checks(name, inputs, douts, ours=fused_swiglu, **options):
    return check_against_float64(
        name, ours, reference_swiglu, SWIGLU_NAMES, inputs, douts, **options
    )


def dtype_checks(dtype) -> list[Check]:
    name = DTYPE_NAME[dtype]
    norm = norm_checks(f"{name} norm_linear", *make_norm_inputs(dtype, TABLE_SIZES))
    return norm + swiglu_checks(f"{name} swiglu_linear", *make_swiglu_inputs(dtype, TABLE_SIZES))


@contextlib.contextmanager
def saved_tensors():
    """The list of tensors that autograd keeps meanwhile."""
    saved = []

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield saved


def saved_bytes_beyond(function, *inputs) -> tuple[int, int]:
    """Bytes kept for the backward beyond the inputs' and the outputs' own: (by the Function, by
    eager PyTorch).
    """
    counts = []
    for f in function:
        leaves = [t.detach().requires_grad_() for t in inputs]
        with saved_tensors() as saved:
            outputs = f(*leaves)
        known = {t.untyped_storage().data_ptr() for t in (*leaves, *outputs)}
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        counts.append(sum(n for address, n in kept.items() if address not in known))
    return tuple(counts)


def apply_swiglu(gate, up, weight):
    return (swiglu_linear_inplace(gate, up, weight),)


def memory_rows() -> list[str]:
    """What both Functions and eager PyTorch save, in fp32."""
    rows = []
    for name, functions, (inputs, _) in (
        ("norm_linear", (fused_norm, reference_norm), make_norm_inputs()),
        ("swiglu_linear", (apply_swiglu, reference_swiglu), make_swiglu_inputs()),
    ):
        ours, eager = saved_bytes_beyond(functions, *inputs)
        rows.append(
            f"{name}: {ours:,} bytes saved beside inputs and outputs, eager PyTorch {eager:,}"
        )
    return rows


def main() -> int:
    print_title("Fused Layer")
    passed = print_tests(DTYPES, dtype_checks)
    print("\nKept for the backward, FP32")
    print("\n".join(f"  {row}" for row in memory_rows()))
    return print_verdict("fused layer correctness", passed)


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_gradients_match_float64(dtype):
    assert_all_passed(dtype_checks(dtype))


def test_references_are_the_layers_formulas():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    norm, mlp = LlamaRMSNorm(24, EPS).to(DEVICE), LlamaMLP(config).to(DEVICE)
    (x, norm_weight, *_), _ = make_norm_inputs(sizes=(5, 24, 40))
    norm.weight.data.copy_(norm_weight)
    residual, gate, up = norm_linear_reference(
        x, norm.weight, EPS, mlp.gate_proj.weight, mlp.up_proj.weight
    )
    assert residual is x
    assert torch.equal(swiglu_linear_reference(gate, up, mlp.down_proj.weight), mlp(norm(x)))


def test_functions_take_the_layers_modules():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    inputs, _ = make_norm_inputs()
    norm = LlamaRMSNorm(SIZES[1], 1e-2).to(DEVICE)  # an eps that shows
    norm.weight.data.copy_(inputs[1])
    linears = [torch.nn.Linear(*w.shape[::-1], bias=False, device=DEVICE) for w in inputs[2:]]
    for linear, w in zip(linears, inputs[2:]):
        linear.weight.data.copy_(w)
    expected = fused_norm(*inputs, eps=1e-2)
    assert all(map(torch.equal, norm_linear(inputs[0], norm, *linears), expected))
    (gate, up, w_down), _ = make_swiglu_inputs()
    down = torch.nn.Linear(*w_down.shape[::-1], bias=False, device=DEVICE)
    down.weight.data.copy_(w_down)
    assert torch.equal(swiglu_linear(gate, up, down), swiglu_linear_inplace(gate, up, w_down))


@pytest.mark.parametrize("n_weights", [1, 3])
def test_any_number_of_products(n_weights):
    (x, norm_weight, w_gate, w_up), (dx, dgate, dup) = make_norm_inputs()
    weights, douts = (
        [w_gate, w_up, w_gate + 1][:n_weights],
        [dx, dgate, dup, 2 - dgate][: n_weights + 1],
    )
    names = "x", "norm_weight", "w_0", "w_1", "w_2"
    inputs = [x, norm_weight, *weights]
    assert_all_passed(
        check_against_float64("products", fused_norm, reference_norm, names, inputs, douts)
    )


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_eps_is_used_where_it_shows(eps):
    (x, *others), douts = make_norm_inputs()
    ours, reference = [lambda *a, f=f: f(*a, eps=eps) for f in (fused_norm, reference_norm)]
    assert_all_passed(
        check_against_float64("eps", ours, reference, NORM_NAMES, [1e-3 * x, *others], douts)
    )


# ---- The checks can fail -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparator_rejects_another_eps(dtype):
    """Of small x, where eps shows; the other wrong answers are in the functions' records."""
    (x, *others), douts = make_norm_inputs(dtype)
    inputs = [0.02 * x, *others]
    _, eager = run(reference_norm, inputs, douts)
    wide = [t.double() for t in inputs], [t.double() for t in douts]
    _, ref64 = run(reference_norm, *wide)
    _, wrong = run(lambda *a: reference_norm(*a, eps=100 * EPS), *wide)
    assert compare("right", ref64[0].to(dtype), ref64[0], eager[0]).passed
    assert not compare("another eps", wrong[0].to(dtype), ref64[0], eager[0]).passed


@pytest.mark.parametrize(
    "kernel", ["_rmsnorm_fwd_kernel", "_rmsnorm_bwd_kernel", "_swiglu_fwd_kernel"]
)
def test_comparator_rejects_outputs_that_were_never_written(monkeypatch, kernel):
    monkeypatch.setattr(
        rmsnorm_kernel if "norm" in kernel else swiglu_kernel, kernel, mock.MagicMock()
    )
    checks = norm_checks("", *make_norm_inputs()) + swiglu_checks("", *make_swiglu_inputs())
    assert not all(check.passed for check in checks)


# ---- What is saved for the backward --------------------------------------------------------------


def test_norm_linear_saves_x_rstd_and_parameters():
    inputs, _ = make_norm_inputs()
    leaves = [t.requires_grad_() for t in inputs]
    with saved_tensors() as saved:
        residual, *_ = fused_norm(*leaves)
    rstd = [t for t in saved if all(t is not leaf for leaf in leaves)]
    assert (
        len(saved) == 5
        and [t.shape for t in rstd] == [(SIZES[0],)]
        and rstd[0].dtype == torch.float32
    )
    assert residual.data_ptr() == leaves[0].data_ptr(), "the residual is a copy"
    ours, eager = saved_bytes_beyond((fused_norm, reference_norm), *inputs)
    assert ours == 4 * SIZES[0]
    assert eager >= 4 * SIZES[0] * SIZES[1], "eager keeps y; this comparison cannot fail"


def test_swiglu_linear_saves_gate_and_up_and_its_weight():
    inputs, _ = make_swiglu_inputs()
    leaves = [t.requires_grad_() for t in inputs]
    with saved_tensors() as saved:
        apply_swiglu(*leaves)
    assert len(saved) == 3 and all(t is leaf for t, leaf in zip(saved, leaves))
    ours, eager = saved_bytes_beyond((apply_swiglu, reference_swiglu), *inputs)
    assert ours == 0
    assert eager >= 4 * SIZES[0] * SIZES[2], (
        "eager keeps silu(gate) * up; this comparison cannot fail"
    )


# ---- The contract with autograd ------------------------------------------------------------------


def combinations(n):
    return [choice for choice in itertools.product([True, False], repeat=n) if any(choice)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("needed", combinations(4), ids=lambda c: "".join("10"[not n] for n in c))
def test_norm_linear_with_frozen_inputs(needed):
    """Also without a matrix product whose result nobody asked for."""
    inputs, douts = make_norm_inputs()
    with Calls() as calls:
        run(fused_norm, inputs, douts, needed)
    assert calls.products == 2 + sum(needed[2:]) + 2 * any(needed[:2])
    assert_all_passed(norm_checks("frozen", inputs, douts, needed=needed))


def test_frozen_products_need_no_second_norm():
    inputs, douts = make_norm_inputs()
    with mock.patch.object(
        fused_layer, "rmsnorm_forward", wraps=fused_layer.rmsnorm_forward
    ) as forward:
        run(fused_norm, inputs, douts, needed=[True, True, False, False])
        assert forward.call_count == 1
        run(fused_norm, inputs, douts, needed=[True, True, False, True])
        assert forward.call_count == 3


UNUSED = [
    (used, needed)
    for used in combinations(3)
    for needed in [(True, True, True, True), (True, False, False, True), (False, True, True, False)]
    if needed[0] or any(used[1:])  # otherwise nothing that needs a gradient is used
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("used, needed", UNUSED, ids=lambda c: "".join("10"[not n] for n in c))
def test_outputs_that_nobody_uses(used, needed):
    """The gradient of such an output is None, and it is not filled up with zeros; that of its
    weight is None too.
    """
    inputs, douts = make_norm_inputs()
    assert_all_passed(norm_checks("unused", inputs, douts, needed=needed, used=used))


def test_gradient_of_the_residual_is_added():
    inputs, douts = make_norm_inputs()
    _, (with_it, *_) = run(fused_norm, inputs, douts)
    _, (without, *_) = run(fused_norm, inputs, douts, used=[False, True, True])
    assert relative_error(with_it - without, douts[0]) < 1e-6
    _, (alone, *_) = run(fused_norm, inputs, douts, used=[True, False, False])
    assert alone is not None and torch.equal(alone, douts[0])


# ---- gate and up are overwritten: another use of them is never silently wrong --------------------


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_writes_over_gate_and_up_unless_the_graph_is_kept(retain_graph):
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    mine = [t.clone() for t in leaves]
    swiglu_linear_inplace(*mine, w_down).backward(dout, retain_graph=retain_graph)
    assert all(torch.equal(t, leaf if retain_graph else leaf.grad) for t, leaf in zip(mine, leaves))


@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
def test_other_use_that_saved_gate_or_up_raises(which):
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    mine = [t.requires_grad_().clone() for t in (gate, up)]
    other = mine[which].square()  # autograd keeps what it is the square of
    out = swiglu_linear_inplace(*mine, w_down)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([out, other], [dout, torch.ones_like(other)])
        other.sum().backward()


def test_second_use_of_gate_and_up_by_swiglu_linear_raises():
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    mine = [t.requires_grad_().clone() for t in (gate, up)]
    first, second = (swiglu_linear_inplace(*mine, w_down) for _ in range(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([first, second], [dout, dout])


def test_second_use_is_right_if_it_needs_no_old_values():
    (gate, up, w_down), (dout,) = make_swiglu_inputs()

    def twice(swiglu):
        def function(gate, up, w_down):
            gate, up = gate.clone(), up.clone()
            return swiglu(gate, up, w_down)[0], gate + 2 * up

        return function

    inputs, douts = [gate, up, w_down], [dout, torch.ones_like(gate)]
    ours, reference = twice(apply_swiglu), twice(reference_swiglu)
    assert_all_passed(check_against_float64("twice", ours, reference, SWIGLU_NAMES, inputs, douts))


def test_leaves_are_refused_because_their_grad_would_be_their_own_memory():
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    out = swiglu_linear_inplace(gate.requires_grad_(), up.clone(), w_down)
    assert relative_error(torch.autograd.grad(out, gate, dout, retain_graph=True)[0], gate) > 0
    out = swiglu_linear_inplace(gate, up.requires_grad_(), w_down)
    with pytest.raises(ValueError, match="expected a contiguous result of its own to overwrite"):
        out.backward(dout)


@pytest.mark.parametrize(
    "needed", [(False, False, True), (True, False, True), (False, True, False)], ids=str
)
def test_constants_are_not_overwritten(needed):
    """A gate that needs no gradient may be the caller's own."""
    inputs, douts = make_swiglu_inputs()
    before = [t.clone() for t in inputs]
    run(apply_swiglu, inputs, douts, needed)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("pair", ["one tensor", "halves of one tensor"])
def test_memory_that_cannot_hold_both_gradients_is_refused(pair):
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    both = torch.cat([gate, up], dim=-1).requires_grad_().clone()
    gate, up = (
        both.chunk(2, -1) if pair.startswith("halves") else 2 * [both[:, : gate.shape[1]].clone()]
    )
    out = swiglu_linear_inplace(gate, up, w_down)
    with pytest.raises(ValueError, match="expected a contiguous result of its own to overwrite"):
        out.backward(dout)


# ---- torch.compile -------------------------------------------------------------------------------


def test_norm_without_a_weight():
    def without(norm):
        return lambda x, *weights: norm(x, None, *weights)

    (x, _, *weights), douts = make_norm_inputs()
    names = "x", "w_gate", "w_up"
    ours, reference = without(fused_norm), without(reference_norm)
    assert_all_passed(
        check_against_float64("no weight", ours, reference, names, [x, *weights], douts)
    )


# ---- Adapters ------------------------------------------------------------------------------------


def step_with_adapters(inputs, douts, function):
    """Gradients of a gate and an up projection with adapters behind a norm, whose w are frozen."""
    frozen = "w_gate", "w_up", "w_down"
    leaves = {name: t.detach().requires_grad_(name not in frozen) for name, t in inputs.items()}
    outputs = function(*leaves.values())
    torch.autograd.backward(outputs, list(douts.values()))
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("keep", [False, True])
def test_frozen_weights_with_adapters_take_no_product_and_the_norm_runs_again(keep):
    inputs, douts = lora_subjects.make_norm((SIZES[0],), SIZES[1:], torch.float32)
    inputs["norm_weight"].requires_grad_(False)

    def ours(x, norm_weight, *tensors):
        tensors = *tensors, None, None
        scales = lora_subjects.SCALES[0], None
        return NormLinearFunction.apply(
            x, norm_weight, EPS, keep, True, scales, (None, None), *tensors
        )

    with (
        Calls() as calls,
        mock.patch.object(
            fused_layer, "rmsnorm_forward", wraps=fused_layer.rmsnorm_forward
        ) as forward,
    ):
        found = step_with_adapters(inputs, douts, ours)
    assert forward.call_count == 1 + (not keep)
    # two with w, two thin ones; backward: dh, da, db, two with w and one with a into one gradient
    assert calls.products == 4 + 6
    expected = step_with_adapters(inputs, douts, lora_subjects.norm_lora_reference)
    assert found["w_gate"] is None
    for name, right in expected.items():
        assert right is None or relative_error(found[name], right) < 5e-6


def test_gradients_lie_over_gate_and_up_with_an_adapter_too():
    inputs, (dout,) = (
        list(t.values()) for t in lora_subjects.make_swiglu((5,), (24, 40), torch.float32)
    )
    leaves = [t.requires_grad_() for t in inputs[:2]]
    mine = [t.clone() for t in leaves]
    lora_subjects.swiglu_lora_inplace(*mine, *inputs[2:]).backward(dout)
    assert all(torch.equal(t, leaf.grad) for t, leaf in zip(mine, leaves))


def test_swiglu_linear_with_an_adapter_keeps_h_beside_its_inputs():
    inputs, _ = lora_subjects.make_swiglu((5,), (24, 40), torch.float32)
    leaves = [t.requires_grad_() for t in inputs.values()]
    with saved_tensors() as saved:
        lora_subjects.swiglu_lora_inplace(*leaves)
    (h,) = (t for t in saved if all(t.data_ptr() != leaf.data_ptr() for leaf in leaves))
    assert h.shape == (5, lora_subjects.RANKS[0])


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
def test_memory_after_the_forward_is_the_results_and_rstd():
    """The table in fused_layer.py: neither y nor silu(gate) * up is kept, nor is there a copy of
    the residual.
    """
    N, H, I = 8192, 4096, 14_336
    inputs, _ = make_mlp_inputs(torch.bfloat16, (N, H, I))
    leaves = [t.requires_grad_() for t in inputs]
    kept = []
    for function in (fused_mlp, reference_mlp):
        function(*leaves)  # workspaces that are allocated once do not count
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = function(*leaves)
        kept.append(torch.cuda.memory_allocated() - before)
        del out
    out, gate_and_up, rstd = 2 * N * H, 2 * 2 * N * I, 4 * N
    assert kept[0] <= out + gate_and_up + rstd + 2**20
    assert kept[1] - kept[0] >= 2 * N * H + 2 * N * I


@needs_gpu
def test_backward_needs_no_more_than_one_gradient_of_the_inner_width():
    """dgate, dup and silu(gate) * up lie where gate, up and their product's gradient lay."""
    N, H, I = 8192, 4096, 14_336
    inputs, (dout,) = make_mlp_inputs(torch.bfloat16, (N, H, I))
    leaves = [t.requires_grad_() for t in inputs]
    fused_mlp(*leaves)[0].backward(dout)
    for leaf in leaves:
        leaf.grad = None
    (out,) = fused_mlp(*leaves)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(dout)
    torch.cuda.synchronize()
    grads = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in leaves)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= grads + 2 * N * I + 3 * 2 * N * H + 32 * 2**20


if __name__ == "__main__":
    command_line.run_main(main)
