"""Which way to spread a step over several GPUs?  `auto` takes the first that fits.

The ledger of one process's step says what exists at each moment (memory_ledger.py).  `peaks` puts
what a way needs in the place of that process's weights, moments and gradients:

    ddp          All are whole, and the gradients' buckets are always there.
    fsdp         A share of each.  Whole are the root's weights, those of the unit that runs, and
                 the gradients of the unit before, which are reduced meanwhile.
    fsdp-kept    The same, but a layer's weights are whole from its forward to its backward.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.processes import AUTO, DDP, FSDP, KEPT, PARALLEL
from harness.cli.workload import Workload
from harness.model.architecture import TORCH_DTYPES
from harness.steps import parallel
from harness.steps.communication import REDUCED, bytes_of
from harness.steps.launches import replaced
from next_steps.memory.memory_estimate import CUBLAS_WORKSPACE, try_kernels
from next_steps.memory.memory_ledger import GRADIENTS, PARAMETERS, STATE
from next_steps.memory.meta_step import run_step
from next_steps.memory.peak_attribution import history, windows

# Of a GPU's memory.  results/longest_baseline.json: one H200 took tensors up to 97.6 % of it.  The
# rest were the CUDA context and pieces that are too small.  NCCL's buffers come on top.
USED = 0.94


def start(workload: Workload) -> Workload:
    """Let the processes find one another; return the workload with the way that `auto` takes.

    The smallest GPU counts, so all processes take the same.
    """
    parallel.start(workload)
    if workload.parallel != AUTO:
        return workload
    way, why = DDP, "without a GPU nothing has to fit"
    if HAS_GPU:
        (total,) = min(parallel.gather(torch.cuda.get_device_properties(DEVICE).total_memory))
        needed = peaks(try_kernels(workload), workload)
        way = next((each for each in PARALLEL if needed[each] <= USED * total), FSDP)
        words = ", ".join(f"{each} {n_bytes / 1e9:.1f}" for each, n_bytes in needed.items())
        why = f"{USED * total / 1e9:.1f} GB may be filled; predicted: {words}"
    print(f"--parallel auto takes {way}: {why}")
    return replace(workload, parallel=way)


def peaks(config: PreTrainedConfig, workload: Workload) -> dict[str, int]:
    """Return the most bytes that each of `workload.world_size` processes allocates, by way.

    An opponent counts as the baseline, which needs more.
    """
    # the ledger's process is alone
    a, b = {"world_size": lambda: 1}, {"is_initialized": lambda: False}
    with replaced(parallel, **a), replaced(torch.distributed, **b):
        ledger = run_step(config, workload)
    inner, n, n_layers = ledger.model.model, workload.world_size, config.num_hidden_layers
    # FSDP2's units, and the gradients of each
    layer, of_layer = sizes(inner.layers[0])
    head, of_head = sizes(inner.norm, ledger.model.lm_head)
    root, of_all = sizes(inner.embed_tokens)[0], sizes(ledger.model)[1]
    widening = REDUCED.itemsize // TORCH_DTYPES[workload.dtype].itemsize
    parts, found = history(ledger, 2 * CUBLAS_WORKSPACE), dict.fromkeys(PARALLEL, 0)
    for window in windows(ledger, parts):
        at = {part: values[window.highest] for part, values in parts.items()}
        alone, made, (phase, number) = sum(at.values()), at[GRADIENTS], window.sample.stage
        shared = at[PARAMETERS] + at[STATE] + made
        whole = alone - shared + shared // n + root
        if workload.accumulate:  # sums over micro-batches are whole until the last one
            whole += widening * of_all
        else:  # each gradient goes into its bucket at once
            alone -= max(0, made - max(of_layer, of_head))
        kept = layer * (n_layers if number is None else number)
        gathered = min(kept, layer)
        if number is None:  # the head's gradient may be made with the loss
            whole, gathered = whole + head + min(made, of_head), 0
        elif phase == "backward":
            before = of_head if number == n_layers else of_layer
            sent = widening * before
            whole += before + sent + (sent + before) // n
        now = {DDP: alone + of_all, KEPT: whole + kept, FSDP: whole + gathered}
        if phase == "optimizer":
            now = {DDP: sum(at.values()), **dict.fromkeys((KEPT, FSDP), sum(at.values()) // n)}
        found = {way: max(found[way], now[way]) for way in PARALLEL}
    return found


def sizes(*modules: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes of the modules' weights and of their gradients."""
    own = [p for module in modules for p in module.parameters()]
    return bytes_of(own), bytes_of(p for p in own if p.requires_grad)
