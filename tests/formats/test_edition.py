"""A copy with other bytes at known places is a whole model, or is not there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from halfbyte.errors import OutputError
from halfbyte.formats import edition
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.edition import write_edition
from halfbyte.progress import SilentProgress

NORM = "model.layers.1.input_layernorm.weight"
SCALE = "model.layers.2.self_attn.kv_b_proj.weight_scale_inv"


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                tensors[name] = file.get_tensor(name)
    return tensors


def test_other_bytes_new_tensors_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    checkpoint, before = open_checkpoint(tiny), read(tiny)
    replaced = {NORM: 2 * before[NORM], SCALE: 3 * before[SCALE]}
    added = {"more.safetensors": {"more.b": torch.ones(3), "more.a": torch.arange(5)}}
    folder = tmp_path / "parent" / "edition"
    write_edition(
        checkpoint,
        folder,
        config={**checkpoint.config, "new": [1]},
        replaced=replaced,
        added=added,
        progress=SilentProgress(),
    )
    expected = before | replaced | added["more.safetensors"]
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert open_checkpoint(folder).nbytes == checkpoint.nbytes + 3 * 4 + 5 * 8  # index, headers
    config = json.loads((folder / "config.json").read_text())
    assert config == {**json.loads((tiny / "config.json").read_text()), "new": [1]}
    for name in checkpoint.side_files:
        assert (folder / name).read_bytes() == (tiny / name).read_bytes()
    assert [path.name for path in folder.parent.iterdir()] == ["edition"]
    with safe_open(tiny / checkpoint.tensors[NORM].shard, "pt") as file:
        assert torch.equal(file.get_tensor(NORM), before[NORM])  # the source is as it was


def test_nothing_is_written_over(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for place in (folder, folder / "notes.txt"):
        with pytest.raises(OutputError, match="is there already"):
            write_edition(open_checkpoint(tiny), place, config={}, progress=SilentProgress())
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_interruption_leaves_no_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, original = tmp_path / "my edition", edition.write_atomic

    def interrupted(path: Path, data: bytes) -> None:
        if path.name == "config.json":
            raise KeyboardInterrupt
        original(path, data)

    monkeypatch.setattr(edition, "write_atomic", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_edition(open_checkpoint(tiny), folder, config={}, progress=SilentProgress())
    assert not folder.exists()
    monkeypatch.undo()
    with pytest.raises(OutputError, match="of a run that was interrupted") as error:
        write_edition(open_checkpoint(tiny), folder, config={}, progress=SilentProgress())
    rest = tmp_path / "my edition.partial"
    assert shlex.split(str(error.value.hint)) == ["rm", "-r", str(rest)]
    assert not (rest / "config.json").exists()


def test_a_full_disk_is_seen_before(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    needed = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    with pytest.raises(OutputError, match=f"{needed:,} bytes needed, 1,000 free"):
        write_edition(
            open_checkpoint(tiny), tmp_path / "edition", config={}, progress=SilentProgress()
        )
    assert list(tmp_path.iterdir()) == []
