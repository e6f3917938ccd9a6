"""Questions with tools, and the judgement on an answer: each metric is 1 or 0 for every item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend

from halfbyte.errors import EvaluationError
from halfbyte.evals.tool_answers import Answer, Schemas

PATTERN_SECONDS = 1.0
"""What a schema's pattern may take on one string. Longer is an error, never a judgement."""
_REFUSED = ("$ref", "$dynamicRef", "patternProperties")
"""Keywords that reach outside a definition, or match keys by patterns without a limit."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call: name, description and the schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema (draft 2020-12)."""

    def __post_init__(self) -> None:
        try:
            Draft202012Validator.check_schema(self.parameters)
        except SchemaError as error:
            raise EvaluationError(
                f"function {self.name}: its parameters are no JSON schema: {error.message:.200}"
            ) from error
        if refused := set(_REFUSED) & set(_keywords(self.parameters)):
            raise EvaluationError(
                f"function {self.name}: {min(refused)} is not supported in a schema"
            )

    @property
    def definition(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        """Whether arguments satisfy the schema. Raises EvaluationError for a pattern that takes
        too long to match."""
        return bool(self._validator.is_valid(arguments))

    @cached_property
    def _validator(self) -> Any:
        return _Validator(self.parameters)


def _keywords(schema: Any) -> Iterator[str]:
    """Every key at every level."""
    if isinstance(schema, dict):
        yield from schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for value in schema:
            yield from _keywords(value)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """jsonschema's keyword with a limit: some patterns take exponential time on some strings."""
    if not isinstance(instance, str):
        return
    try:
        found = regex.search(pattern, instance, timeout=PATTERN_SECONDS)
    except TimeoutError as error:
        raise EvaluationError(
            f"pattern {pattern!r:.80} takes more than {PATTERN_SECONDS:g} s on a string of "
            f"{len(instance)} characters",
            hint="simplify the pattern in the function's schema",
        ) from error
    if not found:
        yield ValidationError(f"{instance!r:.80} does not match {pattern!r:.80}")


_Validator = extend(Draft202012Validator, {"pattern": _pattern})


@dataclass(frozen=True)
class ExpectedCall:
    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    """Whether arguments are among the right ones."""


@dataclass(frozen=True)
class ToolItem:
    """One question. `expected` None asks for a call, whichever; an empty one for none."""

    number: int
    """Line in its file, from 0."""
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...]
    expected: tuple[ExpectedCall, ...] | None
    document: str
    """The line as it is."""
    target: str
    """The right answer as it is in the file."""

    @cached_property
    def schemas(self) -> Schemas:
        return {tool.name: tool.parameters for tool in self.tools}


@dataclass(frozen=True)
class ToolTask:
    """Items that the same metrics apply to."""

    name: str
    items: tuple[ToolItem, ...]
    metrics: tuple[str, ...]
    """Keys of `METRICS`, the primary one first."""


def called(item: ToolItem, answer: Answer) -> bool:
    """It calls, whatever it calls. Where a call is expected this is the right decision."""
    return answer.called


def no_call(item: ToolItem, answer: Answer) -> bool:
    """It does not even begin a call: the right decision where none is expected."""
    return not answer.called


def valid(item: ToolItem, answer: Answer) -> bool:
    """It calls, and every call parses, names a function it was given and satisfies its schema."""
    tools = {tool.name: tool for tool in item.tools}
    return bool(answer.calls) and all(
        call is not None and call.name in tools and tools[call.name].accepts(call.arguments)
        for call in answer.calls
    )


def right_function(item: ToolItem, answer: Answer) -> bool:
    """Every call parses, and the functions are the expected ones, each as often, in any order."""
    names = [call.name for call in answer.calls if call is not None]
    expected = [call.name for call in item.expected or ()]
    return None not in answer.calls and sorted(names) == sorted(expected)


def exact_arguments(item: ToolItem, answer: Answer) -> bool:
    """The calls are the expected ones one to one, in any order. Each expected call takes the first
    one left that matches, as BFCL's checker does. The right answers of a file rule even where they
    break its schemas, as some of BFCL's do."""
    left = list(answer.calls)
    for one in item.expected or ():
        for at, call in enumerate(left):
            if call is not None and call.name == one.name and one.matches(call.arguments):
                del left[at]
                break
        else:
            return False
    return not left


METRICS: Mapping[str, Callable[[ToolItem, Answer], bool]] = {
    function.__name__: function
    for function in (called, no_call, valid, right_function, exact_arguments)
}

CALL = ("exact_arguments", "right_function", "valid", "called")
NO_CALL = ("no_call",)
ANY_CALL = ("called", "valid")
"""Metrics of items that expect certain calls, no call, and a call of whichever function."""
