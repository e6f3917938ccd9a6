"""Hessians: the right vectors, counted once, shared by the linears that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.inputs import (
    ExpertInputs,
    checked,
    collect_linear_inputs,
    input_of,
    is_routed_expert,
)
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner
from halfbyte.core import InputStats
from halfbyte.errors import CalibrationError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.testing.tiny import write_tiny


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


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_plain_linears_see_what_transformers_feeds_them(tmp_path: Path, model_type: Any) -> None:
    """Every linear of a layer, its input recorded in transformers' own whole-model forward."""
    path = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")
    tokens = torch.randint(10, 300, (4, 30), generator=torch.Generator().manual_seed(3))
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
        found = stats[input_of(name)]
        assert found.tokens == 120
        torch.testing.assert_close(found.hessian.double(), mean_moment(x), rtol=1e-3, atol=1e-4)


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


def routing_of(tokens_of: list[int], hidden: int) -> Routing:
    """Routing with top-1: `tokens_of[e]` tokens for expert e, in shuffled order."""
    generator = torch.Generator().manual_seed(0)
    index = torch.repeat_interleave(torch.arange(len(tokens_of)), torch.tensor(tokens_of))
    index = index[torch.randperm(len(index), generator=generator)][:, None]
    x = torch.randn(len(index), hidden, generator=generator)
    return Routing.of(x, index, torch.ones(len(index), 1), len(tokens_of))


def test_experts_are_topped_up_to_twice_their_width() -> None:
    width = 8
    routing = routing_of([40, 16, 15, 1, 0], width)
    inputs = ExpertInputs(routing, "layers.1")
    everything = mean_moment(routing.hidden)
    for expert, rung in enumerate(["routed", "routed", "blended", "blended", "all-tokens"]):
        stats = inputs.gate_up(expert)
        assert stats is not None
        own = routing.hidden[routing.rows(expert)]
        assert (stats.tokens, stats.rung) == (len(own), rung)
        missing = max(0, 16 - len(own))
        expected = len(own) / (len(own) + missing) * (mean_moment(own) if len(own) else 0)
        expected = expected + missing / (len(own) + missing) * everything
        torch.testing.assert_close(stats.hessian.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_token_at_all_gives_no_statistics() -> None:
    assert ExpertInputs(routing_of([0, 0], 8), "layers.1").gate_up(0) is None


@torch.no_grad()
def test_starved_down_projection_sees_spread_tokens(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    stored = {k: v.float() for f in path.glob("*.safetensors") for k, v in load_file(f).items()}
    gate, up = (stored[f"model.layers.1.mlp.experts.0.{n}_proj.weight"] for n in ("gate", "up"))
    routing = routing_of([3, 400], 128)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x @ gate.T) * (x @ up.T)

    with ShardReader(open_checkpoint(path)) as reader:
        runner = make_runner(reader)
        own = inner(routing.hidden[routing.rows(0)])
        stats = ExpertInputs(routing, "layers.1").down(runner, own, gate, up)
    assert stats is not None
    assert (stats.tokens, stats.rung) == (3, "blended")
    missing = 2 * 64 - 3
    spread = [round(i * 402 / (missing - 1)) for i in range(missing)]
    expected = mean_moment(torch.cat([own, inner(routing.hidden[spread])]))
    torch.testing.assert_close(stats.hessian.double(), expected, rtol=1e-3, atol=1e-6)


def test_infinite_input_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"layers\.3\.mlp\.gate_up"):
        checked(InputStats(torch.full((2, 2), float("inf")), 5), "layers.3.mlp.gate_up")
