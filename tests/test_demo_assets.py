"""The embedded model and texts: complete, clean of what may not be shipped, free of overlap."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.calibration.data import consecutive_windows, load_texts
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.weights import logical_weights

DEMO = Path(__file__).resolve().parents[1] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"
SOURCES = {"arc", "gsm", "mmlu", "recall", "tool"}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def what_is_asked(file: Path, row: dict[str, Any]) -> str:
    """The part of a task item that no other text may repeat."""
    if file.name == "gsm_like.jsonl":
        return str(row["question"])
    if file.name == "arc_like.jsonl":
        return str(row["question"]).partition(": ")[2].removesuffix("?")
    if file.name == "recall.jsonl":
        return str(row["prompt"]).partition("\n\n")[0]
    if file.name == "tool_call.jsonl":
        return str(row["user"])
    return f"{row['context']} {row['choices'][row['answer']]}"


def task_files() -> list[Path]:
    return sorted((DEMO / "tasks").glob("*.jsonl"))


@pytest.mark.parametrize("name", ["calibration.jsonl", "heldout.jsonl"])
def test_only_synthetic_and_wordnet_lines_are_shipped(name: str) -> None:
    assert {row["src"] for row in rows(DEMO / name)} == SOURCES


def test_texts_are_long_enough_for_the_demo() -> None:
    assert len(consecutive_windows(DEMO / "calibration.jsonl", MODEL, 256)) >= 96
    assert len(consecutive_windows(DEMO / "heldout.jsonl", MODEL, 256)) >= 24


def test_held_out_text_is_not_calibrated_on() -> None:
    calibration = "\n".join(load_texts(DEMO / "calibration.jsonl"))
    assert not [text for text in load_texts(DEMO / "heldout.jsonl") if text in calibration]


@pytest.mark.parametrize("file", task_files(), ids=lambda file: file.name)
def test_task_items_occur_in_no_text_and_once(file: Path) -> None:
    asked = [what_is_asked(file, row) for row in rows(file)]
    assert min(map(len, asked)) > 10
    assert len(set(asked)) == len(asked) >= 20
    for name in ("calibration.jsonl", "heldout.jsonl"):
        text = "\n".join(load_texts(DEMO / name))
        assert not [question for question in asked if question in text]


def test_texts_and_tasks_match_the_testbed(testbed: Path) -> None:
    """Demo lines are lines of the full files, and the two texts share none."""
    lines = [
        (DEMO / f"{name}.jsonl").read_text().splitlines() for name in ("calibration", "heldout")
    ]
    full = [json.loads(line) for line in (testbed / "calibration.jsonl").read_text().splitlines()]
    expected = [row for row in full if row["src"] != "corpus"]
    shipped = [json.loads(line) for part in lines for line in part]
    key = json.dumps
    assert sorted(map(key, shipped)) == sorted(map(key, expected))
    for name in ("arc_like", "gsm_like", "recall", "tool_call"):
        whole = {key(row) for row in rows(testbed / "tasks" / f"{name}.jsonl")}
        assert {key(row) for row in rows(DEMO / "tasks" / f"{name}.jsonl")} < whole


def test_embedded_checkpoint_is_whole_and_the_testbed_s(testbed: Path) -> None:
    checkpoint = open_checkpoint(MODEL)
    experts = [n for n in logical_weights(checkpoint) if ".mlp.experts." in n]
    assert len(experts) == 144
    for file in sorted((testbed / "glm-nano-fp8").iterdir()):
        assert (MODEL / file.name).read_bytes() == file.read_bytes()


def test_notice_names_every_file_and_licence() -> None:
    notice = (DEMO / "NOTICE").read_text()
    named = [
        "glm-nano-fp8/",
        "calibration.jsonl",
        "heldout.jsonl",
        "tasks/",
        "WordNet 3.0 Copyright",
    ]
    assert not [name for name in named if name not in notice]
    assert {p.name for p in DEMO.iterdir()} == {
        "NOTICE",
        "calibration.jsonl",
        "glm-nano-fp8",
        "heldout.jsonl",
        "tasks",
    }


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}"


@pytest.mark.parametrize(
    ("answer", "exact", "right", "valid"),
    [
        (call("set_timer", minutes=5, loud=True, tags=["a"], unit="s"), 1, 1, 1),
        (call("set_timer", minutes=5, loud=True, tags=["a"], unit="s") + "</tool_call>", 1, 1, 1),
        (call("set_timer", minutes=6, loud=True, tags=["a"], unit="s"), 0, 1, 1),
        (call("set_timer", minutes=5, loud=True, tags=["a"], unit="h"), 0, 1, 0),
        (call("set_timer", minutes=5.5, loud=True, tags=["a"], unit="s"), 0, 1, 0),
        (call("set_timer", minutes=True, loud=True, tags=["a"], unit="s"), 0, 1, 0),
        (call("set_timer", minutes=5, loud=1, tags=["a"], unit="s"), 0, 1, 0),
        (call("set_timer", minutes=5, loud=True, tags=[1], unit="s"), 0, 1, 0),
        (call("set_timer", minutes=5, loud=True, tags=["a"]), 0, 1, 0),
        (call("set_timer", minutes=5, loud=True, tags=["a"], unit="s", more=1), 0, 1, 0),
        (call("pay", amount=1), 0, 0, 1),
        (call("pay", amount=1.5), 0, 0, 1),
        (call("unknown", amount=1), 0, 0, 0),
        ('<tool_call>{"name": "pay", "arguments": []}', 0, 0, 0),
        ('<tool_call>{"name": "pay"}', 0, 0, 0),
        ('<tool_call>["pay"]', 0, 0, 0),
        ("<tool_call>{", 0, 0, 0),
        ('{"name": "pay", "arguments": {"amount": 1}}', 0, 0, 0),
    ],
)
def test_scoring_of_tool_calls(answer: str, exact: int, right: int, valid: int) -> None:
    spec = importlib.util.spec_from_file_location("tool_call", DEMO / "tasks" / "tool_call.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = {
        "minutes": {"type": "integer"},
        "loud": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"type": "string", "enum": ["s", "min"]},
    }
    timer = {"name": "set_timer", "parameters": {"properties": kinds, "required": list(kinds)}}
    amount = {"properties": {"amount": {"type": "number"}}, "required": ["amount"]}
    doc = {
        "tools": json.dumps([timer, {"name": "pay", "parameters": amount}]),
        "name": "set_timer",
        "arguments": json.dumps({"minutes": 5, "loud": True, "tags": ["a"], "unit": "s"}),
    }
    assert module.process_results(doc, [answer]) == {
        "exact_arguments": exact,
        "right_function": right,
        "valid": valid,
    }
