"""Launches of Triton functions that cost the host little."""

from __future__ import annotations

from typing import Any

import torch


class Launcher:
    """A Triton function that is launched by what was compiled for arguments like these before.

    Triton looks at each argument and at all globals of the function at every launch, which takes
    it 30 us and more; what it can find is told here by `constants`, and by what a tensor is. So
    numbers among `arguments` have to be such as Triton does not specialize on
    (`do_not_specialize`).
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], *arguments: torch.Tensor | int, **constants: int | bool
    ) -> None:
        """`arguments` and `constants` in the order of the function's parameters. Tensors are of
        the current device."""
        key: list[object] = [*constants.values()]
        values: list[int] = []
        for argument in arguments:
            if isinstance(argument, int):
                values.append(argument)
            else:
                values.append(argument.data_ptr())
                key += (argument.dtype, argument.device, values[-1] % 16 == 0)
        compiled = self._compiled.get(tuple(key))
        if compiled is None:
            self._compiled[tuple(key)] = self.function[grid](*arguments, **constants)
        else:
            compiled[grid](*values, *constants.values())
