"""How vLLM and SGLang read a `quantization_config`, without either of them.

A config that one server reads as meant can be misread by another: they hold some linears as one
and give those names of their own, they match targets in another order, and they disagree on what
an unmatched linear is. The rules here are those of vLLM 0.33 and SGLang 0.5.23:

| | vLLM | SGLang |
|---|---|---|
| fused names known by their members | gate_up, qkv, fused_qkv_a | fused_qkv_a_proj_with_mqa |
| order of matching a target | name, members, class | name, class, members |
| no target matches | not quantized | refuses to load |
| `ignore` | name, or `re:` and a pattern for its start | the same, or a dotted suffix |
| MTP layer | `model.layers.<n>` | `model.decoder` |
| experts | expert 0 decides for the layer | the same; top-level format must be pack-quantized |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.formats.config import FUSED, config_count, text_config

Kind = Literal["linear", "experts", "head", "plain"]
"""What a module is to a server: `plain` ones it holds without asking the config."""

PACKED = "pack-quantized"
FP8_FORMATS = frozenset({"float-quantized", "naive-quantized"})


_WHOLE = re.compile(
    r".*(norm|\.mlp\.gate|\.(q_a_proj|kv_a_proj_with_mqa|eh_proj)|\.indexer\.\w+)(\.\w+)?"
)
"""Tensors that vLLM and SGLang do not divide: norms, routers, what compresses the inputs of latent
attention, the indexer, and the glue of an MTP layer."""


def is_divided(name: str) -> bool:
    """Whether servers split a tensor over the GPUs of a tensor-parallel group."""
    return _WHOLE.fullmatch(name) is None


def parallel_gpus(config: Mapping[str, Any], group: int) -> int:
    """GPUs that a tensor-parallel server can divide a model over, 8 at most; `group` columns of an
    expert share a scale."""
    model = text_config(config)
    heads = config_count(model, "num_attention_heads")
    columns = config_count(model, "moe_intermediate_size")
    fits = (n for n in (8, 4, 2) if heads and heads % n == 0 and columns % (n * group) == 0)
    return next(fits, 1)


class LoadRefused(Exception):
    """The server would stop with an error; the message is the reason."""


@dataclass(frozen=True)
class ServerConfig:
    """A `quantization_config` as both servers hold it in memory."""

    format: str
    ignore: tuple[str, ...]
    schemes: Mapping[str, str]
    """Target -> its scheme, such as "INT4 g32" or "FP8 block 128x128"."""
    formats: Mapping[str, str]
    """Target -> storage format of its group."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ServerConfig:
        """Raises `LoadRefused` for a config that neither server would take."""
        schemes, formats = {}, {}
        top = str(config.get("format"))
        try:
            for group in (config.get("config_groups") or {}).values():
                for target in group["targets"]:
                    schemes[target] = scheme_of(group["weights"])
                    formats[target] = group.get("format") or top
            ignore = tuple(config.get("ignore") or ())
            for pattern in (*schemes, *ignore):
                if pattern.startswith("re:"):
                    re.compile(pattern[3:])
        except (KeyError, TypeError, AttributeError, re.error) as error:
            raise LoadRefused(f"quantization_config is malformed: {error!r}") from error
        return cls(top, ignore, schemes, formats)


def scheme_of(weights: Mapping[str, Any]) -> str:
    """compressed-tensors weight arguments as a word: equal to `str` of a `Scheme` or an `Fp8`."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("actorder") in ("group", "dynamic"):
        raise LoadRefused(f"activation order {weights['actorder']} is no longer supported")
    note = "" if weights.get("symmetric", True) else " asymmetric"
    if weights.get("type", "int") == "int":
        size = "channel" if strategy == "channel" else f"g{weights.get('group_size')}"
        return f"INT{bits} {size}{note}"
    if strategy == "block":
        return f"FP{bits} block {'x'.join(map(str, weights['block_structure']))}{note}"
    return f"FP{bits} {strategy}{note}"


def vllm_scheme(config: ServerConfig, module: str, kind: Kind = "linear") -> str | None:
    """The scheme vLLM gives to a module of its own, None for unquantized; raises `LoadRefused`."""
    if kind == "plain":
        return None
    if kind == "experts":
        return _of_expert_0(config, module, vllm_scheme)
    members = _members(module, ("gate_up_proj", "qkv_proj", "fused_qkv_a_proj"))
    if _matches_any(module, config.ignore):
        return None
    ignored = [_matches_any(member, config.ignore) for member in members]
    if any(ignored):
        if not all(ignored):
            raise LoadRefused(f"only some members of {module} are ignored")
        return None
    target = (
        _first(module, config.schemes)
        or _first_of_all(members, config.schemes)
        or _by_class(config, kind)
    )
    if target is None:
        return None
    _require_format(config.schemes[target], config.formats[target])
    return config.schemes[target]


def sglang_scheme(config: ServerConfig, module: str, kind: Kind = "linear") -> str | None:
    """The scheme SGLang gives to a module of its own; otherwise as `vllm_scheme`."""
    if kind == "plain":
        return None
    if kind == "experts":
        scheme = _of_expert_0(config, module, sglang_scheme)
        if scheme is not None and scheme.startswith("INT4") and config.format != PACKED:
            raise LoadRefused(f"INT4 experts need the top-level format {PACKED}")
        return scheme
    members = _members(module, ("fused_qkv_a_proj_with_mqa",))
    if members and module not in config.ignore:
        ignored = [_ignored_by_sglang(member, config.ignore) for member in members]
        if any(ignored) and not all(ignored):
            raise LoadRefused(f"only some members of {module} are ignored")
    else:
        ignored = [_ignored_by_sglang(module, config.ignore)]
    if all(ignored):
        return None
    target = (
        _first(module, config.schemes)
        or _by_class(config, kind)
        or _first_of_all(members, config.schemes)
    )
    if target is None:
        if kind == "head":
            return None
        raise LoadRefused(f"no target matches {module}")
    scheme = config.schemes[target]
    _require_format(scheme, config.formats[target])
    linear = module.rpartition(".")[2]
    if scheme.startswith("INT") and linear in ("fused_qkv_a_proj_with_mqa", "kv_b_proj"):
        raise LoadRefused(f"{linear} cannot be {scheme}")
    return scheme


def _of_expert_0(
    config: ServerConfig, module: str, scheme: Callable[[ServerConfig, str], str | None]
) -> str | None:
    found = [scheme(config, f"{module}.0.{p}") for p in ("gate_proj", "up_proj", "down_proj")]
    if len(set(found)) > 1:
        raise LoadRefused("gate, up and down projection of expert 0 have different schemes")
    return found[0]


def _members(module: str, fused: tuple[str, ...]) -> list[str]:
    """The linears of the checkpoint that make up a fused one; none for others."""
    owner, _, linear = module.rpartition(".")
    return [f"{owner}.{m}" for m in FUSED[linear]] if linear in fused else []


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _ignored_by_sglang(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(name, p) or name.endswith(f".{p}") for p in patterns)


def _first(name: str, targets: Mapping[str, str]) -> str | None:
    return next((target for target in targets if _matches(name, target)), None)


def _first_of_all(members: list[str], targets: Mapping[str, str]) -> str | None:
    """The target of the first member, if every member has one."""
    found = [_first(member, targets) for member in members]
    return found[0] if found and all(found) else None


def _by_class(config: ServerConfig, kind: Kind) -> str | None:
    """A target that names the class: any that is part of a class name, whatever the case."""
    class_name = "ParallelLMHead" if kind == "head" else "ParallelLinear"
    for target in config.schemes:
        pattern = target[3:] if target.startswith("re:") else None
        if pattern is not None and re.match(pattern, class_name):
            return target
        if pattern is None and target.lower() in class_name.lower():
            return target
    return None


def _require_format(scheme: str, stored_format: str) -> None:
    if scheme.startswith("INT4") and stored_format != PACKED:
        raise LoadRefused(f"{scheme} in the format {stored_format}, not {PACKED}")
    if scheme.startswith("FP8") and stored_format not in FP8_FORMATS:
        raise LoadRefused(f"{scheme} in the format {stored_format}, not float-quantized")
