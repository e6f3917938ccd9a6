"""How vLLM and SGLang read configs: the outcomes that their own matching code gave on GLM names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from halfbyte.core import Scheme
from halfbyte.formats.config import Fp8, Storage
from halfbyte.formats.loaders import Finding, check_loaders
from halfbyte.formats.servers import LoadRefused, ServerConfig, sglang_scheme, vllm_scheme

INT4 = Scheme(group_size=32)
BLOCK = Fp8((128, 128))
MODEL = {"num_hidden_layers": 78, "num_nextn_predict_layers": 1, "n_shared_experts": 1}
"""No `n_routed_experts`: SGLang fuses shared experts only in models that have 256."""

ATTENTION = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

INT4_ARGS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
}
FP8_ARGS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "block",
    "block_structure": [128, 128],
    "dynamic": False,
}
KIMI_IGNORE = [
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "lm_head",
]
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"


def int4_group(*targets: str) -> dict[str, Any]:
    return {"targets": list(targets), "weights": INT4_ARGS, "format": "pack-quantized"}


def fp8_group(*targets: str) -> dict[str, Any]:
    return {"targets": list(targets), "weights": FP8_ARGS, "format": "float-quantized"}


def config(*groups: dict[str, Any], ignore: Iterable[str] = (), **top: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignore),
        **top,
    }


def glm(*, rest: Storage | None, experts: Storage | None = INT4) -> dict[str, Storage | None]:
    """Linears of a small GLM-5.2: a dense layer, a sparse one with an indexer, the MTP layer 78."""
    modules: dict[str, Storage | None] = {"model.embed_tokens": None, "lm_head": None}
    for layer in (0, 3, 78):
        own = f"model.layers.{layer}"
        modules |= {f"{own}.self_attn.{name}": rest for name in ATTENTION}
        modules |= {f"{own}.self_attn.indexer.wq_b": rest}
        modules |= {f"{own}.self_attn.indexer.{n}": None for n in ("wk", "weights_proj")}
        if layer == 0:
            modules |= {f"{own}.mlp.{name}": rest for name in MLP}
            continue
        modules |= {f"{own}.mlp.shared_experts.{name}": rest for name in MLP}
        modules |= {f"{own}.mlp.experts.{e}.{name}": experts for e in (0, 1) for name in MLP}
        modules |= {f"{own}.mlp.gate": None}
    modules["model.layers.78.eh_proj"] = None
    return modules


def blocked(findings: tuple[Finding, ...], loader: str) -> str:
    return "\n".join(f.message for f in findings if f.blocking and f.loader == loader)


def misread(findings: tuple[Finding, ...], loader: str) -> set[str]:
    """Last part of the names of modules that a server gets wrong, the first of each kind."""
    first = (f.message.split()[0] for f in findings if f.blocking and f.loader == loader)
    return {name.split(".", 3)[-1] if ".layers." in name else name for name in first}


# Table of outcomes, patterns A to E.


def test_pattern_a_is_read_as_meant_by_both() -> None:
    pattern = config(int4_group("Linear"), ignore=KIMI_IGNORE)
    assert check_loaders(pattern, glm(rest=None), MODEL) == ()


def test_pattern_b_an_explicit_list_in_checkpoint_names_fails_in_sglang() -> None:
    modules = glm(rest=None)
    pattern = config(int4_group("Linear"), ignore=[n for n, s in modules.items() if s is None])
    findings = check_loaders(pattern, modules, MODEL)
    assert blocked(findings, "vLLM") == ""
    assert {
        "mlp.gate_up_proj",
        "mlp.shared_experts.gate_up_proj",
        "model.decoder.mlp.shared_experts.down_proj",
        "model.decoder.self_attn.o_proj",
        "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
    } <= misread(findings, "SGLang")
    assert "would be read as INT4 g32" in blocked(findings, "SGLang")
    # What has a plain name of its own is ignored in both.
    assert "self_attn.o_proj" not in misread(findings, "SGLang")


def test_pattern_c_experts_only_leaves_sglang_without_a_target() -> None:
    findings = check_loaders(config(int4_group(EXPERTS)), glm(rest=None), MODEL)
    assert blocked(findings, "vLLM") == ""
    refusals = blocked(findings, "SGLang")
    assert "self_attn.o_proj" in refusals
    assert "refuses it: no target matches it" in refusals
    assert "experts " not in refusals


def test_pattern_d_checkpoint_names_of_fp8_linears_miss_fused_ones() -> None:
    pattern = config(
        fp8_group(
            r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj|kv_b_proj|o_proj)$",
            r"re:.*indexer\.wq_b$",
            r"re:.*shared_experts\.(gate|up|down)_proj$",
            r"re:.*mlp\.down_proj$",
        ),
        int4_group("Linear"),
        ignore=["lm_head", r"re:.*indexer\.(wk|weights_proj)$"],
    )
    findings = check_loaders(pattern, glm(rest=BLOCK), MODEL)
    assert misread(findings, "vLLM") == {"mlp.gate_up_proj"}
    assert {
        "self_attn.fused_qkv_a_proj_with_mqa",
        "mlp.gate_up_proj",
        "mlp.shared_experts.gate_up_proj",
    } <= misread(findings, "SGLang")


def test_pattern_e_fused_names_match_but_sglang_takes_the_block_size_from_linear() -> None:
    pattern = config(
        fp8_group(
            r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj|kv_b_proj|o_proj)$",
            r"re:.*self_attn\.fused_qkv_a_proj.*",
            r"re:.*indexer\.wq_b$",
            r"re:.*shared_experts\.(gate|up|gate_up|down)_proj$",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj$",
        ),
        int4_group("Linear"),
        ignore=["lm_head", r"re:.*indexer\.(wk|weights_proj)$"],
    )
    findings = check_loaders(pattern, glm(rest=BLOCK), MODEL)
    assert blocked(findings, "vLLM") == ""
    (only,) = (f for f in findings if f.loader == "SGLang")
    assert "block size is taken from the target Linear, which is INT4 g32" in only.message


def test_fp8_linear_with_targeted_experts_is_read_as_meant_by_both() -> None:
    pattern = config(
        fp8_group("Linear"),
        int4_group(EXPERTS),
        ignore=["lm_head", r"re:.*indexer\.(wk|weights_proj)$"],
    )
    assert check_loaders(pattern, glm(rest=BLOCK), MODEL) == ()


# Single rules.


def server(*targets: str, ignore: Iterable[str] = (), **top: Any) -> ServerConfig:
    return ServerConfig.of(config(int4_group(*targets), ignore=ignore, **top))


@pytest.mark.parametrize(
    ("pattern", "vllm", "sglang"),
    [
        ("model.layers.0.self_attn.o_proj", None, None),
        ("self_attn.o_proj", "INT4 g32", None),  # a dotted suffix
        ("attn.o_proj", "INT4 g32", "INT4 g32"),  # no dot before it
        ("model.layers.0.self_attn", "INT4 g32", "INT4 g32"),  # a prefix
        (r"re:self_attn\.o_proj", "INT4 g32", "INT4 g32"),  # anchored at the start
        (r"re:.*self_attn\.o_", None, None),  # but not at the end
    ],
)
def test_forms_of_ignore(pattern: str, vllm: str | None, sglang: str | None) -> None:
    name = "model.layers.0.self_attn.o_proj"
    assert vllm_scheme(server("Linear", ignore=[pattern]), name) == vllm
    assert sglang_scheme(server("Linear", ignore=[pattern]), name) == sglang


def test_targets_are_tried_in_another_order() -> None:
    members = r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa)$"
    mixed = ServerConfig.of(config(int4_group("Linear"), fp8_group(members)))
    owner = "model.layers.0.self_attn"
    assert vllm_scheme(mixed, f"{owner}.fused_qkv_a_proj") == "FP8 block 128x128"
    with pytest.raises(LoadRefused, match="fused_qkv_a_proj_with_mqa cannot be INT4 g32"):
        sglang_scheme(mixed, f"{owner}.fused_qkv_a_proj_with_mqa")


@pytest.mark.parametrize("scheme", [vllm_scheme, sglang_scheme])
def test_members_of_a_fused_linear_are_ignored_together(scheme: Any) -> None:
    fused = "fused_qkv_a_proj" if scheme is vllm_scheme else "fused_qkv_a_proj_with_mqa"
    name = f"model.layers.0.self_attn.{fused}"
    with pytest.raises(LoadRefused, match="only some members"):
        scheme(server("Linear", ignore=["re:.*q_a_proj$"]), name)
    both = ["re:.*q_a_proj$", "re:.*kv_a_proj_with_mqa$"]
    assert scheme(server("Linear", ignore=both), name) is None


def test_a_fused_name_is_ignored_as_a_whole_by_vllm_but_only_exactly_by_sglang() -> None:
    owner = "model.layers.0.self_attn"
    ignore = ["re:.*fused_qkv_a_proj"]
    assert vllm_scheme(server("Linear", ignore=ignore), f"{owner}.fused_qkv_a_proj") is None
    name = f"{owner}.fused_qkv_a_proj_with_mqa"
    with pytest.raises(LoadRefused, match="cannot be INT4"):
        sglang_scheme(server("Linear", ignore=ignore), name)
    assert sglang_scheme(server("Linear", ignore=[name]), name) is None


def test_int4_experts_need_the_top_level_format_in_sglang() -> None:
    mixed = server("Linear", format="mixed-precision")
    assert vllm_scheme(mixed, "model.layers.3.mlp.experts", "experts") == "INT4 g32"
    with pytest.raises(LoadRefused, match="top-level format pack-quantized"):
        sglang_scheme(mixed, "model.layers.3.mlp.experts", "experts")


def test_expert_0_speaks_for_all_and_its_projections_must_agree() -> None:
    others = server(r"re:.*experts\.[1-9]\d*\.")
    assert vllm_scheme(others, "model.layers.3.mlp.experts", "experts") is None
    only_down = server(r"re:.*experts\.\d+\.down_proj$")
    with pytest.raises(LoadRefused, match="expert 0 have different schemes"):
        vllm_scheme(only_down, "model.layers.3.mlp.experts", "experts")


@pytest.mark.parametrize(
    ("linear", "storage", "reason"),
    [
        ("self_attn.kv_b_proj", INT4, "kv_b_proj cannot be INT4"),
        ("self_attn.indexer.wk", INT4, "read as unquantized"),
        ("self_attn.indexer.weights_proj", BLOCK, "read as unquantized"),
        ("mlp.gate", INT4, "read as unquantized"),
    ],
)
def test_what_sglang_cannot_hold_quantized(linear: str, storage: Storage, reason: str) -> None:
    modules = glm(rest=INT4) | {f"model.layers.3.{linear}": storage}
    everything_int4 = config(int4_group("Linear"), fp8_group(r"re:.*weights_proj"))
    findings = check_loaders(everything_int4, modules, MODEL)
    mine = [f.message for f in findings if f.loader == "SGLang" and linear in f.message]
    assert any(reason in message for message in mine)


def test_an_fp8_wk_is_dequantized_on_load() -> None:
    modules = glm(rest=BLOCK) | {"model.layers.3.self_attn.indexer.wk": BLOCK}
    pattern = config(
        fp8_group("Linear"), int4_group(EXPERTS), ignore=["lm_head", r"re:.*(wk|weights_proj)$"]
    )
    assert check_loaders(pattern, modules, MODEL) == ()


def test_without_a_latent_query_kv_a_stands_alone() -> None:
    modules: dict[str, Storage | None] = {
        "model.layers.0.self_attn.kv_a_proj_with_mqa": None,
        "model.layers.0.self_attn.o_proj": INT4,
    }
    pattern = config(int4_group("Linear"), ignore=["re:.*kv_a_proj_with_mqa$"])
    assert check_loaders(pattern, modules, MODEL) == ()


def test_mtp_experts_left_float_need_both_prefixes() -> None:
    modules = glm(rest=None)
    modules |= {name: None for name in modules if name.startswith("model.layers.78.mlp.experts")}
    one = [*KIMI_IGNORE, r"re:model\.layers\.78\..*"]
    findings = check_loaders(config(int4_group("Linear"), ignore=one), modules, MODEL)
    assert misread(findings, "SGLang") == {"model.decoder.mlp.experts"}
    assert blocked(findings, "vLLM") == ""
    both = [*one, r"re:model\.decoder\..*"]
    assert check_loaders(config(int4_group("Linear"), ignore=both), modules, MODEL) == ()


def test_experts_stored_in_two_ways_are_one_module_to_both() -> None:
    modules = glm(rest=None) | {"model.layers.3.mlp.experts.1.up_proj": None}
    findings = check_loaders(config(int4_group("Linear"), ignore=KIMI_IGNORE), modules, MODEL)
    assert [f.loader for f in findings] == ["vLLM", "SGLang"]
    assert "stored as INT4 g32 and unquantized" in findings[0].message


@pytest.mark.parametrize(
    ("model", "rest", "linear", "warned"),
    [
        ({"n_routed_experts": 256}, BLOCK, fp8_group("Linear"), True),
        ({"n_routed_experts": 32}, BLOCK, fp8_group("Linear"), False),
        ({"n_routed_experts": 256}, None, int4_group("Linear"), False),
        ({"n_routed_experts": 160, "model_type": "glm4_moe"}, None, int4_group("Linear"), True),
    ],
)
def test_sglang_fuses_shared_experts_unless_told_not_to(
    model: dict[str, Any], rest: Storage | None, linear: dict[str, Any], warned: bool
) -> None:
    ignore = KIMI_IGNORE if rest is None else ["lm_head", r"re:.*indexer\.(wk|weights_proj)$"]
    findings = check_loaders(
        config(linear, int4_group(EXPERTS), ignore=ignore), glm(rest=rest), MODEL | model
    )
    assert [(f.loader, f.blocking) for f in findings] == ([("SGLang", False)] if warned else [])
    assert all("--disable-shared-experts-fusion" in f.message for f in findings)


def test_equal_findings_are_counted_not_repeated() -> None:
    modules: dict[str, Storage | None] = {
        f"model.layers.{i}.self_attn.o_proj": None for i in range(70)
    }
    findings = check_loaders(config(int4_group("Linear")), modules, MODEL)
    assert [f.loader for f in findings] == ["vLLM", "SGLang"]
    assert "model.layers.0.self_attn.o_proj (and 69 more such modules)" in findings[0].message


@pytest.mark.parametrize(
    "broken",
    [
        {"config_groups": {"group_0": {"targets": ["Linear"]}}},
        {"config_groups": {"group_0": {"targets": 3, "weights": INT4_ARGS}}},
        {"config_groups": ["Linear"]},
        {"config_groups": {}, "ignore": ["re:("]},
        {"config_groups": {}, "ignore": [7]},
    ],
)
def test_malformed_configs_are_findings(broken: dict[str, Any]) -> None:
    findings = check_loaders(broken, glm(rest=None), MODEL)
    assert [f.loader for f in findings] == ["vLLM", "SGLang"]
    assert all("malformed" in f.message for f in findings)


def test_activation_order_groups_are_refused() -> None:
    group = int4_group("Linear") | {"weights": INT4_ARGS | {"actorder": "group"}}
    findings = check_loaders(config(group, ignore=KIMI_IGNORE), glm(rest=None), MODEL)
    assert {f.loader for f in findings} == {"vLLM", "SGLang"}
    assert "activation order group" in findings[0].message


def test_no_config_means_nothing_is_quantized() -> None:
    assert check_loaders(None, glm(rest=None, experts=None), MODEL) == ()
    assert check_loaders(None, glm(rest=None), MODEL)
