"""Publishing on a Hub on loopback: what is refused, what arrives, what survives."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from halfbyte.cli import main
from halfbyte.core import Settings
from halfbyte.errors import HubError, UsageError, VerifyError
from halfbyte.evals.report import checkpoint_fingerprint
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.publish import push
from halfbyte.quantize import pipeline
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.verify import verify
from halfbyte.testing.hub import PART, TOKEN, LoopbackHub

NAME = "someone/Tiny-INT4"


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified checkpoint in several shards, some of them larger than a part of an upload."""
    folder = tmp_path_factory.mktemp("finished") / "Tiny-INT4"
    plan = make_plan(
        open_checkpoint(tiny),
        load_recipe("glm-5"),
        Settings(method="rtn"),
        max_shard_bytes=PART,
    )
    pipeline.run(plan, folder)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) > 3
    assert min(sizes) < PART < max(sizes)
    return folder


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "Tiny-INT4"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with LoopbackHub(tmp_path / "hub") as hub, hub.in_use(tmp_path / "home"):
        yield hub


def require_equal(folder: Path, copy: Path) -> None:
    names = {path.name for path in copy.iterdir() if path.is_file()}
    assert names == {path.name for path in folder.iterdir() if path.is_file()}
    for name in names:
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    assert not verify(copy).mismatches


def test_a_push_survives_kill_9_and_failures(
    hub: LoopbackHub, output: Path, tmp_path: Path
) -> None:
    (output / "README.md").write_text("# A card\n")
    command = [sys.executable, "-m", "halfbyte", "push", str(output), NAME, "--json"]
    environment = hub.environment(tmp_path / "home")

    def stored() -> set[str]:
        return {oid for oid, path in list(hub.objects.items()) if path.is_file()}

    def kill() -> None:
        # Files are sent side by side: not before one of them is there.
        for _ in range(3000):
            if stored():
                break
            threading.Event().wait(0.01)
        os.kill(process.pid, signal.SIGKILL)

    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        hub.fail("PUT /lfs/", kill, skip=3)
        assert process.wait() == -signal.SIGKILL
    arrived = stored()
    assert arrived
    hub.requests.clear()
    hub.fail("PUT /lfs/", "503")
    hub.fail("PUT /lfs/", "reset", skip=1)
    hub.fail("objects/batch", "429")
    hub.fail("/commit/", "503")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not any(fault.times for fault in hub.faults)
    assert not [r for r in hub.requests for oid in arrived if f"PUT /lfs/{oid}" in r]
    record = json.loads(done.stdout)
    assert record["private"] is True
    assert record["commit"] == hub.repos[NAME].refs["main"]
    assert TOKEN not in done.stdout + done.stderr
    copy = snapshot_download(NAME, local_dir=tmp_path / "copy")
    require_equal(output, Path(copy))


def test_what_is_no_part_of_the_checkpoint_stays_here(hub: LoopbackHub, output: Path) -> None:
    (output / "model-00001-of-00002.safetensors.partial").touch()
    (output / "notes.md").touch()
    (output / "link.json").symlink_to("/etc/hostname")
    planned = push(output, NAME, dry_run=True, force=True)
    assert not hub.requests
    assert planned.commit is None
    assert planned.files == {
        path.name: path.stat().st_size
        for path in open_checkpoint(output).path.iterdir()
        if path.suffix in (".safetensors", ".json", ".jinja") and not path.is_symlink()
    }
    expected = "not published: link.json, model-00001-of-00002.safetensors.partial, notes.md"
    assert expected in planned.notes


def test_a_dry_run_lists_the_files(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a network."""
    assert main(["push", str(output), NAME, "--dry-run"]) == 0
    shown = capsys.readouterr()
    for path in output.iterdir():
        assert re.search(rf"^{re.escape(path.name)} +{path.stat().st_size:,}$", shown.out, re.M)
    assert f"as {NAME} (private)" in shown.out
    assert "there is no README.md" in shown.err
    assert "there is no gate.json" in shown.err


@pytest.mark.parametrize(
    ("verdict", "refused"),
    [
        ("pass", ""),
        ("pass", "on another checkpoint"),
        ("fail", "fail"),
        ("inconclusive", "inconclusive"),
        ("invalid", "invalid"),
        ("", "unreadable"),
    ],
)
def test_the_gate_has_a_say(hub: LoopbackHub, output: Path, verdict: str, refused: str) -> None:
    judged = "0" if "another" in refused else checkpoint_fingerprint(open_checkpoint(output))
    record = {"verdict": verdict, "candidate": judged}
    (output / "gate.json").write_text(json.dumps(record) if verdict else "{")
    if not refused:
        assert "gate.json" in push(output, NAME, dry_run=True).files
        return
    with pytest.raises(VerifyError, match=f"the verdict is {refused}"):
        push(output, NAME)
    assert not hub.requests
    forced = push(output, NAME, force=True)
    assert any("in spite of gate" in note for note in forced.notes)


def test_a_folder_that_is_not_right_is_refused(hub: LoopbackHub, output: Path) -> None:
    (output / ".halfbyte").mkdir()
    with pytest.raises(VerifyError, match="unfinished"):
        push(output, NAME)
    (output / ".halfbyte").rmdir()
    shard = max(output.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(VerifyError, match=f"hash: {shard.name}"):
        push(output, NAME)
    moved = shard.rename(output.parent / "elsewhere.safetensors")
    shard.symlink_to(moved)
    with pytest.raises(VerifyError, match=f"{shard.name} is a link"):
        push(output, NAME, force=True)
    with pytest.raises(UsageError, match="no repository"):
        push(output, "Tiny-INT4")
    assert not hub.requests


def test_branches_and_pull_requests(hub: LoopbackHub, output: Path) -> None:
    with pytest.raises(HubError, match="no repository"):
        push(output, NAME, pull_request=True)
    first = push(output, NAME, revision="int4")
    repo = hub.repos[NAME]
    assert repo.refs["int4"] == first.commit
    assert not repo.commits[repo.refs["main"]]
    asked = push(output, NAME, pull_request=True)
    assert repo.refs["refs/pr/1"] == asked.commit
    assert asked.url == f"{hub.endpoint}/{NAME}/discussions/1"
    assert not repo.commits[repo.refs["main"]]
    again = push(output, NAME, revision="int4")
    assert again.commit == first.commit


def test_nothing_is_shown_or_mixed_by_accident(hub: LoopbackHub, output: Path) -> None:
    assert push(output, NAME, public=True).private is False
    with pytest.raises(HubError, match="is public already"):
        push(output, NAME)
    repo = hub.repos[NAME]
    files = dict(repo.commits[repo.refs["main"]])
    files["model-00001-of-00009.safetensors"] = next(iter(files.values()))
    repo.add("main", files)
    with pytest.raises(HubError, match=r"1 shards that are not ours, model-00001-of-00009"):
        push(output, NAME, public=True)


@pytest.mark.parametrize("file", ["config.json", "safetensors"])
def test_what_the_hub_lists_is_compared(hub: LoopbackHub, output: Path, file: str) -> None:
    """Bytes that the Hub lists as others, and a file that is not there."""

    def spoil() -> None:
        repo = hub.repos[NAME]
        for commit, files in repo.commits.items():
            for name, blob in files.items():
                if name.endswith(file):
                    changed = replace(blob, oid="0" * len(blob.oid))
                    repo.commits[commit] = {**files, name: changed}

    hub.fail("/tree/", spoil, skip=1)
    with pytest.raises(HubError, match=f"does not hold .*{file} as it is in"):
        push(output, NAME)


def test_a_shard_that_changes_behind_the_verification_is_noticed(
    hub: LoopbackHub, output: Path
) -> None:
    """Though the Hub lists it just as it is here now."""
    shard = max(output.glob("*.safetensors"))

    def change() -> None:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)

    hub.fail("/api/repos/create", change)
    with pytest.raises(HubError, match=f"does not hold {shard.name} .*, [0-9a-f]+ was verified"):
        push(output, NAME)


def test_a_push_that_is_refused_is_explained(
    hub: LoopbackHub, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(HubError, match="answers 401") as caught:
        push(output, NAME)
    assert caught.value.hint == "hf auth login, with a token that may do this"
    assert not hub.objects
