"""What the miniature server handles: pages of its prefix cache, requests, and steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Node:
    """A full page in the prefix cache, with the tag that it was given when it went in."""

    tokens: tuple[int, ...]
    page: int
    tag: torch.Tensor
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0

    def path(self) -> list[Node]:
        """From the first page to this one; the root has none."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def prefix(self) -> tuple[int, ...]:
        return tuple(token for node in self.path() for token in node.tokens)


@dataclass(eq=False)
class Request:
    number: int
    prompt: list[int]
    count: int
    """Tokens to answer with."""
    remote: bool = False
    """Whether another machine computes the prompt and sends its entries."""
    output: list[int] = field(default_factory=list)
    row: int = 0
    """0 while it has none."""
    entered: int = 0
    """How often it was admitted: once more after each retraction."""
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    """The last of the prefix cache's that it uses; the first `cached` of its pages are theirs."""
    cached: int = 0
    filled: int = 0
    """Tokens whose entries are computed, or will be by a step that was launched."""
    settled: int = 0
    """Tokens whose entries were computed by steps with a clean verdict; what may be cached."""
    arrives: int = -1
    """The iteration in which entries come from another machine; -1 for none."""
    state: str = "waiting"
    """waiting, running, done, cancelled, aborted"""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class Step:
    """A batch that was launched: its requests (None for padding), and what came out."""

    requests: list[Request | None]
    rows: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor | None
    """Where the new tokens go, [rows, new]; None in a prefill: where `extend` was told."""
    generations: torch.Tensor
    new: list[list[int]]
    """Tokens that are computed, of each row."""
    ends: list[int]
    """`lengths`, on the host."""
    entered: list[int] = field(init=False)
    produced: list[list[int]] = field(default_factory=list)
    report: torch.Tensor | None = None
    output: Any = None
    """What a server with another model keeps of the step until it is processed."""

    def __post_init__(self) -> None:
        self.entered = [request.entered if request else 0 for request in self.requests]

    def live(self) -> list[Request | None]:
        """None for those that ended or were retracted since, though they may run again."""
        return [
            request
            if request and (request.state, request.entered) == ("running", entered)
            else None
            for request, entered in zip(self.requests, self.entered, strict=True)
        ]
