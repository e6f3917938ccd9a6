"""The headers of the real GLM-5.2-FP8, without its weights.

118,629 tensors in 141 shards, 755,617,140,416 bytes of data: names, dtypes, shapes and config of
the published checkpoint, as sparse files that take a few tens of megabytes of disk. Enough to plan
on; reading a weight gives zeros. The cuts between shards are even, the real ones are not known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfbyte.core import OutputTensor

SHARDS = 141
LAYERS = 78
DENSE_LAYERS = 3
EXPERTS = 256
HIDDEN = 6144
VOCABULARY = 154_880
BLOCK = 128


def write_glm52(folder: Path) -> Path:
    """Write config, index and sparse shards into `folder`, which is created; returns it."""
    folder.mkdir(parents=True)
    tensors = list(tensor_table())
    total = sum(tensor.nbytes for tensor in tensors)
    shards: list[list[OutputTensor]] = [[] for _ in range(SHARDS)]
    position = 0
    for tensor in tensors:
        shards[position * SHARDS // total].append(tensor)
        position += tensor.nbytes
    weight_map = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        _write_shard(folder / name, members)
        weight_map.update({tensor.name: name for tensor in members})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(glm52_config(), indent=2))
    return folder


def tensor_table() -> Iterator[OutputTensor]:
    """Every tensor of the checkpoint, in model order."""
    yield OutputTensor("model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN))
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}."
        if layer == LAYERS:
            yield OutputTensor(f"{prefix}eh_proj.weight", "BF16", (HIDDEN, 2 * HIDDEN))
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield OutputTensor(f"{prefix}{norm}.weight", "BF16", (HIDDEN,))
        yield from _attention(prefix, indexer=layer == LAYERS or has_indexer(layer))
        yield from _mlp(prefix, dense=layer < DENSE_LAYERS)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield OutputTensor(f"{prefix}{norm}.weight", "BF16", (HIDDEN,))
    yield OutputTensor("model.norm.weight", "BF16", (HIDDEN,))
    yield OutputTensor("lm_head.weight", "BF16", (VOCABULARY, HIDDEN))


def has_indexer(layer: int) -> bool:
    """Layers 0, 1, 2 and from 6 on every fourth carry an indexer; the others share one."""
    return layer < 3 or (layer >= 6 and (layer - 6) % 4 == 0)


def glm52_config() -> dict[str, Any]:
    """`config.json` of the checkpoint, its list of unconverted modules included."""
    indexers = [layer for layer in range(LAYERS) if has_indexer(layer)]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [154820, 154827, 154829],
        "ep_size": 1,
        "first_k_dense_replace": DENSE_LAYERS,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if layer in indexers else "shared" for layer in range(LAYERS)],
        "initializer_range": 0.02,
        "intermediate_size": 2 * HIDDEN,
        "kv_lora_rank": 512,
        "max_position_embeddings": 1_048_576,
        "mlp_layer_types": ["dense"] * DENSE_LAYERS + ["sparse"] * (LAYERS - DENSE_LAYERS),
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "pretraining_tp": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.12.0",
        "use_cache": True,
        "v_head_dim": 256,
        "vocab_size": VOCABULARY,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(_unconverted(indexers)),
        },
    }


def _unconverted(indexers: list[int]) -> Iterator[str]:
    """541 names, `indexers_proj` among them: no tensor is called that."""
    yield from ("lm_head", "model.embed_tokens", "model.norm")
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm"
        yield f"{prefix}.post_attention_layernorm"
        yield f"{prefix}.self_attn.q_a_layernorm"
        yield f"{prefix}.self_attn.kv_a_layernorm"
        if layer >= DENSE_LAYERS:
            yield f"{prefix}.mlp.gate"
            yield f"{prefix}.mlp.gate.e_score_correction_bias"
        if layer in indexers or layer == LAYERS:
            yield f"{prefix}.self_attn.indexer.k_norm"
            yield f"{prefix}.self_attn.indexer.k_norm.bias"
            yield f"{prefix}.self_attn.indexers_proj"
    yield from (
        f"model.layers.{LAYERS}.{n}" for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    )


def _attention(prefix: str, *, indexer: bool) -> Iterator[OutputTensor]:
    own = f"{prefix}self_attn."
    yield from _fp8(f"{own}q_a_proj", 2048, HIDDEN)
    yield from _fp8(f"{own}q_b_proj", 16384, 2048)
    yield from _fp8(f"{own}kv_a_proj_with_mqa", 576, HIDDEN)
    yield from _fp8(f"{own}kv_b_proj", 28672, 512)
    yield from _fp8(f"{own}o_proj", HIDDEN, 16384)
    yield OutputTensor(f"{own}q_a_layernorm.weight", "BF16", (2048,))
    yield OutputTensor(f"{own}kv_a_layernorm.weight", "BF16", (512,))
    if indexer:
        yield from _fp8(f"{own}indexer.wq_b", 4096, 2048)
        yield from _fp8(f"{own}indexer.wk", 128, HIDDEN)
        yield OutputTensor(f"{own}indexer.weights_proj.weight", "BF16", (32, HIDDEN))
        yield OutputTensor(f"{own}indexer.k_norm.weight", "BF16", (128,))
        yield OutputTensor(f"{own}indexer.k_norm.bias", "BF16", (128,))


def _mlp(prefix: str, *, dense: bool) -> Iterator[OutputTensor]:
    own = f"{prefix}mlp."
    if dense:
        yield from _gate_up_down(own, 2 * HIDDEN)
        return
    for expert in range(EXPERTS):
        yield from _gate_up_down(f"{own}experts.{expert}.", 2048)
    yield from _gate_up_down(f"{own}shared_experts.", 2048)
    yield OutputTensor(f"{own}gate.weight", "BF16", (EXPERTS, HIDDEN))
    yield OutputTensor(f"{own}gate.e_score_correction_bias", "F32", (EXPERTS,))


def _gate_up_down(own: str, width: int) -> Iterator[OutputTensor]:
    yield from _fp8(f"{own}gate_proj", width, HIDDEN)
    yield from _fp8(f"{own}up_proj", width, HIDDEN)
    yield from _fp8(f"{own}down_proj", HIDDEN, width)


def _fp8(module: str, rows: int, columns: int) -> Iterator[OutputTensor]:
    yield OutputTensor(f"{module}.weight", "F8_E4M3", (rows, columns))
    grid = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    yield OutputTensor(f"{module}.weight_scale_inv", "F32", grid)


def _write_shard(path: Path, tensors: list[OutputTensor]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
