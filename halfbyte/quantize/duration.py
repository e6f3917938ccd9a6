"""Predicts how long a run takes from its plan, before anything is read.

Work is counted from shapes and settings alone: floating point operations of the products that
tokens make, multiply-adds of the solver, weights that are decoded, searched and packed, bytes for
the disk. Divided by the speed at which a known machine did the same work, that is a time for that
machine; other hardware is to scale. Computing and the disk overlap, so the longer of the two
counts. Fixed costs of small models on a GPU, where launching kernels takes longest, are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.calibration.families import is_routed_expert
from halfbyte.calibration.limits import GRID, READERS_IN_SEARCH, SAMPLE
from halfbyte.core import Plan, Settings, TensorPlan
from halfbyte.formats.config import config_count, text_config
from halfbyte.quantize.memory import calibrates, hidden_bytes, state_bytes

DISK = 1e9
"""Bytes a second that are read or written."""
STATE_INTERVAL = 10
"""A calibration state is stored when this many times what writing the last one took has passed
since. So writing takes a tenth of a run at most, and a crash costs little more than ten times a
state's writing: some two minutes for the 13 GB of a million tokens of GLM-5.2."""
SCALINGS = GRID + 1
"""Scales of one input that AWQ tries, none among them."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a machine did in a second when it was measured."""

    name: str
    products: Mapping[str, float]
    """Floating point operations of products with tokens, by compute dtype."""
    attention: float
    """The share of that which a layer reaches without its routed experts, for its small steps."""
    columns: float
    """Multiply-adds of a linear [N, K] in the solver: N K² for GPTQ and for each refinement."""
    weights: float
    """Weights that are decoded, searched for scales, rounded and packed."""
    in_turn: float
    """Weights whose scales are searched within GPTQ."""
    triangle: float
    """Share of a second moment that is computed: less than 1 where its symmetry is made use of."""
    start: float
    """Seconds until the first layer begins."""
    llmcompressor: float
    """Times as long as ours that llm-compressor's solver takes for N K²."""


SPEEDS: Mapping[str, Speed] = {
    # One H200, the layer of docs/results.md; float32 by the data sheet's ratio.
    "cuda": Speed(
        "H200", {"bfloat16": 5.5e14, "float32": 5e13}, 0.79, 1e14, 6.2e9, 1e11, 0.625, 5.0, 20.0
    ),
    # One core of a two-core AMD EPYC, the small model of docs/results.md.
    "cpu": Speed(
        "EPYC core", {"bfloat16": 6e10, "float32": 6e10}, 1.0, 1.6e10, 3e7, 1.75e6, 1.0, 5.0, 2.0
    ),
}


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds predicted for a run."""

    seconds: float
    """The longer of the two below, which overlap."""
    compute: float
    """At the speed of `workers` times the `reference`."""
    disk: float
    """At `DISK` bytes a second."""
    workers: int
    reference: str
    """What the computing was measured on."""
    detail: Mapping[str, float]
    """What computing is made of, by phase."""


def estimate_duration(plan: Plan, *, workers: int = 1) -> Duration:
    """Seconds of a whole run of the plan by `workers` GPUs, or cores of a CPU."""
    settings, model = plan.settings, text_config(plan.checkpoint.config)
    kind = settings.device.partition(":")[0]
    speed = SPEEDS[kind]
    detail: dict[str, float] = {}
    for unit in plan.units:
        if unit.kind in ("layer", "mtp") and calibrates(settings):
            phases = layer_seconds(unit.tensors, settings, model)
        else:  # what is not quantized goes at the speed of the disk
            phases = _solver_seconds(unit.tensors, settings)
        for phase, seconds in phases.items():
            detail[phase] = detail.get(phase, 0.0) + seconds / workers
    compute = speed.start + sum(detail.values())
    moved = sum(t.source.nbytes + sum(o.nbytes for o in t.outputs) for t in plan.tensors)
    layers = sum(unit.kind in ("layer", "mtp") for unit in plan.units)
    disk = (moved + layers * _offloaded(plan, model)) / DISK
    disk += min(layers * state_bytes(settings, model) / DISK, max(compute, disk) / STATE_INTERVAL)
    detail = {"start": speed.start, **detail}
    return Duration(max(compute, disk), compute, disk, workers, speed.name, detail)


def layer_seconds(
    tensors: Sequence[TensorPlan], settings: Settings, model: Mapping[str, Any]
) -> dict[str, float]:
    """Seconds that one GPU, or one core, computes on a calibrated layer, by phase."""
    speed = SPEEDS[settings.device.partition(":")[0]]
    products = speed.products[settings.dtype]
    tokens = settings.samples * settings.sequence_length
    experts = [t for t in tensors if is_routed_expert(t.module)]
    plain = [t for t in tensors if _is_run(t, settings, model) and not is_routed_expert(t.module)]
    chosen = config_count(model, "num_experts_per_tok")
    reached = tokens * chosen / max(1, config_count(model, "n_routed_experts"))
    forward = 2 * tokens * (_weights(plain) + _attention(settings, model))
    linears = [t for t in plain if t.action == "quantize"]
    passes = 2 if linears else 1
    moments = sum(2 * tokens * t.source.shape[1] ** 2 for t in linears) * speed.triangle
    return {
        "attention and router": passes * forward / (products * speed.attention),
        "Hessians": (moments + _expert_moments(experts, reached, settings, speed)) / products,
        **_solver_seconds([*linears, *experts], settings),
        "experts forward": 2 * reached * _weights(experts) / products,
    }


def _solver_seconds(tensors: Sequence[TensorPlan], settings: Settings) -> dict[str, float]:
    """Of the linears among these that are quantized."""
    speed = SPEEDS[settings.device.partition(":")[0]]
    linears = [t for t in tensors if t.action == "quantize"]
    weights = _weights(linears)
    found = {"weights": weights / speed.weights}
    if settings.compensates:
        steps = sum(t.source.shape[0] * t.source.shape[1] ** 2 for t in linears)
        solver = speed.llmcompressor if settings.engine == "llmcompressor" else 1.0
        found["solve"] = (solver + settings.refine) * steps / speed.columns
        found["scale search"] = _weights(_in_turn(linears, settings)) / speed.in_turn
    if settings.scales_inputs:
        searched = [t for t in linears if not is_routed_expert(t.module)]
        experts = [t for t in linears if is_routed_expert(t.module)]
        down = [t for t in experts if t.module.endswith("down_proj")]
        wide = [t for t in experts if not t.module.endswith("down_proj")][: 2 * READERS_IN_SEARCH]
        found["scale inputs"] = SCALINGS * _weights([*searched, *down, *wide]) / speed.weights
    return found


def _in_turn(linears: Sequence[TensorPlan], settings: Settings) -> list[TensorPlan]:
    """Those whose scales are searched within GPTQ."""
    schemes = [(t, t.scheme.columns_per_group(t.source.shape[1])) for t in linears if t.scheme]
    return [tensor for tensor, group in schemes if settings.searches_in_turn(group)]


def _expert_moments(
    experts: Sequence[TensorPlan], reached: float, settings: Settings, speed: Speed
) -> float:
    """Operations for the Hessians of routed experts that `reached` tokens reach each: of what gate
    and up read, and behind these of what down reads, of their own tokens and of the layer's."""
    quantized = [t for t in experts if t.action == "quantize"]
    own = reached if settings.expert_hessian != "all" else 0.0
    mean = settings.expert_hessian != "routed"
    total = 0.0
    for tensor in quantized:
        rows, columns = tensor.source.shape
        moment = 2 * speed.triangle * columns**2
        if tensor.module.endswith("gate_proj"):
            total += own * moment
        elif tensor.module.endswith("down_proj"):
            sample = SAMPLE * columns if mean else 0
            total += (own + sample) * (moment + 2 * 2 * rows * columns)
    gate = next((t for t in quantized if t.module.endswith("gate_proj")), None)
    if gate is not None and mean:
        tokens = settings.samples * settings.sequence_length
        total += tokens * 2 * speed.triangle * gate.source.shape[1] ** 2
    return total


def _attention(settings: Settings, model: Mapping[str, Any]) -> int:
    """Multiply-adds of a token with all tokens of its window: scores and values of every head, and
    the indexer's scores where it selects."""
    heads = config_count(model, "num_attention_heads")
    head = config_count(model, "qk_head_dim") or config_count(model, "head_dim")
    value = config_count(model, "v_head_dim") or head
    width = heads * (head + value)
    if 0 < config_count(model, "index_topk") < settings.sequence_length:
        width += config_count(model, "index_n_heads") * config_count(model, "index_head_dim")
    return settings.sequence_length * width


def _is_run(tensor: TensorPlan, settings: Settings, model: Mapping[str, Any]) -> bool:
    """Whether tokens are multiplied with a layer's tensor: an MTP layer may have embedding and head
    of its own, which no token of ours meets, and an indexer that would select all is not run."""
    if len(tensor.source.shape) != 2 or tensor.module.endswith(("embed_tokens", "head")):
        return False
    selects = config_count(model, "index_topk") < settings.sequence_length
    return selects or ".indexer." not in tensor.module


def _weights(tensors: Sequence[TensorPlan]) -> int:
    return sum(math.prod(t.source.shape) for t in tensors)


def _offloaded(plan: Plan, model: Mapping[str, Any]) -> int:
    """Bytes that a layer moves of hidden states that lie on the disk: forward and experts read and
    write them, and a check reads them; the experts' inputs are written, and read for the layer's
    mean, for each expert's two Hessians, and by the experts."""
    settings, placement = plan.settings, plan.memory.placement
    total = 0
    if placement.states == "disk":
        total += 5 * state_bytes(settings, model)
    if placement.inputs == "disk":
        times = 3 + 2 * config_count(model, "num_experts_per_tok")
        total += times * hidden_bytes(settings, model)
    return total
