"""A language model that is arithmetic, and leaves entries in a KV cache as a real one does.

A token's entry follows from all entries before it, and the next token from all of them. So each
right answer is known beforehand, and a wrong entry that is read shows in all tokens behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCABULARY = 97
NAN = np.uint64(2**63 + 1)
"""An entry that spoils whatever reads it, even where a mask leaves it out."""
POOLS = 2
"""Entries of a slot: latent and index keys, or target and draft model. They share their pages."""
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


def entry_of(before: np.uint64, token: int, position: int) -> np.ndarray:
    """uint64 [POOLS]: what a token leaves in the cache, `before` being the sum over it."""
    with np.errstate(over="ignore"):
        return (before + np.uint64(token * 2654435761 + position + 1)) * _ODD


def weighed(entries: np.ndarray, first: int = 0) -> np.uint64:
    """Sum over `entries` [POOLS, n] from position `first` on; each place has a weight of its own,
    so that entries in another order are not the same."""
    with np.errstate(over="ignore"):
        weight = np.arange(first, first + entries.shape[1], dtype=np.uint64) * np.uint64(2)
        total = (entries * (weight + np.uint64(1))).sum(dtype=np.uint64)
    return np.uint64(total)


def token_of(total: np.uint64) -> int:
    return int((int(total) >> 17) % VOCABULARY)


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The right tokens after `prompt`."""
    tokens, total = list(prompt), np.uint64(0)
    for position in range(len(prompt) + count):
        if position == len(tokens):
            tokens.append(token_of(total))
        entry = entry_of(total, tokens[position], position)
        with np.errstate(over="ignore"):
            total = total + weighed(entry[:, None], position)
    return tokens[len(prompt) : len(prompt) + count]
