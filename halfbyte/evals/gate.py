"""Did accuracy hold? Compares two evaluation reports item by item.

First whether they can be compared at all (same tasks, same questions, same settings); only then
by how much the scores differ, by the rule of a policy.

*Paired*: a model that differs a little changes a few answers in both directions, so a drop of some
points may be chance, and no drop may hide one. It fails what is worse beyond chance and margin,
passes what is shown to be within the margins, and says of anything else how many items would
decide. *Plain*: the difference of scores, compared as exact fractions: 11 questions of 1319 lost
are 0.834 points, and no rounding makes that 0.8 that the policy does not ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal

from halfbyte.errors import UsageError
from halfbyte.evals.policy import Policy
from halfbyte.evals.record import encode
from halfbyte.evals.report import EvalReport, MetricScores, TaskScores, TaskSettings
from halfbyte.evals.statistics import (
    Interval,
    holm,
    macro_interval,
    mcnemar,
    mean_interval,
    narrowed,
    one_sided,
    score_interval,
    times_needed,
    with_power,
)

GATE_SCHEMA = 1

Verdict = Literal["pass", "fail", "inconclusive", "invalid"]

EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 3, "inconclusive": 4, "invalid": 5}


@dataclass(frozen=True)
class GateRow:
    """One metric of one task in both reports, over the same `count` items."""

    task: str
    metric: str
    decides: bool
    """Whether the task is judged by it; the other metrics are shown, not judged."""
    count: int
    baseline: Fraction
    """Sum of the item values; for right-or-wrong metrics the number right."""
    candidate: Fraction
    lost: int
    """Items on which the candidate does worse than the baseline."""
    won: int
    higher_is_better: bool
    change: Interval
    """How much better the candidate is, in points, and limits that hold with the policy's
    confidence each."""
    p_value: float
    """How likely at least this drop is when nothing changed."""
    right_or_wrong: bool = True
    """Whether an item counts 1 or 0; otherwise it may count anything."""
    adjusted_p: float | None = None
    """The same for testing all tasks together; None for a metric that does not decide."""
    verdict: Verdict | None = None
    """Of this task by itself; None for a metric that does not decide."""
    reason: str | None = None
    """Why that is not a pass."""

    @property
    def drop_points(self) -> Fraction:
        """By how many points (hundredths) of the metric the candidate is worse; exact."""
        difference = self.baseline - self.candidate
        return 100 * (difference if self.higher_is_better else -difference) / self.count

    @property
    def delta_points(self) -> Fraction:
        """Change of the metric in points, candidate minus baseline; exact."""
        return 100 * (self.candidate - self.baseline) / self.count


@dataclass(frozen=True)
class MeanChange:
    """Of all tasks together, under the paired rule."""

    change: Interval
    """In points."""
    verdict: Verdict
    reason: str | None
    """Why that is not a pass."""


@dataclass(frozen=True)
class GateVerdict:
    """The verdict and what it rests on. `rows` is empty when the reports cannot be compared."""

    verdict: Verdict
    reasons: tuple[str, ...]
    """Why it is not a pass; empty for one."""
    policy: Policy
    rows: tuple[GateRow, ...]
    mean: MeanChange | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": GATE_SCHEMA,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "policy": encode(self.policy),
            "mean_change_points": None if self.mean is None else encode(self.mean.change),
            "rows": [
                {
                    "task": row.task,
                    "metric": row.metric,
                    "decides": row.decides,
                    "verdict": row.verdict,
                    "count": row.count,
                    "baseline": _number(row.baseline),
                    "candidate": _number(row.candidate),
                    "delta_points": _number(row.delta_points),
                    "lost": row.lost,
                    "won": row.won,
                    "change_points": encode(row.change),
                    "p_value": row.p_value,
                    "adjusted_p": row.adjusted_p,
                }
                for row in self.rows
            ],
        }


def gate(baseline: EvalReport, candidate: EvalReport, policy: Policy) -> GateVerdict:
    """Judge `candidate` against `baseline` by the rule of `policy`.

    Each task is judged by the metric that the policy names, or else by its primary one: the first
    metric under its first answer filter, in the order its YAML lists them.

    Raises UsageError when the policy names a metric that the task does not have.
    """
    if reasons := tuple(_incomparable(baseline, candidate)):
        return GateVerdict("invalid", reasons, policy, ())
    rows = tuple(_rows(baseline, candidate, policy))
    return _plain(rows, policy) if policy.rule == "plain" else _paired(rows, policy)


def _plain(rows: Sequence[GateRow], policy: Policy) -> GateVerdict:
    """Passes when no task drops by more than the margin. It judges the counts as they are and
    knows nothing of chance, so it is never inconclusive. A drop of exactly the margin passes."""

    judged = []
    for row in rows:
        drop = row.drop_points
        if policy.decimals is not None:
            drop = round(drop, policy.decimals)
        if row.decides and drop > policy.exact_margin:
            reason = f"{_drop(row)}, more than {policy.margin:g}"
            row = replace(row, verdict="fail", reason=reason)
        elif row.decides:
            row = replace(row, verdict="pass")
        judged.append(row)
    return _verdict(judged, policy)


def _paired(rows: Sequence[GateRow], policy: Policy) -> GateVerdict:
    """Fails what is worse beyond chance and margin, passes what is shown not to be."""
    deciding = [row for row in rows if row.decides]
    adjusted = iter(holm([row.p_value for row in deciding]))
    judged = [
        _judged(replace(row, adjusted_p=next(adjusted)), policy) if row.decides else row
        for row in rows
    ]
    change = macro_interval([row.change for row in deciding])
    mean = MeanChange(change, "pass", None)
    if change.high < -policy.margin:
        reason = (
            f"the mean of {_tasks_of(deciding)} drops by {-change.estimate:.3f} points, "
            f"with confidence by more than {-change.high:.3f}; {policy.margin:g} are allowed"
        )
        mean = MeanChange(change, "fail", reason)
    elif change.low <= -policy.margin:
        mean = MeanChange(change, "inconclusive", _mean_doubt(change, deciding, policy))
    return _verdict(judged, policy, mean)


def _judged(row: GateRow, policy: Policy) -> GateRow:
    """A deciding row with the verdict on its task."""
    assert row.adjusted_p is not None
    if row.drop_points > policy.exact_task_margin:
        reason = f"{_drop(row)}, more than {policy.task_margin:g}"
        return replace(row, verdict="fail", reason=reason)
    if row.drop_points >= policy.exact_margin and row.adjusted_p < policy.significance:
        reason = (
            f"{_drop(row)}, {policy.margin:g} or more, and significantly: "
            f"{row.lost} lost and {row.won} won, p = {row.adjusted_p:.2g}"
        )
        return replace(row, verdict="fail", reason=reason)
    if row.change.low <= -policy.task_margin:
        return replace(row, verdict="inconclusive", reason=_task_doubt(row, policy))
    return replace(row, verdict="pass")


def _verdict(
    rows: Sequence[GateRow], policy: Policy, mean: MeanChange | None = None
) -> GateVerdict:
    """The worst of what tasks and their mean get, and the reasons for that."""
    parts: list[GateRow | MeanChange] = [*rows, *([mean] if mean is not None else [])]
    worst: tuple[Verdict, ...] = ("fail", "inconclusive")
    for verdict in worst:
        if reasons := [p.reason for p in parts if p.verdict == verdict and p.reason is not None]:
            return GateVerdict(verdict, tuple(reasons), policy, tuple(rows), mean)
    return GateVerdict("pass", (), policy, tuple(rows), mean)


def _drop(row: GateRow) -> str:
    return (
        f"{row.task} {row.metric} drops by {float(row.drop_points):.3f} points "
        f"({_number(row.baseline)} to {_number(row.candidate)} of {row.count})"
    )


def _task_doubt(row: GateRow, policy: Policy) -> str:
    """Why a task is not shown to be within its margin, and what would show it."""
    text = (
        f"{row.task} {row.metric} may drop by up to {-row.change.low:.2f} points, "
        f"{policy.task_margin:g} are allowed"
    )
    times = times_needed(lambda more: _at(row, more, policy), -policy.task_margin)
    if times == math.inf:
        return f"{text}; {_NO_NUMBER}"
    needed = math.ceil(times * row.count)
    return f"{text}; about {needed:,} items would decide, it has {row.count:,}"


def _mean_doubt(change: Interval, rows: Sequence[GateRow], policy: Policy) -> str:
    """The same of the mean of all tasks."""
    text = (
        f"the mean of {_tasks_of(rows)} may drop by up to {-change.low:.2f} points, "
        f"{policy.margin:g} are allowed"
    )
    times = times_needed(
        lambda more: macro_interval([_at(row, more, policy) for row in rows]), -policy.margin
    )
    if times == math.inf:
        return f"{text}; {_NO_NUMBER}"
    return f"{text}; about {math.ceil(10 * times) / 10:g} times as many items would decide"


_NO_NUMBER = "it does drop by that much, so more items are likely to fail it"


def _tasks_of(rows: Sequence[GateRow]) -> str:
    return f"{len(rows)} task{'s' if len(rows) > 1 else ''}"


def _at(row: GateRow, more: float, policy: Policy) -> Interval:
    """The change of a task of `more` times as many items that are answered alike, with limits that
    the next measurement keeps with the policy's power."""
    wide = with_power(_two_sided(policy), policy.power)
    if row.right_or_wrong:
        lost, won, count = more * row.lost, more * row.won, more * row.count
        return _in_points(score_interval(lost, won, count, wide))
    return narrowed(row.change, _two_sided(policy), wide, more)


def _in_points(share: Interval) -> Interval:
    return Interval(100 * share.estimate, 100 * share.low, 100 * share.high)


def _two_sided(policy: Policy) -> float:
    """The confidence of an interval whose limits each have that of the policy."""
    return 2 * policy.confidence - 1


def _incomparable(baseline: EvalReport, candidate: EvalReport) -> Iterator[str]:
    """Every reason why the two reports do not answer the same questions."""
    if baseline.tasks is None or candidate.tasks is None:
        sides = {"baseline": baseline, "candidate": candidate}
        yield "no task scores in the " + " and the ".join(
            side for side, report in sides.items() if report.tasks is None
        )
        return
    yield from _settings_differ(baseline.tasks.settings, candidate.tasks.settings)
    ours, theirs = _tasks(baseline), _tasks(candidate)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"task {name} is only in the {'baseline' if name in ours else 'candidate'}"
    for name in sorted(ours.keys() & theirs.keys()):
        yield from _task_differs(ours[name], theirs[name])


def _tasks(report: EvalReport) -> dict[str, TaskScores]:
    return {task.name: task for task in report.tasks.tasks} if report.tasks else {}


def _settings_differ(baseline: TaskSettings, candidate: TaskSettings) -> Iterator[str]:
    for field in fields(baseline):
        ours, theirs = getattr(baseline, field.name), getattr(candidate, field.name)
        if ours != theirs:
            yield f"{field.name} differs: {ours} in the baseline, {theirs} in the candidate"


def _task_differs(ours: TaskScores, theirs: TaskScores) -> Iterator[str]:
    task = f"task {ours.name}"
    if ours.version != theirs.version:
        yield f"{task}: version {ours.version} in the baseline, {theirs.version} in the candidate"
    metrics = [[(m.name, m.higher_is_better) for m in side.metrics] for side in (ours, theirs)]
    if metrics[0] != metrics[1]:
        names = [", ".join(name for name, _ in side) for side in metrics]
        yield f"{task}: metrics {names[0]} in the baseline, {names[1]} in the candidate"
    counts = len(ours.items), len(theirs.items)
    if counts[0] != counts[1]:
        yield f"{task}: {counts[0]} items in the baseline, {counts[1]} in the candidate"
        return
    different = [pair for pair in zip(ours.items, theirs.items, strict=True) if pair[0] != pair[1]]
    if different:
        first, other = different[0]
        parts = [name for name in first._fields if getattr(first, name) != getattr(other, name)]
        yield (
            f"{task}: {len(different)} of {counts[0]} items are not the same question, "
            f"the first is item {first.number} of {first.task} (differs in {', '.join(parts)})"
        )
    elif ours.items_sha256 != theirs.items_sha256:
        yield f"{task}: the hash over all items differs"


def _rows(baseline: EvalReport, candidate: EvalReport, policy: Policy) -> Iterator[GateRow]:
    theirs = _tasks(candidate)
    for name, task in _tasks(baseline).items():
        names = [metric.name for metric in task.metrics]
        primary = policy.primary.get(name, names[0])
        if primary not in names:
            raise UsageError(
                f"policy {policy.name} judges task {name} by {primary}, "
                f"the evaluation has {', '.join(names)}",
                hint="name one of these under `primary` of your own policy: --policy FILE.yaml",
            )
        for ours, other in zip(task.metrics, theirs[name].metrics, strict=True):
            yield _row(name, ours, other, policy, decides=ours.name == primary)


def _row(
    task: str, ours: MetricScores, theirs: MetricScores, policy: Policy, *, decides: bool
) -> GateRow:
    sign = 1 if ours.higher_is_better else -1
    better = [sign * (b - a) for a, b in zip(ours.values, theirs.values, strict=True)]
    lost, won = sum(value < 0 for value in better), sum(value > 0 for value in better)
    confidence = _two_sided(policy)
    right_or_wrong = {*ours.values, *theirs.values} <= {0.0, 1.0}
    if right_or_wrong:
        share = score_interval(lost, won, ours.count, confidence)
        p_value = mcnemar(lost, won)
    else:
        share = mean_interval(better, confidence)
        p_value = one_sided(share, confidence)
    return GateRow(
        task=task,
        metric=ours.name,
        decides=decides,
        count=ours.count,
        baseline=ours.exact_total,
        candidate=theirs.exact_total,
        lost=lost,
        won=won,
        higher_is_better=ours.higher_is_better,
        change=_in_points(share),
        p_value=p_value,
        right_or_wrong=right_or_wrong,
    )


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
