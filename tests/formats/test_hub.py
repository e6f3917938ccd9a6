"""Repositories over HTTP: what is asked, what is believed, what is said when something fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.cli import main
from halfbyte.errors import CheckpointError, HalfbyteError, HubError
from halfbyte.formats import hub as client
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.hub import download, list_repository
from halfbyte.formats.source import open_source
from halfbyte.models import RepositoryName
from halfbyte.testing.glm52 import write_glm52
from halfbyte.testing.hub import Blob, LoopbackHub

NAME = "someone/Tiny-FP8"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """In use by this process, with an empty cache; failed requests are repeated at once."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    with LoopbackHub(tmp_path / "hub") as hub, hub.in_use(tmp_path / "home"):
        yield hub


def test_a_repository_is_described_as_its_folder_is(hub: LoopbackHub, tiny: Path) -> None:
    commit = hub.add(NAME, tiny)
    found, expected = open_source(NAME), open_checkpoint(tiny)
    assert found.repository is not None
    assert (found.repository.name, found.repository.commit) == (NAME, commit)
    assert found.origin == f"{NAME}@{commit}"
    assert replace(found, path=tiny, repository=None) == expected
    assert found.fingerprint == expected.fingerprint
    for name in expected.side_files:
        assert (found.path / name).read_bytes() == (tiny / name).read_bytes()
    assert not [*found.path.glob("*.safetensors")]


def test_everything_is_asked_of_one_commit(hub: LoopbackHub, tiny: Path) -> None:
    """The branch may move meanwhile."""
    commit = hub.add(NAME, tiny)
    repo = hub.repos[NAME]
    hub.fail("/tree/", lambda: repo.refs.update(main=repo.add("other", {})))
    assert open_source(f"{NAME}@main").repository == list_repository(RepositoryName(NAME, commit))
    rest = [r for r in hub.requests if "/cdn/" not in r and "/revision/main" not in r]
    assert rest
    assert all(commit in request for request in rest)


def test_a_folder_needs_no_network(hub: LoopbackHub, tiny: Path) -> None:
    assert open_source(str(tiny)) == open_checkpoint(tiny)
    assert not hub.requests


def test_a_plan_of_the_real_size_reads_less_than_a_hundredth(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """755 GB in 141 shards, of which headers, index and config are some 30 MB."""
    source = write_glm52(tmp_path / "GLM-5.2-FP8")
    hub.add("zai-org/GLM-5.2-FP8", source, hashes=False)
    assert main(["plan", "glm-5.2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    size = sum(path.stat().st_size for path in source.iterdir())
    assert record["bytes_in"] == 755_617_140_416
    assert 0 < hub.served < size // 10_000
    assert record["source"].startswith("zai-org/GLM-5.2-FP8@")


@pytest.mark.parametrize("kind", ["429", "503", "truncate", "reset", "expired"])
def test_what_passes_is_waited_for(hub: LoopbackHub, tiny: Path, tmp_path: Path, kind: str) -> None:
    """Each kind of failure, at a listing, in a header and in the middle of a shard."""
    hub.add(NAME, tiny)
    if kind in ("429", "503"):
        hub.fail("/tree/", kind)  # type: ignore[arg-type]
        hub.fail(f"/api/models/{NAME}$", kind)  # type: ignore[arg-type]
    asked = "GET /.*resolve.*safetensors" if kind == "expired" else "GET /cdn/"
    hub.fail(asked, kind, times=2)  # type: ignore[arg-type]
    checkpoint = open_source(NAME)
    assert checkpoint.fingerprint == open_checkpoint(tiny).fingerprint
    assert checkpoint.repository is not None
    asked = "HEAD /.*resolve.*safetensors" if kind == "expired" else "GET /cdn/"
    hub.fail(asked, kind, times=2)  # type: ignore[arg-type]
    shard = next(iter(checkpoint.shards))
    path = download(checkpoint.repository, shard, tmp_path / "here")
    assert path.read_bytes() == (tiny / shard).read_bytes()
    assert not any(fault.times for fault in hub.faults)


def test_a_failure_that_stays_is_given_up(hub: LoopbackHub, tiny: Path) -> None:
    hub.add(NAME, tiny)
    hub.fail("/tree/", "503", times=1000)
    with pytest.raises(HubError, match="answers 503") as caught:
        open_source(NAME)
    assert sum("/tree/" in request for request in hub.requests) == client.ATTEMPTS
    assert caught.value.hint is not None


def test_a_commit_that_changes_is_an_error(hub: LoopbackHub, tiny: Path) -> None:
    hub.add(NAME, tiny)
    hub.fail("GET /.*resolve.*safetensors", "changed", skip=1)
    with pytest.raises(HubError, match="changed while it was read"):
        open_source(NAME)


def test_a_file_that_is_not_the_listed_one_is_an_error(
    hub: LoopbackHub, tiny_copy: Path, tmp_path: Path
) -> None:
    """A bit that flipped, a file that is short, and text that changed."""
    hub.add(NAME, tiny_copy)
    repository = list_repository(RepositoryName(NAME))
    shard = next(name for name in repository.files if name.endswith(".safetensors"))
    data = bytearray((tiny_copy / shard).read_bytes())
    data[-1] ^= 1
    (tiny_copy / shard).write_bytes(data)
    with pytest.raises(HubError, match=f"{shard} of .* SHA-256 is [0-9a-f]{{64}}, "):
        download(repository, shard, tmp_path / "here")
    (tiny_copy / shard).write_bytes(data[:-1])
    with pytest.raises(HubError, match=f"{shard}.*"):
        download(repository, shard, tmp_path / "here")
    text = (tiny_copy / "config.json").read_text()
    (tiny_copy / "config.json").write_text(text.replace("1", "2"))
    with pytest.raises(HubError, match=r"config\.json of .*git's object id"):
        download(repository, "config.json")
    assert not [p for p in (tmp_path / "here").glob("*") if p.is_file()]
    assert not list((tmp_path / "home").rglob("config.json"))


def test_a_size_that_is_not_the_listed_one_is_an_error(hub: LoopbackHub, tiny: Path) -> None:
    hub.add(NAME, tiny)
    files = dict(hub.repos[NAME].commits[hub.repos[NAME].refs["main"]])
    shard = next(name for name in files if name.endswith(".safetensors"))
    files[shard] = replace(files[shard], size=files[shard].size + 1)
    hub.repos[NAME].add("main", files)
    with pytest.raises(HubError, match=f"{shard} of .*: asked for bytes .*, the Hub sends bytes"):
        open_source(NAME)


def test_what_may_not_be_read_is_said_once(hub: LoopbackHub, tiny: Path) -> None:
    hub.add("someone/Gated", tiny, gated=True)
    with pytest.raises(HubError, match=r"someone/Gated is gated: the Hub answers 403") as caught:
        open_source("someone/Gated")
    assert caught.value.hint == (
        f"accept its terms at {hub.endpoint}/someone/Gated, then: hf auth login"
    )
    with pytest.raises(HubError, match=r"no repository someone/Absent, or .* 404"):
        open_source("someone/Absent")
    hub.add(NAME, tiny)
    with pytest.raises(HubError, match=f"no revision {NAME}@v9"):
        open_source(f"{NAME}@v9")
    assert len(hub.requests) == 3


def test_offline_is_respected(tiny: Path, tmp_path: Path) -> None:
    with LoopbackHub(tmp_path / "hub") as hub, hub.in_use(tmp_path / "home", offline=True):
        with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
            open_source(NAME)
        assert not hub.requests


@pytest.mark.parametrize("path", ["../escape.json", "a/../../b.json", "/etc/passwd", "a\\b.json"])
def test_a_listing_that_leads_out_is_refused(
    hub: LoopbackHub, tiny: Path, tmp_path: Path, path: str
) -> None:
    hub.add(NAME, tiny, **{path: Blob(tiny / "config.json", 1, "0" * 40, lfs=False)})
    with pytest.raises(HubError, match="leads out of the repository"):
        open_source(NAME)
    assert not (tmp_path / "home").exists()


def test_an_index_that_leads_out_is_refused(hub: LoopbackHub, tiny_copy: Path) -> None:
    index = tiny_copy / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"][next(iter(record["weight_map"]))] = "../model.safetensors"
    index.write_text(json.dumps(record))
    hub.add(NAME, tiny_copy)
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file name inside the folder"):
        open_source(NAME)


def test_a_shard_that_is_missing_is_named(hub: LoopbackHub, tiny_copy: Path) -> None:
    shard = sorted(tiny_copy.glob("*.safetensors"))[1]
    shard.unlink()
    commit = hub.add(NAME, tiny_copy)
    with pytest.raises(HalfbyteError, match=f"1 of 3 .* from {NAME}@{commit}, first {shard.name}"):
        open_source(NAME)


def test_long_headers_take_a_second_request(
    hub: LoopbackHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, tiny)
    monkeypatch.setattr(client, "FIRST_REQUEST", 100)
    assert open_source(NAME).fingerprint == open_checkpoint(tiny).fingerprint
    ranges = [r for r in hub.requests if r.startswith("GET /cdn/")]
    assert len(ranges) == 2 * 3
    assert hub.served < sum(p.stat().st_size for p in tiny.iterdir()) / 2


def test_a_header_that_claims_too_much_is_not_asked_for(hub: LoopbackHub, tiny_copy: Path) -> None:
    shard = sorted(tiny_copy.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    hub.add(NAME, tiny_copy)
    with pytest.raises(CheckpointError, match="declares a header of 1099511627776 bytes"):
        open_source(NAME)


def test_the_token_is_never_shown(
    hub: LoopbackHub, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, tiny)
    hub.fail("GET /cdn/", "503", times=1000)
    assert main(["inspect", NAME]) == 1
    shown = capsys.readouterr()
    assert "hf_loopback" not in shown.err
    assert "Signature" not in shown.err
    assert shown.err.count("error:") == 1
