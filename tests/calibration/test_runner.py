"""Running layer by layer equals running the whole model in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfbyte.calibration import runner as runner_module
from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.runner import LayerRunner, batches
from halfbyte.errors import CalibrationError, CheckpointError, UnsupportedModelError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.testing.tiny import write_tiny


def make_runner(path: Path, reader: ShardReader, dtype: torch.dtype = torch.float32) -> LayerRunner:
    checkpoint = reader.checkpoint
    return LayerRunner(
        Architecture.of(checkpoint), logical_weights(checkpoint), reader, device="cpu", dtype=dtype
    )


@torch.no_grad()
def our_logits(
    path: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(path, reader, dtype)
        state = runner.embed(tokens)
        for index in range(runner.architecture.layers):
            runner.advance(index, state)
        return runner.norm("model.norm.weight")(state.hidden[:]) @ runner.head().T


@torch.no_grad()
def their_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def random_tokens(sequences: int, length: int) -> torch.Tensor:
    return torch.randint(10, 300, (sequences, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("length", [1, 12, 40])  # tiny selects 16 tokens: 40 is sparse attention
def test_logits_equal_transformers(
    tmp_path: Path, model_type: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "BATCH_TOKENS", 80)  # several batches
    path = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    tokens = random_tokens(5, length)
    torch.testing.assert_close(
        our_logits(path, tokens), their_logits(path, tokens), rtol=1e-4, atol=1e-4
    )


def test_sparse_attention_matters_in_that_test(tmp_path: Path) -> None:
    """Guards the test above: with 40 tokens the indexer really leaves tokens out."""
    path = write_tiny(tmp_path / "tiny", source="bf16")
    config = json.loads((path / "config.json").read_text())
    tokens = random_tokens(5, 40)
    sparse = our_logits(path, tokens)
    (path / "config.json").write_text(json.dumps(config | {"index_topk": 64}))
    dense = our_logits(path, tokens)
    assert (sparse - dense).norm() > 0.01 * dense.norm()


def test_tied_embedding_is_the_head(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16", tied=True)
    tokens = random_tokens(2, 8)
    torch.testing.assert_close(
        our_logits(path, tokens), their_logits(path, tokens), rtol=1e-4, atol=1e-4
    )


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    """But for tokens near a tie of the router, which may reach another expert: the odd one."""
    path = write_tiny(tmp_path / "tiny", source="bf16", model_type="deepseek_v3")
    tokens = random_tokens(3, 16)
    exact, half = our_logits(path, tokens), our_logits(path, tokens, torch.bfloat16)
    error = (exact - half.float()).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.median()) < 0.03
    assert float((error < 0.05).float().mean()) > 0.9


@pytest.mark.parametrize(("sequences", "length"), [(1, 1), (7, 3), (5, 9000), (100, 512)])
def test_batches_cover_all_sequences_once(sequences: int, length: int) -> None:
    slices = list(batches(sequences, length))
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(sequences))
    assert all((s.stop - s.start) * length <= max(8192, length) for s in slices)


def test_unknown_architecture_offers_rtn(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "mamba9"}))
    with pytest.raises(UnsupportedModelError, match="mamba9") as error:
        Architecture.of(open_checkpoint(path))
    assert "--method rtn" in (error.value.hint or "")


def test_infinite_activation_names_the_layer(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(path, reader)
        state = runner.embed(random_tokens(2, 4))
        state.hidden[:][1, 2, 3] = float("inf")
        with pytest.raises(CalibrationError, match="layer 0"):
            runner.advance(0, state)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(path, reader)
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp.*shape.*configuration says"):
            runner.load_layer(0)


def test_state_is_left_alone_when_only_inputs_are_wanted(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(path, reader)
        state = runner.embed(random_tokens(2, 40))
        before = state.hidden[:].clone()
        assert runner.forward(runner.load_layer(1), state, keep=False) is None
        assert torch.equal(state.hidden[:], before)
        assert state.topk is None
