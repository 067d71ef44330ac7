"""Do norm and matrix products in one Function, and SwiGLU and its product, give the right gradients and save less?

`python fused_layer_test.py` prints, for each dtype, every result and gradient of the two Functions, and what they save
for the backward; `pytest fused_layer_test.py` makes the same checks, and many more.  Without a GPU the kernels run on
the CPU, in Triton's interpreter, and the tests that need a GPU are skipped.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rmsnorm_kernel
from harness import command_line
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
from next_steps import fused_layer, swiglu_kernel
from next_steps.fused_layer import (
    NormLinearFunction,
    SwiGLULinearFunction,
    norm_linear,
    norm_linear_reference,
    swiglu_linear,
    swiglu_linear_reference,
)
from tests.fixtures import (
    COMPILED_DTYPE,
    captured,
    compiled_once,
    needs_gpu,
    pads_rows,
    poisoned_outputs,
    waiting_forbidden,
)

EPS = 1e-5
SIZES = (64, 256, 896) if HAS_GPU else (6, 24, 40)  # N, H, I
TABLE_SIZES = (1024, 4096, 14_336) if HAS_GPU else SIZES  # H and I of LLaMA 3.1 8B; in float64 that takes a while
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
NORM_NAMES = "x", "norm_weight", "w_gate", "w_up"
SWIGLU_NAMES = "gate", "up", "w_down"


def fused_norm(x, norm_weight, *weights, eps=EPS):
    return NormLinearFunction.apply(x, norm_weight, eps, *weights)


def reference_norm(x, norm_weight, *weights, eps=EPS):
    return tuple(norm_linear_reference(x, norm_weight, eps, *weights))


def fused_swiglu(gate, up, weight):
    """Of results, which its backward may overwrite."""
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return (SwiGLULinearFunction.apply(gate, up, weight),)


def reference_swiglu(gate, up, weight):
    return (swiglu_linear_reference(gate, up, weight),)


def make_norm_inputs(dtype=torch.float32, sizes=SIZES, lead=None, seed=0):
    """[x, norm_weight, w_gate, w_up] and the gradients of [x, gate, up]; the two products differ in width."""
    n_rows, H, I = sizes
    lead = (n_rows,) if lead is None else lead
    generator = torch.Generator().manual_seed(seed)
    x = 0.5 + 1.5 * torch.randn((*lead, H), generator=generator)
    norm_weight = 0.5 + torch.randn(H, generator=generator)
    weights = [torch.randn((O, H), generator=generator) / H**0.5 for O in (I, I // 2)]
    douts = [0.25 + torch.randn((*lead, O), generator=generator) for O in (H, I, I // 2)]
    return [t.to(DEVICE, dtype) for t in (x, norm_weight, *weights)], [t.to(DEVICE, dtype) for t in douts]


def make_swiglu_inputs(dtype=torch.float32, sizes=SIZES, lead=None, seed=0):
    """[gate, up, w_down] and the gradient of [out]."""
    n_rows, H, I = sizes
    lead = (n_rows,) if lead is None else lead
    generator = torch.Generator().manual_seed(seed)
    gate = 0.3 + 2.0 * torch.randn((*lead, I), generator=generator)
    up = 0.5 + torch.randn((*lead, I), generator=generator)
    weight = torch.randn((H, I), generator=generator) / I**0.5
    dout = 0.25 + torch.randn((*lead, H), generator=generator)
    return [t.to(DEVICE, dtype) for t in (gate, up, weight)], [dout.to(DEVICE, dtype)]


def run(function, inputs, douts, needed=None, used=None):
    """(outputs, gradients) of one forward and one backward.

    needed: which inputs need a gradient, all unless told; None stands for the others' gradient.
    used: which outputs something is computed from, all unless told.
    """
    needed, used = needed or [True] * len(inputs), used or [True] * len(douts)
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed)]  # with their strides
    outputs = function(*leaves)
    pairs = [(out, dout) for out, dout, use in zip(outputs, douts, used) if use and out.requires_grad]
    torch.autograd.backward(*zip(*pairs))
    return [out.detach() for out in outputs], [leaf.grad for leaf in leaves]


def check_against_float64(name, ours, reference, names, inputs, douts, **options) -> list[Check]:
    """One check for each output that was used and each gradient that was asked for."""
    with poisoned_outputs():
        outputs, grads = run(ours, inputs, douts, **options)
    wide = [t.double() for t in inputs], [t.double() for t in douts]
    ref_outputs, ref_grads = run(reference, *wide, **options)
    eager_outputs, eager_grads = run(reference, inputs, douts, **options)
    checks = [compare(f"{name} output {i}", *three) for i, three in enumerate(zip(outputs, ref_outputs, eager_outputs))]
    for part, grad, ref64, eager in zip(names, grads, ref_grads, eager_grads):
        assert (grad is None) == (ref64 is None), f"{name} d{part}: {grad}, expected {ref64}"
        if ref64 is not None:
            checks.append(compare(f"{name} d{part}", grad, ref64, eager))
    return checks


def norm_checks(name, inputs, douts, ours=fused_norm, **options):
    return check_against_float64(name, ours, reference_norm, NORM_NAMES, inputs, douts, **options)


def swiglu_checks(name, inputs, douts, ours=fused_swiglu, **options):
    return check_against_float64(name, ours, reference_swiglu, SWIGLU_NAMES, inputs, douts, **options)


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
    """Bytes kept for the backward beyond the inputs' and the outputs' own: (by the Function, by eager PyTorch)."""
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
    return (SwiGLULinearFunction.apply(gate, up, weight),)


def memory_rows() -> list[str]:
    """What both Functions and eager PyTorch save, in fp32."""
    rows = []
    for name, functions, (inputs, _) in (
        ("norm_linear", (fused_norm, reference_norm), make_norm_inputs()),
        ("swiglu_linear", (apply_swiglu, reference_swiglu), make_swiglu_inputs()),
    ):
        ours, eager = saved_bytes_beyond(functions, *inputs)
        rows.append(f"{name}: {ours:,} bytes saved beside inputs and outputs, eager PyTorch {eager:,}")
    return rows


def main() -> int:
    command_line.Parser(__doc__).parse_args()
    if not HAS_GPU:
        print("No GPU found: the kernels run on the CPU, in Triton's interpreter, at smaller shapes.\n")
    print("Fused Layer Correctness Tests")
    print("=" * 60)
    passed = True
    for number, (title, dtype) in enumerate(DTYPES.items(), start=1):
        print(f"\nTest {number}: {title}")
        passed &= print_checks(dtype_checks(dtype))
    print("\nKept for the backward, FP32")
    print("\n".join(f"  {row}" for row in memory_rows()))
    print("\n" + "=" * 60)
    print(f"All fused layer correctness tests {'PASSED' if passed else 'FAILED'}")
    return 0 if passed else 1


# ---- The numbers -------------------------------------------------------------------------------------------


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
    residual, gate, up = norm_linear_reference(x, norm.weight, EPS, mlp.gate_proj.weight, mlp.up_proj.weight)
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
    expected = NormLinearFunction.apply(inputs[0], inputs[1], 1e-2, *inputs[2:])
    assert all(map(torch.equal, norm_linear(inputs[0], norm, *linears), expected))
    (gate, up, w_down), _ = make_swiglu_inputs()
    down = torch.nn.Linear(*w_down.shape[::-1], bias=False, device=DEVICE)
    down.weight.data.copy_(w_down)
    assert torch.equal(swiglu_linear(gate, up, down), SwiGLULinearFunction.apply(gate, up, w_down))


@pytest.mark.parametrize("n_weights", [1, 3])
def test_any_number_of_products(n_weights):
    (x, norm_weight, w_gate, w_up), (dx, dgate, dup) = make_norm_inputs()
    weights, douts = [w_gate, w_up, w_gate + 1][:n_weights], [dx, dgate, dup, 2 - dgate][: n_weights + 1]
    names = "x", "norm_weight", "w_0", "w_1", "w_2"
    inputs = [x, norm_weight, *weights]
    assert_all_passed(check_against_float64("products", fused_norm, reference_norm, names, inputs, douts))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_eps_is_used_where_it_shows(eps):
    (x, *others), douts = make_norm_inputs()
    ours, reference = [lambda *a, f=f: f(*a, eps=eps) for f in (fused_norm, reference_norm)]
    assert_all_passed(check_against_float64("eps", ours, reference, NORM_NAMES, [1e-3 * x, *others], douts))


# ---- Shapes and layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3)], ids=str)
def test_one_to_four_dimensions(lead):
    assert_all_passed(norm_checks(f"norm_linear {lead}", *make_norm_inputs(lead=lead, sizes=(0, 24, 40))))
    assert_all_passed(swiglu_checks(f"swiglu_linear {lead}", *make_swiglu_inputs(lead=lead, sizes=(0, 24, 40))))


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_zero_rows(lead):
    """The weights' gradients are zeros then, and all shapes are kept."""
    for ours, (inputs, douts) in (
        (fused_norm, make_norm_inputs(lead=lead, sizes=(0, 24, 40))),
        (fused_swiglu, make_swiglu_inputs(lead=lead, sizes=(0, 24, 40))),
    ):
        outputs, grads = run(ours, inputs, douts)
        assert [t.shape for t in outputs] == [t.shape for t in douts]
        assert [g.shape for g in grads] == [t.shape for t in inputs]
        assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


LAYOUTS = {  # name: (shape of the memory, the (2, 3, C) view of it), from C
    "transposed rows": lambda C: ((3, 2, C), lambda t: t.transpose(0, 1)),
    "transposed columns": lambda C: ((2, C, 3), lambda t: t.transpose(1, 2)),
    "every second column": lambda C: ((2, 3, 2 * C), lambda t: t[..., ::2]),
    "columns from an odd offset": lambda C: ((2, 3, C + 5), lambda t: t[..., 3 : 3 + C]),
    "one row repeated (stride 0)": lambda C: ((1, 1, C), lambda t: t.expand(2, 3, C)),
    "one number repeated (strides 0)": lambda C: ((1, 1, 1), lambda t: t.expand(2, 3, C)),
}


def laid_out(layout, C, seed):
    shape, view = LAYOUTS[layout](C)
    generator = torch.Generator().manual_seed(seed)
    return view((0.5 + torch.randn(shape, generator=generator)).to(DEVICE))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_x_and_of_the_gradients(layout):
    (x, *weights), douts = make_norm_inputs(lead=(2, 3), sizes=(0, 24, 40))
    assert_all_passed(norm_checks("x", [laid_out(layout, 24, 1), *weights], douts))
    strided = [laid_out(layout, dout.shape[-1], i) for i, dout in enumerate(douts)]
    assert_all_passed(norm_checks("douts", [x, *weights], strided))
    inputs, _ = make_swiglu_inputs(lead=(2, 3), sizes=(0, 24, 40))
    assert_all_passed(swiglu_checks("dout", inputs, [laid_out(layout, 24, 3)]))


def test_weights_may_be_transposed():
    (x, norm_weight, *weights), douts = make_norm_inputs()
    assert_all_passed(norm_checks("w", [x, norm_weight, *(w.t().contiguous().t() for w in weights)], douts))
    (gate, up, w_down), douts = make_swiglu_inputs()
    assert_all_passed(swiglu_checks("w_down", [gate, up, w_down.t().contiguous().t()], douts))


def test_sum_backward_sends_gradients_of_stride_zero():
    (gate, up, w_down), _ = make_swiglu_inputs(lead=(2, 3), sizes=(0, 24, 40))
    leaves = [t.requires_grad_() for t in (gate, up, w_down)]
    fused_swiglu(*leaves)[0].sum().backward()
    _, expected = run(reference_swiglu, [t.double() for t in leaves], [torch.ones(2, 3, 24).to(DEVICE).double()])
    assert all(relative_error(t.grad, e) < FLOOR[torch.float32] for t, e in zip(leaves, expected))


# ---- The checks can fail -----------------------------------------------------------------------------------


def wrong_norm_gradients(inputs, douts):
    """name -> (whose gradient it poses as, a float64 answer with one mistake); "right" has none."""
    (x, w, w_gate, w_up), (dx_residual, dgate, dup) = ([t.double() for t in ts] for ts in (inputs, douts))
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    x_hat = x * rstd

    def dx(dy, eps_rstd=rstd):
        hat = x * eps_rstd
        return eps_rstd * (w * dy - hat * (w * dy * hat).mean(-1, keepdim=True))

    both = dgate @ w_gate + dup @ w_up
    small_eps = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 100 * EPS)
    return {
        "right dx": (0, dx_residual + dx(both)),
        "right dnorm_weight": (1, (both * x_hat).sum(0)),
        "right dw_gate": (2, dgate.t() @ (w * x_hat)),
        "dx zero": (0, 0 * x),
        "dx sign flipped": (0, -dx_residual - dx(both)),
        "dx without the residual's gradient": (0, dx(both)),
        "dx with the residual's gradient twice": (0, 2 * dx_residual + dx(both)),
        "dx of the first product alone": (0, dx_residual + dx(dgate @ w_gate)),
        "dx through the norm without its mean": (0, dx_residual + rstd * w * both),
        "dx with another eps": (0, dx_residual + dx(both, small_eps)),
        "dnorm_weight of the first product alone": (1, (dgate @ w_gate * x_hat).sum(0)),
        "dnorm_weight with the residual's gradient": (1, ((both + dx_residual) * x_hat).sum(0)),
        "dnorm_weight of x": (1, (both * x).sum(0)),
        "dw_gate of x": (2, dgate.t() @ x),
        "dw_gate without the norm's weight": (2, dgate.t() @ x_hat),
        "dw_gate without its last row": (2, dgate[:-1].t() @ (w * x_hat)[:-1]),
        "dw_up zero": (3, 0 * w_up),
    }


def wrong_swiglu_gradients(inputs, douts):
    (gate, up, w_down), (dout,) = ([t.double() for t in ts] for ts in (inputs, douts))
    s, dh = torch.sigmoid(gate), dout @ w_down
    return {
        "right dgate": (0, dh * up * s * (1 + gate * (1 - s))),
        "right dup": (1, dh * gate * s),
        "right dw_down": (2, dout.t() @ (gate * s * up)),
        "dgate zero": (0, 0 * gate),
        "dgate without up": (0, dh * s * (1 + gate * (1 - s))),
        "dgate of a linear gate": (0, dh * up * s),
        "dgate with up's gradient": (0, dh * gate * s),
        "dup sign flipped": (1, -dh * gate * s),
        "dw_down of gate": (2, dout.t() @ gate),
        "dw_down without up": (2, dout.t() @ (gate * s)),
        "dw_down of dgate": (2, dout.t() @ (dh * up)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparator_rejects_known_wrong_gradients(dtype):
    for reference, wrong, (inputs, douts) in (
        (reference_norm, wrong_norm_gradients, make_norm_inputs(dtype)),
        (reference_swiglu, wrong_swiglu_gradients, make_swiglu_inputs(dtype)),
    ):
        if reference is reference_norm:
            inputs[0] = 0.02 * inputs[0]  # so that eps shows
        _, eager = run(reference, inputs, douts)
        _, ref64 = run(reference, [t.double() for t in inputs], [t.double() for t in douts])
        for name, (part, answer) in wrong(inputs, douts).items():
            check = compare(name, answer.to(dtype), ref64[part], eager[part])
            assert check.passed == name.startswith("right"), str(check)


@pytest.mark.parametrize("kernel", ["_rmsnorm_fwd_kernel", "_rmsnorm_bwd_kernel", "_swiglu_fwd_kernel"])
def test_comparator_rejects_outputs_that_were_never_written(monkeypatch, kernel):
    monkeypatch.setattr(rmsnorm_kernel if "norm" in kernel else swiglu_kernel, kernel, mock.MagicMock())
    checks = norm_checks("", *make_norm_inputs()) + swiglu_checks("", *make_swiglu_inputs())
    assert not all(check.passed for check in checks)


# ---- What is saved for the backward ------------------------------------------------------------------------


def test_norm_linear_saves_x_rstd_and_parameters():
    inputs, _ = make_norm_inputs()
    leaves = [t.requires_grad_() for t in inputs]
    with saved_tensors() as saved:
        residual, *_ = fused_norm(*leaves)
    rstd = [t for t in saved if all(t is not leaf for leaf in leaves)]
    assert len(saved) == 5 and [t.shape for t in rstd] == [(SIZES[0],)] and rstd[0].dtype == torch.float32
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
    assert eager >= 4 * SIZES[0] * SIZES[2], "eager keeps silu(gate) * up; this comparison cannot fail"


def test_nothing_is_saved_without_gradients():
    (inputs, _), (others, _) = make_norm_inputs(), make_swiglu_inputs()
    with torch.no_grad(), saved_tensors() as saved:
        outputs = [*fused_norm(*inputs), *apply_swiglu(*others)]
    assert not saved and not any(t.requires_grad for t in outputs)
    expected = [*fused_norm(*inputs), *apply_swiglu(*others)]
    assert all(map(torch.equal, outputs, expected))


# ---- The contract with autograd ----------------------------------------------------------------------------


class CountMatmuls(TorchDispatchMode):
    """Counts matrix products, by hand or of autograd."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def combinations(n):
    return [choice for choice in itertools.product([True, False], repeat=n) if any(choice)]


@pytest.mark.parametrize("needed", combinations(4), ids=lambda c: "".join("10"[not n] for n in c))
def test_norm_linear_with_frozen_inputs(needed):
    """Also without a matrix product whose result nobody asked for."""
    inputs, douts = make_norm_inputs()
    with CountMatmuls() as matmuls:
        run(fused_norm, inputs, douts, needed)
    assert matmuls.count == 2 + sum(needed[2:]) + 2 * any(needed[:2])
    assert_all_passed(norm_checks("frozen", inputs, douts, needed=needed))


@pytest.mark.parametrize("needed", combinations(3), ids=lambda c: "".join("10"[not n] for n in c))
def test_swiglu_linear_with_frozen_inputs(needed):
    inputs, douts = make_swiglu_inputs()
    assert_all_passed(swiglu_checks("frozen", inputs, douts, needed=needed))


def test_frozen_products_need_no_second_norm():
    inputs, douts = make_norm_inputs()
    with mock.patch.object(fused_layer, "rmsnorm_forward", wraps=fused_layer.rmsnorm_forward) as forward:
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


@pytest.mark.parametrize("used, needed", UNUSED, ids=lambda c: "".join("10"[not n] for n in c))
def test_outputs_that_nobody_uses(used, needed):
    """The gradient of such an output is None, and it is not filled up with zeros; that of its weight is None too."""
    inputs, douts = make_norm_inputs()
    assert_all_passed(norm_checks("unused", inputs, douts, needed=needed, used=used))


def test_gradient_of_the_residual_is_added():
    inputs, douts = make_norm_inputs()
    _, (with_it, *_) = run(fused_norm, inputs, douts)
    _, (without, *_) = run(fused_norm, inputs, douts, used=[False, True, True])
    assert relative_error(with_it - without, douts[0]) < 1e-6
    _, (alone, *_) = run(fused_norm, inputs, douts, used=[True, False, False])
    assert alone is not None and torch.equal(alone, douts[0])


def test_no_gradient_that_was_handed_in_is_changed():
    for function, (inputs, douts) in ((fused_norm, make_norm_inputs()), (fused_swiglu, make_swiglu_inputs())):
        tensors = [*inputs, *douts]
        before = [t.clone() for t in tensors]
        run(function, inputs, douts)
        assert all(map(torch.equal, tensors, before))


def test_second_backward_through_a_retained_graph_gives_the_same_gradients():
    """swiglu_linear may write over gate and up only in the last backward."""
    for function, (inputs, douts) in ((fused_norm, make_norm_inputs()), (fused_swiglu, make_swiglu_inputs())):
        leaves = [t.requires_grad_() for t in inputs]
        outputs = function(*leaves)
        first, second, last = (
            torch.autograd.grad(outputs, leaves, douts, retain_graph=retain) for retain in (True, True, False)
        )
        assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, last))


def test_gradients_accumulate_instead_of_overwriting():
    for function, (inputs, douts) in ((fused_norm, make_norm_inputs()), (fused_swiglu, make_swiglu_inputs())):
        _, grads = run(function, inputs, douts)
        leaves = [t.requires_grad_() for t in inputs]
        for _ in range(2):
            torch.autograd.backward(function(*leaves), douts)
        assert all(torch.equal(leaf.grad, 2 * grad) for leaf, grad in zip(leaves, grads))


def test_two_losses_on_one_result():
    for function, (inputs, douts) in ((fused_norm, make_norm_inputs()), (fused_swiglu, make_swiglu_inputs())):
        _, grads = run(function, inputs, douts)
        leaves = [t.requires_grad_() for t in inputs]
        outputs = function(*leaves)
        sum((out * dout).sum() for out, dout in zip(outputs, douts)).backward(retain_graph=True)
        sum((out * -3.0 * dout).sum() for out, dout in zip(outputs, douts)).backward()
        assert all(relative_error(leaf.grad, -2.0 * grad) < 1e-6 for leaf, grad in zip(leaves, grads))


@pytest.mark.parametrize("douts_need_grad", [True, False])
def test_second_derivative_is_refused_not_silently_zero(douts_need_grad):
    for function, (inputs, douts) in ((fused_norm, make_norm_inputs()), (fused_swiglu, make_swiglu_inputs())):
        leaves = [t.requires_grad_() for t in inputs]
        douts = [dout.requires_grad_(douts_need_grad) for dout in douts]
        with pytest.raises(RuntimeError, match="no second derivative, which create_graph=True asks for"):
            torch.autograd.grad(function(*leaves), leaves, douts, create_graph=True)


def mlp(functions, x, norm_weight, w_gate, w_up, w_down):
    """The second half of a layer: the residual, and what the MLP adds to it."""
    norm, swiglu = functions
    residual, gate, up = norm(x, norm_weight, w_gate, w_up)
    return (residual + swiglu(gate, up, w_down)[0],)


def make_mlp_inputs(dtype=torch.float32, sizes=SIZES):
    (x, norm_weight, w_gate, _), (dout, *_) = make_norm_inputs(dtype, sizes)
    (_, _, w_down), _ = make_swiglu_inputs(dtype, sizes)
    return [x, norm_weight, w_gate, -0.5 * w_gate.flip(1), w_down], [dout]


def fused_mlp(*inputs):
    return mlp((fused_norm, apply_swiglu), *inputs)


def reference_mlp(*inputs):
    return mlp((reference_norm, reference_swiglu), *inputs)


MLP_NAMES = "x", "norm_weight", "w_gate", "w_up", "w_down"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_norm_and_mlp_together(dtype):
    """gate and up go from one Function to the other, which writes their gradients over them."""
    assert_all_passed(check_against_float64("MLP", fused_mlp, reference_mlp, MLP_NAMES, *make_mlp_inputs(dtype)))


@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint", "on the CPU meanwhile"])
def test_recomputed_or_offloaded(way):
    def in_this_way(*inputs):
        if way == "on the CPU meanwhile":
            with torch.autograd.graph.save_on_cpu():
                return fused_mlp(*inputs)
        return checkpoint(fused_mlp, *inputs, use_reentrant=way.startswith("reentrant"))

    inputs, douts = make_mlp_inputs()
    assert_all_passed(check_against_float64(way, in_this_way, reference_mlp, MLP_NAMES, inputs, douts))


def test_every_run_gives_the_same_bits():
    first, second = (run(fused_mlp, *make_mlp_inputs())[1] for _ in range(2))
    assert all(map(torch.equal, first, second))


# ---- gate and up are overwritten: another use of them is never silently wrong ------------------------------


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_writes_over_gate_and_up_unless_the_graph_is_kept(retain_graph):
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    mine = [t.clone() for t in leaves]
    SwiGLULinearFunction.apply(*mine, w_down).backward(dout, retain_graph=retain_graph)
    assert all(torch.equal(t, leaf if retain_graph else leaf.grad) for t, leaf in zip(mine, leaves))


@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
def test_other_use_that_saved_gate_or_up_raises(which):
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    mine = [t.requires_grad_().clone() for t in (gate, up)]
    other = mine[which].square()  # autograd keeps what it is the square of
    out = SwiGLULinearFunction.apply(*mine, w_down)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([out, other], [dout, torch.ones_like(other)])
        other.sum().backward()


def test_second_use_of_gate_and_up_by_swiglu_linear_raises():
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    mine = [t.requires_grad_().clone() for t in (gate, up)]
    first, second = (SwiGLULinearFunction.apply(*mine, w_down) for _ in range(2))
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
    out = SwiGLULinearFunction.apply(gate.requires_grad_(), up.clone(), w_down)
    assert relative_error(torch.autograd.grad(out, gate, dout, retain_graph=True)[0], gate) > 0
    out = SwiGLULinearFunction.apply(gate, up.requires_grad_(), w_down)
    with pytest.raises(ValueError, match="expected a contiguous result of its own to overwrite"):
        out.backward(dout)


@pytest.mark.parametrize("needed", [(False, False, True), (True, False, True), (False, True, False)], ids=str)
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
    gate, up = both.chunk(2, -1) if pair.startswith("halves") else 2 * [both[:, : gate.shape[1]].clone()]
    out = SwiGLULinearFunction.apply(gate, up, w_down)
    with pytest.raises(ValueError, match="expected a contiguous result of its own to overwrite"):
        out.backward(dout)


def test_residual_changed_in_place_is_refused():
    inputs, _ = make_norm_inputs()
    residual, *_ = fused_norm(*(t.requires_grad_() for t in inputs))
    with pytest.raises(RuntimeError, match="being modified inplace"):
        residual += 1.0


def test_x_changed_before_the_backward_is_noticed():
    (x, *weights), douts = make_norm_inputs()
    outputs = fused_norm(x, *(w.requires_grad_() for w in weights))
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs[1:], douts[1:])


# ---- Bad input ---------------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_the_kernels_with_a_sentence():
    (x, norm_weight, *weights), _ = make_norm_inputs()
    with pytest.raises(ValueError, match=r"x has shape .*, expected"):
        fused_norm(x[:, :-1], norm_weight, *weights)
    with pytest.raises(TypeError, match=r"x is torch\.float64, expected"):
        fused_norm(x.double(), norm_weight, *weights)
    (gate, up, w_down), _ = make_swiglu_inputs()
    with pytest.raises(ValueError, match=r"up has shape .*, expected gate's"):
        apply_swiglu(gate, up[:-1], w_down)


# ---- torch.compile -----------------------------------------------------------------------------------------


PADDED_WIDTHS = [1289, 5000, 5001] if HAS_GPU else [1289]  # when compiled first, rows get gaps


@pads_rows
@pytest.mark.parametrize("width", PADDED_WIDTHS)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("needed", [None, (True, False, False, True, False)], ids=["all", "x and w_up"])
def test_torch_compile_of_norm_and_mlp_in_one_graph(needed, dynamic, width):
    """The inputs are leaves; gate and up, and their gradients, are results inside of the graph."""
    compiled = torch.compile(fused_mlp, fullgraph=True, dynamic=dynamic)
    for number, sizes in enumerate([(5, 24, width), (4, width, 40), (16, 48, 64)]):
        with compiled_once() if dynamic and number > 0 else contextlib.nullcontext():
            inputs = make_mlp_inputs(COMPILED_DTYPE, sizes)
            checks = check_against_float64(
                f"compiled {sizes}", compiled, reference_mlp, MLP_NAMES, *inputs, needed=needed
            )
        assert_all_passed(checks)


@pads_rows
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_between_products(dynamic):
    """x, too, is a result inside of the graph."""

    def graph(mlp):
        return lambda x, w_in, *others: mlp(x @ w_in, *others)

    (x, *others), douts = make_mlp_inputs(COMPILED_DTYPE, (5, 1289, 40))
    inputs = [x[:, :24].contiguous(), torch.randn(24, 1289).to(x) / 5, *others]
    compiled = torch.compile(graph(fused_mlp), fullgraph=True, dynamic=dynamic)
    names = "x", "w_in", *MLP_NAMES[1:]
    assert_all_passed(check_against_float64("compiled", compiled, graph(reference_mlp), names, inputs, douts))


@pads_rows
def test_torch_compile_leaves_gate_and_up_alone():
    """They may be leaves, then; the compiler decides itself which memory is used again."""
    inputs, douts = make_swiglu_inputs()
    before = [t.clone() for t in inputs]
    compiled = torch.compile(apply_swiglu, fullgraph=True)
    assert_all_passed(swiglu_checks("compiled", inputs, douts, ours=compiled))
    assert all(map(torch.equal, inputs, before))


def test_norm_without_a_weight():
    def without(norm):
        return lambda x, *weights: norm(x, None, *weights)

    (x, _, *weights), douts = make_norm_inputs()
    names = "x", "w_gate", "w_up"
    ours, reference = without(fused_norm), without(reference_norm)
    assert_all_passed(check_against_float64("no weight", ours, reference, names, [x, *weights], douts))


# ---- What only a GPU can show ------------------------------------------------------------------------------


@needs_gpu
def test_memory_after_the_forward_is_the_results_and_rstd():
    """The table in fused_layer.py: neither y nor silu(gate) * up is kept, nor is there a copy of the residual."""
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


@needs_gpu
def test_forward_and_backward_can_be_captured_in_a_cuda_graph():
    (static, (dout,)), sizes = make_mlp_inputs(torch.bfloat16, (64, 256, 512)), (64, 256, 512)
    graph, ((out,), grads) = captured(lambda: run(fused_mlp, static, [dout]))
    for old, new in zip(static, make_mlp_inputs(torch.bfloat16, sizes)[0]):
        old.copy_(1.5 * new)
    graph.replay()
    (expected,), expected_grads = run(fused_mlp, static, [dout])
    assert torch.equal(out, expected) and all(map(torch.equal, grads, expected_grads))


@needs_gpu
def test_nothing_waits_for_the_gpu():
    inputs, douts = make_mlp_inputs(torch.bfloat16, (64, 256, 512))
    run(fused_mlp, inputs, douts)  # compiling may wait
    with waiting_forbidden():
        run(fused_mlp, inputs, douts)


if __name__ == "__main__":
    command_line.run_main(main)
