"""KV-cache integrity in SGLang 0.5.23, through its plugin system and its registry of hooks.

What the hooks report is what `integrity.tracker` wants to know; nothing else is kept here but the
tags of what the prefix cache holds, and for each request which generation of its row is its own.

All bookkeeping runs on the scheduler's stream. The check runs on the stream of the model, before
it; SGLang lets no later write to the page table overtake that (its write-after-read barrier). The
verdict goes to the host in the same copy as the sampled tokens. A bad request ends as SGLang ends
those whose KV could not be loaded: with status 500, without this step's token, and its KV does not
enter the prefix cache; what a chunk of a prompt leaves does so only when the last chunk's verdict
has come.

Ranks of tensor parallelism run the same scheduler, each on its own page table. Their verdicts are
reduced to the worst, so all of them end the same requests.

Not covered, and refused when the server starts: `unsupported`. Rows of beam searches are left out
of the check.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.findings import COUNTERS
from halfbyte.kvcache.integrity.state import Layout
from halfbyte.kvcache.integrity.tracker import Mode, Violation, open_tracker
from halfbyte.kvcache.plugins.hooks import (
    Hook,
    PrefixTags,
    check_installed,
    check_targets,
    read_mode,
    require_covered,
    stops_the_server,
)

logger = logging.getLogger(__name__)

ALLOCATORS = ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator")
POOLS = ("DSATokenToKVPool", "MHATokenToKVPool", "MLATokenToKVPool")
"""Of one kind of page, which one request owns or a prefix cache holds."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is needed of a batch's requests, and costs a look at each."""

    reqs: Sequence[Any] = ()
    generations: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """[b]: of the rows that are the requests' own."""
    checked: torch.Tensor | None = None
    """int64 [b]: 0 for rows of beam searches; None where there are none."""


class _Rows(Sequence[int | None]):
    """The rows of requests, looked up when a verdict asks for one: most often none does."""

    def __init__(self, reqs: Sequence[Any]) -> None:
        self._reqs = reqs

    def __len__(self) -> int:
        return len(self._reqs)

    def __getitem__(self, position: Any) -> Any:
        req = self._reqs[position]
        return None if req.finished() or req.is_retracted else req.kv.req_pool_idx


class Guard:
    """The tracker of one pool, and what the hooks know besides."""

    def __init__(self, mode: Mode, allocator: Any, table: Any, groups: Sequence[Any]) -> None:
        self.page_size: int = allocator.page_size
        self._allocator, self._table, self._groups = allocator, table, groups
        rows, tokens = table.req_to_token.shape
        layout = Layout(
            pages=allocator.size // self.page_size + 1,
            page_size=self.page_size,
            rows=rows,
            pages_per_row=-(-tokens // self.page_size),
        )
        self.mode = mode
        self.device = table.req_to_token.device
        self.tracker = open_tracker(mode, layout, self.device)
        self.prefix = PrefixTags(layout.pages, self.device)
        self.quarantined_pages = self.lost_tokens = 0
        """What is in no free list: because it is bad, or because nobody knows whose it was."""
        self.inserting: int | None = None
        """The row whose pages the prefix cache is being given."""
        self.matched: int | None = None
        """How many of its tokens the cache had before."""
        self.freeable: torch.Tensor | None = None
        """The pages that the request which is being released may still give back; None for all."""
        self.keeps_row = False
        """Whether that request's row is another's by now."""
        self._batch = _Batch()

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Of `slots` that begin where a page does and leave none out."""
        return slots[:: self.page_size] // self.page_size

    def to_device(self, values: Sequence[int]) -> torch.Tensor:
        pinned = self.device.type == "cuda"
        host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
        return host.to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def insertion_of(self, row: int) -> Iterator[None]:
        self.inserting, self.matched = row, None
        try:
            yield
        finally:
            self.inserting = None

    def may_free(self, pages: torch.Tensor) -> torch.Tensor:
        """Those of `pages` that the request which is being released has."""
        if self.freeable is None:
            return pages
        pages = pages[torch.isin(pages, self.freeable)]
        self.freeable = self.freeable[~torch.isin(self.freeable, pages)]
        return pages

    def release(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns those that go to the free list."""
        self.tracker.release(pages)
        return self.tracker.usable(pages)

    def extend(
        self, batch: Any, rows: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        # What SGLang writes to a row that is another's by now must not become that one's.
        generations, count = self._of(batch).generations, len(batch.reqs)
        if len(rows) > count:  # of beam searches
            generations = torch.cat([generations, self.tracker.generations(rows[count:])])
        self.tracker.extend(rows, lengths, slots, counts, generations)

    def check(self, batch: Any) -> torch.Tensor:
        """The report on a batch that is about to run."""
        known, count = self._of(batch), len(batch.reqs)
        generations = known.generations
        rows, lengths = _first(batch.req_pool_indices, count), _first(batch.seq_lens, count)
        slots = _first(batch.out_cache_loc, count) if batch.forward_mode.is_decode() else None
        if known.checked is not None:
            rows = rows * known.checked
        self.tracker.check(rows, lengths, self._table.req_to_token, slots, generations)
        report = self.tracker.report(rows, generations)
        for group in self._groups:
            # The least verdict is the first bad page. Counters stay each rank's own.
            torch.distributed.all_reduce(
                report[COUNTERS:], op=torch.distributed.ReduceOp.MIN, group=group
            )
        return report

    def _of(self, batch: Any) -> _Batch:
        """Kept while the requests of one decode step are those of the next."""
        if batch.reqs != self._batch.reqs:
            beams = [req.beam_group is not None for req in batch.reqs]
            self._batch = _Batch(
                list(batch.reqs),
                torch.cat([req.halfbyte_generation for req in batch.reqs]),
                self.to_device([not beam for beam in beams]) if any(beams) else None,
            )
        return self._batch

    def start(self, req: Any, generation: torch.Tensor) -> None:
        """The request has a row, whose generation [1] is `generation`."""
        req.halfbyte_generation = generation
        self._batch = _Batch()

    def settle(self, reqs: Sequence[Any], report: torch.Tensor) -> Sequence[Violation]:
        """The violations whose requests are to be ended."""
        violations = self.tracker.settle(report, _Rows(reqs))
        quarantined = self.tracker.metrics()["quarantined_pages"]
        if quarantined != self.quarantined_pages and self.mode != "log":
            self._allocator.free_pages = self.tracker.usable(self._allocator.free_pages)
            self.quarantined_pages = quarantined
        return violations if self.mode == "abort" else ()

    def clear(self) -> None:
        """The allocator has all its pages again."""
        self.tracker.clear()
        self.prefix.clear()
        self.lost_tokens = 0
        self._allocator.free_pages = self.tracker.usable(self._allocator.free_pages)


def _first(values: torch.Tensor, count: int) -> torch.Tensor:
    return values if len(values) == count else values[:count]


_guards: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()
"""By allocator and by page table."""


def attach(mode: Mode, allocator: Any, table: Any, groups: Sequence[Any] = ()) -> Guard:
    """Tracks the pages of `allocator` and the rows of `table` from now on; nothing may be in use.
    `groups` are torch's process groups of those ranks that run the same scheduler.

    Raises IntegrityError for an allocator or a pool that is not known, and if pages are in use.
    """
    pool = allocator.get_kvcache()
    for found, known in ((allocator, ALLOCATORS), (pool, POOLS)):
        if type(found).__name__ not in known:
            raise IntegrityError(
                f"KV-cache integrity does not know {type(found).__name__}, but {', '.join(known)}",
                hint="HALFBYTE_KV_INTEGRITY=off runs the server without it",
            )
    total = allocator.size // allocator.page_size * allocator.page_size
    if used := total - allocator.available_size():
        raise IntegrityError(f"{used} of {total} tokens of the KV pool are in use already")
    guard = Guard(mode, allocator, table, groups)
    _guards[allocator] = _guards[table] = guard
    return guard


def _acquiring(original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
    guard = _guards.get(allocator)
    if guard is None:
        return original(allocator, *args, **kwargs)
    before = allocator.free_pages
    slots = original(allocator, *args, **kwargs)
    # The list is not sorted meanwhile (`unsupported`), so what went is what was in front.
    if taken := len(before) - len(allocator.free_pages):
        guard.tracker.acquire(before[:taken])
    return slots


def _freeing_tokens(original: Callable[..., Any], allocator: Any, free_index: torch.Tensor) -> Any:
    guard = _guards.get(allocator)
    if guard is None or not free_index.numel():
        return original(allocator, free_index)
    free_index = guard.may_free(free_index)
    if allocator.free_group is None:
        free_index = guard.release(free_index)
    return original(allocator, free_index)


def _freeing_slots(original: Callable[..., Any], allocator: Any, free_index: torch.Tensor) -> Any:
    guard = _guards.get(allocator)
    if guard is not None and allocator.free_group is None:
        # The engine drops what is there twice before it releases the pages. Slots tell what pages
        # do not: many slots of one page are freed at once, one slot is not.
        slots = free_index.sort().values
        twice = torch.where(slots[1:] == slots[:-1], slots[1:] // guard.page_size, 0)
        guard.tracker.release(twice.unique())
    return original(allocator, free_index)


def _freeing_pages(original: Callable[..., Any], allocator: Any, page_ids: torch.Tensor) -> Any:
    guard = _guards.get(allocator)
    return original(allocator, page_ids if guard is None else guard.may_free(page_ids))


def _releasing(original: Callable[..., Any], allocator: Any, *page_ids: torch.Tensor) -> Any:
    guard = _guards.get(allocator)
    if guard is None:
        return original(allocator, *page_ids)
    return original(allocator, guard.release(torch.cat(page_ids)))


def _clearing(original: Callable[..., Any], allocator: Any) -> None:
    original(allocator)
    if guard := _guards.get(allocator):
        guard.clear()


def _binding(original: Callable[..., Any], table: Any, need_size: int) -> Any:
    rows = original(table, need_size)
    guard = _guards.get(table)
    if guard is not None and rows:
        guard.tracker.bind(guard.to_device(rows))
    return rows


def _unbinding(original: Callable[..., Any], table: Any, indices: list[int]) -> None:
    guard = _guards.get(table)
    if guard is not None and guard.keeps_row:
        return
    if guard is not None and indices:
        guard.tracker.unbind(guard.to_device(indices))
    original(table, indices)


def _guard_of(batch: Any) -> Guard | None:
    return _guards.get(batch.tree_cache.token_to_kv_pool_allocator)


def _extending(original: Callable[..., Any], batch: Any) -> Any:
    guard = _guard_of(batch)
    if guard is None:
        return original(batch)
    new = [i for i, req in enumerate(batch.reqs) if not req.kv.holds_kv]
    hits = [i for i in new if batch.reqs[i].prefix_len]
    prefixes = [guard.pages(batch.tree_cache.prefix_device_indices(batch.reqs[i])) for i in hits]
    slots, rows, rows_cpu = original(batch)
    generations = guard.tracker.generations(rows)
    for i in new:
        guard.start(batch.reqs[i], generations[i : i + 1])
    if hits:
        pages = torch.cat(prefixes)
        guard.tracker.expect_prefix(
            guard.to_device([int(rows_cpu[i]) for i in hits]),
            pages,
            guard.prefix.of(pages),
            guard.to_device([len(prefix) for prefix in prefixes]),
        )
    guard.extend(batch, rows, batch.seq_lens, slots, guard.to_device(batch.extend_lens))
    return slots, rows, rows_cpu


def _decoding(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
    slots = original(batch, token_per_req)
    if guard := _guard_of(batch):
        guard.extend(batch, batch.req_pool_indices, batch.seq_lens + token_per_req, slots)
    return slots


def _caching(original: Callable[..., Any], cache: Any, req: Any, **kwargs: Any) -> None:
    guard = _guards.get(cache.token_to_kv_pool_allocator)
    if guard is None or cache.disable:
        original(cache, req, **kwargs)
        return
    if req.inflight_middle_chunks and guard.mode != "log":
        # A chunk that has run, and whose verdict is still to come. The last one caches them all.
        return
    before = req.kv.cache_protected_len
    with guard.insertion_of(req.kv.req_pool_idx):
        original(cache, req, **kwargs)
    if (guard.matched or 0) > before and not req.finished():
        # The row has the cache's pages now where others had computed the same tokens before.
        pages = guard.pages(cache.path_device_indices(req.last_node)[: guard.matched])
        row = guard.to_device([req.kv.req_pool_idx])
        guard.tracker.expect_prefix(row, pages, guard.prefix.of(pages))


def _inserting(original: Callable[..., Any], cache: Any, params: Any) -> Any:
    result = original(cache, params)
    guard = _guards.get(cache.token_to_kv_pool_allocator)
    if guard is None or cache.disable:
        return result
    if guard.matched is None:
        # A second insert, which only splits a node, finds everything.
        guard.matched = result.prefix_len
    start, stop = result.prefix_len // guard.page_size, len(params.value) // guard.page_size
    if start < stop:
        pages = guard.pages(params.value)[start:stop]
        if guard.inserting is None:
            tags = guard.tracker.preload(pages)
        else:
            tags = guard.tracker.share(guard.inserting, start, stop)
        guard.prefix.put(pages, tags)
    return result


def _evicting(original: Callable[..., Any], cache: Any, device_frees: Any) -> None:
    if guard := _guards.get(cache.token_to_kv_pool_allocator):
        for slots in (slots for freed in device_frees.values() for slots in freed):
            guard.prefix.drop(guard.pages(slots))
    original(cache, device_frees)


def _running(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    guard = None if batch is None or not batch.reqs else _guard_of(batch)
    if guard is None:
        return original(worker, batch, *args, **kw)
    report = guard.check(batch)
    result = original(worker, batch, *args, **kw)
    result.halfbyte_report = report
    return result


def _copying(original: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> None:
    if (report := getattr(result, "halfbyte_report", None)) is not None:
        from sglang.srt.utils.common import async_d2h

        result.halfbyte_report = async_d2h(report)
    original(result, *args, **kwargs)


def _processing(original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> None:
    guard = _guards.get(processor.token_to_kv_pool_allocator)
    if guard is not None and batch.reqs:
        report = getattr(result, "halfbyte_report", None)
        if report is None:
            _report_unchecked(guard)
        else:
            if result.copy_done is not None:
                result.copy_done.synchronize()
            for violation in guard.settle(batch.reqs, report):
                _abort(batch, violation)
    original(processor, batch, result)


def _report_unchecked(guard: Guard) -> None:
    text = "a batch ran that was not checked"
    if guard.mode != "log":
        raise IntegrityError(text, hint="HALFBYTE_KV_INTEGRITY=off runs the server without checks")
    logger.error("kv-integrity unchecked: %s", text)


def _abort(batch: Any, violation: Violation) -> None:
    """Ends a request by what SGLang has for that: at a prefill a reason not to commit its output,
    at a decode step a reason to finish, with the length that it has without this step's token."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = batch.reqs[violation.position]
    if req.discard_output_reason is not None:
        return
    req.halfbyte_violation = violation
    req.skip_radix_cache_insert = True
    reason = FINISH_ABORT(
        f"KV-cache integrity: {violation}",
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "InternalServerError",
    )
    req.discard_output_reason = reason
    if batch.forward_mode.is_decode():
        req.to_finish = reason
        req.finished_len = len(req.output_ids)


def _ending(original: Callable[..., Any], req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    violation = getattr(req, "halfbyte_violation", None)
    if violation is None:
        original(req, tree_cache, checkpoint=checkpoint)
        return
    allocator = tree_cache.token_to_kv_pool_allocator
    guard = _guards[allocator]
    known = guard.tracker.abort(violation)
    guard.freeable, guard.keeps_row = known.own_pages, not known.own_row
    if guard.keeps_row:
        start, stop = req.kv.cache_protected_len, req.kv.kv_allocated_len
        guard.lost_tokens += -(-(stop - start) // guard.page_size) * guard.page_size
    try:
        original(req, tree_cache, checkpoint=False)
    finally:
        rest, guard.freeable, guard.keeps_row = guard.freeable, None, False
    # Its own pages that a wrong page table does not name.
    allocator.free_page_ids(rest.long())


def _accounting(original: Callable[..., Any], checker: Any, ps: Any, uncached: int = 0) -> Any:
    """What is withheld is no leak."""
    if guard := _guards.get(checker.token_to_kv_pool_allocator):
        uncached += guard.quarantined_pages * guard.page_size + guard.lost_tokens
    return original(checker, ps, uncached)


def _starting(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    mode = read_mode()
    with stops_the_server(mode):
        check_installed(HOOKS, _engine())
        require_covered(unsupported(scheduler))
        allocator, table = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        attach(mode, allocator, table, replicas(scheduler))
        logger.info(
            "kv-integrity mode=%s engine=%s pool=%s pages=%d page_size=%d requests=%d hooks=%d",
            mode, _engine(), type(allocator.get_kvcache()).__name__,
            allocator.size // allocator.page_size, allocator.page_size,
            table.req_to_token.shape[0] - 1, len(HOOKS),
        )  # fmt: skip


def replicas(scheduler: Any) -> Sequence[Any]:
    """The process groups of the ranks that run this scheduler too. Under data-parallel attention
    these are not all ranks of tensor parallelism."""
    groups = (scheduler.attn_tp_group, scheduler.attn_cp_group)
    return [group.device_group for group in groups if group.world_size > 1]


def unsupported(scheduler: Any) -> list[str]:
    """What of the server's configuration moves pages in ways that no hook sees."""
    from sglang.srt.runtime_context import get_parallel, get_serving

    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    table, speculation = type(scheduler.req_to_token_pool).__name__, scheduler.spec_algorithm
    found = {
        f"speculative decoding ({speculation})": not speculation.is_none(),
        f"disaggregation ({scheduler.disaggregation_mode.value})": (
            scheduler.disaggregation_mode.value != "null"
        ),
        "diffusion models": scheduler.dllm_config is not None,
        "models that do not generate": not scheduler.is_generation,
        "pipeline parallelism": get_parallel().pp_size > 1,
        "decode context parallelism": allocator.page_size != scheduler.page_size,
        "prefill and decode on parts of one GPU": scheduler.enable_pdmux,
        "sliding-window or Mamba layers": scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm,
        f"the page table {table}": table != "ReqToTokenPool",
        f"the prefix cache {type(cache).__name__}": type(cache).__name__ != "UnifiedRadixCache",
        "hierarchical caches": getattr(cache, "cache_controller", None) is not None,
        "external cache linkers": getattr(cache, "linker", None) is not None,
        "streaming sessions": get_serving().enable_streaming_session,
        "sorted free lists": allocator.need_sort,
    }
    return [name for name, present in found.items() if present]


_MEMORY, _MANAGERS = "sglang.srt.mem_cache", "sglang.srt.managers"
_PAGED = f"{_MEMORY}.allocator.paged.PagedTokenToKVPoolAllocator"
_TOKEN = f"{_MEMORY}.allocator.token.TokenToKVPoolAllocator"
_TABLE = f"{_MEMORY}.memory_pool.ReqToTokenPool"
_CACHE = f"{_MEMORY}.unified_radix_cache.UnifiedRadixCache"
_RESULT = f"{_MANAGERS}.utils.GenerationBatchResult"
_WORKER = f"{_MANAGERS}.tp_worker.TpModelWorker"
_PROCESSOR = (
    f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_CHECKER = f"{_MANAGERS}.scheduler_components.invariant_checker.SchedulerInvariantChecker"

HOOKS = (
    Hook(f"{_PAGED}.alloc", "self need_size", _acquiring),
    Hook(
        f"{_PAGED}.alloc_extend",
        "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens "
        "num_new_pages",
        _acquiring,
    ),
    Hook(f"{_PAGED}.alloc_decode", "self seq_lens seq_lens_cpu last_loc", _acquiring),
    Hook(f"{_PAGED}.free", "self free_index", _freeing_slots),
    Hook(f"{_PAGED}.free_page_ids", "self page_ids", _freeing_pages),
    Hook(f"{_PAGED}._release_page_ids", "self page_ids", _releasing),
    Hook(f"{_PAGED}.clear", "self", _clearing),
    Hook(f"{_TOKEN}.alloc", "self need_size", _acquiring),
    Hook(f"{_TOKEN}.free", "self free_index", _freeing_tokens),
    Hook(f"{_TOKEN}.clear", "self", _clearing),
    Hook(f"{_TABLE}.alloc_rows", "self need_size", _binding),
    Hook(f"{_TABLE}.free_rows", "self indices", _unbinding),
    Hook(f"{_MEMORY}.allocation.alloc_for_extend", "batch", _extending),
    Hook(f"{_MEMORY}.allocation.alloc_for_decode", "batch token_per_req", _decoding),
    Hook(f"{_CACHE}.checkpoint_into_tree", "self req up_to kwargs", _caching),
    Hook(f"{_CACHE}.insert", "self params", _inserting),
    Hook(f"{_CACHE}._drain_device_frees", "self device_frees", _evicting),
    Hook(f"{_MEMORY}.common.release_kv_cache", "req tree_cache checkpoint", _ending),
    Hook(
        f"{_WORKER}.forward_batch_generation",
        "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init "
        "capture_hidden_mode return_kv_loc_plan",
        _running,
    ),
    Hook(f"{_RESULT}.copy_to_cpu", "self return_logprob return_hidden_states", _copying),
    Hook(f"{_PROCESSOR}.process_batch_result_prefill", "self batch result", _processing),
    Hook(f"{_PROCESSOR}.process_batch_result_decode", "self batch result", _processing),
    Hook(f"{_CHECKER}._check_full_pool", "self ps uncached", _accounting),
    Hook(f"{_MANAGERS}.scheduler.Scheduler.__init__", "self server_args port_args", _starting),
)


def _engine() -> str:
    return f"sglang {metadata.version('sglang')}"


def install() -> None:
    """SGLang calls this in each of its processes. Does nothing if HALFBYTE_KV_INTEGRITY is off.

    SGLang goes on when a plugin fails. In modes abort and raise the process ends instead.
    """
    mode = read_mode()
    if mode == "off":
        return
    with stops_the_server(mode):
        check_targets(HOOKS, _engine())
        register()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)
