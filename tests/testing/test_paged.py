"""The miniature server answers right, and right servers never raise an alarm."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfbyte.testing.arithmetic import VOCABULARY
from halfbyte.testing.paged import Server
from halfbyte.testing.paged_parts import Request

MOST_STEPS = 100_000
KINDS = {
    "submit", "hit", "miss", "prefill", "chunk", "decode", "finish", "cancel", "retract", "alloc",
    "free", "evict", "load",
}  # fmt: skip


def serve(server: Server, count: int, chance: random.Random) -> None:
    """Requests that share prefixes, at random times; some are cancelled."""
    bases = [[chance.randrange(VOCABULARY) for _ in range(20)] for _ in range(3)]
    for _ in range(count):
        tail = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 15))]
        prompt = chance.choice(bases)[: chance.randrange(21)] + tail
        server.submit(prompt, chance.randrange(1, 14), remote=chance.random() < 0.15)
        for _ in range(chance.randrange(3)):
            server.iterate()
        if chance.random() < 0.1 and (living := alive(server)):
            server.cancel(chance.choice(living))
    server.run(5_000)


def alive(server: Server) -> list[Request]:
    return [r for r in server.requests if r.state in ("waiting", "running")]


def owned_once(server: Server) -> bool:
    """Whether each page is free, in the cache, a request's, or waits for a transfer to end."""
    pages = [*server.free, *(node.page for node in server.nodes())]
    pages += [page for r in server.running for page in r.pages[r.cached :]]
    return len(pages) == len(set(pages)) and (
        len(pages) == server.pages - 1 or bool(server.transfers)
    )


@torch.inference_mode()
def test_a_hundred_thousand_steps_without_a_false_alarm() -> None:
    """In mode raise, which ends the run at the first alarm of any kind."""
    total, seed = 0, 0
    seen: set[str] = set()
    while total < MOST_STEPS:
        seed += 1
        size, drafts = (1, 4, 8)[seed % 3], 3 * (seed % 5 == 0)
        pages = (70, 160, 160)[seed % 3] // size + 1
        server = Server(mode="raise", page_size=size, pages=pages, drafts=drafts, seed=seed)
        serve(server, 150, random.Random(seed))
        assert server.wrong() == []
        assert owned_once(server)
        assert server.tracker.healthy
        metrics = server.tracker.metrics()
        assert metrics["checks"] == metrics["steps"] > 100
        assert not any(n for name, n in metrics.items() if name.startswith(("viol", "quar")))
        total += server.steps
        seen |= set(server.events)
    assert seen == KINDS


class RightServer(RuleBasedStateMachine):
    """Any order of what users and the scheduler do."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(mode="raise", pages=32, seed=3)

    @rule(
        base=st.integers(0, 2), shared=st.integers(0, 20), tail=st.integers(1, 12),
        count=st.integers(1, 12), remote=st.booleans(),
    )  # fmt: skip
    def submit(self, base: int, shared: int, tail: int, count: int, remote: bool) -> None:
        prompt = [(base * 31 + i) % VOCABULARY for i in range(shared)] + [base] * tail
        self.server.submit(prompt, count, remote=remote)

    @rule(turns=st.integers(1, 6))
    def iterate(self, turns: int) -> None:
        for _ in range(turns):
            self.server.iterate()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if living := alive(self.server):
            self.server.cancel(data.draw(st.sampled_from(living)))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaves = [n for n in self.server.nodes() if not n.children and not n.locks]
        if leaves:
            self.server.evict(data.draw(st.sampled_from(sorted(leaves, key=lambda n: n.page))))

    @rule()
    def retract(self) -> None:
        if len([r for r in self.server.running if r.arrives < self.server.time]) > 1:
            self.server.retract()

    @invariant()
    def pages_have_one_owner(self) -> None:
        assert owned_once(self.server)

    def teardown(self) -> None:
        self.server.run(2_000)
        assert self.server.wrong() == []


TestRightServer = RightServer.TestCase
TestRightServer.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), turns=st.integers(3, 25), place=st.integers(0, 10**6),
    how=st.sampled_from(["freed", "reused", "table", "row"]), drafts=st.sampled_from([0, 0, 3]),
)  # fmt: skip
def test_no_token_of_a_stale_mapping_leaves(
    seed: int, turns: int, place: int, how: str, drafts: int
) -> None:
    """Any page of any request goes wrong at any time; it is aborted unless it had ended
    or begins anew."""
    server = Server(pages=64, seed=seed, drafts=drafts)
    chance = random.Random(seed)
    for _ in range(10):
        shared = [7] * chance.randrange(12)
        tail = [chance.randrange(VOCABULARY) for _ in range(6)]
        server.submit(shared + tail, 14, remote=chance.random() < 0.2)
    for _ in range(turns):
        server.iterate()
    ready = [r for r in server.running if r.arrives < 0 and r.settled >= server.page_size]
    if not ready:
        return
    request = ready[place % len(ready)]
    index = place % (request.settled // server.page_size)
    # Not of one that ends soon, nor of one whose table the cache is about to write anew.
    certain = request.count - len(request.output) > 2 + drafts and server.decodes(request)
    entered = request.entered
    if how == "table":
        other = request.pages[index] % 62 + 1
        server.write_table(request.row, index, other)
    elif how == "row":
        server.free_row(request.row)
        server.free_rows.remove(request.row)
    else:
        page = request.pages[index]
        server.free_pages([page])
        if how == "reused":
            server.free.remove(page)
            server.free.appendleft(page)
    server.run()
    assert server.wrong() == []
    if certain and request.entered == entered:
        assert request.state == "aborted"


def test_a_pool_that_one_request_does_not_fit_says_so() -> None:
    server = Server(pages=6, page_size=4)
    server.submit([1] * 10, 30)
    with pytest.raises(AssertionError, match="does not fit"):
        server.run()
