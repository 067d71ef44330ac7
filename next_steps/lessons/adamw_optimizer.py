"""TritonAdamW: torch.optim.AdamW with the kernel of adamw_kernel.py, or that of adamw8.py.

    optimizer = TritonAdamW(model.parameters(), lr, step_in_backward=True)
    loss.backward()     # steps each parameter as soon as its gradient is complete
    optimizer.step()    # only counts then

The kernel steps one parameter.  The class adds groups of settings, state that is saved and loaded,
hooks that step inside the backward, and DTensors, whose local shards it hands to the kernel.

step_in_backward=True frees each gradient as soon as it was used: for 8 billion bf16 parameters 16
GB less memory at the peak.  Where gradients of several backwards are added up, the last backward
steps, and all gradients exist before it.

Limits: those of adamw_kernel.py; fp16 parameters get fp32 moments.  Before a CUDA graph captures a
step, one step must have been made, which creates the state.  In a graph an lr or a beta that is to
change must be a tensor on the GPU that is filled in place.  PyTorch's schedulers fill lr so.
Schedulers that also cycle the momentum put a new number in the first beta's place, which no graph
sees.
"""

import collections
import contextlib
import copy
import functools
import math
import numbers
import weakref

import torch

from kernel_support import FLOATS, PLAIN, check_memory
from next_steps.lessons.adamw8 import (
    Moments,
    adamw8_step,
    dequantize_moments,
    new_moments,
    quantize_moments,
)
from next_steps.lessons.adamw_kernel import MOMENTS, adamw_step, check_overlap, is_real_number

# ---- A gradient that is no more
#
# clip_grad_norm_ passes over parameters without a gradient.  After a backward that has used all
# gradients, it would clip nothing and return 0.  So each .grad holds a UsedGradient instead.

SECOND_GRADIENT = (
    "a second gradient reached a parameter before step(), and step_in_backward=True has used the"
    " first: call step() after each backward, or accumulate in accumulating(), or use"
    " TritonAdamW without it."
)
CLIPPED = (
    "a gradient is to be clipped, changed or read, and step_in_backward=True has used it: use"
    " TritonAdamW without it, or clip nothing (transformers.Trainer: max_grad_norm=0)."
)


class UsedGradient(torch.Tensor):
    """Stands for a gradient that the backward has used, and for its norm; holds no memory.

    transformers.Trainer asks for the norm for its log, by clipping to infinity.  The norm is
    unknown: NaN.  All other operations are refused.
    """

    @staticmethod
    @functools.cache  # parameters of one shape share one: making one takes longer than a step
    def __new__(cls, dtype: torch.dtype, device: torch.device, shape: torch.Size):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __rtruediv__(self, max_norm):
        """Return clip_grad_norm_'s factor, 1 for an infinite max_norm."""
        return self if max_norm == math.inf else super().__rtruediv__(max_norm)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name in ("add", "add_") and isinstance(args[1], torch.Tensor):  # autograd does
            raise RuntimeError(SECOND_GRADIENT)
        if name in ("linalg_vector_norm", "stack", "add", "clamp", "_to_copy"):  # of the norm
            like = args[0][0] if name == "stack" else args[0]
            return cls(like.dtype, like.device, torch.Size())
        if name == "_local_scalar_dense":  # .item()
            return math.nan
        if name in ("mul_", "_foreach_mul_") and isinstance(args[1], cls):  # by the factor 1
            return args[0] if name == "mul_" else None
        raise RuntimeError(CLIPPED)


# ---- The optimizer


# Settings of how to compute, not what.  They stay an optimizer's own when it loads a state.
MODES = ("foreach", "capturable", "differentiable", "fused", "moments_dtype")
# A state's count of steps, and its moments.  With codes no key is torch.optim.AdamW's, which would
# step with them as moments: its load_state_dict looks for "step" and raises.
PLAIN_STATE = "step", "exp_avg", "exp_avg_sq"
CODED_STATE = "coded_step", "exp_avg_codes", "exp_avg_sq_codes", "scales"


class TritonAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW in one kernel per parameter, with its `state_dict` keys but for codes.

    A step never waits for the GPU.  Of a DTensor, as fully_shard (FSDP2) makes them, each process
    steps its local shard, and the moments are DTensors of the same placements.  FSDP2 runs the
    hooks of step_in_backward itself, once a gradient is reduced.

    Args:
        lr, betas, eps, weight_decay: numbers, or tensors of one number.  The host reads a tensor on
            the CPU.  The kernel reads a tensor on the parameters' GPU, anew in each replay of a
            captured CUDA graph.
        capturable: True and False are the same, because every step can be captured.
        amsgrad, foreach, differentiable, fused: PyTorch's arguments; True is refused.
        moments_dtype: float32 or bfloat16; None: the parameter's, but float32 for float16; uint8:
            codes of 8 bits with scales, which torch.optim.AdamW cannot load.
        stochastic_rounding: round bfloat16 weights and moments up or down at random, codes never.
        step_in_backward: update each parameter during the backward and free its gradient at once;
            step() then only counts.  To accumulate gradients, put every backward but the last into
            `with optimizer.accumulating():`; a second backward before step() raises without it.
            step() uses the gradients that the last backward did not reach.  It also uses those of
            parameters that are no DTensors where there is a process group, because DDP averages
            gradients only after autograd has made them.  Gradients cannot be clipped or unscaled:
            until step() a stepped parameter's .grad is a UsedGradient, which refuses that.  A copy
            of the optimizer (copy.deepcopy, pickle) steps in step() alone.
        seed: of the random bits.  They also depend on the step and on the places of the parameter
            and the element, but not on how many processes share the parameter.

    Raises:
        TypeError, ValueError: an option is out of range, or the kernel cannot take a parameter that
            requires a gradient.  Nothing was changed then.
    """

    _accumulating = False

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False,
        *, maximize=False, foreach=None, capturable=False, differentiable=False, fused=None,
        moments_dtype=None, seed=0, stochastic_rounding=False, step_in_backward=False,
    ):  # fmt: skip
        defaults = dict(locals())  # the arguments, but for these:
        for name in ("self", "__class__", "params", "step_in_backward"):
            del defaults[name]
        self._step_in_backward, self._hooks, self._stepped = False, [], {}
        weakref.finalize(self, lambda hooks: [hook.remove() for hook in hooks], self._hooks)
        super().__init__(params, defaults)
        if step_in_backward:  # no parameter gets a hook before all groups are accepted
            for group in self.param_groups:
                _refuse_gradients(group)
            self._step_in_backward = True
            for number in range(len(self.param_groups)):
                self._register_hooks(number)

    def add_param_group(self, param_group: dict) -> None:
        """Like torch's; a group that is refused is not added."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # until nothing can refuse the group any more
        _check_group(group)
        if self._step_in_backward:
            _refuse_gradients(group)
        self.param_groups.append(group)
        if self._step_in_backward:
            self._register_hooks(len(self.param_groups) - 1)

    def _register_hooks(self, group_number: int) -> None:
        before = sum(len(group["params"]) for group in self.param_groups[:group_number])
        for index, p in enumerate(self.param_groups[group_number]["params"], start=before):
            if p.requires_grad:
                # A proxy: Python's collector does not see what a hook holds, so the hook would keep
                # self and all of p alive.
                step = functools.partial(type(self)._step_parameter_now, weakref.proxy(self))
                hook = functools.partial(step, group_number, index)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def _step_parameter(self, group: dict, index: int, p: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[p]
        if not state:
            state.update(new_state(p, group["moments_dtype"]))
        if _is_dtensor(p) and grad.placements != p.placements:
            # under tensor parallelism the gradient may still be a sum to be made
            grad = grad.redistribute(p.device_mesh, p.placements)
        rounding, coded = group["stochastic_rounding"], "scales" in state
        n_steps, *moments = (_local(state[key]) for key in (CODED_STATE if coded else PLAIN_STATE))
        place = {} if coded else {"offset": offset_of(p) if rounding else 0}
        (adamw8_step if coded else adamw_step)(
            _local(p),
            _local(grad),
            *moments,
            n_steps,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["seed"] if rounding else None,
            index,
            group["maximize"],
            **place,
        )
        torch.autograd.graph.increment_version(p)  # autograd cannot see what a kernel writes
        self._stepped[p] = n_steps

    def _step_parameter_now(self, group_number: int, index: int, p: torch.Tensor) -> None:
        if (self._accumulating and p not in self._stepped) or _averaged_later(p):
            return  # the next backward adds to the gradient, or DDP has yet to average it
        grad, p.grad = p.grad, UsedGradient(p.dtype, p.device, p.shape)
        group = self.param_groups[group_number]  # now: load_state_dict makes new groups
        self._step_parameter(group, index, p, grad)

    @contextlib.contextmanager
    def accumulating(self):
        """Backwards in here only add up gradients; the backward after them steps with the sums."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _forget_used(self) -> None:
        for p in self._stepped:
            if isinstance(p.grad, UsedGradient):
                p.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        """Like torch's: return the closure's result, if there is a closure."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._forget_used()
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        left = [(i, group, p) for i, (group, p) in enumerate(params) if p.grad is not None]
        if any(p in self._stepped for _, _, p in left):
            given = "a gradient is there of a parameter that the backward has stepped"
            raise RuntimeError(f"{given}: leave .grad alone.")
        if self._step_in_backward and not self._stepped and not left:
            given = "no backward has stepped a parameter since the last step()"
            raise RuntimeError(f"{given}: call loss.backward() first.")
        for index, group, p in left:
            self._step_parameter(group, index, p, p.grad)
        if self._stepped:
            # The count is on the GPU, so a graph's replays count too.
            torch._foreach_add_(list(self._stepped.values()), 1)
            self._stepped.clear()
        return loss

    def close(self) -> None:
        """End step_in_backward: gradients stay from now on, and step() uses them."""
        for hook in self._hooks:
            hook.remove()
        self._step_in_backward, self._hooks = False, []

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for_a_new_copy = {"_step_in_backward": False, "_hooks": [], "_stepped": {}}
        self.__dict__ = {**for_a_new_copy, **self.__dict__}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Like torch's, but this optimizer keeps its MODES, and fills its own tensors.

        A CUDA graph may know these tensors.

        Raises:
            TypeError, ValueError: the state does not fit.  Nothing was changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if saved_sizes != sizes:
            given = f"the state is of groups of {saved_sizes} parameters"
            raise ValueError(f"{given}, expected {sizes}: load the state of an equal model.")
        groups, loaded, state, filled = [], {}, {}, {}
        for own, saved in zip(self.param_groups, saved_groups):
            groups.append(self._loaded_group(own, saved, filled))
            for p, number in zip(own["params"], saved["params"]):
                if saved_state.get(number):
                    loaded[p] = _loaded_state(number, p, saved_state[number])
                    state[p] = self.state.get(p) or new_state(p, groups[-1]["moments_dtype"])

        for p in loaded:  # from here on, nothing is refused
            for key, tensor in _with_keys_of(state[p], loaded[p]).items():
                _local(state[p][key]).copy_(_local(tensor))
        for tensor, number in filled.items():
            tensor.fill_(number)
        self._forget_used()
        self._stepped.clear()
        self.__setstate__({"state": collections.defaultdict(dict, state), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_group(self, own: dict, saved: dict, filled: dict[torch.Tensor, float]) -> dict:
        """Return the saved settings for a group; `filled` gains what its own tensors become."""
        group = {**self.defaults, **copy.deepcopy(saved)}
        group.update({key: own[key] for key in ("params", *MODES)})
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
        _check_group(group)
        for name in ("lr", "eps", "weight_decay"):
            group[name] = _kept(own[name], group[name], filled)
        pairs = zip(own["betas"], group["betas"])
        group["betas"] = tuple(_kept(*pair, filled) for pair in pairs)
        return group


# ---- Parameters that several processes share


def _is_dtensor(t: torch.Tensor) -> bool:
    if type(t) in PLAIN or not torch.distributed.is_available():
        return False
    # The import takes a second.  Whoever has a DTensor has imported it already.
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def _local(t: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of t."""
    with torch.no_grad():
        return t.to_local() if _is_dtensor(t) else t


def offset_of(p: torch.Tensor) -> int:
    """Return the place of this process's first element in the whole parameter."""
    if not _is_dtensor(p) or not _local(p).numel():
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return first[0] * math.prod(p.shape[1:]) if first else 0


def _averaged_later(p: torch.Tensor) -> bool:
    """Return True if DDP, of which p does not know, may read p's gradient after the hooks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return not _is_dtensor(p) or torch.distributed.get_world_size() > p.device_mesh.size()


# ---- An optimizer's groups and states


def new_state(p: torch.Tensor, moments_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the state of a parameter that has made no step."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        given = "a parameter without state is captured, and each replay would reset it"
        raise RuntimeError(f"{given}: make a step before.")
    n_steps = torch.zeros((), dtype=torch.float32, device=p.device)
    if moments_dtype == torch.uint8:
        return dict(zip(CODED_STATE, (n_steps, *new_moments(p))))
    dtype = moments_dtype or (torch.float32 if p.dtype == torch.float16 else p.dtype)
    return dict(zip(PLAIN_STATE, (n_steps, *(torch.zeros_like(p, dtype=dtype) for _ in range(2)))))


def _check_group(group: dict) -> None:
    """Refuse a group that no step can take; convert its numbers to Python's."""
    for p in group["params"]:
        if p.requires_grad:  # a frozen parameter may be anything
            check_memory("a parameter", _local(p), FLOATS)
            check_overlap("a parameter", _local(p))
            if _is_dtensor(p):
                _check_placements(p, group["stochastic_rounding"])
                if group["moments_dtype"] == torch.uint8:
                    given = "a parameter is a DTensor, whose shards may end inside of blocks"
                    raise ValueError(f"{given}, and moments_dtype is torch.uint8: choose another.")

    def within(value, below: float = math.inf) -> bool:
        return is_real_number(value) and 0.0 <= value < below

    def plain(value) -> float | torch.Tensor:
        return value if isinstance(value, torch.Tensor) else float(value)

    for name in ("amsgrad", "foreach", "fused", "differentiable"):
        if group[name]:
            given = f"{name} is {group[name]}, which TritonAdamW does not support"
            raise ValueError(f"{given}, expected False: leave it out.")
    betas, seed, rounding = group["betas"], group["seed"], group["stochastic_rounding"]
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    float16 = any(p.dtype == torch.float16 for p in group["params"])
    for name, valid, expected in (
        ("lr", within(group["lr"]), "a number of at least 0"),
        ("betas", two and all(within(b, 1.0) for b in betas), "two numbers from 0 to below 1"),
        ("eps", within(group["eps"]), "a number of at least 0"),
        ("weight_decay", within(group["weight_decay"]), "a number of at least 0"),
        (
            "moments_dtype",
            group["moments_dtype"] in (None, *MOMENTS, torch.uint8),
            "float32, bfloat16, uint8 or None",
        ),
        ("stochastic_rounding", not (rounding and float16), "False for float16 parameters"),
        ("seed", whole and 0 <= seed < 2**63, "a whole number from 0 to below 2**63"),
    ):
        if not valid:
            raise ValueError(f"{name} is {group[name]}, expected {expected}: choose another.")
    group.update({name: plain(group[name]) for name in ("lr", "eps", "weight_decay")})
    group.update(betas=tuple(map(plain, betas)), seed=int(seed))


def _refuse_gradients(group: dict) -> None:
    if any(p.grad is not None for p in group["params"]):
        given = "a parameter has a gradient, and step_in_backward=True would add to it"
        raise ValueError(f"{given}: free it.")


def _check_placements(p: torch.Tensor, rounding: bool) -> None:
    """Refuse a sum yet to be made and, if bits are to be drawn, a shard that is not whole rows."""
    from torch.distributed.tensor import Replicate, Shard

    given = f"a parameter has the placements {p.placements}"
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(f"{given}, expected no Partial: redistribute() it.")
    kinds = [(type(place), getattr(place, "dim", None)) for place in p.placements]
    rows = set(kinds) <= {(Replicate, None), (Shard, 0)}
    if rounding and not (rows and _local(p).is_contiguous()):
        expected = "expected contiguous Shard(0) for stochastic_rounding"
        raise ValueError(f"{given} and strides {p.stride()}, {expected}: leave that out.")


def _loaded_state(number: int, p: torch.Tensor, saved: dict) -> dict[str, torch.Tensor]:
    """Return what a state_dict holds for a parameter; refuse it unless it fits."""
    loaded, n_steps = {}, torch.zeros((), dtype=torch.float32)
    if "scales" in saved:
        codes = new_moments(torch.empty_like(_local(p), device="meta"))
        expected_tensors = zip(CODED_STATE, (n_steps, *codes))
    else:
        expected_tensors = zip(PLAIN_STATE, (n_steps, p, p))
    for key, like in expected_tensors:
        name = f"{key} of parameter {number}"
        if key not in saved:
            raise ValueError(f"{name} is missing in the state, expected an AdamW's: load another.")
        tensor = torch.as_tensor(saved[key], dtype=torch.float32 if like is n_steps else None)
        if _is_dtensor(like) or _is_dtensor(tensor):
            given, expected = (getattr(t, "placements", None) for t in (tensor, like))
            if given != expected:
                advice = "load it with torch.distributed.checkpoint.state_dict"
                raise TypeError(f"{name} has placements {given}, expected {expected}: {advice}.")
        floats = *FLOATS, torch.float64
        check_memory(name, _local(tensor), floats if like.is_floating_point() else [like.dtype])
        if (tensor.shape, _local(tensor).shape) != (like.shape, _local(like).shape):
            given = f"{name} has shape {tuple(tensor.shape)}, expected {tuple(like.shape)}"
            raise ValueError(f"{given}: load the state of an equal model.")
        loaded[key] = tensor
    return loaded


def _with_keys_of(own: dict, loaded: dict) -> dict[str, torch.Tensor]:
    """Return what was loaded; where only one of both has codes, in the other's form."""
    if own.keys() == loaded.keys():
        return loaded
    step, *moments = loaded.values()
    if "scales" in loaded:
        moments = dequantize_moments(Moments(*moments), torch.float32)
    else:
        moments = quantize_moments(*(t.float() for t in moments))
    return dict(zip(own, (step, *moments)))


def _kept(own, saved, filled: dict[torch.Tensor, float]) -> float | torch.Tensor:
    """Return an optimizer's own tensor, which is to be filled, or the saved number without one."""
    number = float(saved)
    if not isinstance(own, torch.Tensor):
        return number
    if filled.setdefault(own, number) != number:
        given = f"one tensor is to be filled with {filled[own]} and with {number}"
        raise ValueError(f"{given}, expected one number: give each group a tensor of its own.")
    return own
