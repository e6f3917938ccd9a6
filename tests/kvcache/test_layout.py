"""Bytes of a token against published figures and servers' logs, and configs that lie."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from halfbyte.errors import CheckpointError, HalfbyteError, UnsupportedModelError, UsageError
from halfbyte.kvcache.layout import Kv, kv_parts, read_attention, runs_indexer
from halfbyte.kvcache.sizes import format_sizes, sum_up, tensors_of
from halfbyte.testing.glm52 import glm52_config

from .published import DEEPSEEK_V3, GLM_45, KIMI_K26, LLAMA_2_7B, QWEN3_235B

GLM_52 = glm52_config()


def per_token(config: dict[str, Any], kv: Kv, gpus: int = 8, *, mtp: bool = True) -> int:
    return sum(part.nbytes for part in kv_parts(read_attention(config), kv, gpus, mtp=mtp))


@pytest.mark.parametrize(
    ("config", "kv", "expected"),
    [
        (KIMI_K26, "bf16", 70_272),  # SGLang's pool of Kimi K2, measured
        (KIMI_K26, "fp8", 35_136),
        (GLM_52, "fp8", 54_728),  # local-inference-lab/vllm#82
        (GLM_52, "bf16", 79 * 1152 + 22 * 132),
        (GLM_52, "fp8-raw", 79 * 576 + 22 * 132),
        (DEEPSEEK_V3, "bf16", 62 * 1152),
        # A head of keys and one of values on each of 8 GPUs, in 92 layers and an MTP layer.
        (GLM_45, "bf16", 93 * 2 * 128 * 2),
        (GLM_45, "fp8", 93 * 2 * 128),
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], kv: Kv, expected: int) -> None:
    assert per_token(config, kv) == expected


@pytest.mark.parametrize(
    ("config", "kv", "gpus", "mtp", "expected"),
    [
        (DEEPSEEK_V3, "bf16", 4, False, 70_272),
        (DEEPSEEK_V3, "bf16", 4, True, 71_424),
        (DEEPSEEK_V3, "fp8", 8, True, 35_712),
        (GLM_52, "bf16", 8, False, 92_628),
        (GLM_52, "bf16", 1, True, 93_912),
        (GLM_52, "fp8", 4, False, 53_940),
        (GLM_52, "fp8", 8, True, 54_728),
        (GLM_52, "fp8-raw", 8, False, 47_700),
        (GLM_52, "fp8-raw", 8, True, 48_408),
        (GLM_45, "bf16", 1, True, 380_928),
        (GLM_45, "fp8", 4, False, 47_104),
        (QWEN3_235B, "bf16", 4, True, 48_128),
        (QWEN3_235B, "fp8", 8, True, 24_064),
        (LLAMA_2_7B, "fp8", 4, True, 65_536),
    ],
)
def test_bytes_of_a_token_as_sglang_counts_them(
    config: dict[str, Any], kv: Kv, gpus: int, mtp: bool, expected: int
) -> None:
    """By `DefaultPoolConfigurator` of SGLang 0.5.23, run with these configs on a CPU."""
    assert per_token(config, kv, gpus, mtp=mtp) == expected


def test_pools_of_glm_52() -> None:
    parts = kv_parts(read_attention(GLM_52), "fp8", 8)
    assert [(part.name, part.layers, part.row) for part in parts] == [
        ("latent rows", 78, 656),
        ("latent rows, MTP", 1, 656),
        ("index keys", 21, 132),
        ("index keys, MTP", 1, 132),
    ]


def test_without_unused_index_keys_the_pool_grows_as_logged() -> None:
    """sgl-project/sglang#30310: from 2,430,528 tokens to 2,813,952 in the same memory, raw rows of
    the decoder layers; #30531 has bytes of a token, rounded from gigabytes."""
    everywhere = GLM_52 | {"indexer_types": ["full"] * 78}
    before, after = (per_token(c, "fp8-raw", mtp=False) for c in (everywhere, GLM_52))
    assert before / after == pytest.approx(2_813_952 / 2_430_528, rel=1e-4)
    assert (before, after) == (pytest.approx(55_225, rel=1e-4), pytest.approx(47_702, rel=1e-4))


def test_keys_and_values_as_logged() -> None:
    """vllm-project/vllm#21348: SGLang's pool of Qwen3-235B on 4 GPUs, 367,404 tokens, K and V of
    8.23 GiB each."""
    assert 367_404 * per_token(QWEN3_235B, "bf16", 4) / 2 / 2**30 == pytest.approx(8.23, abs=0.005)


def test_latent_rows_are_on_every_gpu_and_heads_are_divided() -> None:
    assert per_token(DEEPSEEK_V3, "bf16", 1) == per_token(DEEPSEEK_V3, "bf16", 8)
    qwen = [per_token(QWEN3_235B, "bf16", gpus) for gpus in (1, 2, 4, 8)]
    # Four heads: the eighth GPU has one that another has as well.
    assert [qwen[0] / count for count in qwen] == [1, 2, 4, 4]
    # Every head has keys and values of its own: half a megabyte a token.
    assert per_token(LLAMA_2_7B, "bf16", 1) == 512 * 1024


def test_layers_that_run_the_indexer() -> None:
    expected = [0, 1, 2, *range(6, 78, 4)]
    without = {key: value for key, value in GLM_52.items() if key != "indexer_types"}
    letters = "".join("F" if layer in expected else "S" for layer in range(78))
    for config in (GLM_52, without, without | {"index_topk_pattern": letters}):
        assert [layer for layer in range(78) if runs_indexer(config, layer)] == expected
    older = {k: v for k, v in without.items() if k not in ("index_topk_freq",)}
    assert all(runs_indexer(older, layer) for layer in range(78))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "mamba"}, UnsupportedModelError, "model_type 'mamba', whose KV cache is"),
        ({"model_type": None}, UnsupportedModelError, "model_type 'None'"),
        ({"kv_lora_rank": None}, CheckpointError, "has no kv_lora_rank"),
        ({"kv_lora_rank": -512}, CheckpointError, "is -512, not a whole number from 1 to 16,777,2"),
        ({"kv_lora_rank": "512"}, CheckpointError, "kv_lora_rank is '512'"),
        ({"kv_lora_rank": True}, CheckpointError, "kv_lora_rank is True"),
        ({"kv_lora_rank": 512.0}, CheckpointError, "kv_lora_rank is 512.0"),
        ({"num_hidden_layers": 10**12}, CheckpointError, "is 1000000000000, not .* 1 to 1,000"),
        ({"num_nextn_predict_layers": 10**9}, CheckpointError, "num_nextn_predict_layers is"),
        ({"qk_rope_head_dim": 10**1000}, CheckpointError, "qk_rope_head_dim is 1000"),
        ({"num_attention_heads": 0}, CheckpointError, "num_attention_heads is 0"),
        ({"indexer_types": 3}, CheckpointError, "indexer_types is 3, not a list by layer"),
        ({"sliding_window": 4096}, UnsupportedModelError, "a sliding window of 4096"),
        ({"layer_types": ["linear_attention"]}, UnsupportedModelError, "layers of 'linear_att"),
    ],
)
def test_what_a_config_must_not_say(
    change: dict[str, Any], error: type[HalfbyteError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_attention(GLM_52 | change)
    assert len(str(caught.value)) < 250


HOSTILE: list[Any] = [
    None, True, 0, -1, 3, 10**30, 1.5, math.nan, "", "512", "FS", [], ["shared"],
    [[]], {}, {"a": 1},
]  # fmt: skip
FIELDS = sorted(
    {*GLM_52, *GLM_45, *QWEN3_235B, "q_lora_rank", "mlp_only_layers", "decoder_sparse_step"}
)


@pytest.mark.parametrize("config", [GLM_52, GLM_45, QWEN3_235B, LLAMA_2_7B])
def test_any_value_gives_numbers_or_one_error(config: dict[str, Any]) -> None:
    """Of every field, in a model of few layers."""
    small = config | {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    for field in FIELDS:
        for value in HOSTILE:
            with contextlib.suppress(HalfbyteError):
                changed = small | {field: value}
                assert per_token(changed, "bf16", 1) > 0
                assert sum_up(format_sizes(tensors_of(changed), "fp8")).nbytes > 0


@pytest.mark.parametrize(
    ("config", "kv", "gpus", "message", "hint"),
    [
        (GLM_52, "fp8", 3, "3 GPUs cannot share 64 attention heads", "--gpus 1"),
        (GLM_52, "fp8", 12, "12 GPUs cannot share 64", "--gpus 4"),
        (GLM_45 | {"num_key_value_heads": 3}, "fp8", 2, "2 GPUs cannot share 3 heads", "--gpus 1"),
        (KIMI_K26, "fp8-raw", 8, "of models with an indexer.*this one is kimi_k2", "--kv fp8"),
        (GLM_45, "fp8-raw", 8, "this one is glm4_moe", "--kv fp8"),
    ],
)
def test_what_cannot_be_served(
    config: dict[str, Any], kv: Kv, gpus: int, message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        kv_parts(read_attention(config), kv, gpus)
    assert caught.value.hint == hint
