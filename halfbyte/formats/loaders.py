"""Checks that vLLM and SGLang would read every linear of a checkpoint as it is stored.

Builds the modules that each server builds from the checkpoint's linears, asks `formats.servers`
what the server would take them for, and adds what SGLang cannot load although it matches it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.formats.config import FUSED, Fp8, Storage, config_count
from halfbyte.formats.servers import (
    PACKED,
    Kind,
    LoadRefused,
    ServerConfig,
    sglang_scheme,
    vllm_scheme,
)
from halfbyte.formats.weights import layer_index

Loader = Literal["vLLM", "SGLang"]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(?:gate|up|down)_proj")
_PLAIN = re.compile(
    r".*\.(mlp\.gate|eh_proj|self_attn\.indexer\.(wk|weights_proj))|(.*\.)?embed_tokens"
)
_HEAD = re.compile(r"(.*\.)?(lm_head|shared_head\.head)")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a server would read otherwise than stored, or not at all."""

    loader: Loader
    message: str
    blocking: bool
    """False when the server loads the checkpoint if started as the message says."""

    def __str__(self) -> str:
        return f"{self.loader}: {self.message}"


@dataclass
class _Module:
    """What a server builds from one or more linears of the checkpoint."""

    kind: Kind
    stored: set[str | None]
    """Schemes of the linears it is made of; more than one cannot be loaded."""


def check_loaders(
    config: Mapping[str, Any] | None,
    modules: Mapping[str, Storage | None],
    model: Mapping[str, Any],
) -> tuple[Finding, ...]:
    """Whether both servers would read every linear as it is stored.

    `config` is the `quantization_config`, `modules` maps the linears of the checkpoint (names
    without `.weight`) to how they are stored, `model` is the language model's part of
    config.json. Equal findings for many layers come as one.
    """
    findings: list[Finding] = []
    try:
        server = ServerConfig.of(config or {})
    except LoadRefused as refusal:
        return Finding("vLLM", str(refusal), True), Finding("SGLang", str(refusal), True)
    layers = config_count(model, "num_hidden_layers")
    for loader in ("vLLM", "SGLang"):
        faults: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, module in _server_modules(modules, layers, loader).items():
            if (fault := _fault(loader, server, name, module)) is not None:
                faults[fault, re.sub(r"\d+", "#", name)].append(name)
        for (fault, _), names in faults.items():
            more = f" (and {len(names) - 1} more such modules)" if len(names) > 1 else ""
            findings.append(Finding(loader, f"{names[0]}{more} {fault}", True))
    findings += _sglang_limits(server, modules, model)
    return tuple(findings)


def _fault(loader: Loader, server: ServerConfig, name: str, module: _Module) -> str | None:
    if len(module.stored) > 1:
        return f"is one module, but its linears are stored as {_all_told(module.stored)}"
    (stored_as,) = module.stored
    if not server.schemes:
        read_as = None
    else:
        scheme = vllm_scheme if loader == "vLLM" else sglang_scheme
        try:
            read_as = scheme(server, name, module.kind)
        except LoadRefused as refusal:
            reason = str(refusal).replace(f" {name}", " it")
            return f"is stored as {_told(stored_as)}, and the server refuses it: {reason}"
    if module.kind == "plain" and name.endswith(".wk") and (stored_as or "").startswith("FP8"):
        return None  # both servers dequantize an FP8 wk while loading
    if read_as != stored_as:
        return f"is stored as {_told(stored_as)} and would be read as {_told(read_as)}"
    return None


def _server_modules(
    modules: Mapping[str, Storage | None], layers: int, loader: Loader
) -> dict[str, _Module]:
    """The modules that a server builds, by its own names, from the linears of a checkpoint."""
    fused = {
        linear: name
        for name, members in FUSED.items()
        if name != ("fused_qkv_a_proj_with_mqa" if loader == "vLLM" else "fused_qkv_a_proj")
        for linear in members
    }
    built: dict[str, _Module] = {}
    for linear, storage in modules.items():
        kind: Kind = "linear"
        name = linear
        if match := _EXPERT.fullmatch(linear):
            name, kind = match[1], "experts"
        elif _PLAIN.fullmatch(linear):
            kind = "plain"
        elif _HEAD.fullmatch(linear):
            kind = "head"
        else:
            owner, _, leaf = linear.rpartition(".")
            # Without a latent query projection, kv_a_proj_with_mqa stands alone.
            if leaf in fused and all(f"{owner}.{m}" in modules for m in FUSED[fused[leaf]]):
                name = f"{owner}.{fused[leaf]}"
        layer = layer_index(linear)
        if loader == "SGLang" and layer is not None and layer >= layers:
            name = name.replace(f"layers.{layer}.", "decoder.", 1)
        stored = None if storage is None else str(storage)
        built.setdefault(name, _Module(kind, set())).stored.add(stored)
    return built


def _sglang_limits(
    server: ServerConfig, modules: Mapping[str, Storage | None], model: Mapping[str, Any]
) -> Iterator[Finding]:
    """What SGLang cannot load, or only with a flag, although it matches every name as meant."""
    linear = server.schemes.get("Linear", "")
    fused = {member for members in FUSED.values() for member in members}
    blocks = {
        str(storage)
        for name, storage in modules.items()
        if isinstance(storage, Fp8)
        and not isinstance(storage.scales, str)
        and name.rpartition(".")[2] in fused
        and not _EXPERT.fullmatch(name)
    }
    if blocks - {linear}:
        yield Finding(
            "SGLang",
            f"fused linears are stored as {' and '.join(sorted(blocks))}, but their block size is "
            f"taken from the target Linear, which is {linear or 'absent'}",
            True,
        )
    routed = {s for name, s in modules.items() if _EXPERT.fullmatch(name)}
    shared = {s for name, s in modules.items() if ".mlp.shared_experts." in name}
    if shared and routed != shared and _fuses_shared_experts(server, model):
        yield Finding(
            "SGLang",
            f"the shared experts are stored as {_all_told(shared)}, the routed ones as "
            f"{_all_told(routed)}; start it with --disable-shared-experts-fusion",
            False,
        )


def _fuses_shared_experts(server: ServerConfig, model: Mapping[str, Any]) -> bool:
    """Whether SGLang, left alone, loads the shared expert as one more routed expert."""
    if config_count(model, "n_shared_experts") == 0:
        return False
    if model.get("model_type") == "glm4_moe":
        return True
    is_int4 = server.schemes.get("Linear", "").startswith("INT4") and server.format == PACKED
    return config_count(model, "n_routed_experts") == 256 and not is_int4


def _told(scheme: Storage | str | None) -> str:
    return "unquantized" if scheme is None else str(scheme)


def _all_told(schemes: Iterable[Storage | str | None]) -> str:
    return " and ".join(sorted(map(_told, schemes)))
