"""Weights to codes, codes to words or errors, and errors to sums, in one pass each on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.rounding import nearest_integer

_SIZE = 2048


def nearest_codes(
    weights: torch.Tensor, scales: torch.Tensor, code_min: int, code_max: int
) -> torch.Tensor:
    """See `halfbyte.kernels.reference.nearest_codes`."""
    codes = torch.empty(weights.shape, dtype=torch.int8, device=weights.device)
    group = weights.shape[-1] // scales.shape[-1]
    _nearest_codes[(triton.cdiv(codes.numel(), _SIZE),)](
        weights.contiguous(), scales.contiguous(), codes, codes.numel(), group,
        float(code_min), float(code_max), SIZE=_SIZE, num_warps=4,
    )  # fmt: skip
    return codes


def rounding_errors(
    weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """See `halfbyte.kernels.reference.rounding_errors`."""
    errors = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    group = weights.shape[-1] // scales.shape[-1]
    _rounding_errors[(triton.cdiv(errors.numel(), _SIZE),)](
        weights.contiguous(), codes.contiguous(), scales.contiguous(), errors, errors.numel(),
        group, SIZE=_SIZE, num_warps=4,
    )  # fmt: skip
    return errors


def squared_sums(rows: torch.Tensor) -> torch.Tensor:
    """See `halfbyte.kernels.reference.squared_sums`."""
    sums = torch.empty(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    if sums.numel():
        _squared_sums[(sums.numel(),)](
            rows.contiguous(), sums, rows.shape[-1], BLOCK=1024, num_warps=4
        )
    return sums


def pack_codes(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of `halfbyte.kernels.reference.pack_int4`, and bool [1]: whether a code leaves
    -8..7, and so its word is wrong."""
    words = torch.empty(
        *codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int32, device=codes.device
    )
    size = _SIZE // 8
    programs = triton.cdiv(words.numel(), size)
    outside = torch.zeros(programs, dtype=torch.int8, device=codes.device)
    if programs:
        _pack_codes[(programs,)](
            codes.contiguous(), words, outside, words.numel(), SIZE=size, num_warps=4
        )
    return words, outside.any()


@triton.jit
def _pack_codes(codes, words, outside, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    lane = tl.arange(0, 8)[None, :]
    code = tl.load(codes + place[:, None] * 8 + lane, mask=inside[:, None], other=0).to(tl.int32)
    tl.store(words + place, tl.sum(((code + 8) & 15) << (4 * lane), axis=1), mask=inside)
    wrong = ((code < -8) | (code > 7)).to(tl.int32)
    tl.store(outside + tl.program_id(0), tl.max(tl.max(wrong, axis=1), axis=0).to(tl.int8))


@triton.jit
def _squared_sums(rows, sums, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, width, BLOCK):
        value = tl.load(rows + item * width + start + line, mask=start + line < width, other=0.0)
        total += (value * value).to(tl.float64)
    tl.store(sums + item, tl.sum(total, 0))


@triton.jit
def _nearest_codes(  # type: ignore[no-untyped-def]
    weights, scales, codes, count, group, code_min, code_max, SIZE: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    weight = tl.load(weights + place, mask=inside, other=0.0)
    scale = tl.load(scales + place // group, mask=inside, other=1.0).to(tl.float32)
    code = tl.minimum(tl.maximum(tl.div_rn(weight, scale), code_min), code_max)
    tl.store(codes + place, nearest_integer(code).to(tl.int8), mask=inside)


@triton.jit
def _rounding_errors(  # type: ignore[no-untyped-def]
    weights, codes, scales, errors, count, group, SIZE: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    weight = tl.load(weights + place, mask=inside, other=0.0)
    code = tl.load(codes + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + place // group, mask=inside, other=0.0).to(tl.float32)
    # The product is exact: a code has 4 bits, a scale 8.
    tl.store(errors + place, weight - code * scale, mask=inside)
