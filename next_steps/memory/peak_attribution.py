"""What is the peak of a step's memory made of?  Each block of a ledger belongs to one part.

parameters, optimizer state,     known by their owner, from their birth on
gradients, batch
activations                      made in the forward and alive at its end: kept for the backward
logits and loss                  made for the loss or by the backward of the loss
temporaries                      every other tensor
cuBLAS workspaces                scratch memory of matrix products; no tensor
inside operations, rounding      measured steps: what the allocator gave away beyond the above
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from harness.profiling.kernel_facts import PHASES
from next_steps.memory import memory_ledger as books
from next_steps.memory.memory_ledger import LOSS, Block, Ledger

KEPT, TEMPORARY, WORKSPACES = "activations", "temporaries", "cuBLAS workspaces"
PARTS = [
    *(books.PARAMETERS, books.STATE, books.GRADIENTS, KEPT, LOSS, TEMPORARY, books.BATCH),
    WORKSPACES,
]
UNSEEN = "inside operations, rounding"
MEASURED_PARTS = [*PARTS, UNSEEN]
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


def blocks_at(ledger: Ledger, moment: int) -> list[Block]:
    """Return the blocks that exist at a moment of the ledger's last step."""
    return [b for b in ledger.blocks if b.born < ledger.began + moment <= b.died]


@dataclass(frozen=True)
class Window:
    """The time of one sample; each birth and death is the next moment, from 0 on."""

    sample: books.Sample
    first: int
    last: int
    highest: int  # the moment at which the ledger's sum is highest
    seen: int  # that sum, bytes
    height: int  # bytes by the allocator; without a GPU that sum


def history(ledger: Ledger, workspaces: int) -> dict[str, list[int]]:
    """Return the bytes of each part at each moment of the ledger's last step."""
    moments = ledger.time - ledger.began + 1
    changes = {part: [0] * moments for part in PARTS}
    changes[WORKSPACES][0] = workspaces
    for block in ledger.blocks:
        if block.died >= ledger.began:
            change = changes[part_of(ledger, block)]
            change[max(0, block.born - ledger.began + 1)] += block.n_bytes
            if block.died < ledger.time:
                change[block.died - ledger.began + 1] -= block.n_bytes
    return {part: list(itertools.accumulate(change)) for part, change in changes.items()}


def windows(ledger: Ledger, parts: dict[str, list[int]]) -> list[Window]:
    """Return a window for each sample.  `parts` is the ledger's `history`."""
    seen = [sum(values) for values in zip(*parts.values())]
    found, first = [], 0
    for sample in ledger.samples:
        last = sample.time - ledger.began
        highest = max(range(first, last + 1), key=seen.__getitem__)
        height = seen[highest] if sample.allocated is None else sample.allocated
        found.append(Window(sample, first, last, highest, seen[highest], height))
        first = last
    return found


def highest_of(found: list[Window], *phases: str) -> Window:
    """Return the first of the highest windows in these phases."""
    return max((w for w in found if w.sample.stage[0] in phases), key=lambda w: w.height)


def groups(ledger: Ledger, moment: int) -> list[dict]:
    """Return the tensors at a moment by part and maker, the largest group first.

    The maker of an activation is the part of the model that asked for it, of others the operation.
    """
    found = defaultdict(list)
    for block in blocks_at(ledger, moment):
        part = part_of(ledger, block)
        if part not in (books.PARAMETERS, books.STATE, books.BATCH):
            maker = block.kind if part == KEPT and block.kind else block.operation
            found[part, maker].append(block)
    rows = []
    for (part, maker), blocks in found.items():
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
    return sorted(rows, key=lambda row: -row["bytes"])


def timeline(parts: dict[str, list[int]], found: list[Window]) -> dict:
    """Return the parts over the step: the highest moment of each stretch of each stage."""
    gaps = {}  # between the ledger's sum and the allocator's
    for window in found:
        gap = window.height - window.seen
        for moment in (window.highest, *range(window.first, window.last + 1)):
            gaps[moment] = max(gap, gaps.get(moment, gap))
    parts = parts | {UNSEEN: [gaps[moment] for moment in range(len(gaps))]}
    heights = [sum(values) for values in zip(*parts.values())]
    layer_points = max(1, LAYERS_POINTS // max(window.sample.stage[1] or 1 for window in found))
    chosen, stages = [], []
    for (phase, layer), group in itertools.groupby(found, key=lambda window: window.sample.stage):
        in_stage = list(group)
        first, length = in_stage[0].first, in_stage[-1].last + 1 - in_stage[0].first
        points = min(length, layer_points if layer else STAGE_POINTS)
        edges = [first + length * i // points for i in range(points + 1)]
        chosen += [max(range(*s), key=heights.__getitem__) for s in itertools.pairwise(edges)]
        stages.append({"phase": phase, "layer": layer, "points": points})
    return {
        "stages": stages,
        "parts": {part: [values[m] for m in chosen] for part, values in parts.items()},
    }


def account(ledger: Ledger, workspaces: int) -> dict:
    """Return the peak of a step and the highest moment of each phase, in bytes by parts."""
    parts = history(ledger, workspaces)
    found = windows(ledger, parts)

    def describe(window: Window) -> dict:
        reserved = window.sample.reserved
        return {
            "bytes": window.height,
            "parts": {part: values[window.highest] for part, values in parts.items()}
            | {UNSEEN: window.height - window.seen},
            "fragmentation_bytes": None if reserved is None else reserved - window.height,
        }

    peak = highest_of(found, *PHASES)
    described, (phase, layer) = describe(peak), peak.sample.stage
    return {
        "device": ledger.device,
        "peak_memory_bytes": described.pop("bytes"),
        **described,
        "phase": phase,
        "layer": layer,
        "operation": peak.sample.operation,
        "largest": groups(ledger, peak.highest),
        "phases": {phase: describe(highest_of(found, phase)) for phase in PHASES},
        "timeline": timeline(parts, found),
    }
