"""From stored tensors to logical weights: which tensors together carry one weight, and how.

Decided by dtype and the presence of a scale, never by the skip list of the config, which is
known to name tensors that do not exist. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.core import Checkpoint, Scheme, StoredWeight, TensorInfo
from halfbyte.errors import CheckpointError

DEFAULT_BLOCK = (128, 128)
SCALE_DTYPES = ("F32", "BF16", "F16")

FOREIGN_LAYOUTS: Mapping[str, str] = {
    "qweight": "the AWQ or GPTQ layout",
    "weight_g_idx": "a layout with groups in activation order",
    "weight_zero_point": "an asymmetric layout",
    "weight_global_scale": "the NVFP4 layout",
}
"""Last parts of tensor names that mark a layout we cannot read."""

_PART_SUFFIXES = (".weight_scale", ".weight_scale_inv", ".weight_shape")
_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.([0-9]{1,9})\.")
_DIGITS = re.compile(r"([0-9]{1,18})")


def logical_weights(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """The checkpoint's logical tensors in model order (`model_order`), keyed by their name.

    FP8 is an F8_E4M3 tensor with its `_scale_inv` (blocks) or `_scale` (compressed-tensors:
    tensor, channel or blocks); INT4 is `weight_packed`, `weight_scale` and `weight_shape`; all
    else is plain. Parts of one weight may lie in different shards.
    Raises `CheckpointError` for a scale that is missing, orphaned or of the wrong shape, and
    for layouts that cannot be read.
    """
    declared = _declared(checkpoint.config)
    weights: dict[str, StoredWeight] = {}
    for weight in _gather(checkpoint.tensors, declared):
        if weight.name in weights:
            raise CheckpointError(f"{weight.name} is stored twice, as a plain and a packed weight")
        weights[weight.name] = weight
    used = {part.name for weight in weights.values() for part in weight.parts.values()}
    if len(used) != len(checkpoint.tensors):
        orphan = next(t for name, t in checkpoint.tensors.items() if name not in used)
        owner = orphan.name.rpartition(".")[0] + ".weight"
        stored = checkpoint.tensors.get(owner)
        raise CheckpointError(
            f"{orphan.name} in {orphan.shard} belongs to {owner}, which is "
            + ("not there" if stored is None else f"{stored.dtype} and takes no such part")
        )
    return {name: weights[name] for name in sorted(weights, key=model_order)}


def model_order(name: str) -> tuple[int, int, tuple[str | int, ...]]:
    """Sort key: embedding, decoder layers by number (MTP layer last), final norm, head, the rest.

    Inside a layer names sort naturally, so expert 2 comes before expert 10.
    """
    layer = layer_index(name)
    own = name.removeprefix("language_model.")
    if layer is not None:
        section = 1
    elif own.startswith("model.embed_tokens."):
        section = 0
    elif own.startswith("model.norm."):
        section = 2
    elif own.startswith("lm_head."):
        section = 3
    else:
        section = 4
    # re.split alternates text and digits, so keys compare text with text and number with number.
    natural = tuple(int(s) if i % 2 else s for i, s in enumerate(_DIGITS.split(name)))
    return section, layer or 0, natural


def layer_index(name: str) -> int | None:
    """Decoder layer that a tensor belongs to, None outside of layers; the MTP layer counts on."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a model config, or of its text config; empty without one."""
    for owner in (config, config.get("text_config")):
        if isinstance(owner, Mapping) and owner.get("quantization_config") is not None:
            found = owner["quantization_config"]
            if not isinstance(found, Mapping):
                raise CheckpointError("config.json: quantization_config is not an object")
            return found
    return {}


@dataclass(frozen=True, slots=True)
class _Declared:
    """What the config says about weights that their tensors alone cannot tell."""

    block: tuple[int, int]
    """Block of `weight_scale_inv`."""
    scale_blocks: tuple[tuple[int, int], ...]
    """Blocks of compressed-tensors `weight_scale`."""
    integers: tuple[Mapping[str, Any], ...]
    """compressed-tensors weight arguments of the groups of integer weights."""


def _declared(config: Mapping[str, Any]) -> _Declared:
    quantization = quantization_config(config)
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError("config.json: config_groups is not an object")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    arguments = [found for found in weights if isinstance(found, Mapping)]
    return _Declared(
        block=_block(quantization.get("weight_block_size") or DEFAULT_BLOCK),
        scale_blocks=tuple(
            _block(found.get("block_structure"))
            for found in arguments
            if found.get("strategy") == "block"
        ),
        integers=tuple(found for found in arguments if found.get("type", "int") == "int"),
    )


def _block(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(f"config.json: {value!r:.80} is not a block size [rows, columns]")


def _gather(tensors: Mapping[str, TensorInfo], declared: _Declared) -> Iterator[StoredWeight]:
    for name, info in tensors.items():
        if name.endswith(_PART_SUFFIXES):
            continue
        if name.endswith(".weight_packed"):
            yield _int4_weight(info, tensors, declared)
        elif info.dtype == "F8_E4M3":
            yield _fp8_weight(info, tensors, declared)
        elif info.dtype.startswith("F8_"):
            raise CheckpointError(f"{name} in {info.shard} is {info.dtype}, which cannot be read")
        elif (suffix := name.rpartition(".")[2]) in FOREIGN_LAYOUTS:
            layout = FOREIGN_LAYOUTS[suffix]
            raise CheckpointError(f"{name} in {info.shard} is of {layout}, which cannot be read")
        else:
            yield StoredWeight(name, info.shape, "plain", {"weight": info})


def _fp8_weight(
    weight: TensorInfo, tensors: Mapping[str, TensorInfo], declared: _Declared
) -> StoredWeight:
    name, shape = weight.name, weight.shape
    found = [tensors[n] for n in (f"{name}_scale_inv", f"{name}_scale") if n in tensors]
    if len(found) != 1:
        has = "no scale" if not found else "two scales"
        raise CheckpointError(
            f"{name} in {weight.shard} is FP8 and has {has}; expected one of {name}_scale_inv "
            f"and {name}_scale"
        )
    scale = found[0]
    if len(shape) != 2 or not name.endswith(".weight") or scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{name} in {weight.shard} is FP8 {list(shape)} with a scale in {scale.dtype}; "
            f"expected the weight of a linear and a scale in {', '.join(SCALE_DTYPES)}"
        )
    rows, columns = shape
    if scale.name.endswith("_inv"):
        stored, blocks = scale.shape, [declared.block]
    else:
        stored = scale.shape + (1,) * (2 - len(scale.shape))
        # The one scale of a small weight may be any of these: what the config declares goes first.
        blocks = [*declared.scale_blocks, (rows, columns), (1, columns)]
    for block in blocks:
        if stored == (-(-rows // block[0]), -(-columns // block[1])):
            parts = {"weight": weight, "scale": scale}
            return StoredWeight(name, (rows, columns), "fp8", parts, block=block)
    grids = [[-(-rows // r), -(-columns // c)] for r, c in blocks]
    raise CheckpointError(
        f"{scale.name} in {scale.shard} has shape {list(scale.shape)}, but {name} "
        f"{list(shape)} needs {' or '.join(map(str, grids))}"
    )


def _int4_weight(
    packed: TensorInfo, tensors: Mapping[str, TensorInfo], declared: _Declared
) -> StoredWeight:
    module = packed.name.removesuffix(".weight_packed")
    parts = {"packed": packed}
    for part in ("scale", "shape"):
        found = tensors.get(f"{module}.weight_{part}")
        if found is None:
            raise CheckpointError(f"{packed.name} in {packed.shard} has no {module}.weight_{part}")
        parts[part] = found
    scale, shape = parts["scale"], parts["shape"]
    if packed.dtype != "I32" or len(packed.shape) != 2 or 0 in packed.shape:
        raise CheckpointError(
            f"{packed.name} in {packed.shard} is {packed.dtype} {list(packed.shape)}; "
            "INT4 pack-quantized is I32 with two dimensions"
        )
    rows, columns = packed.shape[0], 8 * packed.shape[1]
    if shape.shape != (2,) or shape.dtype not in {"I32", "I64"}:
        raise CheckpointError(
            f"{shape.name} in {shape.shard} is {shape.dtype} {list(shape.shape)}, expected I64 [2]"
        )
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if scale.dtype not in SCALE_DTYPES or scale.shape[:1] != (rows,) or not groups:
        raise CheckpointError(
            f"{scale.name} in {scale.shard} is {scale.dtype} {list(scale.shape)}, but "
            f"{packed.name} needs one float scale per group of columns in each of {rows} rows"
        )
    group_size = _group_size(scale, columns, groups, declared)
    scheme = Scheme(group_size=group_size, scale_dtype=scale.dtype)
    return StoredWeight(f"{module}.weight", (rows, columns), "int4", parts, scheme=scheme)


def _group_size(scale: TensorInfo, columns: int, groups: int, declared: _Declared) -> int | None:
    """Columns per scale, None for a channel scale; the config must declare that group size."""
    sizes: list[Any] = []
    for arguments in declared.integers:
        if arguments.get("num_bits") != 4 or not arguments.get("symmetric", True):
            raise CheckpointError(
                f"config.json declares {arguments.get('num_bits')!r:.20}-bit weights, symmetric "
                f"{arguments.get('symmetric')!r:.20}; only symmetric 4-bit weights can be read"
            )
        channel = arguments.get("strategy") == "channel"
        sizes.append(None if channel else arguments.get("group_size"))
    if columns % groups == 0 and columns // groups in sizes:
        return columns // groups
    if groups == 1 and None in sizes:
        return None
    raise CheckpointError(
        f"{scale.name} in {scale.shard} has {groups} groups for {columns} columns, which fits no "
        f"group size of config.json ({', '.join(f'{size!r:.20}' for size in sizes) or 'none'})"
    )
