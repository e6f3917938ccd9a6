"""Bad input, as a user meets it: one clear error, exit code 1, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte import cli
from halfbyte.testing.tiny import edit_header, write_tiny

EXPERT = "model.layers.2.mlp.experts.1.gate_proj.weight"


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def edit_index(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_tensors(folder: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    shard = shard_of(folder, name)
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def missing_shard(folder: Path) -> None:
    shard_of(folder, EXPERT).unlink()


def truncated_shard(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    shard.write_bytes(shard.read_bytes()[:-100])


def shard_outside(folder: Path) -> None:
    shutil.copy(shard_of(folder, EXPERT), folder.parent / "outside.safetensors")
    edit_index(folder, lambda names: names.update({EXPERT: "../outside.safetensors"}))


def header_larger_than_the_file(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    shard.write_bytes((1 << 40).to_bytes(8, "little") + shard.read_bytes()[8:])


def overlapping_offsets(folder: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        first, second = [name for name in header if name != "__metadata__"][:2]
        header[second]["data_offsets"] = header[first]["data_offsets"]

    edit_header(shard_of(folder, EXPERT), overlap)


def offsets_out_of_range(folder: Path) -> None:
    def move(header: dict[str, Any]) -> None:
        begin, end = header[EXPERT]["data_offsets"]
        header[EXPERT]["data_offsets"] = [begin + (1 << 50), end + (1 << 50)]

    edit_header(shard_of(folder, EXPERT), move)


def scale_missing(folder: Path) -> None:
    name = EXPERT + "_scale_inv"
    edit_tensors(folder, name, lambda tensors: tensors.pop(name) and None)
    edit_index(folder, lambda names: names.pop(name) and None)


def scale_of_the_wrong_shape(folder: Path) -> None:
    name = EXPERT + "_scale_inv"
    edit_tensors(folder, name, lambda t: t.update({name: torch.ones(3, 5)}))


def nan_weight(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT].view(torch.uint8)[1, 2] = 0x7F  # NaN in E4M3

    edit_tensors(folder, EXPERT, spoil)


def infinite_scale(folder: Path) -> None:
    name = EXPERT + "_scale_inv"
    edit_tensors(folder, name, lambda tensors: tensors[name].fill_(float("inf")) and None)


def unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="mamba9")


SOURCES = {
    missing_shard: r"1 of 3 shards are missing.*model-0000\d-of-00003",
    truncated_shard: r"model-0000\d-of-00003\.safetensors",
    shard_outside: r"\.\./outside\.safetensors",
    header_larger_than_the_file: r"header",
    overlapping_offsets: r"offsets|bytes",
    offsets_out_of_range: r"offsets|bytes",
    scale_missing: rf"{EXPERT}.* FP8 .*no scale",
    scale_of_the_wrong_shape: rf"{EXPERT}_scale_inv.*\[3, 5\]",
    nan_weight: rf"{EXPERT}.*nan.*\[1, 2\]",
    infinite_scale: rf"{EXPERT}_scale_inv.*inf",
    unknown_architecture: r"mamba9.*cannot be calibrated",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n} of {n**3}"}) + "\n" for n in range(99)))
    return path


class Refusal:
    """What a refused command printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], code: int) -> None:
        self.code = code
        self.out, self.err = capsys.readouterr()
        self.errors = [line for line in self.err.splitlines() if line.startswith("error:")]


@pytest.fixture
def refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Refusal]:
    """Runs `quantize SOURCE --to int4`, which must fail explained and leave no model."""

    def run(
        source: Path, *words: object, code: int = 1, calibration: Path | None = text
    ) -> Refusal:
        out = tmp_path / "out"
        before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        command = [source, "--to", "int4", "-o", out, "--samples", 4, "--sequence-length", 16]
        command += ["--calibration", calibration]
        refusal = Refusal(capsys, cli.main([str(word) for word in [*command, *words]]))
        assert refusal.code == 1
        assert len(refusal.errors) == 1, refusal.err
        assert "unexpected" not in refusal.errors[0]
        assert "Traceback" not in refusal.err
        assert refusal.out == ""
        if not before:
            assert not (out / "config.json").exists()
            assert not (out / "model.safetensors.index.json").exists()
        assert all(path.read_bytes() == data for path, data in before.items())
        return refusal

    return run


@pytest.mark.parametrize("damage", SOURCES, ids=lambda damage: damage.__name__)
def test_damaged_sources(
    damage: Callable[[Path], None], tiny_copy: Path, refused: Callable[..., Refusal]
) -> None:
    damage(tiny_copy)
    refusal = refused(tiny_copy)
    assert re.search(SOURCES[damage], refusal.errors[0]), refusal.errors[0]
    if damage is unknown_architecture:
        assert "--method rtn" in refusal.err


@pytest.mark.parametrize("damage", [d for d in SOURCES if d is not unknown_architecture])
def test_damage_that_headers_show_is_found_before_anything_is_written(
    damage: Callable[[Path], None],
    tiny_copy: Path,
    refused: Callable[..., Refusal],
    tmp_path: Path,
) -> None:
    damage(tiny_copy)
    refused(tiny_copy)
    # Values are read only when their layer's turn comes.
    assert (tmp_path / "out").exists() == (damage in (nan_weight, infinite_scale))


def test_unknown_architecture_can_be_rounded(tiny_copy: Path, tmp_path: Path) -> None:
    unknown_architecture(tiny_copy)
    out = tmp_path / "out"
    assert cli.main([str(tiny_copy), "--to", "int4", "--method", "rtn", "-o", str(out), "-q"]) == 0
    assert (out / "config.json").exists()


def test_group_size_that_does_not_divide(tiny: Path, refused: Callable[..., Refusal]) -> None:
    error = refused(tiny, "--group-size", 128).errors[0]  # down has 64 columns
    assert "down_proj" in error
    assert "128" in error
    assert "64" in error


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [
                {
                    "tensors": r".*\.layers\.2\.mlp\.experts\.1\..*",
                    "action": "dequantize",
                    "reason": "left out",
                }
            ],
            r"experts",
        ),
        (
            [{"tensors": r".*\.hyperconnection\..*", "action": "copy", "reason": "none such"}],
            r"hyperconnection",
        ),
    ],
    ids=["one expert excluded", "a rule that matches nothing"],
)
def test_recipes(
    rules: list[dict[str, Any]],
    message: str,
    tiny: Path,
    tmp_path: Path,
    refused: Callable[..., Refusal],
) -> None:
    import yaml

    from halfbyte.quantize.recipe import load_recipe, recipe_to_dict

    record = recipe_to_dict(load_recipe("glm-5"))
    record["rules"] = rules + record["rules"]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump(record))
    error = refused(tiny, "--recipe", recipe).errors[0]
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text"),
        (b'{"text": "too short"}\n', "fill 0 windows of 16, 4 (64 tokens) are needed"),
        (b'{"text": "caf\xe9"}\n', "not UTF-8"),
        (b"plainly no JSON\n", "line 1 is not JSON"),
        (b'{"body": "x"}\n', "line 1"),
    ],
    ids=["empty", "too short", "not UTF-8", "not JSON", "no text field"],
)
def test_calibration_text(
    content: bytes, message: str, tiny: Path, tmp_path: Path, refused: Callable[..., Refusal]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    error = refused(tiny, calibration=path).errors[0]
    assert message in error
    assert str(path) in error
    assert not (tmp_path / "out").exists()


def test_output_folder_not_empty(
    tiny: Path, tmp_path: Path, refused: Callable[..., Refusal]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refusal = refused(tiny)
    assert "not empty" in refusal.errors[0]
    assert "--resume" in refusal.err
    assert "--overwrite" in refusal.err


def test_output_that_cannot_be_written(
    tiny: Path, tmp_path: Path, refused: Callable[..., Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, **_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", read_only)
        error = refused(tiny).errors[0]
    assert f"cannot write to {tmp_path / 'out'}: Read-only file system" in error


def test_disk_too_small(
    tiny: Path, refused: Callable[..., Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1234}))
    error = refused(tiny).errors[0]
    assert "too small" in error
    assert "1,234 free" in error


def test_disk_that_fills_up_leaves_a_resumable_run(
    tiny: Path, tmp_path: Path, refused: Callable[..., Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = os.pwrite, 0

    def full(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        refusal = refused(tiny)
    assert "No space left" in refusal.errors[0]
    assert "--resume" in refusal.err
    command = [tiny, "--to", "int4", "-o", tmp_path / "out", "--samples", 4, "--resume"]
    command += ["--sequence-length", 16, "--calibration", tmp_path / "text.jsonl", "-q"]
    assert cli.main([str(word) for word in command]) == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_a_lone_shard_without_index_works(tmp_path: Path, text: Path) -> None:
    source, out = write_tiny(tmp_path / "lone", shards=1), tmp_path / "out"
    command = [source, "--to", "int4", "-o", out, "--calibration", text, "-q"]
    command += ["--samples", 4, "--sequence-length", 16]
    assert cli.main([str(word) for word in command]) == 0
    assert cli.main(["verify", str(out), "--source", str(source)]) == 0
