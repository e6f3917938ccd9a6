"""Differences are found, counted and placed."""

from __future__ import annotations

import math

import pytest
import torch

from halfbyte.testing.numeric import first_difference, relative_error


def test_equal_tensors_have_no_difference() -> None:
    a = torch.tensor([[1.0, math.nan], [math.inf, -0.0]])
    assert first_difference(a, a.clone()) is None
    assert first_difference(torch.empty(0, 3), torch.empty(0, 3)) is None


def test_the_first_difference_is_named_with_its_place_and_the_count() -> None:
    a = torch.zeros(2, 3, 4, dtype=torch.int8)
    b = a.clone()
    b[1, 0, 2], b[1, 2, 3] = 5, -1
    assert first_difference(a, b) == "at [1, 0, 2]: 0, expected 5; 2 of 24 elements differ"


def test_nan_differs_from_a_number() -> None:
    found = first_difference(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert found == "at [1]: nan, expected 2.0; 1 of 2 elements differ"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3), "shape is (2,), expected (3,)"),
        (torch.zeros(2, dtype=torch.int8), "dtype is torch.float32, expected torch.int8"),
    ],
)
def test_shape_and_dtype_count(other: torch.Tensor, message: str) -> None:
    assert first_difference(torch.zeros(2), other) == message


def test_a_scalar_has_an_empty_place() -> None:
    found = first_difference(torch.tensor(1), torch.tensor(2))
    assert found == "at []: 1, expected 2; 1 of 1 elements differ"


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
