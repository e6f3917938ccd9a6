"""Whole models from every encoding, against transformers' own loading of dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halfbyte.errors import EvaluationError, UnsupportedModelError
from halfbyte.evals.model import load_model
from halfbyte.testing.tiny import write_tiny

Tensors = dict[str, torch.Tensor]
DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo" / "glm-nano-fp8"


def stored(folder: Path) -> Tensors:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def dequantized(tensors: Tensors) -> Tensors:
    """Block and channel FP8 to float32, everything else as it is."""
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("weight_scale_inv", "weight_scale")):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            if (blocks := tensors.get(f"{name}_scale_inv")) is not None:
                scale = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
                plain[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
            else:
                plain[name] = tensor.float() * tensors[f"{name}_scale"].float()  # [rows, 1]
        else:
            plain[name] = tensor
    return plain


def write(folder: Path, source: Path, tensors: Tensors, quantization: Any = None) -> Path:
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_same_model(ours: Any, reference: Any) -> None:
    expected = reference.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for (name, buffer), (_, other) in zip(
        ours.named_buffers(), reference.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, other), name
    tokens = torch.arange(2 * 40).view(2, 40) * 3 % 300
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"source": "fp8"},
        {"source": "bf16"},
        {"source": "ct-channel"},
        {"source": "fp8", "tied": True, "mtp": False, "shards": 1},
        {"source": "fp8", "model_type": "glm4_moe"},
        {"source": "bf16", "model_type": "deepseek_v3"},
    ],
    ids=str,
)
def test_equals_transformers_loading_of_dequantized_weights(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    source = write_tiny(tmp_path / "source", **options)
    plain = write(tmp_path / "plain", source, dequantized(stored(source)))
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    ours = load_model(source)
    assert not ours.training
    assert_same_model(ours, reference)
    if options.get("tied"):
        assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_embedded_model_equals_transformers_loading(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", DEMO, dequantized(stored(DEMO)))
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert_same_model(load_model(DEMO), reference)


def test_bfloat16_rounds_once_and_keeps_float32_buffers(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    plain = dequantized(stored(source))
    model = load_model(source, dtype="bfloat16")
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(model.state_dict()[name], plain[name].bfloat16())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model.state_dict()[bias].dtype == torch.float32
    assert torch.equal(model.state_dict()[bias], plain[bias])


def test_int4_equals_transformers_loading_of_its_values(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", source="bf16")
    packed: Tensors = {}
    values: Tensors = {}
    for name, tensor in stored(source).items():
        if ".mlp.experts." not in name:
            packed[name] = values[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, 32))
        scale = (groups.abs().amax(-1) / 7.5).bfloat16()
        codes = (groups / scale[..., None].float()).round().clamp(-8, 7).to(torch.int8)
        values[name] = (codes * scale[..., None].float()).flatten(1)
        packed[f"{name}_packed"] = pack_to_int32(codes.flatten(1), 4)
        packed[f"{name}_scale"] = scale
        packed[f"{name}_shape"] = torch.tensor(tensor.shape)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    int4 = write(tmp_path / "int4", source, packed, quantization)
    plain = write(tmp_path / "plain", source, values)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert_same_model(load_model(int4), reference)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is only in the model"),
        (
            lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"),
            "experts.3.up_proj.weight is only in the model",
        ),
        (
            lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
            "differ in 1 weights; model.extra.weight is only in the checkpoint",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \[3\], the model's config asks for \[128\]",
        ),
    ],
)
def test_weights_that_do_not_fit(
    tmp_path: Path, damage: Callable[[Tensors], object], says: str
) -> None:
    source = write_tiny(tmp_path / "source", source="bf16")
    tensors = stored(source)
    damage(tensors)
    with pytest.raises(EvaluationError, match=says):
        load_model(write(tmp_path / "damaged", source, tensors))


def test_unknown_model_type(tiny_copy: Path) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps(config | {"model_type": "novel"}))
    with pytest.raises(UnsupportedModelError, match='language model for model_type "novel"'):
        load_model(tiny_copy)


def test_code_of_the_checkpoint_is_never_run(tiny_copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tiny_copy / "code.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass M: pass\n")
    config = json.loads((tiny_copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.M", "AutoModelForCausalLM": "code.M"}
    (tiny_copy / "config.json").write_text(json.dumps(config))
    load_model(tiny_copy)
    assert not marker.exists()
