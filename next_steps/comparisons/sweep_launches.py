"""What --sweep tries: the launches of two kernel files, with settings that they could carry."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

import cross_entropy_inplace_kernel
import cross_entropy_kernel
import rmsnorm_kernel
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.comparisons.sweep_tables import Setting


@dataclass(frozen=True)
class Launch:
    """A launcher on inputs of its own, and the settings of its kernel that may be tried."""

    name: str
    module: ModuleType
    kernel: str  # its name in the module
    knobs: tuple[str, ...]
    others: Callable[[Setting], list[Setting]]  # what to try beside the file's setting
    run: Callable[[], object]  # is timed; in place, it may find the logits overwritten
    outputs: Callable[[], dict[str, torch.Tensor]]  # what it computes from fresh inputs
    passes: int  # tensors as large as the input that must be read or written
    programs_from: str | None = None  # the module's function that gives (n_programs, STAGES)


def processors() -> int:
    """Return the number of multiprocessors; without a GPU 2, so programs have several rows each."""
    return torch.cuda.get_device_properties().multi_processor_count if HAS_GPU else 2


def combinations(**choices) -> list[Setting]:
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def rmsnorm_launches(n_rows: int, H: int, dtype: torch.dtype) -> list[Launch]:
    torch.manual_seed(0)
    x, dy = (torch.randn(n_rows, H, device=DEVICE).to(dtype) for _ in range(2))  # (B*T, H)
    weight = (1 + 0.1 * torch.randn(H, device=DEVICE)).to(dtype)  # (H,)
    _, rstd = rmsnorm_kernel.rmsnorm_forward(x, weight, 1e-5)

    def forward() -> tuple[torch.Tensor, ...]:
        return rmsnorm_kernel.rmsnorm_forward(x, weight, 1e-5)

    def backward() -> tuple[torch.Tensor, ...]:
        return rmsnorm_kernel.rmsnorm_backward(dy, x, weight, rstd)

    # rows of the backward's scratch buffer, one per program
    room = rmsnorm_kernel.MAX_DW_PARTIAL_BYTES // (4 * H)

    def backward_settings(shipped: Setting) -> list[Setting]:
        programs = [max(1, min(n_rows, room, int(shipped["n_programs"] * n))) for n in (0.5, 1, 2)]
        found = combinations(num_warps=(4, 8, 16), STAGES=(1, 3, 4), n_programs=programs)
        found.append(shipped | {"num_warps": 2})
        return found + [shipped | {"STAGES": stages} for stages in (2, 6)]

    module, warps = rmsnorm_kernel, [1, 2, 4, 8, 16, 32]
    return [
        Launch(
            *("RMSNorm forward", module, "_rmsnorm_fwd_kernel", ("num_warps",)),
            lambda shipped: combinations(num_warps=warps),
            forward,
            lambda: dict(zip(("y", "rstd"), forward())),
            passes=2,
        ),
        Launch(
            *("RMSNorm backward", module, "_rmsnorm_bwd_kernel"),
            ("num_warps", "STAGES", "n_programs"),
            backward_settings,
            backward,
            lambda: dict(zip(("dx", "dw"), backward())),
            passes=3,
            programs_from="_backward_options",
        ),
    ]


def tiles(
    shipped: Setting, warps: tuple[int, ...], shapes: list[tuple[float, float]]
) -> list[Setting]:
    """Return tiles: the file's rows, and columns per thread, times each pair of factors."""
    columns, found = shipped["TILE_COLS"] // shipped["num_warps"], []
    for w, (r, c) in itertools.product(warps, shapes):
        tile = {"TILE_ROWS": int(shipped["TILE_ROWS"] * r), "TILE_COLS": int(columns * c) * w}
        if shipped["TILE_ROWS"] * r >= 1:
            found.append(shipped | {"num_warps": w} | tile)
    return found


def cross_entropy_launches(n_rows: int, V: int, dtype: torch.dtype) -> list[Launch]:
    torch.manual_seed(0)
    logits = torch.randn(n_rows, V, device=DEVICE, dtype=dtype)  # (B*T, V)
    targets = torch.randint(V, (n_rows,), device=DEVICE)  # (B*T,)
    one = torch.ones((), device=DEVICE)
    _, stats, n_valid = cross_entropy_kernel.cross_entropy_forward(logits, targets)
    overwritten = torch.empty_like(logits)

    def forward() -> tuple[torch.Tensor, ...]:
        return cross_entropy_kernel.cross_entropy_forward(logits, targets)

    def backward() -> torch.Tensor:
        return cross_entropy_kernel.cross_entropy_backward(one, logits, targets, stats, n_valid)

    def in_place() -> torch.Tensor:
        return cross_entropy_inplace_kernel.cross_entropy_inplace(overwritten, targets)

    def forward_outputs() -> dict[str, torch.Tensor]:
        loss, found, _ = forward()
        return {"loss": loss, "m": found[:, 0], "d": found[:, 1]}

    def parts(dlogits: torch.Tensor) -> dict[str, torch.Tensor]:
        # Apart, because the targets' entries carry nearly all of the norm. They would hide the
        # errors of the others.
        columns = targets[:, None]
        return {"target": dlogits.gather(1, columns), "other": dlogits.scatter(1, columns, 0.0)}

    def in_place_outputs() -> dict[str, torch.Tensor]:
        overwritten.copy_(logits)
        return {"loss": in_place(), **parts(overwritten)}

    def per_processor(*counts: int) -> list[int]:
        return [min(n_rows, n * processors()) for n in counts]

    def one_program_per_row(shipped: Setting) -> list[Setting]:
        found = tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (2, 1), (1, 0.5)])
        return found + tiles(shipped, (32,), [(1, 1)])

    def in_place_settings(shipped: Setting) -> list[Setting]:
        found = [
            setting | {"n_programs": n}
            for setting in tiles(shipped, (4, 8, 16), [(1, 1), (0.5, 1), (1, 0.5)])
            for n in per_processor(*(warps // setting["num_warps"] for warps in (8, 16, 32)))
            if n > 0  # else fewer than one program per processor
        ]
        found += tiles(shipped, (shipped["num_warps"],), [(2, 1)])
        return [*found, shipped | {"n_programs": n_rows}]

    tile = "num_warps", "TILE_ROWS", "TILE_COLS"
    return [
        Launch(
            "Cross-entropy forward",
            cross_entropy_kernel,
            "_cross_entropy_fwd_kernel",
            tile,
            one_program_per_row,
            forward,
            forward_outputs,
            passes=1,
        ),
        Launch(
            "Cross-entropy backward",
            cross_entropy_kernel,
            "_cross_entropy_bwd_kernel",
            tile,
            one_program_per_row,
            backward,
            lambda: parts(backward()),
            passes=2,
        ),
        Launch(
            "Cross-entropy in place, loss and gradient",
            cross_entropy_inplace_kernel,
            "_cross_entropy_inplace_kernel",
            (*tile, "n_programs"),
            in_place_settings,
            in_place,
            in_place_outputs,
            passes=2,
        ),
    ]


LAUNCHES = {"rmsnorm": rmsnorm_launches, "cross_entropy": cross_entropy_launches}
