"""Recipes: ordered rules, written as YAML, that decide what becomes of every tensor.

    rules:
      - tensors: .*\\.mlp\\.experts\\.\\d+\\.(gate|up|down)_proj\\.weight   # matches whole names
        action: quantize                                               # dequantize, copy, drop
        scheme: {bits: 4, group_size: 32}                              # quantize only; or channel
        reason: routed experts are nearly all of the weights
        optional: true                                                 # may match nothing

The first rule that matches decides, and every tensor must be matched: what a recipe does not
speak of is an error, not a default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from halfbyte.core import Action, Recipe, Rule, Scheme
from halfbyte.errors import RecipeError

GroupSize = int | Literal["channel"]

GROUP_SIZES = (32, 64, 128)
"""Group sizes that the INT4 kernels of vLLM and SGLang know, besides one scale per channel."""

_RECIPE_KEYS = {"name", "description", "rules"}
_RULE_KEYS = {"tensors", "action", "scheme", "reason", "optional"}
_SCHEME_KEYS = {"bits", "group_size", "scale_dtype"}


def recipe_names() -> tuple[str, ...]:
    """Names of the built-in recipes."""
    files = (resources.files("halfbyte") / "recipes").iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def load_recipe(name_or_path: str | Path, group_size: GroupSize | None = None) -> Recipe:
    """A built-in recipe by name, or one of your own by the path of its YAML file.

    `group_size` replaces that of every rule that quantizes. Raises `RecipeError` with the line
    of whatever does not parse.
    """
    text, origin = _read(name_or_path)
    recipe = _parse(text, origin, Path(name_or_path).stem)
    if group_size is None:
        return recipe
    size = _group_size(group_size, "--group-size")
    rules = (
        r if r.scheme is None else replace(r, scheme=replace(r.scheme, group_size=size))
        for r in recipe.rules
    )
    return replace(recipe, rules=tuple(rules))


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe but where it came from, ready for JSON; `recipe_from_dict` reads it back."""
    return {
        "name": recipe.name,
        "description": recipe.description,
        "rules": [_rule_to_dict(rule) for rule in recipe.rules],
    }


def recipe_from_dict(record: Mapping[str, Any], origin: str = "report") -> Recipe:
    """Check and build a recipe. Raises `RecipeError` for unknown keys and values."""
    return _build(record, origin, str(record.get("name", origin)), origin, None)


def _read(name_or_path: str | Path) -> tuple[str, str]:
    """Text of a recipe and where it came from."""
    path, names = Path(name_or_path), recipe_names()
    if str(name_or_path) in names:
        file = resources.files("halfbyte") / "recipes" / f"{name_or_path}.yaml"
        return file.read_text(encoding="utf-8"), "built-in"
    if path.suffix not in {".yaml", ".yml"}:
        close = difflib.get_close_matches(str(name_or_path), names, n=1)
        raise RecipeError(
            f"there is no recipe {name_or_path}; built-in are {', '.join(names)}",
            hint=f"did you mean {close[0]}?" if close else "your own: --recipe FILE.yaml",
        )
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"cannot read the recipe {path}: {reason}") from error


def _parse(text: str, origin: str, name: str) -> Recipe:
    import yaml

    where = name if origin == "built-in" else origin
    try:
        tree = yaml.compose(text, yaml.SafeLoader)
        _require_unique_keys(tree, where)
        record = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(record, dict):
        raise RecipeError(f"{where} must hold a mapping with the key rules")
    return _build(record, where, name, origin, tree)


def _build(record: Mapping[str, Any], where: str, name: str, origin: str, tree: Any) -> Recipe:
    """A recipe from plain data; `tree` is the YAML it came from, if any, to name lines."""
    _require_keys(record, _RECIPE_KEYS, {"rules"}, where)
    rules = record["rules"]
    if not isinstance(rules, list) or not rules:
        raise RecipeError(f"{where}: rules must be a list that is not empty")
    numbers = range(1, len(rules) + 1)
    places = _rule_lines(tree) if tree is not None else [f"rule {number}" for number in numbers]
    return Recipe(
        name=str(record.get("name", name)),
        description=" ".join(str(record.get("description", "")).split()),
        rules=tuple(
            _rule(rule, f"{where}, {place}") for rule, place in zip(rules, places, strict=True)
        ),
        origin=origin,
    )


def _rule(record: Any, where: str) -> Rule:
    if not isinstance(record, Mapping):
        raise RecipeError(f"{where}: a rule is a mapping with tensors, action and reason")
    _require_keys(record, _RULE_KEYS, {"tensors", "action", "reason"}, where)
    pattern, action, reason = record["tensors"], record["action"], record["reason"]
    if not isinstance(pattern, str) or not isinstance(reason, str) or not reason.strip():
        raise RecipeError(f"{where}: tensors and reason must be text")
    try:
        re.compile(pattern)
    except re.error as error:
        raise RecipeError(f"{where}: {pattern} is not a regular expression: {error}") from error
    if action not in get_args(Action):
        raise RecipeError(f"{where}: action is {action!r}, not {', '.join(get_args(Action))}")
    optional = record.get("optional", False)
    if not isinstance(optional, bool):
        raise RecipeError(f"{where}: optional is {optional!r}, not true or false")
    scheme = record.get("scheme")
    if (scheme is not None) != (action == "quantize"):
        raise RecipeError(f"{where}: a scheme belongs to the action quantize, and only to it")
    return Rule(
        pattern=pattern,
        action=action,
        reason=" ".join(reason.split()),
        scheme=None if scheme is None else _scheme(scheme, where),
        optional=optional,
    )


def _scheme(record: Any, where: str) -> Scheme:
    if not isinstance(record, Mapping):
        raise RecipeError(f"{where}: a scheme is a mapping such as {{bits: 4, group_size: 32}}")
    _require_keys(record, _SCHEME_KEYS, {"group_size"}, where)
    bits, dtype = record.get("bits", 4), record.get("scale_dtype", "BF16")
    if bits != 4 or dtype != "BF16":
        raise RecipeError(f"{where}: the scheme is {bits} bits with {dtype} scales, not 4 and BF16")
    return Scheme(bits=4, group_size=_group_size(record["group_size"], where))


def _group_size(value: Any, where: str) -> int | None:
    if value == "channel":
        return None
    if type(value) is int and value in GROUP_SIZES:
        return value
    raise RecipeError(
        f"{where}: group size {value}; the servers' INT4 kernels know "
        f"{', '.join(map(str, GROUP_SIZES))} and channel"
    )


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    record: dict[str, Any] = {
        "tensors": rule.pattern,
        "action": rule.action,
        "reason": rule.reason,
        "optional": rule.optional,
    }
    if rule.scheme is not None:
        size = rule.scheme.group_size
        record["scheme"] = {
            "bits": rule.scheme.bits,
            "group_size": "channel" if size is None else size,
            "scale_dtype": rule.scheme.scale_dtype,
        }
    return record


def _require_keys(record: Mapping[str, Any], known: set[str], needed: set[str], where: str) -> None:
    for key in record:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            raise RecipeError(
                f"{where}: unknown key {key}; known are {', '.join(sorted(known))}",
                hint=f"did you mean {close[0]}?" if close else None,
            )
    if missing := sorted(needed - set(record)):
        raise RecipeError(f"{where}: {' and '.join(missing)} missing")


def _require_unique_keys(node: Any, where: str) -> None:
    """YAML lets the last of two equal keys win; here that is an error."""
    for mapping in _mappings(node):
        keys = [key.value for key, _ in mapping.value]
        for i, (key, _) in enumerate(mapping.value):
            if key.value in keys[:i]:
                raise RecipeError(
                    f"{where}, line {key.start_mark.line + 1}: the key {key.value} occurs twice"
                )


def _mappings(node: Any) -> Iterator[Any]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value)


def _rule_lines(tree: Any) -> list[str]:
    (rules,) = [value for key, value in tree.value if key.value == "rules"]
    return [f"line {rule.start_mark.line + 1}" for rule in rules.value]
