"""The gate on fabricated item results with known counts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import UsageError
from halfbyte.evals.gate import GateRow, GateVerdict, _paired
from halfbyte.evals.gate import gate as judge
from halfbyte.evals.policy import Policy, load_policy
from halfbyte.evals.report import (
    Answer,
    EvalReport,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
)
from halfbyte.evals.statistics import Interval, mcnemar, score_interval

EXACT = replace(load_policy("article"), decimals=None)
PAIRED = load_policy("default")
SETTINGS = TaskSettings(None, 16, 1024, "float32", {"lm_eval": "0.4.13"})


def gate(baseline: EvalReport, candidate: EvalReport, margin: float = 0.8) -> GateVerdict:
    """By the plain rule, without rounding."""
    return judge(baseline, candidate, replace(EXACT, margin=margin))


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
        tuple(Answer(f"a{n}") for n in range(count)),
        (),
        "tokens",
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
        load_policy("default", margin)


def test_json_form() -> None:
    record = json.loads(json.dumps(gate(one(1319, 1245), one(1319, 1234)).to_json()))
    (row,) = record.pop("rows")
    assert record.pop("reasons")[0].startswith("sums acc,none drops")
    policy = record.pop("policy")
    assert (policy["name"], policy["rule"], policy["margin"]) == ("article", "plain", 0.8)
    assert "same checkpoint" in record.pop("remarks")[0]
    assert record == {
        "schema_version": 1,
        "verdict": "fail",
        "baseline": "f",
        "candidate": "f",
        "kv_cache": {"baseline": None, "candidate": None},
        "mean_change_points": None,
        "noise": [],
    }
    assert row.pop("delta_points") == pytest.approx(-0.83397, abs=1e-5)
    change = row.pop("change_points")
    assert change["low"] < change["estimate"] < change["high"]
    assert change["estimate"] == pytest.approx(-0.83397, abs=1e-5)
    assert row.pop("p_value") == pytest.approx(2**-11)
    assert row == {
        "task": "sums",
        "metric": "acc,none",
        "decides": True,
        "verdict": "fail",
        "count": 1319,
        "baseline": 1245,
        "candidate": 1234,
        "lost": 11,
        "won": 0,
        "adjusted_p": None,
    }


# The published scores of an INT4 GLM-5.2 against FP8: items, right in FP8, right in INT4.
PUBLISHED = {
    "gsm8k": ("exact_match", 1319, 1245, 1234),
    "arc_easy": ("acc", 2376, 2058, 2047),
    "arc_challenge": ("acc", 1172, 761, 760),
    "mmlu": ("acc", 14042, 12160, 12152),
    "mmlu_pro": ("exact_match", 12032, 9722, 9682),
}


def published(share: float) -> tuple[EvalReport, EvalReport]:
    """Per-item answers with these scores, a share of the items lost or won."""
    sides: tuple[list[TaskScores], list[TaskScores]] = ([], [])
    for name, (metric, count, before, after) in PUBLISHED.items():
        won = max(0, round((share * count - (before - after)) / 2))
        lost = won + before - after
        baseline = answers(count, before)
        candidate = (0.0,) * lost + answers(count - lost, after)
        assert sum(candidate) == after
        for side, values in zip(sides, (baseline, candidate), strict=True):
            side.append(task(name, {metric: values}))
    return report(*sides[0]), report(*sides[1])


ANY_METRIC = replace(PAIRED, primary={})


@pytest.mark.parametrize("share", [0.03, 0.05])
def test_the_published_checkpoint_passes_and_a_plain_rule_rejects_it(share: float) -> None:
    baseline, candidate = published(share)
    verdict = judge(baseline, candidate, ANY_METRIC)
    assert (verdict.verdict, verdict.reasons) == ("pass", ())
    assert verdict.mean is not None
    assert verdict.mean.change.estimate == pytest.approx(-0.354, abs=1e-3)
    assert -0.72 < verdict.mean.change.low < -0.6
    assert judge(baseline, candidate, EXACT).verdict == "fail"
    # Rounded to one decimal, as it was published, it is 0.8.
    assert judge(baseline, candidate, load_policy("article")).verdict == "pass"


def paired(count: int, lost: int, won: int, tasks: int = 1) -> GateVerdict:
    before = (1.0,) * lost + (0.0,) * won + (1.0,) * (count - lost - won)
    after = (0.0,) * lost + (1.0,) * won + (1.0,) * (count - lost - won)
    names = [f"t{number}" for number in range(tasks)]
    return judge(
        report(*(task(name, {"acc": before}) for name in names)),
        report(*(task(name, {"acc": after}) for name in names)),
        PAIRED,
    )


def test_nothing_changed_passes_when_there_are_items_enough() -> None:
    """Wilson's limit for no event is z² / (n + z²): 0.8 points need 336 items."""
    assert paired(336, 0, 0).verdict == "pass"
    verdict = paired(335, 0, 0)
    assert verdict.verdict == "inconclusive"
    assert "the mean of 1 task may drop by up to 0.80 points, 0.8 are allowed" in verdict.reasons[0]


def test_a_significant_drop_of_the_margin_fails() -> None:
    """24 lost and 5 won of 200, and 30 and 4: measured on a model that rounding damaged."""
    for lost, won in ((24, 5), (30, 4)):
        verdict = paired(200, lost, won)
        assert (verdict.verdict, verdict.exit_code) == ("fail", 3)
        assert "more than 2" in verdict.reasons[0]
    # 1.9 points of 1,000, less than the task margin: chance makes so many seldom.
    verdict = paired(1000, 21, 2)
    assert verdict.verdict == "fail"
    assert "21 lost and 2 won, p = 3.3e-05" in verdict.reasons[0]
    # As many points, but half of all items changed: nobody can tell.
    assert paired(1000, 260, 241).verdict == "inconclusive"


def test_significance_is_that_of_all_tasks_together() -> None:
    """14 lost and 4 won: p = 0.015 by itself, 0.077 among five, where Holm asks for 0.01."""
    alone, among = paired(1000, 14, 4), paired(1000, 14, 4, tasks=5)
    assert (alone.rows[0].verdict, alone.rows[0].adjusted_p) == (
        "fail",
        pytest.approx(0.01544, abs=1e-5),
    )
    for row in among.rows:
        assert row.adjusted_p == pytest.approx(5 * 0.01544, abs=1e-4)
    assert {row.verdict for row in among.rows} == {"pass"}
    # But the mean of five such tasks does drop by more than 0.5 points.
    assert among.verdict == "inconclusive"


def test_many_small_drops_fail_by_their_mean() -> None:
    verdict = paired(3000, 60, 20, tasks=5)
    assert verdict.mean is not None
    assert verdict.mean.change.high < -0.8
    assert any("the mean of 5 tasks drops by 1.333 points" in r for r in verdict.reasons)


def test_a_doubtful_task_says_how_many_items_would_decide() -> None:
    verdict = paired(200, 4, 4)
    assert verdict.verdict == "inconclusive"
    # 6.18 x 0.04 / 0.02² = 618, and what the score interval asks for beyond that
    found = re.search(r"about (\d+) items would decide, it has 200", verdict.reasons[0])
    assert found is not None
    assert 618 < int(found[1]) < 1.4 * 618
    # As many more, answered alike, are enough.
    more = int(found[1])
    assert paired(more, more // 50, more // 50).rows[0].verdict == "pass"


def test_where_nothing_changed_few_more_items_decide() -> None:
    """6.18 / 0.008 - 6.18 = 767 items, not (4.3 / 0.8)² times as many."""
    assert "about 12.8 times as many items would decide" in paired(60, 0, 0).reasons[1]


def test_scores_that_are_not_right_or_wrong() -> None:
    generator = random.Random(0)
    before = [generator.random() for _ in range(3000)]
    little = [value + generator.gauss(0, 0.05) for value in before]
    worse = [value - 0.015 for value in little]

    def verdict(after: Sequence[float]) -> GateVerdict:
        return judge(report(task("f", {"f1": before})), report(task("f", {"f1": after})), PAIRED)

    assert verdict(little).verdict == "pass"
    failed = verdict(worse)
    assert failed.verdict == "fail"
    assert failed.rows[0].p_value < 1e-12


def test_the_policy_names_the_metric_that_decides() -> None:
    policy = replace(PAIRED, primary={"a": "acc_norm,none"})
    both = {"acc": answers(1000, 900), "acc_norm": answers(1000, 900)}
    base = report(task("a", both))
    verdict = judge(base, report(task("a", {**both, "acc": answers(1000, 500)})), policy)
    assert [row.decides for row in verdict.rows] == [False, True]
    assert (verdict.verdict, verdict.rows[0].verdict) == ("pass", None)
    with pytest.raises(UsageError, match=r"judges task a by f1,none, the evaluation has acc,none"):
        judge(base, base, replace(PAIRED, primary={"a": "f1,none"}))


FLIPS = {"gsm8k": 0.02, "arc_easy": 0.02, "arc_challenge": 0.03, "mmlu": 0.02, "mmlu_pro": 0.05}


def simulated(drop: float, policy: Policy, runs: int) -> dict[str, float]:
    """How often each verdict comes when every task drops by `drop` points, few answers flip."""
    generator = np.random.default_rng(7)
    found = dict.fromkeys(("pass", "fail", "inconclusive"), 0)
    for _ in range(runs):
        rows = []
        for name, (_, count, _, _) in PUBLISHED.items():
            flips = max(FLIPS[name], drop / 100)
            flipped = generator.binomial(count, flips)
            lost = int(generator.binomial(flipped, (1 + drop / 100 / flips) / 2))
            won = int(flipped) - lost
            share = score_interval(lost, won, count, 2 * policy.confidence - 1)
            change = Interval(100 * share.estimate, 100 * share.low, 100 * share.high)
            right = Fraction(count // 2)
            rows.append(
                GateRow(
                    name, "acc", True, count, right, right + won - lost, lost, won, True,
                    change, mcnemar(lost, won),
                )
            )  # fmt: skip
        found[_paired(rows, policy).verdict] += 1
    return {verdict: number / runs for verdict, number in found.items()}


@pytest.mark.parametrize(
    ("drop", "verdict", "least"), [(0.0, "pass", 0.95), (0.8, "fail", 0.85), (1.5, "fail", 0.99)]
)
def test_what_the_gate_says_of_true_changes(drop: float, verdict: str, least: float) -> None:
    """2,000 runs of the published suite: no false alarm above 5 %, and no drop of 1.5 gets by."""
    found = simulated(drop, ANY_METRIC, 2000)
    assert found[verdict] >= least
    if not drop:
        assert found["fail"] <= 0.05
    if drop == 1.5:
        assert found["pass"] < 0.01
