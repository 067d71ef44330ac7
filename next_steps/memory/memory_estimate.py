"""How much memory will a training step need, and when?  Told from config.json (docs/memory.md).

The training step itself runs, on tensors without memory (meta_step.py), and a ledger sees every
storage from its birth to its death.  The sum of all living storages, each rounded up to the
allocator's 512 bytes, is what torch.cuda.memory_allocated() would say.  On a GPU, cuBLAS also takes
a workspace for the forward's thread and one for the backward's (CUBLAS_WORKSPACE).

Not seen, and so not counted:
- what an operation allocates and frees inside
- blocks that are up to 1 MiB larger than what was asked for, where the allocator found no better
- batches that wait on the GPU; a CUDA graph's own stream, with a third workspace
- what PyTorch's allocator does not hold: the CUDA context, compiled kernels
All recorded runs that were compared are in bf16 on one H200.
"""

from collections import defaultdict
from dataclasses import replace

from transformers import PreTrainedConfig

from harness.cli import tables
from harness.cli.workload import Workload, workload_line
from harness.model.architecture import ModelFacts, with_one_layer
from harness.model.config_file import load_config, reading
from harness.profiling.kernel_facts import PHASES
from harness.records import run_records
from next_steps.memory.memory_ledger import KINDS, LOSS, stage_in_words
from next_steps.memory.meta_step import run_step
from next_steps.memory.peak_attribution import PARTS, TEMPORARY, account, kept_blocks

CUBLAS_WORKSPACE = 32 * 2**20  # per thread and stream, on a Hopper GPU
TOP = 3


def try_kernels(workload: Workload, for_gpu: bool = False) -> PreTrainedConfig:
    """Return the workload's configuration; refuse one that its kernels cannot take."""
    config = load_config(workload, for_gpu)
    if workload.kernels:
        small = Workload(dtype="fp32", seq_len=2, kernels=workload.kernels)
        with reading(f"the config.json of {workload.model} with these kernels"):
            run_step(with_one_layer(config), small)
    return config


def estimate(config: PreTrainedConfig, workload: Workload) -> dict:
    """Return the peak of a training step in bytes, its stage, and what it is made of.

    What is kept is of one micro-batch.  What waits in the host's memory is not counted.
    """
    ledger = run_step(config, workload)
    found = account(ledger, workspaces=2 * CUBLAS_WORKSPACE)
    # by operation: what is neither the model's nor kept
    made_by = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for row in found["largest"]:
        if row["part"] in (LOSS, TEMPORARY):
            made_by[row["maker"]]["tensors"] += row["tensors"]
            made_by[row["maker"]]["bytes"] += row["bytes"]
    in_layers, outside = defaultdict(int), 0
    for block in kept_blocks(ledger):
        if block.stage[1] is None:
            outside += block.n_bytes
        else:
            in_layers[block.kind] += block.n_bytes
    return {
        "kernels": list(workload.kernels),
        **{key: found[key] for key in ("peak_memory_bytes", "phase", "layer")},
        "parts": {part: found["parts"][part] for part in PARTS},
        "made_by": dict(sorted(made_by.items(), key=lambda item: -item[1]["bytes"])),
        "kept_in_layers": dict(in_layers),
        "kept_outside": outside,
        "phases": {phase: moment["bytes"] for phase, moment in found["phases"].items()},
    }


def report(workload: Workload, record_to: str | None = None) -> None:
    """Print the estimate for a workload beside the baseline's, and write the record."""
    config = try_kernels(workload, for_gpu=True)
    baseline = replace(workload, kernels=(), moments=None, fp8=None, recompute=None, offload=False)
    # equal workloads may differ in these: their losses may be compared
    differs = workload.kernels or workload.recompute or workload.offload
    workloads = [baseline, workload] if differs else [baseline]
    record = {
        "kind": "estimate",
        "environment": run_records.environment(),
        **workload.as_record(),
        **ModelFacts(config, workload).counts(),
        "layers": config.num_hidden_layers,
        "estimates": [estimate(config, each) for each in workloads],
    }
    print(render(record))
    run_records.write_record(record_to, record)


def moment_line(name: str, estimated: dict, n_layers: int) -> str:
    """Return when the peak is reached, and what made most of the loss and the temporaries."""
    largest = [
        f"{row['tensors']} of {operation}, {row['bytes'] / 1e6:,.1f} MB"
        for operation, row in list(estimated["made_by"].items())[:TOP]
        if row["bytes"] > 1e-3 * estimated["peak_memory_bytes"]
    ]
    where = stage_in_words(estimated["phase"], estimated["layer"], n_layers)
    return f"{name}: the peak is in the {where}; made there: {'; '.join(largest) or 'nothing'}"


def render(record: dict) -> str:
    """Return everything that the script prints about an estimate."""
    estimates, n_layers = record["estimates"], record["layers"]
    names = ["none", "chosen"][: len(estimates)]
    peaks = [e["peak_memory_bytes"] for e in estimates]
    unit_name, unit = tables.decimal_unit(peaks, "GB", "MB", 1e9)

    def row(label: str, values: list[int], unit: float = unit) -> list[str]:
        return [label, *(f"{value / unit:,.2f}" for value in values)]

    kept = [e["kept_in_layers"] for e in estimates]
    in_layers = [sum(table.values()) for table in kept]
    kept_rows = [
        *(
            row(kind, [table.get(kind, 0) / n_layers for table in kept], 1e6)
            for kind in KINDS
            if any(kind in table for table in kept)
        ),
        row("one layer", [total / n_layers for total in in_layers], 1e6),
        row(f"{n_layers} layers", in_layers, 1e6),
        row("embedding, angles, last norm", [e["kept_outside"] for e in estimates], 1e6),
    ]
    part_rows = [row(part, [e["parts"][part] for e in estimates]) for part in PARTS]
    phase_rows = [row(phase, [e["phases"][phase] for e in estimates]) for phase in PHASES]
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            workload_line(record),
            "",
            tables.title("Memory of a training step (estimate)"),
            tables.table(["Kept for the backward, MB", *names], kept_rows),
            "",
            tables.table([f"At the peak, {unit_name}", *names], [*part_rows, row("Total", peaks)]),
            "",
            tables.table([f"Highest in each phase, {unit_name}", *names], phase_rows),
            "",
            *(moment_line(name, estimated, n_layers) for name, estimated in zip(names, estimates)),
        ]
    )
