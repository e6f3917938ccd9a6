"""Which architectures can be run layer by layer, and how transformers builds their parts.

Modules come from transformers, so attention, norms, indexer and router compute what the reference
implementation computes. Only the routed experts are ours (`calibration.runner`): transformers keeps
them as one fused parameter per layer, which is more than a layer's share of memory.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.calibration.families import Family, language_model
from halfbyte.core import Checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.formats.config import config_count
from halfbyte.formats.weights import layer_index

_POSITIVE = (
    "hidden_size",
    "n_group",
    "n_routed_experts",
    "num_experts_per_tok",
    "qk_rope_head_dim",
    "topk_group",
)
"""Entries of a config that transformers' modules divide by or count with unchecked."""


@dataclass(frozen=True)
class Architecture:
    """Builds single parts of a model from transformers' own classes."""

    config: Any
    """transformers configuration, MTP layers counted in its per-layer lists."""
    prefix: str
    """What precedes `model.` in tensor names: "" or "language_model."."""
    layers: int
    """Decoder layers of the target model; layers from this index on are MTP layers."""
    _family: Family

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Architecture:
        """Raises UnsupportedModelError for a model type without a layer runner."""
        family, fields, prefix = language_model(checkpoint)
        for name in _POSITIVE:
            if name in fields and config_count(fields, name) < 1:
                raise CheckpointError(f"config.json: {name} is {fields[name]!r:.80}, not 1 or more")
        layers = config_count(fields, "num_hidden_layers")
        # By the tensors that are there: a config may forget to announce its MTP layer.
        stored = max((layer_index(name) or 0 for name in checkpoint.tensors), default=0) + 1
        config = _configuration(family, fields, checkpoint, max(0, stored - layers))
        return cls(config, prefix, layers, family)

    def layer(self, index: int) -> nn.Module:
        """Decoder layer on the meta device: shapes without memory.

        Raises CheckpointError when transformers cannot build one from the configuration.
        """
        try:
            with torch.device("meta"):
                layer = self._build("DecoderLayer", self.config, layer_idx=index)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"transformers builds no layer {index} from config.json: "
                f"{type(error).__name__}: {error}"
            ) from error
        return layer.eval()

    def norm(self) -> nn.Module:
        """An RMSNorm over the hidden size, on the meta device."""
        with torch.device("meta"):
            return self._build("RMSNorm", self.config.hidden_size, eps=self.config.rms_norm_eps)

    def rotary(self, device: torch.device) -> nn.Module:
        return self._build("RotaryEmbedding", self.config).to(device)

    def activation(self) -> nn.Module:
        from transformers.activations import ACT2FN

        activation: nn.Module = ACT2FN[self.config.hidden_act]
        return activation

    @property
    def index_topk(self) -> int | None:
        """Tokens that sparse attention (DSA) selects per query; None for full attention."""
        topk = getattr(self.config, "index_topk", None)
        return int(topk) if topk is not None else None

    def choose_attention(self, length: int) -> None:
        """Use causal attention without a mask when sparse attention would select every token.

        transformers' layer would turn the selection into a mask over all pairs of tokens, which
        costs more than attention itself and keeps the fast kernels away.
        """
        if self.index_topk is not None:
            everything = length <= self.index_topk
            self.config._attn_implementation = _register_causal() if everything else "sdpa"

    def layer_name(self, index: int) -> str:
        return f"{self.prefix}model.layers.{index}."

    def _build(self, kind: str, *args: Any, **kwargs: Any) -> nn.Module:
        name = f"transformers.models.{self._family.module}.modeling_{self._family.module}"
        part: nn.Module = getattr(importlib.import_module(name), self._family.classes + kind)(
            *args, **kwargs
        )
        return part


@functools.cache
def _register_causal() -> str:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = "halfbyte_causal"
    ALL_ATTENTION_FUNCTIONS.register(name, _causal_attention)
    return name


def _causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [B, heads, L, D] in, [B, L, heads, D] out."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling
    )
    return output.transpose(1, 2), None


def _configuration(
    family: Family, fields: Mapping[str, Any], checkpoint: Checkpoint, mtp_layers: int
) -> Any:
    """transformers' configuration, extended by one entry per MTP layer, which it does not know."""
    name = f"transformers.models.{family.module}.configuration_{family.module}"
    plain = {
        key: copy.deepcopy(value)
        for key, value in fields.items()
        if key not in ("quantization_config", "auto_map", "model_type")
    }
    try:
        config = getattr(importlib.import_module(name), family.classes + "Config")(**plain)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"transformers does not accept {checkpoint.path / 'config.json'}: {error}"
        ) from error
    # An MTP layer is a full sparse layer with an indexer of its own.
    for entry, value in (("indexer_types", "full"), ("mlp_layer_types", "sparse")):
        if (entries := getattr(config, entry, None)) is not None:
            setattr(config, entry, [*entries, *[value] * mtp_layers])
    config._attn_implementation = "sdpa"
    return config
