"""Evaluations, gate verdicts and the demo as tables and lines; pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfbyte.console import Column, Table
from halfbyte.units import format_bytes

if TYPE_CHECKING:
    from halfbyte.evals.demo import DemoReport, DemoVariant
    from halfbyte.evals.gate import GateVerdict
    from halfbyte.evals.report import EvalReport, MetricScores, TextMetrics


def evaluation_tables(report: EvalReport) -> list[Table]:
    """One table for the text and one for the tasks, of what was measured."""
    tables = []
    if report.text is not None:
        tables.append(
            Table(
                columns=(Column("text"), Column("value", number=True)),
                rows=(
                    ("predicted tokens", f"{report.text.tokens:,}"),
                    *_text_rows(report.text),
                ),
            )
        )
    if report.tasks is not None:
        tables.append(
            Table(
                columns=(
                    Column("task"),
                    Column("metric"),
                    Column("items", number=True),
                    Column("score %", number=True),
                    Column("std. error", number=True),
                ),
                rows=tuple(
                    (task.name, metric.name, f"{metric.count:,}", _score(metric), _error(metric))
                    for task in report.tasks.tasks
                    for metric in task.metrics
                ),
            )
        )
    return tables


def _text_rows(text: TextMetrics) -> list[tuple[str, str]]:
    rows = [("perplexity", f"{text.perplexity:.4f}")]
    if (divergence := text.divergence) is not None:
        rows += [
            ("mean KL (nats)", f"{divergence.mean_kl:.5f}"),
            ("median KL", f"{divergence.median_kl:.5f}"),
            ("99 % KL", f"{divergence.p99_kl:.5f}"),
            ("top-1 agreement %", f"{100 * divergence.top1_agreement:.2f}"),
        ]
    return rows


def _score(metric: MetricScores) -> str:
    return f"{100 * metric.mean:.2f}"


def _error(metric: MetricScores) -> str:
    error = metric.standard_error
    return "-" if error is None else f"{100 * error:.2f}"


def gate_table(verdict: GateVerdict) -> Table:
    """Both scores of every metric, and on how many items each side did better; beside it, when the
    baseline was evaluated twice, how often its own answers differ."""
    noise = {(row.task, row.metric): f"{row.lost} : {row.won}" for row in verdict.noise}
    return Table(
        columns=(
            Column("task"),
            Column("metric"),
            Column("items", number=True),
            Column("baseline %", number=True),
            Column("candidate %", number=True),
            Column("points", number=True),
            Column(f"{100 * (2 * verdict.policy.confidence - 1):g} % interval", number=True),
            Column("lost : won", number=True),
            *([Column("noise", number=True)] if noise else ()),
            Column("verdict"),
        ),
        rows=tuple(
            (
                row.task,
                row.metric,
                f"{row.count:,}",
                f"{float(100 * row.baseline / row.count):.2f}",
                f"{float(100 * row.candidate / row.count):.2f}",
                f"{float(row.delta_points):+.2f}",
                f"{row.change.low:+.2f} to {row.change.high:+.2f}",
                f"{row.lost} : {row.won}",
                *([noise[row.task, row.metric]] if noise else ()),
                row.verdict or "",
            )
            for row in verdict.rows
        ),
    )


def gate_lines(verdict: GateVerdict) -> list[str]:
    """The verdict and every reason for it."""
    from halfbyte.evals.outputs import points

    policy = verdict.policy
    asked = f"policy {policy.name}: a task may drop by {policy.margin:g} points"
    if policy.rule == "paired":
        asked = (
            f"policy {policy.name}: the mean may drop by {policy.margin:g} points, "
            f"a task by {policy.task_margin:g}"
        )
    lines = [f"gate: {verdict.verdict} ({asked})"]
    if verdict.mean is not None:
        lines.append(f"mean change in points: {points(verdict.mean.change)}")
    lines += [f"- {reason}" for reason in verdict.reasons]
    return [*lines, *(f"note: {remark}" for remark in verdict.remarks)]


def demo_table(report: DemoReport) -> Table:
    """A column per checkpoint; size, text metrics and task scores in the rows."""
    columns = [_demo_column(variant) for variant in report.variants]
    # The last column has every measure; the source diverges from nothing.
    names = list(dict.fromkeys(name for column in reversed(columns) for name in column))
    return Table(
        columns=(Column("measure"), *(Column(v.name, number=True) for v in report.variants)),
        rows=tuple((name, *(column.get(name, "-") for column in columns)) for name in names),
    )


def _demo_column(variant: DemoVariant) -> dict[str, str]:
    report = variant.evaluation
    column = {"size": format_bytes(variant.nbytes)}
    if report.text is not None:
        column |= dict(_text_rows(report.text))
    if report.tasks is not None:
        column |= {
            f"{task.name} {task.metrics[0].metric} %": _score(task.metrics[0])
            for task in report.tasks.tasks
        }
    return column


def demo_record(report: DemoReport) -> dict[str, Any]:
    """The demo as JSON: the evaluation of every checkpoint, and the verdict."""
    return {
        "output": report.output,
        "variants": [
            {"name": v.name, "bytes": v.nbytes, "evaluation": v.evaluation.to_json()}
            for v in report.variants
        ],
        "gate": report.verdict.to_json(),
    }
