"""The kernel that reads memory, for its speed: it does read all of it."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from halfbyte.kernels.jit import kernel


@pytest.mark.parametrize("count", [1, 700, 512 * 3 * 8 * 2, 50_001])
def test_every_number_is_read(count: int, request: pytest.FixtureRequest) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make = kernel if device == "cuda" else request.getfixturevalue("host_kernel")
    generator = torch.Generator().manual_seed(count)
    many = torch.randint(-(2**31), 2**31, (4 * count,), generator=generator).int().to(device)
    parts = torch.zeros(3, dtype=torch.int32, device=device)
    make("memory", "read_all")((3,), 512, many, count, parts)
    assert functools.reduce(operator.xor, parts.tolist()) == functools.reduce(
        operator.xor, many.tolist()
    )
