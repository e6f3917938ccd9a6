"""What CI servers and people read of a verdict: parsed again, and told apart by their verdicts."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from halfbyte.evals.gate import GateVerdict, gate
from halfbyte.evals.outputs import ROWS_SHOWN, flips, junit, markdown
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import (
    Answer,
    EvalReport,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
)

POLICY = load_policy("default")
SETTINGS = TaskSettings(None, 16, 1024, "float32", {"lm_eval": "0.4.13"})


def report(**changed: tuple[int, int]) -> EvalReport:
    """Tasks of 1,000 items: the first so many wrong, and of the last so many right."""
    tasks = []
    for name, (wrong, more) in changed.items():
        values = (0.0,) * wrong + (1.0,) * (900 - wrong) + (1.0,) * more + (0.0,) * (100 - more)
        items = tuple(Item(name, n, f"d{n}", "p", "t") for n in range(1000))
        metrics = (MetricScores("acc", "none", True, values),)
        answers = tuple(Answer(f"{value} {n}") for n, value in enumerate(values))
        tasks.append(TaskScores(name, "1", items, metrics, "hash", answers, (), "tokens"))
    return EvalReport("folder", "f", tasks=TaskResults(SETTINGS, tuple(tasks)))


def verdict(**changed: tuple[int, int]) -> GateVerdict:
    return gate(report(**dict.fromkeys(changed, (0, 0))), report(**changed), POLICY)


MIXED = {"good": (2, 2), "bad": (40, 1), "open": (95, 90)}


def test_junit_has_a_case_for_every_task_and_the_mean() -> None:
    tree = ElementTree.fromstring(junit(verdict(**MIXED)))
    (suite,) = tree
    assert suite.attrib == {
        "name": "accuracy gate, policy default",
        "tests": "4",
        "failures": "1",
        "skipped": "2",
        "errors": "0",
    }
    cases = {
        case.attrib["classname"]: [(child.tag, child.attrib["message"]) for child in case]
        for case in suite
    }
    assert cases["good"] == []
    [(tag, message)] = cases["bad"]
    assert tag == "failure"
    assert message.startswith("bad acc,none drops by 3.900 points (900 to 861 of 1000)")
    assert [tag for tag, _ in cases["open"]] == ["skipped"]
    assert "items would decide" in cases["open"][0][1]
    assert [tag for tag, _ in cases["all tasks"]] == ["skipped"]


def test_junit_of_what_cannot_be_compared_is_an_error() -> None:
    other = gate(report(a=(0, 0)), report(b=(0, 0)), POLICY)
    (suite,) = ElementTree.fromstring(junit(other))
    assert (suite.attrib["tests"], suite.attrib["errors"]) == ("1", "1")
    assert suite[0][0].attrib["message"] == (
        "task a is only in the baseline; task b is only in the candidate"
    )


def test_names_of_tasks_are_data() -> None:
    """They come from a file: neither markup, nor what XML cannot hold."""
    name = "a<b>&\x00|`c`\n# x"
    odd = verdict(**{name: (40, 0)})
    (suite,) = ElementTree.fromstring(junit(odd))
    # XML turns a line break of an attribute into a blank unless it is escaped, which it is.
    assert suite[0].attrib["classname"] == "a<b>&\N{REPLACEMENT CHARACTER}|`c`\n# x"
    row = next(line for line in markdown(odd).splitlines() if line.startswith("| a"))
    assert row.startswith("| a\\<b\\>&\x00\\|\\`c\\` \\# x | acc,none |")


@pytest.mark.parametrize(("changed", "says"), [(MIXED, "fail"), ({"good": (0, 0)}, "pass")])
def test_markdown_shows_all_that_was_judged(changed: dict[str, tuple[int, int]], says: str) -> None:
    made = verdict(**changed)
    text = markdown(made)
    assert text.startswith(f"### Accuracy gate: {says}\n\nPolicy default: paired statistics")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(changed)
    assert all(line.count("|") == table[0].count("|") for line in table)
    assert text.count("\n- ") == len(made.reasons)
    if says == "fail":
        assert "| bad | acc,none | 1,000 | 90.00 | 86.10 | -3.90 (" in text
        assert "| 40 : 1 | **fail** |" in text


def test_markdown_stays_small() -> None:
    many = {f"task{number}": (40, 0) for number in range(ROWS_SHOWN + 30)}
    made = verdict(**many)
    text = markdown(replace(made, reasons=made.reasons[:5]))
    assert text.count("| 40 : 0 |") == ROWS_SHOWN
    assert text.endswith("\n30 more are not shown.\n")


def test_flips_are_the_items_that_count() -> None:
    baseline, candidate = report(a=(0, 0), b=(0, 0)), report(a=(2, 1), b=(0, 0))
    found = list(flips(baseline, candidate))
    assert [(f["item"]["number"], f["baseline"], f["candidate"]) for f in found] == [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (900, 0.0, 1.0),
    ]
    assert found[0] == {
        "task": "a",
        "metric": "acc,none",
        "item": {"task": "a", "number": 0},
        "document": "d0",
        "baseline": 1.0,
        "candidate": 0.0,
    }
