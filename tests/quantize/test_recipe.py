"""Recipes: what parses, what is refused and where, and how rules decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.core import Recipe, Rule, Scheme
from halfbyte.errors import RecipeError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.weights import logical_weights
from halfbyte.quantize.decide import NEVER_INT4, decide
from halfbyte.quantize.recipe import (
    load_recipe,
    recipe_from_dict,
    recipe_names,
    recipe_to_dict,
)

EXPERTS = r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight"


def recipe(*rules: Rule) -> Recipe:
    return Recipe("mine", "", rules)


def quantize(pattern: str, group_size: int | None = 32) -> Rule:
    return Rule(pattern, "quantize", "small", Scheme(group_size=group_size))


def dequantize(pattern: str = ".*") -> Rule:
    return Rule(pattern, "dequantize", "precise")


def decided(folder: Path, chosen: Recipe) -> dict[str, int]:
    checkpoint = open_checkpoint(folder)
    pairs = decide(chosen, checkpoint, logical_weights(checkpoint))
    return {weight.name: rule for weight, rule in pairs}


# Reading.


def test_built_in_recipes_parse_and_give_reasons() -> None:
    assert recipe_names() == ("experts-and-dense", "glm-5", "glm-5-fp8-rest")
    for name in recipe_names():
        loaded = load_recipe(name)
        assert (loaded.name, loaded.origin) == (name, "built-in")
        assert loaded.description
        assert all(rule.reason for rule in loaded.rules)


def test_default_recipe_quantizes_the_routed_experts_only() -> None:
    rules = load_recipe("glm-5").rules
    assert [r.pattern for r in rules if r.action == "quantize"] == [EXPERTS]
    assert rules[0].scheme == Scheme(4, 32, "BF16")


@pytest.mark.parametrize(("given", "scheme"), [(128, "INT4 g128"), ("channel", "INT4 channel")])
def test_group_size_replaces_that_of_every_rule(given: int, scheme: str) -> None:
    schemes = {str(r.scheme) for r in load_recipe("experts-and-dense", given).rules if r.scheme}
    assert schemes == {scheme}


@pytest.mark.parametrize("given", [0, 16, 48, True, "row"])
def test_group_sizes_that_no_kernel_knows_are_refused(given: int) -> None:
    with pytest.raises(RecipeError, match="32, 64, 128 and channel"):
        load_recipe("glm-5", given)


def test_unknown_name_lists_the_known_and_suggests() -> None:
    with pytest.raises(RecipeError, match="built-in are experts-and-dense, glm-5") as caught:
        load_recipe("glm5")
    assert caught.value.hint == "did you mean glm-5?"


def test_own_recipe_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rules:\n  - {tensors: .*, action: copy, reason: why not}\n")
    loaded = load_recipe(file)
    assert (loaded.name, loaded.origin) == ("mine", str(file))
    assert loaded.rules == (Rule(".*", "copy", "why not"),)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*No such file"):
        load_recipe(tmp_path / "absent.yaml")


GOOD = "  - {tensors: .*, action: copy, reason: r}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a mapping"),
        ("- a\n", "must hold a mapping"),
        ("rules: []\n", "must be a list that is not empty"),
        ("rules: {a: 1}\n", "must be a list that is not empty"),
        ("description: only\n", "rules missing"),
        ("rules:\n" + GOOD + "speed: 9\n", "unknown key speed"),
        ("rules:\n  - {a: [}\n", "not valid YAML"),
        ("rules:\n" + GOOD + "rules:\n" + GOOD, "line 3: the key rules occurs twice"),
        ("rules:\n" + GOOD + "  - {tensors: a, tensors: b}\n", "line 3: the key tensors occurs"),
        ("rules:\n" + GOOD + "  - 7\n", "line 3: a rule is a mapping"),
        ("rules:\n" + GOOD + "  - {tensors: a, action: copy}\n", "line 3: reason missing"),
        ("rules:\n  - {tensor: a, action: copy, reason: r}\n", "line 2: unknown key tensor;"),
        ("rules:\n  - {tensors: 5, action: copy, reason: r}\n", "line 2: tensors and reason"),
        ("rules:\n  - {tensors: a, action: copy, reason: ' '}\n", "line 2: tensors and reason"),
        ("rules:\n  - {tensors: '(', action: copy, reason: r}\n", "line 2: .* not a regular"),
        ("rules:\n  - {tensors: a, action: squash, reason: r}\n", "line 2: action is 'squash'"),
        ("rules:\n  - {tensors: a, action: copy, reason: r, optional: 1}\n", "optional is 1"),
        ("rules:\n  - {tensors: a, action: quantize, reason: r}\n", "scheme belongs to"),
        (
            "rules:\n  - {tensors: a, action: copy, reason: r, scheme: {group_size: 32}}\n",
            "scheme belongs to",
        ),
        (
            "rules:\n  - {tensors: a, action: quantize, reason: r, scheme: {bits: 4}}\n",
            "group_size missing",
        ),
        (
            "rules:\n  - {tensors: a, action: quantize, reason: r, scheme: INT4}\n",
            "a scheme is a mapping",
        ),
        (
            "rules:\n  - {tensors: a, action: quantize, reason: r, "
            "scheme: {bits: 3, group_size: 32}}\n",
            "3 bits with BF16 scales",
        ),
        (
            "rules:\n  - {tensors: a, action: quantize, reason: r, scheme: {group_size: 33}}\n",
            "group size 33",
        ),
        ("rules: &again [*again]\n", "a rule is a mapping|not valid YAML"),
        ("!!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_what_does_not_parse_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(file)
    assert "\n" not in str(caught.value)
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("group_size", [None, "channel"])
def test_recipe_survives_json(name: str, group_size: None) -> None:
    loaded = load_recipe(name, group_size)
    again = recipe_from_dict(json.loads(json.dumps(recipe_to_dict(loaded))), origin="built-in")
    assert again == loaded


# Deciding.


def test_first_match_decides_and_order_is_kept(tiny: Path) -> None:
    names = list(logical_weights(open_checkpoint(tiny)))
    rules = decided(tiny, recipe(quantize(EXPERTS), dequantize()))
    assert list(rules) == names
    assert {name for name, rule in rules.items() if rule == 0} == {
        name for name in names if ".experts." in name
    }


def test_a_pattern_must_match_the_whole_name(tiny: Path) -> None:
    with pytest.raises(RecipeError, match="decides no tensor"):
        decided(tiny, recipe(quantize(r"experts\.\d+\.up_proj"), dequantize()))


def test_a_tensor_without_a_rule_is_an_error(tiny: Path) -> None:
    with pytest.raises(RecipeError, match=r"no rule of recipe mine matches lm_head\.weight"):
        decided(tiny, recipe(dequantize("model.*")))


def test_a_rule_without_a_tensor_is_an_error_unless_optional(tiny: Path) -> None:
    rule = dequantize(r".*\.nothing")
    with pytest.raises(RecipeError, match=r"rule 1 of recipe mine, \.\*\\\.nothing, decides no"):
        decided(tiny, recipe(rule, dequantize()))
    optional = Rule(rule.pattern, "copy", "r", optional=True)
    assert set(decided(tiny, recipe(optional, dequantize())).values()) == {1}


def test_one_expert_cannot_be_left_out(tiny: Path) -> None:
    spared = dequantize(r"model\.layers\.2\.mlp\.experts\.1\..*")
    with pytest.raises(RecipeError, match=r"layers\.2\.mlp\.experts\.1\..*unquantized") as caught:
        decided(tiny, recipe(spared, quantize(EXPERTS), dequantize()))
    assert caught.value.hint is not None
    assert "all experts of a layer" in caught.value.hint


def test_down_projections_cannot_have_a_scheme_of_their_own(tiny: Path) -> None:
    down = quantize(r".*\.experts\.\d+\.down_proj\.weight", 64)
    with pytest.raises(RecipeError, match=r"INT4 g32.*INT4 g64|INT4 g64.*INT4 g32"):
        decided(tiny, recipe(down, quantize(EXPERTS), dequantize()))


def test_layers_may_differ(tiny: Path) -> None:
    spared = dequantize(r"model\.layers\.2\.mlp\.experts\..*")
    rules = decided(tiny, recipe(spared, quantize(EXPERTS), dequantize()))
    assert rules["model.layers.2.mlp.experts.0.up_proj.weight"] == 0
    assert rules["model.layers.3.mlp.experts.0.up_proj.weight"] == 1


@pytest.mark.parametrize(
    ("one", "model_type"),
    [
        (r".*\.mlp\.gate_proj\.weight", "glm_moe_dsa"),
        (r".*\.shared_experts\.up_proj\.weight", "glm_moe_dsa"),
        (r".*\.self_attn\.k_proj\.weight", "glm4_moe"),
    ],
)
def test_linears_that_servers_fuse_are_decided_alike(
    tiny: Path, tmp_path: Path, one: str, model_type: str
) -> None:
    from halfbyte.testing.tiny import write_tiny

    folder = (
        tiny if model_type == "glm_moe_dsa" else write_tiny(tmp_path / "t", model_type="glm4_moe")
    )
    with pytest.raises(RecipeError, match=r"INT4 g32.*unquantized|unquantized.*INT4 g32") as caught:
        decided(folder, recipe(quantize(one), dequantize()))
    assert caught.value.hint is not None
    assert "servers hold" in caught.value.hint


def test_q_a_and_kv_a_share_their_precision(tiny: Path) -> None:
    kept = Rule(r".*\.q_a_proj\.weight", "copy", "r")
    with pytest.raises(RecipeError, match=r"FP8.*unquantized|unquantized.*FP8"):
        decided(tiny, recipe(kept, dequantize()))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.1.self_attn.q_a_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.self_attn.indexer.wk.weight",
        "model.layers.0.self_attn.indexer.wq_b.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.4.eh_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ],
)
def test_what_servers_read_as_plain_weights_cannot_be_int4(tiny: Path, name: str) -> None:
    assert name in logical_weights(open_checkpoint(tiny))
    with pytest.raises(RecipeError, match=f"makes {name.replace('.', chr(92) + '.')} INT4: "):
        decided(tiny, recipe(quantize(name.replace(".", r"\.")), dequantize()))


def test_every_refusal_gives_a_reason() -> None:
    assert all(reason for _, reason in NEVER_INT4)
