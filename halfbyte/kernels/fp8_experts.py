"""The routed experts of a layer with FP8 weights on the GPU: what INT4 is compared with.

A program takes some rows of an expert and up to 16 tokens, rows by tokens, so that a matrix
instruction is filled with weights however few the tokens are. Scales as in `fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from halfbyte.kernels.fp8 import Scaled
from halfbyte.kernels.w4a16 import Work, add_parts

TOKENS = 16
"""At most of an expert in a program; the least that a product in Triton has."""
"""What cuts the work into pieces of as many pairs."""


@dataclass(frozen=True)
class Launch:
    """How a program works: weight rows, columns of a step, steps in flight, and warps."""

    rows: int
    depth: int
    stages: int
    warps: int

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.depth * (self.rows + TOKENS)

    def fits(self, columns: int) -> bool:
        return columns % self.depth == 0


LAUNCHES = (
    Launch(32, 256, 5, 2),
    Launch(32, 512, 4, 4),
    Launch(64, 128, 6, 4),
    Launch(64, 256, 3, 4),
    Launch(64, 256, 5, 4),
    Launch(128, 128, 4, 4),
    Launch(128, 256, 5, 4),
)
"""Those to try: few rows where few experts have to keep a GPU busy, many where there are enough."""


def launches(columns: int, device: torch.device) -> list[Launch]:
    """Those of `LAUNCHES` that a weight of so many columns and the GPU have room for."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    room = properties["max_shared_mem"]
    return [each for each in LAUNCHES if each.fits(columns) and each.shared_bytes <= room]


def experts(
    x: torch.Tensor,
    gate_up: Scaled,
    down: Scaled,
    chosen: torch.Tensor,
    router: torch.Tensor,
    first: Launch,
    second: Launch,
) -> torch.Tensor:
    """See `halfbyte.kernels.fp8.experts`; `first` and `second` are how the products launch."""
    expert_count, pairs = gate_up.values.shape[0], chosen.numel()
    work = Work.of(chosen, expert_count, tokens=TOKENS)
    gated = torch.empty(pairs, down.values.shape[2], dtype=x.dtype, device=x.device)
    run_gate_up(x, gate_up, work, gated, first)
    parts = torch.empty(pairs, x.shape[1], dtype=torch.float32, device=x.device)
    run_down(gated, down, work, router, parts, second)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    add_parts(parts, chosen, expert_count, y)
    return y


def run_gate_up(
    x: torch.Tensor, weight: Scaled, work: Work, gated: torch.Tensor, launch: Launch
) -> None:
    """gated [pairs, I] = silu(gate) times up of each pair (token, expert), in its own dtype, for
    FP8 `x` [M, H]. A piece of `work` has up to `TOKENS` pairs."""
    intermediate, columns = weight.values.shape[1] // 2, weight.values.shape[2]
    _check(columns, work, launch)
    _gate_up[(triton.cdiv(intermediate, launch.rows // 2), work.pieces.shape[0])](
        x, weight.values, weight.scales, work.pieces, work.count, work.order, gated,
        work.pairs_of_token, intermediate, columns, ROWS=launch.rows, DEPTH=launch.depth,
        PAIRS=TOKENS, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def run_down(
    gated: torch.Tensor,
    weight: Scaled,
    work: Work,
    router: torch.Tensor,
    parts: torch.Tensor,
    launch: Launch,
) -> None:
    """parts float32 [pairs, H] = the down projection of each pair times its router weight, for FP8
    `gated` [pairs, I]."""
    rows, columns = weight.values.shape[1:]
    _check(columns, work, launch)
    _down[(triton.cdiv(rows, launch.rows), work.pieces.shape[0])](
        gated, weight.values, weight.scales, work.pieces, work.count, work.order, router, parts,
        rows, columns, ROWS=launch.rows, DEPTH=launch.depth, PAIRS=TOKENS, num_warps=launch.warps,
        num_stages=launch.stages,
    )  # fmt: skip


def _check(columns: int, work: Work, launch: Launch) -> None:
    if not launch.fits(columns):
        raise ValueError(f"{columns} columns are no multiple of {launch.depth}")
    if work.tokens > TOKENS:
        raise ValueError(f"pieces of {work.tokens} pairs; a program takes {TOKENS}")


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x, weight, scales, pieces, count, order, gated, pairs_of_token, intermediate, columns,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The first half of a program's rows are gates, the second the same rows of up."""
    piece = pieces + tl.program_id(1) * 4
    if tl.program_id(1) < tl.load(count):
        expert = tl.load(piece).to(tl.int64)
        slot = tl.arange(0, PAIRS)
        present = slot < tl.load(piece + 2)
        pair = tl.load(order + tl.load(piece + 1) + slot, mask=present, other=0)
        HALF: tl.constexpr = ROWS // 2
        own = tl.program_id(0) * HALF + tl.arange(0, ROWS) % HALF
        # Rows beyond the end read the last one instead of asking at every step, and are not stored.
        row = tl.minimum(own, intermediate - 1) + tl.arange(0, ROWS) // HALF * intermediate
        depth = tl.arange(0, DEPTH)
        left = weight + (expert * 2 * intermediate + row)[:, None] * columns + depth[None, :]
        right = x + (pair // pairs_of_token)[None, :] * columns + depth[:, None]
        total = tl.zeros((ROWS, PAIRS), tl.float32)
        for _ in range(0, columns, DEPTH):
            total = tl.dot(tl.load(left), tl.load(right), total)
            left += DEPTH
            right += DEPTH
        total *= tl.load(scales + expert)
        gate, up = tl.split(total.reshape(2, HALF, PAIRS).permute(1, 2, 0))
        product = gate / (1.0 + tl.exp(-gate)) * up
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        target = gated + pair.to(tl.int64)[None, :] * intermediate + column[:, None]
        inside = present[None, :] & (column < intermediate)[:, None]
        tl.store(target, product.to(gated.dtype.element_ty), mask=inside)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    gated, weight, scales, pieces, count, order, router, parts, rows, columns,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    piece = pieces + tl.program_id(1) * 4
    if tl.program_id(1) < tl.load(count):
        expert = tl.load(piece).to(tl.int64)
        slot = tl.arange(0, PAIRS)
        present = slot < tl.load(piece + 2)
        pair = tl.load(order + tl.load(piece + 1) + slot, mask=present, other=0).to(tl.int64)
        own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        depth = tl.arange(0, DEPTH)
        left = weight + (expert * rows + tl.minimum(own, rows - 1))[:, None] * columns
        left += depth[None, :]
        right = gated + pair[None, :] * columns + depth[:, None]
        total = tl.zeros((ROWS, PAIRS), tl.float32)
        for _ in range(0, columns, DEPTH):
            total = tl.dot(tl.load(left), tl.load(right), total)
            left += DEPTH
            right += DEPTH
        weights = tl.load(router + pair, mask=present, other=0.0)
        total *= tl.load(scales + expert) * weights[None, :]
        inside = present[None, :] & (own < rows)[:, None]
        tl.store(parts + pair[None, :] * rows + own[:, None], total, mask=inside)
