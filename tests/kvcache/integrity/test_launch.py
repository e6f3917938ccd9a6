"""A launch takes what was compiled for such arguments, and never what was compiled for others."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.kvcache.integrity.launch import Launcher

GRID = (2, 1, 1)


class FakeFunction:
    """What Triton would compile; keeps what it is launched with, and what the results are."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*arguments: Any, **constants: Any) -> FakeCompiled:
            self.compiled.append((grid, *arguments, *constants.values()))
            return FakeCompiled(self.launched)

        return compile_and_launch


class FakeCompiled:
    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append((grid, *arguments))


def test_the_second_launch_gets_addresses_and_compiles_nothing() -> None:
    function = FakeFunction()
    launch = Launcher(function)
    tensor, other = torch.zeros(8), torch.zeros(8)
    launch(GRID, tensor, 3, SIZE=4)
    launch((5, 1, 1), other, 17, SIZE=4)
    assert function.compiled == [(GRID, tensor, 3, 4)]
    assert function.launched == [((5, 1, 1), other.data_ptr(), 17, 4)]


def test_what_triton_specializes_on_is_compiled_for_itself() -> None:
    function = FakeFunction()
    launch = Launcher(function)
    numbers = torch.zeros(9, dtype=torch.int32)
    assert numbers.data_ptr() % 16 == 0
    cases = [
        (numbers, 4), (numbers, 8), (numbers.long(), 4), (numbers[1:], 4), (numbers.to("meta"), 4),
    ]  # fmt: skip
    for tensor, size in cases * 2:
        launch(GRID, tensor, SIZE=size)
    assert len(function.compiled) == len(function.launched) == len(cases)
