"""What KV-cache integrity does to a decode loop: throughput, and how long tokens take.

    python -m benchmarks.bench_serve CHECKPOINT --texts heldout.jsonl [--device cuda]

A small model decodes over a paged cache with shared prefixes, chunked prefill, overlapping steps
and cancellations (`halfbyte.testing.paged_model`). Three servers answer the same requests: with the
tracker off, off once more, and in mode abort. They take turns, a turn of the scheduler each, in an
order that changes. Each has a clock that runs in its own turns alone, to the end of what it gave
the GPU: so what slows a machine down for a while slows down all of them. What "off again" differs
from "off" is what the measurement cannot tell. Changes are means over repeats, with their 95 %
interval. All arms must answer the same.
Prints a line of JSON for each comparison.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halfbyte.calibration.data import load_tokenizer
from halfbyte.errors import HalfbyteError
from halfbyte.evals.model import load_model
from halfbyte.evals.statistics import mean_interval
from halfbyte.kvcache.integrity.tracker import Mode
from halfbyte.testing.paged_model import ModelServer, turns

ARMS: dict[str, Mode] = {"off": "off", "off again": "off", "abort": "abort"}
PREFIXES = 4
LONGEST = 500
"""Tokens of a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="lines of JSON with `text`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    model = load_model(arguments.checkpoint, device=arguments.device)
    prompts = make_prompts(arguments.checkpoint, arguments.texts, arguments.requests)
    gc.collect()
    gc.freeze()  # as servers do when they have started
    figures: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    answers: list[list[int]] | None = None
    for repeat in range(arguments.repeats + 1):
        arms = {arm: Arm(model, mode, prompts, arguments) for arm, mode in ARMS.items()}
        take_turns(list(arms.values()), random.Random(repeat))
        for name, arm in arms.items():
            found = [request.output for request in arm.server.requests]
            if answers is not None and found != answers:
                raise HalfbyteError(f"repeat {repeat}, {name}: other answers than before")
            answers = found
            if repeat:  # the first one warms up
                p95 = statistics.quantiles(arm.server.delays, n=20)[-1]
                figures[name].append((sum(map(len, found)) / arm.seconds, p95 * 1e3))
    for name in list(ARMS)[1:]:
        print(json.dumps(compare(name, figures, arguments)), flush=True)


def make_prompts(checkpoint: Path, texts: Path, count: int) -> list[list[int]]:
    """Of some pieces of text, each with many ends, so that they share beginnings."""
    tokenizer = load_tokenizer(checkpoint)
    tokens: list[int] = []
    with texts.open() as lines:
        for line in lines:
            tokens += tokenizer(json.loads(line)["text"])["input_ids"]
            if len(tokens) >= PREFIXES * LONGEST:
                break
        else:
            raise HalfbyteError(f"{texts}: {len(tokens)} tokens; {PREFIXES * LONGEST} are needed")
    pieces = [tokens[n * LONGEST : (n + 1) * LONGEST] for n in range(PREFIXES)]
    return [pieces[n % PREFIXES][: 200 + 37 * n % (LONGEST - 200)] for n in range(count)]


class Arm:
    """A server with a clock of its own, which has run for `seconds`."""

    def __init__(
        self, model: Any, mode: Mode, prompts: Sequence[Sequence[int]],
        arguments: argparse.Namespace,
    ) -> None:  # fmt: skip
        self.server = ModelServer(
            model, mode=mode, page_size=arguments.page_size, pages=8_192 // arguments.page_size,
            rows=17, longest=LONGEST + arguments.tokens + arguments.page_size, chunk=512,
        )  # fmt: skip
        self.server.clock = lambda: self.seconds + time.perf_counter() - self._started
        self.seconds = self._started = 0.0
        cancelled = frozenset(range(5, len(prompts), 8))
        self._turns = turns(self.server, prompts, arguments.tokens, cancel=cancelled)

    def turn(self) -> bool:
        """Whether there was one to take."""
        self._started = time.perf_counter()
        there = next(self._turns, self) is None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._started
        return there


def take_turns(arms: list[Arm], chance: random.Random) -> None:
    """Until all have ended, which is at the same turn."""
    there = [True]
    while any(there):
        chance.shuffle(arms)
        there = [arm.turn() for arm in arms]
        if any(there) != all(there):
            raise HalfbyteError("one server took more turns than another")


def compare(
    arm: str, figures: dict[str, list[tuple[float, float]]], arguments: argparse.Namespace
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "what": f"{arm} against off", "requests": arguments.requests, "tokens": arguments.tokens,
        "page_size": arguments.page_size, "repeats": arguments.repeats,
        "device": torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU",
        "torch": torch.__version__,
    }  # fmt: skip
    for place, name in enumerate(("tokens_per_second", "p95_ms")):
        pairs = list(zip(figures["off"], figures[arm], strict=True))
        logs = [math.log(other[place] / off[place]) for off, other in pairs]
        line[name] = statistics.median(other[place] for _, other in pairs)
        line[f"{name}_off"] = statistics.median(off[place] for off, _ in pairs)
        found = mean_interval(logs, 0.95)
        line[f"{name}_change_percent"] = percent(found.estimate)
        line[f"{name}_interval_percent"] = [percent(found.low), percent(found.high)]
    return line


def percent(log: float) -> float:
    return round(100 * math.expm1(log), 3)


if __name__ == "__main__":
    main()
