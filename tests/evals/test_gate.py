"""The gate on fabricated item results with known counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from halfbyte.errors import UsageError
from halfbyte.evals.gate import gate
from halfbyte.evals.report import (
    EvalReport,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
)

SETTINGS = TaskSettings(None, 16, 1024, "float32", {"lm_eval": "0.4.13"})


def answers(count: int, right: int) -> tuple[float, ...]:
    return (1.0,) * right + (0.0,) * (count - right)


def task(
    name: str, metrics: Mapping[str, Sequence[float]], higher_is_better: bool = True
) -> TaskScores:
    count = len(next(iter(metrics.values())))
    return TaskScores(
        name,
        "1.0",
        tuple(Item(name, n, f"d{n}", f"p{n}", f"t{n}") for n in range(count)),
        tuple(MetricScores(m, "none", higher_is_better, tuple(v)) for m, v in metrics.items()),
        "hash",
    )


def report(*tasks: TaskScores, **settings: Any) -> EvalReport:
    return EvalReport("folder", "f", tasks=TaskResults(replace(SETTINGS, **settings), tasks))


def one(count: int, right: int) -> EvalReport:
    return report(task("sums", {"acc": answers(count, right)}))


def test_counts_are_compared_without_rounding() -> None:
    """Published GSM8K counts, 1319 questions: 11 lost are 0.834 points, 10 are 0.758."""
    strict = gate(one(1319, 1245), one(1319, 1234))
    assert (strict.verdict, strict.exit_code) == ("fail", 3)
    assert strict.rows[0].delta_points == Fraction(-1100, 1319)
    assert strict.reasons == (
        "sums acc,none drops by 0.834 points (1245 to 1234 of 1319), more than 0.8",
    )
    flexible = gate(one(1319, 1243), one(1319, 1233))
    assert (flexible.verdict, flexible.exit_code, flexible.reasons) == ("pass", 0, ())


@pytest.mark.parametrize(
    ("count", "lost", "margin", "verdict"),
    [
        (125, 1, 0.8, "pass"),  # exactly the margin, though 100 * (1 - 124 / 125) > 0.8 in floats
        (124, 1, 0.8, "fail"),
        (1000, 8, 0.8, "pass"),
        (1000, 9, 0.8, "fail"),
        (3, 0, 0, "pass"),
        (3, 1, 0, "fail"),
        (3, 1, 33.4, "pass"),
        (3, -1, 0, "pass"),
    ],
)
def test_margin(count: int, lost: int, margin: float, verdict: str) -> None:
    right = count - 1
    result = gate(one(count, right), one(count, right - lost), margin)
    assert (result.verdict, result.rows[0].drop_points) == (verdict, Fraction(100 * lost, count))


def test_every_task_counts_but_only_its_first_metric_decides() -> None:
    base = report(
        task("a", {"acc": answers(10, 5), "acc_norm": answers(10, 9)}),
        task("b", {"acc": answers(10, 5)}),
    )
    norm_drops = report(
        task("a", {"acc": answers(10, 5), "acc_norm": answers(10, 1)}),
        task("b", {"acc": answers(10, 6)}),
    )
    result = gate(base, norm_drops)
    assert result.verdict == "pass"
    decides = [(r.task, r.metric, r.decides) for r in result.rows]
    assert decides == [
        ("a", "acc,none", True),
        ("a", "acc_norm,none", False),
        ("b", "acc,none", True),
    ]
    assert gate(norm_drops, base).reasons == (
        "b acc,none drops by 10.000 points (6 to 5 of 10), more than 0.8",
    )


def test_lost_and_won_items() -> None:
    base = report(task("a", {"acc": (1, 1, 1, 0, 0)}))
    row = gate(base, report(task("a", {"acc": (1, 0, 0, 1, 0)})), 100).rows[0]
    assert (row.lost, row.won, row.delta_points) == (2, 1, -20)


def test_metric_where_lower_is_better() -> None:
    def errors(*values: float) -> EvalReport:
        return report(task("a", {"error": values}, higher_is_better=False))

    worse = gate(errors(0.5, 0.25), errors(0.5, 0.5))
    assert (worse.verdict, worse.rows[0].lost, worse.rows[0].won) == ("fail", 1, 0)
    assert (worse.rows[0].drop_points, worse.rows[0].delta_points) == (12.5, 12.5)
    assert gate(errors(0.5, 0.5), errors(0.5, 0.25)).verdict == "pass"


BASE = report(task("a", {"acc": answers(4, 2)}), task("b", {"acc": answers(4, 2)}))
A, B = BASE.tasks.tasks if BASE.tasks else ()
OTHER_ITEM = (*A.items[:2], A.items[2]._replace(prompt="other"), A.items[3])


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (EvalReport("folder", "f"), "no task scores in the candidate"),
        (report(A), "task b is only in the baseline"),
        (report(A, B, replace(A, name="c")), "task c is only in the candidate"),
        (report(A, B, limit=4), "limit differs: None in the baseline, 4 in the candidate"),
        (report(A, B, max_length=512), "max_length differs: 1024 in"),
        (report(A, B, dtype="bfloat16"), "dtype differs: float32 in"),
        (report(A, B, versions={"lm_eval": "0.4.12"}), "versions differs"),
        (report(task("a", {"acc": answers(3, 2)}), B), "task a: 4 items in the baseline, 3 in"),
        (
            report(replace(A, items=OTHER_ITEM), B),
            "task a: 1 of 4 items are not the same question, "
            "the first is item 2 of a (differs in prompt)",
        ),
        (report(replace(A, items_sha256="other"), B), "task a: the hash over all items differs"),
        (report(replace(A, version="2.0"), B), "task a: version 1.0 in the baseline, 2.0 in"),
        (
            report(task("a", {"acc_norm": answers(4, 2)}), B),
            "task a: metrics acc,none in the baseline, acc_norm,none in the candidate",
        ),
    ],
)
def test_reports_that_cannot_be_compared(candidate: EvalReport, says: str) -> None:
    result = gate(BASE, candidate)
    assert (result.verdict, result.exit_code, result.rows) == ("invalid", 5, ())
    assert len(result.reasons) == 1
    assert says in result.reasons[0]


def test_all_reasons_are_listed() -> None:
    result = gate(BASE, report(replace(A, version="2.0"), limit=4))
    assert [reason.split()[0] for reason in result.reasons] == ["limit", "task", "task"]
    assert gate(EvalReport("a", "f"), EvalReport("b", "f")).reasons == (
        "no task scores in the baseline and the candidate",
    )


def test_order_of_tasks_does_not_matter() -> None:
    assert gate(BASE, report(B, A)).verdict == "pass"


@pytest.mark.parametrize("margin", [-0.1, 100.5, float("nan")])
def test_impossible_margin(margin: float) -> None:
    with pytest.raises(UsageError, match="must be from 0 to 100"):
        gate(BASE, BASE, margin)


def test_json_form() -> None:
    record = json.loads(json.dumps(gate(one(1319, 1245), one(1319, 1234)).to_json()))
    (row,) = record.pop("rows")
    assert record.pop("reasons")[0].startswith("sums acc,none drops")
    assert record == {"verdict": "fail", "margin_points": 0.8}
    assert row.pop("delta_points") == pytest.approx(-0.83397, abs=1e-5)
    assert row == {
        "task": "sums",
        "metric": "acc,none",
        "decides": True,
        "passed": False,
        "count": 1319,
        "baseline": 1245,
        "candidate": 1234,
        "lost": 11,
        "won": 0,
    }
