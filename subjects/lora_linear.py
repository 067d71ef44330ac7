"""Projections with adapters: by themselves, behind a norm, behind SwiGLU, and on both its sides."""

import math

import torch

import rmsnorm_kernel
from harness.cli.device import HAS_GPU
from next_steps.layers import lora_swiglu as kernels_of_both
from next_steps.layers.fused_layer import (
    NormLinearFunction,
    SwiGLULinearFunction,
)
from next_steps.layers.lora_linear import LoRALinearFunction, lora_linear_reference
from next_steps.layers.lora_swiglu import lora_swiglu_reference
from next_steps.lessons import swiglu_kernel
from next_steps.lessons.swiglu_kernel import swiglu_reference
from rmsnorm_kernel import rmsnorm_reference
from subjects.fused_layer import (
    ANOTHER_H,
    ANOTHER_UP,
    COMMON,
    COMPILER,
    EPS,
    EXEMPT,
    LAYER_SIZE,
    OF_A_NORM,
    OF_GATE_AND_UP,
    OF_X,
    OVERWRITES_COPIES,
    refused,
)
from subjects.subject import Subject, bad_call, chosen, normals

RANKS = 3, 2
SCALES = 2.0, 0.75
THREE_SCALES = *SCALES, 1.5
BOTH_RANKS = 3, 4
NO_BASES = None, None


def apply_lora_linear(x, *tensors):
    """Two projections of one input."""
    return LoRALinearFunction.apply(x, SCALES, NO_BASES, *tensors)


def lora_reference(x, *tensors):
    of_each = tensors[:4], tensors[4:]
    return tuple(lora_linear_reference(x, *of_one, s) for of_one, s in zip(of_each, SCALES))


def norm_lora(x, norm_weight, w_gate, a_gate, b_gate, w_up, bias_up):
    """Two projections, one of them with an adapter, the other with a bias."""
    tensors = w_gate, a_gate, b_gate, None, w_up, None, None, bias_up
    scales = SCALES[0], None
    return NormLinearFunction.apply(x, norm_weight, EPS, False, True, scales, NO_BASES, *tensors)


def norm_lora_reference(x, norm_weight, w_gate, a_gate, b_gate, w_up, bias_up):
    y = rmsnorm_reference(x, norm_weight, EPS)
    gate = lora_linear_reference(y, w_gate, a_gate, b_gate, scale=SCALES[0])
    return x, gate, lora_linear_reference(y, w_up, bias=bias_up)


def swiglu_lora(gate, up, *of_down):
    """Of results, which its backward may overwrite."""
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return swiglu_lora_inplace(gate, up, *of_down)


def swiglu_lora_inplace(gate, up, *of_down):
    scales, without = (None, None, SCALES[0]), (None,) * 3
    return SwiGLULinearFunction.apply(gate, up, None, False, scales, *without, *of_down)


def swiglu_lora_reference(gate, up, *of_down):
    return lora_linear_reference(swiglu_reference(gate, up), *of_down, SCALES[0])


def lora_swiglu(gate, up, *others):
    """Of results, which its backward may overwrite."""
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return lora_swiglu_inplace(gate, up, *others)


def lora_swiglu_inplace(gate, up, h, b_gate, b_up, *of_down):
    return SwiGLULinearFunction.apply(
        gate, up, h, False, THREE_SCALES, None, b_gate, b_up, *of_down, None
    )


def lora_swiglu_reference_of_all(gate, up, h, b_gate, b_up, *of_down):
    y = lora_swiglu_reference(gate, up, h, SCALES, b_gate, b_up)
    return lora_linear_reference(y, *of_down, scale=THREE_SCALES[2])


def drawn_with_adapters(rows, size, dtype, seed, rank_of_down=RANKS[0]):
    """By name, all that these functions take or get back: (..., H) or (..., I), weights (out, in),
    of the adapters (rank, in) and (out, rank), biases (out,).  `up` is half as wide as gate.
    """
    H, I = size
    half = -(-I // 2)
    normal = normals(seed, dtype, H * I)
    t = {"x": normal(*rows, H, mean=0.5, scale=1.5), "norm_weight": normal(H, mean=0.5)}
    widths = {"gate": (H, I), "up": (H, half), "down": (I, H)}
    for (name, (width_in, width_out)), rank in zip(widths.items(), (*RANKS, rank_of_down)):
        t[f"w_{name}"] = normal(width_out, width_in, scale=width_in**-0.5)
        t[f"a_{name}"] = normal(rank, width_in, scale=width_in**-0.5)
        t[f"b_{name}"] = normal(width_out, rank, scale=rank**-0.5)
        t[f"bias_{name}"] = normal(width_out)
        t[f"d{name}"] = normal(*rows, width_out, mean=0.25)
    return t | {
        "gate": normal(*rows, I, mean=0.3, scale=2.0),
        "up": normal(*rows, I, mean=0.5),
        "dresidual": normal(*rows, H, mean=0.25),
    }


def make_both(rows, size, dtype, seed=0, ranks=BOTH_RANKS, rank_of_down=RANKS[0]):
    """What SwiGLU with adapters on both sides takes: h (N, both R), and a b_up as wide as gate."""
    t, normal = drawn_with_adapters(rows, size, dtype, seed, rank_of_down), normals(seed + 1, dtype)
    shapes = (math.prod(rows), sum(ranks)), *((size[1], rank) for rank in ranks)
    t |= zip(("h", "b_gate", "b_up"), (normal(*shape) for shape in shapes))
    return {name: t[name] for name in BOTH_INPUTS}, {"down": t["ddown"]}


BOTH_INPUTS = "gate", "up", "h", "b_gate", "b_up", "w_down", "a_down", "b_down"
OF_GATE, OF_UP, OF_DOWN = (
    tuple(f"{tensor}_{name}" for tensor in ("w", "a", "b", "bias"))
    for name in ("gate", "up", "down")
)
LORA_INPUTS = "x", *OF_GATE, *OF_UP
NORM_INPUTS = "x", "norm_weight", "w_gate", "a_gate", "b_gate", "w_up", "bias_up"
SWIGLU_INPUTS = "gate", "up", *OF_DOWN
OF_BOTH = {"gate": "dgate", "up": "dup"}
make_lora = chosen(drawn_with_adapters, LORA_INPUTS, OF_BOTH)
make_lora_norm = chosen(drawn_with_adapters, NORM_INPUTS, {"residual": "dresidual"} | OF_BOTH)
make_lora_swiglu = chosen(drawn_with_adapters, SWIGLU_INPUTS, {"down": "ddown"})


def wrong_lora_gradients(inputs, douts, right):
    x, w_gate, a_gate, b_gate, bias_gate, w_up, a_up, b_up, _ = inputs.values()
    dgate, dup = douts.values()
    s_gate, s_up = SCALES
    gate_part, up_part = x @ a_gate.t() @ b_gate.t(), x @ a_up.t() @ b_up.t()
    dh_gate, dh_up = s_gate * dgate @ b_gate, s_up * dup @ b_up
    plain = dgate @ w_gate + dup @ w_up
    return {
        "gate without its adapter": {"gate": x @ w_gate.t() + bias_gate},
        "gate without its bias": {"gate": right["gate"] - bias_gate},
        "dbias_up with the adapter's scale": {"dbias_up": right["dbias_up"] * s_up},
        "dbias_gate of one row": {"dbias_gate": dgate[0]},
        "gate without its scale": {"gate": right["gate"] - (s_gate - 1) * gate_part},
        "up with gate's scale": {"up": right["up"] + (s_gate - s_up) * up_part},
        "dx without the adapters": {"dx": plain},
        "dx with one adapter": {"dx": plain + dh_gate @ a_gate},
        "dx of the first projection": {"dx": dgate @ w_gate + dh_gate @ a_gate},
        "dx without the scales": {"dx": plain + dgate @ b_gate @ a_gate + dup @ b_up @ a_up},
        "da_gate without its scale": {"da_gate": right["da_gate"] / s_gate},
        "da_up without its last row": {"da_up": dh_up[:-1].t() @ x[:-1]},
        "da_up through w": {"da_up": right["da_up"].roll(1, 0)},
        "db_gate without its scale": {"db_gate": right["db_gate"] / s_gate},
        "db_up scaled twice": {"db_up": right["db_up"] * s_up},
        "dw_gate with the adapter's scale": {"dw_gate": right["dw_gate"] * s_gate},
    }


def wrong_lora_norm_gradients(inputs, douts, right):
    x, _, w_gate, a_gate, b_gate, w_up, _ = inputs.values()
    dresidual, dgate, dup = douts.values()
    x_hat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    plain, dh = dgate @ w_gate + dup @ w_up, SCALES[0] * dgate @ b_gate
    return {
        "dx without the residual's gradient": {"dx": right["dx"] - dresidual},
        "dnorm_weight without the adapter": {"dnorm_weight": (plain * x_hat).sum(0)},
        "da_gate of x": {"da_gate": dh.t() @ x},
        "da_gate without the norm's weight": {"da_gate": dh.t() @ x_hat},
        "db_gate of x": {"db_gate": SCALES[0] * dgate.t() @ (x @ a_gate.t())},
    }


def wrong_lora_swiglu_gradients(inputs, douts, right):
    gate, up, w_down, a_down, b_down, _ = inputs.values()
    (dout,) = douts.values()
    s, dh = torch.sigmoid(gate), SCALES[0] * dout @ b_down
    plain, whole = dout @ w_down, dout @ w_down + dh @ a_down
    return {
        "dgate without the adapter": {"dgate": plain * up * s * (1 + gate * (1 - s))},
        "dup without the adapter": {"dup": plain * gate * s},
        "da_down of gate": {"da_down": dh.t() @ gate},
        "da_down of its own gradient": {"da_down": dh.t() @ whole},
        "db_down without its scale": {"db_down": right["db_down"] / SCALES[0]},
    }


def wrong_gradients_of_both(inputs, douts, right):
    gate, up, h, b_gate, b_up, w_down, a_down, b_down = inputs.values()
    (dout,) = douts.values()
    dh_down = THREE_SCALES[2] * dout @ b_down
    h_gate, h_up = h.split(BOTH_RANKS, 1)
    whole_gate, whole_up = gate + SCALES[0] * h_gate @ b_gate.t(), up + SCALES[1] * h_up @ b_up.t()

    def gradients(gate, up, dy):
        s = torch.sigmoid(gate)
        return {"dgate": dy * up * s * (1 + gate * (1 - s)), "dup": dy * gate * s}

    plain, dy = dout @ w_down, dout @ w_down + dh_down @ a_down
    return {
        "dy without the adapter": gradients(whole_gate, whole_up, plain),
        "gate without its adapter": gradients(gate, whole_up, dy),
        "up without its adapter": gradients(whole_gate, up, dy),
        "dh without up's part": {"dh": right["dh"] * (torch.arange(7) < 3).to(h)},
        "dh without the scales": {"dh": right["dh"] / SCALES[0]},
        "db_gate of up": {"db_gate": SCALES[0] * right["dup"].t() @ h_gate},
        "db_up without its scale": {"db_up": right["db_up"] / SCALES[1]},
        "da_down of gate and up alone": {
            "da_down": dh_down.t() @ (torch.nn.functional.silu(gate) * up)
        },
    }


def bad_lora_input():
    inputs, _ = make_lora((4,), LAYER_SIZE, torch.float32)
    x, b = inputs["x"], inputs["b_gate"]
    width = "shapes cannot be multiplied|same reduction dim"  # the compiler's words
    return {
        "x of another width": bad_call(inputs, RuntimeError, width, x=x[:, :-1]),
        "an adapter of another width": bad_call(
            inputs, RuntimeError, "tensor size .* should match", b_gate=b[:-1]
        ),
        "an adapter of another dtype": bad_call(
            inputs, RuntimeError, "same dtype", b_gate=b.double()
        ),
    }


def bytes_of_h_and_a(inputs):
    """Every h, and both a one below the other."""
    x = inputs["x"]
    return 4 * sum(RANKS) * (x.shape[:-1].numel() + x.shape[-1])


def bytes_of_h_and_rstd(inputs):
    return 4 * (1 + RANKS[0]) * inputs["x"].shape[:-1].numel()


# On an H200 a compiled graph rounds some entries of dh otherwise than eager PyTorch does.  In eager
# each dh is some columns of one tensor.  The errors against float64 are alike.
EXACT = {"exact_compiled": not HAS_GPU}
NO_KERNEL = "it launches none of Triton's kernels, only PyTorch's products"
SUBJECTS = (
    Subject(
        name="lora_linear",
        kernels=(),
        function=apply_lora_linear,
        reference=lora_reference,
        make=make_lora,
        differentiable=LORA_INPUTS,
        wrong_answers=wrong_lora_gradients,
        saved=("x", "w_gate", "b_gate", "w_up", "b_up"),
        saved_bytes=bytes_of_h_and_a,
        **OF_X,
        bad_input=bad_lora_input,
        bad_when_compiled="x of another width",
        multiplied=LORA_INPUTS,
        **COMMON,
        **EXACT,
        exempt=EXEMPT
        | COMPILER
        | {
            "comparator_rejects_what_no_kernel_wrote": NO_KERNEL,
            "cpu_tensors_without_the_interpreter_are_refused_with_a_sentence": NO_KERNEL,
            "new_row_counts_compile_no_new_kernels": NO_KERNEL,
            "forward_mode_is_refused": "compiled, it is right: PyTorch's products alone",
        },
    ),
    Subject(
        name="norm_lora",
        kernels=(rmsnorm_kernel,),
        function=norm_lora,
        reference=norm_lora_reference,
        make=make_lora_norm,
        differentiable=NORM_INPUTS,
        wrong_answers=wrong_lora_norm_gradients,
        made_by_pytorch=("residual", "dbias_up"),
        saved=NORM_INPUTS[:-1],
        saved_bytes=bytes_of_h_and_rstd,
        fixed_outputs={"residual": "being modified inplace"},
        bad_input=refused(make_lora_norm, *ANOTHER_H),
        **OF_A_NORM,
        multiplied=NORM_INPUTS[2:],
        **COMMON,
        **EXACT,
        exempt=EXEMPT | COMPILER,
    ),
    Subject(
        name="swiglu_lora",
        kernels=(swiglu_kernel,),
        function=swiglu_lora,
        entry=swiglu_lora_inplace,
        reference=swiglu_lora_reference,
        make=make_lora_swiglu,
        differentiable=SWIGLU_INPUTS,
        wrong_answers=wrong_lora_swiglu_gradients,
        made_by_pytorch=("dbias_down",),
        saved=("w_down", "a_down", "b_down"),
        bad_input=refused(make_lora_swiglu, *ANOTHER_UP),
        **OF_GATE_AND_UP,
        multiplied=OF_DOWN,
        **COMMON,
        **EXACT,
        exempt=EXEMPT | OVERWRITES_COPIES,
    ),
    Subject(
        name="lora_swiglu",
        kernels=(kernels_of_both, swiglu_kernel),
        function=lora_swiglu,
        entry=lora_swiglu_inplace,
        reference=lora_swiglu_reference_of_all,
        make=make_both,
        differentiable=BOTH_INPUTS,
        wrong_answers=wrong_gradients_of_both,
        saved=("h", "b_gate", "b_up", "w_down", "a_down", "b_down"),
        bad_input=refused(make_both, *ANOTHER_UP),
        **OF_GATE_AND_UP,
        multiplied=("w_down", "a_down", "b_down"),
        **COMMON,
        **EXACT,
        exempt=EXEMPT | OVERWRITES_COPIES,
    ),
)
