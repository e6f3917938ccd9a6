"""The bound on a product: sound ones keep it, and small errors break it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte.calibration.routing import Routing
from halfbyte.core import Scheme, StoredWeight, TensorInfo
from halfbyte.formats.rows import InMemory
from halfbyte.kernels import reference
from halfbyte.kernels.w4a16 import Packed
from halfbyte.quantize.products import (
    Expected,
    Linear,
    Routed,
    Together,
    Width,
    judge,
    poisoned,
    token_counts,
)

GENERATOR = torch.Generator().manual_seed(0)


def linear(rows: int, columns: int, group: int = 32) -> Linear:
    codes = torch.randint(-8, 8, (rows, columns), generator=GENERATOR, dtype=torch.int8)
    scales = torch.rand(rows, columns // group, generator=GENERATOR) * 0.02 + 1e-3
    stored = Packed(reference.pack_int4(codes), scales.bfloat16())
    spread = stored.scales.float().repeat_interleave(group, 1)
    return Linear(stored, codes.float() * spread)


def expected_of(x: torch.Tensor, one: Linear) -> list[Expected]:
    return [Expected.of(x, weight, one.stored.scales) for weight in one.alternatives()]


def activations(tokens: int, columns: int) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=GENERATOR).bfloat16()


@pytest.mark.parametrize("columns", [32, 256, 6144])
@pytest.mark.parametrize("massive", [False, True], ids=["normal", "massive"])
def test_float32_sums_in_any_order_keep_the_bound(columns: int, massive: bool) -> None:
    one, x = linear(64, columns), activations(128, columns)
    if massive:  # as trained models have them: all that follows is added to a large number
        x[:, 3] = 1000.0
    expected = expected_of(x, one)
    order = torch.randperm(columns, generator=GENERATOR)
    forward = torch.zeros(128, 64)
    for column in range(columns):  # one after the other, the worst order there is
        forward += x[:, column, None].float() * one.weight[:, column]
    shuffled = x[:, order].float() @ one.weight[:, order].T
    for sums in (forward, shuffled):
        judged = judge(sums.bfloat16(), expected, 128)
        assert judged.fault is None, judged.fault
        assert judged.error == pytest.approx(judged.rounding, rel=1e-3)


def cut_off(sums: torch.Tensor) -> torch.Tensor:
    """float64 to float32 towards zero, as tensor cores leave their sums."""
    near = sums.float()
    beyond = near.double().abs() > sums.abs()
    return torch.where(beyond, near.nextafter(torch.zeros(())), near)


def test_sums_that_are_cut_off_keep_the_bound() -> None:
    one, x = linear(64, 6144), activations(16, 6144).abs()
    one = Linear(one.stored, one.weight.abs())  # sums only grow, and each step cuts off
    sums = torch.zeros(16, 64)
    for start in range(0, 6144, 16):
        part = slice(start, start + 16)
        sums = cut_off(sums.double() + x[:, part].double() @ one.weight[:, part].double().T)
    judged = judge(sums.bfloat16(), expected_of(x, one), 16)
    assert judged.fault is None
    assert judged.of_allowance is not None
    assert judged.of_allowance > 0.02  # it leaves no room for more than the worst of that


def half(y: torch.Tensor) -> None:
    y[5, 7] *= 1 + 2**-6


def zero_row(y: torch.Tensor) -> None:
    y[:, -1] = 0


def not_a_number(y: torch.Tensor) -> None:
    y[2, 3] = float("nan")


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (half, "token 5, row 7"),
        (zero_row, "row 63 is 0"),
        (not_a_number, "token 2, row 3 is nan"),
    ],
)
def test_outputs_that_are_wrong(damage: Callable[[torch.Tensor], None], where: str) -> None:
    one, x = linear(64, 2048), activations(8, 2048)
    expected = expected_of(x, one)
    y = expected[0].value.bfloat16()
    assert judge(y, expected, 8).of_allowance == 0
    damage(y)
    fault = judge(y, expected, 8).fault
    assert fault is not None
    assert where in fault


def test_a_code_that_is_one_step_off_in_one_place() -> None:
    """Of 2,048 columns: a two hundredth of what rounding the output does to the product."""
    one, x = linear(64, 2048), activations(128, 2048)
    wrong = one.weight.clone()
    wrong[11, 1000] += one.stored.scales[11, 1000 // 32].float()
    judged = judge((x.float() @ wrong.T).bfloat16(), expected_of(x, one), 128)
    assert judged.fault is not None
    assert "row 11" in judged.fault
    assert "1 of 64 rows" in judged.fault


def test_weights_may_be_rounded_for_many_tokens() -> None:
    """As kernels do that make 16-bit weights of codes first. The error shows it."""
    one, x = linear(64, 2048), activations(128, 2048)
    y = (x.float() @ one.weight.bfloat16().float().T).bfloat16()
    judged = judge(y, expected_of(x, one), 128)
    assert judged.fault is None
    assert judged.error is not None
    assert judged.rounding is not None
    assert judged.error > 1.2 * judged.rounding
    for tokens in (1, 8, 16):
        assert judge(y[:tokens], expected_of(x, one), tokens).fault is not None


def test_codes_may_be_taken_as_they_are_stored() -> None:
    """0 to 15, less 8 times the activations, of which one is massive and meets codes of zero."""
    one, x = linear(64, 128), activations(16, 128)
    x[:, 3] = 30000.0
    codes = reference.unpack_int4(one.stored.codes, 128)
    codes[:, 3] = 0
    stored = Packed(reference.pack_int4(codes), one.stored.scales)
    spread = stored.scales.float().repeat_interleave(32, 1)
    one = Linear(stored, codes.float() * spread)
    groups = x.float().unflatten(1, (4, 32)), (codes.float() + 8).unflatten(1, (4, 32))
    sums = torch.einsum("mgk,ngk->mng", *groups) - 8 * groups[0].sum(2)[:, None]
    y = (sums * stored.scales.float()).sum(2).bfloat16()
    assert judge(y, expected_of(x, one), 16).fault is None


def test_results_of_another_shape_or_dtype() -> None:
    one, x = linear(8, 64), activations(2, 64)
    expected = expected_of(x, one)
    for y in (torch.zeros(2, 7).bfloat16(), torch.zeros(2, 8)):
        judged = judge(y, expected, 2)
        assert judged.error is None
        assert "not torch.bfloat16 [2, 8]" in str(judged.fault)


def test_what_is_not_finite_has_no_number() -> None:
    one, x = linear(8, 64), activations(2, 64)
    y = torch.full((2, 8), float("inf")).bfloat16()
    judged = judge(y, expected_of(x, one), 2)
    assert (judged.error, judged.of_allowance) == (None, None)
    assert json.dumps(judged, allow_nan=False)


def test_zeros_times_anything_are_zeros() -> None:
    one, x = linear(8, 64), torch.zeros(2, 64).bfloat16()
    expected = expected_of(x, one)
    assert judge(torch.zeros(2, 8).bfloat16(), expected, 2).fault is None
    assert judge(torch.full((2, 8), 1e-30).bfloat16(), expected, 2).fault is not None


def test_the_products_of_decoding_and_of_prefill() -> None:
    assert (token_counts(128), token_counts(40), token_counts(1)) == ([1, 8, 128], [1, 8, 40], [1])
    one = linear(8, 64)
    results, y = one.judged(activations(40, 64))
    assert len(results) == 3
    assert y.shape == (40, 8)


def test_memory_that_nobody_writes_is_poisoned() -> None:
    with poisoned():
        assert bool(torch.empty(100).isnan().all())
        assert bool(torch.empty(100, dtype=torch.bfloat16).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


# The experts of a layer.

EXPERTS, HIDDEN, INTERMEDIATE = 6, 128, 64


def layer_of() -> tuple[Together, list[dict[str, Linear]], Routed]:
    width = Width("model.layers.3.mlp.", EXPERTS, INTERMEDIATE, HIDDEN, 2)
    routed = Routed.at_random(activations(128, HIDDEN), width)
    experts = [
        {
            "gate_proj": linear(INTERMEDIATE, HIDDEN),
            "up_proj": linear(INTERMEDIATE, HIDDEN),
            "down_proj": linear(HIDDEN, INTERMEDIATE),
        }
        for _ in range(EXPERTS)
    ]
    together = Together(routed, width)
    for number, leaves in enumerate(experts):
        for leaf in sorted(leaves):  # in the order of a checkpoint
            together.take(f"{width.prefix}experts.{number}.{leaf}.weight", leaves[leaf])
    return together, experts, routed


def test_experts_together_keep_the_bound() -> None:
    together, _, _ = layer_of()
    for judged in together.judged():
        assert judged.fault is None, judged.fault
        assert judged.error is not None
        assert judged.error == pytest.approx(judged.rounding, rel=0.01)


def test_what_float64_makes_of_experts_is_the_textbooks(monkeypatch: pytest.MonkeyPatch) -> None:
    together, experts, routed = layer_of()
    y = torch.zeros(128, HIDDEN, dtype=torch.float64)
    for token in range(128):
        for place, number in enumerate(routed.chosen[token].tolist()):
            gate, up, down = (
                experts[number][leaf].weight.double()
                for leaf in ("gate_proj", "up_proj", "down_proj")
            )
            x = routed.x[token].double()
            g, u = gate @ x, up @ x
            inner = (g / (1 + torch.exp(-g)) * u).bfloat16().double()
            y[token] += routed.router[token, place].double() * (down @ inner)
    assert bool((routed.router.sum(1) - 1).abs().max() < 1e-6)
    monkeypatch.setattr(reference, "experts_int4", lambda x, *_: y[: len(x)].bfloat16())
    for judged in together.judged():
        assert judged.of_allowance == 0


def without_an_expert(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    gate_up, down, chosen, router = rest
    return EXPERTS_INT4(x, gate_up, down, chosen, router.masked_fill(chosen == 4, 0))


def routers_swapped(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    gate_up, down, chosen, router = rest
    return EXPERTS_INT4(x, gate_up, down, chosen, router.flip(1))


def up_before_gate(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    gate_up, down, chosen, router = rest
    turned = tuple(part.roll(INTERMEDIATE, 1) for part in gate_up)
    return EXPERTS_INT4(x, turned, down, chosen, router)


def last_token_unwritten(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:-1] = EXPERTS_INT4(x, *rest)[:-1]
    return y


EXPERTS_INT4 = reference.experts_int4


@pytest.mark.parametrize(
    "wrong", [without_an_expert, routers_swapped, up_before_gate, last_token_unwritten]
)
def test_experts_that_are_wrong(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together, _, _ = layer_of()
    monkeypatch.setattr(reference, "experts_int4", wrong)
    assert together.judged()[-1].fault is not None


def test_the_tokens_of_a_text_keep_their_routing() -> None:
    hidden = torch.randn(1000, 16, generator=GENERATOR)
    index = torch.randint(0, 4, (1000, 2), generator=GENERATOR)
    weight = torch.rand(1000, 2, generator=GENERATOR)
    routed = Routed.sample(Routing(InMemory(hidden), index, weight, 4))
    assert len(routed.x) == 128
    for x, chosen, router in zip(*routed, strict=True):
        (row,) = (hidden.bfloat16() == x).all(1).nonzero()[0].tolist()
        assert chosen.tolist() == index[row].tolist()
        assert torch.equal(router, weight[row])


# Which experts can be taken together.


def stored(expert: int, leaf: str, encoding: Any = "int4", rows: int = 64) -> StoredWeight:
    name = f"model.layers.3.mlp.experts.{expert}.{leaf}.weight"
    info = TensorInfo(name, "I32", (rows, 16), "shard", 0, 0)
    return StoredWeight(name, (rows, 128), encoding, {"packed": info}, scheme=Scheme())


def widths(*weights: StoredWeight, **config: Any) -> Width | str | None:
    return Width.of({w.name: w for w in weights}, {"num_experts_per_tok": 1, **config})


LEAVES = ("gate_proj", "up_proj", "down_proj")
TWO = [stored(expert, leaf) for expert in range(2) for leaf in LEAVES]


def test_widths_of_a_layer() -> None:
    assert widths(*TWO) == Width("model.layers.3.mlp.", 2, 64, 128, 1)
    assert widths() is None


@pytest.mark.parametrize(
    ("weights", "config", "reason"),
    [
        (TWO[:5], {}, "not alike"),
        (TWO[3:], {}, "not alike"),
        ([*TWO[:5], stored(1, "down_proj", rows=32)], {}, "not alike"),
        ([stored(0, leaf, "plain") for leaf in LEAVES], {}, "not gate, up and down in INT4"),
        (TWO, {"hidden_act": "gelu"}, "activation is 'gelu'"),
        (TWO, {"num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        (TWO, {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
    ],
)
def test_experts_that_one_launch_cannot_take(
    weights: list[StoredWeight], config: dict[str, Any], reason: str
) -> None:
    assert reason in str(widths(*weights, **config))
