"""Which tokens go to which routed expert, and how that is learned from transformers' layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Routing:
    """Input of a layer's routed experts and where each token goes."""

    hidden: torch.Tensor
    """[tokens, hidden_size], compute dtype."""
    _order: torch.Tensor
    _weight: torch.Tensor
    _offsets: list[int]
    _top_k: int

    @classmethod
    def of(
        cls, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, experts: int
    ) -> Routing:
        """`index` int64 and `weight` float, both [tokens, top_k], as the router returns them."""
        flat = index.reshape(-1)
        counts = torch.bincount(flat, minlength=experts)
        return cls(
            hidden,
            torch.argsort(flat, stable=True),
            weight.reshape(-1),
            [0, *counts.cumsum(0).tolist()],
            index.shape[1],
        )

    def tokens(self, expert: int) -> int:
        """How many tokens the router sends to this expert."""
        return self._offsets[expert + 1] - self._offsets[expert]

    def rows(self, expert: int) -> torch.Tensor:
        """int64 [n]: the tokens of this expert, ascending."""
        return self._slots(expert) // self._top_k

    def weight(self, expert: int) -> torch.Tensor:
        """[n, 1]: router weights of those tokens."""
        return self._weight[self._slots(expert), None]

    def _slots(self, expert: int) -> torch.Tensor:
        return self._order[self._offsets[expert] : self._offsets[expert + 1]]


class ExpertsTakenOut(nn.Module):
    """Stands where the routed experts were: keeps what they would get, contributes nothing."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self._top_k = top_k
        self._kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._filled = 0

    def expect(self, hidden: torch.Tensor) -> None:
        """Make room for as many tokens as `hidden` [sequences, length, hidden_size] holds."""
        tokens = hidden.shape[0] * hidden.shape[1]
        weight = hidden.new_empty(tokens, self._top_k, dtype=torch.float32)
        index = torch.empty_like(weight, dtype=torch.int64)
        self._kept = (torch.empty_like(hidden).flatten(0, 1), index, weight)
        self._filled = 0

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        if self._kept is not None:
            rows = slice(self._filled, self._filled + len(hidden))
            for kept, new in zip(self._kept, (hidden, index, weight), strict=True):
                kept[rows] = new
            self._filled = rows.stop
        return torch.zeros_like(hidden)

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [tokens, hidden_size]; expert indices, router weights [tokens, top_k]."""
        assert self._kept is not None
        kept, self._kept = self._kept, None
        return kept
