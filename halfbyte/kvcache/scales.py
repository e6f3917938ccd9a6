"""Scales of a KV cache in a checkpoint: how they are named, and what config.json says of them.

Servers read them for models with keys and values. The name that is written is the one which both
load for GLM-4.5: SGLang 0.5.23 takes it as it is and drops every other form there, vLLM 0.33 takes
them all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from halfbyte.core import Checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index, quantization_config

_SCALE = re.compile(r"\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")

SCHEME: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
"""`kv_cache_scheme` of compressed-tensors for one static scale to a tensor. Of all schemes that it
knows this is the one that SGLang reads."""


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of a layer's cached keys or values, under any name for it."""
    return _SCALE.search(name) is not None


def scale_tensor(layer: str, part: str) -> str:
    """The name for the scale of "key" or "value", float32 [1]; `layer` precedes a layer's names."""
    return f"{layer}self_attn.attn.{part[0]}_scale"


def with_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with `kv_cache_scheme` in its quantization config.

    Raises CheckpointError for one that is not compressed-tensors, of which servers read it.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and inner.get("quantization_config") is not None:
        return {**config, "text_config": with_scheme(inner)}
    found = quantization_config(config)
    if found.get("quant_method") != "compressed-tensors":
        raise CheckpointError(
            f"config.json has quant_method {found.get('quant_method')!r:.40}; servers read scales"
            " of a KV cache from compressed-tensors",
            hint="quantize the checkpoint first, and measure the result: quantize SOURCE --to int4",
        )
    return {**config, "quantization_config": {**found, "kv_cache_scheme": dict(SCHEME)}}


def read_scales(checkpoint: Checkpoint) -> dict[int, tuple[float, float]]:
    """The scales of keys and values that a checkpoint has, by layer; one that is missing is 1.

    Raises CheckpointError for a scale that is not one positive number.
    """
    found: dict[int, dict[str, float]] = {}
    with ShardReader(checkpoint) as reader:
        for name, info in checkpoint.tensors.items():
            match, layer = _SCALE.search(name), layer_index(name)
            if match is None or layer is None:
                continue
            if math.prod(info.shape) != 1:
                raise CheckpointError(
                    f"{name} in {info.shard} has shape {list(info.shape)}, one number is expected"
                )
            value = float(reader.read(info).float().item())
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(
                    f"{name} in {info.shard} is {value}, a scale is positive",
                    hint="the shard is damaged; download it again",
                )
            found.setdefault(layer, {})[match[1]] = value
    return {layer: (own.get("k", 1.0), own.get("v", 1.0)) for layer, own in found.items()}
