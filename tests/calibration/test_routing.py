"""Which tokens go to which expert, against plain loops over tokens."""

from __future__ import annotations

import pytest
import torch

from halfbyte.calibration.limits import HELD_OUT_STRIDE
from halfbyte.calibration.routing import Dispatch, ExpertsTakenOut, Routing
from halfbyte.formats.rows import InMemory

EXPERTS, TOP_K, TOKENS = 6, 2, 130
SILENT = 4
"""An expert that no token reaches."""


def random_routing(tokens: int = TOKENS) -> Routing:
    """Top-2 of 6, but for expert 4; slots are in the router's order, which is not sorted."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[:, SILENT] = -1
    weight, index = scores.topk(TOP_K, dim=-1)
    hidden = torch.randn(tokens, 3, generator=generator)
    return Routing(InMemory(hidden), index, weight, EXPERTS)


def by_loop(routing: Routing, tokens: range) -> list[list[tuple[int, float]]]:
    """Per expert its (token, weight) among `tokens`, counted from the first of them."""
    lists: list[list[tuple[int, float]]] = [[] for _ in range(routing.experts)]
    for place, token in enumerate(tokens):
        pairs = zip(routing.index[token].tolist(), routing.weight[token].tolist(), strict=True)
        for expert, weight in pairs:
            lists[expert].append((place, weight))
    return lists


def as_lists(dispatch: Dispatch) -> list[list[tuple[int, float]]]:
    lists = []
    for expert in range(EXPERTS):
        rows, weight = dispatch.rows(expert), dispatch.weight(expert)
        assert dispatch.tokens(expert) == len(rows)
        assert weight.shape == (len(rows), 1)
        lists.append(list(zip(rows.tolist(), weight[:, 0].tolist(), strict=True)))
    return lists


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, TOKENS), (0, 1), (1, 64), (100, TOKENS), (100, 1000), (7, 7)]
)
def test_a_range_of_tokens_goes_where_a_loop_sends_it(start: int, stop: int | None) -> None:
    routing = random_routing()
    tokens = range(TOKENS)[start:stop]
    assert as_lists(routing.dispatch(start, stop)) == by_loop(routing, tokens)


def test_ranges_together_are_all_tokens() -> None:
    routing = random_routing()
    ranges = [as_lists(routing.dispatch(start, start + 48)) for start in range(0, TOKENS, 48)]
    for expert, whole in enumerate(as_lists(routing.dispatch())):
        parts = [
            (48 * number + token, weight)
            for number, lists in enumerate(ranges)
            for token, weight in lists[expert]
        ]
        assert parts == whole


@pytest.mark.parametrize("tokens", [0, 1, HELD_OUT_STRIDE - 1, HELD_OUT_STRIDE, TOKENS])
def test_a_split_loses_no_token_and_holds_none_out_twice(tokens: int) -> None:
    routing = random_routing(tokens)
    train, held = (as_lists(part) for part in routing.split())
    for expert, every in enumerate(by_loop(routing, range(tokens))):
        out = [token % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1 for token, _ in every]
        assert held[expert] == [pair for pair, o in zip(every, out, strict=True) if o]
        assert train[expert] == [pair for pair, o in zip(every, out, strict=True) if not o]


def test_the_silent_expert_gets_nothing() -> None:
    routing = random_routing()
    for dispatch in (routing.dispatch(), *routing.split()):
        assert dispatch.tokens(SILENT) == 0
        assert dispatch.rows(SILENT).shape == (0,)
        assert dispatch.weight(SILENT).shape == (0, 1)


def test_what_the_experts_would_get_is_kept_over_batches() -> None:
    routing = random_routing(50)
    experts = ExpertsTakenOut(TOP_K)
    experts.expect(InMemory(torch.empty(50, 3)))
    for rows in (slice(0, 20), slice(20, 50)):
        out = experts(routing.hidden[rows], routing.index[rows], routing.weight[rows])
        assert not bool(out.any())
    hidden, index, weight = experts.take()
    assert torch.equal(hidden[:], routing.hidden[:])
    assert torch.equal(index, routing.index)
    assert torch.equal(weight, routing.weight)
    # With nothing expected, nothing is kept: a pass that only looks at plain linears.
    assert not bool(experts(routing.hidden[:], routing.index, routing.weight).any())
