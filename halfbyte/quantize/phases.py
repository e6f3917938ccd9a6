"""Where the time of a run goes, when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Phases:
    """Seconds by phase. Off by default: to time a phase, the GPU must come to rest around it."""

    on: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block for `name`."""
        if not self.on:
            yield
            return
        _rest()
        started = time.perf_counter()
        yield
        _rest()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def _rest() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
