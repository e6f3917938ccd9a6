"""Did accuracy hold? Compares two evaluation reports item by item.

First whether they can be compared at all (same tasks, same questions, same settings); only then
by how much the scores differ. Counts are compared as exact fractions: 11 questions of 1319 lost
are 0.834 points, and no rounding makes that 0.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from halfbyte.errors import UsageError
from halfbyte.evals.report import EvalReport, MetricScores, TaskScores, TaskSettings

Verdict = Literal["pass", "fail", "inconclusive", "invalid"]

EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 3, "inconclusive": 4, "invalid": 5}


@dataclass(frozen=True)
class GateRow:
    """One metric of one task in both reports, over the same `count` items."""

    task: str
    metric: str
    decides: bool
    """Whether it is the task's primary metric; the others are shown, not judged."""
    count: int
    baseline: Fraction
    """Sum of the item values; for right-or-wrong metrics the number right."""
    candidate: Fraction
    lost: int
    """Items on which the candidate does worse than the baseline."""
    won: int
    higher_is_better: bool

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
class MarginPolicy:
    """Passes when no task's primary metric drops by more than `margin` points.

    It judges the counts as they are and knows nothing of chance, so it is never inconclusive.
    """

    margin: Fraction

    def failures(self, rows: Sequence[GateRow]) -> tuple[GateRow, ...]:
        return tuple(row for row in rows if row.decides and row.drop_points > self.margin)


@dataclass(frozen=True)
class GateVerdict:
    """The verdict and what it rests on. `rows` is empty when the reports cannot be compared."""

    verdict: Verdict
    reasons: tuple[str, ...]
    """Why it failed or is invalid; empty for a pass."""
    margin_points: Fraction
    rows: tuple[GateRow, ...]
    failed: tuple[GateRow, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "margin_points": _number(self.margin_points),
            "rows": [
                {
                    "task": row.task,
                    "metric": row.metric,
                    "decides": row.decides,
                    "passed": row not in self.failed,
                    "count": row.count,
                    "baseline": _number(row.baseline),
                    "candidate": _number(row.candidate),
                    "delta_points": _number(row.delta_points),
                    "lost": row.lost,
                    "won": row.won,
                }
                for row in self.rows
            ],
        }


def gate(baseline: EvalReport, candidate: EvalReport, margin_points: float = 0.8) -> GateVerdict:
    """Judge `candidate` against `baseline` by the margin rule (`MarginPolicy`).

    Each task is judged by its primary metric: the first metric of the task under its first answer
    filter, in the order its YAML lists them. A drop of exactly the margin passes.

    Raises UsageError for a margin that is not between 0 and 100 points.
    """
    if not 0 <= margin_points <= 100:
        raise UsageError(f"the margin is {margin_points} points; it must be from 0 to 100")
    margin = Fraction(str(margin_points))
    if reasons := tuple(_incomparable(baseline, candidate)):
        return GateVerdict("invalid", reasons, margin, (), ())
    rows = tuple(_rows(baseline, candidate))
    failed = MarginPolicy(margin).failures(rows)
    reasons = tuple(
        f"{row.task} {row.metric} drops by {float(row.drop_points):.3f} points "
        f"({_number(row.baseline)} to {_number(row.candidate)} of {row.count}), "
        f"more than {margin_points}"
        for row in failed
    )
    return GateVerdict("fail" if failed else "pass", reasons, margin, rows, failed)


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


def _rows(baseline: EvalReport, candidate: EvalReport) -> Iterator[GateRow]:
    theirs = _tasks(candidate)
    for name, task in _tasks(baseline).items():
        pairs = zip(task.metrics, theirs[name].metrics, strict=True)
        for position, (ours, other) in enumerate(pairs):
            yield _row(name, ours, other, decides=position == 0)


def _row(task: str, ours: MetricScores, theirs: MetricScores, *, decides: bool) -> GateRow:
    pairs = list(zip(ours.values, theirs.values, strict=True))
    down = sum(theirs < ours for ours, theirs in pairs)
    up = sum(theirs > ours for ours, theirs in pairs)
    lost, won = (down, up) if ours.higher_is_better else (up, down)
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
    )


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
