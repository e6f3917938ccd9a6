"""What one token takes in a server's KV cache, from config.json alone. No torch.

Servers hold the cache in pools of rows: latent rows (MLA), keys and values by head, and for sparse
attention (DSA) the keys of the indexer. The layouts are those of SGLang 0.5.23
(`pool_configurator.py`, `memory_pool.py`) and vLLM 0.33 (`kv_cache_interface.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.errors import CheckpointError, UnsupportedModelError, UsageError
from halfbyte.formats.config import text_config

Kv = Literal["bf16", "fp8", "fp8-raw"]
"""Of the cache. Under `fp8` a DSA row holds its own scales and BF16 RoPE values (FlashMLA's form);
`fp8-raw` is the row without either, of TRT-LLM's and TileLang's kernels."""

LATENT = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa")
BY_HEAD = ("glm4_moe", "qwen3_moe", "llama", "qwen2", "qwen3")
"""Model types whose cache is known: with multi-head latent attention, and with keys and values."""
SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Those of the former with an indexer."""

TILE = 128
"""Values of a latent row, or of an index key, that share a float32 scale."""
MOST_LAYERS = 1_000
LARGEST = 1 << 24
"""Of any other number in a config: no dimension of a published model comes near."""
LONGEST = 1 << 30
"""Tokens of a context."""


@dataclass(frozen=True, slots=True)
class Part:
    """A pool of the cache."""

    name: str
    layers: int
    row: int
    """Bytes of a token in each of its layers, on one GPU."""

    @property
    def nbytes(self) -> int:
        return self.layers * self.row


@dataclass(frozen=True, slots=True)
class Latent:
    """Rows of latent attention: one for all heads, so every GPU of a tensor-parallel group has all
    of them."""

    latent: int
    rope: int
    sparse: bool


@dataclass(frozen=True, slots=True)
class ByHead:
    """Keys and values of heads, which a tensor-parallel group divides."""

    heads: int
    size: int


@dataclass(frozen=True, slots=True)
class Attention:
    """What the cache of a model is made of."""

    model_type: str
    layers: int
    mtp_layers: int
    """Layers that predict further tokens; each has rows of its own."""
    query_heads: int
    rows: Latent | ByHead
    index_layers: int
    """Decoder layers that run the indexer themselves; MTP layers always do."""
    index_size: int
    context: int
    """Tokens that the model was made for; 0 when config.json does not say."""

    @property
    def replicated(self) -> bool:
        """Whether all GPUs of a tensor-parallel group hold the same rows."""
        return isinstance(self.rows, Latent)


def read_attention(config: Mapping[str, Any]) -> Attention:
    """The attention that config.json, or its text config, describes.

    Raises UnsupportedModelError for an architecture whose cache is not known, CheckpointError for
    a number that is missing or absurd.
    """
    model = text_config(config)
    model_type = str(model.get("model_type", "unknown"))[:80]
    if model_type not in (*LATENT, *BY_HEAD):
        raise UnsupportedModelError(
            f"config.json has model_type {model_type!r}, whose KV cache is not known; known are "
            + ", ".join((*LATENT, *BY_HEAD))
        )
    _require_full_attention(model)
    layers = size(model, "num_hidden_layers", largest=MOST_LAYERS)
    heads = size(model, "num_attention_heads")
    rows: Latent | ByHead
    if model_type in LATENT:
        sparse = model_type in SPARSE
        rows = Latent(size(model, "kv_lora_rank"), size(model, "qk_rope_head_dim"), sparse)
    else:
        rows = ByHead(size(model, "num_key_value_heads", heads), head_size(model))
    indexed = model_type in SPARSE
    return Attention(
        model_type=model_type,
        layers=layers,
        mtp_layers=size(model, "num_nextn_predict_layers", 0, largest=MOST_LAYERS),
        query_heads=heads,
        rows=rows,
        index_layers=sum(runs_indexer(model, i) for i in range(layers)) if indexed else 0,
        index_size=size(model, "index_head_dim") if indexed else 0,
        context=size(model, "max_position_embeddings", 0, largest=LONGEST),
    )


def _require_full_attention(model: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for layers that keep only a window of their tokens."""
    other = {str(kind)[:40] for kind in entries(model, "layer_types")} - {"full_attention"}
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    if other or window is not None:
        which = f"layers of {min(other)!r}" if other else f"a sliding window of {window!r:.40}"
        raise UnsupportedModelError(
            f"config.json has {which}, whose KV cache is not known; known is full attention"
        )


def runs_indexer(model: Mapping[str, Any], layer: int) -> bool:
    """Whether a decoder layer selects tokens itself, or takes the selection of one before it.

    In the order in which SGLang asks the config (`dsa_layer_skips_topk`).
    Raises CheckpointError for a config that says neither.
    """
    types, pattern = model.get("indexer_types"), model.get("index_topk_pattern")
    if types is not None:
        return bool(_entry(types, layer, "indexer_types") != "shared")
    if pattern is not None:
        return bool(_entry(pattern, layer, "index_topk_pattern") != "S")
    every = size(model, "index_topk_freq", 1)
    offset = size(model, "index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % every == 0


def _entry(values: Any, layer: int, key: str) -> Any:
    """What a list or text says of a layer; one that ends before says nothing."""
    if not isinstance(values, list | str):
        raise CheckpointError(f"config.json: {key} is {values!r:.80}, not a list by layer")
    return values[layer] if layer < len(values) else None


def kv_parts(attention: Attention, kv: Kv, gpus: int, *, mtp: bool = True) -> tuple[Part, ...]:
    """The pools of a cache on each of `gpus` that share the attention, and a token's bytes in them.

    Raises UsageError for a form that the model does not have, or for more GPUs than can share it.
    """
    if attention.query_heads % gpus:
        raise UsageError(
            f"{gpus} GPUs cannot share {attention.query_heads} attention heads",
            hint=f"--gpus {math.gcd(gpus, attention.query_heads)}",
        )
    draft = attention.mtp_layers if mtp else 0
    rows = attention.rows
    if isinstance(rows, ByHead):
        if kv == "fp8-raw":
            raise _without_raw(attention)
        if rows.heads % gpus and gpus % rows.heads:
            raise UsageError(
                f"{gpus} GPUs cannot share {rows.heads} heads of keys and values",
                hint=f"--gpus {math.gcd(gpus, rows.heads)}",
            )
        # Where heads are fewer than GPUs, several hold the same one.
        row = 2 * max(1, rows.heads // gpus) * rows.size * (2 if kv == "bf16" else 1)
        return _with_draft("keys and values", attention.layers, row, draft)
    if kv == "fp8-raw" and not rows.sparse:
        raise _without_raw(attention)
    parts = _with_draft("latent rows", attention.layers, latent_row(rows, kv), draft)
    if rows.sparse:
        # FP8 whatever the rows are, with a float32 scale for each tile.
        key = attention.index_size + 4 * math.ceil(attention.index_size / TILE)
        parts += _with_draft("index keys", attention.index_layers, key, draft)
    return parts


def latent_row(rows: Latent, kv: Kv) -> int:
    """Bytes of a token in one layer of latent attention."""
    if kv == "bf16":
        return 2 * (rows.latent + rows.rope)
    if kv == "fp8" and rows.sparse:
        return rows.latent + 4 * math.ceil(rows.latent / TILE) + 2 * rows.rope
    return rows.latent + rows.rope


def _with_draft(name: str, layers: int, row: int, draft: int) -> tuple[Part, ...]:
    parts = (Part(name, layers, row), Part(f"{name}, MTP", draft, row))
    return tuple(part for part in parts if part.layers)


def _without_raw(attention: Attention) -> UsageError:
    return UsageError(
        f"--kv fp8-raw is of models with an indexer, {', '.join(SPARSE)}; this one is"
        f" {attention.model_type}",
        hint="--kv fp8",
    )


def entries(model: Mapping[str, Any], key: str) -> list[Any]:
    """A list of a config; empty where there is none. Raises CheckpointError for anything else."""
    value = model.get(key)
    if value is not None and not isinstance(value, list):
        raise CheckpointError(f"config.json: {key} is {value!r:.40}, not a list")
    return value or []


def head_size(model: Mapping[str, Any]) -> int:
    """Values of a head: `head_dim`, or an even share of the hidden size.

    Raises CheckpointError as `size` does, and for a hidden size smaller than the number of heads.
    """
    hidden, heads = size(model, "hidden_size"), size(model, "num_attention_heads")
    if hidden < heads:
        raise CheckpointError(
            f"config.json: hidden_size is {hidden}, less than num_attention_heads, {heads}"
        )
    return size(model, "head_dim", hidden // heads)


def size(
    model: Mapping[str, Any], key: str, default: int | None = None, *, largest: int = LARGEST
) -> int:
    """A whole number of a config, from 1 (from 0 if that is its default) to `largest`.

    Raises CheckpointError for anything else, and for one that is missing without a default.
    """
    value = model.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(
            f"config.json has no {key}",
            hint="copy config.json again from where the model was published",
        )
    least = 0 if default == 0 else 1
    if type(value) is not int or not least <= value <= largest:
        raise CheckpointError(
            f"config.json: {key} is {value!r:.40}, not a whole number from {least} to {largest:,}"
        )
    return value
