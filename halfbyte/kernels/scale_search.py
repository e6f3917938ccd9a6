"""The grid search of group scales for the GPU: every candidate tried in registers, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.rounding import nearest_bfloat16, nearest_integer

LARGEST_GROUP = 256
"""Columns of the largest group that a program can hold."""


def search_scales(
    weights: torch.Tensor,
    importance: torch.Tensor | None,
    divisors: torch.Tensor,
    group: int,
    code_min: int,
    code_max: int,
) -> torch.Tensor:
    """For each group of `group` columns of `weights` float32 [H, N, K], the scale, bfloat16
    [H, N, K / group], that is its largest magnitude over one of `divisors` float32 [n] and rounds
    it with the least squared error; the first of equals.

    `importance` float32 [H, K] is what the error of each column is multiplied with before it is
    squared.
    """
    hessians, rows, columns = weights.shape
    groups = columns // group
    scales = weights.new_empty(hessians, rows, groups, dtype=torch.bfloat16)
    width = triton.next_power_of_2(group)
    tile = max(1, 4096 // width)
    _search[(triton.cdiv(rows * groups, tile), hessians)](
        weights, weights if importance is None else importance, divisors, scales,
        rows, groups, group, len(divisors), float(code_min), float(code_max),
        WEIGHTED=importance is not None, SMALLEST=torch.finfo(torch.bfloat16).tiny,
        TILE=tile, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return scales


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    weights, importance, divisors, scales, rows, groups, group, candidates, code_min, code_max,
    WEIGHTED: tl.constexpr, SMALLEST: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < rows * groups
    line = tl.arange(0, WIDTH)
    mask = inside[:, None] & (line < group)[None, :]
    place = (item * rows * groups + index)[:, None] * group + line[None, :]
    weight = tl.load(weights + place, mask=mask, other=0.0)
    factor = tl.full((TILE, WIDTH), 1.0, dtype=tl.float32)
    if WEIGHTED:
        column = (index % groups)[:, None] * group + line[None, :]
        factor = tl.load(importance + item * groups * group + column, mask=mask, other=0.0)
    largest = tl.max(tl.abs(weight), 1)
    best = tl.zeros((TILE,), dtype=tl.float32)
    least = tl.full((TILE,), float("inf"), dtype=tl.float32)
    for i in range(candidates):
        step = nearest_bfloat16(tl.div_rn(largest, tl.load(divisors + i)))
        step = tl.where(tl.abs(step) < SMALLEST, SMALLEST, step)
        code = weight * tl.div_rn(1.0, step)[:, None]
        code = tl.minimum(tl.maximum(code, code_min), code_max)
        code = nearest_integer(code)
        error = (code * step[:, None] - weight) * factor
        total = tl.sum(error * error, 1)
        better = total < least
        least = tl.where(better, total, least)
        best = tl.where(better, step, best)
    tl.store(scales + item * rows * groups + index, best.to(tl.bfloat16), mask=inside)
