"""What is RoPE's alone: heads and angles of any number, rotations, the drop-in for transformers,
launchers in place.

    python -m tests.rope_test       # four checks for each dtype

What every function has to do, RoPE too, is asked in tests/contracts_*_test.py.
"""

from harness.cli import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

import contextlib
import inspect
import math
from unittest import mock

import pytest
import torch

from harness.benchmark.checking import (
    DEVICE,
    DTYPE_NAME,
    FLOOR,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_tests,
    print_title,
    print_verdict,
    relative_error,
)
from harness.model.patching import called_function
from next_steps.lessons import rope_kernel
from next_steps.lessons.rope_kernel import (
    TritonRoPEFunction,
    rope_backward,
    rope_forward,
    rope_reference,
    triton_apply_rotary_pos_emb,
)
from tests.fixtures import COMPILED_DTYPE, compiled_once, needs_gpu, pads_rows
from tests.subjects import rope as subject
from tests.subjects.rope import eager

# (B, T, query heads, key heads, D); LLaMA 3.1 8B has 32 and 8 heads of 128
pytestmark = pytest.mark.usefixtures("poison_new_tensors")
TABLE_SHAPE = (4, 512, 32, 8, 128) if HAS_GPU else (2, 6, 8, 2, 128)
SMALL_SHAPE = (2, 3, 4, 2, 16)
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
NAMES = "q_rot", "k_rot", "dq", "dk"


def make_inputs(shape=SMALL_SHAPE, dtype=torch.float32, **options):
    """q, k, cos, sin, dq_rot and dk_rot: see the subject's record."""
    inputs, douts = subject.make(shape[:2], shape[2:], dtype, **options)
    return *inputs.values(), *douts.values()


def rotation(shape):
    """cos and sin of LLaMA's angles, halves equal, in fp32."""
    return subject.rotation(*shape[:2], shape[-1])


def run(function, q, k, cos, sin, dq_rot, dk_rot):
    """(q_rot, k_rot, dq, dk) of one forward and one backward; all tensors keep their strides."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = function(q, k, cos, sin)
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, (q, k), (dq_rot, dk_rot))


def in_float64(inputs):
    return run(rope_reference, *(t.double() for t in inputs))


def check_against_float64(name, *inputs, function=TritonRoPEFunction.apply) -> list[Check]:
    """The kernel's q_rot, k_rot, dq and dk, each against float64."""
    floor_of = max((t.dtype for t in inputs), key=FLOOR.get)
    results = zip(NAMES, run(function, *inputs), in_float64(inputs), run(eager, *inputs))
    return [compare(f"{name} {part}", *abc, dtype=floor_of) for part, *abc in results]


def dtype_checks(dtype) -> list[Check]:
    return check_against_float64(DTYPE_NAME[dtype], *make_inputs(TABLE_SHAPE, dtype))


def main() -> int:
    print_title("RoPE")
    passed = print_tests(DTYPES, dtype_checks)
    return print_verdict("RoPE correctness", passed)


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_forward_and_backward_match_float64(dtype):
    assert_all_passed(dtype_checks(dtype))


def test_small_shape_matches_float64():
    assert_all_passed(check_against_float64("small", *make_inputs()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reference_is_hugging_faces_formula(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = make_inputs(dtype=dtype)[:4]
    assert all(
        torch.equal(a, b) for a, b in zip(rope_reference(*inputs), apply_rotary_pos_emb(*inputs))
    )


@pytest.mark.parametrize(
    "n_q_heads, n_k_heads",
    [(1, 1), (4, 1), (3, 1), (5, 3), (9, 3), (2, 7), (12, 12), (3, 0), (0, 3)],
)
def test_any_numbers_of_heads(n_q_heads, n_k_heads):
    assert_all_passed(
        check_against_float64("heads", *make_inputs((1, 2, n_q_heads, n_k_heads, 12)))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("B, T", [(1, 1), (1, 5), (5, 1), (3, 7)])
@pytest.mark.parametrize(
    "shared", [False, True], ids=["positions of each sample", "shared positions"]
)
def test_every_token_has_its_own_angles(B, T, shared):
    assert_all_passed(check_against_float64("tokens", *make_inputs((B, T, 2, 1, 8), shared=shared)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", [(2,), (3,), (2, 3)], ids=["cos", "sin", "both"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 2, 16), (3, 3, 2, 1, 8), (1, 5, 2, 1, 8)])
def test_angles_without_a_batch_are_every_samples(shape, which):
    inputs = list(make_inputs(shape, shared=True))
    for i in which:
        inputs[i] = inputs[i][0]
    assert_all_passed(check_against_float64("(T, D)", *inputs))
    inputs[which[0]] = torch.stack([inputs[which[0]], 0 * inputs[which[0]]], dim=-1)[
        ..., 0
    ]  # columns with gaps
    assert_all_passed(check_against_float64("(T, D) with gaps", *inputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_in_fp32_leave_q_and_k_their_dtype(dtype):
    inputs = make_inputs(dtype=dtype, angle_dtype=torch.float32)
    assert all(t.dtype == dtype for t in run(TritonRoPEFunction.apply, *inputs))
    assert_all_passed(check_against_float64("fp32 angles", *inputs))


def test_q_and_k_may_differ_in_dtype():
    q, _, cos, sin, dq_rot, _ = make_inputs()
    _, k, _, _, _, dk_rot = make_inputs(dtype=torch.float16)
    assert_all_passed(check_against_float64("mixed", q, k, cos, sin, dq_rot, dk_rot))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sum_is_rounded_once(dtype):
    # What is rounded once is float64's answer, but for ties.
    inputs = make_inputs((2, 8, 8, 2, 64), dtype)
    ref64 = in_float64(inputs)
    for ours, ref, theirs in zip(
        run(TritonRoPEFunction.apply, *inputs), ref64, run(eager, *inputs)
    ):
        assert (
            (ours == ref.to(dtype)).float().mean() > 0.99 > (theirs == ref.to(dtype)).float().mean()
        )
        assert relative_error(ours, ref) < relative_error(theirs, ref)


@pytest.mark.exhaustive
def test_rotation_keeps_lengths_and_the_backward_turns_it_back():
    q, k, *_ = make_inputs((2, 9, 4, 2, 32))
    cos, sin = rotation((2, 9, 4, 2, 32))
    rotated = rope_forward(q, k, cos, sin)
    assert torch.equal(rotated[0][:, :, 0], q[:, :, 0]) and not torch.equal(
        rotated[0][:, :, 1], q[:, :, 1]
    )
    assert all(
        relative_error(a.norm(dim=-1), b.norm(dim=-1)) < 1e-6 for a, b in zip(rotated, (q, k))
    )
    assert all(
        relative_error(a, b) < 1e-6 for a, b in zip(rope_backward(*rotated, cos, sin), (q, k))
    )


def test_score_of_two_tokens_depends_on_their_distance_alone():
    q, k, *_ = make_inputs((1, 1, 2, 2, 32))
    shape = (1, 12, 2, 2, 32)
    q_rot, k_rot = rope_forward(
        q.expand(-1, -1, 12, -1), k.expand(-1, -1, 12, -1), *rotation(shape)
    )
    scores = q_rot @ k_rot.transpose(2, 3)
    assert relative_error(scores[..., 1:, 1:], scores[..., :-1, :-1].double()) < 1e-5


def test_nan_and_inf_stay_in_their_pair():
    inputs = make_inputs()
    clean = run(TritonRoPEFunction.apply, *inputs)
    inputs[0][1, 2, 0, 3] = math.nan
    inputs[4][1, 2, 0, 5] = math.inf
    q_rot, k_rot, dq, dk = run(TritonRoPEFunction.apply, *inputs)
    for now, then, column in ((q_rot, clean[0], 3), (dq, clean[2], 5)):
        changed = torch.zeros_like(now, dtype=torch.bool)
        changed[1, 2, 0, [column, column + 8]] = True
        assert not now[changed].isfinite().any() and torch.equal(now[~changed], then[~changed])
    assert torch.equal(k_rot, clean[1]) and torch.equal(dk, clean[3])


# ---- Shapes and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 16), (2, 0, 4, 2, 16), (2, 3, 0, 0, 16)])
def test_zero_tokens_or_heads(shape):
    inputs = make_inputs(shape, torch.bfloat16)
    results = run(TritonRoPEFunction.apply, *inputs)
    assert all(
        t.shape == x.shape and t.dtype == x.dtype
        for t, x in zip(results, [*inputs[:2], *inputs[4:]])
    )


LAYOUTS = {  # name: (shape of the memory, its (2, 4, 3, 16) view)
    "contiguous": ((2, 4, 3, 16), lambda t: t),
    "tokens before heads": ((2, 3, 4, 16), lambda t: t.transpose(1, 2)),
    "tokens before samples": ((3, 2, 4, 16), lambda t: t.permute(1, 2, 0, 3)),
    "part of a fused projection": ((2, 3, 9, 16), lambda t: t[:, :, 2:6].transpose(1, 2)),
    "part of a wider head": ((2, 3, 4, 40), lambda t: t[..., 7:23].transpose(1, 2)),
    "every second token and head": ((2, 6, 8, 16), lambda t: t[:, ::2, 1::2].transpose(1, 2)),
    "every second column": ((2, 3, 4, 32), lambda t: t[..., ::2].transpose(1, 2)),
    "columns before heads": ((2, 16, 4, 3), lambda t: t.permute(0, 2, 3, 1)),
    "one sample repeated (stride 0)": (
        (1, 3, 4, 16),
        lambda t: t.transpose(1, 2).expand(2, -1, -1, -1),
    ),
    "one head repeated (stride 0)": (
        (2, 3, 1, 16),
        lambda t: t.transpose(1, 2).expand(-1, 4, -1, -1),
    ),
    "one token repeated (stride 0)": (
        (2, 1, 4, 16),
        lambda t: t.transpose(1, 2).expand(-1, -1, 3, -1),
    ),
    "one number repeated (strides 0)": ((1, 1, 1, 1), lambda t: t.expand(2, 4, 3, 16)),
    "overlapping windows": ((2, 4, 18), lambda t: t.unfold(2, 16, 1)),
}
LAYOUT_SHAPE = (2, 3, 4, 4, 16)
COPIED = "every second column", "columns before heads", "one number repeated (strides 0)"


@pytest.mark.parametrize("layout", ["contiguous", "tokens before heads", "tokens before samples"])
def test_outputs_have_the_layout_of_the_inputs(layout):
    shape, view = LAYOUTS[layout]
    x, (*_, cos, sin, _, _) = view(torch.randn(shape, device=DEVICE)), make_inputs(LAYOUT_SHAPE)
    for launcher in (rope_forward, rope_backward):
        assert all(t.stride() == x.stride() for t in launcher(x, x, cos, sin))


def test_part_of_a_fused_projection_gives_dense_tokens():
    shape, view = LAYOUTS["part of a fused projection"]
    x, (*_, cos, sin, _, _) = view(torch.randn(shape, device=DEVICE)), make_inputs(LAYOUT_SHAPE)
    assert all(t.transpose(1, 2).is_contiguous() for t in rope_forward(x, x, cos, sin))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in COPIED])
def test_adjacent_columns_are_not_copied(layout, monkeypatch):
    kernel = mock.MagicMock()
    monkeypatch.setattr(rope_kernel, "_rope_kernel", kernel)
    shape, view = LAYOUTS[layout]
    x, (*_, cos, sin, _, _) = view(torch.randn(shape, device=DEVICE)), make_inputs(LAYOUT_SHAPE)
    rope_forward(x, x, cos, sin)
    args = kernel.__getitem__.return_value.call_args.args
    pointers = [arg[0].data_ptr() for arg in args if isinstance(arg, tuple)]
    assert pointers[:4] == [t.data_ptr() for t in (x, x, cos, sin)] and len(pointers) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["samples", "heads", "tokens"])
@pytest.mark.parametrize("far", [0, 1], ids=["q", "k"])
def test_heads_beyond_int32(far_apart, far, dim):
    *inputs, cos, sin, _, _ = make_inputs((3, 3, 3, 3, 4), torch.bfloat16)
    expected = rope_forward(*inputs, cos, sin)
    inputs[far] = far_apart(inputs[far], dim)
    assert all(torch.equal(a, b) for a, b in zip(expected, rope_forward(*inputs, cos, sin)))


# ---- The contract with autograd ------------------------------------------------------------------


@pytest.fixture
def leaves():
    """q and k as leaves, cos and sin, upstream gradients, the right dq and dk."""
    q, k, *others = make_inputs()
    _, _, dq, dk = run(TritonRoPEFunction.apply, q, k, *others)
    return q.requires_grad_(), k.requires_grad_(), others[:2], others[2:], (dq, dk)


@pytest.mark.parametrize("launcher", [rope_forward, rope_backward])
@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t[..., ::2]], ids=["adjacent columns", "copied columns"]
)
def test_launchers_keep_out_of_autograd(launcher, view):
    q, k, cos, sin, *_ = (view(t) for t in make_inputs())
    assert not any(
        t.requires_grad for t in launcher(q.requires_grad_(), k.requires_grad_(), cos, sin)
    )


@pytest.mark.parametrize("position", [0, 1], ids=["cos", "sin"])
def test_gradient_of_the_angles_is_refused_not_silently_dropped(leaves, position):
    q, k, angles, *_ = leaves
    angles[position].requires_grad_()
    with pytest.raises(ValueError, match="cos or sin requires grad, expected constants"):
        TritonRoPEFunction.apply(q, k, *angles)


# ---- The drop-in ---------------------------------------------------------------------------------


def test_signature_is_transformers_own():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    theirs, ours = (
        inspect.signature(f).parameters
        for f in (called_function(apply_rotary_pos_emb), triton_apply_rotary_pos_emb)
    )
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_unsqueeze_dim_is_honoured(unsqueeze_dim):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = make_inputs((2, 4, 4, 4, 16))  # as many heads as tokens: mixed up, nothing would raise
    q, k, cos, sin, *upstream = (
        inputs if unsqueeze_dim == 1 else (t.transpose(1, 2) if t.ndim == 4 else t for t in inputs)
    )
    ours, theirs = (
        run(lambda *args, f=f: f(*args, unsqueeze_dim=unsqueeze_dim), q, k, cos, sin, *upstream)
        for f in (triton_apply_rotary_pos_emb, apply_rotary_pos_emb)
    )
    assert all(relative_error(a, b) < FLOOR[torch.float32] for a, b in zip(ours, theirs))
    assert ours[0].stride() == q.stride() and ours[1].stride() == k.stride()


def test_other_unsqueeze_dim_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"unsqueeze_dim is 0, expected 1 for \(B, heads, T, D\)"):
        triton_apply_rotary_pos_emb(*make_inputs()[:4], unsqueeze_dim=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", ["shared", "of each sample"])
def test_llama_gives_the_same_logits_and_gradients(attention, positions, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=12,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(DEVICE)
    tokens = torch.randint(40, (2, 7), device=DEVICE)
    position_ids = torch.arange(7, device=DEVICE) + torch.tensor([[0], [9]], device=DEVICE)
    position_ids = position_ids if positions == "of each sample" else None

    def logits_and_gradients():
        model.zero_grad()
        logits = model(tokens, position_ids=position_ids, use_cache=False).logits
        (logits * torch.linspace(-1, 1, 40, device=DEVICE)).square().mean().backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]

    theirs = logits_and_gradients()
    calls = mock.Mock(side_effect=triton_apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", calls)
    ours = logits_and_gradients()
    assert calls.call_count == 2, "the model has two layers"
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(ours, theirs))


# ---- Bad input -----------------------------------------------------------------------------------

X, A = torch.ones(2, 4, 3, 16, device=DEVICE), torch.ones(2, 3, 16, device=DEVICE)


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "cos", "sin"])
def test_dtensor_is_refused_with_a_sentence(as_dtensor, which):
    arguments = [X, X, A, A]
    arguments[which] = as_dtensor(arguments[which])
    for launcher, names in ((rope_forward, ["q", "k"]), (rope_backward, ["dq_rot", "dk_rot"])):
        name = [*names, "cos", "sin"][which]
        sentence = (
            rf"{name} is a DTensor, expected a plain tensor: pass its to_local\(\) or full_tensor"
        )
        with pytest.raises(TypeError, match=sentence):
            launcher(*arguments)


def test_partial_rotation_as_the_refusal_advises():
    """The first 12 of 16 columns, as GPT-NeoX and Phi turn them."""
    q, k, cos, sin, *_ = make_inputs()
    cos, sin = cos[..., :12], sin[..., :12]
    turned = rope_forward(q[..., :12], k[..., :12], cos, sin)
    expected = rope_reference(
        q[..., :12].double(), k[..., :12].double(), cos.double(), sin.double()
    )
    assert all(relative_error(a, b) < FLOOR[torch.float32] for a, b in zip(turned, expected))


def test_backward_names_what_it_was_given():
    with pytest.raises(ValueError, match=r"dk_rot has shape \(2, 4, 2, 16\), expected"):
        rope_backward(X, X[:, :, :2], A, A)


# ---- torch.compile -------------------------------------------------------------------------------

# Query heads, key heads, D; qkv has 1,040, 1,344 and 1,056 columns.  The compiler leaves gaps
# between
# rows of more than 1,024 elements whose length it knows, unless they begin at multiples of 128
# bytes.
PACKED_HEADS = [(9, 2, 80)] + ([(17, 2, 64), (2, 2, 176)] if HAS_GPU else [])


def packed(function, unsqueeze_dim, n_q_heads, n_k_heads, D):
    """Attention's projections: q, k and v are views of one product, and each is multiplied
    again.
    """

    def graph(x, w_qkv, w_out, cos, sin):
        qkv = (x @ w_qkv).view(*x.shape[:2], -1, D)
        q, k, v = qkv.split([n_q_heads, n_k_heads, n_k_heads], dim=2)
        if unsqueeze_dim == 1:
            q, k = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        else:
            q, k = function(q, k, cos, sin, unsqueeze_dim)
        return tuple(t @ w_out for t in (q, k, v))

    return graph


def reference_of_any_layout(q, k, cos, sin, unsqueeze_dim=1):
    if unsqueeze_dim == 1:
        return eager(q, k, cos, sin)
    return tuple(t.transpose(1, 2) for t in eager(q.transpose(1, 2), k.transpose(1, 2), cos, sin))


ANGLES = {"of each sample": lambda t: t, "shared": lambda t: t[:1], "a table": lambda t: t[0]}


def graph_inputs(B, T, n_q_heads, n_k_heads, D, angles="shared"):
    """x, w_qkv, w_out, cos and sin."""
    cos, sin = (ANGLES[angles](t) for t in rotation((B, T, n_q_heads, n_k_heads, D)))
    width = (n_q_heads + 2 * n_k_heads) * D
    tensors = torch.randn(B, T, 24), torch.randn(24, width) / 5, torch.randn(D, 6), cos, sin
    return [t.to(DEVICE, COMPILED_DTYPE) for t in tensors]


def run_graph(graph, *inputs):
    """Outputs, and the gradients of x, w_qkv and w_out."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    outputs = graph(*leaves, *inputs[3:])
    generator = torch.Generator().manual_seed(1)
    douts = [(0.25 + torch.randn(t.shape, generator=generator)).to(t) for t in outputs]
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, douts)


def graph_checks(name, compiled, reference, inputs, run=run_graph):
    ours, theirs = run(compiled, *inputs), run(reference, *inputs)
    ref64 = run(reference, *(t.double() for t in inputs))
    return [compare(f"{name} {i}", *abc) for i, abc in enumerate(zip(ours, ref64, theirs))]


def both_graphs(unsqueeze_dim, heads):
    functions = triton_apply_rotary_pos_emb, reference_of_any_layout
    return (packed(function, unsqueeze_dim, *heads) for function in functions)


@pads_rows
@pytest.mark.parametrize("heads", PACKED_HEADS, ids=str)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_torch_compile_of_a_projection_with_packed_heads(unsqueeze_dim, dynamic, heads):
    graph, reference = both_graphs(unsqueeze_dim, heads)
    compiled = torch.compile(graph, fullgraph=True, dynamic=dynamic)
    assert_all_passed(graph_checks("first", compiled, reference, graph_inputs(2, 3, *heads)))
    with compiled_once() if dynamic else contextlib.nullcontext():
        for B, T in ((2, 5), (3, 7)):
            inputs = graph_inputs(B, T, *heads)
            assert_all_passed(graph_checks(f"{B}, {T}", compiled, reference, inputs))


@pads_rows
@pytest.mark.parametrize("angles", ["of each sample", "a table"])
def test_torch_compile_of_a_projection_with_angles(angles):
    graph, reference = both_graphs(1, PACKED_HEADS[0])
    compiled = torch.compile(graph, fullgraph=True)
    inputs = graph_inputs(2, 3, *PACKED_HEADS[0], angles=angles)
    assert_all_passed(graph_checks(angles, compiled, reference, inputs))


@pads_rows
@pytest.mark.parametrize("shape, view", LAYOUTS.values(), ids=LAYOUTS)
def test_torch_compile_of_any_strides(shape, view):
    x, (_, k, cos, sin, _, _) = view(torch.randn(shape, device=DEVICE)), make_inputs(LAYOUT_SHAPE)
    compiled = torch.compile(lambda *args: rope_forward(*args), fullgraph=True)
    ours, expected = compiled(x, k, cos, sin), rope_forward(x, k, cos, sin)
    assert all(map(torch.equal, ours, expected)) and ours[0].stride() == expected[0].stride()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("shape, view", LAYOUTS.values(), ids=LAYOUTS)
def test_operator_promises_torch_compile_what_it_returns(shape, view, backward):
    x, (_, k, cos, sin, _, _) = view(torch.randn(shape, device=DEVICE)), make_inputs(LAYOUT_SHAPE)
    torch.library.opcheck(rope_kernel._launch.operator, (x, k, cos[0], sin[:1], backward))


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "shape", [(4, 2048, 32, 8, 128), (1, 512, 32, 8, 128), (2, 100, 9, 3, 64), (1, 300, 32, 32, 80)]
)
def test_shapes_of_real_models(shape, dtype):
    assert_all_passed(check_against_float64("real", *make_inputs(shape, dtype, shared=True)))


@needs_gpu
def test_bf16_is_closer_to_float64_than_eager():
    inputs = make_inputs((2, 96, 32, 8, 128), torch.bfloat16)
    for ours, ref, theirs in zip(
        run(TritonRoPEFunction.apply, *inputs), in_float64(inputs), run(eager, *inputs)
    ):
        assert relative_error(ours, ref) < 0.8 * relative_error(theirs, ref)


@needs_gpu
def test_offsets_beyond_int32(gpu_memory):
    n_heads, D, tail = 8, 128, 3
    T = 2**31 // (n_heads * D) + 8  # the last tokens start beyond 2**31 elements
    gpu_memory(30)
    q, k, cos, sin, *_ = make_inputs((1, tail, n_heads, 1, D), torch.bfloat16)
    expected = rope_forward(q, k, cos, sin)
    for shape in ((1, T, n_heads, D), (1, n_heads, T, D)):
        far = torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16)
        far = far.transpose(1, 2) if shape[1] == T else far
        far[:, :, -tail:] = q
        table = torch.zeros(2, 1, T, D, device=DEVICE, dtype=torch.bfloat16)
        table[0, :, -tail:], table[1, :, -tail:] = cos, sin
        far_rot, _ = rope_forward(far, far[:, :1], *table)
        assert torch.equal(far_rot[:, :, -tail:], expected[0]) and not far_rot[:, :, :-tail].any()
        del far, far_rot


@needs_gpu
def test_new_batches_do_not_compile_new_kernels(monkeypatch):
    compiled = []
    runtime = rope_kernel.triton.knobs.runtime
    monkeypatch.setattr(
        runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"])
    )
    rope_kernel._rope_kernel.device_caches.clear()
    run(TritonRoPEFunction.apply, *make_inputs((2, 48, 12, 4, 64), torch.bfloat16))
    assert len(compiled) == 2, (
        "the hook must see the first compilations, or it proves nothing about the others"
    )
    for B, T in ((1, 48), (3, 1), (1, 1), (2, 15), (2, 16), (2, 17), (1, 1000), (4, 1024)):
        for shared in (False, True):
            run(
                TritonRoPEFunction.apply,
                *make_inputs((B, T, 12, 4, 64), torch.bfloat16, shared=shared),
            )
    assert compiled[2:] == []


if __name__ == "__main__":
    command_line.run_main(main)
