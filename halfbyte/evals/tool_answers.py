"""Tool calls in a model's answer, in the format that its chat template teaches.

What comes out of a model is any text at all: parsing it never raises, and what is no well-formed
call is kept as one that does not parse, so that it can be counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_DEPTH = 32
"""Levels of nesting of a call's arguments. Deeper ones count as not parsed."""
MAX_DIGITS = 300
"""Digits of an integer; more would not fit a float, which schemas compare with."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What an answer does about the tools it was offered."""

    called: bool
    """Whether it begins a call, be it a broken one."""
    calls: tuple[Call | None, ...]
    """In the order of the text; None is a call that does not parse or does not end."""


Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> JSON schema of its arguments."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call."""

    name: str
    begin: str
    end: str
    also: tuple[str, ...]
    """What a chat template of this format contains besides `begin`."""
    parse_call: Callable[[str, Schemas], Call | None]
    """The text between `begin` and `end` as a call."""

    def parse(self, text: str, schemas: Schemas) -> Answer:
        """All calls of an answer; what was thought before it is not part of it."""
        spoken = text.rpartition("</think>")[2]
        return Answer(self.begin in spoken, tuple(self._calls(spoken, schemas)))

    def _calls(self, text: str, schemas: Schemas) -> Iterator[Call | None]:
        for part in text.split(self.begin)[1:]:
            body, end, _ = part.partition(self.end)
            yield self.parse_call(body, schemas) if end else None


def load_json(text: str) -> Any:
    """JSON within bounds that keep all later work on it safe.

    Raises ValueError for anything else: NaN, numbers beyond a float, deep nesting included.
    """
    try:
        value = json.loads(
            text, parse_int=_integer, parse_float=_finite, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_DEPTH} levels of nesting")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond a float")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _json_object(body: str, schemas: Schemas) -> Call | None:
    """`{"name": ..., "arguments": {...}}` and nothing else, as Hermes and Qwen write it."""
    try:
        found = load_json(body)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.keys() != {"name", "arguments"}:
        return None
    return _call(found["name"], found["arguments"])


def _tagged(body: str, schemas: Schemas) -> Call | None:
    """A name, then pairs of `<arg_key>` and `<arg_value>`, as GLM-4.5 and later write it.

    A string is written without quotes and everything else as JSON, so the schema decides how a
    value is read, as in SGLang's `glm47` and vLLM's `glm47` parsers: a parameter of type string is
    taken as it is, any other as JSON if it is JSON.
    """
    name, opened, rest = body.partition("<arg_key>")
    name = name.strip()
    properties = schemas.get(name, {}).get("properties", {})
    arguments = {}
    while opened:
        key, closed, rest = rest.partition("</arg_key>")
        space, begun, rest = rest.partition("<arg_value>")
        value, ended, rest = rest.partition("</arg_value>")
        between, opened, rest = rest.partition("<arg_key>")
        if not (closed and begun and ended) or space.strip() or between.strip():
            return None
        key = key.strip()
        arguments[key] = value
        if properties.get(key, {}).get("type") != "string":
            try:
                arguments[key] = load_json(value)
            except ValueError:
                continue  # text, which the schema may refuse
    return _call(name, arguments)


def _separated(body: str, schemas: Schemas) -> Call | None:
    """DeepSeek-V3's type, separator, name and fenced JSON, or V3.1's name, separator and JSON."""
    head, _, tail = body.partition("<｜tool▁sep｜>")
    name, fence, fenced = tail.partition("```json")
    if fence:
        if head.strip() != "function" or not fenced.rstrip().endswith("```"):
            return None
        arguments = fenced.rstrip().removesuffix("```")
    else:
        name, arguments = head, tail
    try:
        return _call(name.strip(), load_json(arguments))
    except ValueError:
        return None


def _call(name: Any, arguments: Any) -> Call | None:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(name, arguments)


_FORMATS = (
    ToolFormat("GLM", "<tool_call>", "</tool_call>", ("<arg_key>", "<arg_value>"), _tagged),
    ToolFormat(
        "DeepSeek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ("<｜tool▁sep｜>",), _separated
    ),
    ToolFormat("JSON", "<tool_call>", "</tool_call>", ('"name"', '"arguments"'), _json_object),
)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None for one that is not known here."""
    plain = template.replace('\\"', '"')
    for known in _FORMATS:
        if all(mark in plain for mark in (known.begin, *known.also)):
            return known
    return None
