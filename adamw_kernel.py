"""AdamW in Triton: the whole optimizer step of a parameter in one pass over its memory.

    torch.optim.AdamW(model.parameters(), lr, betas, eps, weight_decay).step()     # p, g, m, v of equal shapes

The maths, for one element; t is the number of this step, and each line is at least one pass in eager PyTorch:

    p     = p * (1 - lr * weight_decay)                       weight decay                  read 1, write 1
    m     = m + (g - m) * (1 - beta1)                         a running mean of g           read 2, write 1
    v     = v * beta2 + g * g * (1 - beta2)                   a running mean of g * g       read 3, write 2
    denom = sqrt(v) / sqrt(1 - beta2**t) + eps                                              read 3, write 3
    p     = p - lr / (1 - beta1**t) * m / denom                                             read 3, write 1

torch.optim.AdamW does that by default, each operation on all tensors ("foreach").  Bytes per bf16 parameter:

                eager                                          fused                             ratio
    moved       20 passes: 12 reads, 8 writes          = 40    7: read p g m v, write p m v = 14   2.9
    memory      denom, for all parameters at once      =  2    nothing                      =  0

The prediction: 2.9 times as fast, and for 8 billion parameters 16 GB less memory at the peak.  step_in_backward=True
saves another 16 GB: it updates a parameter as soon as its gradient is complete, and frees that gradient.

In bf16 the next number after 1 is 1.0078, so most steps of a fine-tuning round back to where they came from: the
weight needs a step of 0.2 to 0.4 % to move at all, and v, which decays by 0.1 %, never decays.  Stochastic rounding
cures both: 1.001 becomes 1.0078 once in 8 times and 1 otherwise, which is right on average.  It covers m as well.

New ideas of Triton, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. In place: a program reads its elements, then writes the results over them.  No other program looks at them.
2. Random numbers: `tl.philox(seed, c0, c1, c2, c3)` mixes a key and four counters into 128 bits.  Nothing is remembered
   between calls: with element, tensor, parameter and step as counters, any order of programs draws the same numbers.
3. Bits: `x.to(tl.uint32, bitcast=True)` is the same 32 bits as an integer; bf16 is the upper half of an fp32.
4. A scalar may come through a pointer: a CUDA graph repeats the values with which it recorded a launch, but reads
   what a pointer points to anew each time.  So the count of steps lives on the GPU, and lr may.

Limits: fp16, bf16, fp32, the gradient in the parameter's dtype; moments fp32 or bf16 (in fp16 v would underflow, so
fp16 parameters get fp32 moments); no amsgrad, no maximize.  Before a CUDA graph captures a step, one must have been
made, which creates the state; and in a graph an lr that is to change must be a tensor.
"""

import contextlib
import functools
import math
import os
import weakref

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: run on the CPU; must precede `import triton`

import triton
import triton.language as tl

with contextlib.suppress(ModuleNotFoundError):  # beside this file; without it bf16 is truncated on a CPU
    import interpreter_rounding  # noqa: F401

INTERPRETED = triton.knobs.runtime.interpret  # are the kernels below run on the CPU, by the interpreter?
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK_SIZE, NUM_WARPS = 1024, 4  # 58.7 million bf16 weights on an H200: 195 us; 2,048: 198; 4,096: 203
# Philox passes the hardest tests of randomness from 7 rounds on (Salmon et al., 2011); tl.philox's default is 10.
ROUNDS = tl.constexpr(7)


def adamw_reference(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay):
    """One eager step, the formula of torch.optim.AdamW: new p, m, v; step counts from 1; float64 stays float64."""
    p = p * (1 - lr * weight_decay)
    m = m.lerp(g, 1 - beta1)  # m + (g - m) * (1 - beta1)
    v = (v * beta2).addcmul(g, g, value=1 - beta2)  # + g * g * (1 - beta2)
    denom = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
    p = p.addcdiv(m, denom, value=-lr / (1 - beta1**step))  # p - lr / (1 - beta1**step) * m / denom
    return p, m, v


@triton.jit
def _scalar(value):
    return tl.cast(value, tl.float32)  # from fp64, as which torch.compile passes a Python float


# 1 - beta**step.  In fp32, 1 - 0.999**1 would be wrong by up to 3e-5, because it keeps the rounding of a number near 1.
# With x = step * log(beta), it is 1 - exp(x) = -x * (1 + x/2 * (1 + x/3 * (1 + ...))), which loses nothing.
@triton.jit
def _one_minus_power(log_beta, step):
    x = log_beta * step
    series = 1.0
    for k in tl.static_range(9, 1, -1):
        series = 1.0 + x * series * (1.0 / k)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


# Stochastic rounding.  An fp32 number lies between two bf16 neighbours: its upper 16 bits alone are the one nearer to
# 0, and its lower 16 bits say how far beyond that one it is, in 65,536ths of the way.  Add a random number below
# 65,536 and drop the lower bits: it carries into the upper ones exactly that often.  A representable number has
# nothing to carry, infinity neither; NaN has, and could become -0.
@triton.jit
def _store(ptr, lane, mask, x, seed, block, tensor: tl.constexpr, index, step, BLOCK_SIZE: tl.constexpr):
    if seed is not None and ptr.dtype.element_ty == tl.bfloat16:
        eight = block * (BLOCK_SIZE // 8) + tl.arange(0, BLOCK_SIZE // 8)  # one draw is 4 x 32 bits, enough for 8
        a, b, c, d = tl.philox(seed, eight, tensor, index, step.to(tl.int32), ROUNDS)
        words = tl.join(tl.join(a, b), tl.join(c, d))
        random = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_SIZE,))
        bits = x.to(tl.uint32, bitcast=True) + tl.where(x == x, random, 0)
        x = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(ptr + lane, x.to(ptr.dtype.element_ty), mask=mask)


# n stays specialized: a masked load is of 16 bytes only if Triton knows that 16 divides n (if not, 2.4 x the time).
@triton.jit(do_not_specialize=["seed", "index"])
def _adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr,  # (n,) each
    steps_done_ptr, lr_ptr, lr,  # () fp32; () or None, and then a number
    log_beta1, one_minus_beta1, log_beta2, one_minus_beta2,  # 1 - 0.999 from an fp32 0.999 would be wrong by 1e-5
    eps, weight_decay, n,
    seed, index,  # of the optimizer, and of the parameter in it; seed None: round to nearest
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    step = tl.load(steps_done_ptr) + 1.0
    lr, eps = _scalar(lr if lr_ptr is None else tl.load(lr_ptr)), _scalar(eps)
    decay = 1.0 - lr * _scalar(weight_decay)
    step_size = lr / _one_minus_power(_scalar(log_beta1), step)
    sqrt_scale = 1.0 / tl.sqrt(_one_minus_power(_scalar(log_beta2), step))
    rate1, rate2 = _scalar(one_minus_beta1), _scalar(one_minus_beta2)

    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK_SIZE  # a tensor may have more than 2**31 elements
    p_ptr, g_ptr, m_ptr, v_ptr = p_ptr + start, g_ptr + start, m_ptr + start, v_ptr + start
    lane = tl.arange(0, BLOCK_SIZE)
    mask = lane < n - start
    p = tl.load(p_ptr + lane, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + lane, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + lane, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + lane, mask=mask).to(tl.float32)

    m = m + (g - m) * rate1
    v = v * (1.0 - rate2) + g * g * rate2
    p = p * decay - step_size * m / (tl.sqrt(v) * sqrt_scale + eps)  # m and v not yet rounded

    _store(p_ptr, lane, mask, p, seed, block, 0, index, step, BLOCK_SIZE)
    _store(m_ptr, lane, mask, m, seed, block, 1, index, step, BLOCK_SIZE)
    _store(v_ptr, lane, mask, v, seed, block, 2, index, step, BLOCK_SIZE)


def _check(p, grad, m, v, steps_done, lr) -> None:
    """Refuse what the kernel cannot compute, before any pointer is handed to it."""
    for name, t, dtypes in (("p", p, FLOATS), ("grad", grad, (p.dtype,)), ("m", m, FLOATS[1:]), ("v", v, FLOATS[1:])):
        if t.layout != torch.strided or t.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise TypeError(f"{name} is {t.dtype}, {t.layout}, expected {expected}, {torch.strided}: convert it first.")
        if t.shape != p.shape or t.device != p.device:
            given = f"{name} has shape {tuple(t.shape)} on {t.device}"
            raise ValueError(f"{given}, expected p's {tuple(p.shape)} on {p.device}: reshape or move it.")
    for name, t in (("steps_done", steps_done), ("lr", lr)):
        if isinstance(t, torch.Tensor) and (t.device != p.device or t.numel() != 1):
            given = f"{name} is a tensor of shape {tuple(t.shape)} on {t.device}"
            raise ValueError(f"{given}, expected one number on p's {p.device}: move it with .to(p.device).")
    if not p.is_cuda and not INTERPRETED:
        raise ValueError(f"p is on {p.device}, expected a GPU: move it, or export TRITON_INTERPRET=1.")
    # A copy has p's strides only if p's elements fill one stretch of memory, in whatever order of dimensions.
    dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()
    if not dense or not p.stride() == m.stride() == v.stride():
        given = f"p, m and v have strides {p.stride()}, {m.stride()} and {v.stride()}"
        raise ValueError(f"{given}, expected equal ones, without gaps or overlap: make p.contiguous() the parameter.")


def _on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def adamw_step(p, grad, m, v, steps_done, lr, beta1, beta2, eps, weight_decay, seed=None, index=0) -> None:
    """Make step number steps_done + 1 of p, m and v, in place; steps_done, a () fp32 tensor, is only read.

    lr: a number, or a tensor of one number on p's device.
    seed: None rounds bf16 results to nearest; a number, together with `index` and the step, picks the random bits.
    """
    _check(p, grad, m, v, steps_done, lr)
    if grad.stride() != p.stride():  # from autograd they are equal
        grad = p.new_empty_strided(p.shape, p.stride()).copy_(grad.detach())
    if (n := p.numel()) > 0:
        log_betas = [math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
        lr_ptr, lr = (lr, 0.0) if isinstance(lr, torch.Tensor) else (None, lr)
        with _on_device_of(p):
            _adamw_kernel[((n + BLOCK_SIZE - 1) // BLOCK_SIZE,)](
                p, grad, m, v, steps_done, lr_ptr, lr, log_betas[0], 1 - beta1, log_betas[1], 1 - beta2, eps,
                weight_decay, n, seed, index, BLOCK_SIZE=BLOCK_SIZE, num_warps=NUM_WARPS,
            )  # fmt: skip


def _new_state(p: torch.Tensor, moments_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a parameter without state is captured, and each replay would reset it: make a step before.")
    dtype = moments_dtype or (torch.float32 if p.dtype == torch.float16 else p.dtype)
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p, dtype=dtype), "exp_avg_sq": torch.zeros_like(p, dtype=dtype)}


class TritonAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW in one kernel per parameter, with its `state_dict` keys; a step never waits for the GPU.

    lr: a number, or a tensor of one number on the parameters' device, which a captured CUDA graph reads anew each time.
    moments_dtype: float32 or bfloat16; None: the parameter's, but float32 for float16.
    stochastic_rounding: whether bfloat16 weights and moments are rounded up or down at random.
    step_in_backward: update each parameter during the backward and free its gradient at once; step() then only counts.
        Not for gradient accumulation (a second backward before step() raises), gradient clipping (clip_grad_norm_ finds
        no gradients and returns 0), or gradients that still have to be averaged over GPUs or unscaled.
    seed: of the random bits.  They also depend on the step and on the parameter's place among all parameters.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2,
        moments_dtype=None, stochastic_rounding=False, step_in_backward=False, seed=0,
    ):  # fmt: skip
        self._step_in_backward, self._hooks, self._stepped = step_in_backward, [], {}
        weakref.finalize(self, lambda hooks: [hook.remove() for hook in hooks], self._hooks)
        rounding = {"moments_dtype": moments_dtype, "stochastic_rounding": stochastic_rounding, "seed": seed}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **rounding})

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group, before = self.param_groups[-1], self.param_groups[:-1]
        float16 = any(p.dtype == torch.float16 for p in group["params"])
        for name, valid, expected in (
            ("lr", isinstance(group["lr"], torch.Tensor) or 0.0 <= group["lr"] < math.inf, "a number of at least 0"),
            ("betas", all(0.0 <= beta < 1.0 for beta in group["betas"]), "two numbers from 0 to below 1"),
            ("eps", 0.0 <= group["eps"] < math.inf, "a number of at least 0"),
            ("weight_decay", 0.0 <= group["weight_decay"] < math.inf, "a number of at least 0"),
            ("moments_dtype", group["moments_dtype"] in (None, *FLOATS[1:]), "float32, bfloat16 or None"),
            ("stochastic_rounding", not (group["stochastic_rounding"] and float16), "False for float16 parameters"),
            ("seed", 0 <= group["seed"] < 2**63, "a whole number from 0 to below 2**63"),
        ):
            if not valid:
                raise ValueError(f"{name} is {group[name]}, expected {expected}: choose another.")
        if self._step_in_backward:
            for index, p in enumerate(group["params"], start=sum(len(g["params"]) for g in before)):
                if p.grad is not None:
                    raise ValueError("a parameter has a gradient, and step_in_backward=True would add to it: free it.")
                if p.requires_grad:
                    # A proxy: Python's collector does not see what a hook holds, so self would live on, and all of p.
                    hook = functools.partial(type(self)._step_parameter_now, weakref.proxy(self), len(before), index)
                    self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def _step_parameter(self, group: dict, index: int, p: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[p]
        if not state:
            state.update(_new_state(p, group["moments_dtype"]))
        adamw_step(
            p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group["lr"], *group["betas"],
            group["eps"], group["weight_decay"], group["seed"] if group["stochastic_rounding"] else None, index,
        )  # fmt: skip
        torch.autograd.graph.increment_version(p)  # autograd cannot see what a kernel writes
        self._stepped[p] = state["step"]

    def _step_parameter_now(self, group_number: int, index: int, p: torch.Tensor) -> None:
        grad, p.grad = p.grad, None
        if p in self._stepped:
            given = "a second gradient reached a parameter before step(), and step_in_backward=True has used the first"
            raise RuntimeError(f"{given}: call step() after each backward, or accumulate with step_in_backward=False.")
        self._step_parameter(self.param_groups[group_number], index, p, grad)  # load_state_dict makes new groups

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        if not self._step_in_backward:
            for index, (group, p) in enumerate(params):
                if p.grad is not None:
                    self._step_parameter(group, index, p, p.grad)
        elif not self._stepped:
            raise RuntimeError("no backward has stepped a parameter since the last step(): call loss.backward() first.")
        elif any(p.grad is not None for _, p in params):
            raise RuntimeError("a gradient is there that no backward has stepped: leave .grad alone, unfreeze earlier.")
        if self._stepped:
            torch._foreach_add_(list(self._stepped.values()), 1)  # on the GPU, so that a graph's replays count too
            self._stepped.clear()
        return loss

    def close(self) -> None:
        """End step_in_backward: gradients stay from now on, and step() uses them."""
        for hook in self._hooks:
            hook.remove()
        self._step_in_backward, self._hooks = False, []

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.__dict__ = {"_step_in_backward": False, "_hooks": [], "_stepped": {}, **self.__dict__}  # for a new copy
        for group in self.param_groups:  # one of torch.optim.AdamW does not have them all
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict) -> None:
        """Like torch's, but moments_dtype stays this optimizer's, and what a CUDA graph may know is filled in place."""
        if any(group.get(key) for group in state_dict["param_groups"] for key in ("amsgrad", "maximize")):
            raise ValueError("the state is of an AdamW with amsgrad or maximize, expected one without: start anew.")
        old_groups, old_state = self.param_groups, self.state
        super().load_state_dict({**state_dict, "state": {}})
        for group, old in zip(self.param_groups, old_groups):
            lr, group["moments_dtype"] = float(group["lr"]), old["moments_dtype"]
            group["lr"] = old["lr"].fill_(lr) if isinstance(old["lr"], torch.Tensor) else lr
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"]):
            for p, number in zip(group["params"], saved_group["params"]):
                if saved := state_dict["state"].get(number):
                    self.state[p] = old_state[p] or _new_state(p, group["moments_dtype"])
                    for key, tensor in self.state[p].items():
                        tensor.copy_(torch.as_tensor(saved[key]))
