"""The miniature server around a real model: a decode loop over a KV cache in pages.

The model is one of transformers', called with a cache that lies in pages: it writes where a step's
slots say and reads what the page table says, as the attention kernels of servers do. Steps overlap:
the next one takes its tokens from the last one's on the device, and what comes to the host is one
copy for each step, of the tokens and of the tracker's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.kvcache.integrity.tracker import Mode
from halfbyte.testing.paged import Server
from halfbyte.testing.paged_parts import Request, Step

UNKNOWN = -1
"""In place of a token that the step in flight produces."""


class PagedCache:
    """What transformers' attention takes for its cache: keys, values and index keys of all tokens
    of the pool, in a tensor for each layer, made when a layer first writes."""

    is_compileable = False

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pools: dict[tuple[str, int], torch.Tensor] = {}
        self._write = self._read = torch.zeros(0)

    def use(self, write: torch.Tensor, read: torch.Tensor) -> None:
        """The next forward writes to the slots `write` [b, new] and reads `read` [b, length]."""
        self._write, self._read = write, read

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [b, heads, new, width] of the new tokens to those of all."""
        return tuple(  # type: ignore[return-value]
            self._pass(name, layer, states.transpose(1, 2)).transpose(1, 2)
            for name, states in (("keys", keys), ("values", values))
        )

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """The same for index keys [b, new, width]."""
        return self._pass("index", layer, keys)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def _pass(self, name: str, layer: int, states: torch.Tensor) -> torch.Tensor:
        pool = self._pools.get((name, layer))
        if pool is None:
            pool = self._pools[name, layer] = states.new_zeros(self._slots, *states.shape[2:])
        pool[self._write] = states
        return pool[self._read]


@dataclass(frozen=True)
class Output:
    """Of a step: its tokens, and their copy with the report, which is there after `arrived`."""

    tokens: torch.Tensor
    copy: torch.Tensor
    arrived: torch.cuda.Event | None

    def on_host(self) -> torch.Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy


class ModelServer(Server):
    """Answers with the most likely tokens of `model`, a causal language model of transformers with
    GLM-5's attention. `delays` are the seconds, by `clock`, from one token of a request to its
    next."""

    keeps_evicted = False

    def __init__(
        self,
        model: Any,
        *,
        mode: Mode,
        page_size: int,
        pages: int,
        rows: int,
        longest: int,
        chunk: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(
            mode=mode, page_size=page_size, pages=pages, rows=rows, chunk=chunk, longest=longest,
            device=str(model.device), seed=seed,
        )  # fmt: skip
        self.model = model
        self.cache = PagedCache(pages * page_size)
        self.delays: list[float] = []
        self.clock: Callable[[], float] = time.perf_counter
        self._last: dict[int, float] = {}

    def wrong(self) -> list[Request]:
        raise NotImplementedError("compare with the outputs of a run without the fault")

    def _next_tokens(self, request: Request) -> list[int]:
        known = request.filled < len(request.tokens)
        return [request.tokens[request.filled] if known else UNKNOWN]

    def _launch(self, step: Step) -> None:
        self.tracker.check(step.rows, step.lengths, self.table, step.slots, step.generations)
        with torch.inference_mode():
            tokens = self._decode_step(step) if step.slots is not None else self._prefill_step(step)
        report = self.tracker.report(step.rows, step.generations)
        both = torch.cat([tokens.int(), report.to(tokens.device).int()])
        host, arrived = both, None
        if both.is_cuda:
            host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            host.copy_(both, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        step.output = Output(tokens, host, arrived)

    def _process(self, step: Step) -> None:
        host = step.output.on_host()
        count = len(step.requests)
        step.produced = [[token] for token in host[:count].tolist()]
        step.report = host[count:]
        before = {r.number: len(r.output) for r in step.live() if r}
        super()._process(step)
        now = self.clock()
        for number, length in before.items():
            if len(self.requests[number].output) > length:
                if number in self._last:
                    self.delays.append(now - self._last[number])
                self._last[number] = now

    def _prefill_step(self, step: Step) -> torch.Tensor:
        """A forward for each request, whose chunks differ in length."""
        tokens = []
        for request, new, end in zip(step.requests, step.new, step.ends, strict=True):
            assert request is not None
            row = self.table[request.row, :end].long()[None]
            places = torch.arange(end - len(new), end, device=self.device)
            mask = torch.arange(end, device=self.device) <= places[:, None]
            write = self.ints([self.slots(request, end - len(new), end)])
            read = self._forward(self.ints([new]), places[None], write, row, mask[None])
            tokens.append(read[0, -1])
        return torch.stack(tokens)

    def _decode_step(self, step: Step) -> torch.Tensor:
        """One forward of all rows, padding too, which reads its own token only."""
        assert step.slots is not None
        new = self.ints([tokens[0] for tokens in step.new])
        if self.in_flight is not None:
            new = torch.where(new == UNKNOWN, self._in_flight_tokens(step), new)
        places = step.lengths - 1
        longest = max(step.ends)
        read = self.table[step.rows, :longest].long()
        mask = torch.arange(longest, device=self.device) < step.lengths[:, None]
        found = self._forward(new[:, None], places[:, None], step.slots, read, mask[:, None])
        return found[:, 0]

    def _in_flight_tokens(self, step: Step) -> torch.Tensor:
        """What the step in flight produces for each request of this one, if it does."""
        assert self.in_flight is not None
        place = {id(r): i for i, r in enumerate(self.in_flight.requests) if r}
        from_place = self.ints([place.get(id(r), 0) for r in step.requests])
        tokens: torch.Tensor = self.in_flight.output.tokens[from_place]
        return tokens

    def _forward(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        write: torch.Tensor,
        read: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """The most likely next token after each of `tokens` [b, new] at the positions `places`;
        `mask` [b, new, length] says what each may look at."""
        self.cache.use(write, read)
        dtype = self.model.dtype
        added = torch.zeros(mask.shape, dtype=dtype, device=self.device)
        added = added.masked_fill(~mask, torch.finfo(dtype).min)[:, None]
        output = self.model(
            input_ids=tokens,
            attention_mask=dict.fromkeys(set(self.model.config.layer_types), added),
            position_ids=places,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits
        return logits.argmax(-1)


def serve(
    server: ModelServer, prompts: Sequence[Sequence[int]], count: int, *, cancel: frozenset[int]
) -> None:
    """All prompts, two more at each turn of the loop, `count` tokens each. The numbers in `cancel`
    are cancelled in the middle."""
    for _ in turns(server, prompts, count, cancel=cancel):
        pass


def turns(
    server: ModelServer, prompts: Sequence[Sequence[int]], count: int, *, cancel: frozenset[int]
) -> Iterator[None]:
    """`serve`, a turn of the loop at a time."""
    for number, prompt in enumerate(prompts):
        server.submit(prompt, count)
        if number % 2:
            _turn(server, count, cancel)
            yield
    for _ in range(100 * len(prompts)):
        if not (server.waiting or server.running or server.in_flight):
            return
        _turn(server, count, cancel)
        yield
    raise AssertionError("requests are left")


def _turn(server: ModelServer, count: int, cancel: frozenset[int]) -> None:
    server.iterate()
    for request in [r for r in server.running if r.number in cancel]:
        if len(request.output) >= count // 2:
            server.cancel(request)
