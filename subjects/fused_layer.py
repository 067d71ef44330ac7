"""RMSNorm with matrix products, SwiGLU with its product, the MLP, and all of them together."""

import torch
import torch.nn.functional as F

import rmsnorm_kernel
from next_steps.layers.fused_layer import (
    NormLinearFunction,
    SwiGLULinearFunction,
    norm_linear_reference,
    swiglu_linear_reference,
)
from next_steps.layers.llama_mlp import SwiGLUMLPFunction
from next_steps.lessons import swiglu_kernel
from next_steps.lessons.swiglu_kernel import swiglu_reference
from subjects.rmsnorm import EPS, bytes_of_rstd
from subjects.subject import PADDED_WIDTHS, Subject, bad_call, chosen, normals

LAYER_SIZE = 24, 40  # H, I
RAGGED = (1, 1), (2, 2), (3, 5), (8, 17), (33, 65), (65, 129)


def without_adapters(*weights):
    """scales, bases and tensors, as the Functions take them."""
    none = (None,) * len(weights)
    return none, none, *(t for weight in weights for t in (weight, None, None, None))


def apply_norm_linear(x, norm_weight, *weights, eps=EPS):
    return NormLinearFunction.apply(x, norm_weight, eps, False, True, *without_adapters(*weights))


def norm_reference(x, norm_weight, *weights, eps=EPS):
    return tuple(norm_linear_reference(x, norm_weight, eps, *weights))


def apply_swiglu_linear(gate, up, weight):
    """Of results, which its backward may overwrite."""
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return swiglu_linear_inplace(gate, up, weight)


def swiglu_linear_inplace(gate, up, weight):
    none = (None,) * 3
    tensors = weight, None, None, None
    return SwiGLULinearFunction.apply(gate, up, None, False, none, *none, *tensors)


def mlp_reference(x, w_gate, w_up, w_down):
    return F.linear(swiglu_reference(F.linear(x, w_gate), F.linear(x, w_up)), w_down)


def layer(norm, swiglu):
    """The second half of a layer: the residual, and what the MLP adds to it."""

    def function(x, norm_weight, w_gate, w_up, w_down):
        residual, gate, up = norm(x, norm_weight, w_gate, w_up)
        return residual + swiglu(gate, up, w_down)

    return function


def drawn(rows, size, dtype, seed):
    """By name, all that these functions take or get back: (..., H) or (..., I), weights (out,
    in).
    """
    H, I = size
    normal = normals(seed, dtype, H * I)
    return {
        "x": normal(*rows, H, mean=0.5, scale=1.5),
        "norm_weight": normal(H, mean=0.5),
        "w_gate": normal(I, H, scale=H**-0.5),
        "w_up": normal(I, H, scale=H**-0.5),
        "w_down": normal(H, I, scale=I**-0.5),
        "gate": normal(*rows, I, mean=0.3, scale=2.0),
        "up": normal(*rows, I, mean=0.5),
        "dx": normal(*rows, H, mean=0.25),
        "dgate": normal(*rows, I, mean=0.25),
        "dup": normal(*rows, I, mean=0.25),
    }


def make_norm(rows, size, dtype, seed=0):
    """The two products differ in width."""
    t = drawn(rows, size, dtype, seed)
    half = -(-size[1] // 2)
    inputs = {name: t[name] for name in ("x", "norm_weight", "w_gate")} | {
        "w_up": t["w_up"][:half].clone()
    }
    return inputs, {"residual": t["dx"], "gate": t["dgate"], "up": t["dup"][..., :half].clone()}


make_swiglu = chosen(drawn, ("gate", "up", "w_down"), {"out": "dx"})
make_mlp = chosen(drawn, ("x", "w_gate", "w_up", "w_down"), {"out": "dx"})
make_layer = chosen(drawn, ("x", "norm_weight", "w_gate", "w_up", "w_down"), {"out": "dx"})


def wrong_norm_gradients(inputs, douts, right):
    x, w, w_gate, w_up = inputs.values()
    dx_residual, dgate, dup = douts.values()
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    x_hat = x * rstd

    def dx(dy, rstd=rstd):
        hat = x * rstd
        return rstd * (w * dy - hat * (w * dy * hat).mean(-1, keepdim=True))

    both = dgate @ w_gate + dup @ w_up
    return {
        "dx without the residual's gradient": {"dx": dx(both)},
        "dx with the residual's gradient twice": {"dx": 2 * dx_residual + dx(both)},
        "dx of the first product alone": {"dx": dx_residual + dx(dgate @ w_gate)},
        "dx through the norm without its mean": {"dx": dx_residual + rstd * w * both},
        "dnorm_weight of the first product alone": {
            "dnorm_weight": (dgate @ w_gate * x_hat).sum(0)
        },
        "dnorm_weight with the residual's gradient": {
            "dnorm_weight": ((both + dx_residual) * x_hat).sum(0)
        },
        "dnorm_weight of x": {"dnorm_weight": (both * x).sum(0)},
        "dw_gate of x": {"dw_gate": dgate.t() @ x},
        "dw_gate without the norm's weight": {"dw_gate": dgate.t() @ x_hat},
        "dw_gate without its last row": {"dw_gate": dgate[:-1].t() @ (w * x_hat)[:-1]},
    }


def wrong_swiglu_gradients(inputs, douts, right):
    gate, up, w_down = inputs.values()
    (dout,) = douts.values()
    s, dh = torch.sigmoid(gate), dout @ w_down
    return {
        "dgate without up": {"dgate": dh * s * (1 + gate * (1 - s))},
        "dgate of a linear gate": {"dgate": dh * up * s},
        "dgate with up's gradient": {"dgate": dh * gate * s},
        "dw_down of gate": {"dw_down": dout.t() @ gate},
        "dw_down without up": {"dw_down": dout.t() @ (gate * s)},
        "dw_down of dgate": {"dw_down": dout.t() @ (dh * up)},
    }


def wrong_mlp_gradients(inputs, douts, right):
    x, w_gate, w_up, w_down = inputs.values()
    (dout,) = douts.values()
    gate, up = x @ w_gate.t(), x @ w_up.t()
    s, dh = torch.sigmoid(gate), dout @ w_down
    dgate, dup = dh * up * s * (1 + gate * (1 - s)), dh * gate * s
    return {
        "dx of gate alone": {"dx": dgate @ w_gate},
        "dx of up alone": {"dx": dup @ w_up},
        "dw_gate of up": {"dw_gate": dup.t() @ x},
        "dw_up without its last row": {"dw_up": dup[:-1].t() @ x[:-1]},
        "dw_down of gate": {"dw_down": dout.t() @ gate},
    }


def wrong_layer_gradients(inputs, douts, right):
    (dout,) = douts.values()
    return {
        "out without the residual": {"out": right["out"] - inputs["x"]},
        "dx without the residual's gradient": {"dx": right["dx"] - dout},
        "dnorm_weight off by one": {"dnorm_weight": right["dnorm_weight"].roll(1)},
        "dw_gate and dw_up exchanged": {"dw_gate": right["dw_up"], "dw_up": right["dw_gate"]},
    }


def refused(make, name, change, sentence):
    """Return what makes the call that is refused for one tensor of another shape."""

    def calls():
        inputs, _ = make((4,), LAYER_SIZE, torch.float32)
        changed = {name: change(inputs[name])}
        return {f"another {name}": bad_call(inputs, ValueError, sentence, **changed)}

    return calls


def without_its_last_column(x):
    return x[:, :-1]


def without_its_last_row(t):
    return t[:-1]


ANOTHER_H = "x", without_its_last_column, r"weight has shape \(24,\), expected \(23,\)"
ANOTHER_UP = "up", without_its_last_row, r"up has shape .*, expected \(4, "
ANOTHER_W_UP = "w_up", *ANOTHER_UP[1:]


def bytes_of_gate_and_up(inputs):
    return 2 * 4 * inputs["x"].shape[:-1].numel() * len(inputs["w_gate"])


def bytes_of_three_inner_results(inputs):
    """gate and up, which their gradients overwrite, and dy, which y overwrites."""
    x = inputs["x"]
    return 3 * x.element_size() * x.shape[:-1].numel() * len(inputs["w_gate"]) + 2**20


BOTH_KERNELS = (rmsnorm_kernel, swiglu_kernel)
COMPILER = {
    "forward_alone": "torch.compile drops the first argument of a forward that takes *tensors, "
    "where nothing needs a gradient"
}
OWN_KERNELS = "the kernels are those of rmsnorm and swiglu, whose rows were laid beyond int32"
MEMORY = "fused_layer_test measures what is kept and taken, with the sizes of LLaMA 3.1 8B"
OVERWRITES_COPIES = {
    "saved_tensors_are_what_the_record_says": "it is called with copies to overwrite; "
    "fused_layer_test looks at what the function itself keeps"
}
COMMON = {
    "made_by_kernels_alone": False,
    "size": LAYER_SIZE,
    "ragged_sizes": RAGGED,
    "large_sizes": ((300, 700),),
    "compiled_first": tuple(((5,), (24, width)) for width in PADDED_WIDTHS),
    "compiled_next": (((4,), (1289, 40)), ((16,), (48, 64))),
    "gpu_size": (256, 512),
}
EXEMPT = {"rows_beyond_int32_in_memory": OWN_KERNELS, "memory_is_bounded": MEMORY}
OF_X = {"far": (("x", 0),), "activations": ("x",)}
OF_A_NORM = OF_X | {"bad_when_compiled": "another x", "refused_on_cpu": "x"}
OF_GATE_AND_UP = {
    "far": (("gate", 0), ("up", 0)),
    "activations": ("gate", "up"),
    "bad_when_compiled": "another up",
    "refused_on_cpu": "gate",
}

SUBJECTS = (
    Subject(
        name="norm_linear",
        kernels=(rmsnorm_kernel,),
        function=apply_norm_linear,
        reference=norm_reference,
        make=make_norm,
        differentiable=("x", "norm_weight", "w_gate", "w_up"),
        wrong_answers=wrong_norm_gradients,
        made_by_pytorch=("residual",),
        saved=("x", "norm_weight", "w_gate", "w_up"),
        saved_bytes=bytes_of_rstd,
        fixed_outputs={"residual": "being modified inplace"},
        bad_input=refused(make_norm, *ANOTHER_H),
        **OF_A_NORM,
        multiplied=("w_gate", "w_up"),
        **COMMON,
        exempt=EXEMPT | COMPILER,
    ),
    Subject(
        name="swiglu_linear",
        kernels=(swiglu_kernel,),
        function=apply_swiglu_linear,
        entry=swiglu_linear_inplace,
        reference=swiglu_linear_reference,
        make=make_swiglu,
        differentiable=("gate", "up", "w_down"),
        wrong_answers=wrong_swiglu_gradients,
        saved=("w_down",),
        bad_input=refused(make_swiglu, *ANOTHER_UP),
        **OF_GATE_AND_UP,
        multiplied=("w_down",),
        **COMMON,
        exempt=EXEMPT | OVERWRITES_COPIES,
    ),
    Subject(
        name="swiglu_mlp",
        kernels=(swiglu_kernel,),
        function=SwiGLUMLPFunction.apply,
        reference=mlp_reference,
        make=make_mlp,
        differentiable=("x", "w_gate", "w_up", "w_down"),
        wrong_answers=wrong_mlp_gradients,
        saved=("x", "w_gate", "w_up", "w_down"),
        saved_bytes=bytes_of_gate_and_up,
        fixed_outputs={"out": "is a view and is being modified inplace"},
        **OF_X,
        bad_input=refused(make_mlp, *ANOTHER_W_UP),
        bad_when_compiled="another w_up",
        refused_on_cpu="gate",
        multiplied=("x", "w_gate", "w_up", "w_down"),
        workspace=bytes_of_three_inner_results,
        **COMMON,
        exempt={"rows_beyond_int32_in_memory": OWN_KERNELS},
    ),
    Subject(
        name="norm_and_mlp",
        kernels=BOTH_KERNELS,
        function=layer(apply_norm_linear, swiglu_linear_inplace),
        reference=layer(norm_reference, swiglu_linear_reference),
        make=make_layer,
        differentiable=("x", "norm_weight", "w_gate", "w_up", "w_down"),
        wrong_answers=wrong_layer_gradients,
        saved=("x", "norm_weight", "w_gate", "w_up", "w_down"),
        saved_bytes=lambda inputs: bytes_of_rstd(inputs) + bytes_of_gate_and_up(inputs),
        bad_input=refused(make_layer, *ANOTHER_H),
        **OF_A_NORM,
        multiplied=("w_gate", "w_up", "w_down"),
        **COMMON,
        exempt=EXEMPT | COMPILER,
    ),
)
