"""The progress protocol that long work reports to, and the implementation that says nothing.

Work only counts: how it is shown, and whether, is the console's business.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receiver of progress: `start` once per phase, `advance` as it goes, `finish` last."""

    def start(self, phase: str, total: int, unit: str) -> None:
        """Begin a phase of `total` units; ends the one before. The unit "bytes" prints as GB."""

    def advance(self, amount: int) -> None:
        """Count `amount` more units of the current phase as done."""

    def note(self, message: str) -> None:
        """One line for the reader that should stay on the screen: a finished layer, a retry."""

    def finish(self) -> None:
        """End the last phase. Safe to call twice, and without a phase."""


class SilentProgress:
    """Progress that nobody watches: library use, tests, `--json` and `-q`."""

    def start(self, phase: str, total: int, unit: str) -> None: ...

    def advance(self, amount: int) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...
