"""RoPE of queries and keys at once, by angles that belong to tokens."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons import rope_kernel
from next_steps.lessons.rope_kernel import TritonRoPEFunction, rope_reference
from subjects.subject import BadInput, Subject, as_tuple, normals, refused_tensors

SIZE = 4, 2, 16  # query heads, key heads, D
# qkv has 1,040, 1,344 and 1,056 columns.  The compiler leaves gaps between rows of more than 1,024
# elements whose
# length it knows, unless they begin at multiples of 128 bytes.
PACKED_HEADS = [(9, 2, 80)] + ([(17, 2, 64), (2, 2, 176)] if HAS_GPU else [])


def batch_and_tokens(rows):
    """(B, T) of any number of dimensions."""
    return (1, 1, *rows)[-2:] if len(rows) < 3 else (rows[0] * rows[1], rows[2])


def make(rows, size, dtype, seed=0, angle_dtype=None, shared=False):
    """q, k, cos, sin and the gradients of both outputs, laid out as in Hugging Face: transposed (B,
    T, heads, D).

    The angles are no angles but any numbers, with halves that differ: a kernel that mixes up two of
    them is found out.
    """
    B, T = batch_and_tokens(rows)
    n_q_heads, n_k_heads, D = size
    normal = normals(seed, dtype, B * T * n_q_heads * D)

    def heads(n_heads, mean):
        return normal(B, T, n_heads, D, mean=mean).transpose(1, 2)

    q, k = heads(n_q_heads, 0.5), heads(n_k_heads, -0.5)
    of_angles = 1 if shared else B, T, D
    cos, sin = (normal(*of_angles, dtype=angle_dtype or dtype) for _ in range(2))
    douts = {"q_rot": heads(n_q_heads, 0.25), "k_rot": heads(n_k_heads, 0.25)}
    return {"q": q, "k": k, "cos": cos, "sin": sin}, douts


def eager(q, k, cos, sin):
    """The reference, in the dtypes of q and k where cos made it fp32."""
    q_rot, k_rot = rope_reference(q, k, cos, sin)
    return q_rot.to(q.dtype), k_rot.to(k.dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def wrong_answers(inputs, douts, right):
    q, k, cos, sin = inputs.values()
    dq_rot, dk_rot = douts.values()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def interleaved(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    def first_half_twice(t):
        return t.chunk(2, -1)[0].repeat(1, 1, 1, 2)

    k_rot = right["k_rot"]
    wrong = {
        "q_rot not rotated": {"q_rot": q},
        "q_rot without sin": {"q_rot": q * cos},
        "q_rot the other way": {"q_rot": q * cos - rotate_half(q) * sin},
        "q_rot in pairs of neighbours": {"q_rot": q * cos + interleaved(q) * sin},
        "q_rot with the first half of cos": {
            "q_rot": q * first_half_twice(cos) + rotate_half(q) * sin
        },
        "q_rot with the first half of sin": {
            "q_rot": q * cos + rotate_half(q) * first_half_twice(sin)
        },
        "q_rot with another token's angles": {
            "q_rot": q * cos.roll(1, 2) + rotate_half(q) * sin.roll(1, 2)
        },
        "k_rot is another head's": {"k_rot": k_rot.roll(1, 1)},
        "k_rot lacks its last head": {"k_rot": torch.cat((k_rot[:, :-1], k[:, -1:]), 1)},
        "dq rotated forward": {"dq": dq_rot * cos + rotate_half(dq_rot) * sin},
        "dq with sin not exchanged": {"dq": dq_rot * cos - rotate_half(dq_rot) * sin},
        "dk rotated forward": {"dk": dk_rot * cos + rotate_half(dk_rot) * sin},
    }
    if len(q) > 1:
        turned = q * cos.roll(1, 0) + rotate_half(q) * sin.roll(1, 0)
        wrong["q_rot with another sample's angles"] = {"q_rot": turned}
    return wrong


def projection(n_heads_before, n_heads_after):
    """Part of a fused projection: the heads of q, k and v lie side by side in each token."""

    def place(t):  # (B, heads, T, D)
        B, heads, T, D = t.shape
        memory = t.new_full((B, T, n_heads_before + heads + n_heads_after, D), torch.nan)
        view = memory[:, :, n_heads_before : n_heads_before + heads].transpose(1, 2)
        return view.copy_(t)

    return place


def overlapping_windows(t):
    """Each token's columns begin one element after the token's before."""
    memory = torch.cat((t[:, :, 0], t[:, :, 1:, -1]), -1)  # (B, heads, D + T - 1)
    return memory.unfold(2, t.shape[-1], 1)


def part_of_a_table(t):
    """Tokens 4 to 4 + T of a longer table."""
    return F.pad(t, (0, 0, 4, 2), value=torch.nan)[:, 4:-2]


HEADS = {
    "part of a fused projection": projection(2, 3),
    "overlapping windows": overlapping_windows,
    "contiguous": lambda t: t.contiguous(),
}
ANGLES = {"part of a longer table": part_of_a_table}


def bad_shapes():
    """Of every function of q, k, cos and sin."""
    x, a = torch.ones(2, 4, 3, 16, device=DEVICE), torch.ones(2, 3, 16, device=DEVICE)
    expected = r"expected \(2, 3, 16\)"
    heads = r"expected \(2, (4|k_heads), 3, 16\)"
    table = (
        r"\(9, 16\), expected \(2, 3, 16\), \(1, 3, 16\) or \(3, 16\): "
        "index it with position_ids first"
    )
    rows = {
        "q is 3-D": (x[0], x, a, a, r"q has shape \(4, 3, 16\), expected \(B, heads, T, D\)"),
        "q of an odd D": (
            *2 * [x[..., :15]],
            a,
            a,
            r"q has shape \(2, 4, 3, 15\), .* even D from 2 to 4,096",
        ),
        "q of no columns": (x[..., :0], x[..., :0], a, a, "even D from 2 to 4,096"),
        "q of a large D": (*2 * [x.repeat(1, 1, 1, 257)], a, a, "even D from 2 to 4,096"),
        "k is 3-D": (x, x[0], a, a, rf"k has shape \(4, 3, 16\), {heads}"),
        "k of another T": (x, x[:, :, :2], a, a, rf"k has shape \(2, 4, 2, 16\), {heads}"),
        "k of another D": (x, x[..., :8], a, a, rf"k has shape \(2, 4, 3, 8\), {heads}"),
        "k of another batch": (x, x[:1], a, a, rf"k has shape \(1, 4, 3, 16\), {heads}"),
        "cos is a long table": (x, x, a.repeat(1, 3, 1)[0], a, rf"cos has shape {table}"),
        "cos is 0-D": (x, x, a.sum(), a, rf"cos has shape \(\), {expected}"),
        "cos is unsqueezed": (x, x, a[:, None], a, rf"cos has shape \(2, 1, 3, 16\), {expected}"),
        "cos of another T": (x, x, a[:, :1], a, rf"cos has shape \(2, 1, 16\), {expected}"),
        "sin of half of D": (x, x, a, a[..., :8], rf"sin has shape \(2, 3, 8\), {expected}"),
        "sin of another batch": (
            x,
            x,
            a,
            a.repeat(2, 1, 1),
            rf"sin has shape \(4, 3, 16\), {expected}",
        ),
    }
    return {name: BadInput(tensors, ValueError, said) for name, (*tensors, said) in rows.items()}


def bad_input():
    x, a = torch.ones(2, 4, 3, 16, device=DEVICE), torch.ones(2, 3, 16, device=DEVICE)
    neighbours = (
        r"cos has shape \(2, 3, 8\), .* if these are neighbours, as in GPT-J, no kernel is here; "
        r"if they are q\[j\] and q\[j \+ 8\], pass torch.cat\(\(cos, cos\), -1\)"
    )
    part = (
        r"cos has shape \(2, 3, 12\), .*: 12 of 16 columns are a partial rotation, "
        r"for which pass q\[..., :12\]"
    )
    rows = {
        "cos of pairs of neighbours": (x, x, a[..., :8], a[..., :8], neighbours),
        "cos of a partial rotation": (x, x, a[..., :12], a[..., :12], part),
    }
    calls = {name: BadInput(tensors, ValueError, said) for name, (*tensors, said) in rows.items()}
    return bad_shapes() | calls | refused_tensors({"q": x, "k": x, "cos": a, "sin": a})


def rotation(B, T, D, theta=10_000.0):
    """cos and sin (B, T, D) of LLaMA's angles, halves equal, in fp32."""
    angles = torch.arange(T)[:, None] * theta ** (-torch.arange(0, D, 2) / D)
    angles = torch.cat((angles, angles), dim=-1).expand(B, T, D).to(DEVICE)
    return angles.cos(), angles.sin()


def of_tokens_before_heads(function):
    """Return the function of q and k (B, T, heads, D)."""

    def turned(q, k, *others):
        outputs = function(q.transpose(1, 2), k.transpose(1, 2), *others)
        return tuple(t.transpose(1, 2) for t in as_tuple(outputs))

    return turned


def of_packed_heads(
    subject: Subject,
    angles=lambda t: t[:1],
    tokens_before_heads: bool = False,
    weights: tuple[str, ...] = (),
) -> Subject:
    """Attention's projections: q, k and v are views of one product, and each is multiplied
    again.

    angles: makes what is passed of cos and sin (B, T, D).
    tokens_before_heads: the subject takes and returns (B, T, heads, D).
    weights: inputs (D,) of the subject between k and cos.
    """

    def make(rows, size, dtype, seed=0):
        (B, T), (n_q_heads, n_k_heads, D) = batch_and_tokens(rows), size
        normal = normals(seed, dtype)
        cos, sin = (angles(t).to(dtype) for t in rotation(B, T, D))
        inputs = {
            "x": normal(B, T, 24),
            "w_qkv": normal(24, (n_q_heads + 2 * n_k_heads) * D) / 5,
            "w_out": normal(D, 6),
            "cos": cos,
            "sin": sin,
            "heads": torch.empty(n_q_heads, n_k_heads, 0),  # their numbers, as a shape
            **{name: normal(D) for name in weights},
        }
        return inputs, {
            name: normal(B, T, n, 6) for name, n in zip("qkv", (n_q_heads, n_k_heads, n_k_heads))
        }

    def graph(function):
        turned = function if tokens_before_heads else of_tokens_before_heads(function)

        def call(x, w_qkv, w_out, cos, sin, heads, *weights):
            n_q_heads, n_k_heads, _ = heads.shape
            qkv = (x @ w_qkv).view(*x.shape[:2], -1, cos.shape[-1])
            q, k, v = qkv.split([n_q_heads, n_k_heads, n_k_heads], dim=2)
            return tuple(t @ w_out for t in (*turned(q, k, *weights, cos, sin), v))

        return call

    leaves = "x", "w_qkv", "w_out", *weights
    return replace(subject.called_as(graph), make=make, differentiable=leaves)


# Query and key heads: more of the one, of the other, as many, none.
HEADS_OF_ANY_NUMBER = (
    *((1, 1), (4, 1), (3, 1), (5, 3), (9, 3), (2, 7), (12, 12)),
    *((3, 0), (0, 3), (0, 0)),
)

OF_HEADS = {  # of every function of q, k, cos and sin
    "more_layouts": {
        **dict.fromkeys(("q", "k", "dq_rot", "dk_rot"), HEADS),
        **dict.fromkeys(("cos", "sin"), ANGLES),
    },
    "far": tuple((name, dim) for name in ("q", "k", "dq_rot", "dk_rot") for dim in (0, 1, 2))
    + tuple((name, dim) for name in ("cos", "sin") for dim in (0, 1)),
    "far_rows": (3, 3),
    "far_size": (3, 3, 4),
    "compiled_first": tuple(((5, 3), heads) for heads in PACKED_HEADS),
    "compiled_next": (((5, 7), None), ((3, 4), None)),  # with the same heads
    "gpu_rows": (2, 96),
    "gpu_size": (32, 8, 128),
    "row_inputs": ("q", "k", "cos", "sin"),  # samples, as rows
    "bad_when_compiled": "k of another D",
}
ROPE = Subject(
    name="rope",
    kernels=(rope_kernel,),
    function=TritonRoPEFunction.apply,
    reference=rope_reference,
    eager=eager,
    make=make,
    make_plain=partial(make, shared=True),
    differentiable=("q", "k"),
    wrong_answers=wrong_answers,
    size=SIZE,
    ragged_sizes=tuple((*heads, 12) for heads in HEADS_OF_ANY_NUMBER)
    + tuple((3, 2, D) for D in (2, 4, 6, 32, 80, 96, 126, 130)),
    large_sizes=((17, 5, 512), (3, 9, 1024), (5, 2, 2048), (3, 1, 4096), (64, 8, 128)),
    **OF_HEADS,
    saved=("cos", "sin"),
    in_a_graph=of_packed_heads,
    workspace=lambda inputs: 2**20,
    bad_input=bad_input,
    exempt={
        "one_to_four_dimensions": "q and k have four; the angles' are rope_test's",
    },
)
SUBJECTS = (ROPE,)
