"""Small configs of the architectures we quantize, and the tensors each one stores.

Key for key and name for name what the published checkpoints have, with small numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

ModelType = Literal["glm_moe_dsa", "glm4_moe", "deepseek_v3"]
Kind = Literal["linear", "float", "norm", "bias", "correction"]
"""`linear` is what an FP8 source stores as FP8; `float` is a matrix that stays BF16."""
TensorSpec = tuple[str, tuple[int, ...], Kind]
"""Name, shape and kind of a tensor."""

VOCABULARY = 320
EOS_TOKEN_IDS = [256, 257, 259]


def tiny_config(
    model_type: ModelType,
    *,
    layers: int,
    dense_layers: int,
    experts: int,
    hidden: int,
    moe_intermediate: int,
    index_topk: int,
    mtp: bool,
    tied: bool,
) -> dict[str, Any]:
    """The model config without `quantization_config`, in the keys that servers read."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": moe_intermediate,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(mtp),
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(2, experts),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS_TOKEN_IDS,
        "pad_token_id": EOS_TOKEN_IDS[0],
        "use_cache": True,
    }
    if model_type == "glm4_moe":
        return config | {
            "architectures": ["Glm4MoeForCausalLM"],
            "num_key_value_heads": 2,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        }
    config |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "moe_layer_freq": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "qk_head_dim": 32,
        "v_head_dim": 32,
        "rope_interleave": True,
    }
    if model_type == "deepseek_v3":
        return config
    return config | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "moe_router_dtype": "float32",
        "mlp_layer_types": ["dense"] * dense_layers + ["sparse"] * (layers - dense_layers),
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": index_topk,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(layers)],
        "indexer_rope_interleave": True,
    }


def tensor_specs(config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, MTP layer included, in the published names."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    vocabulary = (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", vocabulary, "float"
    for index in range(layers + config["num_nextn_predict_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,), "norm"
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), "norm"
        for name, shape, kind in _attention(config, index):
            yield f"{layer}.self_attn.{name}", shape, kind
        for name, shape, kind in _feed_forward(config, index):
            yield f"{layer}.mlp.{name}", shape, kind
        if index >= layers:
            yield f"{layer}.eh_proj.weight", (hidden, 2 * hidden), "float"
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{layer}.{norm}.weight", (hidden,), "norm"
            if config["model_type"] != "glm_moe_dsa":  # the older models store copies here
                yield f"{layer}.embed_tokens.weight", vocabulary, "float"
                yield f"{layer}.shared_head.head.weight", vocabulary, "float"
    yield "model.norm.weight", (hidden,), "norm"
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", vocabulary, "float"


def _attention(config: Mapping[str, Any], index: int) -> Iterator[TensorSpec]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "glm4_moe":
        size = config["head_dim"]
        for name, count in (("q", heads), ("k", config["num_key_value_heads"])):
            yield f"{name}_proj.weight", (count * size, hidden), "linear"
            yield f"{name}_proj.bias", (count * size,), "bias"
            yield f"{name}_norm.weight", (size,), "norm"
        yield "v_proj.weight", (config["num_key_value_heads"] * size, hidden), "linear"
        yield "v_proj.bias", (config["num_key_value_heads"] * size,), "bias"
        yield "o_proj.weight", (hidden, heads * size), "linear"
        return
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
    yield "q_a_proj.weight", (query, hidden), "linear"
    yield "q_a_layernorm.weight", (query,), "norm"
    yield "q_b_proj.weight", (heads * (nope + rope), query), "linear"
    yield "kv_a_proj_with_mqa.weight", (latent + rope, hidden), "linear"
    yield "kv_a_layernorm.weight", (latent,), "norm"
    yield "kv_b_proj.weight", (heads * (nope + value), latent), "linear"
    yield "o_proj.weight", (hidden, heads * value), "linear"
    kinds = config.get("indexer_types", [])
    is_mtp = index >= config["num_hidden_layers"]
    if kinds and (is_mtp or kinds[index] == "full"):
        heads, size = config["index_n_heads"], config["index_head_dim"]
        yield "indexer.wq_b.weight", (heads * size, query), "linear"
        yield "indexer.wk.weight", (size, hidden), "linear"
        yield "indexer.weights_proj.weight", (heads, hidden), "float"
        yield "indexer.k_norm.weight", (size,), "norm"
        yield "indexer.k_norm.bias", (size,), "bias"


def _feed_forward(config: Mapping[str, Any], index: int) -> Iterator[TensorSpec]:
    hidden, size = config["hidden_size"], config["moe_intermediate_size"]
    blocks = [f"experts.{e}." for e in range(config["n_routed_experts"])] + ["shared_experts."]
    if index < config["first_k_dense_replace"]:
        blocks, size = [""], config["intermediate_size"]
    else:
        yield "gate.weight", (config["n_routed_experts"], hidden), "float"
        yield "gate.e_score_correction_bias", (config["n_routed_experts"],), "correction"
    for block in blocks:
        yield f"{block}gate_proj.weight", (size, hidden), "linear"
        yield f"{block}up_proj.weight", (size, hidden), "linear"
        yield f"{block}down_proj.weight", (hidden, size), "linear"
