"""Baselines are found by all that decides them, and by nothing less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.errors import EvaluationError
from halfbyte.evals.report import (
    Answer,
    EvalReport,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
)
from halfbyte.evals.store import BaselineStore, content_sha256, read_baseline

IDENTITY = {"checkpoint": "f" * 64, "lm_eval": "0.4.13", "limit": "all", "tasks": "a" * 64}


def report(fingerprint: str = "f" * 64, version: str = "1", limit: int | None = None) -> EvalReport:
    scores = TaskScores(
        "sums",
        version,
        (Item("sums", 0, "d", "p", "t"),),
        (MetricScores("acc", "none", True, (1.0,)),),
        "hash",
        (Answer("a"),),
        (),
        "tokens",
    )
    settings = TaskSettings(limit, 16, 1024, "float32", {"lm_eval": "0.4.13"})
    return EvalReport("GLM-FP8", fingerprint, tasks=TaskResults(settings, (scores,)))


def test_the_same_evaluation_is_found_and_no_other(tmp_path: Path) -> None:
    store = BaselineStore(tmp_path / "store")
    assert store.find(IDENTITY) is None
    assert store.near(IDENTITY) is None
    path = store.add(IDENTITY, report())
    assert store.find(dict(reversed(IDENTITY.items()))) == report()
    other = IDENTITY | {"lm_eval": "0.4.14"}
    assert store.find(other) is None
    assert store.near(other) == (f"{path.name}: lm_eval was 0.4.13, now 0.4.14")
    other |= {"tasks": "b" * 64}
    store.add(other | {"limit": "200"}, report(limit=200))
    assert (store.near(other) or "").endswith(".json: limit was 200, now all")
    assert (store.near(IDENTITY | {"batch": "3"}) or "").endswith(": batch was nothing, now 3")
    assert store.near(IDENTITY | {"checkpoint": "0" * 64}) is None


def test_baseline_of_a_candidate(tmp_path: Path) -> None:
    store = BaselineStore(tmp_path)
    candidate = report("0" * 64)
    with pytest.raises(EvaluationError, match=r"no evaluation fits the candidate$"):
        read_baseline(tmp_path, candidate)
    store.add({"checkpoint": "0" * 64}, candidate)  # is no baseline of itself
    limited = store.add(IDENTITY | {"limit": "200"}, report(limit=200, version="2"))
    with pytest.raises(EvaluationError) as caught:
        read_baseline(tmp_path, candidate)
    assert (
        f"the nearest, {limited.name}: limit differs: 200 in the baseline, None in the candidate "
        "and 1 more"
    ) in str(caught.value)
    path = store.add(IDENTITY, report())
    assert read_baseline(tmp_path, candidate) == read_baseline(path, candidate) == report()
    store.add(IDENTITY | {"checkpoint": "1" * 64}, replace(report("1" * 64), checkpoint="other"))
    with pytest.raises(EvaluationError, match=r"2 evaluations fit the candidate: .*of other"):
        read_baseline(tmp_path, candidate)
    plain = tmp_path / "plain"
    report().write(plain)
    assert read_baseline(plain, candidate) == report()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    store = BaselineStore(tmp_path)
    path = store.add(IDENTITY, report())
    text = path.read_text()
    for damaged, says in (
        (text[:-9], "not a stored evaluation"),
        ("[]", "schema_version is None, this version reads 1"),
        (text.replace('"limit": "all"', '"limit": "200"'), "not the evaluation that its name says"),
        (text.replace('"limit": "all"', '"limit": 7'), "identity is not an object of strings"),
        (text.replace('"fingerprint"', '"print"'), "fingerprint: missing field"),
    ):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(EvaluationError, match=says) as caught:
            store.find(IDENTITY)
        assert path.name in str(caught.value)


def test_a_folder_is_its_names_and_bytes(tmp_path: Path) -> None:
    def made(files: dict[str, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return content_sha256(folder)

    one = made({"a.yaml": "task", "data/a.jsonl": "x"})
    assert made({"data/a.jsonl": "x", "a.yaml": "task", "__pycache__/a.pyc": "z"}) == one
    others = [
        made({"a.yaml": "task", "data/a.jsonl": "y"}),
        made({"a.yaml": "task", "data/b.jsonl": "x"}),
        made({"a.yaml": "taskx", "data/a.jsonl": ""}),
        made({"a.yaml": "task"}),
    ]
    assert len({one, *others}) == 5
    (tmp_path / "text.jsonl").write_text("x")
    (tmp_path / "copy.jsonl").write_text("x")
    (tmp_path / "other.jsonl").write_text("y")
    text, copy, other = (content_sha256(tmp_path / f"{n}.jsonl") for n in ("text", "copy", "other"))
    assert text == copy != other


def test_a_candidate_with_an_fp8_cache_is_judged_against_one_without(tmp_path: Path) -> None:
    """Of the same checkpoint, too: then the cache is all that differs."""
    store = BaselineStore(tmp_path)
    store.add(IDENTITY | {"KV cache": "bf16"}, replace(report(), kv_cache="bf16"))
    candidate = replace(report(), kv_cache="fp8")
    store.add(IDENTITY | {"KV cache": "fp8"}, candidate)
    assert store.baseline_for(candidate).kv_cache == "bf16"
    int4 = replace(report("0" * 64), kv_cache="fp8")
    with pytest.raises(EvaluationError, match=r"2 evaluations fit the candidate: .*KV cache fp8"):
        store.baseline_for(int4)
    assert store.baseline_for(report("0" * 64)).kv_cache == "bf16"
