"""How progress looks: bars on a terminal, sparse plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from halfbyte.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import TaskID


class LineProgress:
    """Progress for logs: a line when a phase starts, every few seconds, and when it ends."""

    def __init__(
        self,
        stream: IO[str],
        *,
        every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._phase: str | None = None
        self._total = self._done = 0
        self._unit = ""
        self._began = self._printed = 0.0

    def start(self, phase: str, total: int, unit: str) -> None:
        self.finish()
        self._phase, self._total, self._unit, self._done = phase, total, unit, 0
        self._began = self._printed = self._clock()
        self._say(f"{phase}: {_format_amount(total, unit)}")

    def advance(self, amount: int) -> None:
        self._done += amount
        now = self._clock()
        if now - self._printed < self._every or self._done >= self._total:
            return
        self._printed = now
        speed = self._done / (now - self._began)
        left = (self._total - self._done) / speed if speed else 0.0
        share = _format_share(self._done, self._total, speed, self._unit)
        self._say(f"{self._phase}: {share}, {format_seconds(left)} left")

    def note(self, message: str) -> None:
        self._say(message)

    def finish(self) -> None:
        if self._phase is not None:
            if (took := self._clock() - self._began) >= 1:
                self._say(f"{self._phase}: took {format_seconds(took)}")
            self._phase = None

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class BarProgress:
    """Progress for a terminal: a bar with amount, throughput, time left; a line per ended phase."""

    def __init__(self, stream: IO[str]) -> None:
        from rich import progress
        from rich.console import Console as RichConsole

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[amount]}"),
            progress.TimeRemainingColumn(),
            console=RichConsole(file=stream, markup=False, highlight=False),
            expand=True,
        )
        self._task: TaskID | None = None
        self._unit = ""

    def start(self, phase: str, total: int, unit: str) -> None:
        self._end_phase()
        self._unit = unit
        self._bars.start()
        self._task = self._bars.add_task(phase, total=total, amount=_format_amount(total, unit))

    def advance(self, amount: int) -> None:
        if self._task is None:
            return
        self._bars.advance(self._task, amount)
        task = self._bars.tasks[-1]
        share = _format_share(task.completed, task.total or 0, task.speed or 0, self._unit)
        self._bars.update(self._task, amount=share)

    def note(self, message: str) -> None:
        self._bars.console.print(message)

    def finish(self) -> None:
        self._end_phase()
        self._bars.stop()

    def _end_phase(self) -> None:
        if self._task is None:
            return
        task = self._bars.tasks[-1]
        self._bars.remove_task(self._task)
        self._task = None
        self.note(f"{task.description}: took {format_seconds(task.elapsed or 0.0)}")


def _format_amount(amount: float, unit: str) -> str:
    return format_bytes(amount) if unit == "bytes" else f"{amount:,.0f} {unit}"


def _format_share(done: float, total: float, speed: float, unit: str) -> str:
    text = f"{_format_amount(done, unit)} of {_format_amount(total, unit)}"
    if unit != "bytes" and 0 < speed < 10:
        return f"{text}, {speed:.2g} {unit}/s"
    return f"{text}, {_format_amount(speed, unit)}/s" if speed else text
