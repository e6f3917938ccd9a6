"""Bookkeeping errors that servers really had, each to be injected into `paged.Server`.

`FAULTS` are the bugs by number; `inject` waits for a state in which the error can happen, makes it,
and says whether it did. `run_fault` serves a small load around one. What the tracker promises of
each is its `outcome`, those that it cannot see included.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from halfbyte.kvcache.integrity.tracker import Mode
from halfbyte.testing.arithmetic import NAN, POOLS, VOCABULARY
from halfbyte.testing.paged import Server
from halfbyte.testing.paged_parts import Node, Request, Step


class Outcome(Enum):
    """Which check finds a fault."""

    READ = "read check"
    ALLOCATOR = "allocator"
    WRITE = "write guard"
    MISSED = "not caught"


@dataclass(frozen=True)
class Fault:
    """An error of a server. `why` tells how it is found, or why it is not."""

    number: int
    name: str
    threads: tuple[str, ...]
    """Where it was told of: repository and number of the issue or pull request."""
    what: str
    outcome: Outcome
    why: str
    inject: Callable[[Server], bool]
    pages: int = 48
    drafts: int = 0
    """The server's pool and drafts, where the error needs some."""


def run_fault(fault: Fault, *, mode: Mode = "abort", seed: int = 0) -> Server:
    """A load of requests that share prefixes, with the fault once in the middle of it; all have
    ended. Raises AssertionError if the fault never could happen."""
    server = Server(mode=mode, seed=seed, pages=fault.pages, drafts=fault.drafts)
    chance = random.Random(seed)
    bases = [[chance.randrange(VOCABULARY) for _ in range(16)] for _ in range(3)]
    injected = False
    for number in range(24):
        prompt = bases[number % 3][: chance.choice([4, 8, 16])]
        tail = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(3, 9))]
        server.submit(prompt + tail, chance.randrange(6, 14), remote=number % 4 == 1)
        for _ in range(2):
            server.iterate()
            if number > 3 and not injected:
                injected = fault.inject(server)
    if not injected:
        raise AssertionError(f"{fault.name} did not happen with seed {seed}")
    server.run()
    return server


def _running(server: Server, *, left: int = 4, own: int = 1) -> list[Request]:
    """Requests that decode and will for some steps, with pages of their own that are filled."""
    return [
        r for r in server.running
        if r.output and r.count - len(r.output) >= left and r.arrives < 0
        and r.settled and len(r.pages) - r.cached > own
    ]  # fmt: skip


def _next_out(server: Server, *pages: int) -> None:
    """These of the free list are handed out next."""
    server.free = deque([*pages, *(p for p in server.free if p not in pages)])


def _pending(server: Server) -> list[Request]:
    """Requests whose prompt is still on its way."""
    return [r for r in server.running if r.arrives >= server.time]


def _used_nodes(server: Server) -> list[Node]:
    """The cache's pages that some request has that will decode for a while, the last ones first."""
    return [r.node for r in _running(server, own=0) if r.cached and r.node]


def free_under_reader(server: Server) -> bool:
    for request in _running(server):
        page = request.pages[request.cached]
        server.free_pages([page])
        _next_out(server, page)
        return True
    return False


def late_write(server: Server) -> bool:
    for request in _pending(server):
        writes = [write for at, write in server.transfers if at == request.arrives]
        pages = request.pages[request.cached :]
        server.transfers = [(at, w) for at, w in server.transfers if at != request.arrives]
        server.transfers += [(server.time + 5, write) for write in writes]
        request.arrives = -1
        server.cancel(request)
        _next_out(server, *pages)
        return True
    return False


def source_reused(server: Server) -> bool:
    for request in _pending(server):
        slots = server.slots(request, 0, request.filled)
        others = [token + 1 for token in request.tokens[: request.filled]]
        server.transfers.append((request.arrives, partial(server.write_prompt, slots, others)))
        return True
    return False


def row_recycled(server: Server) -> bool:
    if len(_running(server)) < 2 or not server.waiting:
        return False

    def recycle(step: Step) -> None:
        request = next((r for r in step.requests if r in _running(server)), None)
        if request is None or step.slots is None:
            return
        server.before_launch = lambda step: None
        server.free_row(request.row)
        other = server.waiting.popleft()
        other.remote = False
        server.enter(other, [])
        server.take(other, len(other.tokens))

    server.before_launch = recycle
    return True


def alias_page(server: Server) -> bool:
    ready = [r for r in _running(server, left=6) if r.filled % server.page_size == 0]
    for request in ready:
        for other in _running(server, left=6):
            if other is not request and len(request.pages) * server.page_size == request.filled:
                server.write_table(request.row, len(request.pages), other.pages[-1])
                request.pages.append(other.pages[-1])
                return True
    return False


def free_again(server: Server) -> bool:
    if len(server.free) < 2:
        return False
    page = server.free[-1]
    server.free_pages([page])
    server.free.rotate(1)
    return True


def free_twice_at_once(server: Server) -> bool:
    for request in _running(server):
        request.pages.append(request.pages[-1])
        server.cancel(request)
        return True
    return False


def free_cached_pages(server: Server) -> bool:
    for node in _used_nodes(server):
        pages = [each.page for each in node.path()]
        server.free_pages(pages)
        _next_out(server, *pages)
        return True
    return False


def old_forward_writes(server: Server) -> bool:
    for node in _used_nodes(server):
        server.transfers.append((server.time + 1, partial(_overwrite, server, node.page)))
        return True
    return False


def _overwrite(server: Server, page: int) -> None:
    shape = (POOLS, server.page_size)
    server.load_entries(page, np.full(shape, 12345, dtype=np.uint64))


def stale_padding_slots(server: Server) -> bool:
    for request in _running(server):
        slot = request.pages[request.cached] * server.page_size
        server.padding_slot = partial(int, slot)
        return True
    return False


def negative_padding_slot(server: Server) -> bool:
    last = server.pages - 1
    if any(last in r.pages[:-1] for r in _running(server, own=0)):
        server.padding_slot = lambda: -1
        return True
    return False


def nan_in_padding(server: Server) -> bool:
    def spoil(step: Step) -> None:
        server.memory[:, 0] = NAN

    server.before_launch = spoil
    return True


def permute_in_page(server: Server) -> bool:
    for request in _running(server):
        start = request.pages[request.cached] * server.page_size
        page = server.memory[:, start : start + server.page_size]
        page[:] = page[:, ::-1].copy()
        return True
    return False


def second_pool_empty(server: Server) -> bool:
    for node in _used_nodes(server):
        start = node.page * server.page_size
        server.memory[1, start : start + server.page_size] = 0
        return True
    return False


def load_otherwise(change: Callable[[np.ndarray], np.ndarray], server: Server) -> bool:
    """A page goes to the host and comes back changed, for a request that has its prefix."""
    leaves = [n for n in server.nodes() if not n.children and not n.locks]
    if not leaves or len(server.free) < 6:
        return False
    load = server.load_entries
    server.load_entries = lambda page, entries: load(page, change(entries))  # type: ignore[method-assign]
    prompt = [*leaves[0].prefix, 1, 2, 3]
    server.evict(leaves[0])
    server.submit(prompt, 5)
    server.waiting.rotate(1)
    return True


def latent_only(entries: np.ndarray) -> np.ndarray:
    return entries * np.array([[1], [0]], dtype=np.uint64)


def other_layout(entries: np.ndarray) -> np.ndarray:
    return entries[:, ::-1].copy()


def freed_while_loading(server: Server) -> bool:
    for request in _pending(server):
        if request.count < 4:
            continue
        # What came is written at once, so only the pages' early return is wrong.
        server.arrive_now(request)
        pages = list(request.pages)
        server.free_pages(pages)
        _next_out(server, *pages)
        return True
    return False


def drafts_beyond_table(server: Server) -> bool:
    if not _running(server):
        return False

    def lengthen(step: Step) -> None:
        for place, request in enumerate(step.requests):
            if request and step.slots is not None and request in _running(server):
                server.before_launch = lambda step: None
                step.lengths[place] = (len(request.pages) + 3) * server.page_size
                return

    server.before_launch = lengthen
    return True


def unlocked_node(server: Server) -> bool:
    for node in _used_nodes(server):
        if not node.children and node.locks == 1:
            node.locks = 0
            server.evict(node)
            _next_out(server, node.page)
            return True
    return False


def free_all_again(server: Server) -> bool:
    for request in _running(server):
        pages = request.pages[request.cached :]
        server.cancel(request)
        server.free_pages(pages)
        _next_out(server, *pages)
        server.free.extend(pages)
        return True
    return False


def orphaned_nodes(server: Server) -> bool:
    for node in _used_nodes(server):
        top = node.path()[0]
        del server.root.children[top.tokens]
        pages = [n.page for n in _subtree(top)]
        server.free_pages(pages)
        _next_out(server, *pages)
        return True
    return False


def _subtree(node: Node) -> list[Node]:
    return [node, *(n for child in node.children.values() for n in _subtree(child))]


def overrun_freed_again(server: Server) -> bool:
    finish = server.finish

    def twice(request: Request) -> None:
        page, full = request.pages[-1], (len(request.tokens) - 1) // server.page_size
        uncached = len(request.pages) > full
        finish(request)
        if uncached:
            server.finish = finish  # type: ignore[method-assign]
            server.free_pages([page])
            server.free.rotate(1)

    server.finish = twice  # type: ignore[method-assign]
    return True


def aborted_entries_cached(server: Server) -> bool:
    for request in _pending(server):
        full = request.filled // server.page_size
        if not full:
            continue
        server.transfers = [(at, w) for at, w in server.transfers if at != request.arrives]
        request.arrives = -1
        server.insert(request, full)
        prompt = [*request.prompt[: full * server.page_size], 1, 2, 3]
        server.cancel(request)
        server.submit(prompt, 5)
        server.waiting.rotate(1)
        return True
    return False


_STALE = "the page's tag has moved on when the request reads it"
_CONTENT = "the right page holds the wrong bytes; tags say nothing of contents"
_R, _A, _W, _M = Outcome.READ, Outcome.ALLOCATOR, Outcome.WRITE, Outcome.MISSED

FAULTS = (
    Fault(
        1, "free-under-reader", ("sglang#24226",),
        "offloading frees pages of the prompt that decoding still reads",
        _R, _STALE, free_under_reader,
    ),
    Fault(
        2, "late-write", ("sglang#24527", "sglang#32564", "sglang#35049"),
        "a request is aborted, its pages are reused, and a late remote write lands in them",
        _M, _CONTENT, late_write,
    ),
    Fault(
        3, "source-reused", ("sglang#38961",),
        "pages of a transfer's source are freed on a timeout and reused while they are sent",
        _M, _CONTENT, source_reused,
    ),
    Fault(
        4, "row-recycled", ("sglang#18803", "sglang#18746"),
        "a row of the page table goes to another request while a launched step reads it",
        _R, "the row's generation is not the one that the step was formed with", row_recycled,
    ),
    Fault(
        5, "aliased-page", ("sglang#38840",),
        "new tokens of a request are placed in a page that another one has",
        _A, "a page can be claimed once after it was acquired", alias_page,
    ),
    Fault(
        6, "freed-again", ("sglang#27779",),
        "part of a mapping is not cleared, and its page is freed once more later",
        _A, "the page is free already: its tag is even", free_again,
    ),
    Fault(
        7, "freed-twice-at-once", ("sglang#38941", "sglang#38981"),
        "two frees meet in one wide page, which enters the free list twice",
        _A, "the second of the two finds an even tag", free_twice_at_once,
    ),
    Fault(
        8, "cached-pages-freed", ("sglang#38319", "sglang#38355"),
        "retraction frees pages that the prefix cache still has",
        _R, "a hit expects the tag that the node was given, not the page's own", free_cached_pages,
    ),
    Fault(
        9, "old-forward-writes", ("sglang#36738",),
        "an earlier step still writes a page into which a prefix was loaded from the host",
        _M, _CONTENT + "; needs the order of streams", old_forward_writes,
    ),
    Fault(
        10, "stale-padding-slots", ("sglang#24743",),
        "padding rows of a graph keep the write slots of an earlier batch",
        _W, "padding may write to page 0 only", stale_padding_slots,
    ),
    Fault(
        11, "negative-padding-slot", ("vllm#43810",),
        "padding's slot -1 becomes the last slot of the pool",
        _W, "padding may write to page 0 only", negative_padding_slot,
        pages=24,
    ),
    Fault(
        12, "nan-in-padding", ("sglang#32477",),
        "NaN in the padding slot spoils what is masked out by a product with zero",
        _M, "page 0 is used as it should be; " + _CONTENT, nan_in_padding,
    ),
    Fault(
        13, "permuted-in-page", ("sglang#31218",),
        "moving entries ignores the layout within a page",
        _M, _CONTENT, permute_in_page,
    ),
    Fault(
        14, "draft-pool-empty", ("sglang#19897",),
        "a prefix hit finds the target's entries, and the draft model's were never written",
        _M, "both pools share their pages, and these are right; " + _CONTENT, second_pool_empty,
    ),
    Fault(
        15, "sidecar-not-loaded", ("sglang#30057", "Mooncake#2236"),
        "a page comes back from storage without its index keys",
        _M, "both pools share their pages, and these are right; " + _CONTENT,
        partial(load_otherwise, latent_only),
    ),
    Fault(
        16, "freed-while-loading", ("vllm#32255", "vllm#45357", "vllm#52360"),
        "blocks are freed while the request waits for their load",
        _R, _STALE + "; a write that is still on its way is bug 2", freed_while_loading,
    ),
    Fault(
        17, "drafts-beyond-table", ("vllm#16370",),
        "draft tokens read past the end of the block table",
        _R, "more pages are read than the row was given", drafts_beyond_table,
        drafts=3,
    ),
    Fault(
        18, "unlocked-node", ("mini-sglang#52",),
        "locking a path leaves out its last node, which is evicted in use",
        _R, _STALE, unlocked_node,
    ),
    Fault(
        19, "all-freed-again", ("LMCache#5005",),
        "an allocator accepts a second free, and its pages have two owners",
        _A, "the pages are free already: their tags are even", free_all_again,
    ),
    Fault(
        20, "other-layout", ("LMCache#4463", "dynamo#14416"),
        "a page is loaded with another layout than it was stored with",
        _M, _CONTENT, partial(load_otherwise, other_layout),
    ),
    Fault(
        21, "orphaned-nodes", ("TensorRT-LLM#8813", "TensorRT-LLM#15018", "TensorRT-LLM#12540"),
        "cached blocks are orphaned or unpinned in use, and reused",
        _R, _STALE, orphaned_nodes,
    ),
    Fault(
        22, "overrun-freed-again", ("sglang-omni#1607",),
        "the slot of a token behind the end is freed with the request, and by itself",
        _A, "the page is free already: its tag is even", overrun_freed_again,
    ),
    Fault(
        23, "aborted-entries-cached", ("sglang#28374",),
        "an aborted request's pages, never filled, go into the prefix cache",
        _M, "the pages are the request's own; what may be cached is the engine's to know",
        aborted_entries_cached,
    ),
)  # fmt: skip
"""By number: those of the survey of public threads that the integrity tracker was designed on."""
