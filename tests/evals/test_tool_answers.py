"""Tool calls in answers: each format as servers read it, and any text without a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.evals.tool_answers import (
    MAX_DEPTH,
    Answer,
    Call,
    ToolFormat,
    format_of,
    load_json,
)

GLM = (
    "{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"
)
JSON = '<tool_call>{\\"name\\": <function-name>, \\"arguments\\": <args>}</tool_call>'
DEEPSEEK = "{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}"
FORMATS = {name: format_of(text) for name, text in {"G": GLM, "J": JSON, "D": DEEPSEEK}.items()}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "at": {"type": "array"},
        },
    }
}
OSLO = Call("weather", {"city": "Oslo", "days": 3})
OSLO_JSON = '{"city": "Oslo", "days": 3}'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def form(name: str) -> ToolFormat:
    found = FORMATS[name]
    assert found is not None
    return found


def test_format_is_the_templates_own() -> None:
    assert [form(name).name for name in "GJD"] == ["GLM", "JSON", "DeepSeek"]
    assert format_of("{{ messages[0].content }}") is None
    assert format_of("<tool_call>\n<function=name>\n<parameter=key>") is None


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("J", f'<tool_call>{{"name": "weather", "arguments": {OSLO_JSON}}}</tool_call>', [OSLO]),
        (
            "J",
            '\nSure.\n<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>',
            [Call("f", {})],
        ),
        ("J", '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>', [None]),
        ("J", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [None]),
        ("J", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', [None]),
        ("J", '<tool_call>{"name": "f", "arguments": {}}', [None]),
        ("J", NOW + "<tool_call>", [Call("now", {}), None]),
        ("J", "No function fits.", []),
        # GLM-4.5 puts line breaks between the parts, GLM-4.7 and 5 do not.
        (
            "G",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            [OSLO],
        ),
        (
            "G",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>3</arg_value><arg_key>at</arg_key>"
            '<arg_value>[1, "b"]</arg_value><arg_key>unit</arg_key><arg_value>C</arg_value>'
            "</tool_call>",
            [Call("weather", {"city": "3", "at": [1, "b"], "unit": "C"})],
        ),
        (
            "G",
            "<tool_call>weather<arg_key>city</arg_key><arg_value> </arg_value>"
            "<arg_key>days</arg_key><arg_value> 3\n</arg_value></tool_call>",
            [Call("weather", {"city": " ", "days": 3})],
        ),
        ("G", "<tool_call>now</tool_call>", [Call("now", {})]),
        ("G", "<tool_call>now<arg_key>a</arg_key></tool_call>", [None]),
        ("G", "<tool_call>now<arg_key>a</arg_key>x<arg_value>1</arg_value></tool_call>", [None]),
        ("G", "<tool_call></tool_call>", [None]),
        (
            "G",
            "<think>I could <tool_call>now</tool_call></think><tool_call>weather</tool_call>",
            [Call("weather", {})],
        ),
        # DeepSeek-V3 and V3.1.
        (
            "D",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{OSLO_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [OSLO],
        ),
        (
            "D",
            f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO_JSON}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            [OSLO, Call("now", {})],
        ),
        ("D", "<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>", [None]),
    ],
)
def test_calls_of_an_answer(name: str, text: str, calls: list[Call | None]) -> None:
    assert form(name).parse(text, SCHEMAS) == Answer(bool(calls), tuple(calls))


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json", "</think>"),
        *('{"name": "weather", "arguments": ', "}", "{", "[" * 3000, '{"a":' * 3000, "9" * 5000),
        *("1e999", "weather", "city", "\ud800", "\x00"),
    ]
)


@given(st.lists(PIECES | st.text(max_size=8)).map("".join), st.sampled_from("GJD"))
def test_any_text_is_an_answer(text: str, name: str) -> None:
    answer = form(name).parse(text, SCHEMAS)
    assert len(answer.calls) == text.rpartition("</think>")[2].count(form(name).begin)
    assert answer.called == bool(answer.calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_what_json_writes_is_read_back(arguments: dict[str, Any]) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}).replace("<", "\\u003c")
    answer = form("J").parse(f"<tool_call>{body}</tool_call>", SCHEMAS)
    assert answer == Answer(True, (Call("f", arguments),))


def test_nesting_is_bounded() -> None:
    deepest = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert load_json(deepest) is not None
    for text in (f"[[{deepest}]]", "[" * 100_000, "9" * 301, "1e999", "Infinity"):
        with pytest.raises(ValueError, match=r"nest|digits|float|JSON|levels"):
            load_json(text)
