"""From a recipe to a decision for every tensor, checked against what servers can load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from halfbyte.core import Action, Checkpoint, Recipe, Rule, StoredWeight
from halfbyte.errors import RecipeError


def decide(
    recipe: Recipe, checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]
) -> list[tuple[StoredWeight, int]]:
    """Every logical tensor with the index of the rule that decides it, in the order given.

    Raises `RecipeError` when a tensor has no rule, a rule that is not optional has no tensor,
    or the outcome is one that no server loads: INT4 where servers read plain weights, or
    different decisions for linears that servers hold as one.
    """
    patterns = [re.compile(rule.pattern) for rule in recipe.rules]
    decisions = []
    for name, weight in weights.items():
        index = next((i for i, p in enumerate(patterns) if p.fullmatch(name)), None)
        if index is None:
            raise RecipeError(
                f"no rule of recipe {recipe.name} matches {name} in {checkpoint.path}",
                hint="add a rule for it to a recipe of your own and pass it with --recipe FILE",
            )
        decisions.append((weight, index))
    used = {index for _, index in decisions}
    for i, rule in enumerate(recipe.rules):
        if i not in used and not rule.optional:
            raise RecipeError(
                f"rule {i + 1} of recipe {recipe.name}, {rule.pattern}, decides no tensor of "
                f"{checkpoint.path}",
                hint="correct the pattern, or say `optional: true` if the tensors may be absent",
            )
    _require_loadable(recipe, decisions)
    return decisions


def action_on(weight: StoredWeight, rule: Rule) -> Action:
    """What a rule means for one weight, given how it is stored.

    There is nothing to dequantize in a plain weight, nor to quantize in one that is stored in
    the scheme asked for. Raises `RecipeError` when it is stored in another INT4 scheme: rounding
    twice loses accuracy for nothing.
    """
    if rule.action == "dequantize" and weight.encoding == "plain":
        return "copy"
    if rule.action == "quantize" and weight.encoding == "int4":
        if weight.scheme != rule.scheme:
            raise RecipeError(
                f"{weight.name} is stored as {weight.scheme}, the recipe asks for {rule.scheme}",
                hint="start from a checkpoint of higher precision",
            )
        return "copy"
    return rule.action


NEVER_INT4: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"\.kv_b_proj\.", "servers absorb it into attention and read it as a plain weight"),
        (r"\.(q_a_proj|kv_a_proj_with_mqa)\.", "SGLang loads the two as one plain linear"),
        (r"\.indexer\.", "servers read the indexer as plain weights"),
        (r"\.mlp\.gate\.", "the router is read as a plain weight"),
        (r"\.eh_proj\.", "the projection into the MTP layer is read as a plain weight"),
        (r"(^|\.)(embed_tokens|lm_head|head)\.", "embedding and head are read as plain weights"),
    )
)
"""Tensors that no recipe may make INT4, and why."""
_ANY_NEVER_INT4 = re.compile("|".join(pattern.pattern for pattern, _ in NEVER_INT4))

_HELD_AS_ONE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight", "all experts of a layer"),
        (r"(.*)\.(gate_proj|up_proj)\.weight", "gate and up projection"),
        (r"(.*)\.(q_a_proj|kv_a_proj_with_mqa)\.weight", "q_a and kv_a projection"),
        (r"(.*)\.(q_proj|k_proj|v_proj)\.weight", "q, k and v projection"),
    )
)
"""Weights that servers keep in one tensor, known by a common first group, and what they are."""


def _require_loadable(recipe: Recipe, decisions: list[tuple[StoredWeight, int]]) -> None:
    first: dict[tuple[str, str], tuple[StoredWeight, int]] = {}
    for weight, index in decisions:
        rule = recipe.rules[index]
        if rule.action == "quantize":
            _require_may_be_int4(weight, rule, index)
        partner = _partner(weight.name)
        if partner is None:
            continue
        other, other_index = first.setdefault(partner, (weight, index))
        if rule.action == "quantize" and (weight.encoding == "int4") != (other.encoding == "int4"):
            raise RecipeError(
                f"{weight.name} is stored as {weight.encoding}, but {other.name} as "
                f"{other.encoding}: they cannot be quantized alike",
                hint="start from a checkpoint that stores them alike",
            )
        if index == other_index:
            continue
        other_rule = recipe.rules[other_index]
        if _outcome(weight, rule) != _outcome(other, other_rule):
            raise RecipeError(
                f"{weight.name} is to be {_told(weight, rule)} (rule {index + 1}), "
                f"but {other.name} {_told(other, other_rule)} (rule {other_index + 1})",
                hint=f"servers hold {partner[1]} as one: decide them alike",
            )


def _require_may_be_int4(weight: StoredWeight, rule: Rule, index: int) -> None:
    reason = None
    if _ANY_NEVER_INT4.search(weight.name):
        reason = next(why for pattern, why in NEVER_INT4 if pattern.search(weight.name))
    elif len(weight.shape) != 2 or not weight.name.endswith(".weight"):
        reason = f"INT4 is for the two-dimensional weight of a linear, and this is {weight.shape}"
    elif weight.encoding == "plain" and weight.parts["weight"].dtype not in ("BF16", "F16", "F32"):
        reason = f"its values are {weight.parts['weight'].dtype}"
    if reason is not None:
        raise RecipeError(
            f"rule {index + 1}, {rule.pattern}, makes {weight.name} INT4: {reason}",
            hint="give the tensor a rule of its own before that one",
        )


def _partner(name: str) -> tuple[str, str] | None:
    for pattern, what in _HELD_AS_ONE:
        if match := pattern.fullmatch(name):
            return match[1], what
    return None


def _outcome(weight: StoredWeight, rule: Rule) -> tuple[str, Any]:
    """How a weight will be stored, comparable between weights."""
    action = action_on(weight, rule)
    if action == "quantize":
        return "int4", rule.scheme
    if action == "copy" and weight.encoding != "plain":
        return weight.encoding, weight.scheme
    return ("dropped" if action == "drop" else "plain"), None


def _told(weight: StoredWeight, rule: Rule) -> str:
    kind, scheme = _outcome(weight, rule)
    return {"int4": str(scheme), "fp8": "FP8", "plain": "unquantized", "dropped": "dropped"}[kind]
