"""Evaluation reports: exact sums, a faithful JSON form, and identities of checkpoints."""

from __future__ import annotations

import copy
import json
import math
import shutil
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import EvaluationError
from halfbyte.evals.report import (
    Answer,
    Divergence,
    EvalReport,
    Histogram,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
    TextMetrics,
    WorstToken,
    checkpoint_fingerprint,
)
from halfbyte.formats.checkpoint import open_checkpoint

DIVERGENCE = Divergence(
    "b",
    1,
    2,
    3,
    0.5,
    Histogram((1e-3, 1.0), (2000, 40, 4)),
    (WorstToken(3, 7, 3.5, "so it ", "is", 0.25, 0.5, "was", "is"),),
)


def full_report() -> EvalReport:
    items = tuple(Item("sums", n, f"d{n}", f"p{n}", f"t{n}") for n in range(3))
    metrics = (
        MetricScores("exact_match", "strict", True, (1.0, 0.0, 1.0)),
        MetricScores("error", "none", False, (0.25, 1e-9, 3.0)),
    )
    settings = TaskSettings(3, 16, 1024, "float32", {"lm_eval": "0.4.13"})
    answers = (
        Answer("1" * 16, choices=4, spread=1e-9),
        Answer("2" * 16, tokens=128, capped=True, unread=("strict", "flexible")),
        Answer("3" * 16, tokens=3),
    )
    scores = TaskScores(
        "sums", "1.0", items, metrics, "e" * 64, answers, ('{"max_gen_toks": 128}',), "a" * 64
    )
    return EvalReport(
        checkpoint="models/a",
        fingerprint="f" * 64,
        text=TextMetrics("c" * 64, 4, 512, "float32", 2044, 2.25, DIVERGENCE),
        tasks=TaskResults(settings, (scores,)),
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_derived_figures(values: list[float]) -> None:
    scores = MetricScores("m", "none", True, tuple(values))
    assert scores.exact_total == sum(Fraction(v) for v in values)
    assert math.isclose(scores.mean, statistics.fmean(values), rel_tol=1e-12, abs_tol=1e-9)
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert scores.standard_error is not None
    assert math.isclose(scores.standard_error, expected, rel_tol=1e-9, abs_tol=1e-12)


def test_right_or_wrong_metrics_count() -> None:
    scores = MetricScores("acc", "none", True, (1.0, 0.0, 1.0, 1.0))
    assert (scores.name, scores.count, scores.total, scores.mean) == ("acc,none", 4, 3, 0.75)
    assert MetricScores("acc", "none", True, (1.0,)).standard_error is None


def test_file_holds_the_report(tmp_path: Path) -> None:
    report = full_report()
    path = tmp_path / "report.json"
    report.write(path)
    assert EvalReport.read(path) == report
    record = json.loads(path.read_text())
    assert record["schema_version"] == 3
    assert record["text"]["perplexity"] == math.exp(2.25)
    assert record["tasks"]["tasks"][0]["metrics"][0]["total"] == 2
    assert record["tasks"]["tasks"][0]["items"][1] == ["sums", 1, "d1", "p1", "t1"]


def test_text_and_tasks_are_optional() -> None:
    report = EvalReport("a", "f")
    assert EvalReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def at(record: Any, *path: str | int) -> Any:
    for step in path:
        record = record[step]
    return record


TASK = ("tasks", "tasks", 0)
METRIC = (*TASK, "metrics", 0)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda r: r.update(schema_version=1), "schema_version is 1, this version reads 3"),
        (lambda r: r.pop("schema_version"), "schema_version is None"),
        (lambda r: r.pop("fingerprint"), "fingerprint: missing field"),
        (lambda r: r.update(more=1), "more: unknown field"),
        (lambda r: r.update(checkpoint=3), "checkpoint: expected a string, found 3"),
        (lambda r: r.update(text=[]), r"text: expected an object, found \[\]"),
        (lambda r: r["text"].update(nll="2"), "text.nll: expected a number, found '2'"),
        (lambda r: r["text"].update(nll=math.nan), "text.nll: nan is not a finite number"),
        (lambda r: r["text"].update(nll=2.5), "text.perplexity is 9.48"),
        (lambda r: r["text"].update(tokens=1.5), "text.tokens: expected an integer, found 1.5"),
        (lambda r: r["text"].update(tokens=True), "text.tokens: expected an integer, found True"),
        (lambda r: r["tasks"].update(tasks=[]), "tasks: no tasks"),
        (lambda r: r["tasks"]["tasks"].append(at(r, *TASK)), "a task is listed twice"),
        (lambda r: at(r, "tasks", "settings").update(limit="3"), "tasks.settings.limit: expected"),
        (
            lambda r: at(r, "tasks", "settings", "versions").update(torch=2),
            "tasks.settings.versions.torch: expected a string",
        ),
        (lambda r: at(r, *METRIC)["values"].pop(), r"metrics\[0\].count is 3, the other"),
        (lambda r: at(r, *METRIC).update(total=3), r"tasks\[0\].metrics\[0\].total is 3"),
        (lambda r: at(r, *METRIC).update(higher_is_better=1), "expected true or false, found 1"),
        (lambda r: at(r, *TASK)["items"].pop(), "exact_match,strict has 3 values for 2 items"),
        (lambda r: at(r, *TASK)["answers"].pop(), "sums has 2 answers for 3 items"),
        (lambda r: at(r, *TASK, "items", 2).__setitem__(1, 0), "task sums lists an item twice"),
        (lambda r: at(r, *TASK, "items", 2).pop(), r"items\[2\]: 4 entries, 5 expected"),
        (lambda r: at(r, *TASK).update(metrics=[]), "task sums has no items or no metrics"),
        (
            lambda r: at(r, "text", "divergence", "histogram", "counts").pop(),
            "text.divergence.histogram: 2 counts for 2 edges",
        ),
        (
            lambda r: at(r, "text", "divergence", "histogram", "edges").reverse(),
            "text.divergence.histogram: edges must be positive and ascend",
        ),
    ],
)
def test_damaged_reports_name_the_field(
    tmp_path: Path, damage: Callable[[Any], object], says: str
) -> None:
    record = json.loads(json.dumps(full_report().to_json()))
    damage(record)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(record))
    with pytest.raises(EvaluationError, match=says) as caught:
        EvalReport.read(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"3"])
def test_files_that_are_no_report(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(EvaluationError, match=r"report\.json: "):
        EvalReport.read(path)
    with pytest.raises(EvaluationError, match="absent"):
        EvalReport.read(tmp_path / "absent")


def change_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_fingerprint_tells_checkpoints_apart(tiny: Path, tiny_copy: Path) -> None:
    original = checkpoint_fingerprint(open_checkpoint(tiny))
    checkpoint = open_checkpoint(tiny_copy)
    assert checkpoint_fingerprint(checkpoint) == original

    norm = checkpoint.tensors["model.norm.weight"]
    change_byte(tiny_copy / norm.shard, norm.begin)
    changed = {original, checkpoint_fingerprint(open_checkpoint(tiny_copy))}
    shutil.copy(tiny / norm.shard, tiny_copy)

    tokenizer = (tiny_copy / "tokenizer.json").read_text()
    (tiny_copy / "tokenizer.json").write_text(tokenizer + "\n")
    changed.add(checkpoint_fingerprint(open_checkpoint(tiny_copy)))
    (tiny_copy / "tokenizer.json").write_text(tokenizer)

    config = copy.deepcopy(json.loads((tiny_copy / "config.json").read_text()))
    config["rms_norm_eps"] = 1e-4
    (tiny_copy / "config.json").write_text(json.dumps(config))
    changed.add(checkpoint_fingerprint(open_checkpoint(tiny_copy)))
    assert len(changed) == 4
