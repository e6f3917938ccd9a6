"""Files of questions with tools. Verdicts on BFCL's possible answers are those of its own checker,
`ast_checker` of bfcl-eval 2026.3.23, which was asked for each row of the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import EvaluationError
from halfbyte.evals.tool_answers import Answer, Call
from halfbyte.evals.tool_files import read_tool_tasks
from halfbyte.evals.tool_items import ToolItem, exact_arguments, valid

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"

BOOK = {
    "name": "hotel.book",
    "description": "Book a room.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"},
            "nights": {"type": "integer"},
            "price": {"type": "float"},
            "breakfast": {"type": "boolean"},
            "guests": {"type": "array", "items": {"type": "string"}},
            "card": {"type": "dict", "properties": {"kind": {"type": "string"}}},
            "rooms": {"type": "array", "items": {"type": "dict"}},
            "note": {"type": "any"},
        },
        "required": ["city", "nights"],
    },
}
ALLOWED = {
    "city": ["New York, NY", "NYC"],
    "nights": [2],
    "price": [99.5, 100, ""],
    "breakfast": [True, ""],
    "guests": [["Al Ba", "C"], ""],
    "card": [{"kind": ["Visa", "visa card"], "year": [2030, ""]}, ""],
    "rooms": [[{"beds": [1]}, {"beds": [2]}], ""],
}
BFCL_VERDICTS: list[tuple[dict[str, Any], bool]] = [
    ({"city": "NYC", "nights": 2}, True),
    ({"city": "new york ny", "nights": 2, "price": 100}, True),
    ({"city": "New-York, N.Y.", "nights": 2, "price": 99.5, "breakfast": True}, True),
    ({"city": "Newark", "nights": 2}, False),
    ({"city": "NYC"}, False),
    ({"city": "NYC", "nights": 3}, False),
    ({"city": "NYC", "nights": "2"}, False),
    ({"city": "NYC", "nights": True}, False),
    ({"city": "NYC", "nights": 2, "breakfast": 1}, False),
    ({"city": "NYC", "nights": 2, "stars": 5}, False),
    ({"city": "NYC", "nights": 2, "note": "quiet"}, False),
    ({"city": "NYC", "nights": 2, "guests": ["al-ba", "c"]}, True),
    ({"city": "NYC", "nights": 2, "guests": ["C", "Al Ba"]}, False),
    ({"city": "NYC", "nights": 2, "card": {"kind": "VISA CARD"}}, True),
    ({"city": "NYC", "nights": 2, "card": {"kind": "visa", "year": 2030}}, True),
    ({"city": "NYC", "nights": 2, "card": {"year": 2030}}, False),
    ({"city": "NYC", "nights": 2, "rooms": [{"beds": 1}, {"beds": 2}]}, True),
    ({"city": "NYC", "nights": 2, "rooms": [{"beds": 2}, {"beds": 1}]}, False),
]


def write_bfcl(
    folder: Path, category: str, calls: list[dict[str, Any]] | None, copies: int = 1
) -> Path:
    """A BFCL file of one category, its possible answers beside it."""
    ids = [f"{category}_{n}" for n in range(copies)]
    asked = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A room?"}]]
    questions = [{"id": i, "question": asked, "function": [BOOK]} for i in ids]
    answers = [{"id": i, "ground_truth": calls} for i in ids]
    (folder / "possible_answer").mkdir(parents=True, exist_ok=True)
    name = f"BFCL_v4_{category}.json"
    (folder / name).write_text("\n".join(map(json.dumps, questions)))
    if calls is not None:
        (folder / "possible_answer" / name).write_text("\n".join(map(json.dumps, answers)))
    return folder / name


@pytest.fixture(scope="module")
def booking(tmp_path_factory: pytest.TempPathFactory) -> ToolItem:
    path = write_bfcl(tmp_path_factory.mktemp("bfcl"), "simple_python", [{"hotel.book": ALLOWED}])
    ((item,),) = (task.items for task in read_tool_tasks(path).tasks)
    return item


@pytest.mark.parametrize(("arguments", "right"), BFCL_VERDICTS)
def test_possible_answers(booking: ToolItem, arguments: dict[str, Any], right: bool) -> None:
    answer = Answer(True, (Call("hotel.book", arguments),))
    assert exact_arguments(booking, answer) == right


def test_integers_are_equal_by_value(booking: ToolItem) -> None:
    # The one rule that differs: BFCL refuses 2.0 where the schema says integer.
    answer = Answer(True, (Call("hotel.book", {"city": "NYC", "nights": 2.0}),))
    assert exact_arguments(booking, answer)
    assert valid(booking, answer)


def test_bfcl_schemas_become_json_schemas(booking: ToolItem) -> None:
    (tool,) = booking.tools
    assert tool.accepts({"city": "NYC", "nights": 2, "price": 1, "note": ["anything"]})
    assert not tool.accepts({"city": "NYC", "nights": 2.5})
    assert not tool.accepts({"city": "NYC", "nights": 2, "rooms": [1]})
    assert [message["role"] for message in booking.messages] == ["system", "user"]


def test_folder_of_bfcl(tmp_path: Path) -> None:
    for category in ("live_irrelevance", "live_relevance", "simple_java", "multi_turn_base"):
        write_bfcl(tmp_path, category, None)
    write_bfcl(tmp_path, "parallel", [{"hotel.book": {"city": ["A"], "nights": [1]}}] * 2, copies=3)
    found = read_tool_tasks(tmp_path)
    assert [(t.name, len(t.items), t.metrics[0]) for t in found.tasks] == [
        ("bfcl_parallel", 3, "exact_arguments"),
        ("bfcl_live_irrelevance", 1, "no_call"),
        ("bfcl_live_relevance", 1, "called"),
    ]
    assert found.left_out == ("multi_turn_base", "simple_java")
    with pytest.raises(EvaluationError, match="BFCL's category simple_java is not supported"):
        read_tool_tasks(tmp_path / "BFCL_v4_simple_java.json")


def test_lines_of_the_demo_and_lines_without_a_call(tmp_path: Path) -> None:
    lines = (DEMO / "tasks" / "tool_call.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    silent = {"user": "Hello!", "tools": json.loads(record["tools"]), "name": None}
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([json.dumps(silent), *lines[:2]]))
    first, second = read_tool_tasks(path).tasks
    assert (first.name, [item.number for item in first.items]) == ("mixed", [1, 2])
    assert (second.name, [item.number for item in second.items]) == ("mixed_no_call", [0])
    right = Answer(True, (Call(record["name"], json.loads(record["arguments"])),))
    assert exact_arguments(first.items[0], right)
    assert valid(first.items[0], right)


LINE = {"user": "Hi", "tools": [{"name": "f"}], "name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"user": None}, "line 1: user must be a str, it is None"),
        ({"tools": "[{]"}, "line 1: .*Expecting property name"),
        ({"tools": [{"name": "f"}] * 2}, "line 1: two functions have the same name"),
        ({"tools": [{"name": "f", "parameters": {"type": "dict"}}]}, "line 1: function f: its par"),
        ({"name": "g"}, "line 1: the name 'g' is none of the tools"),
        ({"arguments": [1]}, "line 1: arguments must be an object"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({**LINE, **change}))
    with pytest.raises(EvaluationError, match=says):
        read_tool_tasks(path)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(path: Path, says: str) -> None:
        with pytest.raises(EvaluationError, match=says):
            read_tool_tasks(path)

    refused(tmp_path, "no BFCL file of a supported category")
    refused(tmp_path / "calls.yaml", "neither a .jsonl file nor one of BFCL")
    refused(tmp_path / "absent.jsonl", "no such file")
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    refused(deep, "line 1: nested too deeply")
    path = write_bfcl(tmp_path, "simple_python", [{"hotel.book": {}}], copies=2)
    refused(write_bfcl(tmp_path / "other", "multiple", [{"hotel.buy": {}}]), "calls hotel.buy, whi")
    answers = tmp_path / "possible_answer" / path.name
    lines = answers.read_text().splitlines()
    answers.write_text("\n".join(reversed(lines)))
    refused(path, "the question is simple_python_0, the possible answer is of simple_python_1")
    answers.write_text(lines[0])
    refused(path, "2 questions, 1 in")
    answers.unlink()
    refused(path, "no such file")
