"""Files of questions with tools: lines of our own form, and those of BFCL.

*Lines*, `NAME.jsonl`: an object a line with `user` (what is asked), `tools` (a list of functions,
or JSON text of one), and the answer: `name` and `arguments` (an object, or JSON text of one), or
`name: null` where no function is to be called. Arguments must be equal as JSON: numbers by value,
strings to the character.

*BFCL*, the Berkeley Function Calling Leaderboard: `BFCL_v4_CATEGORY.json` with the right answers in
`possible_answer/` beside it, as the package bfcl-eval 2026.3.23 ships them. Of each argument any of
several values is right, by the rules of its checker (`eval_checker/ast_eval/ast_checker.py`). Names
of functions are kept as they are, dots included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.errors import EvaluationError
from halfbyte.evals.tool_answers import load_json
from halfbyte.evals.tool_items import (
    ANY_CALL,
    CALL,
    NO_CALL,
    ExpectedCall,
    Tool,
    ToolItem,
    ToolTask,
)

MAX_FILE_BYTES = 256 << 20

BFCL_CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
"""Those with one turn and arguments that are JSON. In others arguments are Java or JavaScript, or
calls are run and answered."""

_BFCL_FILE = re.compile(r"BFCL_v\d+_(\w+)\.json")
_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_BFCL_IGNORED = re.compile(r"[ ,./\-_*^]")


class ToolFiles(NamedTuple):
    tasks: tuple[ToolTask, ...]
    left_out: tuple[str, ...]
    """Categories of a BFCL folder that are not supported."""


def read_tool_tasks(path: Path) -> ToolFiles:
    """The tasks of a file, or of a BFCL folder.

    Lines that expect a call and lines that expect none become two tasks, NAME and NAME_no_call.
    Raises EvaluationError, with file and line, for what cannot be read, and with its name for a
    category that is not supported; of a folder those are left out.
    """
    if not path.is_dir():
        return ToolFiles(tuple(_tasks_of(path)), ())
    files = {
        found[1]: file for file in path.iterdir() if (found := _BFCL_FILE.fullmatch(file.name))
    }
    tasks = [task for name in BFCL_CATEGORIES if name in files for task in _tasks_of(files[name])]
    if not tasks:
        raise EvaluationError(
            f"{path}: no BFCL file of a supported category in the folder",
            hint=f"name a .jsonl file, or a folder with BFCL_v4_{BFCL_CATEGORIES[0]}.json",
        )
    return ToolFiles(tuple(tasks), tuple(sorted(files.keys() - set(BFCL_CATEGORIES))))


def _tasks_of(path: Path) -> list[ToolTask]:
    if found := _BFCL_FILE.fullmatch(path.name):
        return [_bfcl_task(path, found[1])]
    if path.suffix != ".jsonl":
        raise EvaluationError(
            f"{path}: neither a .jsonl file nor one of BFCL",
            hint="lines of a .jsonl file are objects with user, tools, name, arguments",
        )
    items = _each(path, _lines(path), _own_item)
    sides = (
        ToolTask(path.stem, tuple(item for item in items if item.expected), CALL),
        ToolTask(f"{path.stem}_no_call", tuple(i for i in items if not i.expected), NO_CALL),
    )
    return [task for task in sides if task.items]


def _lines(path: Path) -> list[str]:
    """Lines that hold anything."""
    if not path.is_file():
        raise EvaluationError(f"{path}: no such file")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise EvaluationError(f"{path}: {size:,} bytes, at most {MAX_FILE_BYTES:,} are read")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: not UTF-8 text: {error}") from error
    if lines := [line for line in text.split("\n") if line.strip()]:
        return lines
    raise EvaluationError(f"{path}: no lines in the file")


def _each(path: Path, lines: Iterable[str], read: Callable[[int, str], ToolItem]) -> list[ToolItem]:
    """The items of lines, with the place of the one that is wrong."""
    items = []
    for number, line in enumerate(lines):
        try:
            items.append(read(number, line))
        except (EvaluationError, ValueError) as error:
            raise EvaluationError(f"{path}: line {number + 1}: {error}") from error
    return items


def _own_item(number: int, line: str) -> ToolItem:
    record = _object(load_json(line))
    tools = _tools(_embedded(record.get("tools")))
    name, arguments = record.get("name"), _embedded(record.get("arguments"))
    expected: tuple[ExpectedCall, ...] = ()
    if name is not None:
        if name not in [tool.name for tool in tools]:
            raise ValueError(f"the name {name!r:.40} is none of the tools")
        expected = (ExpectedCall(name, partial(equal_json, _object(arguments, "arguments"))),)
    return ToolItem(
        number=number,
        messages=({"role": "user", "content": _field(record, "user", str)},),
        tools=tools,
        expected=expected,
        document=line,
        target=json.dumps([name, arguments], sort_keys=True),
    )


def _embedded(value: Any) -> Any:
    return load_json(value) if isinstance(value, str) else value


def _object(value: Any, name: str = "a line") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, it is {value!r:.40}")
    return value


def _field(record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, it is {value!r:.40}")
    return value


def _tools(definitions: Any) -> tuple[Tool, ...]:
    """Functions, bare or as {"type": "function", "function": {...}}."""
    if not isinstance(definitions, list):
        raise ValueError(f"tools must be a list of functions, it is {definitions!r:.40}")
    functions = [_object(d, "a function") for d in definitions]
    functions = [_object(f.get("function", f), "a function") for f in functions]
    tools = tuple(
        Tool(
            _field(function, "name", str),
            str(function.get("description", "")),
            _object(function.get("parameters", {"type": "object", "properties": {}}), "parameters"),
        )
        for function in functions
    )
    if len({tool.name for tool in tools}) != len(tools):
        raise ValueError("two functions have the same name")
    return tools


def equal_json(expected: Any, value: Any) -> bool:
    """Equality of JSON values: 5 is 5.0, true is not 1."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(
            equal_json(expected[key], value[key]) for key in expected
        )
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(map(equal_json, expected, value))
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    return bool(expected == value)


def possible_answers(path: Path) -> Path:
    """Where BFCL has the answers to the questions in a file."""
    return path.parent / "possible_answer" / path.name


def _bfcl_task(path: Path, category: str) -> ToolTask:
    if category not in BFCL_CATEGORIES:
        raise EvaluationError(
            f"{path}: BFCL's category {category} is not supported",
            hint=f"supported are {', '.join(BFCL_CATEGORIES)}",
        )
    lines = _lines(path)
    if category.endswith("relevance"):  # irrelevance, too
        expected = () if category.endswith("irrelevance") else None
        items = _each(path, lines, lambda n, line: _bfcl_item(n, line, expected, category))
        return ToolTask(f"bfcl_{category}", tuple(items), ANY_CALL if expected is None else NO_CALL)
    answers_path = possible_answers(path)
    answers = _lines(answers_path)
    if len(answers) != len(lines):
        raise EvaluationError(f"{path}: {len(lines)} questions, {len(answers)} in {answers_path}")
    items = _each(path, lines, lambda n, line: _bfcl_answered(n, line, answers[n]))
    return ToolTask(f"bfcl_{category}", tuple(items), CALL)


def _bfcl_answered(number: int, line: str, answer: str) -> ToolItem:
    question, record = _object(load_json(line)), _object(load_json(answer))
    if question.get("id") != record.get("id"):
        raise ValueError(
            f"the question is {question.get('id')}, the possible answer is of {record.get('id')}"
        )
    schemas = {t.name: t.parameters for t in _bfcl_tools(question)}
    expected = []
    for call in _field(record, "ground_truth", list):
        ((name, allowed),) = _object(call, "a possible answer").items()
        allowed = {key: _field(_object(allowed), key, list) for key in _object(allowed)}
        if name not in schemas:
            raise ValueError(f"the possible answer calls {name}, which is no function of it")
        required = frozenset(schemas[name].get("required", ()))
        expected.append(ExpectedCall(name, partial(is_possible, required, allowed)))
    if not expected:
        raise ValueError("the possible answer has no call")
    return _bfcl_item(number, line, tuple(expected), answer)


def _bfcl_item(
    number: int, line: str, expected: tuple[ExpectedCall, ...] | None, target: str
) -> ToolItem:
    question = _object(load_json(line))
    turns = _field(question, "question", list)
    if len(turns) != 1 or not isinstance(turns[0], list) or not turns[0]:
        raise ValueError(f"the question has {len(turns)} turns, 1 is supported")
    messages = tuple(
        {key: _field(_object(message, "a message"), key, str) for key in ("role", "content")}
        for message in turns[0]
    )
    return ToolItem(number, messages, _bfcl_tools(question), expected, line, target)


def _bfcl_tools(question: Mapping[str, Any]) -> tuple[Tool, ...]:
    functions = _field(question, "function", list)
    return _tools([{**_object(f, "a function"), **_json_types(f)} for f in functions])


def _json_types(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": _json_type(function.get("parameters"))}


def _json_type(schema: Any) -> Any:
    """BFCL's names of types as JSON schema has them; "any" is no constraint."""
    if not isinstance(schema, dict):
        return schema
    translated = dict(schema)
    kind = translated.pop("type", None)
    if kind is not None and kind != "any":
        translated["type"] = _BFCL_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(properties := translated.get("properties"), dict):
        translated["properties"] = {name: _json_type(s) for name, s in properties.items()}
    for key in ("items", "additionalProperties"):
        if key in translated:
            translated[key] = _json_type(translated[key])
    return translated


def is_possible(
    required: frozenset[str], allowed: Mapping[str, list[Any]], arguments: Mapping[str, Any]
) -> bool:
    """BFCL's rule for a call: each argument has one of its `allowed` values, and only those that
    the schema does not require, and that allow "", may be left out."""
    if not required <= arguments.keys() <= allowed.keys():
        return False
    left_out = allowed.keys() - arguments.keys()
    return all("" in allowed[key] for key in left_out) and all(
        _one_of(allowed[key], value) for key, value in arguments.items()
    )


def _one_of(allowed: list[Any], value: Any) -> bool:
    return any(_fits(one, value) for one in allowed)


def _fits(allowed: Any, value: Any) -> bool:
    """Whether a value is an allowed one. An object's fields have lists of allowed values, too."""
    if isinstance(allowed, dict) and isinstance(value, dict):
        fields = {key: one if isinstance(one, list) else [one] for key, one in allowed.items()}
        return is_possible(frozenset(), fields, value)
    if isinstance(allowed, list) and isinstance(value, list):
        return len(allowed) == len(value) and all(map(_fits, allowed, value))
    if isinstance(allowed, str) and isinstance(value, str):
        return _plain(allowed) == _plain(value)
    return equal_json(allowed, value)


def _plain(text: str) -> str:
    """Case, spaces and some punctuation do not matter, nor which quotes are used."""
    return _BFCL_IGNORED.sub("", text).lower().replace("'", '"')
