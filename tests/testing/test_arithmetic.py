"""The arithmetic model tells texts apart, and a cache's entries by their place."""

from __future__ import annotations

import numpy as np

from halfbyte.testing.arithmetic import answer, entry_of, token_of, weighed


def test_answers_follow_from_every_token_and_place() -> None:
    right = answer([1, 2, 3, 4], 6)
    assert right == answer([1, 2, 3, 4], 9)[:6]
    others = [answer(prompt, 6) for prompt in ([2, 1, 3, 4], [1, 2, 3, 5], [1, 2, 3], [0, 2, 3, 4])]
    assert right not in others


def test_an_answer_can_be_computed_from_the_entries_of_its_text() -> None:
    text = [5, 6, 7]
    entries = np.zeros((2, 0), dtype=np.uint64)
    for position, token in enumerate(text):
        entry = entry_of(weighed(entries), token, position)
        entries = np.concatenate([entries, entry[:, None]], axis=1)
    assert [token_of(weighed(entries))] == answer(text, 1)
    for spoilt in (entries[:, ::-1], entries * np.array([[1], [0]], dtype=np.uint64)):
        assert weighed(spoilt) != weighed(entries)
