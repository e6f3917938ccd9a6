"""A plan: everything a run will do, known before the first weight is read.

Checkpoint, recipe and settings go in; for every tensor the plan says what it is made of, what is
done and what comes out, in which shard and at which byte, and for the whole what the servers will
be told, what it costs, and what to watch out for. Headers only, no torch, seconds at any size.
"""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

from halfbyte.calibration.families import language_model
from halfbyte.core import (
    Checkpoint,
    MemoryBudget,
    OutputTensor,
    Plan,
    Recipe,
    Rule,
    RuleOutcome,
    Settings,
    ShardLayout,
    StoredWeight,
    TensorPlan,
    Unit,
    UnitKind,
    fingerprint,
)
from halfbyte.errors import RecipeError
from halfbyte.formats import int4
from halfbyte.formats.budgets import SHARDS_ON_DISK
from halfbyte.formats.config import (
    Storage,
    config_count,
    is_linear,
    make_quantization_config,
    storage_of,
    text_config,
    without_equal_experts,
)
from halfbyte.formats.layout import lay_out_shards
from halfbyte.formats.loaders import check_loaders
from halfbyte.formats.weights import layer_index, logical_weights
from halfbyte.quantize.decide import action_on, decide
from halfbyte.quantize.memory import calibrates, disk_bytes, estimate_memory
from halfbyte.quantize.readers import scalable_inputs
from halfbyte.quantize.recipe import recipe_to_dict
from halfbyte.quantize.shares import cut_at_shards

MAX_SHARD_BYTES = 5_000_000_000


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    settings: Settings,
    budget: MemoryBudget = MemoryBudget(),  # noqa: B008
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    ranks: int = 1,
) -> Plan:
    """Decide every tensor of a checkpoint and lay out the result, within a budget of memory.

    `ranks` processes share the run; the budget, and the memory in the plan, are those of each.

    Raises `RecipeError` when the recipe does not fit the checkpoint, or when neither vLLM nor
    SGLang could load what it asks for; what only one of them cannot load becomes a warning.
    Raises `UnsupportedModelError` when the method calibrates and the architecture cannot be run,
    or when it scales inputs and a layer has a linear whose input is not known; `UsageError` when
    the budget is too small.
    """
    if calibrates(settings):
        language_model(checkpoint)
    with _collector_paused():
        return _make_plan(checkpoint, recipe, settings, budget, max_shard_bytes, ranks)


def _make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    settings: Settings,
    budget: MemoryBudget,
    max_shard_bytes: int,
    ranks: int,
) -> Plan:
    model = text_config(checkpoint.config)
    layers = config_count(model, "num_hidden_layers")
    weights = logical_weights(checkpoint)
    tensors = [
        _tensor_plan(weight, recipe.rules[rule], rule)
        for weight, rule in decide(recipe, checkpoint, weights)
    ]
    units = _units(tensors, layers)
    shards = lay_out_shards([o for t in tensors for o in t.outputs], max_shard_bytes)
    if not calibrates(settings):
        units = cut_at_shards(units, shards)
    modules = without_equal_experts(
        {t.module: _storage(t) for t in tensors if is_linear(t.source) and t.outputs}
    )
    quantization = make_quantization_config(modules, layers)
    warnings = (
        *_loader_warnings(quantization, modules, model),
        *_mtp_warnings(tensors, model, layers),
        *_calibration_warnings(tensors, settings, model),
        *_scaling_warnings(units, settings),
    )
    memory = estimate_memory(units, settings, model, budget, ranks)
    side_files = sum((checkpoint.path / name).stat().st_size for name in checkpoint.side_files)
    return Plan(
        checkpoint=checkpoint,
        recipe=recipe,
        settings=settings,
        units=units,
        shards=shards,
        quantization_config=quantization,
        memory=memory,
        disk=sum(shard.nbytes for shard in shards)
        + side_files
        + disk_bytes(settings, model, memory.placement, ranks)
        + _fetched_bytes(checkpoint),
        warnings=warnings,
        fingerprint=_fingerprint(checkpoint, recipe, settings, shards),
    )


def _fetched_bytes(checkpoint: Checkpoint) -> int:
    """Of the source's shards that lie in the output folder while they are read."""
    if checkpoint.repository is None:
        return 0
    return sum(sorted(checkpoint.shards.values())[-SHARDS_ON_DISK:])


def with_calibration(plan: Plan, sha256: str) -> Plan:
    """The same plan for calibration on the text with this hash, which decides output bytes, too."""
    settings = replace(plan.settings, calibration_sha256=sha256)
    mark = _fingerprint(plan.checkpoint, plan.recipe, settings, plan.shards)
    return replace(plan, settings=settings, fingerprint=mark)


def _fingerprint(
    checkpoint: Checkpoint, recipe: Recipe, settings: Settings, shards: Sequence[ShardLayout]
) -> str:
    return fingerprint(
        {
            "checkpoint": checkpoint.fingerprint,
            "recipe": recipe_to_dict(recipe),
            "settings": settings.identity(),
            "shards": [(shard.file, shard.nbytes) for shard in shards],
            "versions": package_versions(settings),
        }
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A plan is made of several hundred thousand small objects without cycles.

    The cyclic collector would walk them all again and again, for a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def package_versions(settings: Settings) -> dict[str, str]:
    """Versions of the packages that can change output bytes."""
    engine = ("llmcompressor",) if settings.engine == "llmcompressor" else ()
    return {
        name: importlib.metadata.version(name)
        for name in ("halfbyte", "torch", "transformers", "safetensors", *engine)
    }


def rule_outcomes(plan: Plan) -> tuple[RuleOutcome, ...]:
    """What each rule decides, in the order of the recipe; those that match nothing are left out."""
    decided: dict[int, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        decided.setdefault(tensor.rule, []).append(tensor)
    return tuple(
        RuleOutcome(
            pattern=plan.recipe.rules[rule].pattern,
            action=plan.recipe.rules[rule].action,
            scheme=str(tensors[0].scheme) if tensors[0].scheme else None,
            tensors=len(tensors),
            bytes_in=sum(tensor.source.nbytes for tensor in tensors),
            bytes_out=sum(output.nbytes for tensor in tensors for output in tensor.outputs),
            reason=plan.recipe.rules[rule].reason,
        )
        for rule, tensors in sorted(decided.items())
    )


def _tensor_plan(weight: StoredWeight, rule: Rule, index: int) -> TensorPlan:
    action = action_on(weight, rule)
    outputs: tuple[OutputTensor, ...] = ()
    if action == "quantize":
        assert rule.scheme is not None
        outputs = int4.output_tensors(weight.name, weight.shape, rule.scheme)
    elif action == "dequantize":
        outputs = (OutputTensor(weight.name, "BF16", weight.shape),)
    elif action == "copy":
        outputs = tuple(
            # compressed-tensors calls `weight_scale` what block FP8 calls `weight_scale_inv`.
            OutputTensor(part.name.removesuffix("_inv"), part.dtype, part.shape)
            if weight.encoding == "fp8"
            else OutputTensor(part.name, part.dtype, part.shape)
            for part in weight.parts.values()
        )
    scheme = rule.scheme if action == "quantize" else None
    return TensorPlan(weight, action, scheme, index, outputs)


def _storage(tensor: TensorPlan) -> Storage | None:
    """How a linear will be stored; None for unquantized."""
    if tensor.action == "quantize":
        return tensor.scheme
    return storage_of(tensor.source) if tensor.action == "copy" else None


def _units(tensors: list[TensorPlan], layers: int) -> tuple[Unit, ...]:
    """Group tensors, which come in model order, into what is worked on together."""
    units = []
    for (name, kind, index), members in groupby(tensors, lambda t: _unit_of(t.name, layers)):
        units.append(Unit(name, kind, index, tuple(members)))
    return tuple(units)


def _unit_of(name: str, layers: int) -> tuple[str, UnitKind, int | None]:
    index = layer_index(name)
    if index is not None:
        return f"layers.{index}", "mtp" if index >= layers else "layer", index
    own = name.removeprefix("language_model.")
    if own.startswith("model.embed_tokens."):
        return "embedding", "embedding", None
    if own.startswith(("model.norm.", "lm_head.")):
        return "head", "head", None
    return "other", "other", None


def _loader_warnings(
    quantization: Mapping[str, Any] | None,
    modules: Mapping[str, Storage | None],
    model: Mapping[str, Any],
) -> list[str]:
    findings = check_loaders(quantization, modules, model)
    blocked = {finding.loader: finding for finding in findings if finding.blocking}
    if len(blocked) == 2:
        raise RecipeError(
            "neither server could load the result: " + "; ".join(map(str, blocked.values())),
            hint="leave these tensors unquantized in the recipe",
        )
    return [str(finding) for finding in findings]


def _mtp_warnings(tensors: list[TensorPlan], model: Mapping[str, Any], layers: int) -> list[str]:
    announced = config_count(model, "num_nextn_predict_layers")
    if not announced:
        return []
    mtp = [t for t in tensors if (layer_index(t.name) or 0) >= layers]
    if not mtp:
        return [
            f"config.json announces {announced} MTP layer(s), but the checkpoint holds none: "
            "servers cannot use speculative decoding"
        ]
    if dropped := sum(t.action == "drop" for t in mtp):
        return [
            f"{dropped} of {len(mtp)} tensors of the MTP layer are dropped, but config.json "
            "announces it: servers started with speculative decoding will fail"
        ]
    return []


def _calibration_warnings(
    tensors: list[TensorPlan], settings: Settings, model: Mapping[str, Any]
) -> list[str]:
    """What makes calibration worse than it need be."""
    if not calibrates(settings):
        return []
    warnings = []
    longest = config_count(model, "max_position_embeddings")
    if 0 < longest < settings.sequence_length:
        warnings.append(
            f"windows of {settings.sequence_length:,} tokens are longer than the {longest:,} that "
            "the model was made for; use a shorter --sequence-length"
        )
    chosen = config_count(model, "num_experts_per_tok")
    experts = config_count(model, "n_routed_experts")
    quantized = [
        t.source.shape[1] for t in tensors if t.action == "quantize" and ".experts." in t.name
    ]
    # Fewer tokens than input features leave an expert's Hessian without full rank.
    tokens = settings.samples * settings.sequence_length * chosen // max(1, experts)
    if quantized and experts and tokens < max(quantized):
        warnings.append(
            f"an expert will see {tokens:,} calibration tokens on average, fewer than its "
            f"{max(quantized):,} input features; more --samples would help"
        )
    return warnings


def _scaling_warnings(units: Sequence[Unit], settings: Settings) -> Iterator[str]:
    """Inputs that AWQ would scale if the recipe let it, one line for all layers.

    Raises UnsupportedModelError for a layer with tensors whose input is not known.
    """
    if not settings.scales_inputs:
        return
    layers = [scalable_inputs(unit) for unit in units if unit.kind in ("layer", "mtp")]
    left_out = [sentence for _, sentences in layers for sentence in sentences]
    if left_out:
        others = f" (and {len(left_out) - 1} more inputs)" if len(left_out) > 1 else ""
        yield f"{left_out[0]}{others}: the readers of a scaled input must not stay as stored"
    if not any(inputs for inputs, _ in layers):
        yield f"--method {settings.method} finds no input to scale under this recipe"
