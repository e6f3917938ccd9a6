"""A latent moved out of FP8's range: flagged, failed by the gate, and folded back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte import cli
from halfbyte.errors import CheckpointError
from halfbyte.evals.engines import Backend
from halfbyte.evals.gate import gate
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.model import load_model
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import EvalReport, checkpoint_fingerprint
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.fold import folded
from halfbyte.kvcache.layout import Kv
from halfbyte.testing.tiny import Source, write_tiny

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
NANO = DEMO / "glm-nano-fp8"
TEXT = DEMO / "calibration.jsonl"


def moved(source: Path, folder: Path, octaves: int) -> Path:
    """The same function, its latents times 2^octaves; written by hand."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("kv_a_layernorm.weight"):
                tensors[name] = tensor * 2.0**octaves
            if name.endswith("kv_b_proj.weight_scale_inv"):
                tensors[name] = tensor * 2.0**-octaves
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder


def evaluated(folder: Path, kv: Kv) -> EvalReport:
    names = ["glm_arc_like"]
    tasks = run_tasks(folder, DEMO / "tasks", names, engine=Backend(kv_cache=kv), limit=40)
    made = checkpoint_fingerprint(open_checkpoint(folder))
    return EvalReport(str(folder), made, tasks=tasks, kv_cache=kv)


def logits(folder: Path) -> torch.Tensor:
    tokens = torch.arange(2 * 60).view(2, 60) * 7 % 290
    with torch.no_grad():
        found: torch.Tensor = load_model(folder)(tokens).logits
    return found


@pytest.fixture(scope="module")
def baseline() -> EvalReport:
    return evaluated(NANO, "bf16")


@pytest.mark.parametrize("octaves", [-12, 12])
def test_a_moved_latent_is_flagged_fails_and_is_folded_back(
    tmp_path: Path, baseline: EvalReport, octaves: int, capsys: pytest.CaptureFixture[str]
) -> None:
    away = moved(NANO, tmp_path / "away", octaves)
    expected = logits(NANO)
    assert torch.equal(logits(away), expected)
    words = ["kv", str(away), "--calibration", str(TEXT), "--samples", "4", "--long-samples", "0"]
    words += ["--sequence-length", "128", "--fold", "-o", str(tmp_path / "back"), "--json"]
    assert cli.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["safe_at_scale_1"] is False
    assert document["rows_scale_themselves"] is True
    assert len(document["layers"]) == 6
    for layer in document["layers"]:
        assert not layer["safe_at_scale_1"]
        assert layer["reasons"][0].startswith("latent: ")
        assert layer["fold"] * octaves > 0
    back = Path(document["output"])
    assert torch.equal(logits(back), expected)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (NANO / "config.json").read_text()
    )
    policy = load_policy("article", 10.0)
    assert gate(baseline, evaluated(away, "fp8-raw"), policy).verdict == "fail"
    assert gate(baseline, evaluated(back, "fp8-raw"), policy).verdict == "pass"


def test_rows_that_scale_themselves_need_no_fold(tmp_path: Path) -> None:
    away = moved(NANO, tmp_path / "away", 12)
    tokens = torch.arange(60)[None] * 7 % 4000
    with torch.no_grad():
        one, other = (load_model(f, kv_cache="fp8")(tokens).logits for f in (NANO, away))
    assert torch.equal(one, other)


@pytest.mark.parametrize("source", ["bf16", "fp8", "ct-channel", "ct-block"])
def test_every_encoding_is_folded_without_a_trace(tmp_path: Path, source: Source) -> None:
    folder = write_tiny(tmp_path / "tiny", model_type="deepseek_v3", source=source)
    checkpoint = open_checkpoint(folder)
    changed = folded(checkpoint, {0: 3, 2: -5, 3: 0})
    assert {name.split(".")[2] for name in changed} == {"0", "2"}
    assert len(changed) == 4
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file(
            {name: changed.get(name, tensor) for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    before = write_tiny(tmp_path / "before", model_type="deepseek_v3", source=source)
    assert torch.equal(logits(folder), logits(before))


def test_a_fold_that_would_round_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny", source="bf16"))
    with pytest.raises(CheckpointError, match=r"kv_a_layernorm.weight .* not exact in BF16"):
        folded(checkpoint, {1: 130})
