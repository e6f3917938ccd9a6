"""Launches of Triton functions that cost the host little."""

from __future__ import annotations

from typing import Any

import torch


class Launcher:
    """A Triton function that is launched by what was compiled for arguments like these before.

    Triton looks at each argument and at all globals of the function at every launch, which takes
    it 30 us and more; what it can find is told here by `constants`, and by the types of tensors and
    whether they begin at a multiple of 16 bytes. So numbers among `arguments` have to be such as
    Triton does not specialize on (`do_not_specialize`).
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], *arguments: torch.Tensor | int, **constants: int | bool
    ) -> None:
        """`arguments` and `constants` in the order of the function's parameters. The first tensor
        tells the device, which has to be the current one."""
        first, key = None, list[object](constants.values())
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                first = argument if first is None else first
                key += (argument.dtype, argument.data_ptr() % 16 == 0)
        place = (None if first is None else first.device.index, *key)
        compiled = self._compiled.get(place)
        if compiled is None:
            # The interpreter, which takes the place of a GPU in tests, returns nothing to keep.
            self._compiled[place] = self.function[grid](*arguments, **constants)
        else:
            compiled[grid](*arguments, *constants.values())
