"""A server in miniature around a KV cache in pages, to try bookkeeping errors on.

It does what SGLang and vLLM do with pages: an allocator with a free list, a prefix cache as a tree
of full pages, continuous batching with overlap (a step is launched before the results of the last
one are read, so a request that has ended is in one more step), prefill in chunks, retraction when
pages run out, padding rows as for graphs, speculative drafts, pages that are loaded from the host
or come from another machine late.

Its model is arithmetic, so each request's answer is known beforehand, and any wrong page that is
read shows in what is released.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from halfbyte.kvcache.integrity.state import Layout
from halfbyte.kvcache.integrity.tracker import Mode, Tracker, Violation, open_tracker
from halfbyte.testing.arithmetic import NAN, POOLS, VOCABULARY, answer, entry_of, token_of, weighed
from halfbyte.testing.paged_parts import Node, Request, Step


class Server:
    """One decode server. `log` has the violations, `steps` how many events there were."""

    keeps_evicted = True
    """Whether the host keeps pages that the cache drops."""

    def __init__(
        self,
        *,
        mode: Mode = "abort",
        page_size: int = 4,
        pages: int = 48,
        rows: int = 7,
        chunk: int = 12,
        drafts: int = 0,
        longest: int = 96,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.page_size, self.chunk, self.drafts = page_size, chunk, drafts
        self.overlap = not drafts
        self.device = torch.device(device)
        layout = Layout(pages, page_size, rows, longest // page_size)
        self.tracker: Tracker = open_tracker(mode, layout, device, seed=seed)
        self.pages = pages
        self.memory = np.zeros((POOLS, pages * page_size), dtype=np.uint64)
        self.table = self.zeros(rows, layout.pages_per_row * page_size).int()
        self.free = deque(range(1, pages))
        self.free_rows = list(range(rows - 1, 0, -1))
        self.root = Node((), 0, self.zeros(1), None)
        self.host: dict[tuple[int, ...], np.ndarray] = {}
        """What evicted pages held, by the tokens up to their end."""
        self.transfers: list[tuple[int, Callable[[], None]]] = []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: list[Request] = []
        self.in_flight: Step | None = None
        self.log: list[tuple[int, Violation]] = []
        self.time = self.steps = 0
        self.events: Counter[str] = Counter()
        self.chance = random.Random(seed)
        self.before_launch: Callable[[Step], None] = lambda step: None
        self.padding_slot: Callable[[], int] = lambda: 0

    def ints(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """On the device, without waiting for it."""
        if self.device.type == "cpu":
            return torch.tensor(values, dtype=dtype)
        pinned = torch.tensor(values, dtype=dtype, pin_memory=True)
        return pinned.to(self.device, non_blocking=True)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.device)

    # Requests

    def submit(self, prompt: Sequence[int], count: int, *, remote: bool = False) -> Request:
        request = Request(len(self.requests), list(prompt), count, remote)
        self.requests.append(request)
        self.waiting.append(request)
        self._event("submit")
        return request

    def cancel(self, request: Request) -> None:
        """The user goes away."""
        if request.state == "waiting":
            self.waiting.remove(request)
            request.state = "cancelled"
        elif request.state == "running":
            self._leave(request, "cancelled")
        self._event("cancel")

    def wrong(self) -> list[Request]:
        """Requests of which a token was released that is not right."""
        return [r for r in self.requests if r.output != answer(r.prompt, len(r.output))]

    def run(self, most: int = 500) -> None:
        """Until all requests have ended. Raises AssertionError if that takes too long."""
        for _ in range(most):
            if not (self.waiting or self.running or self.in_flight or self.transfers):
                return
            self.iterate()
        raise AssertionError(f"{len(self.waiting)} wait and {len(self.running)} run after {most}")

    # The loop

    def iterate(self) -> None:
        """One turn of the scheduler: a step is prepared and launched, and the last one's result
        is read, which without overlap is this one's."""
        self.time += 1
        self._arrive()
        self._admit()
        step = self._prefill() or self._decode()
        if step:
            self.before_launch(step)
            self._launch(step)
        last, self.in_flight = (self.in_flight, step) if self.overlap else (step, None)
        if last:
            self._process(last)

    def _arrive(self) -> None:
        due = [write for at, write in self.transfers if at <= self.time]
        self.transfers = [(at, write) for at, write in self.transfers if at > self.time]
        for write in due:
            write()

    def _admit(self) -> None:
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            nodes = [] if request.remote else self._match(request.tokens)
            need = -(-(len(request.tokens) + 1) // self.page_size) - len(nodes)
            promised = sum(self._missing(r, len(r.tokens) + 1) for r in self.running)
            self.lock(nodes[-1] if nodes else self.root)
            if not self._make_room(promised + need + 1):
                self.unlock(nodes[-1] if nodes else self.root)
                return
            self.waiting.popleft()
            self.enter(request, nodes)

    def enter(self, request: Request, nodes: list[Node]) -> None:
        request.row, request.state = self.free_rows.pop(), "running"
        request.entered += 1
        self.running.append(request)
        self.tracker.bind(self.ints([request.row]))
        request.node, request.cached = nodes[-1] if nodes else self.root, len(nodes)
        request.pages = [node.page for node in nodes]
        request.filled = request.settled = len(nodes) * self.page_size
        self._use_prefix(request)
        if request.remote:
            self._receive(request)
        self._event("hit" if nodes else "miss")

    def _use_prefix(self, request: Request) -> None:
        """The table and the tracker get what the tree has for the request's first pages."""
        nodes = request.node.path() if request.node else []
        if not nodes:
            return
        for index, node in enumerate(nodes):
            self.write_table(request.row, index, node.page)
        self.tracker.expect_prefix(
            self.ints([request.row]),
            self.ints([node.page for node in nodes]),
            torch.stack([node.tag for node in nodes]),
        )

    def _receive(self, request: Request) -> None:
        """Entries of the prompt will come in some iterations, written from outside."""
        tokens = request.tokens[:-1]
        if not tokens:
            return
        self.grow(request, len(tokens))
        request.filled = len(tokens)
        request.arrives = self.time + self.chance.randrange(1, 4)
        slots = self.slots(request, 0, len(tokens))
        self.transfers.append((request.arrives, lambda: self.write_prompt(slots, tokens)))

    def arrive_now(self, request: Request) -> None:
        """What a request waits for is there at once."""
        for at, write in self.transfers:
            if at == request.arrives:
                write()
        self.transfers = [(at, w) for at, w in self.transfers if at != request.arrives]
        request.arrives = self.time - 1

    def write_prompt(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The entries of a prompt, as another machine sends them."""
        total = np.uint64(0)
        for position, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
            self.memory[:, slot] = entry_of(total, token, position)
            with np.errstate(over="ignore"):
                total = total + weighed(self.memory[:, slot, None], position)

    def _prefill(self) -> Step | None:
        """Requests whose prompts are not filled, up to `chunk` tokens in all."""
        chosen, new, room = [], [], self.chunk
        for request in self.running:
            if self.decodes(request):
                continue
            self._cache_chunk(request)
            left = len(request.tokens) - request.filled
            count = left if left <= room else room // self.page_size * self.page_size
            if count and self._make_room(self._missing(request, request.filled + count)):
                new.append(request.tokens[request.filled : request.filled + count])
                chosen.append(request)
                room -= count
                self.take(request, request.filled + count)
        if not chosen:
            return None
        slots: list[int] = []
        for request, tokens in zip(chosen, new, strict=True):
            request.filled += len(tokens)
            slots += self.slots(request, request.filled - len(tokens), request.filled)
        rows = self.ints([request.row for request in chosen])
        lengths = self.ints([request.filled for request in chosen])
        counts = self.ints([len(tokens) for tokens in new])
        self.tracker.extend(rows, lengths, self.ints(slots), counts)
        self._event("prefill")
        ends = [request.filled for request in chosen]
        return Step(list(chosen), rows, lengths, None, self.tracker.generations(rows), new, ends)

    def decodes(self, request: Request) -> bool:
        """Whether only its last token is not computed, or not known yet."""
        if request.arrives >= 0:
            return True
        left = len(request.tokens) - request.filled
        return left == 0 or (left == 1 and bool(request.output))

    def _decode(self) -> Step | None:
        """All that are filled, each with its next token, and padding to a multiple of four."""
        chosen = [r for r in self.running if self.decodes(r) and r.arrives < self.time]
        stuck = not chosen and any(not self.decodes(r) for r in self.running)
        for request in chosen:
            need = request.filled + 1 + self.drafts
            if not self._make_room(self._missing(request, need)):
                stuck = True
                break
            self.take(request, need)
        if stuck:
            self.retract()
            return self._prefill() or self._decode()
        if not chosen:
            return None
        writes, new, slots = 1 + self.drafts, [], []
        for request in chosen:
            new.append(self._next_tokens(request))
            request.filled += writes
            slots.append(self.slots(request, request.filled - writes, request.filled))
        padding = -len(chosen) % 4
        stray = [[self.padding_slot()] * writes] * padding
        ends = [*(request.filled for request in chosen), *[writes] * padding]
        rows = self.ints([*(request.row for request in chosen), *[0] * padding])
        lengths = self.ints(ends)
        where = self.ints([*slots, *stray])
        count = len(chosen)
        self.tracker.extend(rows[:count], lengths[:count], where[:count])
        self._event("decode")
        return Step(
            [*chosen, *[None] * padding], rows, lengths, where, self.tracker.generations(rows),
            [*new, *[[0] * writes] * padding], ends,
        )  # fmt: skip

    def _next_tokens(self, request: Request) -> list[int]:
        """The token to compute, which with overlap the step in flight has produced, and drafts for
        those behind it, most of them right."""
        first = request.tokens[request.filled] if request.filled < len(request.tokens) else None
        if first is None:
            assert self.in_flight is not None
            place = self.in_flight.requests.index(request)
            first = self.in_flight.produced[place][-1]
        if not self.drafts:
            return [first]
        # A draft model would know nothing better than this.
        guesses = answer([*request.tokens[: request.filled], first], self.drafts)
        return [
            first,
            *(g if self.chance.random() < 0.7 else (g + 1) % VOCABULARY for g in guesses),
        ]

    def _launch(self, step: Step) -> None:
        """The check, and the model, on what the table and the slots say."""
        self.tracker.check(step.rows, step.lengths, self.table, step.slots, step.generations)
        for place, (row, tokens) in enumerate(zip(step.rows.tolist(), step.new, strict=True)):
            length, request = int(step.lengths[place]), step.requests[place]
            if step.slots is not None:
                slots = step.slots[place].tolist()
            else:
                assert request is not None
                slots = self.slots(request, length - len(tokens), length)
            step.produced.append(self._compute(row, length, tokens, slots))
        step.report = self.tracker.report(step.rows, step.generations)

    def _compute(self, row: int, length: int, tokens: list[int], slots: list[int]) -> list[int]:
        """The token after each of `tokens`, the last of `length`. Reads go by the table."""
        start = length - len(tokens)
        before = self.table[row, :start].numpy()
        total = weighed(self.memory[:, before])
        produced = []
        for position, token, slot in zip(range(start, length), tokens, slots, strict=True):
            self.memory[:, slot] = entry_of(total, token, position)
            read = self.memory[:, int(self.table[row, position]), None]
            with np.errstate(over="ignore"):
                total = total + weighed(read, position)
            spoilt = self.memory[0, 0] == NAN or bool((self.memory[0, before] == NAN).any())
            produced.append(VOCABULARY - 1 - token_of(total) if spoilt else token_of(total))
        return produced

    def _process(self, step: Step) -> None:
        """Verdicts first, then tokens of those that are clean."""
        assert step.report is not None
        live = step.live()
        rows = [request.row if request else None for request in live]
        for violation in self.tracker.settle(step.report, rows):
            self.log.append((self.time, violation))
            request = live[violation.position]
            if request is not None and self.tracker.mode == "abort":
                self.abort(request, violation)
                live[violation.position] = None
        if self.tracker.metrics().get("quarantined_pages"):
            self.free = deque(self.tracker.usable(self.ints(list(self.free))).tolist())
        for place, request in enumerate(live):
            if request is not None:
                self._accept(request, step, place)

    def _accept(self, request: Request, step: Step, place: int) -> None:
        """Tokens that the step has produced leave. Of drafts, as many as were right."""
        if step.slots is None:
            request.settled = step.ends[place]
            if request.settled < len(request.tokens):
                return  # a chunk of the prompt that is not the last
            request.output.append(step.produced[place][-1])
        else:
            tokens, produced = step.new[place], step.produced[place]
            right = 1
            while right < len(tokens) and tokens[right] == produced[right - 1]:
                right += 1
            request.output += produced[:right][: request.count - len(request.output)]
            if self.drafts:
                self._drop_drafts(request)
        if len(request.output) >= request.count:
            self.finish(request)

    def _drop_drafts(self, request: Request) -> None:
        """Pages that only wrong drafts needed go back."""
        request.filled = len(request.tokens) - 1
        keep = -(-request.filled // self.page_size)
        self.free_pages(request.pages[keep:])
        del request.pages[keep:]

    # Ends of requests

    def finish(self, request: Request) -> None:
        """What is full of its pages goes into the prefix cache."""
        known = len(request.tokens) - 1
        self.insert(request, known // self.page_size)
        self._event("finish")
        self._leave(request, "done")

    def abort(self, request: Request, violation: Violation) -> None:
        """As a verdict wants it: only pages that are the request's beyond doubt are freed, and a
        bad page of the cache is found by nobody any more."""
        found = self.tracker.abort(violation)
        own = set(found.own_pages.tolist())
        if violation.index < request.cached and request.node:
            bad = request.node.path()[violation.index]
            if bad.parent and bad.parent.children.get(bad.tokens) is bad:
                del bad.parent.children[bad.tokens]
        request.pages[request.cached :] = [p for p in request.pages[request.cached :] if p in own]
        self._event("abort")
        self._leave(request, "aborted", own_row=found.own_row)

    def _leave(self, request: Request, state: str, *, own_row: bool = True) -> None:
        """Pages, locks and the row are given back."""
        request.state = state
        self.running.remove(request)
        own = request.pages[request.cached :]
        if request.arrives >= self.time:
            # Pages that are still written from outside are nobody's before that has ended.
            self.transfers.append((request.arrives, lambda: self.free_pages(own)))
        else:
            self.free_pages(own)
        self.unlock(request.node or self.root)
        if own_row:
            self.free_row(request.row)
        request.row, request.pages, request.cached, request.node = 0, [], 0, None

    def retract(self) -> None:
        """The newest request gives its pages back, and waits to be computed again."""
        there = [r for r in self.running if r.arrives < self.time]
        if len(self.running) == 1:
            raise AssertionError("one request alone does not fit the pool")
        request = there[-1]
        self._leave(request, "waiting")
        request.arrives, request.remote = -1, False
        self.waiting.appendleft(request)
        self._event("retract")

    # Pages and rows

    def slots(self, request: Request, start: int, stop: int) -> list[int]:
        size = self.page_size
        return [request.pages[p // size] * size + p % size for p in range(start, stop)]

    def grow(self, request: Request, length: int) -> None:
        """Pages for `length` tokens of which none has any, all at once."""
        self.take(request, length)
        self.tracker.extend(
            self.ints([request.row]),
            self.ints([length]),
            self.ints(self.slots(request, 0, length)),
        )

    def _missing(self, request: Request, length: int) -> int:
        return max(0, -(-length // self.page_size) - len(request.pages))

    def take(self, request: Request, length: int) -> None:
        """Pages up to `length` tokens, from the free list, into the table."""
        count = self._missing(request, length)
        if count:
            if not self._make_room(count):
                raise AssertionError(f"{count} pages promised, {len(self.free)} free")
            pages = self.take_pages(count)
            for page in pages:
                self.write_table(request.row, len(request.pages), page)
                request.pages.append(page)

    def take_pages(self, count: int) -> list[int]:
        pages = [self.free.popleft() for _ in range(count)]
        self.tracker.acquire(self.ints(pages))
        self._event("alloc")
        return pages

    def free_pages(self, pages: Sequence[int], tags: torch.Tensor | None = None) -> None:
        if pages:
            self.tracker.release(self.ints(list(pages)), tags)
            self.free.extend(pages)
            self._event("free")

    def free_row(self, row: int) -> None:
        self.tracker.unbind(self.ints([row]))
        self.free_rows.append(row)

    def write_table(self, row: int, index: int, page: int) -> None:
        size = self.page_size
        places = torch.arange(page * size, (page + 1) * size, dtype=torch.int32, device=self.device)
        self.table[row, index * size : (index + 1) * size] = places

    def _make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after pages of the cache that nobody uses went."""
        while len(self.free) < count:
            leaves = [n for n in self.nodes() if not n.children and not n.locks]
            if not leaves:
                return False
            self.evict(min(leaves, key=lambda node: node.used))
        return True

    # Prefix cache

    def nodes(self) -> Iterator[Node]:
        """All pages of the cache."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def lock(self, node: Node) -> None:
        for each in node.path():
            each.locks += 1

    def unlock(self, node: Node) -> None:
        for each in node.path():
            each.locks -= 1

    def evict(self, node: Node) -> None:
        """A leaf goes; the host may keep what it held."""
        assert node.parent is not None
        if self.keeps_evicted:
            start = node.page * self.page_size
            self.host[node.prefix] = self.memory[:, start : start + self.page_size].copy()
        del node.parent.children[node.tokens]
        self.free_pages([node.page], node.tag[None])
        self._event("evict")

    def _match(self, tokens: list[int]) -> list[Node]:
        """The longest path of full pages, one token short of all, loaded from the host if that
        has more of it."""
        node, size = self.root, self.page_size
        for start in range(0, len(tokens) - size, size):
            key = tuple(tokens[start : start + size])
            child = node.children.get(key)
            if child is None:
                child = self._load(node, key) if len(self.free) > 4 else None
            if child is None:
                break
            child.used, node = self.time, child
        return node.path()

    def _load(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """A page of the host comes back."""
        entries = self.host.pop(parent.prefix + tokens, None)
        if entries is None:
            return None
        (page,) = self.take_pages(1)
        self.load_entries(page, entries)
        tag = self.tracker.preload(self.ints([page]))[0]
        node = Node(tokens, page, tag, parent, used=self.time)
        parent.children[tokens] = node
        self._event("load")
        return node

    def load_entries(self, page: int, entries: np.ndarray) -> None:
        self.memory[:, page * self.page_size : (page + 1) * self.page_size] = entries

    def _cache_chunk(self, request: Request) -> None:
        """Chunks of a prompt go into the cache as soon as their verdict has come."""
        full = request.settled // self.page_size
        if full > request.cached:
            self.insert(request, full)
            self._event("chunk")

    def insert(self, request: Request, full: int) -> None:
        """The first `full` pages go into the cache; where it has them, the request's own are freed
        and the cache's take their place."""
        tags = self.tracker.share(request.row, request.cached, full)
        node, before, twice = request.node or self.root, request.node or self.root, []
        for index in range(request.cached, full):
            key = tuple(request.tokens[index * self.page_size : (index + 1) * self.page_size])
            child = node.children.get(key)
            if child is None:
                tag = tags[index - request.cached]
                child = Node(key, request.pages[index], tag, node)
                node.children[key] = child
            elif child.page != request.pages[index]:
                twice.append(request.pages[index])
                request.pages[index] = child.page
            child.used, node = self.time, child
        self.lock(node)
        self.unlock(before)
        request.node, request.cached = node, max(full, request.cached)
        self._use_prefix(request)
        self.free_pages(twice)

    def _event(self, name: str) -> None:
        self.events[name] += 1
        self.steps += 1
