"""Which experts are solved together; what they end in is tested in test_calibrated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.quantize.experts import solving_order
from halfbyte.quantize.memory import DOWN_CHUNKS


@given(st.integers(0, 50), st.integers(0, 300), st.integers(1, 64))
def test_every_expert_is_solved_once_and_in_order(first: int, count: int, at_once: int) -> None:
    batches = solving_order(range(first, first + count), at_once)
    chunks = [chunk for batch in batches for chunk in batch]
    assert [expert for chunk in chunks for expert in chunk] == [*range(first, first + count)]
    sizes = {len(chunk) for chunk in chunks}
    assert max(sizes, default=0) <= at_once
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert [len(batch) for batch in batches[:-1]] == [DOWN_CHUNKS] * (len(batches) - 1)
    assert len(chunks) == -(-count // at_once)


@pytest.mark.parametrize(
    ("count", "at_once", "expected"),
    [
        (0, 4, []),
        (3, 4, [[range(3)]]),
        (7, 2, [[range(1), range(1, 3), range(3, 5)], [range(5, 7)]]),
    ],
)
def test_solving_order(count: int, at_once: int, expected: list[list[range]]) -> None:
    assert solving_order(range(count), at_once) == expected
