"""Copies of quantized checkpoints for an FP8 cache: verified like the run's own output."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte import cli
from halfbyte.core import RunReport
from halfbyte.errors import CheckpointError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.edition import write_edition
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.formats.servers import is_divided
from halfbyte.kvcache.fold import folded
from halfbyte.kvcache.layout import read_attention
from halfbyte.kvcache.ranges import BINS, KvRanges, LayerRange, Name, PartRange
from halfbyte.kvcache.remedy import SCALES_SHARD, remedied
from halfbyte.progress import SilentProgress
from halfbyte.quantize.verify import verify
from halfbyte.testing.tiny import ModelType, write_tiny

VALUE = PartRange("key", 0, 10, 1.0, 1.0, 1.0, 0.0, 0.0, 0, (0,) * BINS, 31.0, 31.0)


def ranges(folder: Path, largest: float = 1.0, **changes: Any) -> KvRanges:
    """What a measuring of a model with five layers and two heads of keys and values would say."""
    names: tuple[Name, Name] = ("key", "value")
    value = replace(VALUE, amax=largest, **changes)
    parts = tuple(replace(value, part=name, head=head) for name in names for head in (0, 1))
    layers = tuple(LayerRange(layer, parts) for layer in range(5))
    attention = read_attention(open_checkpoint(folder).config)
    return KvRanges(str(folder), attention, 10, ((1, 10),), "float32", layers)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelType, tuple[Path, Path]]:
    """FP8 sources, and what `quantize run` makes of them."""
    folder, found = tmp_path_factory.mktemp("remedy"), {}
    types: tuple[ModelType, ...] = ("glm4_moe", "glm_moe_dsa")
    for name in types:
        source = write_tiny(folder / name, model_type=name)
        output = folder / f"{name}-INT4"
        assert (
            cli.main(["run", str(source), "--to", "int4", "--method", "rtn", "-qo", str(output)])
            == 0
        )
        found[name] = source, output
    return found


@pytest.fixture
def scaled(made: dict[ModelType, tuple[Path, Path]], tmp_path: Path) -> Path:
    """The INT4 checkpoint with scales of its keys and values."""
    quantized = made["glm4_moe"][1]
    folder = tmp_path / "scaled"
    count = remedied(open_checkpoint(quantized), ranges(quantized), folder, SilentProgress())
    assert count == 2 * 5
    return folder


def test_a_copy_with_scales_passes(
    made: dict[ModelType, tuple[Path, Path]], scaled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, quantized = made["glm4_moe"]
    result, before = verify(scaled, source), verify(quantized, source)
    assert result.mismatches == before.mismatches == ()
    assert result.notes == before.notes == ()
    assert result.tensors == before.tensors + 10
    assert result.quantized == before.quantized > 0
    # The report says of the copy what it says of the output, but for what is new.
    first, second = (json.loads((f / REPORT_FILE).read_text()) for f in (quantized, scaled))
    assert second["bytes_out"] - first["bytes_out"] == 10 * 4
    checkpoint = open_checkpoint(scaled)
    whole = sum(t.nbytes for t in checkpoint.tensors.values() if not is_divided(t.name))
    assert second["whole_out"] == whole
    assert second["bytes_out"] == checkpoint.nbytes
    assert second["shards"].keys() - first["shards"].keys() == {SCALES_SHARD}
    for key in first.keys() - {"bytes_out", "whole_out", "shards"}:
        assert second[key] == first[key], key
    assert RunReport.from_json(second, output="").shards == second["shards"]
    assert cli.main(["card", str(scaled)]) == 0
    assert cli.main(["verify", str(scaled)]) == 0
    capsys.readouterr()


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damage_of_a_copy_is_named(scaled: Path) -> None:
    shard = sorted(scaled.glob("model-0*.safetensors"))[-1]
    for path in (shard, scaled / SCALES_SHARD):
        flip(path)
        (mismatch,) = verify(scaled).mismatches
        assert (mismatch.kind, mismatch.name) == ("hash", path.name)
        flip(path)
    assert verify(scaled).mismatches == ()
    (scaled / REPORT_FILE).unlink()
    flip(shard)
    result = verify(scaled)
    assert result.mismatches == ()  # nobody can know
    assert "hashes, plan and the exact error of each weight were not checked" in result.notes[0]


def test_a_scale_that_is_none_is_named(scaled: Path) -> None:
    (scaled / REPORT_FILE).unlink()
    flip(scaled / SCALES_SHARD, -1)
    data = bytearray((scaled / SCALES_SHARD).read_bytes())
    data[-4:] = torch.tensor([-2.0]).numpy().tobytes()
    (scaled / SCALES_SHARD).write_bytes(data)
    (mismatch,) = verify(scaled).mismatches
    assert "v_scale in model-kv-scales.safetensors is -2.0, a scale is positive" in str(mismatch)


def test_what_was_damaged_before_gets_no_sound_copy(
    made: dict[ModelType, tuple[Path, Path]], tmp_path: Path
) -> None:
    damaged = shutil.copytree(made["glm4_moe"][1], tmp_path / "damaged")
    shard = min(damaged.glob("model-0*.safetensors"))
    flip(shard)
    checkpoint, measured = open_checkpoint(damaged), ranges(damaged)
    folder = tmp_path / "scaled"
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged: its SHA-256 is") as error:
        remedied(checkpoint, measured, folder, SilentProgress())
    assert error.value.hint == f"quantize verify {damaged}"
    report = damaged / REPORT_FILE
    record = json.loads(report.read_text())
    for change, says in (
        ({"schema_version": 1}, "cannot be read: schema_version is 1"),
        ({"shards": {}}, f"and the folder disagree about {shard.name}"),
    ):
        report.write_text(json.dumps(record | change))
        with pytest.raises(CheckpointError, match=says):
            remedied(checkpoint, measured, folder, SilentProgress())
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_values_that_are_not_finite_get_no_scales(
    made: dict[ModelType, tuple[Path, Path]], tmp_path: Path
) -> None:
    quantized = made["glm4_moe"][1]
    measured = ranges(quantized, nonfinite=3)
    with pytest.raises(CheckpointError, match="60 cached values are NaN or infinite"):
        remedied(open_checkpoint(quantized), measured, tmp_path / "scaled", SilentProgress())
    assert list(tmp_path.iterdir()) == []


def test_a_folded_copy_passes_and_half_a_fold_does_not(
    made: dict[ModelType, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Of an INT4 checkpoint against its FP8 source, and of the FP8 source against itself."""
    source, quantized = made["glm_moe_dsa"]
    for before in (quantized, source):
        checkpoint = open_checkpoint(before)
        changed = folded(checkpoint, {1: 5, 3: -2})
        norm = "model.layers.3.self_attn.kv_a_layernorm.weight"
        halves = {name: values for name, values in changed.items() if name != norm}
        for name, replaced in (("whole", changed), ("half", halves)):
            folder = tmp_path / f"{before.name}-{name}"
            write_edition(
                checkpoint, folder, replaced=replaced, config=checkpoint.config,
                progress=SilentProgress(),
            )  # fmt: skip
        result = verify(tmp_path / f"{before.name}-whole", source)
        assert result.mismatches == ()
        assert "2 latents are folded, which leaves the model the same" in result.notes
        (mismatch,) = verify(tmp_path / f"{before.name}-half", source).mismatches
        assert mismatch.name == "model.layers.3.self_attn.kv_b_proj.weight"
        assert "values differ" in mismatch.message or "expected" in mismatch.message
