"""The ledger of a training step's memory: every tensor's storage, from its birth to its death.

    born    an operation returns the storage.  PyTorch calls `TorchDispatchMode` for each operation,
            below autograd, in the forward and in the backward
    dies    nobody holds the storage any more: no Python variable and no node of the graph

The ledger also writes down who asked for a storage and in which stage of the step.  What a storage
is for follows from both: peak_attribution.py.  memory_estimate.py keeps a ledger of a step on meta
tensors, memory_profile.py of a real step.

Who asked is read from Python's stack.  A named range around a part would not do: a part with a
forward of its own, or with hooks, is called by its layer, and the fused layer calls no parts.
"""

import gc
import inspect
import math
import pkgutil
import sys
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.model.families import FAMILIES
from harness.model.patching import called_function
from harness.profiling.kernel_facts import KERNEL_ROWS
from harness.steps.stepping import trained
from next_steps.patches import apply_kernels

ROUNDING = 512  # bytes: the CUDA allocator's unit
PARAMETERS, STATE, GRADIENTS, BATCH = "parameters", "optimizer state", "gradients", "batch"
LOSS = "logits and loss"
EMBEDDING = 0  # its number among the layers, in the backward
ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "new_empty"),
    *("new_zeros", "zeros", "zeros_like"),
}
MODE_FUNCTIONS = "__torch_dispatch__", "<genexpr>", "<listcomp>"  # functions of modes

# Who asked for a tensor in the forward: the innermost of these functions on Python's stack.
KIND_OF_PART = {
    "RMSNorm": "normalization",
    "Attention": "attention",
    "MLP": "MLP",
    "DecoderLayer": "residual stream",
    "Model": "embedding",
    "ForCausalLM": LOSS,
}
KINDS_OF_FUNCTIONS = [
    *((f.part(p).forward, kind) for f in FAMILIES.values() for p, kind in KIND_OF_PART.items()),
    *((f.modeling.apply_rotary_pos_emb, "q and k, rotated") for f in FAMILIES.values()),
    (apply_kernels.Attention.forward, "attention"),
    (apply_kernels.attend, "attention"),
    (apply_kernels.DecoderLayer.compute, "residual stream"),
    (apply_kernels.ForCausalLM.forward, LOSS),
    *((pkgutil.resolve_name(f), kind) for row in KERNEL_ROWS for f, kind in row.allocates.items()),
]
KIND_OF_CODE = {
    inspect.unwrap(called_function(function)).__code__: kind
    for function, kind in KINDS_OF_FUNCTIONS
}
KINDS = [  # in the order of the tables
    *("normalization", "q and k, rotated", "v, gate, up (norm_linear)", "v, gate, up (fp8)"),
    *("attention", "MLP", "residual stream", "embedding", LOSS),
]


def kind_of_caller() -> str | None:
    """Return the kind of the innermost known function on the stack.

    The frames' variables are not read: reading would keep them alive, and that would be measured.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in KIND_OF_CODE:
        frame = frame.f_back
    return None if frame is None else KIND_OF_CODE[frame.f_code]


def operation_name(operation) -> str:
    """Return an operation's name; if it only allocates, the name of the function that called it."""
    name = operation.overloadpacket.__name__
    if name not in ALLOCATIONS:
        return name
    frame = sys._getframe(1)
    while frame.f_code.co_name in MODE_FUNCTIONS or frame.f_globals.get("__name__", "").startswith(
        "torch."
    ):
        frame = frame.f_back
    return frame.f_code.co_name


def is_transfer(operation, args) -> bool:
    """Return True for a copy from a meta tensor to a real one or back."""
    return operation is torch.ops.aten.copy_.default and args[0].is_meta != args[1].is_meta


@dataclass(eq=False)
class Block:
    """One storage.  Its birth and its death are numbers of the ledger's clock."""

    n_bytes: int  # rounded up to ROUNDING
    operation: str  # `operation_name` the operation that made it
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str | None
    stage: tuple[str, int | None]  # phase and layer at its birth
    born: int
    died: float = math.inf
    part: str | None = None  # where its owner is known


@dataclass(frozen=True)
class Sample:
    """The time since the sample before, and what the allocator says about it."""

    time: int  # the ledger's, at the sample's end
    stage: tuple[str, int | None]
    operation: str
    allocated: int | None  # the most bytes; None without a GPU
    reserved: int | None  # bytes at the sample's end


class Ledger(TorchDispatchMode):
    """Every storage on the device that operations return while the mode is on.

    After each operation it asks a GPU's allocator for the most bytes that it gave away meanwhile.
    """

    def __init__(self, device: str = "meta"):
        super().__init__()
        self.device = device
        self.blocks: list[Block] = []
        self.living: dict[int, Block] = {}  # by the storage's address
        self.samples: list[Sample] = []  # of the step: at least one of each stage
        self.launches = Counter()  # Triton's on meta tensors, by kernel
        self.time, self.stage = 0, (None, None)
        self.enter(None)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.device == "cpu":  # what Triton's interpreter has used stays in reference cycles
            gc.collect()
        # a copy between GPU and host: meta tensors have nothing to copy
        results = args[0] if is_transfer(operation, args) else operation(*args, **(kwargs or {}))
        name = operation_name(operation)
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                self.record(tensor, name)
        self.sample(name)
        return results

    def record(self, tensor: torch.Tensor, name: str) -> Block:
        """Return the block of the tensor's storage; views and results in place are known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.living:
            return self.living[key]
        size = math.ceil(storage.nbytes() / ROUNDING) * ROUNDING
        block = Block(
            size, name, tuple(tensor.shape), tensor.dtype, kind_of_caller(), self.stage, self.time
        )
        self.time += 1
        self.living[key] = block
        self.blocks.append(block)
        weakref.finalize(storage, self.forget, key).atexit = False
        return block

    def forget(self, key: int) -> None:
        self.living.pop(key).died = self.time
        self.time += 1

    def assign(self, part: str, *tensors: torch.Tensor) -> None:
        """Say what these tensors are for.  Storages older than the ledger begin to count here."""
        for tensor in tensors:
            if tensor.device.type == self.device:
                self.record(tensor, part).part = part

    def sample(self, operation: str = "none") -> None:
        """End a stretch of time."""
        allocated = reserved = None
        if self.device == "cuda":
            statistics = torch.cuda.memory_stats()
            allocated = statistics["allocated_bytes.all.peak"]
            reserved = statistics["reserved_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
        self.samples.append(Sample(self.time, self.stage, operation, allocated, reserved))

    def enter(self, phase: str | None, layer: int | None = None) -> None:
        """Begin a stage of the step.  Blocks that are born from now on belong to it."""
        self.sample()  # a sample is of one stage
        if (phase, layer) in ((None, None), ("forward", None)):
            self.forward_began = self.time
            if self.stage[0] != "backward":  # after it: the next micro-batch's forward
                self.begin_step()
        if phase == "backward" and self.stage[0] == "loss":
            self.forwards.append((self.forward_began, self.time))
        self.stage = phase, layer
        if not self.samples:  # with nothing but what was there before
            self.sample()

    def begin_step(self) -> None:
        self.began, self.samples = self.time, []
        self.forwards = []  # of each micro-batch: the moments of its beginning and end

    def follow_gradients(self, model: torch.nn.Module) -> None:
        """Claim the gradients; before the optimizer is made, whose hooks may free them."""
        for p in trained(model):
            p.register_post_accumulate_grad_hook(lambda p: self.assign(GRADIENTS, p.grad))

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Enter the stages by hooks on whole layers; assign parameters and optimizer state."""
        layers = model.model.layers
        model.register_forward_pre_hook(lambda *_: self.enter("forward"))
        for n, layer in enumerate(layers, start=1):
            layer.register_forward_pre_hook(lambda *_, n=n: self.enter("forward", n))
            layer.register_forward_hook(lambda *io, n=n: self.on_gradient(io[-1], n))
        layers[0].register_forward_pre_hook(
            lambda _, inputs: self.on_gradient(inputs[0], EMBEDDING)
        )
        layers[-1].register_forward_hook(lambda *_: self.enter("loss"))
        model.register_forward_hook(lambda *_: self.enter("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.enter("optimizer"))
        self.assign(PARAMETERS, *model.parameters(), *model.buffers())
        self.assign_state(optimizer)

    def assign_state(self, optimizer: torch.optim.Optimizer) -> None:
        self.assign(STATE, *(t for values in optimizer.state.values() for t in values.values()))

    def on_gradient(self, tensor: torch.Tensor, layer: int) -> None:
        """Enter the backward of a layer when its output's gradient, if it has one, is complete."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.enter("backward", layer))


def stage_in_words(phase: str, layer: int | None, n_layers: int) -> str:
    if phase == "backward" and not layer:
        return "backward of the embedding" if layer == EMBEDDING else "backward of the loss"
    return f"{phase} of layer {layer} of {n_layers}" if layer else phase
