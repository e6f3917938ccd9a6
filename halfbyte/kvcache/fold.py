"""Moves the latent of a layer to where FP8 holds it, by a power of two that changes nothing else.

What the norm of the latent gives is cached and read by `kv_b_proj` alone. The weight of the norm
times 2^-k and that of `kv_b_proj` times 2^k move the latent by k octaves, and every product stays
the same number, bit for bit. A quantized `kv_b_proj` is moved by its scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from halfbyte.core import Checkpoint, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index, logical_weights

_NORM = "kv_a_layernorm.weight"
_SIGNS: Mapping[str, int] = {_NORM: -1, "kv_b_proj.weight": 1}


def folded(checkpoint: Checkpoint, exponents: Mapping[int, int]) -> dict[str, torch.Tensor]:
    """The stored tensors that change when the latents of layers are multiplied by 2^-k, `exponents`
    k by layer.

    Raises CheckpointError where the dtype of a tensor does not hold the product exactly.
    """
    made = {}
    with ShardReader(checkpoint) as reader:
        for name, weight in logical_weights(checkpoint).items():
            if exponent := exponent_of(name, exponents):
                part = weight.parts["scale" if "scale" in weight.parts else "weight"]
                made[part.name] = _times_power(part, reader.read(part), exponent)
    return made


def exponent_of(name: str, exponents: Mapping[int, int]) -> int:
    """The power of two by which folds of latents, k by layer, multiply a tensor; 0 for others."""
    layer, sign = layer_index(name), _SIGNS.get(name.partition(".self_attn.")[2], 0)
    return 0 if layer is None else sign * exponents.get(layer, 0)


def folds_between(before: ShardReader, after: ShardReader) -> dict[int, int]:
    """The folds k by layer that make the largest weight of each latent's norm what it is in
    another checkpoint. Layers without one are left out: there the norms are equal, differ
    otherwise, or are not in both."""
    found = {}
    for name, info in after.checkpoint.tensors.items():
        layer, source = layer_index(name), before.checkpoint.tensors.get(name)
        if layer is None or source is None or not name.endswith(_NORM):
            continue
        old, new = (
            reader.read(part).double().abs().amax().item()
            for reader, part in ((before, source), (after, info))
        )
        if old > 0 and new > 0:
            mantissa, exponent = math.frexp(old / new)
            if mantissa == 0.5 and exponent != 1:
                found[layer] = exponent - 1
    return found


def _times_power(info: TensorInfo, values: torch.Tensor, exponent: int) -> torch.Tensor:
    moved = (values.double() * math.ldexp(1.0, exponent)).to(values.dtype)
    back = moved.double() * math.ldexp(1.0, -exponent)
    if not torch.equal(back, values.double()):
        raise CheckpointError(
            f"{info.name} in {info.shard} times 2^{exponent} is not exact in {info.dtype}",
            hint="serve it with a BF16 cache: --kv-cache-dtype bfloat16",
        )
    return moved
