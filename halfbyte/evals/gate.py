"""Did accuracy hold? Compares two evaluation reports item by item.

First whether they can be compared and measure anything at all (`evals.integrity`); only then by
how much the scores differ, by the rule of a policy. Text metrics can fail a checkpoint early: near
the baseline they say little about tasks, so they never pass one.

*Paired*: a model that differs a little changes a few answers in both directions, so a drop of some
points may be chance, and no drop may hide one. It fails what is worse beyond chance and margin,
passes what is shown to be within the margins, and says of anything else how many items would
decide. *Plain*: the difference of scores, compared as exact fractions: 11 questions of 1319 lost
are 0.834 points, and no rounding makes that 0.8 that the policy does not ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from halfbyte.errors import UsageError
from halfbyte.evals.integrity import defects, remarkable, tasks_by_name
from halfbyte.evals.policy import Policy
from halfbyte.evals.record import encode
from halfbyte.evals.report import EvalReport, MetricScores
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
    remarks: tuple[str, ...] = ()
    """What to know beside it, whatever the verdict is."""
    text: tuple[str, ...] = ()
    """Those of the reasons that held-out text gives."""
    noise: tuple[GateRow, ...] = ()
    """A second evaluation of the baseline against the first; empty without one."""
    baseline: str = ""
    """Fingerprint of the checkpoint, as of `candidate`."""
    candidate: str = ""
    kv_caches: tuple[str | None, str | None] = (None, None)
    """Formats of the KV cache that were asked for, the baseline's first."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": GATE_SCHEMA,
            "verdict": self.verdict,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "kv_cache": dict(zip(("baseline", "candidate"), self.kv_caches, strict=True)),
            "reasons": list(self.reasons),
            "remarks": list(self.remarks),
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
            "noise": [
                {
                    "task": row.task,
                    "metric": row.metric,
                    "delta_points": _number(row.delta_points),
                    "lost": row.lost,
                    "won": row.won,
                }
                for row in self.noise
            ],
        }


def gate(
    baseline: EvalReport, candidate: EvalReport, policy: Policy, again: EvalReport | None = None
) -> GateVerdict:
    """Judge `candidate` against `baseline` by the rule of `policy`.

    Each task is judged by the metric that the policy names, or else by its primary one: the first
    metric under its first answer filter, in the order its YAML lists them. `again` is a second
    evaluation of the baseline's checkpoint: how it differs from the first is the noise floor, and
    must be no more than chance.

    Raises UsageError when the policy names a metric that the task does not have.
    """
    reasons = tuple(defects(baseline, candidate, policy))
    if not reasons and again is not None:
        reasons = tuple(_unsteady(baseline, again, policy))
    if reasons:
        verdict = GateVerdict("invalid", reasons, policy, ())
    else:
        verdict = _judge(baseline, candidate, policy)
        noise = tuple(_rows(baseline, again, policy)) if again is not None else ()
        remarks = tuple(remarkable(baseline, candidate))
        verdict = replace(verdict, remarks=remarks, noise=noise)
    return replace(
        verdict,
        baseline=baseline.fingerprint,
        candidate=candidate.fingerprint,
        kv_caches=(baseline.kv_cache, candidate.kv_cache),
    )


def _judge(baseline: EvalReport, candidate: EvalReport, policy: Policy) -> GateVerdict:
    text = tuple(_text_fails(baseline, candidate, policy))
    if baseline.tasks is None:
        verdict: Verdict = "fail" if text else "inconclusive"
        return GateVerdict(verdict, text or (_TEXT_ALONE,), policy, (), text=text)
    rows = tuple(_rows(baseline, candidate, policy))
    judged = _plain(rows, policy) if policy.rule == "plain" else _paired(rows, policy)
    if text:
        others = judged.reasons if judged.verdict == "fail" else ()
        judged = replace(judged, verdict="fail", reasons=(*text, *others), text=text)
    return judged


def _unsteady(baseline: EvalReport, again: EvalReport, policy: Policy) -> Iterator[str]:
    """Why two evaluations of the baseline cannot be of one and the same model."""
    if baseline.fingerprint != again.fingerprint:
        yield "the repetition is of another checkpoint than the baseline"
        return
    if reasons := tuple(defects(baseline, again, policy)):
        yield from (f"the repetition of the baseline: {reason}" for reason in reasons)
        return
    rows = [row for row in _rows(baseline, again, policy) if row.decides]
    # In both directions: neither of the two runs is the right one.
    both = [2 * min(row.p_value, _p_value_of_gain(row)) for row in rows]
    for row, adjusted in zip(rows, holm([min(1.0, p) for p in both]), strict=True):
        if adjusted < policy.significance:
            yield (
                f"the baseline does not repeat itself: {row.task} {row.metric} has {row.lost} "
                f"lost and {row.won} won when asked again, p = {adjusted:.2g}"
            )


def _p_value_of_gain(row: GateRow) -> float:
    return mcnemar(row.won, row.lost) if row.right_or_wrong else 1 - row.p_value


_TEXT_ALONE = (
    "a text alone can fail a checkpoint, never pass it; evaluate both on tasks: quantize eval "
    "--tasks FOLDER"
)


def _text_fails(baseline: EvalReport, candidate: EvalReport, policy: Policy) -> Iterator[str]:
    """Why the prediction of held-out text is too far from the baseline's."""
    ours, theirs = baseline.text, candidate.text
    if theirs is None:
        return
    most = policy.max_mean_kl
    if theirs.divergence is not None and most is not None and theirs.divergence.mean_kl > most:
        yield f"mean KL is {theirs.divergence.mean_kl:.4f} nats, {most:g} are allowed"
    most = policy.max_perplexity_ratio
    if ours is not None and most is not None and theirs.perplexity > most * ours.perplexity:
        yield (
            f"perplexity is {theirs.perplexity:.3f}, {theirs.perplexity / ours.perplexity:.3f} "
            f"times the baseline's {ours.perplexity:.3f}; {most:g} times are allowed"
        )


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


def _rows(baseline: EvalReport, candidate: EvalReport, policy: Policy) -> Iterator[GateRow]:
    theirs = tasks_by_name(candidate)
    for name, task in tasks_by_name(baseline).items():
        names = [metric.name for metric in task.metrics]
        primary = policy.deciding(name, names)
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
