"""The tiny checkpoints are what transformers takes for the real architectures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index, logical_weights
from halfbyte.testing.architectures import ModelType, tensor_specs
from halfbyte.testing.tiny import edit_header, write_tiny

MODEL_TYPES = ["glm_moe_dsa", "glm4_moe", "deepseek_v3"]


def write_decoded(folder: Path, out: Path) -> Path:
    """The checkpoint with every weight decoded, as plain float32 safetensors."""
    checkpoint = open_checkpoint(folder)
    with ShardReader(checkpoint) as reader:
        weights = logical_weights(checkpoint).values()
        tensors = {weight.name: reader.read_weight(weight) for weight in weights}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_finds_every_weight_and_no_other(
    tmp_path: Path, model_type: ModelType, tied: bool
) -> None:
    folder = write_tiny(tmp_path / "tiny", model_type=model_type, tied=tied)
    model, info = AutoModelForCausalLM.from_pretrained(
        write_decoded(folder, tmp_path / "decoded"), dtype=torch.float32, output_loading_info=True
    )
    assert model.config.model_type == model_type
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {layer_index(name) for name in info["unexpected_keys"]} == {4}  # the MTP layer
    tokens = torch.arange(40)[None] % 256  # longer than index_topk
    with torch.no_grad():
        logits = model(tokens).logits
    assert logits.shape == (1, 40, 320)
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_an_mtp_layer(tmp_path: Path, model_type: ModelType) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path, model_type=model_type, layers=3, mtp=False))
    layers = {layer_index(name) for name in checkpoint.tensors} - {None}
    assert layers == {0, 1, 2}
    assert checkpoint.config["num_nextn_predict_layers"] == 0


def test_it_is_as_awkward_as_promised(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    config, tensors = checkpoint.config, checkpoint.tensors
    weights = logical_weights(checkpoint)
    assert len(checkpoint.shards) == 3
    assert any(len({p.shard for p in w.parts.values()}) == 2 for w in weights.values())
    kv_a = weights["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert kv_a.shape[0] % 128
    assert kv_a.parts["scale"].shape[0] == 2
    assert config["indexer_types"] == ["full", "full", "full", "shared"]
    assert not any(name.startswith("model.layers.3.self_attn.indexer") for name in tensors)
    assert "model.layers.4.self_attn.indexer.wk.weight" in tensors
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "F32"
    assert config["index_topk"] == 16
    assert checkpoint.nbytes < 2_000_000
    gate, down = (
        weights[f"model.layers.1.mlp.experts.0.{p}_proj.weight"] for p in ("gate", "down")
    )
    assert (gate.shape[1], down.shape[1]) == (128, 64)


def test_tensor_names_are_those_of_the_trained_checkpoint(testbed: Path) -> None:
    """The table of names, applied to the trained model's config, gives its tensors and shapes."""
    checkpoint = open_checkpoint(testbed / "glm-small-fp8")
    kinds = {"plain": set[str](), "fp8": set[str]()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, kind in tensor_specs(checkpoint.config):
        shapes[name] = shape
        kinds["fp8" if kind == "linear" else "plain"].add(name)
    weights = logical_weights(checkpoint)
    assert {name: weight.shape for name, weight in weights.items()} == shapes
    for encoding, names in kinds.items():
        assert {name for name, weight in weights.items() if weight.encoding == encoding} == names


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = digests(write_tiny(tmp_path / "first", experts=2, seed=1))
    assert digests(write_tiny(tmp_path / "again", experts=2, seed=1)) == first
    other = digests(write_tiny(tmp_path / "other", experts=2, seed=2))
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith(".safetensors")
    }


def test_fp8_scales_use_the_whole_range(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    with ShardReader(checkpoint) as reader:
        for weight in logical_weights(checkpoint).values():
            if weight.encoding == "fp8":
                stored = reader.read(weight.parts["weight"]).to(torch.float32)
                assert stored.abs().max() == 448


def test_sixteen_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path, layers=16, hidden=96, moe_intermediate=32))
    assert {layer_index(name) for name in checkpoint.tensors} - {None} == set(range(17))
    full = [i for i, kind in enumerate(checkpoint.config["indexer_types"]) if kind == "full"]
    assert full == [0, 1, 2, 6, 10, 14]  # the real model's pattern
    assert AutoConfig.from_pretrained(tmp_path).indexer_types == checkpoint.config["indexer_types"]


def test_tokenizer(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Grüße, 世界!\n\x00"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 260 <= 320
    assert tokenizer.eos_token_id == 256
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>hi<|assistant|>"
    assert tokenizer(prompt)["input_ids"] == [257, *tokenizer("hi")["input_ids"], 258]


def test_edit_header_leaves_the_data(tiny_copy: Path) -> None:
    path = tiny_copy / "model-00001-of-00003.safetensors"

    def data() -> bytes:
        content = path.read_bytes()
        return content[8 + int.from_bytes(content[:8], "little") :]

    def rename(header: dict[str, Any]) -> None:
        header["a name of another length"] = header.pop("lm_head.weight")

    before = data()
    edit_header(path, rename)
    assert data() == before
