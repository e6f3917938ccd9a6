"""Frozen dataclasses to JSON and back, checked field by field against their type hints.

A class may list `DERIVED` properties: they are written for readers of the file, and on the way
back they must equal what the fields say.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from halfbyte.errors import EvaluationError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Dataclasses become objects, tuples arrays; whole floats are written as integers."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += getattr(value, "DERIVED", ())
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [encode(entry) for entry in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def decode(kind: type[T], record: Any) -> T:
    """The inverse of `encode`. Raises EvaluationError that names the field which is wrong."""
    value: T = _decode(kind, record, "")
    return value


def _decode(kind: Any, record: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if record is None else _decode(inner, record, where)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, _expect(dict, record, where), where)
    if origin is Mapping:
        entries = _expect(dict, record, where).items()
        return {key: _decode(arguments[1], entry, f"{where}.{key}") for key, entry in entries}
    if origin is tuple:
        entries = enumerate(_expect(list, record, where))
        return tuple(_decode(arguments[0], entry, f"{where}[{i}]") for i, entry in entries)
    if issubclass(kind, tuple):  # a NamedTuple
        fields = get_type_hints(kind)
        if len(_expect(list, record, where)) != len(fields):
            raise EvaluationError(f"{where}: {len(record)} entries, {len(fields)} expected")
        return kind(
            *(
                _decode(hint, entry, f"{where}.{name}")
                for (name, hint), entry in zip(fields.items(), record, strict=True)
            )
        )
    return _scalar(kind, record, where)


def _dataclass(kind: Any, record: dict[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    derived = getattr(kind, "DERIVED", ())
    if odd := sorted(record.keys() ^ (names | set(derived))):
        what = "unknown field" if odd[0] in record else "missing field"
        raise EvaluationError(f"{_join(where, odd[0])}: {what}")
    values = {name: _decode(hints[name], record[name], _join(where, name)) for name in names}
    try:
        value = kind(**values)
    except EvaluationError as error:
        raise EvaluationError(f"{where}: {error}" if where else str(error)) from error
    for name in derived:
        if (told := record[name]) != (found := getattr(value, name)):
            raise EvaluationError(
                f"{_join(where, name)} is {told!r:.40}, the other fields make it {found!r}"
            )
    return value


def _scalar(kind: Any, record: Any, where: str) -> Any:
    if kind is not float:
        return _expect(kind, record, where)
    if isinstance(record, bool) or not isinstance(record, int | float):
        raise EvaluationError(f"{where}: expected a number, found {record!r:.40}")
    value = float(record)
    if not math.isfinite(value):
        raise EvaluationError(f"{where}: {value} is not a finite number")
    return value


def _expect(kind: Any, record: Any, where: str) -> Any:
    # bool is a subclass of int in Python, not in JSON.
    if not isinstance(record, kind) or (isinstance(record, bool) and kind is not bool):
        raise EvaluationError(
            f"{where or 'the report'}: expected {_JSON_NAMES[kind]}, found {record!r:.40}"
        )
    return record


_JSON_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "an integer",
    bool: "true or false",
}


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
