"""What a model's weights take on each GPU, by headers, by a plan, or by config.json alone.

From a lone config the tensors follow by the architecture, and their bytes by the rules of three
formats: BF16; FP8 as its makers publish it, in blocks of 128 x 128; and INT4 as the recipe `glm-5`
has it, routed experts in groups of 32 and everything else in BF16. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.core import Checkpoint, Scheme
from halfbyte.errors import RecipeError
from halfbyte.formats.config import text_config
from halfbyte.formats.int4 import output_tensors
from halfbyte.formats.servers import is_divided
from halfbyte.formats.weights import DEFAULT_BLOCK, layer_index, logical_weights
from halfbyte.kvcache.layout import (
    BY_HEAD,
    MOST_LAYERS,
    SPARSE,
    entries,
    head_size,
    read_attention,
    runs_indexer,
    size,
)

Format = Literal["int4", "fp8", "bf16"]
FORMATS: tuple[Format, ...] = ("int4", "fp8", "bf16")

INT4 = Scheme(bits=4, group_size=32)
_EXPERT = re.compile(r".*\.experts\.\d+\.(gate|up|down)_proj\.weight")
_FP8 = re.compile(
    r".*\.(self_attn|mlp)\.(?!.*weights_proj)(.*_proj(_with_mqa)?|.*\.w(q_b|k))\.weight"
)
"""Linears that are FP8 where a model is: those of attention and of the MLPs, but for the router and
what weighs the indexer's heads."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor; of the experts of a layer the first stands for all."""

    name: str
    shape: tuple[int, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's weights, by how servers spread them over GPUs."""

    whole: int
    """On every GPU: norms, routers, the first projections of latent attention, the indexer."""
    attention: int
    """Divided by the GPUs that share attention: the rest of attention, and the embedding."""
    divided: int
    """Divided by all GPUs: experts, MLPs, head."""

    @property
    def nbytes(self) -> int:
        return self.whole + self.attention + self.divided

    def on_each(self, gpus: int, sharing: int) -> int:
        """Bytes on each of `gpus`, of which every `sharing` share attention (a divisor)."""
        return self.whole + math.ceil((self.attention * (gpus // sharing) + self.divided) / gpus)


def sum_up(sizes: Iterable[tuple[str, int]], layers: int | None = None) -> Weights:
    """Names and bytes of tensors as `Weights`; of so many decoder `layers`, or of those behind them
    (MTP) as well."""
    whole = attention = divided = 0
    for name, nbytes in sizes:
        if layers is not None and (layer_index(name) or 0) >= layers:
            continue
        if not is_divided(name):
            whole += nbytes
        elif ".self_attn." in name or "embed_tokens" in name:
            attention += nbytes
        else:
            divided += nbytes
    return Weights(whole, attention, divided)


def format_sizes(tensors: Iterable[Tensor], form: Format) -> Iterator[tuple[str, int]]:
    """Names and bytes of tensors in a format.

    Raises RecipeError for INT4 of experts whose columns no groups of 32 divide, or without experts.
    """
    packed = False
    for tensor in tensors:
        expert = _EXPERT.fullmatch(tensor.name) is not None
        packed |= expert
        yield tensor.name, tensor.count * _nbytes(tensor, form, expert)
    if form == "int4" and not packed:
        raise RecipeError("there are no routed experts, so the recipe glm-5 makes nothing INT4")


def _nbytes(tensor: Tensor, form: Format, expert: bool) -> int:
    values = math.prod(tensor.shape)
    if tensor.name.endswith("e_score_correction_bias"):
        return 4 * values
    if form == "int4" and expert:
        return sum(output.nbytes for output in output_tensors(tensor.name, tensor.shape, INT4))
    if form == "fp8" and len(tensor.shape) == 2 and _FP8.fullmatch(tensor.name):
        blocks = (math.ceil(n / b) for n, b in zip(tensor.shape, DEFAULT_BLOCK, strict=True))
        return values + 4 * math.prod(blocks)
    return 2 * values


def stored_format(checkpoint: Checkpoint) -> Format:
    """The narrowest format in a checkpoint, by which people call it: some of it is always wider."""
    found = {weight.encoding for weight in logical_weights(checkpoint).values()}
    return "int4" if "int4" in found else "fp8" if "fp8" in found else "bf16"


def stored_sizes(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """Names and bytes of all stored tensors, by their headers."""
    return ((tensor.name, tensor.nbytes) for tensor in checkpoint.tensors.values())


def stored_tensors(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """The logical tensors of a checkpoint."""
    return (Tensor(w.name, w.shape) for w in logical_weights(checkpoint).values())


def tensors_of(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of the language model that config.json describes, MTP layers included.

    Raises UnsupportedModelError and CheckpointError as `read_attention` does.
    """
    model, attention = text_config(config), read_attention(config)
    hidden, kind = size(model, "hidden_size"), attention.model_type
    vocabulary = (size(model, "vocab_size"), hidden)
    yield Tensor("model.embed_tokens.weight", vocabulary)
    for layer in range(attention.layers + attention.mtp_layers):
        prefix = f"model.layers.{layer}"
        draft = layer >= attention.layers
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{prefix}.{norm}.weight", (hidden,))
        part = _by_head if kind in BY_HEAD else _latent
        for name, *shape in part(model, kind, hidden):
            yield Tensor(f"{prefix}.self_attn.{name}", tuple(shape))
        if kind in SPARSE and (draft or runs_indexer(model, layer)):
            for name, *shape in _indexer(model, hidden):
                yield Tensor(f"{prefix}.self_attn.indexer.{name}", tuple(shape))
        yield from _feed_forward(model, kind, f"{prefix}.mlp.", hidden, layer)
        if draft:
            yield Tensor(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden))
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield Tensor(f"{prefix}.{norm}.weight", (hidden,))
            if kind != "glm_moe_dsa":  # the older models store copies here
                yield Tensor(f"{prefix}.embed_tokens.weight", vocabulary)
                yield Tensor(f"{prefix}.shared_head.head.weight", vocabulary)
    yield Tensor("model.norm.weight", (hidden,))
    if not model.get("tie_word_embeddings", False):
        yield Tensor("lm_head.weight", vocabulary)


Named = Iterator[tuple[Any, ...]]
"""A name, and the dimensions after it."""


def _latent(model: Mapping[str, Any], kind: str, hidden: int) -> Named:
    heads = size(model, "num_attention_heads")
    latent, plain, rope, value = (
        size(model, key)
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if model.get("q_lora_rank") is None:
        yield "q_proj.weight", heads * (plain + rope), hidden
    else:
        query = size(model, "q_lora_rank")
        yield "q_a_proj.weight", query, hidden
        yield "q_a_layernorm.weight", query
        yield "q_b_proj.weight", heads * (plain + rope), query
    yield "kv_a_proj_with_mqa.weight", latent + rope, hidden
    yield "kv_a_layernorm.weight", latent
    yield "kv_b_proj.weight", heads * (plain + value), latent
    yield "o_proj.weight", hidden, heads * value


def _indexer(model: Mapping[str, Any], hidden: int) -> Named:
    heads, own = size(model, "index_n_heads"), size(model, "index_head_dim")
    yield "wq_b.weight", heads * own, size(model, "q_lora_rank")
    yield "wk.weight", own, hidden
    yield "weights_proj.weight", heads, hidden
    yield "k_norm.weight", own
    yield "k_norm.bias", own


def _by_head(model: Mapping[str, Any], kind: str, hidden: int) -> Named:
    heads = size(model, "num_attention_heads")
    own = head_size(model)
    groups = size(model, "num_key_value_heads", heads)
    biased = kind == "qwen2" or bool(model.get("attention_bias", False))
    for name, count in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{name}_proj.weight", count * own, hidden
        if biased:
            yield f"{name}_proj.bias", count * own
    yield "o_proj.weight", hidden, heads * own
    if biased and kind == "llama":
        yield "o_proj.bias", hidden
    if kind in ("qwen3", "qwen3_moe") or model.get("use_qk_norm", False):
        yield "q_norm.weight", own
        yield "k_norm.weight", own


def _feed_forward(
    model: Mapping[str, Any], kind: str, prefix: str, hidden: int, layer: int
) -> Iterator[Tensor]:
    experts = _experts(model, kind, layer)
    if not experts:
        yield from _mlp(prefix, size(model, "intermediate_size"), hidden)
        return
    width = size(model, "moe_intermediate_size")
    yield Tensor(f"{prefix}gate.weight", (experts, hidden))
    yield from _mlp(f"{prefix}experts.0.", width, hidden, experts)
    if kind != "qwen3_moe":
        yield Tensor(f"{prefix}gate.e_score_correction_bias", (experts,))
        if shared := size(model, "n_shared_experts", 0):
            yield from _mlp(f"{prefix}shared_experts.", shared * width, hidden)


def _experts(model: Mapping[str, Any], kind: str, layer: int) -> int:
    """Routed experts of a layer; 0 where it is dense."""
    if kind in ("llama", "qwen2", "qwen3"):
        return 0
    if kind == "qwen3_moe":
        dense = layer in entries(model, "mlp_only_layers")
        sparse = not dense and (layer + 1) % size(model, "decoder_sparse_step", 1) == 0
        return size(model, "num_experts") if sparse else 0
    first = size(model, "first_k_dense_replace", 0, largest=MOST_LAYERS)
    return size(model, "n_routed_experts") if layer >= first else 0


def _mlp(prefix: str, width: int, hidden: int, count: int = 1) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}gate_proj.weight", (width, hidden), count)
    yield Tensor(f"{prefix}up_proj.weight", (width, hidden), count)
    yield Tensor(f"{prefix}down_proj.weight", (hidden, width), count)
