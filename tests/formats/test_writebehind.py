"""The ring of page-locked memory never lends what is still in use."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats import writebehind


@given(st.integers(8, 64), st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3)), max_size=60))
def test_ring_lends_free_memory_only(capacity: int, steps: list[tuple[int, int]]) -> None:
    ring = writebehind._Ring(torch.zeros(capacity, dtype=torch.uint8))
    lent: deque[tuple[int, torch.Tensor, int]] = deque()
    used = 0
    for number, (size, returned) in enumerate(steps, 1):
        size = min(size, capacity)
        cost = ring.cost(size)
        # As `Background.reserve` does: what exceeds the budget has it for itself.
        while lent and (used + cost > capacity or returned > 0):
            returned -= 1
            cost_before, memory, value = lent.popleft()
            assert memory.tolist() == [value] * len(memory)
            used -= cost_before
        lent.append((cost, ring.lend(size).fill_(number), number))
        used += cost
    for _, memory, value in lent:
        assert memory.tolist() == [value] * len(memory)
