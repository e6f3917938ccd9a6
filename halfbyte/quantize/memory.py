"""Predicts the peak memory of a run from its plan, before anything is read.

Memory is bounded by one decoder layer: its plain weights, as many experts as fit the working set,
and the hidden states of all calibration tokens. It does not grow with the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.core import MemoryEstimate, Settings, TensorPlan, Unit
from halfbyte.formats.config import config_count

LIBRARIES = 700_000_000
"""Resident bytes of Python with torch and transformers imported."""
EXPERTS_IN_WORK = 1 << 30
"""Working memory for experts that are quantized together; one expert may need more."""
HIDDEN_COPIES = 3
"""The residual stream, its normed copy for the experts, and what is being added to it."""


def calibrates(settings: Settings) -> bool:
    """Whether the run sends tokens through the model."""
    return settings.method != "rtn"


def hidden_bytes(settings: Settings, model: Mapping[str, Any]) -> int:
    """Hidden states of all calibration tokens, between two layers."""
    if not calibrates(settings):
        return 0
    tokens = settings.samples * settings.sequence_length
    return tokens * config_count(model, "hidden_size") * _element_bytes(settings)


def estimate_memory(
    units: Sequence[Unit], settings: Settings, model: Mapping[str, Any]
) -> MemoryEstimate:
    """Peak bytes of a run over `units`; `model` is the language model's part of config.json."""
    largest = max((t for u in units for t in u.tensors), key=lambda t: math.prod(t.source.shape))
    host = {"libraries": LIBRARIES, "largest tensor in conversion": _conversion(largest)}
    if not calibrates(settings):
        return MemoryEstimate(host=sum(host.values()), gpu=0, detail=host)
    layers = [u.tensors for u in units if u.kind in ("layer", "mtp")]
    compute = {
        "plain weights of a layer": max((_plain(layer, settings) for layer in layers), default=0),
        "experts in work": max((_experts(layer) for layer in layers), default=0),
        "hidden states": HIDDEN_COPIES * hidden_bytes(settings, model),
        "Hessians": max((_hessians(layer) for layer in layers), default=0),
    }
    detail = host | compute
    if settings.device.startswith("cpu"):
        return MemoryEstimate(host=sum(detail.values()), gpu=0, detail=detail)
    return MemoryEstimate(host=sum(host.values()), gpu=sum(compute.values()), detail=detail)


def _is_expert(tensor: TensorPlan) -> bool:
    return ".mlp.experts." in tensor.name


def _element_bytes(settings: Settings) -> int:
    return {"float32": 4, "bfloat16": 2}[settings.dtype]


def _conversion(tensor: TensorPlan) -> int:
    """As stored, decoded in float32, and as written."""
    decoded = 4 * math.prod(tensor.source.shape) if tensor.action != "copy" else 0
    return tensor.source.nbytes + decoded + sum(o.nbytes for o in tensor.outputs)


def _plain(layer: Sequence[TensorPlan], settings: Settings) -> int:
    plain = (t for t in layer if not _is_expert(t))
    return _element_bytes(settings) * sum(math.prod(t.source.shape) for t in plain)


def _experts(layer: Sequence[TensorPlan]) -> int:
    """Weights in four states (read, in work, rounded, error) and the Hessian of their input."""
    sizes: dict[str, int] = {}
    for tensor in layer:
        if _is_expert(tensor) and len(tensor.source.shape) == 2:
            rows, columns = tensor.source.shape
            expert = tensor.module.rpartition(".")[0]
            sizes[expert] = sizes.get(expert, 0) + 4 * 4 * (rows * columns)
            if tensor.name.endswith("gate_proj.weight"):
                sizes[expert] += 4 * 4 * columns * columns
    return max(EXPERTS_IN_WORK, *sizes.values()) if sizes else 0


def _hessians(layer: Sequence[TensorPlan]) -> int:
    """Of the plain linears that are quantized: one for each, with its factor."""
    columns = [t.source.shape[1] for t in layer if t.action == "quantize" and not _is_expert(t)]
    return sum(4 * k * k for k in columns) + 2 * max((4 * k * k for k in columns), default=0)
