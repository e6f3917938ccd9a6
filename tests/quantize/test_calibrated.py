"""One layer: what leaves it is what transformers' own layer makes of the quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.calibration import runner as runner_module
from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.runner import LayerRunner, State
from halfbyte.core import (
    LinearReport,
    Placement,
    Plan,
    QuantizedWeight,
    Settings,
    TensorPlan,
)
from halfbyte.errors import CalibrationError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.rows import InMemory
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.kernels.reference import dequantize_int4, unpack_int4
from halfbyte.quantize import experts
from halfbyte.quantize.calibrated import LayerQuantizer
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.testing.numeric import first_difference, relative_error
from halfbyte.testing.tiny import write_tiny

SETTINGS = Settings(samples=6, sequence_length=40)
TOKENS = torch.randint(10, 300, (6, 40), generator=torch.Generator().manual_seed(5))
SPARSE = 1
"""The first layer with routed experts."""


@dataclass
class Layer:
    """What a quantized layer gave away, and the state it left."""

    hidden: torch.Tensor
    reports: list[LinearReport]
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)


def planned(source: Path, settings: Settings = SETTINGS, recipe: str = "experts-and-dense") -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(recipe), settings)


def quantize_layer(
    source: Path,
    before: torch.Tensor,
    *,
    index: int = SPARSE,
    at_once: int = 4,
    settings: Settings = SETTINGS,
) -> Layer:
    """Quantize layer `index` on the hidden states `before`."""
    plan = planned(source, settings)
    (unit,) = (u for u in plan.units if u.index == index)
    with ShardReader(plan.checkpoint) as reader:
        quantizer = LayerQuantizer(
            make_runner(reader),
            settings,
            TOKENS,
            Placement(at_once),
            State(InMemory(before.clone())),
        )
        made = Layer(before, [])

        def keep(linears: Sequence[tuple[TensorPlan, torch.Tensor, torch.Tensor]]) -> None:
            for plan, packed, scales in linears:
                codes = unpack_int4(packed, 8 * packed.shape[1])
                made.weights[plan.name] = QuantizedWeight(codes, scales.clone())

        quantizer.prepare()
        made.reports = quantizer.run(unit, keep).reports
        assert quantizer.state is not None
        made.hidden = quantizer.state.hidden[:]
    return made


def make_runner(reader: ShardReader) -> LayerRunner:
    checkpoint = reader.checkpoint
    return LayerRunner(
        Architecture.of(checkpoint),
        logical_weights(checkpoint),
        reader,
        device="cpu",
        dtype=torch.float32,
    )


def hidden_states(source: Path) -> torch.Tensor:
    """Input of layer 1, as the checkpoint computes it."""
    with ShardReader(open_checkpoint(source)) as reader:
        runner = make_runner(reader)
        state = runner.embed(TOKENS)
        runner.advance(0, state)
    return state.hidden[:]


@torch.no_grad()
def transformers_layer(source: Path, weights: dict[str, torch.Tensor]) -> Any:
    """Layer 1 of transformers' whole model, with some of its weights replaced."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        if ".mlp.experts." not in name:
            parameters[name].copy_(weight)
            continue
        prefix, _, rest = name.partition("experts.")
        expert, leaf = int(rest.split(".")[0]), rest.split(".")[1]
        if leaf == "down_proj":
            parameters[f"{prefix}experts.down_proj"][expert].copy_(weight)
        else:
            fused = parameters[f"{prefix}experts.gate_up_proj"][expert]
            fused.chunk(2)[leaf == "up_proj"].copy_(weight)
    return model


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_the_state_is_what_transformers_makes_of_the_quantized_weights(
    tmp_path: Path, model_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "BATCH_TOKENS", 80)
    monkeypatch.setattr(runner_module, "EXPERT_TOKENS", 160)
    source = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    before = hidden_states(source)
    made = quantize_layer(source, before)
    # One layer: 4 experts of 3 linears, the shared expert and attention's linears besides.
    assert len(made.weights) == len(made.reports) > 12
    weights = {n: dequantize_int4(w.codes, w.scales) for n, w in made.weights.items()}
    model = transformers_layer(source, weights)
    # The whole model, with layer 1 fed the hidden states and its output caught.
    caught: list[torch.Tensor] = []
    layer = model.model.layers[SPARSE]

    def feed(_: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (before, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": before}

    layer.register_forward_pre_hook(feed, with_kwargs=True)
    layer.register_forward_hook(
        lambda _, __, out: caught.append(out[0] if isinstance(out, tuple) else out)
    )
    model(TOKENS, use_cache=False)
    assert relative_error(made.hidden, caught[0]) < 1e-5
    # And the weights do matter: with those of the source it comes out otherwise.
    original = quantize_free(source, before)
    assert relative_error(made.hidden, original) > 1e-3


def quantize_free(source: Path, before: torch.Tensor) -> torch.Tensor:
    with ShardReader(open_checkpoint(source)) as reader:
        state = State(InMemory(before.clone()))
        make_runner(reader).advance(SPARSE, state)
    return state.hidden[:]


def assert_same(first: Layer, second: Layer) -> None:
    assert first.reports == second.reports
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        assert first_difference(weight.codes, second.weights[name].codes) is None
        assert first_difference(weight.scales, second.weights[name].scales) is None
    assert first_difference(first.hidden, second.hidden) is None


@pytest.mark.parametrize("choice", ["routed", "blend", "all"])
def test_experts_at_once_change_nothing(tmp_path: Path, choice: Any) -> None:
    source = write_tiny(tmp_path / "tiny", experts=5)
    before = hidden_states(source)
    settings = replace(SETTINGS, expert_hessian=choice)
    whole = quantize_layer(source, before, at_once=5, settings=settings)
    for at_once in (1, 2):
        assert_same(whole, quantize_layer(source, before, at_once=at_once, settings=settings))


@pytest.mark.parametrize("tokens", [1, 7, 100, 240])
def test_tokens_at_once_change_nothing_but_float_rounding(
    tmp_path: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "tiny")
    before = hidden_states(source)
    whole = quantize_layer(source, before)

    def batches(sequences: int, length: int) -> list[slice]:
        step = max(1, tokens // length)
        return [slice(start, min(start + step, sequences)) for start in range(0, sequences, step)]

    monkeypatch.setattr(experts, "expert_batches", batches)
    parts = quantize_layer(source, before)
    assert parts.reports == whole.reports
    for name, weight in whole.weights.items():
        assert first_difference(parts.weights[name].codes, weight.codes) is None
    torch.testing.assert_close(parts.hidden, whole.hidden, rtol=1e-5, atol=1e-5)


def test_reports_say_what_each_expert_was_calibrated_on(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    before = hidden_states(source)
    made = quantize_layer(source, before)
    experts = [r for r in made.reports if ".experts." in r.name]
    per_expert = {r.name.split(".")[5]: r.tokens for r in experts}
    assert sum(per_expert.values()) == 2 * TOKENS.numel()  # a token goes to two of four
    assert {r.rung for r in experts} == {"blended"}
    others = [r for r in made.reports if ".experts." not in r.name]
    assert {(r.tokens, r.rung) for r in others} == {(TOKENS.numel(), "routed")}
    checkpoint = open_checkpoint(source)
    with ShardReader(checkpoint) as reader:
        for report in made.reports:
            name = f"{report.name}.weight"
            original = reader.read_weight(logical_weights(checkpoint)[name]).double()
            off = original - dequantize_int4(
                made.weights[name].codes, made.weights[name].scales, torch.float64
            )
            share = float(off.square().sum() / original.square().sum())
            assert report.weight_error == pytest.approx(share, rel=1e-4)
            assert report.error <= report.rtn_error
            assert (report.error == report.rtn_error) == (report.fallback is not None)


def test_an_infinite_activation_names_the_layer(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    before = hidden_states(source)
    before[2, 3, 4] = float("inf")
    with pytest.raises(CalibrationError, match=r"layers\.1"):
        quantize_layer(source, before)
