"""The plugin on SGLang's own allocators, page table, prefix cache, batches and result processing.

`Server` is SGLang's overlap loop around these, with a model that needs no GPU: what it samples
depends on every token that it finds in the KV cache, so a request that reads another's page answers
something else than it would alone.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import random
import re
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.tracker import Mode
from halfbyte.kvcache.plugins import sglang as plugin
from halfbyte.kvcache.plugins.hooks import check_installed, check_targets

VOCABULARY = 997
ROWS, CONTEXT = 12, 512


def answer(tokens: Sequence[int]) -> int:
    """What the model samples after `tokens`."""
    value = 1
    for token in tokens:
        value = (value * 31 + int(token) + 1) % VOCABULARY
    return value


def answers(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tokens[len(prompt) :]


def model(self: Any, batch: Any, *_: Any, **__: Any) -> GenerationBatchResult:
    """Stands for `TpModelWorker.forward_batch_generation`: `self` is a `Server`."""
    rows, slots = batch.req_pool_indices, batch.out_cache_loc
    if batch.forward_mode.is_extend():
        inputs = [
            token
            for req in batch.reqs
            for token in req.full_untruncated_fill_ids[req.prefix_len : req.extend_end]
        ]
        self.kv[slots] = torch.tensor(inputs)
    else:
        self.kv[slots] = self.sampled[rows]
    read = [
        self.kv[self.table.req_to_token[row, :length].long()].tolist()
        for row, length in zip(rows.tolist(), batch.seq_lens.tolist(), strict=True)
    ]
    tokens = torch.tensor([answer(sequence) for sequence in read])
    self.sampled[rows] = tokens
    return GenerationBatchResult(next_token_ids=tokens)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    """SGLang configured for the CPU, with the plugin's hooks in place."""
    check_targets(plugin.HOOKS, "sglang")
    get_context().override_server_args(attention_backend="torch_native", device="cpu").install()
    TpModelWorker.forward_batch_generation = model
    plugin.register()
    HookRegistry.apply_hooks()
    check_installed(plugin.HOOKS, "sglang")
    with get_parallel().override(dcp_enabled=False):
        yield


class CopyDone:
    """An event of a device that is never behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Server:
    """SGLang's loop with overlap: a batch is launched before the last one's result is processed."""

    def __init__(
        self,
        page_size: int,
        pages: int,
        *,
        mode: Mode | None = "abort",
        core: str = "python",
        disable: bool = False,
        chunk: int = 64,
        groups: Sequence[Any] = (),
    ) -> None:
        common = {"dtype": torch.bfloat16, "device": "cpu", "need_sort": False}
        size, self.page_size, self.chunk = pages * page_size, page_size, chunk
        pool = MLATokenToKVPool.__new__(MLATokenToKVPool)
        self.allocator: Any = (
            TokenToKVPoolAllocator(size, kvcache=pool, **common)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, kvcache=pool, **common)
        )
        self.table = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=disable,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.guard: Any = mode and plugin.attach(mode, self.allocator, self.table, groups)
        self.kv = torch.zeros(size + page_size, dtype=torch.int64)
        self.sampled = torch.zeros(ROWS + 1, dtype=torch.int64)
        self.model_config = SimpleNamespace(
            vocab_size=VOCABULARY,
            is_encoder_decoder=False,
            self_opened_think_start_ids=None,
        )
        self.processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=None,
            enable_overlap=True,
            enable_overlap_mlx=False,
            model_config=self.model_config,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
            req_to_token_pool=self.table,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=SimpleNamespace(
                num_generated_tokens=0,
                forward_ct_decode=0,
                report_decode_stats=lambda *_, **__: None,
            ),
            draft_worker=None,
            model_worker=None,
            logprob_result_processor=None,
            output_streamer=SimpleNamespace(stream_output=self.stream),
            beam_coordinator=SimpleNamespace(commit_decode=lambda batch: set()),
            abort_request=None,
        )
        self.waiting: deque[Req] = deque()
        self.running: ScheduleBatch = self.batch([])
        self.last: ScheduleBatch | None = None
        self.chunked: Req | None = None
        self.results: deque[tuple[ScheduleBatch, GenerationBatchResult]] = deque()
        self.streamed: dict[str, list[int]] = {}
        self.ended: dict[str, Req] = {}
        self.steps = 0
        self.before_model: Callable[[ScheduleBatch], None] = lambda batch: None

    def stream(self, reqs: Sequence[Req], *_: Any) -> None:
        for req in reqs:
            if req.finished() and req.finished_len is None:
                req.finished_len = len(req.output_ids)
            self.streamed[req.rid] = list(req.output_ids_through_stop)
            if req.finished():
                self.ended[req.rid] = req

    def batch(self, reqs: list[Req], chunked: Req | None = None) -> ScheduleBatch:
        return ScheduleBatch.init_new(
            reqs, self.table, self.allocator, self.cache, self.model_config, True,
            SpeculativeAlgorithm.NONE, chunked_req=chunked,
        )  # fmt: skip

    def submit(self, name: str, prompt: Sequence[int], count: int) -> Req:
        parameters = SamplingParams(max_new_tokens=count, ignore_eos=True)
        parameters.normalize(None)
        req = Req(name, "", array("q", prompt), parameters, vocab_size=VOCABULARY)
        self.waiting.append(req)
        return req

    def step(self) -> None:
        self.steps += 1
        batch = self._next_batch()
        if batch is not None:
            self.before_model(batch)
            result = TpModelWorker.forward_batch_generation(self, batch)
            result.copy_done = CopyDone()
            result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
            self.results.append((batch.copy(), result))
        if self.last is not None:
            done, result = self.results.popleft()
            if done.forward_mode.is_decode():
                self.processor.process_batch_result_decode(done, result)
            else:
                self.processor.process_batch_result_prefill(done, result)
        self.last = batch

    def run(self) -> None:
        while self.waiting or self.last is not None or not self.running.is_empty():
            self.step()

    def _next_batch(self) -> ScheduleBatch | None:
        excluded = [] if self.chunked is None else [self.chunked]
        if self.chunked is not None:
            checkpoint_kv_cache(self.chunked, self.cache)
        if self.last is not None and self.last.forward_mode.is_extend():
            if self.last.chunked_req is not None:
                excluded.append(self.last.chunked_req)
            self.last.filter_batch(reqs_to_exclude=excluded)
            if not self.last.is_empty():
                if self.running.is_empty():
                    self.running = self.last
                else:
                    self.running.merge_batch(self.last)
        self.running.filter_batch()
        return self._next_prefill() or self._next_decode()

    def _next_prefill(self) -> ScheduleBatch | None:
        room, budget = self.allocator.available_size() + self.cache.evictable_size(), self.chunk
        size = self.page_size
        reqs = []
        if (chunked := self.chunked) is not None:
            chunked.refresh_fill_ids()
            room -= chunked.seqlen - chunked.prefix_len + 2 * size
            self._admit(chunked, budget)
            reqs, budget = [chunked], budget - chunked.extend_len
        while self.waiting and budget > 0 and self.chunked is None:
            req, rows = self.waiting[0], self.table.available_size() - len(reqs)
            if rows <= 0 or room < req.seqlen + 2 * size:
                break
            req.init_next_round_input(self.cache)
            if not self._admit(req, budget):
                break
            self.waiting.popleft()
            req.lock = self.cache.lock(req.last_node)
            room -= req.seqlen + size
            budget -= req.extend_len
            reqs.append(req)
        if not reqs:
            return None
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        batch = self.batch(reqs, self.chunked)
        batch.prepare_for_extend()
        batch.decoding_reqs = None
        return batch

    def _admit(self, req: Req, budget: int) -> bool:
        """Takes as much of the prompt as fits; what is left makes the request the chunked one."""
        whole = len(req.full_untruncated_fill_ids)
        end = min(whole, req.prefix_len + budget)
        if end < whole:
            end = end // self.page_size * self.page_size
        if end <= req.prefix_len:
            return False
        req.extend_end = end
        self.chunked = req if end < whole else None
        return True

    def _next_decode(self) -> ScheduleBatch | None:
        if self.running.is_empty():
            return None
        if not self.running.check_decode_mem():
            retracted, _, aborted = self.running.retract_decode()
            self.waiting.extend(retracted)
            assert not aborted
        if self.running.is_empty():
            return None
        self.running.prepare_for_decode()
        return self.running


def right(server: Server) -> set[str]:
    """Requests whose tokens are what they would be alone."""
    return {
        name
        for name, tokens in server.streamed.items()
        if tokens == answers(server.ended[name].origin_input_ids, len(tokens))
    }


def aborted(server: Server) -> set[str]:
    ended = server.ended.items()
    return {name for name, req in ended if isinstance(req.finished_reason, FINISH_ABORT)}


def violations(server: Server) -> dict[str, int]:
    """Counts of what was found, by kind, without zeros."""
    counts = server.guard.tracker.metrics().items()
    return {kind.removeprefix("violations_"): n for kind, n in counts if "violations" in kind and n}


def prompts(seed: int, count: int, shared: int) -> list[list[int]]:
    """Prompts with one of three beginnings, up to `shared` tokens of it, and up to 30 of others."""
    chance = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(length)]

    stems = [tokens(shared) for _ in range(3)]
    return [
        chance.choice(stems)[: chance.randrange(shared + 1)] + tokens(chance.randint(3, 30))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("page_size", "pages", "core", "disable"),
    [
        (1, 400, "python", False),
        (1, 400, "rust", False),
        (4, 110, "python", False),
        (16, 36, "rust", False),
        (64, 14, "python", False),
        (16, 36, "python", True),
    ],
)
def test_ordinary_traffic_raises_no_alarm(
    page_size: int, pages: int, core: str, disable: bool
) -> None:
    """Chunked prefill, shared prefixes, eviction and retraction; mode raise fails at any fault."""
    server = Server(page_size, pages, mode="raise", core=core, disable=disable)
    assert type(server.cache.tree_core).__name__.lower().startswith(("rust", "unified"))
    chance = random.Random(page_size)
    for i, prompt in enumerate(prompts(page_size, 1200, max(60, 2 * page_size))):
        server.submit(str(i), prompt, chance.randint(1, 40))
        for _ in range(chance.randint(1, 4)):
            server.step()
    server.run()
    retracted = sum(req.retraction_count for req in server.ended.values())
    assert len(server.ended) == 1200
    assert right(server) == set(server.streamed)
    assert violations(server) == {}
    metrics = server.guard.tracker.metrics()
    assert metrics["checks"] == metrics["steps"] > 2500
    assert retracted > 0
    if not disable:
        assert sum(req.cached_tokens for req in server.ended.values()) > 1000


def started(page_size: int, *, count: int = 4, **options: Any) -> Server:
    """A server whose requests, with a shared beginning, are all being decoded."""
    server = Server(page_size, 2400 // page_size + 16, **options)
    stem = [(7 * i) % VOCABULARY for i in range(2 * page_size + 3)]
    for i in range(count):
        server.submit(str(i), [*stem, 100 + i, *range(i)], 3 * page_size + 20)
        while server.running.batch_size() <= i:
            server.step()
    return server


def request(server: Server, name: str) -> Req:
    return next(req for req in server.running.reqs if req.rid == name)


def own_slots(server: Server, req: Req) -> torch.Tensor:
    """Places of the tokens that are the request's alone."""
    row = server.table.req_to_token[req.kv.req_pool_idx]
    return row[req.kv.cache_protected_len : req.kv.kv_allocated_len].long()


def free_in_use(server: Server) -> None:
    """sglang#24226: pages are freed that a running request still reads."""
    server.allocator.free(own_slots(server, request(server, "1")))


def free_row(server: Server) -> None:
    """sglang#18803: the row of a running request goes to the next one."""
    server.table.free_rows([request(server, "1").kv.req_pool_idx])


def change_table(server: Server) -> None:
    """An entry of the page table is another request's."""
    a, b = request(server, "1").kv, request(server, "2").kv
    size, table = server.page_size, server.table.req_to_token
    own = a.cache_protected_len // size * size
    table[a.req_pool_idx, own : own + size] = table[b.req_pool_idx, own : own + size]


def evict_in_use(server: Server) -> None:
    """mini-sglang#52: a prefix is evicted that a request still uses."""
    for req in server.running.reqs:
        if req.lock is not None:
            server.cache.unlock(req.lock)
            req.lock = None
    server.cache.evict(EvictParams(num_tokens=10_000))


STALE = [free_in_use, free_row, change_table, evict_in_use]


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("fault", STALE, ids=lambda fault: fault.__name__)
def test_stale_mapping_aborts_its_requests_alone(
    fault: Callable[[Server], None], page_size: int
) -> None:
    server = started(page_size)
    before = dict(server.streamed)
    fault(server)
    for i in range(4, 8):  # these take what was freed
        server.submit(str(i), [200 + i] * (page_size + 9 * i), 2 * page_size + 9)
    server.run()
    everyone = {str(i) for i in range(8)}
    assert set(server.ended) == everyone
    victims = {"0", "1", "2", "3"} if fault is evict_in_use else {"1"}
    if fault is free_row:
        # SGLang writes the first request's slots into the row of the next: its table is wrong, too.
        victims |= aborted(server) & {"4", "5", "6", "7"}
        assert len(victims) <= 2
    assert aborted(server) == victims
    assert right(server) == everyone, "no token that another's KV has a part in leaves"
    if fault is not evict_in_use:  # which leaves the cache's own count wrong
        pages = server.guard.tracker.metrics()["quarantined_pages"]
        withheld = pages * page_size + server.guard.lost_tokens
        kept = server.allocator.available_size() + server.cache.evictable_size()
        assert kept + withheld == server.allocator.size, "no page is lost, or there twice"
    for name in victims:
        reason = server.ended[name].finished_reason
        assert reason.status_code == 500
        assert "KV-cache integrity" in reason.message
        # One step was in flight when the fault came.
        assert len(server.streamed[name]) <= len(before.get(name, [])) + 1


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("reinserted", [False, True])
def test_prefix_that_was_freed_fails_whoever_hits_it(page_size: int, reinserted: bool) -> None:
    """sglang#38319: a retraction frees pages that the prefix cache has. They go to another request,
    which caches them as well; the cache's older node must not seem right again by that."""
    server = Server(page_size, 1200 // page_size + 16)
    stem = [(5 * i) % VOCABULARY for i in range(4 * page_size + 40)]
    server.submit("first", [*stem, 1], 4)
    server.run()
    node = server.cache.match_prefix(
        MatchPrefixParams(key=RadixKey(array("q", stem)))
    ).last_device_node
    server.allocator.free(server.cache.path_device_indices(node))
    if reinserted:
        # The allocator gives back first what was freed last, at page 1 what was freed first.
        while page_size == 1 and int(server.allocator.free_pages[0]) != 1:
            server.allocator.alloc(1)
        server.submit("thief", [9] * (4 * page_size + 40), 4)
        server.run()
        assert aborted(server) == set()
    server.submit("hit", [*stem, 2], 8)
    server.submit("other", [3] * 20, 8)
    server.run()
    assert server.ended["hit"].cached_tokens >= page_size
    assert aborted(server) == {"hit"}
    assert server.streamed["hit"] == []
    assert server.streamed["other"] == answers([3] * 20, 8)
    assert violations(server)["tag"] == 1


@pytest.mark.parametrize("page_size", [1, 64])
def test_double_free_that_sglang_accepts(page_size: int) -> None:
    """LMCache#5005, and SGLang 0.5.23: what is freed twice is handed out twice."""
    bare = Server(page_size, 40, mode=None)
    slots = bare.allocator.alloc(page_size)
    for _ in range(2):
        bare.allocator.free(slots)
    handed = [bare.allocator.alloc(page_size) for _ in range(41)]
    assert sum(torch.equal(slots, other) for other in handed) == 2

    server = Server(page_size, 40)
    total = server.allocator.available_size()
    slots = server.allocator.alloc(page_size)
    for _ in range(2):
        server.allocator.free(slots)
    server.submit("a", [5] * (page_size + 3), 3)
    server.run()
    metrics = server.guard.tracker.metrics()
    assert metrics["violations_release"] == metrics["quarantined_pages"] == 1
    handed = [server.allocator.alloc(page_size) for _ in range(40)]
    assert not any(other is not None and torch.equal(slots, other) for other in handed)
    assert right(server) == {"a"}
    assert total == 40 * page_size
    server.cache.reset()
    server.table.clear()
    server.allocator.clear()
    assert server.allocator.available_size() == 39 * page_size
    server.submit("b", [5] * (page_size + 3), 3)
    server.run()
    assert right(server) == {"a", "b"}


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("grouped", [False, True])
def test_slots_that_are_freed_twice_at_once(page_size: int, grouped: bool) -> None:
    """sglang#38941: the engine drops what is in one group twice before anything can see it."""
    server = Server(page_size, 40)
    slots = server.allocator.alloc(2 * page_size)
    if grouped:
        server.allocator.free_group_begin()
        server.allocator.free(slots)
        server.allocator.free(slots[:1])
        server.allocator.free_group_end()
    else:
        server.allocator.free(torch.cat([slots, slots[:1]]))
    server.submit("first", [5] * 9, 3)
    server.run()
    server.submit("next", [6] * 9, 3)
    server.run()
    # Who gets the page in the very step in which it is found bad is aborted; nobody is later.
    assert aborted(server) <= {"first"}
    assert right(server) == {"first", "next"}
    assert violations(server)["release"] == 1
    assert server.guard.tracker.metrics()["quarantined_pages"] == 1


def test_pages_freed_in_parts_are_in_order() -> None:
    server = Server(64, 40, mode="raise")
    slots = server.allocator.alloc(64)
    server.allocator.free_group_begin()
    server.allocator.free(slots[:10])
    server.allocator.free(slots[10:])
    server.allocator.free_group_end()
    server.submit("a", [5] * 9, 3)
    server.run()
    assert violations(server) == {}


@pytest.mark.parametrize("page_size", [1, 64])
def test_overrun_slot_that_is_freed_once_more(page_size: int) -> None:
    """sglang-omni#1607: the place of a token that never came is freed twice, and has two owners
    before the allocator's fault is known."""
    server = started(page_size)
    free = server.allocator.free_pages
    overrun = (free[:1] if page_size == 64 else free[-1:]) * page_size
    server.allocator.free(overrun)
    if page_size == 1:  # what is freed goes to the end of the list there
        server.allocator.free_pages = server.allocator.free_pages.flip(0)
    for i in range(4, 8):
        server.submit(str(i), [200 + i] * (page_size + 9 * i), 2 * page_size + 9)
    server.run()
    assert right(server) == set(server.ended)
    assert violations(server)["release"] == 1
    assert aborted(server) == {"4"}
    server.submit("next", [6] * (3 * page_size), 3)
    server.run()
    assert "next" in right(server) - aborted(server)


@pytest.mark.parametrize("page_size", [1, 64])
def test_write_to_anothers_place_is_turned_away(page_size: int) -> None:
    """sglang#24743: a stale place to write. The other's KV stays as it is."""
    server = started(page_size)
    before_model = server.before_model

    def stale(batch: ScheduleBatch) -> None:
        names = [req.rid for req in batch.reqs]
        if batch.forward_mode.is_decode() and {"1", "2"} <= set(names):
            place = own_slots(server, request(server, "2"))[0]
            batch.out_cache_loc[names.index("1")] = place
            server.before_model = before_model

    server.before_model = stale
    server.run()
    assert aborted(server) == {"1"}
    assert right(server) == set(server.ended) == {"0", "1", "2", "3"}
    assert violations(server) == {"write": 1}


@pytest.mark.parametrize("page_size", [1, 64])
def test_nothing_of_a_bad_prompt_is_cached(page_size: int) -> None:
    """sglang#28374. The first of five chunks reads what is not its own; the others are launched
    before its verdict comes."""
    server = started(page_size, count=2)
    prompt = [(500 + 11 * i) % VOCABULARY for i in range(300)]

    def wrong(batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_extend() and batch.reqs[0].rid == "bad":
            row = batch.reqs[0].kv.req_pool_idx
            server.table.req_to_token[row, 0] = own_slots(server, request(server, "0"))[0]
            server.before_model = lambda batch: None

    server.before_model = wrong
    server.submit("bad", prompt, 4)
    server.run()
    server.submit("again", prompt, 4)
    server.run()
    assert aborted(server) == {"bad"}
    assert server.streamed["bad"] == []
    assert server.ended["again"].cached_tokens == 0
    assert right(server) == {"0", "1", "bad", "again"}
    assert (
        server.allocator.available_size() + server.cache.evictable_size() == server.allocator.size
    )


def rank(rank: int, folder: Path, results: Any) -> None:
    """One of two ranks of tensor parallelism. The second has a page table that is wrong."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    server = started(64, groups=[torch.distributed.group.WORLD])
    if rank == 1:
        change_table(server)
    server.run()
    free = server.allocator.available_size() + server.cache.evictable_size()
    results.put((rank, aborted(server), server.streamed, right(server), server.steps, free))
    torch.distributed.destroy_process_group()


def test_ranks_end_the_same_requests(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(i, tmp_path, results)) for i in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
        assert process.exitcode == 0, "a rank that waits for the other"
    first, second = sorted(results.get() for _ in ranks)
    assert first[1:] == second[1:]
    _, bad, _, sound, _, free = first
    assert bad == {"1"}
    assert sound == {"0", "1", "2", "3"}
    assert free == 2400 // 64 * 64 + 16 * 64


def test_ranks_that_run_the_same_scheduler() -> None:
    alone, several = SimpleNamespace(world_size=1), SimpleNamespace(world_size=4, device_group="g")
    assert plugin.replicas(scheduler()) == []
    assert plugin.replicas(scheduler(attn_tp_group=several, attn_cp_group=alone)) == ["g"]


def test_bad_request_is_logged_and_goes_on_in_mode_log() -> None:
    server = started(64, mode="log")
    change_table(server)
    server.run()
    assert aborted(server) == set()
    assert right(server) == {"0", "2", "3"}
    assert violations(server) == {"table": 1}


def test_mode_log_counts_a_double_free_and_changes_nothing() -> None:
    server = Server(64, 40, mode="log")
    slots = server.allocator.alloc(128)
    server.allocator.free(torch.cat([slots, slots[:1]]))
    server.submit("a", [5] * 9, 3)
    server.run()
    assert violations(server) == {"release": 1}
    assert server.guard.tracker.metrics()["quarantined_pages"] == 0
    assert len(server.allocator.free_pages) == 40
    assert right(server) == {"a"}


def test_mode_raise_stops_the_server() -> None:
    server = started(64, mode="raise")
    change_table(server)
    with pytest.raises(IntegrityError, match="1 requests are affected"):
        server.run()


def test_batch_without_a_check_is_an_error() -> None:
    server = started(1)
    _, result = server.results[0]
    del result.halfbyte_report
    with pytest.raises(IntegrityError, match="a batch ran that was not checked"):
        server.run()


@pytest.mark.parametrize("pool", [MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool])
def test_known_pools_are_tracked(pool: type) -> None:
    table = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
    kvcache = pool.__new__(pool)
    allocator = PagedTokenToKVPoolAllocator(2600, 64, torch.bfloat16, "cpu", kvcache, False)
    guard = plugin.attach("abort", allocator, table)
    assert (guard.page_size, len(guard.tracker.state.tags)) == (64, 41)


def test_what_is_not_known_is_refused() -> None:
    class Other(PagedTokenToKVPoolAllocator):
        """An allocator that may move pages in its own way."""

    server = Server(64, 40, mode=None)
    server.allocator._kvcache = MLATokenToKVPoolFP4.__new__(MLATokenToKVPoolFP4)
    with pytest.raises(IntegrityError, match="does not know MLATokenToKVPoolFP4"):
        plugin.attach("abort", server.allocator, server.table)
    pool = MLATokenToKVPool.__new__(MLATokenToKVPool)
    other = Other(640, 64, torch.bfloat16, "cpu", pool, False)
    with pytest.raises(IntegrityError, match="does not know Other"):
        plugin.attach("abort", other, server.table)
    server.allocator._kvcache = pool
    server.allocator.alloc(64)
    with pytest.raises(IntegrityError, match=r"64 of 2560 tokens .* in use already"):
        plugin.attach("abort", server.allocator, server.table)


def scheduler(**changes: Any) -> Any:
    """What of a scheduler decides whether it is covered."""
    server = Server(64, 40, mode=None)
    plain = {
        "token_to_kv_pool_allocator": server.allocator,
        "req_to_token_pool": server.table,
        "tree_cache": server.cache,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "disaggregation_mode": DisaggregationMode.NULL,
        "dllm_config": None,
        "enable_pdmux": False,
        "is_generation": True,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "page_size": 64,
        "attn_tp_group": SimpleNamespace(world_size=1),
        "attn_cp_group": SimpleNamespace(world_size=1),
    }
    return SimpleNamespace(**(plain | changes))


def test_scheduler_has_what_is_asked_of_it() -> None:
    """The stand-in has no attribute that SGLang's own does not set."""
    source = inspect.getsource(Scheduler)
    missing = [n for n in vars(scheduler()) if not re.search(rf"self\.{n}(: [^=]+)? = ", source)]
    assert missing == []


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        (
            {"spec_algorithm": SpeculativeAlgorithm.EAGLE},
            ["speculative decoding (SpeculativeAlgorithm.EAGLE)"],
        ),
        ({"disaggregation_mode": DisaggregationMode.DECODE}, ["disaggregation (decode)"]),
        ({"page_size": 32}, ["decode context parallelism"]),
        ({"tree_cache": object()}, ["the prefix cache object"]),
        (
            {"is_hybrid_swa": True, "is_generation": False},
            ["models that do not generate", "sliding-window or Mamba layers"],
        ),
    ],
)
def test_configurations_that_move_pages_otherwise_are_refused(
    changes: dict[str, Any], reasons: list[str]
) -> None:
    assert plugin.unsupported(scheduler(**changes)) == reasons


def test_start_says_what_is_tracked_or_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HALFBYTE_KV_INTEGRITY", "abort")
    caplog.set_level("INFO")
    good, bad = scheduler(), scheduler(enable_pdmux=True)
    plugin._starting(lambda scheduler: None, good)
    assert "mode=abort engine=sglang 0.5.23 pool=MLATokenToKVPool pages=40" in caplog.text
    assert good.token_to_kv_pool_allocator in plugin._guards
    with pytest.raises(SystemExit, match="does not cover prefill and decode on parts of one GPU"):
        plugin._starting(lambda scheduler: None, bad)
    monkeypatch.setenv("HALFBYTE_KV_INTEGRITY", "log")
    plugin._starting(lambda scheduler: None, bad)
    assert "KV-cache integrity is not on" in caplog.text
    assert bad.token_to_kv_pool_allocator not in plugin._guards


INSTALLATION = """
import logging, os, pkgutil, sys
import torch
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from halfbyte.kvcache.plugins import hooks, sglang as plugin
from sglang.srt import plugins
targets = [hook.target for hook in plugin.HOOKS]
before = [pkgutil.resolve_name(target) for target in targets]
plugins.load_plugins()
print("off", all(a is pkgutil.resolve_name(b) for a, b in zip(before, targets, strict=True)))
os.environ["HALFBYTE_KV_INTEGRITY"] = "abort"
plugins._plugins_loaded = False
plugins.load_plugins()
print("abort", all(hooks.is_installed(hook) for hook in plugin.HOOKS))
from sglang.srt.managers import schedule_batch
print("imported before", schedule_batch.alloc_for_decode is pkgutil.resolve_name(
    "sglang.srt.mem_cache.allocation.alloc_for_decode"))
del pkgutil.resolve_name("sglang.srt.mem_cache.memory_pool.ReqToTokenPool").free_rows
plugins._plugins_loaded = False
plugins.load_plugins()
print("goes on")
"""


def test_sglang_finds_the_plugin_and_nothing_is_replaced_in_mode_off() -> None:
    """SGLang's own loading by entry point. The process ends when the engine has changed."""
    result = subprocess.run([sys.executable, "-c", INSTALLATION], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["off True", "abort True", "imported before True"]
    assert result.returncode == 1
    assert "KV-cache integrity is not on: sglang 0.5.23 has no" in result.stderr
    assert "ReqToTokenPool.free_rows" in result.stderr
