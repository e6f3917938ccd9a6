"""Hessians: the right vectors, counted once, shared by the linears that read them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from halfbyte.calibration import runner as runner_module
from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.families import is_routed_expert
from halfbyte.calibration.inputs import (
    BLEND,
    FEW_HELD_OUT,
    ExpertInputs,
    check_inputs,
    collect_linear_inputs,
    input_of,
)
from halfbyte.calibration.limits import HELD_OUT_STRIDE, HELD_OUT_TOKENS
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner
from halfbyte.core import ExpertHessian, Scheme, Settings
from halfbyte.errors import CalibrationError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.rows import InMemory
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.quantize.solver import Inputs, Solved, solve
from halfbyte.testing.tiny import write_tiny

CHOICES: tuple[ExpertHessian, ...] = get_args(ExpertHessian)


def make_runner(reader: ShardReader) -> LayerRunner:
    return LayerRunner(
        Architecture.of(reader.checkpoint),
        logical_weights(reader.checkpoint),
        reader,
        device="cpu",
        dtype=torch.float32,
    )


def mean_moment(x: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    rows = x.reshape(-1, x.shape[-1]).double()
    return torch.einsum("ni,nj->ij", rows, rows) / len(rows)


def not_held_out(tokens: int, stride: int = HELD_OUT_STRIDE) -> list[int]:
    return [t for t in range(tokens) if t % stride != stride - 1]


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_plain_linears_see_what_transformers_feeds_them(
    tmp_path: Path, model_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear of a layer, its input recorded in transformers' own whole-model forward."""
    monkeypatch.setattr(runner_module, "BATCH_TOKENS", 60)  # several calls, none of 32 tokens
    path = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    tokens = torch.randint(10, 300, (5, 30), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    recorded: dict[str, torch.Tensor] = {}
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers.1." in name and "indexer" not in name
    }
    for name, module in linears.items():
        module.register_forward_pre_hook(
            lambda _, args, name=name: recorded.__setitem__(name, args[0])
        )
    model(tokens, use_cache=False)
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(reader)
        state = runner.embed(tokens)
        runner.advance(0, state)
        layer = runner.load_layer(1)
        stats = collect_linear_inputs(runner, layer, "model.layers.1.", list(linears), state)
    assert len(recorded) == len(linears) >= 7
    for name, x in recorded.items():
        found, rows = stats[input_of(name)], x.flatten(0, -2)
        assert (found.tokens, found.rung) == (150, "routed")
        # Every 32nd token is kept out of the mean, and is there to check results on.
        expected = mean_moment(rows[not_held_out(150)])
        torch.testing.assert_close(found.hessian.double(), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(
            found.held_out, rows[HELD_OUT_STRIDE - 1 :: HELD_OUT_STRIDE], rtol=1e-3, atol=1e-4
        )


def test_linears_that_share_an_input() -> None:
    layer = "model.layers.3."
    shared = [
        ["mlp.experts.7.gate_proj", "mlp.experts.7.up_proj"],
        ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
        ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["mlp.experts.7.down_proj"],
        ["mlp.experts.8.gate_proj"],
        ["self_attn.o_proj"],
        ["self_attn.q_b_proj"],
        ["self_attn.kv_b_proj"],
    ]
    keys = [{input_of(layer + name) for name in names} for names in shared]
    assert all(len(key) == 1 for key in keys)
    assert len(set().union(*keys)) == len(shared)
    assert is_routed_expert(layer + "mlp.experts.7.down_proj")
    assert not is_routed_expert(layer + "mlp.shared_experts.down_proj")


WIDTH = 8
TOKENS_OF = [300, 100, 15, 4, 1, 0]
"""By expert. WIDTH / 2 = 4 of them is a starved one."""


def routing_of(tokens_of: list[int], hidden: int) -> Routing:
    """Routing with top-1: `tokens_of[e]` tokens for expert e, in shuffled order."""
    generator = torch.Generator().manual_seed(0)
    index = torch.repeat_interleave(torch.arange(len(tokens_of)), torch.tensor(tokens_of))
    index = index[torch.randperm(len(index), generator=generator)][:, None]
    x = torch.randn(len(index), hidden, generator=generator)
    x *= torch.randn(hidden, generator=generator).exp()
    weight = torch.rand(len(index), 1, generator=generator) + 0.01
    return Routing(InMemory(x), index, weight, len(tokens_of))


def tokens_of_expert(routing: Routing, expert: int) -> list[int]:
    return [t for t, (e,) in enumerate(routing.index.tolist()) if e == expert]


def expected_hessian(
    routing: Routing, expert: int, choice: ExpertHessian, *, affinity: bool = False
) -> tuple[torch.Tensor, str]:
    """What gate and up of an expert are calibrated on, in float64, and its rung."""
    free = set(not_held_out(len(routing.hidden)))
    everything = mean_moment(routing.hidden[:][sorted(free)])
    own = [t for t in tokens_of_expert(routing, expert) if t in free]
    if choice == "all" or not own:
        return everything, "all-tokens"
    total = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    square = sum(float(routing.weight[t, 0]) ** 2 for t in own) / len(own)
    for token in own:
        x = routing.hidden[:][token].double()
        share = float(routing.weight[token, 0]) ** 2 / square if affinity else 1.0
        total += share * torch.outer(x, x)
    if choice == "routed":
        return total / len(own), "routed"
    layers = BLEND * WIDTH
    return (total + layers * everything) / (len(own) + layers), "blended"


@pytest.mark.parametrize("affinity", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_is_its_definition(choice: ExpertHessian, affinity: bool) -> None:
    routing = routing_of(TOKENS_OF, WIDTH)
    inputs = ExpertInputs(routing, choice, affinity=affinity)
    for expert, count in enumerate(TOKENS_OF):
        stats = inputs.gate_up(expert)
        assert stats is not None
        expected, rung = expected_hessian(routing, expert, choice, affinity=affinity)
        assert (stats.tokens, stats.rung) == (count, rung)
        assert inputs.tokens(expert) == count
        torch.testing.assert_close(stats.hessian.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_held_out_tokens_are_in_no_hessian(choice: ExpertHessian) -> None:
    """They are made a hundred times larger, which changes what is held out and nothing else."""
    routing = routing_of(TOKENS_OF, WIDTH)
    loud = Routing(
        InMemory(routing.hidden[:].clone()), routing.index, routing.weight, routing.experts
    )
    held = slice(HELD_OUT_STRIDE - 1, None, HELD_OUT_STRIDE)
    loud.hidden[:][held] *= 1e2
    for expert in range(routing.experts):
        before, after = (ExpertInputs(r, choice).gate_up(expert) for r in (routing, loud))
        assert before is not None
        assert after is not None
        torch.testing.assert_close(after.hessian, before.hessian, rtol=1e-3, atol=1e-3)
        assert before.held_out is not None
        torch.testing.assert_close(after.held_out, 1e2 * before.held_out)


def test_an_expert_is_checked_on_its_own_held_out_tokens_first() -> None:
    routing = routing_of([3000, 500, 20, 0], WIDTH)
    inputs = ExpertInputs(routing)
    every = range(HELD_OUT_STRIDE - 1, len(routing.hidden), HELD_OUT_STRIDE)
    for expert in range(4):
        stats = inputs.gate_up(expert)
        assert stats is not None
        assert stats.held_out is not None
        own = [t for t in every if int(routing.index[t]) == expert]
        torch.testing.assert_close(stats.held_out[: len(own)], routing.hidden[:][own])
        # The others are held-out tokens as well, of whatever expert.
        assert len(stats.held_out) == max(len(own), FEW_HELD_OUT)
        rows = {tuple(row) for row in routing.hidden[:][every.start :: HELD_OUT_STRIDE].tolist()}
        assert {tuple(row) for row in stats.held_out.tolist()} <= rows


def test_held_out_tokens_of_a_busy_expert_are_a_spread_sample() -> None:
    routing = routing_of([HELD_OUT_STRIDE * (HELD_OUT_TOKENS + 44)], WIDTH)
    stats = ExpertInputs(routing).gate_up(0)
    assert stats is not None
    assert stats.held_out is not None
    held = routing.hidden[:][HELD_OUT_STRIDE - 1 :: HELD_OUT_STRIDE]
    last = HELD_OUT_TOKENS - 1
    spread = [round(i * (len(held) - 1) / last) for i in range(HELD_OUT_TOKENS)]
    assert torch.equal(stats.held_out, held[spread])


def test_no_token_at_all_gives_no_statistics() -> None:
    assert ExpertInputs(routing_of([0, 0], 8)).gate_up(0) is None


@pytest.mark.parametrize("tokens", [1, 3, HELD_OUT_STRIDE - 1])
def test_too_few_tokens_to_hold_one_out(tokens: int) -> None:
    stats = ExpertInputs(routing_of([0, tokens], 8)).gate_up(1)
    assert stats is not None
    assert stats.held_out is not None
    assert stats.held_out.shape == (0, 8)
    assert bool(torch.isfinite(stats.hessian).all())


@pytest.mark.parametrize("expert", [0, 1])
@torch.no_grad()
def test_down_projections_see_what_the_quantized_gate_and_up_make(
    tmp_path: Path, expert: int
) -> None:
    """Expert 0 has 3 tokens, expert 1 has 600; the layer's mean is over an even sample."""
    path = write_tiny(tmp_path / "tiny", source="bf16")
    stored = {k: v.float() for f in path.glob("*.safetensors") for k, v in load_file(f).items()}
    gate, up = (stored[f"model.layers.1.mlp.experts.0.{n}_proj.weight"] for n in ("gate", "up"))
    routing = routing_of([3, 600], 128)
    free = not_held_out(603)

    def inner(tokens: list[int]) -> torch.Tensor:
        x = routing.hidden[:][tokens].double()
        return torch.nn.functional.silu(x @ gate.double().T) * (x @ up.double().T)

    own = [t for t in tokens_of_expert(routing, expert) if t in free]
    spread = [free[round(i * (len(free) - 1) / 511)] for i in range(512)]  # 8 to a feature
    layers = BLEND * 64
    total = len(own) * mean_moment(inner(own)) + layers * mean_moment(inner(spread))
    expected = {
        "routed": mean_moment(inner(own)),
        "blend": total / (len(own) + layers),
        "all": mean_moment(inner(spread)),
    }
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(reader)
        for choice in CHOICES:
            inputs = ExpertInputs(routing, choice)
            stats = inputs.down(expert, runner, torch.cat([gate, up]))
            assert stats is not None
            assert stats.tokens == (3, 600)[expert]
            torch.testing.assert_close(
                stats.hessian.double(), expected[choice], rtol=1e-3, atol=1e-6 * WIDTH
            )
            held = [t for t in tokens_of_expert(routing, expert) if t not in free]
            assert stats.held_out is not None
            torch.testing.assert_close(
                stats.held_out[: len(held)].double(), inner(held), rtol=1e-3, atol=1e-5
            )


@pytest.mark.parametrize("choice", CHOICES)
def test_starved_experts_do_no_worse_than_plain_rounding_on_held_out_tokens(
    choice: ExpertHessian,
) -> None:
    """Experts with 0, 1 and K / 2 tokens, K the width, beside a busy one."""
    columns = 64
    starved = [0, 1, columns // 2]
    routing = routing_of([*starved, 4000], columns)
    inputs = ExpertInputs(routing, choice)
    stats = [inputs.gate_up(expert) for expert in range(4)]
    held = [s.held_out for s in stats if s is not None and s.held_out is not None]
    assert len(held) == 4
    hessians = torch.stack([s.hessian for s in stats if s is not None])
    assert bool(torch.isfinite(hessians).all())
    usual = {"routed": "routed", "blend": "blended", "all": "all-tokens"}[choice]
    found = [(s.tokens, s.rung) for s in stats if s is not None]
    assert found == [(0, "all-tokens"), (1, usual), (32, usual), (4000, usual)]

    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(4, 48, columns, generator=generator) / columns**0.5
    padded = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)
    solved = solve(weights, Scheme(), Inputs(hessians, padded), Settings())
    plain = solve(weights, Scheme(), None, Settings(method="rtn"))

    def on_held_out(made: Solved, item: int) -> float:
        error = (weights[item] - made.dequantized(item)).double()
        return float((held[item].double() @ error.T).square().sum())

    for item, (linear,) in enumerate(solved.linears):
        assert math.isfinite(linear.error)
        assert on_held_out(solved, item) <= on_held_out(plain, item)
    assert on_held_out(solved, 3) < 0.9 * on_held_out(plain, 3)


@pytest.mark.parametrize("choice", CHOICES)
def test_an_infinite_activation_shows_in_the_hessian_of_its_expert(choice: ExpertHessian) -> None:
    routing = routing_of([40, 30], WIDTH)
    token = next(t for t in not_held_out(70) if int(routing.index[t]) == 1)
    routing.hidden[:][token, 3] = float("inf")
    stats = ExpertInputs(routing, choice).gate_up(1)
    assert stats is not None
    with pytest.raises(CalibrationError, match=r"inputs of expert 1 of layers\.7 are not finite"):
        check_inputs(
            torch.stack([torch.eye(WIDTH), stats.hessian]), ["other", "expert 1 of layers.7"]
        )


def test_an_infinite_activation_names_the_input_of_a_plain_linear(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(reader)
        state = runner.embed(torch.arange(10, 50).view(2, 20))
        layer = runner.load_layer(0)
        state.hidden[:][1, 2, 3] = float("inf")
        names = ["model.layers.0.self_attn.q_a_proj", "model.layers.0.mlp.down_proj"]
        with pytest.raises(CalibrationError, match=r"model\.layers\.0\..*not finite"):
            collect_linear_inputs(runner, layer, "model.layers.0.", names, state)


def test_infinite_input_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"layers\.3\.mlp\.gate_up"):
        check_inputs(torch.full((1, 2, 2), float("inf")), ["layers.3.mlp.gate_up"])
