"""Which tokens go to which routed expert, and how that is learned from transformers' layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from halfbyte.calibration.limits import HELD_OUT_STRIDE
from halfbyte.formats.rows import Rows


@dataclass(frozen=True)
class Dispatch:
    """Tokens sorted by the expert they go to, each expert's in ascending order."""

    _rows: torch.Tensor
    _weight: torch.Tensor
    _offsets: list[int]

    def tokens(self, expert: int) -> int:
        """How many tokens the router sends to this expert."""
        return self._offsets[expert + 1] - self._offsets[expert]

    def rows(self, expert: int) -> torch.Tensor:
        """int64 [n]: the tokens of this expert, counted from the first of the range."""
        return self._rows[self._offsets[expert] : self._offsets[expert + 1]]

    def weight(self, expert: int) -> torch.Tensor:
        """float32 [n, 1]: router weights of those tokens."""
        return self._weight[self._offsets[expert] : self._offsets[expert + 1]]


@dataclass(frozen=True)
class Routing:
    """Input of a layer's routed experts and where each token goes."""

    hidden: Rows
    """[tokens, hidden_size], compute dtype."""
    index: torch.Tensor
    """int64 [tokens, top_k]: the experts of a token, as the router returns them."""
    weight: torch.Tensor
    """float32 [tokens, top_k]: how much of each."""
    experts: int

    def dispatch(self, start: int = 0, stop: int | None = None) -> Dispatch:
        """Where the tokens from `start` to `stop` go."""
        return self._sorted(self.index[start:stop], self.weight[start:stop], self.experts)

    def split(self) -> tuple[Dispatch, Dispatch]:
        """Where tokens for statistics go, and those held out: every `HELD_OUT_STRIDE`-th."""
        held = torch.zeros_like(self.index)
        held[HELD_OUT_STRIDE - 1 :: HELD_OUT_STRIDE] = self.experts
        both = self._sorted(self.index + held, self.weight, 2 * self.experts)
        train, held_out = (
            replace(both, _offsets=both._offsets[first : first + self.experts + 1])
            for first in (0, self.experts)
        )
        return train, held_out

    @staticmethod
    def _sorted(index: torch.Tensor, weight: torch.Tensor, experts: int) -> Dispatch:
        flat = index.reshape(-1)
        counts = torch.bincount(flat, minlength=experts)
        slots = torch.argsort(flat, stable=True)
        offsets = [0, *counts.cumsum(0).tolist()]
        return Dispatch(slots // index.shape[1], weight.reshape(-1, 1)[slots], offsets)


class ExpertsTakenOut(nn.Module):
    """Stands where the routed experts were: keeps what they would get, contributes nothing."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self._top_k = top_k
        self._kept: tuple[Rows, torch.Tensor, torch.Tensor] | None = None
        self._filled = 0

    def expect(self, hidden: Rows) -> None:
        """From now on put inputs into `hidden` [tokens, hidden_size], one behind the other."""
        weight = torch.empty(len(hidden), self._top_k, dtype=torch.float32, device=hidden.device)
        self._kept = (hidden, torch.empty_like(weight, dtype=torch.int64), weight)
        self._filled = 0

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        if self._kept is not None:
            rows = slice(self._filled, self._filled + len(hidden))
            inputs, experts, weights = self._kept
            inputs[rows], experts[rows], weights[rows] = hidden, index, weight
            self._filled = rows.stop
        return torch.zeros_like(hidden)

    def take(self) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """Hidden states [tokens, hidden_size]; expert indices, router weights [tokens, top_k]."""
        assert self._kept is not None
        kept, self._kept = self._kept, None
        return kept
