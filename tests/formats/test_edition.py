"""A copy with other bytes at known places is a whole model, or is not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

from halfbyte.errors import CheckpointError, OutputError
from halfbyte.formats import edition
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.edition import require_edition, write_edition
from halfbyte.formats.folder import lock_folder
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
    folder, grows = tmp_path / "taken", tmp_path / "new.halfbyte"
    for place in (folder, grows):
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    checkpoint = open_checkpoint(tiny)
    for place, said in (
        (folder, "is there already: it holds notes.txt"),
        (folder / "notes.txt", "is a file"),
        (tmp_path / "new", "holds notes.txt, which is not of a copy"),
        (tiny / "inside", "lie in each other"),
    ):
        with pytest.raises(OutputError, match=said):
            write_edition(checkpoint, place, config={}, progress=SilentProgress())
    assert [(path / "notes.txt").read_text() for path in (folder, grows)] == ["mine", "mine"]
    assert sorted(tmp_path.iterdir()) == [grows, folder]


def test_a_folder_that_another_process_writes_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    grows = tmp_path / "edition.halfbyte"
    grows.mkdir()
    (grows / "model.safetensors.partial").write_text("half")
    lock = lock_folder(grows, tmp_path / "edition")
    try:
        with pytest.raises(OutputError, match=r"another process is writing to .*edition$"):
            write_edition(
                open_checkpoint(tiny), tmp_path / "edition", config={}, progress=SilentProgress()
            )
    finally:
        os.close(lock)
    assert (grows / "model.safetensors.partial").read_text() == "half"


def names(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


EDIT = """
import os, signal, sys
from pathlib import Path

import torch

from halfbyte.formats import edition, files
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.progress import SilentProgress

source, folder, last = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
steps = 0


def killed(event, _):
    global steps
    if event in ("open", "os.rename", "os.remove", "os.mkdir"):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)


checkpoint = open_checkpoint(source)
norm = "model.layers.1.input_layernorm.weight"
replaced = {norm: torch.ones(checkpoint.tensors[norm].shape, dtype=torch.bfloat16)}
added = {"more.safetensors": {"more": torch.arange(5)}}
torch.ones(1).numpy(), edition._bytes(torch.ones(1))  # imports what would be counted
sys.addaudithook(killed)
edition.write_edition(
    checkpoint, folder, config=checkpoint.config, replaced=replaced, added=added,
    progress=SilentProgress(),
)
print(steps)
"""


def edit(source: Path, folder: Path, last: int) -> subprocess.CompletedProcess[str]:
    """Write an edition in a process that kills itself before its `last` step with files."""
    return subprocess.run(
        [sys.executable, "-c", EDIT, str(source), str(folder), str(last)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_kill_dash_nine_and_the_same_command_again(tiny: Path, tmp_path: Path) -> None:
    """Killed by the operating system where a file is opened, renamed or removed, one after the
    other: each time there is no model, or the whole one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = int(edit(tiny, whole, 0).stdout)
    expected = names(whole)
    finished = []
    for last in [*range(1, steps, 7), steps - 2, steps - 1, steps]:
        killed = edit(tiny, broken, last)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if broken.exists():
            assert names(broken) == expected
            finished.append(last)
            shutil.rmtree(broken)
    assert finished in ([], [steps])  # the last step makes the new name durable
    assert (tmp_path / "broken.halfbyte").exists() == (not finished)
    again = edit(tiny, broken, 0)
    assert again.returncode == 0, again.stderr
    assert names(broken) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "whole"]


def test_what_fails_is_gone_and_what_was_killed_makes_way(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, folder = open_checkpoint(tiny), tmp_path / "my edition"
    write_edition(checkpoint, tmp_path / "whole", config={}, progress=SilentProgress())
    for failure, raised, said in (
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (OSError(errno.ENOSPC, "No space left on device"), OutputError, "No space left on device"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(edition, "_write_index", Mock(side_effect=failure))
            with pytest.raises(raised, match=said) as error:
                write_edition(checkpoint, folder, config={}, progress=SilentProgress())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]
    assert error.value.hint == "make room, then repeat the command"  # type: ignore[attr-defined]
    grows = tmp_path / "my edition.halfbyte"
    grows.mkdir()
    for name in ("model-00001-of-00003.safetensors", "old.safetensors", "config.json.partial"):
        (grows / name).write_text("half")
    write_edition(checkpoint, folder, config={}, progress=SilentProgress())
    assert names(folder) == names(tmp_path / "whole")
    assert not grows.exists()


def test_an_empty_folder_a_link_and_a_relative_path_are_filled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "empty")
    for place in (Path("."), tmp_path / "link"):
        write_edition(checkpoint, place, config=checkpoint.config, progress=SilentProgress())
    assert (tmp_path / "link").is_symlink()
    for place in ("empty", "elsewhere"):
        assert open_checkpoint(tmp_path / place).nbytes == checkpoint.nbytes


def test_a_full_disk_is_seen_before(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    needed = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    with pytest.raises(OutputError, match=f"{needed:,} bytes needed, 1,000 free"):
        require_edition(open_checkpoint(tiny), tmp_path / "edition")
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changed_since_is_not_copied(tiny_copy: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_copy)
    with (tiny_copy / "model-00002-of-00003.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors now has"):
        write_edition(checkpoint, tmp_path / "edition", config={}, progress=SilentProgress())
    assert [path.name for path in tmp_path.iterdir()] == [tiny_copy.name]
