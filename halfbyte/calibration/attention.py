"""Between a layer's attention and its KV cache: where what is cached is seen, or replaced.

Latent attention caches its latent behind the norm and the one RoPE key of all heads: transformers'
modules have both in hand in `expand_kv`. Other attention caches keys (behind RoPE) and values,
which reach transformers' attention interface as they are cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfbyte.core import Checkpoint
from halfbyte.errors import UsageError
from halfbyte.kvcache.layout import SPARSE, Kv, Latent, read_attention
from halfbyte.kvcache.rows import Cache, cache_of
from halfbyte.kvcache.scales import read_scales


def layer_caches(checkpoint: Checkpoint, kv: Kv) -> Callable[[int], Cache]:
    """The cache of each layer of a checkpoint, with the scales that it holds.

    Raises UnsupportedModelError for a model whose cache is not known, UsageError for a format that
    it does not have, CheckpointError for scales that are none.
    """
    attention = read_attention(checkpoint.config)
    if kv == "fp8-raw" and attention.model_type not in SPARSE:
        raise UsageError(
            f"--kv-cache fp8-raw is of models with an indexer, {', '.join(SPARSE)}; this one is"
            f" {attention.model_type}",
            hint="--kv-cache fp8",
        )
    scales = {} if isinstance(attention.rows, Latent) else read_scales(checkpoint)
    return lambda layer: cache_of(attention, kv, scales.get(layer, (1.0, 1.0)))


def put_cache(attention: nn.Module, cache: Cache) -> None:
    """Have a layer's attention read back what `cache` makes of what it caches.

    Rounding what is read is rounding what is written, for a cache that gives its own values back
    as they are.
    """
    module: Any = attention
    if hasattr(module, "kv_b_proj"):
        expand = module.expand_kv
        module.expand_kv = lambda latent, rope: expand(*cache(latent, rope))
    else:
        module.halfbyte_cache = cache
        module.config._attn_implementation = _register_cached()


@functools.cache
def _register_cached() -> str:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, plain = "halfbyte_cached", ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kw: Any,
    ) -> Any:
        return plain(module, query, *module.halfbyte_cache(key, value), *args, **kw)

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name
