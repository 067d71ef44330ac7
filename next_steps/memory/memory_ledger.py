"""The ledger of a training step's memory: every tensor's storage, from its birth to its death.

    born    an operation returns it: `TorchDispatchMode` is called for each, below autograd, forward
            and backward alike
    dies    nobody holds it any more: neither a Python variable nor, for the backward, the graph

Which part a storage belongs to follows from who asked for it and when it dies: what is born in the
forward and lives at its end is kept for the backward, and is called an activation here.

memory_estimate.py keeps it of a step on meta tensors, memory_profile.py of one that really runs.
"""

import inspect
import math
import pkgutil
import sys
import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.model.patching import called_function
from harness.profiling.kernel_facts import ROWS
from harness.steps.stepping import trained
from next_steps.patches import apply_kernels

# after the kernels, which decide how triton (imported by transformers) will run
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # isort: skip
from transformers.models.llama import modeling_llama  # isort: skip

ROUNDING = 512  # bytes: the CUDA allocator's unit
PARAMETERS, STATE, GRADIENTS, BATCH = "parameters", "optimizer state", "gradients", "batch"
KEPT, LOSS, TEMPORARY, WORKSPACES = (
    "activations",
    "logits and loss",
    "temporaries",
    "cuBLAS workspaces",
)
PARTS = [PARAMETERS, STATE, GRADIENTS, KEPT, LOSS, TEMPORARY, BATCH, WORKSPACES]
PHASES = ["forward", "loss", "backward", "optimizer"]
EMBEDDING = 0  # its number among the layers, in the backward
ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_zeros",
    "zeros",
    "zeros_like",
}
UNSEEN = "inside operations, rounding"  # what an allocator says beyond the parts
MEASURED_PARTS = [*PARTS, UNSEEN]


# Who asked for a tensor in the forward: the innermost of these functions on Python's stack.
KIND_OF_FUNCTION = {
    modeling_llama.LlamaRMSNorm.forward: "normalization",
    modeling_llama.apply_rotary_pos_emb: "q and k, rotated",
    modeling_llama.LlamaAttention.forward: "attention",
    apply_kernels.LlamaAttention.forward: "attention",
    sdpa_attention_forward: "attention",
    modeling_llama.LlamaMLP.forward: "MLP",
    modeling_llama.LlamaDecoderLayer.forward: "residual stream",
    apply_kernels.LlamaDecoderLayer.compute: "residual stream",
    modeling_llama.LlamaModel.forward: "embedding",
    modeling_llama.LlamaForCausalLM.forward: LOSS,
    apply_kernels.LlamaForCausalLM.forward: LOSS,
    **{
        pkgutil.resolve_name(function): kind
        for row in ROWS
        for function, kind in row.allocates.items()
    },
}
KIND_OF_CODE = {
    inspect.unwrap(called_function(function)).__code__: kind
    for function, kind in KIND_OF_FUNCTION.items()
}
KINDS = [  # in the order of the tables
    "normalization",
    "q and k, rotated",
    "v, gate, up (norm_linear)",
    "v, gate, up (fp8)",
    "attention",
    "MLP",
    "residual stream",
    "embedding",
    LOSS,
]


def kind_of_caller() -> str | None:
    """Not by looking into the frames: that would keep their variables alive, and be measured."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in KIND_OF_CODE:
        frame = frame.f_back
    return None if frame is None else KIND_OF_CODE[frame.f_code]


def name_of(operation) -> str:
    """Its name; of one that only allocates, the function's that asked for it."""
    name = operation.overloadpacket.__name__
    if name not in ALLOCATIONS:
        return name
    frame = sys._getframe(1)
    while frame.f_code.co_name in ("__torch_dispatch__", "<genexpr>", "<listcomp>") or in_torch(
        frame
    ):
        frame = frame.f_back
    return frame.f_code.co_name


def in_torch(frame) -> bool:
    return frame.f_globals.get("__name__", "").startswith("torch.")


@dataclass(eq=False)
class Block:
    """One storage, from birth to death in the ledger's time, which counts both."""

    n_bytes: int  # rounded up to ROUNDING
    operation: str  # `name_of` what made it
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str | None
    stage: tuple[str, int | None]  # in which it was born: phase and layer
    born: int
    died: float = math.inf
    part: str | None = None  # where its owner is known


class Ledger(TorchDispatchMode):
    """Every storage on the device that operations return while the mode is on."""

    def __init__(self, device: str = "meta"):
        super().__init__()
        self.device = device
        self.blocks: list[Block] = []
        self.living: dict[int, Block] = {}  # by the storage's address
        self.n_bytes, self.time, self.stage = 0, 0, (None, None)
        self.enter(None)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                self.record(tensor, name_of(operation))
        return results

    def record(self, tensor: torch.Tensor, name: str) -> Block:
        """The tensor's storage, born now if it is no view or result written to what was there."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.living:
            return self.living[key]
        size = math.ceil(storage.nbytes() / ROUNDING) * ROUNDING
        block = Block(
            size, name, tuple(tensor.shape), tensor.dtype, kind_of_caller(), self.stage, self.time
        )
        self.time += 1
        self.n_bytes += size
        self.living[key] = block
        self.blocks.append(block)
        weakref.finalize(storage, self.bury, key).atexit = False
        self.note_height(block.born)
        return block

    def note_height(self, moment: int) -> None:
        """The stage's highest sum, and when: now, if there was no higher one."""
        if self.n_bytes > self.peaks.get(self.stage, (-1, None))[0]:
            self.peaks[self.stage] = self.n_bytes, moment

    def bury(self, key: int) -> None:
        block = self.living.pop(key)
        block.died = self.time
        self.time += 1
        self.n_bytes -= block.n_bytes

    def claim(self, part: str, *tensors: torch.Tensor) -> None:
        """Say what these tensors' storages are; those from before the ledger begin to count."""
        for tensor in tensors:
            if tensor.device.type == self.device:
                self.record(tensor, part).part = part

    def enter(self, phase: str | None, layer: int | None = None) -> None:
        """What is born from now on is born in this stage of the step."""
        if self.begins_step(phase, layer):
            self.began, self.peaks = self.time, {}  # of each stage: its highest sum, and when
            self.forwards = []  # of each micro-batch: the time of its beginning and end
        if (phase, layer) == ("forward", None):
            self.forward_began = self.time
        if phase == "backward" and self.stage[0] == "loss":
            self.forwards.append((self.forward_began, self.time))
        self.stage = phase, layer
        self.note_height(self.time - 1)  # some allocate nothing

    def begins_step(self, phase: str | None, layer: int | None) -> bool:
        """Is it a step's first stage?  A forward after a backward is another micro-batch's."""
        return (phase, layer) in ((None, None), ("forward", None)) and self.stage[0] != "backward"

    def follow_gradients(self, model: torch.nn.Module) -> None:
        """Know the parameters' gradients.

        To be called before the optimizer is made, whose hooks may free them.
        """
        for p in trained(model):
            p.register_post_accumulate_grad_hook(lambda p: self.claim(GRADIENTS, p.grad))

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Know the step's stages, and whose storage is whose.

        Hooks on whole layers leave a fused layer fused.
        """
        layers = model.model.layers
        model.register_forward_pre_hook(lambda *_: self.enter("forward"))
        for number, layer in enumerate(layers, start=1):
            self.follow_layer(layer, number)
        layers[0].register_forward_pre_hook(
            lambda _, inputs: self.on_gradient(inputs[0], EMBEDDING)
        )
        layers[-1].register_forward_hook(lambda *_: self.enter("loss"))
        model.register_forward_hook(lambda *_: self.enter("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.enter("optimizer"))
        self.claim(PARAMETERS, *model.parameters(), *model.buffers())
        self.claim_state(optimizer)

    def claim_state(self, optimizer: torch.optim.Optimizer) -> None:
        self.claim(STATE, *(t for values in optimizer.state.values() for t in values.values()))

    def follow_layer(self, layer: torch.nn.Module, number: int) -> None:
        layer.register_forward_pre_hook(lambda *_: self.enter("forward", number))
        layer.register_forward_hook(lambda _, inputs, output: self.on_gradient(output, number))

    def on_gradient(self, tensor: torch.Tensor, layer: int) -> None:
        """Where the gradient of a layer's output is complete, the backward of that layer begins.

        A frozen embedding's output has none.
        """
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.enter("backward", layer))

    def part_of(self, block: Block) -> str:
        if block.part is not None:
            return block.part
        if block.kind == LOSS or block.stage == (
            "backward",
            None,
        ):  # that is the backward of the loss
            return LOSS
        kept = any(block.born < ended <= block.died for _, ended in self.forwards)
        return KEPT if kept else TEMPORARY

    def kept(self) -> list[Block]:
        """What the last forward left to its backward, logits and loss apart."""
        began, ended = self.forwards[-1]
        return [b for b in self.blocks if began <= b.born < ended and self.part_of(b) == KEPT]


def stage_in_words(phase: str, layer: int | None, n_layers: int) -> str:
    if phase == "backward" and not layer:
        return "backward of the embedding" if layer == EMBEDDING else "backward of the loss"
    return f"{phase} of layer {layer} of {n_layers}" if layer else phase
