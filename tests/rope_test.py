"""What is RoPE's alone: heads and angles of any number, the drop-in for transformers,
launchers in place.

What every function has to do, RoPE too, is asked in tests/contracts_*_test.py.
"""

import inspect
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from harness.benchmark.checking import (
    DEVICE,
    FLOOR,
    HAS_GPU,
    Check,
    assert_all_passed,
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
from subjects import SUBJECTS, rope, subject
from subjects.rope import HEADS, PACKED_HEADS, eager, of_packed_heads
from tests.fixtures import COMPILED_DTYPE, pads_rows
from tests.layouts import layouts_of

ROPE = SUBJECTS["rope"]
pytestmark = pytest.mark.usefixtures("poison_new_tensors")
SMALL_SHAPE = (2, 3, 4, 2, 16)
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


def make_inputs(shape=SMALL_SHAPE, dtype=torch.float32, **options):
    """q, k, cos, sin, dq_rot and dk_rot: see the subject's record."""
    inputs, douts = rope.make(shape[:2], shape[2:], dtype, **options)
    return *inputs.values(), *douts.values()


def named(tensors):
    """Return the inputs and the gradients of the outputs, by their names."""
    q, k, cos, sin, dq_rot, dk_rot = tensors
    return {"q": q, "k": k, "cos": cos, "sin": sin}, {"q_rot": dq_rot, "k_rot": dk_rot}


def run(function, *tensors):
    """(q_rot, k_rot, dq, dk) of one forward and one backward; all tensors keep their strides."""
    return tuple(subject.run(ROPE, function, *named(tensors)).values())


def check_against_float64(*tensors) -> list[Check]:
    """The kernel's q_rot, k_rot, dq and dk, each against float64."""
    worst = max((t.dtype for t in tensors), key=FLOOR.get)
    return subject.checks(ROPE, *named(tensors), dtype=worst)


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reference_is_hugging_faces_formula(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = make_inputs(dtype=dtype)[:4]
    assert all(
        torch.equal(a, b) for a, b in zip(rope_reference(*inputs), apply_rotary_pos_emb(*inputs))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", [(2,), (3,), (2, 3)], ids=["cos", "sin", "both"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 2, 16), (3, 3, 2, 1, 8), (1, 5, 2, 1, 8)])
def test_angles_without_a_batch_are_every_samples(shape, which):
    inputs = list(make_inputs(shape, shared=True))
    for i in which:
        inputs[i] = inputs[i][0]
    assert_all_passed(check_against_float64(*inputs))
    table = inputs[which[0]]
    inputs[which[0]] = torch.stack([table, 0 * table], dim=-1)[..., 0]  # columns with gaps
    assert_all_passed(check_against_float64(*inputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_in_fp32_leave_q_and_k_their_dtype(dtype):
    inputs = make_inputs(dtype=dtype, angle_dtype=torch.float32)
    assert all(t.dtype == dtype for t in run(TritonRoPEFunction.apply, *inputs))
    assert_all_passed(check_against_float64(*inputs))


def test_q_and_k_may_differ_in_dtype():
    q, _, cos, sin, dq_rot, _ = make_inputs()
    _, k, _, _, _, dk_rot = make_inputs(dtype=torch.float16)
    assert_all_passed(check_against_float64(q, k, cos, sin, dq_rot, dk_rot))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sum_is_rounded_once(dtype):
    # What is rounded once is float64's answer, but for ties.
    inputs = make_inputs((2, 8, 8, 2, 64), dtype)
    ref64 = run(rope_reference, *(t.double() for t in inputs))
    runs = run(TritonRoPEFunction.apply, *inputs), ref64, run(eager, *inputs)
    for ours, ref, theirs in zip(*runs):
        right, rounded_twice = ((t == ref.to(dtype)).float().mean() for t in (ours, theirs))
        assert right > 0.99 > rounded_twice
        assert relative_error(ours, ref) < relative_error(theirs, ref)


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


DENSE = [f"dimensions {a} and {b} exchanged" for a, b in ((0, 1), (0, 2), (1, 2))]
LAYOUTS = {name: layout.place for name, layout in layouts_of(4).items()} | HEADS


def laid_out(layout):
    """Return heads (2, 4, 3, 16) laid out so, and angles for them."""
    return LAYOUTS[layout](torch.randn(2, 4, 3, 16, device=DEVICE)), make_inputs()[2:4]


@pytest.mark.parametrize("layout", ["contiguous", *DENSE])
def test_outputs_have_the_layout_of_the_inputs(layout):
    x, angles = laid_out(layout)
    for launcher in (rope_forward, rope_backward):
        assert all(t.stride() == x.stride() for t in launcher(x, x, *angles))


def test_part_of_a_fused_projection_gives_dense_tokens():
    x, angles = laid_out("part of a fused projection")
    assert all(t.transpose(1, 2).is_contiguous() for t in rope_forward(x, x, *angles))


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if laid_out(n)[0].stride(3) == 1])
def test_adjacent_columns_are_not_copied(layout, monkeypatch):
    kernel = mock.MagicMock()
    monkeypatch.setattr(rope_kernel, "_rope_kernel", kernel)
    x, (cos, sin) = laid_out(layout)
    rope_forward(x, x, cos, sin)
    args = kernel.__getitem__.return_value.call_args.args
    pointers = [arg[0].data_ptr() for arg in args if isinstance(arg, tuple)]
    assert pointers[:4] == [t.data_ptr() for t in (x, x, cos, sin)] and len(pointers) == 6


# ---- The contract with autograd ------------------------------------------------------------------


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
def test_gradient_of_the_angles_is_refused_not_silently_dropped(position):
    q, k, *angles = make_inputs()[:4]
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


# ---- Bad input -----------------------------------------------------------------------------------


def test_backward_names_what_it_was_given():
    q, k, cos, sin, *_ = make_inputs()
    with pytest.raises(ValueError, match=r"dk_rot has shape \(2, 2, 2, 16\), expected"):
        rope_backward(q, k[:, :, :2], cos, sin)


# ---- torch.compile -------------------------------------------------------------------------------


@pads_rows
def test_torch_compile_with_tokens_before_heads_and_a_table_of_angles():
    """The contracts ask the same with heads before tokens, and angles of each sample."""
    of_tokens = replace(
        ROPE.called_as(rope.of_tokens_before_heads),
        function=partial(triton_apply_rotary_pos_emb, unsqueeze_dim=2),
    )
    graph = of_packed_heads(of_tokens, lambda t: t[0], tokens_before_heads=True)
    backend = "inductor" if HAS_GPU else "aot_eager"
    compiled = torch.compile(graph.function, fullgraph=True, backend=backend)
    inputs = graph.make((2, 3), PACKED_HEADS[0], COMPILED_DTYPE)
    assert_all_passed(subject.checks(graph, *inputs, ours=compiled))
