"""Writes `quantization_config`: from how each linear is stored to what servers must be told.

compressed-tensors knows groups of targets, each with one scheme, and a list of what to ignore.
Servers match both against *their* names, in which some linears are fused and the MTP layer has
another prefix, so patterns here come in every spelling. `formats.loaders` checks the outcome.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.core import Scheme, StoredWeight
from halfbyte.errors import CheckpointError
from halfbyte.formats.int4 import quantization_args
from halfbyte.formats.weights import layer_index


@dataclass(frozen=True, slots=True)
class Fp8:
    """FP8 weights, each scale for a block of (rows, columns), an output channel, or the tensor."""

    scales: tuple[int, int] | Literal["channel", "tensor"]

    def __str__(self) -> str:
        if isinstance(self.scales, str):
            return f"FP8 {self.scales}"
        return f"FP8 block {self.scales[0]}x{self.scales[1]}"


Storage = Scheme | Fp8
"""How the weight of a linear is stored, when it is quantized."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Linears that servers hold as one, under which name. The last two are vLLM's and SGLang's."""

_EXPERT = re.compile(r"\.experts\.\d+\.")
_NEVER_ASKED = re.compile(r"(.*\.mlp\.gate|.*\.eh_proj|.*\.shared_head\.head|(.*\.)?embed_tokens)")
"""Modules that no server looks up in the config: it holds them as plain weights."""

_SHORT_IGNORE: Mapping[str, str] = {
    "self_attn": r"re:.*self_attn.*",
    "mlp.shared_experts": r"re:.*shared_experts.*",
    "mlp": r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
}
"""The patterns of Kimi-K2.6, for parts of a layer that are not quantized anywhere."""


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model config without `quantization_config`, that of its language model included."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(inner := plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantization(inner)
    return plain


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of config.json: all of it, or `text_config` of a larger model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def config_count(model: Mapping[str, Any], key: str) -> int:
    """A number of things that config.json states; 0 when it does not."""
    value = model.get(key)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}, not a number of things")
    return value


def is_linear(weight: StoredWeight) -> bool:
    """Whether a logical tensor is the weight of a linear, or looked up like one (an embedding)."""
    return len(weight.shape) == 2 and weight.name.endswith(".weight")


def storage_of(weight: StoredWeight) -> Storage | None:
    """How a weight is stored; None when it is not quantized."""
    if weight.encoding == "int4":
        return weight.scheme
    if weight.encoding == "plain":
        return None
    assert weight.block is not None
    if weight.block == (1, weight.shape[1]):
        return Fp8("channel")
    # A block that covers the whole weight has a scale of two dimensions, a tensor scale has not.
    is_tensor = weight.block == weight.shape and len(weight.parts["scale"].shape) < 2
    return Fp8("tensor" if is_tensor else weight.block)


def without_equal_experts(modules: Mapping[str, Storage | None]) -> dict[str, Storage | None]:
    """Leave out the experts that are stored like expert 0 of their layer.

    No server looks at them, and they are nearly all of the linears.
    """
    kept = {}
    for name, storage in modules.items():
        layer, experts, inner = name.partition(".experts.")
        number, _, linear = inner.partition(".")
        first = f"{layer}{experts}0.{linear}"
        if not experts or number == "0" or first not in modules or modules[first] != storage:
            kept[name] = storage
    return kept


def make_quantization_config(
    modules: Mapping[str, Storage | None], layers: int
) -> dict[str, Any] | None:
    """The `quantization_config` for linears stored as given; None when none is quantized.

    `modules` are the names of all linears (without `.weight`), `layers` the number of decoder
    layers; those from there on are MTP layers. The class `Linear` stands for the scheme of most
    linears, FP8 before INT4, since SGLang takes the block size of all FP8 linears from there.
    """
    linears = _Layers.of(modules, layers)
    usual = _usual(modules)
    if usual is None:
        return None
    others = sorted({s for s in modules.values() if s is not None and s != usual}, key=str)
    groups = [_group(usual, ["Linear"]), *(_group(s, list(linears.patterns(s))) for s in others)]
    packed = any(group["format"] == "pack-quantized" for group in groups)
    return {
        "quant_method": "compressed-tensors",
        # SGLang reads INT4 experts only if this says pack-quantized, whatever their group says.
        "format": "pack-quantized" if packed else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [*linears.patterns(None), *_outside(modules)],
        "kv_cache_scheme": None,
    }


def _usual(modules: Mapping[str, Storage | None]) -> Storage | None:
    """What the target `Linear` stands for."""
    everywhere = Counter(s for s in modules.values() if s is not None)
    if not everywhere:
        return None
    outside = Counter(
        s for name, s in modules.items() if isinstance(s, Fp8) and not _EXPERT.search(name)
    )
    return (outside or everywhere).most_common(1)[0][0]


def _group(storage: Storage, targets: list[str]) -> dict[str, Any]:
    if isinstance(storage, Scheme):
        weights = quantization_args(storage)
        return {"targets": targets, "weights": weights, "format": "pack-quantized"}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    if isinstance(storage.scales, str):
        weights |= {"strategy": storage.scales}
        inputs |= {"strategy": "token"}
    else:
        weights |= {"strategy": "block", "block_structure": list(storage.scales)}
        inputs |= {"strategy": "group", "group_size": storage.scales[1]}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "format": "float-quantized",
    }


@dataclass(frozen=True)
class _Layers:
    """The linears of the decoder layers by their place inside a layer."""

    storage: Mapping[str, Mapping[str, Mapping[int, Storage | None]]]
    """Owner ("self_attn") -> linear ("o_proj") -> layer -> how it is stored."""
    count: int
    """Decoder layers; those from there on are MTP layers."""

    @classmethod
    def of(cls, modules: Mapping[str, Storage | None], count: int) -> _Layers:
        found: dict[str, dict[str, dict[int, Storage | None]]] = {}
        for name, storage in modules.items():
            layer = layer_index(name)
            if layer is None or _NEVER_ASKED.fullmatch(name):
                continue
            owner, _, linear = name.split(f"layers.{layer}.", 1)[1].rpartition(".")
            owner = re.sub(r"\.experts\.\d+$", ".experts.#", owner)
            found.setdefault(owner, {}).setdefault(linear, {})[layer] = storage
        return cls(found, count)

    def patterns(self, storage: Storage | None) -> Iterator[str]:
        """Regular expressions for the linears stored that way, in every spelling."""
        owners: dict[str, list[str]] = defaultdict(list)
        for owner in self.storage:
            inside_mlp = owner.startswith("mlp.")
            owners[owner if inside_mlp else owner.split(".")[0]].append(owner)
        known = list(_SHORT_IGNORE)
        for part in sorted(owners, key=lambda p: known.index(p) if p in known else len(known)):
            members = owners[part]
            if storage is None and part and not any(map(self._quantized, members)):
                yield _SHORT_IGNORE.get(part, f"re:.*{_escaped(part)}.*")
            else:
                for owner in members:
                    yield from self._owner_patterns(owner, storage)

    def _quantized(self, owner: str) -> bool:
        return any(s for stored in self.storage[owner].values() for s in stored.values())

    def _owner_patterns(self, owner: str, storage: Storage | None) -> Iterator[str]:
        linears_in: dict[frozenset[int] | None, list[str]] = defaultdict(list)
        for linear, stored in self.storage[owner].items():
            layers = frozenset(layer for layer, s in stored.items() if s == storage)
            if layers:
                linears_in[None if len(layers) == len(stored) else layers].append(linear)
        for some_layers, linears in linears_in.items():
            fused = [f for f, members in FUSED.items() if set(members) <= set(linears)]
            spellings = linears if "#" in owner else [*linears, *fused]
            end = f"({'|'.join(map(re.escape, spellings))})$"
            if owner:
                end = f"{_escaped(owner)}\\.{end}"
            if some_layers is None:
                yield f"re:.*{end}"
                continue
            yield f"re:.*layers\\.({'|'.join(map(str, sorted(some_layers)))})\\.{end}"
            if max(some_layers) >= self.count:
                yield f"re:.*decoder\\.{end}"  # SGLang's name for the MTP layer


def _outside(modules: Mapping[str, Storage | None]) -> Iterator[str]:
    """What to ignore outside of the decoder layers: the head, and parts such as a vision tower."""
    prefix = "language_model." if any(m.startswith("language_model.") for m in modules) else ""
    yield f"{prefix}lm_head"
    quantized: dict[str, bool] = {}
    for name, storage in modules.items():
        if layer_index(name) is None and not _NEVER_ASKED.fullmatch(name):
            pieces = name.split(".")
            part = ".".join(pieces[: 2 if pieces[0] in {"model", "language_model"} else 1])
            quantized[part] = quantized.get(part, False) or storage is not None
    yield from (
        f"re:{re.escape(part)}.*"
        for part, is_quantized in quantized.items()
        if not is_quantized and not part.endswith("lm_head")
    )


def _escaped(owner: str) -> str:
    return re.escape(owner).replace(r"\#", r"\d+")
