"""The `quantization_config` we write, held against compressed-tensors' own model of it."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.core import Scheme, StoredWeight, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats.config import (
    Fp8,
    Storage,
    config_count,
    make_quantization_config,
    storage_of,
    without_equal_experts,
)
from halfbyte.formats.loaders import check_loaders

INT4 = Scheme(group_size=32)
BLOCK = Fp8((128, 128))


def layers(
    count: int, dense_layers: int = 1, prefix: str = "", **storage: Storage | None
) -> dict[str, Storage | None]:
    """Linears of a DeepSeek-like model; storage of its experts, shared, dense and attention."""
    modules: dict[str, Storage | None] = {f"{prefix}model.embed_tokens": None}
    for layer in range(count):
        own = f"{prefix}model.layers.{layer}."
        for linear in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"):
            modules[f"{own}self_attn.{linear}"] = storage.get("attention")
        for linear in ("gate_proj", "up_proj", "down_proj"):
            if layer < dense_layers:
                modules[f"{own}mlp.{linear}"] = storage.get("dense")
                continue
            modules[f"{own}mlp.shared_experts.{linear}"] = storage.get("shared")
            for expert in range(3):
                modules[f"{own}mlp.experts.{expert}.{linear}"] = storage.get("experts")
        if layer >= dense_layers:
            modules[f"{own}mlp.gate"] = None
    return modules | {f"{prefix}lm_head": None}


def written(modules: dict[str, Storage | None], count: int) -> dict[str, Any]:
    """The config, after compressed-tensors accepts it and both servers read it as stored."""
    from compressed_tensors.quantization import QuantizationConfig

    config = make_quantization_config(modules, count)
    assert config is not None
    QuantizationConfig.model_validate(config)
    assert check_loaders(config, modules, {"num_hidden_layers": count}) == ()
    return config


def test_routed_experts_only_is_the_layout_of_kimi() -> None:
    assert written(layers(4, experts=INT4), 3) == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                },
                "format": "pack-quantized",
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "lm_head",
        ],
        "kv_cache_scheme": None,
    }


def test_fp8_rest_is_what_linear_stands_for() -> None:
    config = written(layers(4, experts=INT4, shared=BLOCK, dense=BLOCK, attention=BLOCK), 3)
    first, second = config["config_groups"].values()
    assert (first["targets"], first["format"]) == (["Linear"], "float-quantized")
    assert first["weights"]["block_structure"] == [128, 128]
    assert second["targets"] == [r"re:.*mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"]
    assert (config["format"], config["ignore"]) == ("pack-quantized", ["lm_head"])


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_fp8_with_channel_or_tensor_scales(scales: Any) -> None:
    rest = Fp8(scales)
    config = written(layers(4, experts=INT4, shared=rest, dense=rest, attention=rest), 4)
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == scales
    assert group["input_activations"]["strategy"] == "token"


def test_fp8_alone() -> None:
    config = written(layers(2, dense_layers=2, attention=BLOCK), 2)
    assert config["format"] == "float-quantized"


def test_two_int4_schemes() -> None:
    modules = layers(4, experts=INT4, shared=Scheme(group_size=128))
    config = written(modules, 4)
    assert [str(g["weights"]["group_size"]) for g in config["config_groups"].values()] == [
        "32",
        "128",
    ]
    assert config["config_groups"]["group_1"]["targets"] == [
        r"re:.*mlp\.shared_experts\.(gate_proj|up_proj|down_proj|gate_up_proj)$"
    ]


def test_part_of_attention() -> None:
    modules = layers(4, experts=INT4, shared=INT4, dense=INT4)
    for layer in range(4):
        for linear in ("q_b_proj", "o_proj"):
            modules[f"model.layers.{layer}.self_attn.{linear}"] = INT4
    assert written(modules, 4)["ignore"] == [
        r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj|fused_qkv_a_proj"
        r"|fused_qkv_a_proj_with_mqa)$",
        "lm_head",
    ]


def test_layers_that_differ_are_named_in_both_prefixes() -> None:
    modules = layers(5, experts=INT4)
    spared = [
        n for n in modules if n.startswith(("model.layers.4.mlp.experts", "model.layers.1.mlp.e"))
    ]
    config = written(modules | dict.fromkeys(spared), 4)
    assert config["ignore"][-3:] == [
        r"re:.*layers\.(1|4)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$",
        r"re:.*decoder\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$",
        "lm_head",
    ]


def test_a_language_model_inside_a_larger_one() -> None:
    modules = layers(3, prefix="language_model.", experts=INT4)
    modules |= {
        "vision_tower.encoder.blocks.0.wqkv": None,
        "vision_tower.encoder.blocks.0.mlp.fc0": None,
        "mm_projector.linear_1": None,
    }
    assert written(modules, 3)["ignore"][3:] == [
        "language_model.lm_head",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ]


def test_tied_models_still_name_the_head() -> None:
    modules = layers(2, experts=INT4)
    del modules["lm_head"]
    assert written(modules, 2)["ignore"][-1] == "lm_head"


def test_nothing_quantized_needs_no_config() -> None:
    assert make_quantization_config(layers(2), 2) is None


def test_only_experts_that_differ_are_kept() -> None:
    modules = layers(3, experts=INT4)
    modules["model.layers.2.mlp.experts.2.up_proj"] = None
    kept = without_equal_experts(modules)
    assert [n for n in kept if ".experts.0." not in n and ".experts." in n] == [
        "model.layers.2.mlp.experts.2.up_proj"
    ]
    assert kept.keys() >= {n for n in modules if ".experts." not in n}


@pytest.mark.parametrize(
    ("block", "scale", "expected"),
    [
        ((128, 128), (1, 1), BLOCK),
        ((1, 128), (128, 1), Fp8("channel")),
        ((128, 128), (1,), Fp8("tensor")),
        ((128, 128), (), Fp8("tensor")),
        ((64, 64), (2, 2), Fp8((64, 64))),
    ],
)
def test_storage_of_fp8(block: tuple[int, int], scale: tuple[int, ...], expected: Fp8) -> None:
    parts = {"scale": TensorInfo("a.weight_scale", "F32", scale, "", 0, 0)}
    weight = StoredWeight("a.weight", (128, 128), "fp8", parts, block=block)
    assert storage_of(weight) == expected


def test_counts_of_a_config_are_numbers() -> None:
    assert config_count({"n": 3, "none": None}, "n") == 3
    assert config_count({"none": None}, "none") == config_count({}, "n") == 0
    for wrong in ("3", -1, 2.0, True, [3]):
        with pytest.raises(CheckpointError, match=r"config\.json: n is"):
            config_count({"n": wrong}, "n")
