"""Logical weights from stored tensors: encodings, order, and the parts that do not fit."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from halfbyte.core import Checkpoint, Scheme, StoredWeight
from halfbyte.errors import CheckpointError
from halfbyte.formats import int4
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.weights import (
    layer_index,
    logical_weights,
    model_order,
    quantization_config,
)
from halfbyte.testing.tiny import Source, write_checkpoint, write_tiny

LINEAR = "model.layers.0.self_attn.o_proj"
Q_A = "model.layers.0.self_attn.q_a_proj"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa"


def checkpoint_of(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
) -> Checkpoint:
    config = {"quantization_config": quantization} if quantization is not None else {}
    return open_checkpoint(write_checkpoint(folder, config, [tensors]))


def fp8(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns).to(torch.float8_e4m3fn)


def compressed_tensors(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


INT4_G32 = compressed_tensors(
    num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
)


def int4_tensors(rows: int, columns: int, groups: int) -> dict[str, torch.Tensor]:
    codes = torch.zeros(rows, columns, dtype=torch.int8)
    scales = torch.ones(rows, groups, dtype=torch.bfloat16)
    return int4.stored(f"{LINEAR}.weight", int4.pack(codes), scales)


# Encodings


@pytest.mark.parametrize(
    ("source", "scale"),
    [("fp8", "weight_scale_inv"), ("ct-channel", "weight_scale"), ("ct-block", "weight_scale")],
)
def test_fp8_weights_of_each_source(tmp_path: Path, source: Source, scale: str) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path, source=source))
    weights = logical_weights(checkpoint)
    kv_a = weights[f"{KV_A}.weight"]
    assert kv_a == StoredWeight(
        name=f"{KV_A}.weight",
        shape=(144, 128),
        encoding="fp8",
        parts={
            "weight": checkpoint.tensors[f"{KV_A}.weight"],
            "scale": checkpoint.tensors[f"{KV_A}.{scale}"],
        },
        block=(1, 128) if source == "ct-channel" else (128, 128),
    )
    assert kv_a.nbytes == sum(
        tensor.nbytes for name, tensor in checkpoint.tensors.items() if name.startswith(KV_A)
    )
    encodings = {name: weight.encoding for name, weight in weights.items()}
    assert encodings["model.layers.0.input_layernorm.weight"] == "plain"
    assert encodings["model.layers.1.mlp.gate.e_score_correction_bias"] == "plain"
    scales = {name for name in checkpoint.tensors if name.endswith(f".{scale}")}
    assert {name for name, encoding in encodings.items() if encoding == "fp8"} == {
        f"{name.removesuffix(scale)}weight" for name in scales
    }


def test_weight_and_scale_in_different_shards(tiny: Path) -> None:
    weights = logical_weights(open_checkpoint(tiny)).values()
    assert sum(len({part.shard for part in w.parts.values()}) == 2 for w in weights) == 2


def test_every_stored_tensor_is_used_once(tiny: Path, testbed: Path) -> None:
    for folder in (tiny, testbed / "glm-nano-fp8", testbed / "glm-small-fp8"):
        checkpoint = open_checkpoint(folder)
        parts = [p.name for w in logical_weights(checkpoint).values() for p in w.parts.values()]
        assert sorted(parts) == sorted(checkpoint.tensors)


@pytest.mark.parametrize(
    ("shape", "block"), [((), (4, 8)), ((1,), (4, 8)), ((4,), (1, 8)), ((4, 1), (1, 8))]
)
def test_shapes_of_compressed_tensors_scales(
    tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    tensors = {f"{LINEAR}.weight": fp8(4, 8), f"{LINEAR}.weight_scale": torch.ones(shape)}
    assert logical_weights(checkpoint_of(tmp_path, tensors))[f"{LINEAR}.weight"].block == block


def test_block_size_comes_from_the_config(tmp_path: Path) -> None:
    tensors = {f"{LINEAR}.weight": fp8(100, 70), f"{LINEAR}.weight_scale_inv": torch.ones(2, 3)}
    checkpoint = checkpoint_of(tmp_path, tensors, {"weight_block_size": [64, 32]})
    assert logical_weights(checkpoint)[f"{LINEAR}.weight"].block == (64, 32)


def test_the_real_kv_a_proj_has_five_scale_rows(tmp_path: Path) -> None:
    tensors = {f"{KV_A}.weight": fp8(576, 6144), f"{KV_A}.weight_scale_inv": torch.ones(5, 48)}
    assert logical_weights(checkpoint_of(tmp_path, tensors))[f"{KV_A}.weight"].block == (128, 128)


@pytest.mark.parametrize(
    ("columns", "groups", "declared", "scheme"),
    [
        (64, 2, {"strategy": "group", "group_size": 32}, Scheme(group_size=32)),
        (128, 1, {"strategy": "group", "group_size": 128}, Scheme(group_size=128)),
        (64, 1, {"strategy": "channel", "group_size": None}, Scheme(group_size=None)),
    ],
)
def test_int4_scheme(
    tmp_path: Path, columns: int, groups: int, declared: dict[str, Any], scheme: Scheme
) -> None:
    arguments = {"num_bits": 4, "type": "int", "symmetric": True} | declared
    checkpoint = checkpoint_of(
        tmp_path, int4_tensors(16, columns, groups), compressed_tensors(**arguments)
    )
    (weight,) = logical_weights(checkpoint).values()
    assert (weight.name, weight.encoding) == (f"{LINEAR}.weight", "int4")
    assert (weight.shape, weight.scheme) == ((16, columns), scheme)
    assert {key: part.name for key, part in weight.parts.items()} == {
        key: f"{LINEAR}.weight_{key}" for key in ("packed", "scale", "shape")
    }


def test_input_and_cache_scales_are_plain_tensors(tmp_path: Path) -> None:
    tensors = {
        f"{LINEAR}.weight": fp8(4, 8),
        f"{LINEAR}.weight_scale": torch.ones(1),
        f"{LINEAR}.input_scale": torch.ones(1),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
    }
    weights = logical_weights(checkpoint_of(tmp_path, tensors))
    assert {name for name, weight in weights.items() if weight.encoding == "plain"} == {
        f"{LINEAR}.input_scale",
        "model.layers.0.self_attn.k_scale",
    }


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    weights = logical_weights(open_checkpoint(write_tiny(tmp_path, tied=True)))
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights


def test_quantization_config_of_a_nested_text_config() -> None:
    inner = {"quant_method": "compressed-tensors"}
    assert quantization_config({"text_config": {"quantization_config": inner}}) == inner
    assert quantization_config({"quantization_config": inner, "text_config": {}}) == inner
    assert quantization_config({"quantization_config": None}) == {}
    with pytest.raises(CheckpointError, match="not an object"):
        quantization_config({"quantization_config": "fp8"})


# Order


def shuffled(names: list[str]) -> list[str]:
    return random.Random(0).sample(names, len(names))


def test_model_order() -> None:
    in_order = [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.mlp.experts.1.up_proj.weight",
        "model.layers.2.mlp.experts.2.up_proj.weight",
        "model.layers.2.mlp.experts.10.up_proj.weight",
        "model.layers.10.mlp.experts.0.up_proj.weight",
        "model.layers.78.eh_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
        "vision_tower.blocks.0.weight",
    ]
    assert sorted(shuffled(in_order), key=model_order) == in_order
    prefixed = [f"language_model.{name}" for name in in_order[:-1]]
    assert sorted(shuffled(prefixed), key=model_order) == prefixed


def test_weights_come_in_model_order(testbed: Path) -> None:
    names = list(logical_weights(open_checkpoint(testbed / "glm-nano-fp8")))
    layers = [layer_index(name) for name in names]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert layers[1:-2] == sorted(layer for layer in layers if layer is not None)
    assert (
        layers[-3]
        == json.loads((testbed / "glm-nano-fp8/config.json").read_text())["num_hidden_layers"]
    )


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.12.mlp.gate.weight", 12),
        ("language_model.model.layers.60.mlp.gate.weight", 60),
        ("model.embed_tokens.weight", None),
        ("vision_tower.layers.3.weight", None),
        ("model.layers.x.weight", None),
        ("model.layers." + "9" * 5000 + ".weight", None),
    ],
)
def test_layer_index(name: str, index: int | None) -> None:
    assert layer_index(name) == index
    model_order(name)


# Parts that do not fit


def refuses(checkpoint: Checkpoint, *fragments: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        logical_weights(checkpoint)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_scale_missing(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {f"{LINEAR}.weight": fp8(8, 8)})
    refuses(checkpoint, f"{LINEAR}.weight in model.safetensors is FP8 and has no scale")


def test_two_scales(tmp_path: Path) -> None:
    scales = {f"{LINEAR}.{name}": torch.ones(1, 1) for name in ("weight_scale", "weight_scale_inv")}
    refuses(checkpoint_of(tmp_path, scales | {f"{LINEAR}.weight": fp8(8, 8)}), "has two scales")


@pytest.mark.parametrize(
    ("scale", "shape", "needed"),
    [
        ("weight_scale_inv", (2, 2), "[2, 1]"),
        ("weight_scale_inv", (1, 2), "[2, 1]"),
        ("weight_scale_inv", (2,), "[2, 1]"),
        ("weight_scale_inv", (160, 1), "[2, 1]"),
        ("weight_scale", (2, 1), "[1, 1] or [160, 1]"),
        ("weight_scale", (161,), "[1, 1] or [160, 1]"),
        ("weight_scale", (160, 1, 1), "[1, 1] or [160, 1]"),
    ],
)
def test_scale_of_the_wrong_shape(
    tmp_path: Path, scale: str, shape: tuple[int, ...], needed: str
) -> None:
    tensors = {f"{LINEAR}.weight": fp8(160, 96), f"{LINEAR}.{scale}": torch.ones(shape)}
    refuses(
        checkpoint_of(tmp_path, tensors),
        f"{LINEAR}.{scale} in model.safetensors has shape {list(shape)}",
        f"[160, 96] needs {needed}",
    )


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv", "weight_shape"])
def test_orphans(tmp_path: Path, part: str) -> None:
    orphan = {f"{LINEAR}.{part}": torch.ones(1, 1)}
    refuses(checkpoint_of(tmp_path / "a", orphan), f"{LINEAR}.{part}", "which is not there")
    plain = {f"{LINEAR}.weight": torch.ones(8, 8, dtype=torch.int8)}
    refuses(checkpoint_of(tmp_path / "b", orphan | plain), f"{LINEAR}.{part}", "which is I8")


@pytest.mark.parametrize(
    ("weight", "scale", "fragment"),
    [
        (torch.ones(8).to(torch.float8_e4m3fn), torch.ones(1), "FP8 [8]"),
        (torch.ones(2, 8, 8).to(torch.float8_e4m3fn), torch.ones(1), "FP8 [2, 8, 8]"),
        (fp8(8, 8), torch.ones(1, 1).to(torch.float8_e8m0fnu), "a scale in F8_E8M0"),
        (fp8(8, 8), torch.ones(1, 1, dtype=torch.int32), "a scale in I32"),
        (torch.ones(8, 8).to(torch.float8_e5m2), torch.ones(1, 1), "F8_E5M2"),
    ],
)
def test_unsupported_fp8(
    tmp_path: Path, weight: torch.Tensor, scale: torch.Tensor, fragment: str
) -> None:
    tensors = {f"{LINEAR}.weight": weight, f"{LINEAR}.weight_scale": scale}
    refuses(checkpoint_of(tmp_path, tensors), f"{LINEAR}.weight in model.safetensors", fragment)


def test_fp8_that_is_not_the_weight_of_a_linear(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: fp8(8, 8), f"{name}_scale_inv": torch.ones(1, 1)}
    refuses(checkpoint_of(tmp_path, tensors), name, "expected the weight of a linear")


@pytest.mark.parametrize(
    "name", ["qweight", "weight_g_idx", "weight_zero_point", "weight_global_scale"]
)
def test_foreign_layouts(tmp_path: Path, name: str) -> None:
    refuses(checkpoint_of(tmp_path, {f"{LINEAR}.{name}": torch.ones(4)}), name, "cannot be read")


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape"])
def test_int4_part_missing(tmp_path: Path, part: str) -> None:
    tensors = int4_tensors(16, 64, 2)
    del tensors[f"{LINEAR}.{part}"]
    refuses(checkpoint_of(tmp_path, tensors, INT4_G32), f"has no {LINEAR}.{part}")


@pytest.mark.parametrize(
    ("part", "tensor", "fragment"),
    [
        ("weight_packed", torch.zeros(16, 8, dtype=torch.uint8), "U8 [16, 8]"),
        ("weight_packed", torch.zeros(2, 16, 8, dtype=torch.int32), "I32 [2, 16, 8]"),
        ("weight_packed", torch.zeros(16, 0, dtype=torch.int32), "I32 [16, 0]"),
        ("weight_scale", torch.ones(16), "F32 [16]"),
        ("weight_scale", torch.ones(15, 2), "F32 [15, 2]"),
        ("weight_scale", torch.ones(16, 0), "F32 [16, 0]"),
        ("weight_scale", torch.ones(16, 2, dtype=torch.int32), "I32 [16, 2]"),
        ("weight_scale", torch.ones(16, 3), "3 groups for 64 columns"),
        ("weight_scale", torch.ones(16, 1), "1 groups for 64 columns"),
        ("weight_scale", torch.ones(16, 4), "no group size of config.json (32)"),
        ("weight_shape", torch.ones(3, dtype=torch.int64), "I64 [3]"),
        ("weight_shape", torch.ones(2), "F32 [2]"),
    ],
)
def test_int4_part_that_does_not_fit(
    tmp_path: Path, part: str, tensor: torch.Tensor, fragment: str
) -> None:
    tensors = int4_tensors(16, 64, 2) | {f"{LINEAR}.{part}": tensor}
    refuses(checkpoint_of(tmp_path, tensors, INT4_G32), f"{LINEAR}.{part}", fragment)


def test_int4_groups_that_do_not_divide_the_columns(tmp_path: Path) -> None:
    """296 columns in 9 groups: the quotient 32 is a declared size, but 8 columns are left over."""
    checkpoint = checkpoint_of(tmp_path, int4_tensors(16, 296, 9), INT4_G32)
    refuses(checkpoint, "9 groups for 296 columns")


@pytest.mark.parametrize(
    ("change", "fragment"), [({"num_bits": 8}, "8-bit"), ({"symmetric": False}, "symmetric False")]
)
def test_integer_weights_that_are_not_symmetric_4_bit(
    tmp_path: Path, change: dict[str, Any], fragment: str
) -> None:
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32} | change
    checkpoint = checkpoint_of(tmp_path, int4_tensors(16, 64, 2), compressed_tensors(**arguments))
    refuses(checkpoint, "config.json", fragment)


def test_weight_stored_plain_and_packed(tmp_path: Path) -> None:
    tensors = int4_tensors(16, 64, 2) | {f"{LINEAR}.weight": torch.ones(16, 64)}
    refuses(checkpoint_of(tmp_path, tensors, INT4_G32), f"{LINEAR}.weight is stored twice")


@pytest.mark.parametrize(
    "quantization",
    [
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": "128x128"},
        {"config_groups": [1]},
        compressed_tensors(num_bits=8, type="float", strategy="block"),
        compressed_tensors(strategy="block", block_structure=[128, -1]),
    ],
)
def test_bad_quantization_config(tmp_path: Path, quantization: dict[str, Any]) -> None:
    refuses(checkpoint_of(tmp_path, {"a": torch.ones(1)}, quantization), "config.json")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.just(4) | junk,
        "type": st.sampled_from(["int", "float"]) | junk,
        "symmetric": st.booleans() | junk,
        "strategy": st.sampled_from(["group", "channel", "block"]) | junk,
        "group_size": st.sampled_from([32, 64, None]) | junk,
        "block_structure": st.lists(st.integers(-1, 200), min_size=2, max_size=2) | junk,
    },
)
group = st.fixed_dictionaries({}, optional={"weights": arguments | junk}) | junk
any_quantization_config = (
    st.fixed_dictionaries(
        {},
        optional={
            "weight_block_size": st.lists(st.integers(-1, 200), min_size=2, max_size=2) | junk,
            "config_groups": st.dictionaries(st.text(max_size=2), group, max_size=3) | junk,
        },
    )
    | junk
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One FP8 and one INT4 weight."""
    tensors = {f"{Q_A}.weight": fp8(8, 8), f"{Q_A}.weight_scale": torch.ones(1, 1)}
    return checkpoint_of(tmp_path_factory.mktemp("mixed"), int4_tensors(16, 64, 2) | tensors)


@given(quantization=any_quantization_config)
@settings(max_examples=300, deadline=None)
def test_any_quantization_config_is_used_or_explained(mixed: Checkpoint, quantization: Any) -> None:
    config = {"quantization_config": quantization}
    encodings, message = set(), ""
    try:
        weights = logical_weights(replace(mixed, config=config))
        encodings = {weight.encoding for weight in weights.values()}
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    assert bool(message) != (encodings == {"fp8", "int4"})
