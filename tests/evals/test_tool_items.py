"""Metrics of single answers, and schemas: which are refused, and what satisfies the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from halfbyte.errors import EvaluationError
from halfbyte.evals import tool_items
from halfbyte.evals.tool_answers import Answer, Call
from halfbyte.evals.tool_files import equal_json
from halfbyte.evals.tool_items import METRICS, ExpectedCall, Tool, ToolItem

ADD = Tool(
    "add",
    "",
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"type": ["number", "null"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
SAY = Tool("say", "", {"type": "object", "properties": {"text": {"type": "string"}}})


def item(*expected: tuple[str, dict[str, Any]]) -> ToolItem:
    calls = tuple(ExpectedCall(name, partial(equal_json, args)) for name, args in expected)
    return ToolItem(0, (), (ADD, SAY), calls, "", "")


def scores(item: ToolItem, *calls: Call | None) -> dict[str, int]:
    answer = Answer(bool(calls), calls)
    return {name: int(metric(item, answer)) for name, metric in METRICS.items()}


ONE = item(("add", {"a": 1, "b": 2.5}))
TWO = item(("add", {"a": 1}), ("say", {"text": "hi"}))


@pytest.mark.parametrize(
    ("asked", "calls", "called", "valid", "function", "exact"),
    [
        (ONE, [Call("add", {"a": 1, "b": 2.5})], 1, 1, 1, 1),
        (ONE, [Call("add", {"a": 1.0, "b": 2.5})], 1, 1, 1, 1),  # 1.0 is an integer in JSON schema
        (ONE, [Call("add", {"a": True, "b": 2.5})], 1, 0, 1, 0),  # true is not
        (ONE, [Call("add", {"a": 1, "b": None})], 1, 1, 1, 0),
        (ONE, [Call("add", {"a": -1})], 1, 0, 1, 0),
        (ONE, [Call("add", {"a": 1, "c": 1})], 1, 0, 1, 0),
        (ONE, [Call("say", {"text": "hi"})], 1, 1, 0, 0),
        (ONE, [Call("sing", {})], 1, 0, 0, 0),
        (ONE, [None], 1, 0, 0, 0),
        (ONE, [], 0, 0, 0, 0),
        (ONE, [Call("add", {"a": 1, "b": 2.5}), None], 1, 0, 0, 0),
        (ONE, [Call("add", {"a": 1, "b": 2.5})] * 2, 1, 1, 0, 0),
        (TWO, [Call("say", {"text": "hi"}), Call("add", {"a": 1})], 1, 1, 1, 1),
        (TWO, [Call("say", {"text": "Hi"}), Call("add", {"a": 1})], 1, 1, 1, 0),
        (TWO, [Call("add", {"a": 1})], 1, 1, 0, 0),
    ],
)
def test_every_metric(
    asked: ToolItem, calls: list[Call | None], called: int, valid: int, function: int, exact: int
) -> None:
    assert scores(asked, *calls) == {
        "called": called,
        "no_call": 1 - called,
        "valid": valid,
        "right_function": function,
        "exact_arguments": exact,
    }


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "dict"}, "function f: its parameters are no JSON schema: 'dict' is not"),
        ({"properties": {"a": {"$ref": "http://somewhere/x"}}}, r"function f: \$ref is not supp"),
        ({"patternProperties": {"(a+)+$": {}}}, "function f: patternProperties is not supported"),
        ({"properties": {"a": {"pattern": "("}}}, "function f: .*'\\(' is not a 'regex'"),
    ],
)
def test_schemas_that_are_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(EvaluationError, match=says):
        Tool("f", "", schema)


def test_patterns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_items, "PATTERN_SECONDS", 0.125)

    def tool(pattern: str) -> Tool:
        return Tool("f", "", {"properties": {"a": {"type": "string", "pattern": pattern}}})

    assert tool("^a+$").accepts({"a": "aaa"})
    assert not tool("^a+$").accepts({"a": "aab"})
    with pytest.raises(
        EvaluationError, match=r"takes more than 0.125 s on a string of 40 characters"
    ):
        tool("^(a|aa|a?)+$").accepts({"a": "a" * 39 + "b"})
