"""Tiles and blocks so small that tests of a few hundred columns fill several of them.

What these functions replace is private to the kernels' files; no other test file knows it.
"""

import cross_entropy_kernel
from next_steps.lessons import fp8_kernel, nf4_kernel, reverse_kl_kernel, swiglu_kernel

SHIPPED_OPTIONS = cross_entropy_kernel.tile_options
SHIPPED_KL_OPTIONS = reverse_kl_kernel._options
SHIPPED_BLOCK_SIZE = swiglu_kernel.BLOCK_SIZE
SHIPPED_BLOCKS = nf4_kernel.TILE_BLOCKS
SHIPPED_FP8_TILE = fp8_kernel.TILE_ROWS, fp8_kernel.TILE_COLS


def cross_entropy_tiles(monkeypatch, rows: int = 2, cols: int = 32) -> None:
    """Tiles of rows x cols logits."""

    def options(logits, warps, rows_of_shipped_tile=None):
        return {"TILE_ROWS": rows, "TILE_COLS": cols, "num_warps": warps}

    monkeypatch.setattr(cross_entropy_kernel, "tile_options", options)


def reverse_kl_tiles(monkeypatch, rows: int = 2, threads: int = 8) -> None:
    """Tiles of rows x 8 x threads columns."""
    tile = {"TILE_ROWS": rows, "THREADS": threads, "num_warps": 4}
    monkeypatch.setattr(reverse_kl_kernel, "_options", lambda student, warps: tile)


def nf4_tiles(monkeypatch, blocks: int = 4) -> None:
    monkeypatch.setattr(nf4_kernel, "TILE_BLOCKS", blocks)


def fp8_tiles(monkeypatch, rows: int = 16, cols: int = 32) -> None:
    monkeypatch.setattr(fp8_kernel, "TILE_ROWS", rows)
    monkeypatch.setattr(fp8_kernel, "TILE_COLS", cols)


def small_tiles(monkeypatch) -> None:
    """Of every kernel.  A GPU takes the shipped ones too where a test asks for them."""
    cross_entropy_tiles(monkeypatch)
    reverse_kl_tiles(monkeypatch)
    monkeypatch.setattr(swiglu_kernel, "BLOCK_SIZE", 128)
    nf4_tiles(monkeypatch)
    fp8_tiles(monkeypatch)


def shipped_tiles(monkeypatch) -> None:
    monkeypatch.setattr(cross_entropy_kernel, "tile_options", SHIPPED_OPTIONS)
    monkeypatch.setattr(reverse_kl_kernel, "_options", SHIPPED_KL_OPTIONS)
    monkeypatch.setattr(swiglu_kernel, "BLOCK_SIZE", SHIPPED_BLOCK_SIZE)
    monkeypatch.setattr(nf4_kernel, "TILE_BLOCKS", SHIPPED_BLOCKS)
    fp8_tiles(monkeypatch, *SHIPPED_FP8_TILE)
