"""Scaling preserves the function, its search measures true output errors, and a run survives it."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.runner import LayerRunner
from halfbyte.core import Plan, RunReport, Scheme, Settings
from halfbyte.errors import CalibrationError, UnsupportedModelError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.quantize import calibrated, pipeline
from halfbyte.quantize.awq import (
    ChannelScales,
    Reader,
    evenly_spread,
    output_error,
    scaled_moment,
    search_scales,
)
from halfbyte.quantize.gptq import factorize
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.readers import ScalableInput, norm_readers, up_and_down
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales
from halfbyte.quantize.smoothing import Smoothing
from halfbyte.quantize.verify import verify
from halfbyte.testing.numeric import relative_error
from halfbyte.testing.tiny import write_checkpoint, write_nested, write_safetensors, write_tiny

FAMILIES = ["glm_moe_dsa", "glm4_moe", "deepseek_v3"]
G32 = Scheme(group_size=32)

# Preservation, with quantization off.


def random_smoothing(
    shapes: dict[str, tuple[int, ...]], prefix: str, generator: torch.Generator, powers: bool
) -> Smoothing:
    """Scales for every input of a layer that the map knows, quantized or not."""
    sources = {
        **norm_readers(shapes),
        **{
            up: (down,)
            for up, down in up_and_down(n.removesuffix(".weight") for n in shapes).items()
        },
    }
    inputs = [
        ScalableInput(prefix + source, tuple(prefix + m for m in readers), ())
        for source, readers in sources.items()
    ]
    smoothing = Smoothing(inputs)
    for item in inputs:
        channels = shapes[f"{item.source.removeprefix(prefix)}.weight"][0]
        power = torch.randn(channels, generator=generator)
        scales = (2 * power).round().exp2() if powers else power.exp()
        smoothing.found[item.source] = ChannelScales(scales, 0.5, 1.0)
    return smoothing


def write_scaled(source: Path, folder: Path, *, powers: bool, skip: str = "") -> Path:
    """`source` in float32 with random scales applied by `Smoothing`; `skip` is forgotten."""
    generator = torch.Generator().manual_seed(3)
    checkpoint = open_checkpoint(source)
    weights = logical_weights(checkpoint)
    layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("model.layers."))
    tensors: dict[str, torch.Tensor] = {}
    with ShardReader(checkpoint) as reader:
        for name, stored in weights.items():
            tensors[name] = reader.read_weight(stored)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        own = {n.removeprefix(prefix): w.shape for n, w in weights.items() if n.startswith(prefix)}
        smoothing = random_smoothing(own, prefix, generator, powers)
        for name in own:
            if not skip or skip not in name:
                tensors[prefix + name] = smoothing.apply(prefix + name, tensors[prefix + name])
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    return write_checkpoint(folder, config, [tensors])


@torch.no_grad()
def what_transformers_computes(
    path: Path, tokens: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Logits, and the sets that routers and indexers select, layer by layer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    routed: list[torch.Tensor] = []
    indexed: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda *a: routed.append(a[2][2].sort(-1).values))
        if name.endswith("indexer"):
            module.register_forward_hook(lambda *a: indexed.append(a[2].sort(-1).values))
    return model(tokens, use_cache=False).logits, routed, indexed


def tokens(samples: int = 4, length: int = 40) -> torch.Tensor:
    """Longer than the 16 tokens that the tiny model's indexer selects."""
    return torch.randint(10, 300, (samples, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("powers", [False, True], ids=["any", "powers-of-two"])
def test_scaling_preserves_the_function(tmp_path: Path, model_type: Any, powers: bool) -> None:
    """Every norm and every up projection scaled, nothing quantized: the same logits and choices,
    to the last bit where scales are powers of two."""
    source = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16", mtp=False)
    scaled = write_scaled(source, tmp_path / "scaled", powers=powers)
    before, routed, indexed = what_transformers_computes(source, tokens())
    after, routed_after, indexed_after = what_transformers_computes(scaled, tokens())
    assert relative_error(after, before) < 1e-5
    assert len(routed) == 3
    assert len(indexed) == (3 if model_type == "glm_moe_dsa" else 0)
    for a, b in zip([*routed, *indexed], [*routed_after, *indexed_after], strict=True):
        assert torch.equal(a, b)
    if powers:
        assert torch.equal(after, before)


@pytest.mark.parametrize("skip", ["mlp.gate.", "indexer.wk", "indexer.wq_b", "weights_proj"])
def test_a_forgotten_reader_shows_in_that_test(tmp_path: Path, skip: str) -> None:
    source = write_tiny(tmp_path / "tiny", source="bf16", mtp=False)
    scaled = write_scaled(source, tmp_path / "scaled", powers=True, skip=skip)
    before, _, _ = what_transformers_computes(source, tokens())
    after, _, _ = what_transformers_computes(scaled, tokens())
    assert relative_error(after, before) > 1e-3


@pytest.mark.parametrize("model_type", FAMILIES)
def test_scaling_preserves_the_mtp_layer(tmp_path: Path, model_type: Any) -> None:
    """transformers does not run it; the runner does."""
    source = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    scaled = write_scaled(source, tmp_path / "scaled", powers=False)
    states = []
    for path in (source, scaled):
        checkpoint = open_checkpoint(path)
        with ShardReader(checkpoint) as reader:
            architecture = Architecture.of(checkpoint)
            runner = LayerRunner(
                architecture, logical_weights(checkpoint), reader, device="cpu", dtype=torch.float32
            )
            state = runner.embed(tokens())
            for index in range(architecture.layers):
                runner.advance(index, state)
            state = mtp_input(runner, architecture.layers, state, tokens(), 0)
            runner.advance(architecture.layers, state)
            states.append(state.hidden[:])
    assert relative_error(states[1], states[0]) < 1e-5


# The search.


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loud_inputs(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Correlated, with a few channels far louder than the others."""
    mixed = gaussian(tokens, channels, seed=seed) @ gaussian(channels, channels, seed=seed + 1)
    loud = torch.ones(channels)
    loud[::17] = 30
    return mixed * loud / channels**0.5


def second_moment(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def test_objective_is_the_output_error() -> None:
    """By running the scaled and rounded linear in float64, in tokens, rows and columns."""
    x, weight = loud_inputs(300, 64), gaussian(48, 64, seed=7)
    scales = gaussian(64, seed=9).round().exp2()
    scaled = weight * scales
    steps = group_scales(scaled[None], G32, "minmax")[0]
    codes = round_to_nearest(scaled, steps, G32).double()
    rounded = (codes.unflatten(-1, (2, 32)) * steps.double()[:, :, None]).flatten(-2)
    exact = x.double() @ weight.double().T
    after = (x.double() / scales.double()) @ rounded.T
    expected = float((exact - after).square().sum()) / len(x)
    reader = Reader(weight, second_moment(x), G32)
    assert float(output_error(reader, scales)) == pytest.approx(expected, rel=1e-4)


def test_objective_for_gptq_is_its_pivots_under_the_scaled_moment() -> None:
    """H' = S⁻¹ H S⁻¹ has the pivots D / s², so one factorization serves the whole grid."""
    x, weight = loud_inputs(300, 64), gaussian(48, 64, seed=7)
    hessian = second_moment(x)
    scales = gaussian(64, seed=9).round().exp2()
    pivots = factorize(hessian[None], 0.0, act_order=False).pivots[0]
    scaled_hessian = scaled_moment(hessian, scales)
    under_scaling = factorize(scaled_hessian[None], 0.0, act_order=False).pivots[0]
    torch.testing.assert_close(under_scaling, pivots / scales.square(), rtol=1e-3, atol=0)
    scaled = weight * scales
    steps = group_scales(scaled[None], G32, "minmax")[0]
    codes = round_to_nearest(scaled, steps, G32).double()
    rounded = (codes.unflatten(-1, (2, 32)) * steps.double()[:, :, None]).flatten(-2)
    expected = float(((scaled - rounded).square() * under_scaling.double()).sum())
    assert float(output_error(Reader(weight, pivots, G32), scales)) == pytest.approx(
        expected, rel=1e-3
    )


def once(*readers: Reader) -> Callable[[], list[Reader]]:
    return lambda: list(readers)


def test_search_helps_where_channels_are_loud() -> None:
    reader = Reader(gaussian(96, 128, seed=2), second_moment(loud_inputs(600, 128)), G32)
    found = search_scales(once(reader), "norm", 1)
    plain = output_error(reader, torch.ones(128))
    assert found.exponent is not None
    assert found.gain < 0.9
    assert float(output_error(reader, found.scales) / plain) == pytest.approx(found.gain)
    power, _ = torch.frexp(found.scales)
    assert bool((power == 0.5).all())  # powers of two
    assert found.scales[::17].mean() > 2 * found.scales.mean()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [1, 8])
def test_search_never_does_worse_by_its_own_measure(seed: int, steps: int) -> None:
    readers = [
        Reader(
            gaussian(16, 64, seed=seed), second_moment(gaussian(99, 64, seed=seed + 50)), G32, share
        )
        for share in (1.0, 0.25)
    ]
    found = search_scales(once(*readers), "norm", steps)
    errors = [
        sum(r.share * float(output_error(r, s)) for r in readers)
        for s in (found.scales, torch.ones(64))
    ]
    assert errors[0] <= errors[1]
    assert found.gain == pytest.approx(errors[0] / errors[1])


def test_all_readers_of_a_norm_are_weighed_together() -> None:
    """Two linears that want opposite things: the one that most tokens reach decides."""
    moment = second_moment(loud_inputs(600, 128))
    mirrored = moment.flip(0, 1)
    pair = [Reader(gaussian(64, 128, seed=n), m, G32) for n, m in enumerate((moment, mirrored))]
    alone = [search_scales(once(r), "norm", 1).scales for r in pair]
    for winner, shares in ((0, (1.0, 1e-6)), (1, (1e-6, 1.0))):
        weighed = [replace(r, share=s) for r, s in zip(pair, shares, strict=True)]
        found = search_scales(once(*weighed), "norm", 1).scales
        assert (found / alone[winner]).log2().abs().mean() < 1


def test_dead_channels_keep_their_scale() -> None:
    """Neither a channel that carries nothing nor one that nobody reads moves, and all is finite."""
    x, weight = loud_inputs(600, 128), gaussian(96, 128, seed=2)
    x[:, 5] = 0
    weight[:, 9] = 0
    found = search_scales(once(Reader(weight, second_moment(x), G32)), "norm", 1)
    assert found.exponent is not None
    assert found.scales[[5, 9]].tolist() == [1, 1]
    assert bool(torch.isfinite(found.scales).all())


@pytest.mark.parametrize("what", ["moment", "weight"])
def test_nothing_to_search_with_is_identity(what: str) -> None:
    moment, weight = torch.eye(64), gaussian(8, 64)
    (moment if what == "moment" else weight).zero_()
    found = search_scales(once(Reader(weight, moment, G32)), "norm", 1)
    assert found.exponent is None
    assert found.gain == 1
    assert torch.equal(found.scales, torch.ones(64))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_activations_that_are_not_finite_are_named(value: float) -> None:
    moment = torch.eye(64)
    moment[3, 4] = value
    with pytest.raises(CalibrationError, match=r"layers\.7\.norm"):
        search_scales(once(Reader(gaussian(8, 64), moment, G32)), "layers.7.norm", 1)


def test_readers_are_loaded_one_at_a_time() -> None:
    """Twice over, for candidates and for their errors, and never two at once."""
    alive = 0
    loads = 0

    def load() -> Iterator[Reader]:
        nonlocal alive, loads
        for seed in range(3):
            alive, loads = alive + 1, loads + 1
            assert alive == 1
            yield Reader(gaussian(8, 64, seed=seed), torch.eye(64), G32)
            alive -= 1

    search_scales(load, "norm", 1)
    assert loads == 6


def test_experts_in_the_search_are_spread_evenly() -> None:
    assert evenly_spread(range(12)) == list(range(12))
    chosen = evenly_spread(range(256))
    assert len(set(chosen)) == len(chosen) == 32
    assert (chosen[0], chosen[-1]) == (0, 255)
    assert {b - a for a, b in pairwise(chosen)} == {8, 9}


# Whole runs.

AWQ = Settings(method="awq", samples=6, sequence_length=24)
METHODS = ["awq", "awq+gptq"]


def calibration() -> torch.Tensor:
    return tokens(6, 24)


def plan_of(source: Path, settings: Settings, recipe: str) -> Plan:
    return make_plan(
        open_checkpoint(source), load_recipe(recipe), settings, max_shard_bytes=200_000
    )


def quantize(
    source: Path, out: Path, settings: Settings = AWQ, recipe: str = "glm-5", **options: Any
) -> RunReport:
    return pipeline.run(plan_of(source, settings, recipe), out, tokens=calibration(), **options)


def write_loud(folder: Path, **options: Any) -> Path:
    """A tiny model in which norms make some channels far louder than others, as trained ones do."""
    path = write_tiny(folder, **options)
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor[::17] *= 12
        write_safetensors(shard, tensors)
    return path


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_loud(tmp_path_factory.mktemp("awq") / "loud")


@pytest.fixture(scope="module")
def sound(loud: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished AWQ run; read-only."""
    out = tmp_path_factory.mktemp("awq") / "out"
    quantize(loud, out)
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", ["glm-5", "experts-and-dense", "glm-5-fp8-rest"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_output_verifies_against_its_source(
    tmp_path: Path, model_type: Any, recipe: str, method: Any
) -> None:
    source = write_loud(tmp_path / "loud", model_type=model_type)
    report = quantize(source, tmp_path / "out", replace(AWQ, method=method), recipe)
    assert verify(tmp_path / "out", source).mismatches == ()
    norms = [s for s in report.scaled if s.name.endswith("norm")]
    inner = [s for s in report.scaled if s.name.endswith("up_proj")]
    assert sum(s.exponent is not None for s in inner) > len(inner) / 2
    assert all(s.gain <= 1 for s in report.scaled)
    if recipe == "glm-5-fp8-rest":
        assert norms == []
    else:
        assert any(s.exponent is not None for s in norms)
        assert max(s.readers for s in norms) == 1 + 2 + 2 * 4  # router, shared and routed experts


def test_nested_model_verifies(tmp_path: Path) -> None:
    """Kimi's layout: names have a prefix and the configuration is nested."""
    source = write_nested(
        tmp_path / "nested", write_loud(tmp_path / "plain", model_type="deepseek_v3")
    )
    report = quantize(source, tmp_path / "out")
    assert verify(tmp_path / "out", source).mismatches == ()
    assert any(s.exponent is not None and s.name.endswith("norm") for s in report.scaled)


@pytest.mark.parametrize("recipe", ["glm-5", "experts-and-dense"])
@pytest.mark.parametrize("method", METHODS)
def test_the_run_computes_what_the_output_does(
    tmp_path: Path, recipe: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run computes without scaling, its output with it: the last state must be the same."""
    source = write_loud(tmp_path / "loud", mtp=False, source="bf16")
    seen: list[torch.Tensor] = []
    original = calibrated.LayerQuantizer.run

    def spy(self: Any, unit: Any, emit: Any) -> Any:
        result = original(self, unit, emit)
        seen.append(self.state.hidden[:].clone())
        return result

    monkeypatch.setattr(calibrated.LayerQuantizer, "run", spy)
    report = quantize(source, tmp_path / "out", replace(AWQ, method=method), recipe)
    assert any(s.exponent is not None and s.name.endswith("norm") for s in report.scaled)
    checkpoint = open_checkpoint(tmp_path / "out")
    with ShardReader(checkpoint) as reader:
        architecture = Architecture.of(checkpoint)
        runner = LayerRunner(
            architecture, logical_weights(checkpoint), reader, device="cpu", dtype=torch.float32
        )
        state = runner.embed(calibration())
        for index in range(architecture.layers):
            runner.advance(index, state)
    assert relative_error(seen[-1], state.hidden[:]) < 1e-5


def test_scaling_lowers_the_errors_of_a_loud_model(loud: Path, sound: Path, tmp_path: Path) -> None:
    """Compared with rounding the same weights with the same scale search, by the same measure."""
    gptq = quantize(loud, tmp_path / "gptq", replace(AWQ, method="gptq"))
    awq = RunReport.from_json(json.loads((sound / REPORT_FILE).read_text()), output="")
    assert sum(r.error for r in awq.linears) < 0.9 * sum(r.rtn_error for r in gptq.linears)


class Crash(BaseException):
    pass


@pytest.mark.parametrize("method", METHODS)
def test_resume_after_every_unit_gives_the_same_bytes(
    loud: Path, tmp_path: Path, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(AWQ, method=method)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quantize(loud, whole, settings, "experts-and-dense")
    commit = pipeline.CheckpointWriter.commit
    left = 0

    def stop(self: Any, *args: Any, **kw: Any) -> None:
        nonlocal left
        if left == 0:
            raise Crash
        left -= 1
        commit(self, *args, **kw)

    monkeypatch.setattr(pipeline.CheckpointWriter, "commit", stop)
    for _ in range(len(plan_of(loud, settings, "glm-5").units)):
        left = 1
        with contextlib.suppress(Crash):
            quantize(loud, broken, settings, "experts-and-dense", resume=True)
    files = [{p.name: p.read_bytes() for p in f.iterdir() if p.is_file()} for f in (whole, broken)]
    assert files[0] == files[1]


def test_an_expert_without_tokens_is_left_as_it_is(tmp_path: Path) -> None:
    source = write_loud(tmp_path / "loud", shards=1)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.gate.e_score_correction_bias"][3] = -100
    write_safetensors(source / "model.safetensors", tensors)
    report = quantize(source, tmp_path / "out")
    by_name = {s.name: s for s in report.scaled}
    lonely = by_name["model.layers.2.mlp.experts.3.up_proj"]
    assert (lonely.exponent, lonely.gain, lonely.smallest, lonely.largest) == (None, 1, 1, 1)
    assert by_name["model.layers.2.mlp.experts.0.up_proj"].exponent is not None
    assert verify(tmp_path / "out", source).mismatches == ()


def test_infinite_activation_names_the_layer(tmp_path: Path) -> None:
    source = write_loud(tmp_path / "loud", source="bf16", shards=1)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.post_attention_layernorm.weight"][5] = 3e38
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(CalibrationError, match=r"layers\.2\.post_attention_layernorm"):
        quantize(source, tmp_path / "out")


@pytest.mark.parametrize("factor", [1.25, 2.0])
@pytest.mark.parametrize(
    "name",
    [
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.experts.1.up_proj.weight_scale",
        "mlp.experts.1.down_proj.weight_scale",
    ],
)
def test_damage_of_a_scaled_tensor_is_found(
    loud: Path, sound: Path, tmp_path: Path, name: str, factor: float
) -> None:
    """A number that is off, also by a power of two, which is what scaling does to it."""
    found = damaged(sound, tmp_path, loud, name, factor)
    assert found == [f"model.layers.1.{name.removesuffix('_scale')}"]


def test_damage_of_the_reported_scales_is_found(loud: Path, sound: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(sound, tmp_path / "damaged"))
    report = json.loads((out / REPORT_FILE).read_text())
    line = next(s for s in report["scaled"] if s["name"].endswith("norm") and s["powers"])
    line["powers"] = ""
    (out / REPORT_FILE).write_text(json.dumps(report))
    names = {m.name for m in verify(out, loud).mismatches}
    assert f"{line['name']}.weight" in names
    line["powers"] = base64.b64encode(bytes([100] * 128)).decode()
    (out / REPORT_FILE).write_text(json.dumps(report))
    (mismatch,) = [m for m in verify(out, loud).mismatches if m.kind == "report"]
    assert "scales that cannot be" in mismatch.message


def damaged(
    sound: Path, folder: Path, source: Path, name: str, factor: float, layer: int = 1
) -> list[str]:
    """Multiply the first number of a tensor of layer 1 and what verification then complains of."""
    out = Path(shutil.copytree(sound, folder / "damaged"))
    info = open_checkpoint(out).tensors[f"model.layers.{layer}.{name}"]
    tensors = load_file(out / info.shard)
    tensors[info.name].view(-1)[0] *= factor
    raw = tensors[info.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with (out / info.shard).open("r+b") as file:
        file.seek(info.begin)
        file.write(raw)
    return [m.name for m in verify(out, source).mismatches if m.kind == "value"]


def test_plan_says_what_is_left_out_and_why(loud: Path) -> None:
    warnings = plan_of(loud, AWQ, "glm-5-fp8-rest").warnings
    (found,) = [w for w in warnings if "is not scaled" in w]
    assert "shared_experts.gate_proj.weight stays F8_E4M3" in found
    assert "3 more inputs" in found  # three sparse layers and the MTP layer
    assert not any("is not scaled" in w for w in plan_of(loud, AWQ, "glm-5").warnings)


def test_plan_refuses_a_linear_it_cannot_place(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny", shards=1)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.q_extra_proj.weight"] = torch.ones(8, 8)
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(UnsupportedModelError, match="q_extra_proj"):
        plan_of(source, AWQ, "glm-5")
    plan_of(source, replace(AWQ, method="gptq"), "glm-5")


def test_other_methods_scale_nothing(loud: Path, tmp_path: Path) -> None:
    report = quantize(loud, tmp_path / "out", replace(AWQ, method="gptq"))
    assert report.scaled == ()
