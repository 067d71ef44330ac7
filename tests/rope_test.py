"""What is RoPE's alone, and what it has in common with the norm and RoPE in one: heads and angles
of any number and layout, results that are rounded once, the drop-in for transformers.

What every function has to do, RoPE too, is asked in tests/contracts_*_test.py.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from harness.benchmark.checking import FLOOR, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from harness.model.patching import called_function
from judging.layouts import layouts_of
from next_steps.lessons.qk_norm_rope_kernel import (
    qk_norm_rope_backward,
    qk_norm_rope_forward,
    triton_qk_norm_rope,
)
from next_steps.lessons.rope_kernel import (
    rope_backward,
    rope_forward,
    rope_reference,
    triton_apply_rotary_pos_emb,
)
from subjects import SUBJECTS, rope, subject
from subjects.qk_norm_rope import EPS
from subjects.rope import HEADS, PACKED_HEADS, of_packed_heads
from tests.fixtures import COMPILED_DTYPE, pads_rows

ROPE = SUBJECTS["rope"]
pytestmark = pytest.mark.usefixtures("poison_new_tensors")
SMALL_SHAPE = (2, 3, 4, 2, 16)
ROWS, SIZE = SMALL_SHAPE[:2], SMALL_SHAPE[2:]
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


class Turns(NamedTuple):
    """What turns heads."""

    subject: subject.Subject
    forward: Callable  # of q, k, cos, sin
    backward: Callable  # of dq_rot, dk_rot, q, k, cos, sin: dq, dk
    drop_in: Callable  # of q, k, cos, sin and perhaps unsqueeze_dim

    def run(self, inputs, douts):
        return subject.run(self.subject, self.subject.function, inputs, douts)


def weights(x):
    return 2 * (torch.linspace(-1, 2, x.shape[-1], device=DEVICE),)


TURNS = {
    "rope": Turns(
        ROPE,
        rope_forward,
        lambda dq_rot, dk_rot, q, k, *angles: rope_backward(dq_rot, dk_rot, *angles),
        triton_apply_rotary_pos_emb,
    ),
    "qk_norm_rope": Turns(
        SUBJECTS["qk_norm_rope"],
        lambda q, k, *angles: qk_norm_rope_forward(q, k, *weights(q), EPS, *angles),
        lambda dq_rot, dk_rot, q, k, *angles: qk_norm_rope_backward(
            dq_rot, dk_rot, q, k, *weights(q), EPS, *angles
        )[:2],
        lambda q, k, *angles, **dim: triton_qk_norm_rope(q, k, *weights(q), EPS, *angles, **dim),
    ),
}
both = pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)


def make_inputs(shape=SMALL_SHAPE, dtype=torch.float32, **options):
    """q, k, cos, sin, dq_rot and dk_rot: see the subject's record."""
    inputs, douts = rope.make(shape[:2], shape[2:], dtype, **options)
    return *inputs.values(), *douts.values()


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reference_is_hugging_faces_formula(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = make_inputs(dtype=dtype)[:4]
    assert all(
        torch.equal(a, b) for a, b in zip(rope_reference(*inputs), apply_rotary_pos_emb(*inputs))
    )


@pytest.mark.parametrize("which", [("cos",), ("sin",), ("cos", "sin")], ids="-".join)
@pytest.mark.parametrize("shape", [(2, 3), (3, 3), (1, 5)], ids=str)
@both
def test_angles_without_a_batch_are_every_samples(turns, shape, which):
    inputs, douts = turns.subject.make(shape, SIZE, torch.float32, shared=True)
    shared = turns.run(inputs, douts)
    tables = {name: inputs[name][0] for name in which}
    with_gaps = {name: torch.stack([t, 0 * t], dim=-1)[..., 0] for name, t in tables.items()}
    of_each = {name: t.expand(shape[0], -1, -1).contiguous() for name, t in tables.items()}
    for angles in (tables, with_gaps, of_each):
        assert subject.same_bits(turns.run(inputs | angles, douts), shared)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "of, options",
    [
        ("rope", {"dtype": torch.bfloat16, "angle_dtype": torch.float32}),
        ("rope", {"dtype": torch.float16, "angle_dtype": torch.float32}),
        ("qk_norm_rope", {"dtype": torch.float16, "angle_dtype": torch.float32}),
        ("qk_norm_rope", {"dtype": torch.bfloat16, "weight_dtype": torch.float32}),
        ("qk_norm_rope", {"dtype": torch.float32, "weight_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_q_and_k_keep_their_dtype_whatever_the_others_are(of, options):
    turns = TURNS[of]
    inputs, douts = turns.subject.make(ROWS, SIZE, **options)
    found = turns.run(inputs, douts)
    assert all(found[part].dtype == options["dtype"] for part in ("q_rot", "k_rot", "dq", "dk"))
    worst = max((t.dtype for t in inputs.values()), key=FLOOR.get)
    assert_all_passed(subject.checks(turns.subject, inputs, douts, dtype=worst))


def test_q_and_k_may_differ_in_dtype():
    inputs, douts = rope.make(ROWS, SIZE, torch.float32)
    halves, half_douts = rope.make(ROWS, SIZE, torch.float16)
    inputs, douts = inputs | {"k": halves["k"]}, douts | {"k_rot": half_douts["k_rot"]}
    assert_all_passed(subject.checks(ROPE, inputs, douts, dtype=torch.float16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both
def test_results_are_rounded_once(turns, dtype):
    # What is rounded once is float64's answer, but for ties and rounding in fp32.
    inputs, douts = turns.subject.make((2, 8), (8, 2, 64), dtype)
    ref64, (theirs,) = subject.references(turns.subject, inputs, douts)
    ours = turns.run(inputs, douts)
    for part in ("q_rot", "k_rot", "dq", "dk"):
        right, rounded_often = (
            (t[part] == ref64[part].to(dtype)).float().mean() for t in (ours, theirs)
        )
        assert right > 0.99 > rounded_often, part
        assert relative_error(ours[part], ref64[part]) < relative_error(theirs[part], ref64[part])


def test_nan_and_inf_stay_in_their_pair():
    inputs, douts = rope.make(ROWS, SIZE, torch.float32)
    clean = TURNS["rope"].run(inputs, douts)
    inputs["q"][1, 2, 0, 3] = math.nan
    douts["q_rot"][1, 2, 0, 5] = math.inf
    found = TURNS["rope"].run(inputs, douts)
    for part, column in (("q_rot", 3), ("dq", 5)):
        changed = torch.zeros_like(clean[part], dtype=torch.bool)
        changed[1, 2, 0, [column, column + 8]] = True
        assert not found[part][changed].isfinite().any()
        assert torch.equal(found[part][~changed], clean[part][~changed])
    assert all(torch.equal(found[part], clean[part]) for part in ("k_rot", "dk"))


# ---- Shapes and layouts --------------------------------------------------------------------------


DENSE = [f"dimensions {a} and {b} exchanged" for a, b in ((0, 1), (0, 2), (1, 2))]
LAYOUTS = {name: layout.place for name, layout in layouts_of(4).items()} | HEADS


def laid_out(layout):
    """Return heads (2, 4, 3, 16) laid out so, and angles for them."""
    return LAYOUTS[layout](torch.randn(2, 4, 3, 16, device=DEVICE)), make_inputs()[2:4]


@pytest.mark.parametrize("layout", ["contiguous", *DENSE])
@both
def test_results_have_the_layout_of_the_inputs(turns, layout):
    """RoPE's gradients have that of the gradients that come in, the norm's that of q and k."""
    x, angles = laid_out(layout)
    dy = x if turns.subject is ROPE else torch.randn(x.shape, device=DEVICE)
    for results in (turns.forward(x, x, *angles), turns.backward(dy, dy, x, x, *angles)):
        assert all(t.stride() == x.stride() for t in results)


def test_part_of_a_fused_projection_gives_dense_tokens():
    x, angles = laid_out("part of a fused projection")
    assert all(t.transpose(1, 2).is_contiguous() for t in rope_forward(x, x, *angles))


ADJACENT = [
    (of, name)
    for of in TURNS
    for name in LAYOUTS
    if laid_out(name)[0].stride(3) == 1
    if (of, name) != ("qk_norm_rope", "overlapping windows")
]


@pytest.mark.parametrize("of, layout", ADJACENT)
def test_adjacent_columns_are_not_copied(of, layout, monkeypatch):
    kernel, turns = mock.MagicMock(), TURNS[of]
    name = {"rope": "_rope_kernel", "qk_norm_rope": "_qk_norm_rope_fwd_kernel"}[of]
    monkeypatch.setattr(turns.subject.kernels[0], name, kernel)
    x, (cos, sin) = laid_out(layout)
    turns.forward(x, x, cos, sin)
    args = tree_leaves(kernel.__getitem__.return_value.call_args.args)
    pointers = [t.data_ptr() for t in args if isinstance(t, torch.Tensor)]
    assert [pointers.count(t.data_ptr()) for t in (x, cos, sin)] == [2, 1, 1]


# ---- The contract with autograd ------------------------------------------------------------------


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t[..., ::2]], ids=["adjacent columns", "copied columns"]
)
@both
def test_launchers_keep_out_of_autograd(turns, view):
    q, k, cos, sin, *_ = (view(t) for t in make_inputs())
    q, k = q.requires_grad_(), k.requires_grad_()
    results = *turns.forward(q, k, cos, sin), *turns.backward(q, k, q, k, cos, sin)
    assert not any(t.requires_grad for t in results)


@pytest.mark.parametrize("position", [0, 1], ids=["cos", "sin"])
@both
def test_gradient_of_the_angles_is_refused_not_silently_dropped(turns, position):
    q, k, *angles = make_inputs()[:4]
    angles[position].requires_grad_()
    with pytest.raises(ValueError, match="cos or sin requires grad, expected constants"):
        turns.drop_in(q, k, *angles)


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


@both
def test_unsqueeze_dim_is_honoured(turns):
    # as many heads as tokens: mixed up, nothing would raise
    q, k, cos, sin, *_ = make_inputs((2, 4, 4, 4, 16))
    expected = turns.drop_in(q, k, cos, sin, unsqueeze_dim=1)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    for ours, right, x in zip(turns.drop_in(q, k, cos, sin, unsqueeze_dim=2), expected, (q, k)):
        assert torch.equal(ours.transpose(1, 2), right) and ours.stride() == x.stride()


@both
def test_other_unsqueeze_dim_is_refused_with_a_sentence(turns):
    with pytest.raises(ValueError, match=r"unsqueeze_dim is 0, expected 1 for \(B, heads, T, D\)"):
        turns.drop_in(*make_inputs()[:4], unsqueeze_dim=0)


# ---- Bad input -----------------------------------------------------------------------------------


@both
def test_backward_names_what_it_was_given(turns):
    q, k, cos, sin, dq_rot, dk_rot = make_inputs()
    with pytest.raises(ValueError, match=r"dk_rot has shape \(2, 2, 2, 16\), expected"):
        turns.backward(dq_rot, dk_rot[:, :, :2], q, k, cos, sin)


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
