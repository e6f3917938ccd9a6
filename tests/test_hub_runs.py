"""Whole runs from a Hub on loopback: the bytes of runs from a folder, few shards on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfbyte.cli import main
from halfbyte.formats.budgets import SHARDS_ON_DISK
from halfbyte.quantize.verify import verify
from halfbyte.testing.hub import LoopbackHub
from halfbyte.testing.tiny import write_tiny

NAME = "someone/Tiny-FP8"
SHARDS = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        tmp_path_factory.mktemp("source") / "Tiny-FP8", layers=2, experts=2, shards=SHARDS
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(200)))
    return path


@pytest.fixture(scope="module")
def methods(text: Path) -> dict[str, list[str]]:
    calibrated = ["--calibration", str(text), "--samples", "4", "--sequence-length", "24"]
    return {"rtn": ["--method", "rtn"], "gptq": calibrated}


@pytest.fixture(scope="module")
def local(
    source: Path, methods: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What runs from the folder write, by method."""
    outputs = {}
    for method, words in methods.items():
        outputs[method] = tmp_path_factory.mktemp("local") / method
        assert main([str(source), *words, "-o", str(outputs[method]), "-q"]) == 0
    return outputs


@pytest.fixture
def hub(source: Path, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.add(NAME, source)
        yield hub


class Watch:
    """The most shards that lay in a folder at the beginning of a download."""

    def __init__(self, hub: LoopbackHub, output: Path) -> None:
        self.folder, self.most = output / ".halfbyte" / "source", 0
        hub.fail("GET /cdn/", self, times=10**9)

    def __call__(self) -> None:
        files = [p.suffix in (".safetensors", ".incomplete") for p in self.folder.rglob("*")]
        self.most = max(self.most, sum(files))


def require_equal(output: Path, local: Path, hub: LoopbackHub) -> None:
    """All files are the same, but for where report and card say that the source came from, and what
    the run took."""
    names = {path.name for path in local.iterdir()}
    assert {path.name for path in output.iterdir()} == names
    for name in names - {"halfbyte_report.json", "halfbyte_run.json", "README.md"}:
        assert (output / name).read_bytes() == (local / name).read_bytes(), name
    ours, theirs = (json.loads((p / "halfbyte_report.json").read_text()) for p in (output, local))
    came, folder = ours.pop("origin"), theirs.pop("origin")
    assert (came["repo"], came["revision"]) == (NAME, hub.repos[NAME].refs["main"])
    assert (folder["repo"], folder["revision"]) == (None, None)
    assert ours == theirs
    assert f"base_model: {NAME}" in (output / "README.md").read_text()
    assert not verify(output).mismatches


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_run_from_the_hub(
    hub: LoopbackHub,
    tmp_path: Path,
    local: dict[str, Path],
    methods: dict[str, list[str]],
    method: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A layer's tensors lie in many shards here, which calibration reads in turns."""
    output = tmp_path / "output"
    watch = Watch(hub, output)
    capsys.readouterr()
    with hub.in_use(tmp_path / "home"):
        assert main([NAME, *methods[method], "-o", str(output)]) == 0
    said = capsys.readouterr().err
    assert f"source       {NAME}@{hub.repos[NAME].refs['main']} (glm_moe_dsa)" in said
    assert ("with --keep-source" in said) == (method == "gptq")
    require_equal(output, local[method], hub)
    assert 1 <= watch.most <= SHARDS_ON_DISK
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_run_that_keeps_the_source(
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local: dict[str, Path],
    methods: dict[str, list[str]],
) -> None:
    """Into a folder that is named after the repository."""
    output = tmp_path / "Tiny-INT4"
    monkeypatch.chdir(tmp_path)
    with hub.in_use(tmp_path / "home"):
        assert main([NAME, *methods["rtn"], "-q", "--keep-source"]) == 0
    require_equal(output, local["rtn"], hub)
    assert len(list((tmp_path / "home").rglob("*.safetensors"))) == SHARDS


def test_processes_share_downloads_or_do_not_start(
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with hub.in_use(tmp_path / "home"):
        assert main([NAME, "--method", "rtn", "-o", str(tmp_path / "output")]) == 2
    assert "hint: let them share the downloads with --keep-source" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_kill_9_and_resume(
    hub: LoopbackHub, tmp_path: Path, local: dict[str, Path], methods: dict[str, list[str]]
) -> None:
    """Killed when half of a shard has come, after others were read and deleted."""
    output = tmp_path / "output"
    watch = Watch(hub, output)
    command = [sys.executable, "-m", "halfbyte", NAME, *methods["gptq"], "-o", str(output), "-q"]
    environment = hub.environment(tmp_path / "home")
    with subprocess.Popen(command, env=environment) as process:
        hub.fail("GET /cdn/", "truncate", times=1, skip=SHARDS + 5)
        hub.fail("GET /cdn/", lambda: os.kill(process.pid, signal.SIGKILL), skip=SHARDS + 7)
        assert process.wait() == -signal.SIGKILL
    assert not (output / "config.json").exists()
    assert list(watch.folder.rglob("*.incomplete"))
    subprocess.run([*command, "--resume"], env=environment, check=True)
    require_equal(output, local["gptq"], hub)
    assert watch.most <= SHARDS_ON_DISK


def test_a_shard_with_another_hash_ends_the_run(
    hub: LoopbackHub,
    tmp_path: Path,
    source: Path,
    local: dict[str, Path],
    methods: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One error; with the right bytes the run goes on."""
    output = tmp_path / "output"
    shard = sorted(source.glob("*.safetensors"))[4]
    right = shard.read_bytes()

    def flip() -> None:
        shard.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))

    hub.fail(f"HEAD .*{shard.name}", flip)
    words = [NAME, *methods["rtn"], "-o", str(output), "-q"]
    try:
        with hub.in_use(tmp_path / "home"):
            assert main(words) == 1
    finally:
        shard.write_bytes(right)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {shard.name} of {NAME}@")
    assert said.err.count("error:") == 1
    assert "is not what the Hub lists: SHA-256 is" in said.err
    assert not (output / "config.json").exists()
    with hub.in_use(tmp_path / "home"):
        assert main([*words, "--resume"]) == 0
    require_equal(output, local["rtn"], hub)


def test_another_commit_is_another_source(
    hub: LoopbackHub,
    tmp_path: Path,
    methods: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run is resumed only at the commit that it began with."""
    words = [NAME, *methods["rtn"], "-o", str(tmp_path / "output"), "-q"]
    first = hub.repos[NAME].refs["main"]
    hub.fail("HEAD .*00005-of", "503", times=10**9)
    with hub.in_use(tmp_path / "home"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda _: None)
        assert main(words) == 1
        hub.faults.clear()
        hub.repos[NAME].add("main", hub.repos[NAME].commits[first])
        capsys.readouterr()
        assert main([*words, "--resume"]) == 1
        assert f"repository was {NAME}@{first}, now {NAME}@" in capsys.readouterr().err
        assert main([f"{NAME}@{first}", *words[1:], "--resume"]) == 0
