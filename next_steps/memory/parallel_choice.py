"""Which way to spread a step over several GPUs?  `auto` takes the first that fits.

The ledger of one process's step says what exists at each moment (memory_ledger.py).  What a way
needs takes the place of that process's weights, moments and gradients:

    ddp          All are whole, and the gradients' buckets are always there.
    fsdp         A share of each.  Whole are the root's weights, those of the unit that runs, and
                 the gradients of the unit before, which are reduced meanwhile.
    fsdp-kept    The same, but a layer's weights are whole from its forward to its backward.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.processes import AUTO, DDP, FSDP, PARALLEL
from harness.cli.workload import Workload
from harness.model.architecture import TORCH_DTYPES
from harness.steps import parallel
from harness.steps.communication import REDUCED, bytes_of
from harness.steps.launches import replaced
from harness.steps.stepping import trained
from next_steps.memory.memory_estimate import CUBLAS_WORKSPACE, try_kernels
from next_steps.memory.memory_ledger import GRADIENTS, PARAMETERS, STATE, Ledger
from next_steps.memory.meta_step import run_step
from next_steps.memory.peak_attribution import history, windows

# Of a GPU's memory.  Alone an H200 took up to 97.6 % (results/longest_baseline.json); the context
# and pieces that are too small took the rest.  Here NCCL's buffers come on top.
USED = 0.94


def start_processes(workload: Workload) -> Workload:
    """Let the processes find one another; return the workload with the way that `auto` takes."""
    parallel.start(workload)
    if workload.parallel != AUTO:
        return workload
    way, why = DDP, "without a GPU nothing has to fit"
    if HAS_GPU:  # the smallest decides, so all processes take the same
        (total,) = min(parallel.gather(torch.cuda.get_device_properties(DEVICE).total_memory))
        needed = predicted_peaks(try_kernels(workload), workload)
        way = next((each for each in PARALLEL if needed[each] <= USED * total), FSDP)
        words = ", ".join(f"{each} {n_bytes / 1e9:.1f}" for each, n_bytes in needed.items())
        why = f"{USED * total / 1e9:.1f} GB may be filled; predicted: {words}"
    print(f"--parallel auto takes {way}: {why}")
    return replace(workload, parallel=way)


class UnitLedger(Ledger):
    """A ledger that also has the bytes of what is gathered at once, and of its gradients."""

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().follow(model, optimizer)
        units = model.model.layers[0], model.lm_head, model.model.embed_tokens, model
        self.weights = [bytes_of(unit.parameters()) for unit in units]
        self.gradients = [bytes_of(trained(unit)) for unit in units]


def predicted_peaks(config: PreTrainedConfig, workload: Workload) -> dict[str, int]:
    """Return the most bytes that a process allocates, by way; an opponent's as the baseline's."""
    with replaced(parallel, world_size=lambda: 1), replaced(torch.distributed, is_initialized=bool):
        ledger = run_step(config, workload, UnitLedger())
    n, n_layers = workload.world_size, config.num_hidden_layers
    layer, head, root, _ = ledger.weights
    of_layer, of_head, _, of_all = ledger.gradients
    widening = REDUCED.itemsize // TORCH_DTYPES[workload.dtype].itemsize
    parts, found = history(ledger, 2 * CUBLAS_WORKSPACE), dict.fromkeys(PARALLEL, 0)
    for window in windows(ledger, parts):
        at = {part: values[window.highest] for part, values in parts.items()}
        ddp, made, (phase, number) = sum(at.values()), at[GRADIENTS], window.sample.stage
        if phase == "optimizer":
            kept = fsdp = ddp // n
        else:
            shared = at[PARAMETERS] + at[STATE] + made
            whole = ddp - shared + shared // n + root
            if number is None:  # the head's gradient may be made with the loss
                whole += head + min(made, of_head)
            elif phase == "backward":
                before = of_head if number == n_layers else of_layer
                whole += before + widening * before + (widening + 1) * before // n
            if workload.accumulate:  # sums over micro-batches are whole until the last one
                whole += widening * of_all
            else:  # each gradient goes into its bucket at once
                ddp -= max(0, made - max(of_layer, of_head))
            ddp += of_all
            kept = whole + layer * (n_layers if number is None else number)
            fsdp = whole + layer * bool(number)
        found = {way: max(found[way], now) for way, now in zip(PARALLEL, (ddp, kept, fsdp))}
    return found
