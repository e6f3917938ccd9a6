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

from halfbyte.core import Checkpoint, OutputTensor
from halfbyte.errors import CheckpointError
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index

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


def scale_tensor(layer: str, part: str) -> OutputTensor:
    """The tensor for the scale of "key" or "value"; `layer` is the prefix of a layer's names."""
    return OutputTensor(f"{layer}self_attn.attn.{part[0]}_scale", "F32", (1,))


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
