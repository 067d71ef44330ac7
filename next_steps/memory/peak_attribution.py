"""What is the peak of a step's memory made of?  Each block of a ledger belongs to one part.

    parameters, optimizer state,     known by their owner, from their birth on
    gradients, batch
    activations                      made in the forward and alive at its end: kept for the backward
    logits and loss                  made for the loss or by the backward of the loss
    temporaries                      every other tensor
    cuBLAS workspaces                scratch memory of matrix products; no tensor
    inside operations, rounding      measured steps: what the allocator gave away beyond the above

`account_of_estimate` is for a ledger of meta tensors, `account` for an `Observer` of a real step.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from next_steps.memory.memory_ledger import (
    BATCH,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    PHASES,
    STATE,
    Block,
    Ledger,
    Observer,
    Sample,
)

KEPT, TEMPORARY, WORKSPACES = "activations", "temporaries", "cuBLAS workspaces"
PARTS = [PARAMETERS, STATE, GRADIENTS, KEPT, LOSS, TEMPORARY, BATCH, WORKSPACES]
UNSEEN = "inside operations, rounding"
MEASURED_PARTS = [*PARTS, UNSEEN]
TOP = 6  # groups of tensors
# points of the timeline: in all layers of a phase together, and in each other stage of the step
LAYERS_POINTS, STAGE_POINTS = 128, 24


def part_of(ledger: Ledger, block: Block) -> str:
    """Return the part that a block belongs to."""
    if block.part is not None:
        return block.part
    in_backward_of_the_loss = block.stage == ("backward", None)
    if block.kind == LOSS or in_backward_of_the_loss:
        return LOSS
    kept = any(block.born < ended <= block.died for _, ended in ledger.forwards)
    return KEPT if kept else TEMPORARY


def kept_blocks(ledger: Ledger) -> list[Block]:
    """Return what the last forward left to its backward, without logits and loss."""
    began, ended = ledger.forwards[-1]
    return [b for b in ledger.blocks if began <= b.born < ended and part_of(ledger, b) == KEPT]


# ---------------------------------------------------------------- a step on meta tensors


def account_of_estimate(ledger: Ledger, workspaces: int) -> dict:
    """Return the peak in bytes, its stage, and what it is made of.

    What is kept is of one micro-batch.  What waits in the host's memory is not counted.
    """
    (phase, layer), (peak, moment) = max(ledger.peaks.items(), key=lambda item: item[1][0])
    parts = dict.fromkeys(PARTS, 0) | {WORKSPACES: workspaces}
    # by operation: what is neither the model's nor kept
    made_by = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for block in ledger.blocks:
        if block.born <= moment < block.died:
            part = part_of(ledger, block)
            parts[part] += block.n_bytes
            if part in (LOSS, TEMPORARY):
                made_by[block.operation]["tensors"] += 1
                made_by[block.operation]["bytes"] += block.n_bytes
    in_layers, outside = defaultdict(int), 0
    for block in kept_blocks(ledger):
        if block.stage[1] is None:
            outside += block.n_bytes
        else:
            in_layers[block.kind] += block.n_bytes
    phases = dict.fromkeys(PHASES, 0)
    for (name, _), (n_bytes, _) in ledger.peaks.items():
        phases[name] = max(phases[name], n_bytes + workspaces)
    return {
        "peak_memory_bytes": peak + workspaces,
        "phase": phase,
        "layer": layer,
        "parts": parts,
        "made_by": dict(sorted(made_by.items(), key=lambda item: -item[1]["bytes"])),
        "kept_in_layers": dict(in_layers),
        "kept_outside": outside,
        "phases": phases,
    }


# ---------------------------------------------------------------- a measured step


@dataclass(frozen=True)
class Window:
    """The time of one sample; each birth and death is the next moment, from 0 on."""

    sample: Sample
    first: int
    last: int
    highest: int  # the moment at which the ledger's sum is highest
    seen: int  # that sum, bytes
    height: int  # bytes by the allocator; without a GPU that sum


def history(ledger: Ledger) -> dict[str, list[int]]:
    """Return the bytes of each part at each moment of the ledger's last step."""
    moments = ledger.time - ledger.began + 1
    changes = {part: [0] * moments for part in PARTS}
    for block in ledger.blocks:
        if block.died >= ledger.began:
            change = changes[part_of(ledger, block)]
            change[max(0, block.born - ledger.began + 1)] += block.n_bytes
            if block.died < ledger.time:
                change[block.died - ledger.began + 1] -= block.n_bytes
    return {part: list(itertools.accumulate(change)) for part, change in changes.items()}


def windows(ledger: Observer, seen: list[int]) -> list[Window]:
    """Return a window for each sample.  `seen` is the sum of the parts at each moment."""
    found, first = [], 0
    for sample in ledger.samples:
        last = sample.time - ledger.began
        highest = max(range(first, last + 1), key=seen.__getitem__)
        height = seen[highest] if sample.allocated is None else sample.allocated
        found.append(Window(sample, first, last, highest, seen[highest], height))
        first = last
    return found


def largest(ledger: Ledger, moment: int) -> list[dict]:
    """Return the largest groups of tensors at a moment, by part and maker.

    The maker of an activation is the part of the model that asked for it, of others the operation.
    """
    groups = defaultdict(list)
    for block in ledger.blocks:
        part = part_of(ledger, block)
        alive = block.born < ledger.began + moment <= block.died
        if alive and part not in (PARAMETERS, STATE, BATCH):
            maker = block.kind if part == KEPT and block.kind else block.operation
            groups[part, maker].append(block)
    rows = []
    for (part, maker), blocks in groups.items():
        example = max(blocks, key=lambda block: block.n_bytes)
        rows.append(
            {
                "part": part,
                "maker": maker,
                "tensors": len(blocks),
                "bytes": sum(block.n_bytes for block in blocks),
                "dtype": str(example.dtype).removeprefix("torch."),
                "shape": list(example.shape),
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])[:TOP]


def timeline(parts: dict[str, list[int]], found: list[Window], workspaces: int) -> dict:
    """Return the parts over the step: the highest moment of each stretch of each stage."""
    gaps = {}  # between the ledger's sum and the allocator's
    for window in found:
        gap = window.height - window.seen
        for moment in (window.highest, *range(window.first, window.last + 1)):
            gaps[moment] = max(gap, gaps.get(moment, gap))
    moments = range(len(gaps))
    parts = parts | {
        WORKSPACES: [workspaces for _ in moments],
        UNSEEN: [gaps[m] - workspaces for m in moments],
    }
    heights = [sum(values) for values in zip(*parts.values())]
    layer_points = max(1, LAYERS_POINTS // max(window.sample.stage[1] or 1 for window in found))
    chosen, stages = [], []
    for (phase, layer), group in itertools.groupby(found, key=lambda window: window.sample.stage):
        in_stage = list(group)
        first, length = in_stage[0].first, in_stage[-1].last + 1 - in_stage[0].first
        points = min(length, layer_points if layer else STAGE_POINTS)
        edges = [first + length * i // points for i in range(points + 1)]
        stretches = itertools.pairwise(edges)
        chosen += [max(range(*stretch), key=heights.__getitem__) for stretch in stretches]
        stages.append({"phase": phase, "layer": layer, "points": points})
    return {
        "stages": stages,
        "parts": {part: [values[m] for m in chosen] for part, values in parts.items()},
    }


def account(ledger: Observer, workspaces: int) -> dict:
    """Return the peak and the highest moment of each phase, in bytes and by parts."""
    parts = history(ledger)
    found = windows(ledger, [sum(values) for values in zip(*parts.values())])

    def describe(window: Window) -> dict:
        rest = {WORKSPACES: workspaces, UNSEEN: window.height - window.seen - workspaces}
        reserved = window.sample.reserved
        return {
            "bytes": window.height,
            "parts": {part: parts[part][window.highest] for part in parts} | rest,
            "fragmentation_bytes": None if reserved is None else reserved - window.height,
        }

    def highest(windows: list[Window]) -> Window:
        return max(windows, key=lambda window: window.height)

    peak = highest(found)
    described, (phase, layer) = describe(peak), peak.sample.stage
    return {
        "device": ledger.device,
        "peak_memory_bytes": described.pop("bytes"),
        **described,
        "phase": phase,
        "layer": layer,
        "operation": peak.sample.operation,
        "largest": largest(ledger, peak.highest),
        "phases": {
            phase: describe(highest([w for w in found if w.sample.stage[0] == phase]))
            for phase in PHASES
        },
        "timeline": timeline(parts, found, workspaces),
    }
