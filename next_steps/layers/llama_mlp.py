"""LLaMA's MLP around the SwiGLU kernel: half as much to save for the backward.

    out = down_proj(F.silu(gate_proj(x)) * up_proj(x))      # x, out (..., H); all of LlamaMLP

No new kernel: the matrix products are PyTorch's, the rest is that of swiglu_kernel.py.  With
gate, up = x @ w_gate.t(), x @ w_up.t() and y = silu(gate) * up of N rows:

    dy      = dout @ w_down                 out = y @ w_down.t()
    dw_down = dout.t() @ y                  so y is needed once more
    dgate, dup, y = swiglu_backward(dy, gate, up)
    dw_gate = dgate.t() @ x
    dw_up   = dup.t() @ x
    dx      = dgate @ w_gate + dup @ w_up

Autograd would keep silu and y, because products follow that need them.  But the kernel has gate
and up in registers anyway when it computes their gradients, and writes y on the way.  Per bf16
element of gate, eager saves 8 bytes for the backward (gate, up, silu, y), and one Function 4 (gate,
up).  In one of LLaMA 3.1 8B's 32 layers (I = 14,336), 8,192 tokens save 470 MB and not 940 MB.

Limits: those of the kernel; no second derivative.
"""

import torch

from harness.model.exact_modules import has_global_hooks, is_matrix, is_unchanged
from kernel_support import outside_autocast, refuse_second_derivative
from next_steps.lessons import swiglu_kernel as swiglu

SILU = {("torch.nn.modules.activation", "SiLU"), ("transformers.activations", "SiLUActivation")}


class SwiGLUMLPFunction(torch.autograd.Function):
    """`.apply(x, w_gate, w_up, w_down)`: the MLP (..., H) of x (..., H), saving neither silu nor y.

    w_gate and w_up (I, H), w_down (H, I); all are of one dtype.
    """

    @staticmethod
    def forward(ctx, x, w_gate, w_up, w_down):
        rows = x.reshape(-1, x.shape[-1])  # (N, H)
        gate, up = rows @ w_gate.t(), rows @ w_up.t()  # (N, I)
        ctx.save_for_backward(x, gate, up, w_gate, w_up, w_down)
        out = swiglu.swiglu_forward(gate, up) @ w_down.t()  # (N, H)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @outside_autocast
    def backward(ctx, dout):
        refuse_second_derivative("SwiGLU in Triton")
        inplace = swiglu.may_overwrite_saved()  # only this Function holds gate, up and dy
        x, gate, up, w_gate, w_up, w_down = ctx.saved_tensors
        need_x, need_w_gate, need_w_up, need_w_down = ctx.needs_input_grad
        dout = dout.reshape(-1, dout.shape[-1])  # (N, H)
        rows = x.reshape(-1, x.shape[-1])  # (N, H)
        dy = dout @ w_down  # (N, I)
        dgate, dup, y = swiglu.swiglu_backward(dy, gate, up, inplace=inplace, need_y=need_w_down)
        dw_down = dout.t() @ y if need_w_down else None
        del dy, y  # the same memory, which the products below may use
        dw_gate = dgate.t() @ rows if need_w_gate else None
        dw_up = dup.t() @ rows if need_w_up else None
        dx = None
        if need_x:
            # The second product adds to the first one's result as it stores its own.  This saves a
            # kernel and a rounding.
            dx = (dgate @ w_gate).addmm_(dup, w_up).view(x.shape)
        return dx, dw_gate, dw_up, dw_down


class TritonLlamaMLP(torch.nn.Module):
    """Drop-in replacement for LlamaMLP: same submodules, same `state_dict` keys, same numbers.

    Where a projection is more than a plain nn.Linear (LoRA, quantized, with a bias, hooked), and
    under autocast, `forward` calls the projections with the kernel between them.  `inplace = True`
    then saves memory, if no other code keeps gate or up.
    """

    inplace = False

    def __init__(self, gate_proj, up_proj, down_proj, act_fn=None):
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn or torch.nn.SiLU()

    @classmethod
    def from_llama_mlp(cls, module: torch.nn.Module) -> "TritonLlamaMLP":
        """Take over a LlamaMLP.

        Its submodules are shared, not copied, so an optimizer may already hold their weights.
        """
        given = module.config.hidden_act
        if given not in ("silu", "swish"):  # two names of one function
            expected = "expected 'silu': leave this module as it is."
            raise ValueError(f"hidden_act is {given!r}, {expected}")
        parts = module.gate_proj, module.up_proj, module.down_proj, module.act_fn
        return cls(*parts).train(module.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu_mlp(self, x, self.inplace)


def is_silu(module: torch.nn.Module) -> bool:
    """Return True if an MLP's act_fn is SiLU, unchanged and without hooks."""
    return (type(module).__module__, type(module).__name__) in SILU and is_unchanged(module)


def swiglu_mlp(mlp: torch.nn.Module, x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Return the MLP (..., H) of x (..., H), by the projections of `mlp`, and its act_fn.

    inplace: the backward may overwrite the results of projections that are more than a matrix.
    """
    projections = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    known = is_silu(mlp.act_fn) and not has_global_hooks()
    if known and all(map(is_matrix, projections)) and not (autocast or x.dtype == torch.float64):
        return SwiGLUMLPFunction.apply(x, *(p.weight for p in projections))
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    # the kernel refuses float64: a model that was cast to float64 runs without the kernel
    if not known or gate.dtype == torch.float64:
        return mlp.down_proj(mlp.act_fn(gate) * up)
    inplace = inplace and torch.is_grad_enabled()
    return mlp.down_proj(swiglu.TritonSwiGLUFunction.apply(gate, up, inplace))
