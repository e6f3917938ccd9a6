"""What experts do to tokens beside matrix products, in one pass each on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_weighted(
    total: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor
) -> None:
    """total[rows] += values * weight; see `halfbyte.kernels.reference.add_rows`."""
    count, width = values.shape
    block = min(1024, triton.next_power_of_2(width))
    _add_weighted[(count, triton.cdiv(width, block))](
        total, rows, values.contiguous(), weight.contiguous(), width, BLOCK=block, num_warps=4
    )


@triton.jit
def _add_weighted(total, rows, values, weight, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = total + tl.load(rows + item) * width + column
    added = tl.load(values + item * width + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    after = before + added * tl.load(weight + item)
    tl.store(place, after.to(total.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """See `halfbyte.kernels.reference.silu_gated`."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    product = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    if count:
        _gated[(count, triton.cdiv(width, 1024))](
            gate_up.contiguous(), product, width, BLOCK=1024, num_warps=4
        )
    return product


@triton.jit
def _gated(gate_up, product, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = gate_up + item * 2 * width + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    opened = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(product.dtype.element_ty).to(tl.float32)
    tl.store(
        product + item * width + column, (opened * up).to(product.dtype.element_ty), mask=inside
    )
