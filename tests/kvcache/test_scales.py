"""Scales of keys and values: written, found again under every name, and used by attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache

from halfbyte import cli
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.evals.model import load_model
from halfbyte.evals.stream import evaluate_text
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.scales import SCHEME, read_scales, with_scheme
from halfbyte.testing.tiny import ModelType, write_checkpoint, write_tiny


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    lines = [f"The {n}th of {n * 7} records says {n * n} and no more." for n in range(60)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def stored(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                tensor = file.get_tensor(name).flatten()
                found[name] = bytes(tensor.view(torch.uint8).tolist())
    return found


class RoundingCache(DynamicCache):
    """transformers' own cache, which forgets what FP8 does not hold."""

    def __init__(self, scales: dict[int, tuple[float, float]]) -> None:
        super().__init__()
        self.scales = scales

    def update(  # type: ignore[override]
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (
            ((x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s)
            for x, s in zip((key, value), self.scales.get(layer, (1.0, 1.0)), strict=True)
        )
        return super().update(first, second, layer)


def test_scales_are_written_beside_what_was_there(tmp_path: Path, text: Path) -> None:
    source = write_tiny(tmp_path / "source", model_type="glm4_moe", source="ct-channel", shards=1)
    words = ["kv", str(source), "--calibration", str(text), "--samples", "8", "-q"]
    words += ["--sequence-length", "40", "-o", str(tmp_path / "scaled")]
    assert cli.main(words) == 0
    scaled = tmp_path / "scaled"
    before, after = stored(source), stored(scaled)
    assert {name: after[name] for name in before} == before
    scales = read_scales(open_checkpoint(scaled))
    assert sorted(scales) == [0, 1, 2, 3, 4]  # the MTP layer as well
    new = sorted(after.keys() - before.keys())
    assert new[:2] == [f"model.layers.0.self_attn.attn.{part}_scale" for part in "kv"]
    assert len(new) == 10
    for values in scales.values():
        assert all(torch.tensor(value).log2() % 1 == 0 for value in values)
    config, was = (json.loads((f / "config.json").read_text()) for f in (scaled, source))
    assert config["quantization_config"].pop("kv_cache_scheme") == SCHEME
    was["quantization_config"].pop("kv_cache_scheme", None)
    assert config == was
    assert not (tmp_path / "scaled.halfbyte").exists()
    # Not twice, and not over anything.
    words[1] = str(scaled)
    assert cli.main(words) == 1
    words[1], words[-1] = str(source), str(scaled)
    assert cli.main(words) == 1


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_attention_reads_what_a_rounding_cache_gives_back(
    tmp_path: Path, text: Path, model_type: ModelType
) -> None:
    folder = write_tiny(tmp_path / "plain", model_type=model_type, source="bf16")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scales: dict[int, tuple[float, float]] = {}
    if model_type == "glm4_moe":
        scales = {0: (2.0**-8, 2.0**-7), 2: (1.0, 2.0**-9)}
        tensors = {
            f"model.layers.{layer}.self_attn.{place}{part}_scale": torch.tensor(value)
            for (layer, both), place in zip(scales.items(), ("attn.", ""), strict=True)
            for part, value in zip("kv", both, strict=True)
        }
        add(folder, tensors)
    assert read_scales(open_checkpoint(folder)) == scales
    tokens = torch.arange(2 * 30).view(2, 30) * 7 % 290
    ours = load_model(folder, kv_cache="fp8")
    with torch.no_grad():
        plain = reference(tokens).logits
        expected = reference(tokens, past_key_values=RoundingCache(scales)).logits
        assert torch.allclose(ours(tokens).logits, expected, atol=1e-5)
        assert not torch.allclose(plain, expected, atol=1e-3)
        # Token by token, from its own cache.
        step = ours(tokens[:, :20], use_cache=True)
        rest = ours(tokens[:, 20:], past_key_values=step.past_key_values).logits
        assert torch.allclose(rest, expected[:, 20:], atol=1e-4)
    # Layer by layer as well.
    streamed = evaluate_text(folder, text, sequence_length=30, max_windows=2, kv_cache="fp8")
    assert streamed.nll != evaluate_text(folder, text, sequence_length=30, max_windows=2).nll


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into a checkpoint, whatever they are."""
    from safetensors.torch import load_file

    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    config = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, config, [*shards[:-1], shards[-1] | tensors])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2), r"has shape \[2\], one number is expected"),
        (torch.tensor(0.0), "is 0.0, a scale is positive"),
        (torch.tensor(float("nan")), "is nan, a scale is positive"),
    ],
)
def test_a_scale_is_one_positive_number(tmp_path: Path, value: torch.Tensor, says: str) -> None:
    folder = write_tiny(tmp_path / "tiny", model_type="glm4_moe", source="bf16")
    add(folder, {"model.layers.1.self_attn.k_proj.k_scale": value})
    with pytest.raises(CheckpointError, match=f"k_proj.k_scale in .* {says}"):
        load_model(folder, kv_cache="fp8")
    load_model(folder)  # whose cache is not asked for


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_raw_rows_are_of_models_with_an_indexer(tmp_path: Path, model_type: ModelType) -> None:
    folder = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    with pytest.raises(UsageError, match=f"models with an indexer, .* this one is {model_type}"):
        load_model(folder, kv_cache="fp8-raw")


def test_scales_need_a_config_that_servers_read_them_from() -> None:
    for config in ({}, {"quantization_config": {"quant_method": "fp8"}}):
        with pytest.raises(CheckpointError, match="from compressed-tensors") as error:
            with_scheme(config)
        assert "--to int4" in str(error.value.hint)
    inner = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["x"]}}
    made = with_scheme({"model_type": "outer", "text_config": inner})
    assert made["text_config"]["quantization_config"]["kv_cache_scheme"] == SCHEME
    assert made["text_config"]["quantization_config"]["ignore"] == ["x"]
    assert "kv_cache_scheme" not in inner["quantization_config"]
