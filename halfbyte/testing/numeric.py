"""Differences between tensors, said so that a reader can find them."""

from __future__ import annotations

import torch


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Where and how two tensors differ, for a test's message; None when they are equal.

    Equal means the same shape, dtype and values; NaN equals NaN. The position is that of the first
    differing element in memory order.
    """
    for what, a, b in (
        ("shape", tuple(actual.shape), tuple(expected.shape)),
        ("dtype", actual.dtype, expected.dtype),
    ):
        if a != b:
            return f"{what} is {a}, expected {b}"
    expected = expected.to(actual.device)
    different = (actual != expected) & ~((actual != actual) & (expected != expected))
    count = int(different.sum())
    if not count:
        return None
    where = tuple(different.nonzero()[0].tolist())
    return (
        f"at {list(where)}: {actual[where].item()}, expected {expected[where].item()}; "
        f"{count} of {actual.numel()} elements differ"
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, in float64. 0 when both are zero."""
    difference = float((actual.double() - expected.double().to(actual.device)).norm())
    norm = float(expected.double().norm())
    return difference / norm if norm else (0.0 if difference == 0 else float("inf"))
