"""A gate's verdict for others to read: CI servers, people, and whoever looks at single answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from halfbyte.evals.gate import GateRow, GateVerdict
from halfbyte.evals.report import EvalReport
from halfbyte.evals.statistics import Interval

ROWS_SHOWN = 200
"""Rows and reasons of a summary at most: pages that show one take a megabyte."""

_MARKDOWN_HEAD = (
    "| task | metric | items | baseline % | candidate % | change, points | lost : won | |"
)
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verdict: GateVerdict) -> bytes:
    """JUnit's XML: a test case for each task and one for their mean. A drop is a failure, what too
    few items leave open is skipped, and evaluations that cannot be compared are an error."""
    suite = ElementTree.Element("testsuite", name=f"accuracy gate, policy {verdict.policy.name}")
    counts = dict.fromkeys(("tests", "failures", "skipped", "errors"), 0)

    def case(group: str, name: str, outcome: str, message: str | None) -> None:
        node = ElementTree.SubElement(suite, "testcase", classname=_xml(group), name=_xml(name))
        counts["tests"] += 1
        tag, count = {
            "fail": ("failure", "failures"),
            "inconclusive": ("skipped", "skipped"),
            "invalid": ("error", "errors"),
        }.get(outcome, (None, ""))
        if tag is not None:
            counts[count] += 1
            ElementTree.SubElement(node, tag, message=_xml(message or outcome))

    for row in verdict.rows:
        if row.verdict is not None:
            case(row.task, row.metric, row.verdict, row.reason)
    if verdict.mean is not None:
        case("all tasks", "mean change", verdict.mean.verdict, verdict.mean.reason)
    if verdict.text:
        case("held-out text", "prediction", "fail", "; ".join(verdict.text))
    if verdict.verdict == "invalid":
        case("all tasks", "comparable", "invalid", "; ".join(verdict.reasons))
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    tree = ElementTree.Element("testsuites")
    tree.append(suite)
    ElementTree.indent(tree)
    text: bytes = ElementTree.tostring(tree, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def markdown(verdict: GateVerdict) -> str:
    """The verdict, its reasons and a table, for a page that shows Markdown."""
    lines = [f"### Accuracy gate: {verdict.verdict}", "", f"Policy {_cell(verdict.policy.name)}:"]
    lines[-1] += f" {_cell(verdict.policy.description)}."
    if verdict.mean is not None:
        lines += ["", f"Mean change {points(verdict.mean.change)}."]
    if verdict.reasons:
        lines += ["", *(f"- {_cell(reason)}" for reason in verdict.reasons[:ROWS_SHOWN])]
    if verdict.remarks:
        lines += ["", *(f"Note: {_cell(remark)}." for remark in verdict.remarks[:ROWS_SHOWN])]
    if verdict.rows:
        lines += ["", _MARKDOWN_HEAD, "|---|---|---:|---:|---:|---:|---:|---|"]
        lines += [_markdown_row(row) for row in verdict.rows[:ROWS_SHOWN]]
    hidden = max(len(verdict.rows), len(verdict.reasons)) - ROWS_SHOWN
    if hidden > 0:
        lines += ["", f"{hidden} more are not shown."]
    return "\n".join(lines) + "\n"


def flips(baseline: EvalReport, candidate: EvalReport) -> Iterator[dict[str, Any]]:
    """Every item that the two answered differently, for each metric. The reports are comparable."""
    theirs = {task.name: task for task in candidate.tasks.tasks} if candidate.tasks else {}
    for task in baseline.tasks.tasks if baseline.tasks else ():
        for ours, other in zip(task.metrics, theirs[task.name].metrics, strict=True):
            for item, before, after in zip(task.items, ours.values, other.values, strict=True):
                if before != after:
                    yield {
                        "task": task.name,
                        "metric": ours.name,
                        "item": {"task": item.task, "number": item.number},
                        "document": item.document,
                        "baseline": before,
                        "candidate": after,
                    }


def _markdown_row(row: GateRow) -> str:
    scores = (f"{float(100 * total / row.count):.2f}" for total in (row.baseline, row.candidate))
    cells = (_cell(row.task), _cell(row.metric), f"{row.count:,}", *scores)
    verdict = f"**{row.verdict}**" if row.verdict not in (None, "pass") else row.verdict or ""
    return f"| {' | '.join(cells)} | {points(row.change)} | {row.lost} : {row.won} | {verdict} |"


def points(change: Interval) -> str:
    """A change in points and its limits, as people read it."""
    return f"{change.estimate:+.2f} ({change.low:+.2f} to {change.high:+.2f})"


def _cell(text: str) -> str:
    """Text that can neither end a cell or a line of Markdown nor be markup."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _xml(text: str) -> str:
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
