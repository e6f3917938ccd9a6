"""What trackers have found so far: reports are settled, counted and logged here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.state import CLEAN, VERDICT_STEP, Counter, Kind
from halfbyte.kvcache.integrity.tracker import Mode, Violation

logger = logging.getLogger(__name__)

COUNTERS = len(Counter)
"""Of a report, before the verdicts."""
ALLOCATOR = {
    Counter.CLAIM: Kind.CLAIM,
    Counter.ACQUIRE: Kind.ACQUIRE,
    Counter.RELEASE: Kind.RELEASE,
    Counter.PADDING: Kind.PADDING,
}
"""Faults that are counted by themselves, since a request's verdict may hide them or none has it."""
_METRICS = {kind: f"violations_{kind.name.lower()}" for kind in Kind}


class Findings:
    """Of one tracker. A report is the tracker's counters, and a verdict for each row of a batch."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._seen = [0] * COUNTERS
        self._counts = [0] * COUNTERS
        self._found = dict.fromkeys(Kind, 0)
        self._told: dict[int, int] = {}
        self._steps = self._unchecked = 0

    @property
    def quarantined(self) -> int:
        """Pages, as of the last settled report."""
        return self._counts[Counter.QUARANTINED]

    @property
    def healthy(self) -> bool:
        """See `Tracker.healthy`."""
        return not self._unchecked

    def settle(self, values: Sequence[int], rows: Sequence[int | None]) -> Sequence[Violation]:
        """See `Tracker.settle`."""
        self._steps += 1
        news = self._advance(values[:COUNTERS])
        if not news[Counter.CHECKS]:
            self._unchecked += 1
            text = f"step {self._steps} read the KV cache, and no check ran before it"
            if self._mode != "log":
                raise IntegrityError(
                    text, hint="call check on the stream of the model, before it, at every step"
                )
            logger.error("kv-integrity unchecked step=%d", self._steps)
        violations = self._violations(values[COUNTERS:], rows)
        faults = self._faults(news) if any(news[Counter.CLAIM :]) else {}
        for kind, count in faults.items():
            self._found[kind] += count
            logger.error("kv-integrity kind=%s count=%d", kind.name.lower(), count)
        if self._mode == "raise" and (violations or faults):
            first = str(violations[0]) if violations else f"{next(iter(faults)).name.lower()} fault"
            raise IntegrityError(
                f"step {self._steps}: {first}; {len(violations)} requests are affected",
                hint="abort only these requests: mode abort",
            )
        return violations

    def _advance(self, counters: Sequence[int]) -> Sequence[int]:
        """By how much each counter grew since the last report; they wrap as int32 does."""
        grown = [
            (now - before + 2**31) % 2**32 - 2**31
            for now, before in zip(counters, self._seen, strict=True)
        ]
        self._counts = [count + change for count, change in zip(self._counts, grown, strict=True)]
        self._seen = list(counters)
        return grown

    def _faults(self, news: Sequence[int]) -> Mapping[Kind, int]:
        return {kind: news[counter] for counter, kind in ALLOCATOR.items() if news[counter]}

    def _violations(self, verdicts: Sequence[int], rows: Sequence[int | None]) -> list[Violation]:
        """Those of requests that still run. Each is logged and counted once, though a verdict
        stays until its row is bound anew."""
        if len(verdicts) != len(rows):
            raise IntegrityError(f"{len(rows)} rows for a report of {len(verdicts)}")
        if not self._told and verdicts.count(CLEAN) == len(verdicts):
            return []  # nearly always, and faster than a look at each
        found = []
        for position, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
            if row is None:
                continue
            if verdict == CLEAN:
                self._told.pop(row, None)
                continue
            kind = Kind(verdict % VERDICT_STEP)
            violation = Violation(position, row, kind, verdict // VERDICT_STEP)
            found.append(violation)
            if self._told.get(row) != verdict:
                self._told[row] = verdict
                self._found[kind] += kind not in ALLOCATOR.values()
                logger.error(
                    "kv-integrity step=%d row=%d kind=%s index=%d",
                    self._steps, row, kind.name.lower(), violation.index,
                )  # fmt: skip
        return found

    def metrics(self) -> Mapping[str, int]:
        """See `Tracker.metrics`."""
        return {
            "steps": self._steps,
            "unchecked_steps": self._unchecked,
            "checks": self._counts[Counter.CHECKS],
            "rows_checked": self._counts[Counter.ROWS],
            "quarantined_pages": self._counts[Counter.QUARANTINED],
            **{_METRICS[kind]: count for kind, count in self._found.items()},
        }
