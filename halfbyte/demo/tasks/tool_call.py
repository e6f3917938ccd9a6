"""Scoring of one tool call: does it parse, satisfy the function's schema, and match the answer?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
}


def process_results(doc: Mapping[str, str], results: list[str]) -> dict[str, float]:
    """lm-eval's hook: metrics of one item. `doc` holds `tools`, `name` and `arguments`."""
    call = parse(results[0])
    schemas = {tool["name"]: tool["parameters"] for tool in json.loads(doc["tools"])}
    if call is None or call["name"] not in schemas:
        return {"valid": 0.0, "right_function": 0.0, "exact_arguments": 0.0}
    valid = satisfies(call["arguments"], schemas[call["name"]])
    right = call["name"] == doc["name"]
    exact = valid and right and call["arguments"] == json.loads(doc["arguments"])
    return {
        "valid": float(valid),
        "right_function": float(right),
        "exact_arguments": float(exact),
    }


def parse(answer: str) -> dict[str, Any] | None:
    """The call in `<tool_call>{"name": ..., "arguments": {...}}`, None when there is none."""
    text = answer.strip()
    if not text.startswith("<tool_call>"):
        return None
    # The closing tag is a stop string, so it is usually cut off.
    text = text.removeprefix("<tool_call>").split("</tool_call>")[0]
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return None
    well_typed = isinstance(call["name"], str) and isinstance(call["arguments"], dict)
    return call if well_typed else None


def satisfies(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Whether the arguments are exactly the required ones, each of its type and enumeration."""
    properties = schema["properties"]
    if set(arguments) != set(schema["required"]):
        return False
    return all(_fits(value, properties[name]) for name, value in arguments.items())


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kind = schema["type"]
    if kind == "array":  # of strings, in all functions here
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    # bool is a subclass of int in Python, not in JSON.
    if isinstance(value, bool) != (kind == "boolean"):
        return False
    return isinstance(value, PYTHON_TYPES[kind]) and value in schema.get("enum", [value])
