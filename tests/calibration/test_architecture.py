"""Configurations as published are read as transformers itself reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.runner import LayerRunner
from halfbyte.errors import CheckpointError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.testing.tiny import write_nested, write_tiny

YARN = {  # DeepSeek-V3's own keys, which Kimi-K2 uses, too
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
PARTIAL = {"rope_theta": 1_000_000.0, "rope_scaling": None, "partial_rotary_factor": 0.5}


def rewrite_config(path: Path, changes: dict[str, Any]) -> None:
    """Replace today's `rope_parameters` by the keys of published configs."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters")
    config |= changes
    (path / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    with ShardReader(open_checkpoint(path)) as reader:
        architecture = Architecture.of(reader.checkpoint)
        runner = LayerRunner(
            architecture,
            logical_weights(reader.checkpoint),
            reader,
            device="cpu",
            dtype=torch.float32,
        )
        state = runner.embed(tokens)
        for index in range(architecture.layers):
            runner.advance(index, state)
        return runner.norm("model.norm.weight")(state.hidden[:]) @ runner.head().T


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", YARN),
        ("glm4_moe", PARTIAL),
        ("deepseek_v3", {"rope_theta": 20000.0}),
        ("glm_moe_dsa", {"rope_theta": 20000.0, "rope_scaling": None}),
    ],
)
def test_rope_of_published_configs(
    tmp_path: Path, model_type: Any, changes: dict[str, Any]
) -> None:
    path = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    rewrite_config(path, changes)
    tokens = torch.randint(10, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.config.rope_parameters["rope_theta"] == changes["rope_theta"]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(logits(path, tokens), expected, rtol=1e-4, atol=1e-4)


def test_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    """Kimi-K2.5's layout: text_config, the prefix language_model., tensors of a vision tower."""
    plain = write_tiny(tmp_path / "plain", model_type="deepseek_v3", source="bf16", mtp=False)
    rewrite_config(plain, YARN)
    tokens = torch.randint(10, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = logits(plain, tokens)

    folder = write_nested(tmp_path / "kimi", plain)
    assert torch.equal(logits(folder, tokens), expected)


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
def test_configuration_is_transformers_own(tmp_path: Path, model_type: Any) -> None:
    path = write_tiny(tmp_path / "tiny", model_type=model_type, mtp=False)
    ours = Architecture.of(open_checkpoint(path)).config.to_dict()
    theirs = AutoConfig.from_pretrained(path).to_dict()
    for entry in ("quantization_config", "_name_or_path"):
        ours.pop(entry, None)
        theirs.pop(entry, None)
    assert ours == theirs


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("n_group", 0),
        ("topk_group", -1),
        ("hidden_size", "wide"),
        ("num_experts_per_tok", 0),
        ("hidden_act", "none such"),
        ("moe_intermediate_size", -1),
    ],
)
def test_a_config_that_cannot_be_built_names_the_entry(
    tmp_path: Path, entry: str, value: object
) -> None:
    path = write_tiny(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {entry: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json.*({entry}|{value}|negative)"):
        Architecture.of(open_checkpoint(path)).layer(1)
