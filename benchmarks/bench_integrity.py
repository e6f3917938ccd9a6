"""What KV-cache integrity costs: the check on the GPU, and the calls on the host.

    python -m benchmarks.bench_integrity [--json FILE]

GPU times are by replay of a CUDA graph, the median of its runs: once with the tracker's state in
the GPU's cache, and once ("cold") after 256 MB of other memory was written, as a model's step does;
the writing is measured alone and taken off. Before it is timed each check is held against plain
torch, on a clean state and with a fault.

Host times are of one decode step's calls, launches included and the GPU not waited for: pages for
the rows that need one, their places, the check (which an engine that replays graphs does not
launch), the report, its copy, and settling it. Where an engine is installed its plugin's hooks are
timed as well (`engine_hooks`). Prints a line of JSON for each case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine_hooks
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.decode_bench import CACHE_BYTES, graph_time
from halfbyte.kvcache.integrity import reference
from halfbyte.kvcache.integrity.page_tags import PageTagTracker
from halfbyte.kvcache.integrity.state import CLEAN, VERDICT_STEP, Counter, Kind, Layout
from halfbyte.kvcache.integrity.tracker import Mode, Tracker, open_tracker

IN_GRAPH = 32
"""Checks of a graph."""
STEP_MS = 8.0
"""Of a decode step of a large model with one request; what the host's part is compared with."""


@dataclass(frozen=True)
class Case:
    """Requests of the same length that share the first part of their pages."""

    requests: int
    tokens: int
    page_size: int
    pool_tokens: int
    """Of all pages; less than requests times tokens if prefixes are shared."""

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page_size)

    @property
    def entries(self) -> int:
        return self.requests * self.pages


CASES = (
    Case(8, 9_192, 64, 80_000),
    Case(64, 21_406, 64, 1_372_224),
    Case(64, 65_536, 64, 1_400_000),
    Case(64, 21_406, 16, 1_372_224),
    Case(64, 21_406, 1, 1_372_224),
    Case(256, 16_056, 1, 1_372_224),
)
HOST_BATCHES = (1, 8, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the lines to this file, too")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of a host's case")
    arguments = parser.parse_args()
    lines = []

    def tell(line: dict[str, Any]) -> None:
        lines.append(json.dumps(line | _where()))
        print(lines[-1], flush=True)

    if torch.cuda.is_available():
        for case in CASES:
            tell(check_line(case))
        for line in small_lines():
            tell(line)
    for page_size in (64, 1):
        for batch in HOST_BATCHES:
            tell(host_line(batch, page_size, arguments.steps))
    for line in engine_hooks.lines(HOST_BATCHES, arguments.steps):
        hooks = line.get("us_hooks", line["us"])
        tell(line | {"share_of_step": hooks / (STEP_MS * 1e3)})
    if arguments.json:
        arguments.json.write_text("\n".join(lines) + "\n")


def _where() -> dict[str, str]:
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
    }


@dataclass(frozen=True)
class Batch:
    """A tracker and what a decode step of all its requests passes to it."""

    tracker: PageTagTracker
    rows: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    generations: torch.Tensor

    def check(self, _: int = 0) -> torch.Tensor:
        self.tracker.check(self.rows, self.lengths, self.table, self.slots, self.generations)
        return self.slots

    def report(self, _: int = 0) -> torch.Tensor:
        return self.tracker.report(self.rows, self.generations)


def make_batch(case: Case) -> Batch:
    """All requests in the middle of decoding. What they share comes first in each, and pages lie
    all over the pool."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    pool = case.pool_tokens // case.page_size
    own = min(case.pages, (pool - case.pages) // max(1, case.requests - 1))
    rest = case.pages - own
    order = torch.randperm(pool, generator=generator).int() + 1
    layout = Layout(pool + 1, case.page_size, case.requests + 1, case.pages)
    tracker = PageTagTracker("abort", layout, device, seed=0)
    tracker.acquire(order.to(device))
    rows = torch.arange(1, case.requests + 1, device=device)
    tracker.bind(rows)
    pages = torch.empty(case.requests, case.pages, dtype=torch.int32)
    pages[:, case.pages - own :] = order[: own * case.requests].view(case.requests, own)
    if rest:
        prefix = order[own * case.requests :][:rest]
        pages[:, :rest] = prefix
        prefix = prefix.to(device)
        tags = tracker.preload(prefix)
        tracker.expect_prefix(rows, prefix.repeat(case.requests), tags.repeat(case.requests))
    slots = pages.to(device)[:, :, None] * case.page_size
    slots = slots + torch.arange(case.page_size, device=device)
    table = torch.zeros(case.requests + 1, case.pages * case.page_size, dtype=torch.int32)
    table = table.to(device)
    table[1:] = slots.flatten(1)
    count = case.tokens - rest * case.page_size
    lengths = torch.full((case.requests,), case.tokens, device=device)
    tracker.extend(
        rows,
        lengths,
        slots.flatten(1)[:, rest * case.page_size :][:, :count].flatten().contiguous(),
    )
    last = table[1:, case.tokens - 1].contiguous()
    return Batch(tracker, rows, lengths, table, last, tracker.generations(rows))


def verdicts(batch: Batch) -> list[int]:
    batch.check()
    return [int(v) for v in batch.report()[len(Counter) :]]


def prove(case: Case, batch: Batch) -> None:
    """Raises HalfbyteError unless the check finds what there is, and nothing else."""
    state, middle = batch.tracker.state, case.pages // 2
    if any(v != CLEAN for v in verdicts(batch)):
        raise HalfbyteError(f"{case}: a fault where there is none")
    page = state.expected_pages[1, middle].long()
    state.tags[page] += 2
    found = verdicts(batch)
    sharers = (state.expected_pages[1:, : case.pages] == page).any(1)
    stale = middle * VERDICT_STEP + Kind.TAG
    if found != [stale if bad else CLEAN for bad in sharers.tolist()]:
        raise HalfbyteError(f"{case}: a stale page was not found for those who have it")
    state.tags[page] -= 2
    state.verdict.fill_(CLEAN)


def check_line(case: Case) -> dict[str, Any]:
    batch = make_batch(case)
    prove(case, batch)
    line = {"what": "check", **asdict(case), "entries": case.entries}
    line["us"] = graph_time(batch.check, IN_GRAPH)
    line["us_cold"] = cold_time(batch.check)
    if case.page_size == 64 and case.requests == 64:

        def plain(_: int) -> torch.Tensor:
            reference.check(
                batch.tracker.state, batch.rows, batch.lengths, batch.table, batch.slots,
                batch.generations, enforce=True,
            )  # fmt: skip
            return batch.slots

        line["us_plain_torch"] = graph_time(plain, 4)
    return line


def cold_time(run: Callable[[int], torch.Tensor]) -> float:
    other = torch.empty(CACHE_BYTES // 4, dtype=torch.int32, device="cuda")

    def after_others(i: int) -> torch.Tensor:
        other.zero_()
        return run(i)

    return graph_time(after_others, IN_GRAPH) - graph_time(lambda _: other.zero_(), IN_GRAPH)


def small_lines() -> list[dict[str, Any]]:
    """The launches beside the check, and the copy to the host."""
    batch = make_batch(Case(64, 4_096, 64, 300_000))
    tracker, pages = batch.tracker, torch.arange(1, 65, device="cuda", dtype=torch.int32)

    def bump(i: int) -> torch.Tensor:
        (tracker.release if i % 2 == 0 else tracker.acquire)(pages)
        return pages

    def extend(_: int) -> torch.Tensor:
        tracker.extend(batch.rows, batch.lengths, batch.slots)
        return batch.slots

    cases = {"acquire or release of 64 pages": bump, "extend": extend, "report": batch.report}
    return [{"what": name, "us": graph_time(run, IN_GRAPH)} for name, run in cases.items()]


def host_line(batch: int, page_size: int, steps: int) -> dict[str, Any]:
    """Microseconds of the host, the median over decode steps, by mode of the tracker."""
    line: dict[str, Any] = {"what": "host", "requests": batch, "page_size": page_size}
    modes: tuple[Mode, ...] = ("off", "abort")
    for mode in modes:
        everything = host_times(mode, batch, page_size, steps, check=True)
        line[f"us_{mode}"] = statistics.median(everything)
        line[f"us_{mode}_in_graph"] = statistics.median(
            host_times(mode, batch, page_size, steps, check=False)
        )
    extra = line["us_abort_in_graph"] - line["us_off_in_graph"]
    line["share_of_step"] = extra / (STEP_MS * 1e3)
    return line


def host_times(mode: Mode, batch: int, page_size: int, steps: int, *, check: bool) -> list[float]:
    """Of each decode step. Without `check` it is done between the timed steps, as a graph's
    replay would."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    most = 64 + steps
    each = -(-most // page_size)
    layout = Layout(batch * each + 1, page_size, batch + 1, each)
    tracker: Tracker = open_tracker(mode, layout, device, seed=0)
    rows = torch.arange(1, batch + 1, device=device, dtype=torch.int32)
    table = torch.zeros(batch + 1, each * page_size, dtype=torch.int32, device=device)
    table[1:] = torch.arange(page_size, page_size + batch * each * page_size).view(batch, -1)
    first = table[1:, :64].contiguous()
    tracker.acquire((table[1:, :64:page_size] // page_size).flatten())
    tracker.bind(rows)
    lengths = torch.full((batch,), 64, dtype=torch.int32, device=device)
    tracker.extend(rows, lengths, first)
    generations, where = tracker.generations(rows), list(range(1, batch + 1))
    # The engine's allocator does this with or without a tracker.
    moves = []
    for length in range(65, most + 1):
        slots = table[1:, length - 1].contiguous()
        new = (slots // page_size) if (length - 1) % page_size == 0 else None
        moves.append((new, slots, torch.full_like(lengths, length)))
    pinned = torch.empty(len(Counter) + batch, dtype=torch.int32, pin_memory=device.type == "cuda")
    times, seconds = [], time.perf_counter
    for new, slots, lengths in moves:
        start = seconds()
        if new is not None:
            tracker.acquire(new)
        tracker.extend(rows, lengths, slots)
        if check:
            tracker.check(rows, lengths, table, slots, generations)
        spent = seconds() - start
        if not check:
            tracker.check(rows, lengths, table, slots, generations)
        start = seconds()
        report = tracker.report(rows, generations)
        if report.numel():
            pinned.copy_(report, non_blocking=True)
        spent += seconds() - start
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = seconds()
        bad = tracker.settle(pinned, where)
        times.append((spent + seconds() - start) * 1e6)
        if bad:
            raise HalfbyteError(f"{bad[0]}, where there is no fault")
    return times[len(times) // 4 :]


if __name__ == "__main__":
    main()
