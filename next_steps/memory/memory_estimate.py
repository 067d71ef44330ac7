"""How much memory will a training step need, and when?  Told from config.json, on any machine.

    python profile_baseline.py --estimate --random-init --batch-size 4 --seq-len 2048 --kernels all

No formula that could forget a tensor: the training step itself is run, on PyTorch's *meta* tensors.
They have shapes, dtypes, storages of so many bytes and an autograd graph, but no memory behind
them, and an operation on them computes nothing but the shapes of its results.  So 8 billion
parameters take a second, and the ledger of memory_ledger.py can see every storage from its birth to
its death.

The sum of all that live, each rounded up to the allocator's 512 bytes, is what
torch.cuda.memory_allocated() would say, and the largest sum is the peak.  The second of two steps
counts, because the first one creates the optimizer's state.  Of its micro-batches MICRO_BATCHES
are run: all others are as the last but one.

Where a GPU is not like meta tensors: attention is one fused operation (`attention`), kernels are
launched (`pretended_gpu`), PyTorch's AdamW works on lists of tensors (`make_optimizer`), and cuBLAS
takes a workspace for the forward's thread and one for the backward's (CUBLAS_WORKSPACE).

Not seen, and so not counted:
- what an operation allocates and frees inside (attention's backward, the sort in the embedding's
  backward, the norm's partial sums, up to 8 MiB): it matters only if the peak falls into just that
  operation
- blocks that are up to 1 MiB larger than what was asked for, where the allocator found no better
- batches that wait on the GPU, as all of profile_baseline.py's do; a CUDA graph's own stream, with
  a third workspace
- what PyTorch's allocator does not hold, and no recorded peak counts: the CUDA context, compiled
  kernels
The recorded runs of LLaMA 3.1 8B are met to 0.1 % (memory_estimate_test.py), all of them in bf16 on
one H200.  In fp32 and on other GPUs no run has been compared; an older GPU's cuBLAS takes less.
"""

import contextlib
import functools
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch

import kernel_support
from harness.cli import tables
from harness.cli.workload import Workload, workload_line
from harness.data import dataset
from harness.model import architecture, config_file
from harness.model.adapters import add_adapters, lora_counts
from harness.model.architecture import TORCH_DTYPES
from harness.profiling.kernel_facts import ROWS
from harness.records import run_records
from harness.steps import stepping
from next_steps.lessons import linear_cross_entropy_kernel
from next_steps.memory.memory_ledger import (
    BATCH,
    KINDS,
    LOSS,
    PARTS,
    PHASES,
    TEMPORARY,
    WORKSPACES,
    Ledger,
    stage_in_words,
)
from next_steps.patches import apply_kernels, offload, patch, quantize

# after the kernels, which decide how triton (imported by transformers) will run
from transformers import LlamaConfig  # isort: skip
from triton.runtime.jit import KernelInterface  # isort: skip

CUBLAS_WORKSPACE = 32 * 2**20  # per thread and stream, on a Hopper GPU
MICRO_BATCHES = 3  # the first finds no gradients, the last may free them
TOP = 3


# ---------------------------------------------------------------- in place of a GPU


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """scaled_dot_product_attention by the operation that PyTorch picks on a GPU.

    Its own function looks at the device.

    In bf16 that is cuDNN's or flash attention: both keep q, k, v, the output and one fp32 per row.
    In fp32 it is the memory-efficient one; but that knows no grouped queries, and then all T x T
    weights are kept.
    """
    aten, inputs = torch.ops.aten, (query, key, value, attn_mask)
    if query.dtype != torch.float32:
        return aten._scaled_dot_product_cudnn_attention(
            *inputs, True, dropout_p, is_causal, False, scale=scale
        )[0]
    if not enable_gqa:
        return aten._scaled_dot_product_efficient_attention(
            *inputs, True, dropout_p, is_causal, scale=scale
        )[0]
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
    lessons = [importlib.import_module(row.lesson) for row in ROWS if row.launches]
    kernel_files = [kernel_support, *lessons]
    replaced = [
        (torch.nn.functional, "scaled_dot_product_attention", attention),
        # kernel[grid](...)
        (
            KernelInterface,
            "__getitem__",
            lambda kernel, grid: lambda *args, **options: None,
        ),
        # kernels write where their launchers allocated; "interpreted" ones take tensors that are
        # not on a GPU
        *((file, "INTERPRETED", True) for file in kernel_files if hasattr(file, "INTERPRETED")),
        (torch.Tensor, "is_cpu", True),  # nor on a CPU
        # a GPU needs no copy of a or b
        (
            linear_cross_entropy_kernel,
            "_add_product",
            lambda *args, **options: None,
        ),
        # what is offloaded has no memory here either
        (offload, "pinned", lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8, device="cpu")),
        (offload, "transfer", lambda target, source: None),
        (offload, "host_memory", lambda: math.inf),
        # does not know the device "meta"
        (
            torch,
            "is_autocast_enabled",
            lambda *device_type: False,
        ),
    ]
    with contextlib.ExitStack() as stack:
        # transformers looks at positions; here they have no values
        stack.enter_context(architecture.unpacked_sequences())
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def run_step(config: LlamaConfig, workload: Workload, ledger: Ledger | None = None) -> Ledger:
    """The ledger of two training steps, of which it remembers the second's stages."""
    kernels = workload.kernels
    with pretended_gpu(), ledger or Ledger() as ledger:
        model = architecture.build_model(config, TORCH_DTYPES[workload.dtype], "meta")
        if workload.quantize:
            quantize.quantize_model(model)
        add_adapters(model, workload)
        if model.config._attn_implementation != "eager":
            model.config._attn_implementation = "sdpa"  # the other fused ones keep the same
        shape = workload.batch_size, workload.seq_len
        batches = [dataset.random_batch(shape, 1, "meta") for _ in range(workload.micro_batches)]
        patch.patch(model, workload)
        ledger.follow_gradients(model)
        optimizer = make_optimizer(model, kernels)
        ledger.follow(model, optimizer)
        for batch in batches:
            ledger.claim(BATCH, *stepping.tensors_of(batch).values())
        stepping.training_step(model, optimizer, batches[:MICRO_BATCHES])
        ledger.claim_state(optimizer)  # which the first step made
        stepping.training_step(model, optimizer, batches[:MICRO_BATCHES])
    return ledger


def step_tryer(kernels: Sequence[str]) -> Callable[[LlamaConfig], object]:
    """For `load_config`: two steps with these kernels, which raise what the kernels refuse."""
    small = Workload(dtype="fp32", seq_len=2, kernels=tuple(kernels))
    return functools.partial(run_step, workload=small)


# ---------------------------------------------------------------- the estimate


def estimate(config: LlamaConfig, workload: Workload) -> dict:
    """The peak of a training step in bytes, when it is reached, and what it is made of.

    What is kept for the backward is of one micro-batch.  What waits in the host's memory is not
    counted.
    """
    ledger = run_step(config, workload)
    (phase, layer), (peak, moment) = max(ledger.peaks.items(), key=lambda item: item[1][0])
    workspaces = 2 * CUBLAS_WORKSPACE
    parts = dict.fromkeys(PARTS, 0) | {WORKSPACES: workspaces}
    # what is neither the model's nor kept, by operation
    made_by = defaultdict(lambda: {"tensors": 0, "bytes": 0})
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
        "kernels": list(workload.kernels),
        "peak_memory_bytes": peak + workspaces,
        "phase": phase,
        "layer": layer,
        "parts": parts,
        "made_by": dict(sorted(made_by.items(), key=lambda item: -item[1]["bytes"])),
        "kept_in_layers": dict(in_layers),
        "kept_outside": outside,
        "phases": phases,
    }


def report(workload: Workload, record_to: str | None = None) -> None:
    """Print the estimate for a workload, the baseline's beside it, and write the record."""
    config = config_file.load_config(workload, step_tryer(workload.kernels), for_gpu=True)
    baseline = replace(workload, kernels=(), fp8=None, recompute=None, offload=False)
    differs = workload.kernels or workload.recompute or workload.offload
    record = {
        "kind": "estimate",
        "environment": run_records.environment(),
        **workload.as_record(),
        "parameters": architecture.parameter_count(config),
        **(lora_counts(config, workload) if workload.lora_rank else {}),
        "layers": config.num_hidden_layers,
        "estimates": [
            estimate(config, each) for each in (baseline, *([workload] if differs else []))
        ],
    }
    print(render(record))
    run_records.write_record(record_to, record)


# ---------------------------------------------------------------- output


def moment_line(name: str, estimated: dict, n_layers: int) -> str:
    """When the peak is reached, and what made most of what is neither the model's nor kept."""
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
    unit_name, unit = tables.decimal_unit(
        [e["peak_memory_bytes"] for e in estimates], "GB", "MB", 1e9
    )

    def row(label: str, values: list[int], unit: float = unit) -> list[str]:
        return [label, *(f"{value / unit:,.2f}" for value in values)]

    kept = [e["kept_in_layers"] for e in estimates]
    kinds = [kind for kind in KINDS if any(kind in table for table in kept)]
    layers = [sum(table.values()) for table in kept]
    kept_rows = [
        row(kind, [table.get(kind, 0) / n_layers for table in kept], 1e6) for kind in kinds
    ]
    kept_rows.append(row("one layer", [total / n_layers for total in layers], 1e6))
    kept_rows.append(row(f"{n_layers} layers", layers, 1e6))
    kept_rows.append(
        row("embedding, angles, last norm", [e["kept_outside"] for e in estimates], 1e6)
    )
    part_rows = [row(part, [e["parts"][part] for e in estimates]) for part in PARTS]
    part_rows.append(row("Total", [e["peak_memory_bytes"] for e in estimates]))
    phase_rows = [row(phase, [e["phases"][phase] for e in estimates]) for phase in PHASES]
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            workload_line(record),
            "",
            tables.title("Memory of a training step (estimate)"),
            tables.table(["Kept for the backward, MB", *names], kept_rows),
            "",
            tables.table([f"At the peak, {unit_name}", *names], part_rows),
            "",
            tables.table([f"Highest in each phase, {unit_name}", *names], phase_rows),
            "",
            *(moment_line(name, estimated, n_layers) for name, estimated in zip(names, estimates)),
        ]
    )
