"""Scales that `quantize kv -o` writes, read by SGLang's config, attention and loader of GLM-4.5."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from torch import nn

from halfbyte.kvcache.remedy import SCALES_SHARD

from .scaled import EXPECTED, write_scaled


def loaded(
    config: CompressedTensorsConfig, tensors: dict[str, torch.Tensor]
) -> dict[int, tuple[float, float]]:
    """The scales of attention after SGLang has loaded these tensors."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Module() for _ in EXPECTED)
    for layer, block in enumerate(model.model.layers):
        prefix = f"model.layers.{layer}.self_attn.attn"
        block.self_attn = nn.Module()
        block.self_attn.attn = RadixAttention(
            4, 16, 0.25, num_kv_heads=2, layer_id=layer, quant_config=config, prefix=prefix
        )
    model.config = SimpleNamespace(
        n_routed_experts=4, num_hidden_layers=len(EXPECTED), num_nextn_predict_layers=0
    )
    model.num_fused_shared_experts = 0
    Glm4MoeForCausalLM.load_weights(model, tensors.items())
    found = {}
    for layer, block in enumerate(model.model.layers):
        attention = block.self_attn.attn
        attention.quant_method.process_weights_after_loading(attention)
        found[layer] = (attention.k_scale_float, attention.v_scale_float)
    return found


def test_glm_loads_the_scales(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path)
    record = json.loads((folder / "config.json").read_text())
    config = CompressedTensorsConfig.from_config(record["quantization_config"])
    assert config.kv_cache_quant_algo == "FP8"
    tensors = load_file(folder / SCALES_SHARD)
    assert loaded(config, tensors) == EXPECTED
    # Why the tensors are named as they are: those of llm-compressor are not loaded here.
    others = {name.replace(".attn.", "."): tensor for name, tensor in tensors.items()}
    assert loaded(config, others) == dict.fromkeys(EXPECTED, (1.0, 1.0))
