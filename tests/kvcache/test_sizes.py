"""Weights by config alone: published parameter counts, and headers and plans to the byte."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest

from halfbyte.core import Checkpoint, Settings
from halfbyte.errors import CheckpointError, RecipeError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.sizes import (
    Weights,
    format_sizes,
    stored_format,
    stored_sizes,
    stored_tensors,
    sum_up,
    tensors_of,
)
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.testing.architectures import ModelType, tensor_specs, tiny_config
from halfbyte.testing.glm52 import glm52_config, write_glm52

from .published import DEEPSEEK_V3, GLM_45, KIMI_K26, LLAMA_2_7B, QWEN3_235B

GIB = 2**30


@pytest.fixture(scope="module")
def glm52(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Headers of the real checkpoint."""
    return open_checkpoint(write_glm52(tmp_path_factory.mktemp("glm") / "GLM-5.2-FP8"))


def parameters(config: dict[str, Any]) -> int:
    return sum(math.prod(tensor.shape) * tensor.count for tensor in tensors_of(config))


def test_parameters_are_as_published() -> None:
    assert parameters(LLAMA_2_7B) == 6_738_415_616
    assert parameters(QWEN3_235B) == 235_093_634_560
    assert parameters(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}) == 671_026_419_200
    # Embedding and head of the MTP layer included.
    assert parameters(DEEPSEEK_V3) == pytest.approx(685e9, abs=1e9)
    assert round(parameters(GLM_45) / 1e9) == 358
    assert round(parameters(KIMI_K26) / 1e12, 3) == 1.026
    # 753,329,921,024 by the headers' matrices and norms, and a bias to each of 76 routers.
    assert parameters(glm52_config()) == 753_329_921_024 + 76 * 256


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
def test_tensors_have_the_names_of_checkpoints(model_type: ModelType, tied: bool) -> None:
    config = tiny_config(
        model_type, layers=7, dense_layers=2, experts=4, hidden=256, moe_intermediate=128,
        index_topk=16, mtp=True, tied=tied,
    )  # fmt: skip
    one = re.compile(r"\.experts\.\d+\.")
    expected = Counter(
        (one.sub(".experts.0.", name), shape) for name, shape, _ in tensor_specs(config)
    )
    assert {(t.name, t.shape): t.count for t in tensors_of(config)} == dict(expected)


def test_glm_52_by_config_headers_and_plan(glm52: Checkpoint) -> None:
    config = glm52_config()
    fp8, int4 = (sum_up(format_sizes(tensors_of(config), form)) for form in ("fp8", "int4"))
    assert fp8.nbytes == 755_617_140_416
    assert fp8 == sum_up(stored_sizes(glm52))
    plan = make_plan(glm52, load_recipe("glm-5"), Settings(method="rtn"))
    assert int4.nbytes == plan.bytes_out
    assert int4 == sum_up((o.name, o.nbytes) for t in plan.tensors for o in t.outputs)
    assert stored_format(glm52) == "fp8"
    bf16 = sum_up(format_sizes(stored_tensors(glm52), "bf16"))
    assert bf16.nbytes == 2 * 753_329_921_024 + 4 * 76 * 256
    # An eighth of everything, as published; tensors that are whole on every GPU come on top.
    assert [round(w.nbytes / 8 / GIB, 1) for w in (fp8, int4)] == [88.0, 52.5]
    assert [round(w.on_each(8, 8) / GIB, 1) for w in (fp8, int4)] == [89.5, 55.2]


def test_kimi_is_as_large_as_published() -> None:
    """About 595 GB, of which 0.9 GB are the vision part."""
    int4 = sum_up(format_sizes(tensors_of(KIMI_K26), "int4")).nbytes
    assert 0.5e9 < 595e9 - int4 < 1.5e9


def test_where_weights_lie() -> None:
    sizes = [
        ("model.embed_tokens.weight", 100),
        ("model.layers.0.self_attn.q_a_proj.weight", 20),
        ("model.layers.0.self_attn.o_proj.weight", 64),
        ("model.layers.0.self_attn.indexer.wk.weight", 3),
        ("model.layers.0.mlp.experts.0.up_proj.weight_packed", 800),
        ("model.layers.0.mlp.gate.weight", 7),
        ("model.layers.1.eh_proj.weight", 5),
        ("lm_head.weight", 81),
    ]
    both = sum_up(sizes)
    assert both == Weights(whole=20 + 3 + 7 + 5, attention=100 + 64, divided=800 + 81)
    assert sum_up(sizes, layers=1) == Weights(whole=30, attention=164, divided=881)
    assert both.on_each(1, 1) == both.nbytes == sum(n for _, n in sizes)
    assert both.on_each(8, 8) == 35 + math.ceil((164 + 881) / 8)
    assert both.on_each(8, 1) == 35 + 164 + math.ceil(881 / 8)


def test_int4_needs_experts_and_whole_groups() -> None:
    with pytest.raises(RecipeError, match="no routed experts"):
        sum_up(format_sizes(tensors_of(LLAMA_2_7B), "int4"))
    odd = GLM_45 | {"moe_intermediate_size": 1520}
    with pytest.raises(RecipeError, match="1520 columns, which the 32"):
        sum_up(format_sizes(tensors_of(odd), "int4"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ({"n_routed_experts": 10**30}, "n_routed_experts is 1000000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace is '3'"),
    ],
)
def test_absurd_sizes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parameters(DEEPSEEK_V3 | change)
