"""Sections on quality: the verdict of the gate, and the divergence from the source."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from halfbyte.evals.report import Divergence, EvalReport, WorstToken
from halfbyte.report import commands
from halfbyte.report.axis import Scale
from halfbyte.report.card import allowance, points
from halfbyte.report.charts import axis, histogram, interval
from halfbyte.report.html import ROWS_SHOWN, Html, element, joined, missing, section, table
from halfbyte.report.output import Change, Gate, Output


def accuracy(output: Output) -> Html:
    """The verdict of the gate, with the interval of each metric."""
    gate = output.gate
    if gate is None:
        return missing(
            "Accuracy",
            "No verdict yet: nobody has compared the two on tasks.",
            *commands.evaluate_commands(output),
            f"quantize report {shlex.quote(output.name)} --gate gate.json",
        )
    lead = f"Verdict: {gate.verdict}. {allowance(gate)}."
    if gate.kv_cache is not None:
        lead += f" The KV cache was {gate.kv_cache}."
    said = [*gate.reasons, *gate.remarks][:ROWS_SHOWN]
    children = [element("ul", *(element("li", line) for line in said))] if said else []
    if gate.rows:
        children.append(_forest(gate))
    return section("Accuracy", lead, *children)


def _forest(gate: Gate) -> Html:
    """A row for each metric, with its interval against no change and the margin."""
    changes = [row.change for row in gate.rows] + ([gate.mean] if gate.mean else [])
    reach = max(
        [max(-c.low, c.high, abs(c.estimate)) for c in changes]
        + [gate.margin, gate.task_margin if gate.paired else 0.0, 0.1]
    )
    scale = Scale(-1.06 * reach, 1.06 * reach)

    def drawn(change: Change, margin: float) -> Html:
        picture = interval(change.low, change.estimate, change.high, scale, margin)
        return joined([picture, element("small", points(change))])

    each = gate.task_margin if gate.paired else gate.margin
    rows: list[list[str]] = [
        [
            joined([row.task, " ", element("small", row.metric)]),
            f"{row.count:,}",
            *(f"{100 * total / row.count:.2f}" for total in (row.baseline, row.candidate)),
            f"{row.lost} : {row.won}",
            drawn(row.change, each),
            _badge(row.verdict) if row.decides else element("small", "shown only"),
        ]
        for row in gate.rows[:ROWS_SHOWN]
    ]
    if gate.mean is not None:
        rows.append(["mean of all tasks", "", "", "", "", drawn(gate.mean, gate.margin), ""])
    limits = f"change in points, {100 * (2 * gate.confidence - 1):g} % interval"
    over = joined([element("span", limits), axis(scale)])
    head = ["task", "items", "source %", "INT4 %", "lost : won", over, "verdict"]
    caption = "Change of each metric; dashed is the most that may be lost"
    made = table(caption, head, rows, numbers=(1, 2, 3, 4), spare=(1, 2, 3, 4))
    return element("div", made, class_="forest")


def _badge(verdict: str | None) -> Html:
    known = {"pass": "pass", "fail": "fail"}
    return element("span", verdict or "", class_=f"badge {known.get(verdict or '', 'doubt')}")


def divergence(output: Output, evaluation: EvalReport | None) -> Html:
    """The KL divergence from the source: how it is distributed, and where it is worst."""
    text = evaluation.text if evaluation is not None else None
    if text is None or text.divergence is None:
        source, name = shlex.quote(output.report.origin.name), shlex.quote(output.name)
        return missing(
            "Divergence",
            "Not measured: how far predictions are from the source's, token by token.",
            f"quantize eval {name} --text heldout.jsonl --baseline {source} -o int4.json",
            f"quantize report {name} --eval int4.json",
        )
    found: Divergence = text.divergence
    lead = (
        f"KL divergence from the source over {text.tokens:,} predicted tokens"
        f" ({text.windows:,} windows of {text.sequence_length:,}): mean {found.mean_kl:.5f} nats,"
        f" median {found.median_kl:.5f}, 99 % below {found.p99_kl:.5f}."
    )
    bins = found.histogram
    plot = histogram("Tokens by KL divergence, nats", bins.edges, bins.counts, "nats")
    return section("Divergence", lead, plot, _worst(found.worst))


def _worst(worst: Sequence[WorstToken]) -> Html:
    rows = [
        [
            f"{token.kl:.3f}",
            joined([_visible(token.context), element("mark", _visible(token.token))]),
            f"{100 * token.baseline_probability:.1f} → {100 * token.probability:.1f}",
            _choices(token),
        ]
        for token in worst[:ROWS_SHOWN]
    ]
    head = ["KL", "text, and the token that came", "its probability, %", "most likely"]
    return element(
        "div",
        table("Tokens that diverge most, source → INT4", head, rows, numbers=(0, 2), spare=(3,)),
        class_="words",
    )


def _choices(token: WorstToken) -> Html:
    """What both hold most likely, or each of them."""
    before, after = (
        element("q", _visible(choice)) for choice in (token.baseline_choice, token.choice)
    )
    return before if before == after else joined([before, " → ", after])


def _visible(text: str) -> str:
    """Text with its line breaks and tabs to be seen."""
    return text.replace("\r", "").replace("\n", "⏎").replace("\t", "⇥")
