"""Plain torch twins of the kernels: pure functions, any device, the meaning of every format.

They define what a fast kernel must return, so they are written to be read. Indexing is left
to torch, which counts elements in 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack signed 4-bit codes eight to an int32, as compressed-tensors `pack-quantized` does.

    `codes` is int8 [..., K] within -8..7, K a multiple of 8; the result is int32 [..., K/8].
    The stored nibble is `code + 8`; the first column sits in the lowest nibble. Codes out of
    range are not looked for here: `formats.int4.pack` refuses them.
    """
    nibbles = (codes + 8).view(torch.uint8)
    pairs = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return pairs.contiguous().view(torch.int32)


def unpack_int4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `pack_int4`: int32 [..., C] -> int8 codes [..., columns], columns <= 8 * C."""
    pairs = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
    return nibbles[..., :columns].contiguous().view(torch.int8) - 8


def dequantize_int4(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Codes int8 [N, K] times the scale of their group of columns, `scales` [N, groups].

    The product is taken in float32 and then cast to `dtype`.
    """
    rows, columns = codes.shape
    grouped = codes.to(torch.float32).view(rows, scales.shape[1], -1)
    return (grouped * scales.to(torch.float32)[:, :, None]).view(rows, columns).to(dtype)


def nearest_codes(
    weights: torch.Tensor, scales: torch.Tensor, code_min: int, code_max: int
) -> torch.Tensor:
    """Codes int8 [..., N, K] that `weights` float32 [..., N, K] are nearest to with `scales`
    [..., N, groups]: half goes to even, what lies beyond the range is clipped to it."""
    if weights.is_cuda:
        from halfbyte.kernels import codes as gpu

        return gpu.nearest_codes(weights, scales, code_min, code_max)
    grouped = weights.unflatten(-1, (scales.shape[-1], -1))
    codes: torch.Tensor = (grouped / scales.float().unsqueeze(-1)).round_()
    return codes.clamp_(code_min, code_max).to(torch.int8).flatten(-2)


def rounding_errors(
    weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """`weights` float32 [..., N, K] less what `codes` int8 [..., N, K] and `scales`
    [..., N, groups] stand for, float32."""
    if weights.is_cuda:
        from halfbyte.kernels import codes as gpu

        return gpu.rounding_errors(weights, codes, scales)
    made = dequantize_int4(codes.flatten(0, -2), scales.flatten(0, -2)).view_as(weights)
    return torch.sub(weights, made, out=made)


def squared_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row of [..., K] float32, float64 [...]: squares as float32 holds them,
    summed in float64."""
    if rows.is_cuda:
        from halfbyte.kernels import codes as gpu

        return gpu.squared_sums(rows)
    return rows.square().sum(-1, dtype=torch.float64)


def silu_gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [n, I], for `gate_up` [n, 2 I], gate first. Both steps are rounded to the
    dtype, as in a model of two operations."""
    if gate_up.is_cuda:
        from halfbyte.kernels.tokens import gated

        return gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def decode_int4(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [N, K] that `packed` int32 [N, K/8] and `scales` [N, groups] stand for."""
    if packed.is_cuda:
        from halfbyte.kernels.decode import decode_packed

        return decode_packed(packed, scales, dtype)
    return dequantize_int4(unpack_int4(packed, 8 * packed.shape[1]), scales, dtype)


def linear_int4(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [M, K] times the weight [N, K] transposed that `packed` int32 [N, K/8] and `scales`
    [N, groups] stand for: [M, N] in the dtype of `x`, from sums in float32."""
    if x.is_cuda:
        from halfbyte.kernels import w4a16

        weight = w4a16.Packed(packed, scales)
        if w4a16.usable(weight):
            return w4a16.linear(x, w4a16.Weight.of(weight))
    return torch.nn.functional.linear(x.float(), decode_int4(packed, scales)).to(x.dtype)


def experts_int4(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
    router: torch.Tensor,
) -> torch.Tensor:
    """The routed experts of a layer, [M, H], for `x` [M, H]; see `halfbyte.kernels.w4a16.experts`.

    `gate_up` and `down` are codes int32 [E, 2 I, H/8] and [E, H, I/8] with their scales.
    """
    if x.is_cuda:
        from halfbyte.kernels import w4a16

        first, second = w4a16.Packed(*gate_up), w4a16.Packed(*down)
        if w4a16.usable(first, gate_up=True) and w4a16.usable(second):
            both = w4a16.Weight.of(first), w4a16.Weight.of(second)
            return w4a16.experts(x, *both, chosen, router)

    def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (decode_int4(w[0][expert], w[1][expert]) for w in (gate_up, down))
        return first, second

    return routed_experts(x, gate_up[0].shape[0], weights, chosen, router).to(x.dtype)


def routed_experts(
    x: torch.Tensor,
    count: int,
    weights: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    chosen: torch.Tensor,
    router: torch.Tensor,
) -> torch.Tensor:
    """float32 [M, H] of the `count` routed experts of a layer, for `x` [M, H].

    `weights` gives gate and up of an expert, float32 [2 I, H] with the gate first, and its down
    projection [H, I]; `chosen` int [M, T] are the experts of a token, `router` float32 [M, T] their
    weights. silu(gate) times up is rounded to the dtype of `x`; all else is float32.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(count):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if len(token):
            first, second = weights(expert)
            hidden = torch.nn.functional.linear(x[token].float(), first)
            made = torch.nn.functional.linear(silu_gated(hidden).to(x.dtype).float(), second)
            y.index_add_(0, token, made * router[token, place, None])
    return y


def add_rows(
    total: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor
) -> None:
    """total[rows] += values * weight, in place: `total` [T, H], `rows` int64 [n], all different,
    `values` [n, H], `weight` float32 [n, 1]. Products and sums are taken in float32."""
    if total.is_cuda:
        from halfbyte.kernels.tokens import add_weighted

        add_weighted(total, rows, values, weight)
    else:
        total.index_copy_(0, rows, (total[rows] + values * weight).to(total.dtype))


def dequantize_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """F8_E4M3 `weight` [N, K] times the scale of each block of `block` = (rows, columns).

    `scale` is [ceil(N / rows), ceil(K / columns)]; blocks at the lower and right edge may be
    partial. The product is taken in float32 and then cast to `dtype`.
    """
    (rows, columns), (block_rows, block_columns) = weight.shape, block
    by_row = scale.to(torch.float32).repeat_interleave(block_rows, dim=0)[:rows]
    values = weight.to(torch.float32)
    whole = columns // block_columns
    if whole:
        inner = values[:, : whole * block_columns].view(rows, whole, block_columns)
        inner.mul_(by_row[:, :whole, None])
    if whole * block_columns < columns:
        values[:, whole * block_columns :].mul_(by_row[:, whole:])
    return values.to(dtype)
