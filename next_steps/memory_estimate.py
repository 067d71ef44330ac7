"""How much memory will a training step need, and when?  Told before the run, on any machine, from config.json alone.

    python profile_baseline.py --estimate --random-init --batch-size 4 --seq-len 2048 --kernels all

No formula that could forget a tensor: the training step itself is run, on PyTorch's *meta* tensors.  They have shapes,
dtypes, storages of so many bytes and an autograd graph, but no memory behind them, and an operation on them computes
nothing but the shapes of its results.  So 8 billion parameters take a second, and a ledger can see every storage:

    born    an operation returns it: `TorchDispatchMode` is called for each, below autograd, forward and backward alike
    dies    nobody holds it any more: neither a Python variable nor, for the backward, the graph

The sum of all that live, each rounded up to the allocator's 512 bytes, is what torch.cuda.memory_allocated() would
say, and the largest sum is the peak.  Which part a storage belongs to follows from who asked for it and when it dies:
what is born in the forward and lives at its end is kept for the backward, and is called an activation here.  The second
of two steps counts, because the first one creates the optimizer's state.  memory_profile.py keeps the same ledger of a
step that really runs.

Where a GPU is not like meta tensors: attention is one fused operation (`attention`), kernels are launched
(`pretended_gpu`), PyTorch's AdamW works on lists of tensors (`make_optimizer`), and cuBLAS takes a workspace for the
forward's thread and one for the backward's (CUBLAS_WORKSPACE).

Not seen, and so not counted:
- what an operation allocates and frees inside (attention's backward, the sort in the embedding's backward, the norm's
  partial sums, up to 8 MiB): it matters only if the peak falls into just that operation
- blocks that are up to 1 MiB larger than what was asked for, where the allocator found no better one
- batches that wait on the GPU, as all of profile_baseline.py's do; a CUDA graph's own stream, with a third workspace
- what PyTorch's allocator does not hold, and no recorded peak counts: the CUDA context, compiled kernels
The recorded runs of LLaMA 3.1 8B are met to 0.1 % (memory_estimate_test.py), all of them in bf16 on one H200.  In fp32
and on other GPUs no run has been compared; an older GPU's cuBLAS takes less.
"""

import argparse
import contextlib
import functools
import inspect
import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cross_entropy_kernel
import rmsnorm_kernel
from harness import llama, measure
from next_steps import (
    adamw_kernel,
    apply_kernels,
    fused_layer,
    linear_cross_entropy_kernel,
    llama_mlp,
    rope_kernel,
    swiglu_kernel,
)

# after the kernels, which decide how triton (imported by transformers) will run
from transformers import LlamaConfig  # isort: skip
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # isort: skip
from transformers.models.llama import modeling_llama  # isort: skip
from triton.runtime.jit import KernelInterface  # isort: skip

ROUNDING = 512  # bytes: the CUDA allocator's unit
CUBLAS_WORKSPACE = 32 * 2**20  # per thread and stream, on a Hopper GPU
PARAMETERS, STATE, GRADIENTS, BATCH = "parameters", "optimizer state", "gradients", "batch"
KEPT, LOSS, TEMPORARY, WORKSPACES = "activations", "logits and loss", "temporaries", "cuBLAS workspaces"
PARTS = [PARAMETERS, STATE, GRADIENTS, KEPT, LOSS, TEMPORARY, BATCH, WORKSPACES]
PHASES = ["forward", "loss", "backward", "optimizer"]
EMBEDDING = 0  # its number among the layers, in the backward
TOP = 3
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_zeros", "zeros", "zeros_like"}


# ---------------------------------------------------------------- in place of a GPU


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """scaled_dot_product_attention with the operation that PyTorch picks on a GPU; it looks at the device.

    In bf16 that is cuDNN's or flash attention: both keep q, k, v, the output and one fp32 per row.  In fp32 it is the
    memory-efficient one; but that knows no grouped queries, and then all T x T weights are kept.
    """
    aten, inputs = torch.ops.aten, (query, key, value, attn_mask)
    if query.dtype != torch.float32:
        return aten._scaled_dot_product_cudnn_attention(*inputs, True, dropout_p, is_causal, False, scale=scale)[0]
    if not enable_gqa:
        return aten._scaled_dot_product_efficient_attention(*inputs, True, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(
        *inputs, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def make_optimizer(model: torch.nn.Module, kernels: list[str]) -> torch.optim.Optimizer:
    optimizer = apply_kernels.make_optimizer(model, 1e-5, kernels)
    if isinstance(optimizer, torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["foreach"] = True  # PyTorch's own choice for tensors on a GPU
    return optimizer


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """What runs on a GPU takes meta tensors too, and launches nothing."""
    kernel_files = (
        rmsnorm_kernel, rope_kernel, swiglu_kernel, cross_entropy_kernel, linear_cross_entropy_kernel, adamw_kernel,
    )  # fmt: skip
    replaced = [
        (torch.nn.functional, "scaled_dot_product_attention", attention),
        (KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **options: None),  # kernel[grid](...)
        # kernels write where their launchers allocated; "interpreted" ones take tensors that are not on a GPU
        *((file, "INTERPRETED", True) for file in kernel_files),
        (torch.Tensor, "is_cpu", True),  # nor on a CPU
        (linear_cross_entropy_kernel, "_add_product", lambda *args, **options: None),  # a GPU needs no copy of a or b
        (torch, "is_autocast_enabled", lambda *device_type: False),  # does not know the device "meta"
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(llama.unpacked_sequences())  # transformers looks at positions; here they have no values
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


# ---------------------------------------------------------------- the ledger

# Who asked for a tensor in the forward: the innermost of these functions on Python's stack.
KIND_OF_FUNCTION = {
    modeling_llama.LlamaRMSNorm.forward: "normalization",
    rmsnorm_kernel.rmsnorm_forward: "normalization",
    modeling_llama.apply_rotary_pos_emb: "q and k, rotated",
    rope_kernel.rope_forward: "q and k, rotated",
    fused_layer.norm_linear: "v, gate, up (norm_linear)",
    modeling_llama.LlamaAttention.forward: "attention",
    apply_kernels.LlamaAttention.forward: "attention",
    sdpa_attention_forward: "attention",
    modeling_llama.LlamaMLP.forward: "MLP",
    llama_mlp.SwiGLUMLPFunction.forward: "MLP",
    fused_layer.swiglu_linear: "MLP",
    modeling_llama.LlamaDecoderLayer.forward: "residual stream",
    apply_kernels.LlamaDecoderLayer.forward: "residual stream",
    modeling_llama.LlamaModel.forward: "embedding",
    modeling_llama.LlamaForCausalLM.forward: LOSS,
    apply_kernels.LlamaForCausalLM.forward: LOSS,
}
KIND_OF_CODE = {inspect.unwrap(function).__code__: kind for function, kind in KIND_OF_FUNCTION.items()}
KINDS = list(dict.fromkeys(KIND_OF_FUNCTION.values()))


def kind_of_caller() -> str | None:
    """Not by looking into the frames: that would keep their variables alive, and change what is measured."""
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
    while frame.f_code.co_name in ("__torch_dispatch__", "<genexpr>", "<listcomp>") or in_torch(frame):
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
        self.n_bytes, self.time = 0, 0
        self.enter(None)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                self.record(tensor, name_of(operation))
        return results

    def record(self, tensor: torch.Tensor, name: str) -> Block:
        """The tensor's storage; if it is a new one, and no view or result written to what was there, it is born now."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.living:
            return self.living[key]
        size = math.ceil(storage.nbytes() / ROUNDING) * ROUNDING
        block = Block(size, name, tuple(tensor.shape), tensor.dtype, kind_of_caller(), self.stage, self.time)
        self.time += 1
        self.n_bytes += size
        self.living[key] = block
        self.blocks.append(block)
        weakref.finalize(storage, self.bury, key).atexit = False
        if self.n_bytes > self.peaks[self.stage][0]:
            self.peaks[self.stage] = self.n_bytes, block.born
        return block

    def bury(self, key: int) -> None:
        block = self.living.pop(key)
        block.died = self.time
        self.time += 1
        self.n_bytes -= block.n_bytes

    def claim(self, part: str, *tensors: torch.Tensor) -> None:
        """Say what these tensors' storages are; those that were there before the ledger begin to count."""
        for tensor in tensors:
            if tensor.device.type == self.device:
                self.record(tensor, part).part = part

    def enter(self, phase: str | None, layer: int | None = None) -> None:
        """What is born from now on is born in this stage of the step."""
        if (phase, layer) in ((None, None), ("forward", None)):  # a new step
            self.began, self.peaks = self.time, {}  # of each stage: its highest sum, and when
        if phase == "backward" and self.stage[0] == "loss":
            self.forward_ended = self.time
        self.stage = phase, layer
        self.peaks.setdefault(self.stage, (self.n_bytes, self.time - 1))  # some allocate nothing

    def follow_gradients(self, model: torch.nn.Module) -> None:
        """Know the parameters' gradients; to be called before the optimizer is made, whose hooks may free them."""
        for p in llama.trained(model):
            p.register_post_accumulate_grad_hook(lambda p: self.claim(GRADIENTS, p.grad))

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Know the step's stages, and whose storage is whose.  Hooks on whole layers leave a fused layer fused."""
        layers = model.model.layers
        model.register_forward_pre_hook(lambda *_: self.enter("forward"))
        for number, layer in enumerate(layers, start=1):
            self.follow_layer(layer, number)
        layers[0].register_forward_pre_hook(lambda _, inputs: self.on_gradient(inputs[0], EMBEDDING))
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
        """Where the gradient of a layer's output is complete, the backward of that layer begins."""
        tensor.register_hook(lambda gradient: self.enter("backward", layer))

    def part_of(self, block: Block) -> str:
        if block.part is not None:
            return block.part
        if block.kind == LOSS or block.stage == ("backward", None):  # that is the backward of the loss
            return LOSS
        return KEPT if block.born < self.forward_ended <= block.died else TEMPORARY

    def kept(self) -> list[Block]:
        """What the forward of the last step left to the backward, logits and loss apart."""
        return [b for b in self.blocks if b.born >= self.began and self.part_of(b) == KEPT]


def run_step(config: LlamaConfig, dtype: torch.dtype, batch_size: int, seq_len: int, kernels: list[str]) -> Ledger:
    """The ledger of two training steps, of which it remembers the second's stages."""
    with pretended_gpu(), Ledger() as ledger:
        model = llama.build_model(config, dtype, "meta")
        if model.config._attn_implementation != "eager":
            model.config._attn_implementation = "sdpa"  # the other fused ones keep the same
        with torch.device("meta"):
            ids, labels = (torch.empty((batch_size, seq_len), dtype=torch.int64) for _ in range(2))
        apply_kernels.apply_kernels(model, apply_kernels.model_kernels(kernels))
        ledger.follow_gradients(model)
        optimizer = make_optimizer(model, kernels)
        ledger.follow(model, optimizer)
        ledger.claim(BATCH, ids, labels)
        batch = llama.Batch(ids, labels, n_tokens=ids.numel())
        llama.training_step(model, optimizer, batch)
        ledger.claim_state(optimizer)  # which the first step made
        llama.training_step(model, optimizer, batch)
    return ledger


def step_tryer(kernels: Sequence[str]) -> Callable[[LlamaConfig], object]:
    """For `llama.load_config`: two steps with these kernels, which raise what the kernels refuse."""
    return functools.partial(run_step, dtype=torch.float32, batch_size=1, seq_len=2, kernels=list(kernels))


# ---------------------------------------------------------------- the estimate


def estimate(config: LlamaConfig, dtype: torch.dtype, batch_size: int, seq_len: int, kernels: list[str]) -> dict:
    """The peak of a training step in bytes, when it is reached, and what it is made of."""
    ledger = run_step(config, dtype, batch_size, seq_len, kernels)
    (phase, layer), (peak, moment) = max(ledger.peaks.items(), key=lambda item: item[1][0])
    workspaces = 2 * CUBLAS_WORKSPACE
    parts = dict.fromkeys(PARTS, 0) | {WORKSPACES: workspaces}
    made_by = defaultdict(lambda: {"tensors": 0, "bytes": 0})  # what is neither the model's nor kept, by operation
    for block in ledger.blocks:
        if block.born <= moment < block.died:
            part = ledger.part_of(block)
            parts[part] += block.n_bytes
            if part in (LOSS, TEMPORARY):
                made_by[block.operation]["tensors"] += 1
                made_by[block.operation]["bytes"] += block.n_bytes
    in_layers, outside = defaultdict(int), 0
    for block in ledger.kept():
        if block.stage[1] is None:
            outside += block.n_bytes
        else:
            in_layers[block.kind] += block.n_bytes
    phases = dict.fromkeys(PHASES, 0)
    for (name, _), (n_bytes, _) in ledger.peaks.items():
        phases[name] = max(phases[name], n_bytes + workspaces)
    return {
        "kernels": kernels, "peak_memory_bytes": peak + workspaces, "phase": phase, "layer": layer, "parts": parts,
        "made_by": dict(sorted(made_by.items(), key=lambda item: -item[1]["bytes"])),
        "kept_in_layers": dict(in_layers), "kept_outside": outside, "phases": phases,
    }  # fmt: skip


def report(args: argparse.Namespace) -> None:
    """Print the estimate for the flags of profile_baseline.py, that of the baseline beside it, and write the record."""
    with mock.patch.object(llama, "HAS_GPU", True):  # no model is too large
        config = llama.load_config(args, step_tryer(args.kernels))
    shape = llama.DTYPES[args.dtype], args.batch_size, args.seq_len
    record = {
        "kind": "estimate", "environment": measure.environment(), "model": args.model,
        "weights": llama.weights_in_words(args),
        "parameters": llama.parameter_count(config), "layers": config.num_hidden_layers, "dtype": args.dtype,
        "batch_size": args.batch_size, "seq_len": args.seq_len, "kernels": args.kernels,
        "estimates": [estimate(config, *shape, names) for names in ([], args.kernels)[: 1 + bool(args.kernels)]],
    }  # fmt: skip
    print(render(record))
    measure.write_record(args.json, record)


# ---------------------------------------------------------------- output


def stage_in_words(phase: str, layer: int | None, n_layers: int) -> str:
    if phase == "backward" and not layer:
        return "backward of the embedding" if layer == EMBEDDING else "backward of the loss"
    return f"{phase} of layer {layer} of {n_layers}" if layer else phase


def moment_line(name: str, estimated: dict, n_layers: int) -> str:
    """When the peak is reached, and which operations made most of what is neither the model's nor kept."""
    largest = [
        f"{row['tensors']} of {operation}, {row['bytes'] / 1e6:,.1f} MB"
        for operation, row in list(estimated["made_by"].items())[:TOP]
        if row["bytes"] > 1e-3 * estimated["peak_memory_bytes"]
    ]
    where = stage_in_words(estimated["phase"], estimated["layer"], n_layers)
    return f"{name}: the peak is in the {where}; made there: {'; '.join(largest) or 'nothing'}"


def render(record: dict) -> str:
    """Everything that the script prints about an estimate, from its record."""
    estimates, n_layers = record["estimates"], record["layers"]
    names = ["none", "chosen"][: len(estimates)]
    unit_name, unit = measure.decimal_unit([e["peak_memory_bytes"] for e in estimates], "GB", "MB", 1e9)

    def row(label: str, values: list[int], unit: float = unit) -> list[str]:
        return [label, *(f"{value / unit:,.2f}" for value in values)]

    kept = [e["kept_in_layers"] for e in estimates]
    kinds = [kind for kind in KINDS if any(kind in table for table in kept)]
    layers = [sum(table.values()) for table in kept]
    kept_rows = [row(kind, [table.get(kind, 0) / n_layers for table in kept], 1e6) for kind in kinds]
    kept_rows.append(row("one layer", [total / n_layers for total in layers], 1e6))
    kept_rows.append(row(f"{n_layers} layers", layers, 1e6))
    kept_rows.append(row("embedding, angles, last norm", [e["kept_outside"] for e in estimates], 1e6))
    part_rows = [row(part, [e["parts"][part] for e in estimates]) for part in PARTS]
    part_rows.append(row("Total", [e["peak_memory_bytes"] for e in estimates]))
    phase_rows = [row(phase, [e["phases"][phase] for e in estimates]) for phase in PHASES]
    return "\n".join(
        [
            measure.environment_line(record["environment"]),
            llama.workload_line(record),
            "",
            measure.title("Memory of a training step (estimate)"),
            measure.table(["Kept for the backward, MB", *names], kept_rows),
            "",
            measure.table([f"At the peak, {unit_name}", *names], part_rows),
            "",
            measure.table([f"Highest in each phase, {unit_name}", *names], phase_rows),
            "",
            *(moment_line(name, estimated, n_layers) for name, estimated in zip(names, estimates)),
        ]
    )
