"""Scales that `quantize kv -o` writes, read by vLLM's config, names and KV cache method."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from halfbyte.kvcache.remedy import SCALES_SHARD

from .scaled import EXPECTED, write_scaled


def test_glm_loads_the_scales(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path)
    record = json.loads((folder / "config.json").read_text())
    config = CompressedTensorsConfig.from_config(record["quantization_config"])
    method = CompressedTensorsKVCacheMethod(config)  # refuses a scheme it does not know
    mapper = config.get_cache_scale_mapper()
    stored = load_file(folder / SCALES_SHARD)
    for layer, expected in EXPECTED.items():
        attention = nn.Module()
        attention._k_scale_cpu, attention._v_scale_cpu = torch.ones(1), torch.ones(1)
        method.create_weights(attention)
        prefix = f"model.layers.{layer}.self_attn.attn."
        for name, tensor in mapper.apply(stored.items()):
            if name.startswith(prefix):
                default_weight_loader(attention.get_parameter(name.removeprefix(prefix)), tensor)
        method.process_weights_after_loading(attention)
        assert (attention._k_scale_float, attention._v_scale_float) == expected
