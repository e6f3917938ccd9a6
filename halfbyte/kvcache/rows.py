"""What comes back from a server's KV cache: rows rounded as engines store them.

FP8 is e4m3 everywhere: 3 bits of mantissa, normal from 2^-6, 448 at most. Casts disagree about
more than that (torch 2.11 makes NaN of 465 on a GPU, and 448 of it on a CPU), so one function here
says what happens, and nothing else casts.

The sparse row is that of vLLM 0.33 (`concat_and_cache_ds_mla`): scales of tiles are powers of two.
SGLang 0.5.23 has the same row and takes amax / 448 itself as scale, which costs 0.3 dB less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfbyte.kvcache.layout import TILE, Attention, Kv, Latent

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3's numbers."""
SMALLEST_NORMAL = 2.0**-6
"""Below it steps stay at 2^-9, so that a number loses a bit with each halving."""
SMALLEST_TILE_SCALE = 2.0**-13
"""1e-4, vLLM's floor of it, as a power of two."""

Cache = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""What a layer of attention puts into its cache -> what it reads back, in the same dtype: the
latent [..., latent] and the RoPE part [..., RoPE], or keys and values [..., size]."""


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The e4m3 numbers that float32 or narrower `values` are nearest to, half to even.

    What lies beyond 448, infinity included, becomes 448 with its sign; NaN stays NaN.
    """
    return values.clamp(-LARGEST, LARGEST).to(E4M3)


def round_flat(values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`values` as FP8 with one scale has them: what is stored is values / scale."""
    return (to_e4m3(values.float() / scale).float() * scale).to(values.dtype)


def power_of_two_scales(amax: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two, float32, that bring float32 `amax` to 448 or below; 1 for 0."""
    mantissa, exponent = torch.frexp(amax / LARGEST)
    # frexp's mantissa is from 1/2 up to 1, so that only 1/2 itself is a power of two.
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(amax > 0, scales, torch.ones_like(scales))


def pack_sparse(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rows of a DSA cache, uint8 [..., bytes]: 656 bytes for a latent of 512 and 64 RoPE values.

    The latent in FP8, a float32 scale for each tile of 128, the RoPE part in BF16. A tile's scale
    is that of its largest finite value: NaN stays NaN in its place, infinity becomes 448 times
    the scale.
    """
    tiles = _tiles(latent.float())
    finite = torch.where(tiles.isfinite(), tiles, 0.0)
    scales = power_of_two_scales(finite.abs().amax(-1)).clamp_min(SMALLEST_TILE_SCALE)
    scales = torch.where(finite.any(-1), scales, torch.full_like(scales, SMALLEST_TILE_SCALE))
    codes = to_e4m3(tiles / scales[..., None]).flatten(-2)[..., : latent.shape[-1]]
    parts = (codes, scales, rope.bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack_sparse(rows: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the RoPE part of packed rows, float32."""
    scales_end = latent + 4 * -(-latent // TILE)
    codes = rows[..., :latent].contiguous().view(E4M3).float()
    scales = rows[..., latent:scales_end].contiguous().view(torch.float32)
    values = (_tiles(codes) * scales[..., None]).flatten(-2)[..., :latent]
    return values, rows[..., scales_end:].contiguous().view(torch.bfloat16).float()


def _tiles(values: torch.Tensor) -> torch.Tensor:
    """[..., n] as [..., tiles, 128], the last tile filled up with zeros."""
    missing = -values.shape[-1] % TILE
    padded: torch.Tensor = torch.nn.functional.pad(values, (0, missing))
    return padded.reshape(*padded.shape[:-1], -1, TILE)


def cache_of(attention: Attention, kv: Kv, scales: tuple[float, float] = (1.0, 1.0)) -> Cache:
    """The cache of a layer in a format. `scales` are `k_scale` and `v_scale` of a model with keys
    and values; latent rows have none, since SGLang ignores one when it writes and applies it when
    it reads."""
    if kv == "bf16":
        return lambda first, second: (
            first.bfloat16().to(first.dtype),
            second.bfloat16().to(second.dtype),
        )
    if isinstance(attention.rows, Latent):
        if kv == "fp8" and attention.rows.sparse:
            return _sparse
        return lambda latent, rope: (round_flat(latent), round_flat(rope))
    return lambda key, value: (round_flat(key, scales[0]), round_flat(value, scales[1]))


def _sparse(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = unpack_sparse(pack_sparse(latent, rope), latent.shape[-1])
    return made[0].to(latent.dtype), made[1].to(rope.dtype)
