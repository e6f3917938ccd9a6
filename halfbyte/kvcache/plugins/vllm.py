"""KV-cache integrity in vLLM 0.33.0, by hooks on its block pool and its scheduler.

vLLM keeps its books on the host, so the tracker's tensors lie there, and a page is a block. A block
counts as in use as long as a request or the prefix cache has it: one in the free queue that has a
hash becomes free when it loses that. The page table that a step is checked against is what the
scheduler tells the workers to have, added up from its outputs.

Each step is checked when it is scheduled. When its result comes, a bad request is ended with
FINISHED_ERROR, without this step's token.

Not covered, and refused when the server starts: `unsupported`. What a worker makes of the block
table that it is told is not seen from here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.state import Layout
from halfbyte.kvcache.integrity.tracker import Mode, Violation, open_tracker
from halfbyte.kvcache.plugins.hooks import (
    Hook,
    PrefixTags,
    check_installed,
    check_targets,
    is_installed,
    put_in_place,
    read_mode,
    stops_the_server,
)

logger = logging.getLogger(__name__)

SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Layers whose blocks one request owns or the prefix cache holds."""


class Guard:
    """The tracker of one block pool, and what the hooks know besides."""

    def __init__(self, mode: Mode, pool: Any, requests: int, blocks_per_request: int) -> None:
        # Row 0 is for nobody.
        layout = Layout(
            pages=pool.num_gpu_blocks,
            page_size=1,
            rows=requests + 1,
            pages_per_row=blocks_per_request,
            table_holds_slots=False,
        )
        self.mode = mode
        self._pool = pool
        self.tracker = open_tracker(mode, layout, "cpu")
        self.prefix = PrefixTags(layout.pages, "cpu")
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(1, layout.rows))
        self._given = [0] * layout.rows
        """How many blocks each row was given."""
        self._table = torch.zeros(layout.rows, blocks_per_request, dtype=torch.int32)
        self._told = [0] * layout.rows
        """How many blocks of each row the workers know."""
        self.cached: list[list[int]] = [[] for _ in range(layout.rows)]
        """The blocks that each row's request has put into the prefix cache."""
        self._steps: deque[tuple[Any, torch.Tensor, list[str], list[int]]] = deque()
        self.uncached: list[int] | None = None
        """Blocks that have lost their hash and are in no request, while these are collected."""
        self.freeable: set[int] | None = None
        """The blocks that the request which is being ended may give back; None for all."""
        self._quarantined = 0

    def row(self, request_id: str) -> int | None:
        return self._rows.get(request_id)

    def bind(self, request_id: str) -> int:
        if not self._free_rows:
            raise IntegrityError(
                f"more than {len(self._given) - 1} requests have KV blocks at once",
                hint="HALFBYTE_KV_INTEGRITY=off runs the server without KV-cache integrity",
            )
        row = self._rows[request_id] = self._free_rows.pop()
        self._given[row] = self._told[row] = 0
        self.cached[row] = []
        self.tracker.bind(torch.tensor([row]))
        return row

    def unbind(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.tracker.unbind(torch.tensor([row]))
            self._free_rows.append(row)

    def hit(self, row: int, blocks: Sequence[Any], hashes: Sequence[Any]) -> None:
        """A new request begins with `blocks` that the prefix cache found by `hashes`."""
        pages = _ids(blocks)
        # A block that is cached for something else by now has no tag for this.
        same = [block.block_hash == key for block, key in zip(blocks, hashes, strict=True)]
        tags = torch.where(torch.tensor(same), self.prefix.of(pages), 0)
        self.tracker.expect_prefix(torch.tensor([row]), pages, tags)
        self._given[row] = len(pages)

    def extend(self, row: int, blocks: Sequence[Any]) -> None:
        """A request has `blocks` now; those that it was not given before are new."""
        if new := blocks[self._given[row] :]:
            lengths = torch.tensor([len(blocks)])
            self.tracker.extend(torch.tensor([row]), lengths, _ids(new))
            self._given[row] = len(blocks)

    def release(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.tracker.release(torch.tensor(block_ids))
            self._purge()

    def withhold(self, block: Any) -> None:
        """Takes a block that was freed twice out of the free queue and the prefix cache."""
        if self.mode != "log":
            if block.next_free_block is not None:
                self._pool.free_block_queue.remove(block)
            self._pool.evict_blocks({block.block_id})

    def check(self, output: Any) -> None:
        """A step is scheduled."""
        for request in output.scheduled_new_reqs:
            self._tell(request.req_id, request.block_ids[0], anew=True)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._tell(request_id, block_ids[0], anew=request_id in cached.resumed_req_ids)
        ids = list(output.num_scheduled_tokens)
        if not ids:
            return
        rows = [self._rows[request_id] for request_id in ids]
        lengths = [self._told[row] for row in rows]
        at = torch.tensor(rows)
        generations = self.tracker.generations(at)
        table = self._table[:, : max(lengths)]
        self.tracker.check(at, torch.tensor(lengths), table, None, generations)
        self._steps.append((output, self.tracker.report(at, generations), ids, rows))

    def _tell(self, request_id: str, block_ids: Sequence[int], *, anew: bool) -> None:
        row = self._rows[request_id]
        start = 0 if anew else self._told[row]
        self._told[row] = start + len(block_ids)
        self._table[row, start : self._told[row]] = torch.tensor(block_ids, dtype=torch.int32)

    def settle(self, output: Any) -> Sequence[tuple[str, Violation]]:
        """The requests that are to be ended when the result of `output` comes."""
        if not output.num_scheduled_tokens:
            return ()
        if not self._steps or self._steps[0][0] is not output:
            text = "a step ran that was not checked"
            if self.mode != "log":
                hint = "HALFBYTE_KV_INTEGRITY=off runs the server without checks"
                raise IntegrityError(text, hint=hint)
            logger.error("kv-integrity unchecked: %s", text)
            return ()
        _, report, ids, rows = self._steps.popleft()
        # Since then a request may have ended, or lost its blocks and got others.
        current = [
            row if self._rows.get(request_id) == row else None
            for request_id, row in zip(ids, rows, strict=True)
        ]
        violations = self.tracker.settle(report, current)
        self._quarantined = self.tracker.metrics()["quarantined_pages"]
        self._purge()
        return [(ids[v.position], v) for v in violations if self.mode == "abort"]

    def _purge(self) -> None:
        """Takes blocks in quarantine out of the free queue."""
        if not self._quarantined or self.mode == "log":
            return
        queue = self._pool.free_block_queue
        free = queue.get_all_free_blocks()
        usable = set(self.tracker.usable(_ids(free)).tolist())
        for block in free:
            if block.block_id not in usable:
                queue.remove(block)


def _ids(blocks: Iterable[Any]) -> torch.Tensor:
    return torch.tensor([block.block_id for block in blocks], dtype=torch.int32)


_guards: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()
"""By block pool."""


def attach(mode: Mode, pool: Any, *, requests: int, blocks_per_request: int) -> Guard:
    """Tracks the blocks of `pool` from now on; nothing may be in use.

    `requests` have blocks at once, at most, and `blocks_per_request` each. Raises IntegrityError
    for a pool that is not known, and if blocks are in use.
    """
    if type(pool).__name__ != "BlockPool":
        raise IntegrityError(
            f"KV-cache integrity does not know {type(pool).__name__}, but BlockPool",
            hint="HALFBYTE_KV_INTEGRITY=off runs the server without it",
        )
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if used:
        raise IntegrityError(f"{used} of {pool.num_gpu_blocks} KV blocks are in use already")
    _guards[pool] = guard = Guard(mode, pool, requests, blocks_per_request)
    return guard


def _acquiring(original: Callable[..., Any], pool: Any, num_blocks: int) -> Any:
    guard = _guards.get(pool)
    if guard is None:
        return original(pool, num_blocks)
    blocks = _releasing_uncached(guard, lambda: original(pool, num_blocks))
    if blocks:
        guard.tracker.acquire(_ids(blocks))
    return blocks


def _evicting(original: Callable[..., Any], pool: Any, block_ids: set[int]) -> None:
    if guard := _guards.get(pool):
        _releasing_uncached(guard, lambda: original(pool, block_ids))
    else:
        original(pool, block_ids)


def _releasing_uncached(guard: Guard, call: Callable[[], Any]) -> Any:
    guard.uncached = []
    try:
        result = call()
        guard.release(guard.uncached)
    finally:
        guard.uncached = None
    return result


def _uncaching(original: Callable[..., Any], pool: Any, block: Any) -> Any:
    guard, cached = _guards.get(pool), block.block_hash is not None
    removed = original(pool, block)
    if guard is not None and cached:
        guard.prefix.drop(torch.tensor([block.block_id]))
        if block.ref_cnt == 0:
            if guard.uncached is None:
                guard.release([block.block_id])
            else:
                guard.uncached.append(block.block_id)
    return removed


def _freeing(original: Callable[..., Any], pool: Any, ordered_blocks: Iterable[Any]) -> None:
    guard = _guards.get(pool)
    if guard is None:
        original(pool, ordered_blocks)
        return
    blocks = [block for block in ordered_blocks if not block.is_null]
    if guard.freeable is not None:
        blocks = [block for block in blocks if block.block_id in guard.freeable]
    original(pool, blocks)
    # A count below 0 is a block that was free before. vLLM would stop when it hands that out.
    for block in (block for block in blocks if block.ref_cnt < 0):
        guard.withhold(block)
    guard.release(
        [
            block.block_id
            for block in blocks
            if block.ref_cnt < 0
            or (block.ref_cnt == 0 and not (pool.enable_caching and block.block_hash))
        ]
    )


def _resetting(original: Callable[..., Any], pool: Any) -> bool:
    guard = _guards.get(pool)
    cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
    done: bool = original(pool)
    if guard is not None and done:
        guard.prefix.clear()
        guard.release(cached)
    return done


def _caching(
    original: Callable[..., Any],
    pool: Any,
    request: Any,
    blocks: list[Any],
    num_cached_blocks: int,
    num_full_blocks: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
    guard = _guards.get(pool)
    row = None if guard is None else guard.row(request.request_id)
    if guard is not None and row is not None and num_cached_blocks < num_full_blocks:
        guard.extend(row, blocks)
        tags = guard.tracker.share(row, num_cached_blocks, num_full_blocks)
        pages = _ids(blocks[num_cached_blocks:num_full_blocks])
        guard.prefix.put(pages, tags)
        guard.cached[row] += pages.tolist()


def _allocating(
    original: Callable[..., Any],
    manager: Any,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    guard = _guards.get(manager.block_pool)
    arguments = (request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, *args)
    if guard is None:
        return original(manager, *arguments, **kwargs)
    row, is_new = guard.row(request.request_id), False
    if row is None:
        row, is_new = guard.bind(request.request_id), True
        if new_computed_blocks is not None and new_computed_blocks.blocks[0]:
            found = new_computed_blocks.blocks[0]
            guard.hit(row, found, _hashes(manager, request, len(found)))
    result = original(manager, *arguments, **kwargs)
    if result is not None:
        guard.extend(row, manager.coordinator.get_blocks(request.request_id)[0])
    elif is_new:
        guard.unbind(request.request_id)
    return result


def _hashes(manager: Any, request: Any, count: int) -> list[Any]:
    """Under which the first blocks of a request are cached."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

    size = manager.coordinator.single_type_managers[0].block_size
    hashes = resolve_block_hashes(request.block_hashes, manager.block_pool.hash_block_size, size)
    return [make_block_hash_with_group_id(hashes[i], 0) for i in range(count)]


def _ending(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    result = original(manager, request)
    if guard := _guards.get(manager.block_pool):
        guard.unbind(request.request_id)
    return result


def _scheduling(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(scheduler, *args, **kwargs)
    if guard := _guards.get(scheduler.kv_cache_manager.block_pool):
        guard.check(output)
    return output


def _updating(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    guard = _guards.get(scheduler.kv_cache_manager.block_pool)
    ended: list[Any] = []
    if guard is not None:
        for request_id, violation in guard.settle(scheduler_output):
            ended += _abort(scheduler, guard, request_id, violation)
    outputs = original(scheduler, scheduler_output, model_runner_output)
    if ended:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        for request in ended:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                )
            )
    return outputs


def _abort(scheduler: Any, guard: Guard, request_id: str, violation: Violation) -> Sequence[Any]:
    """Ends a request before its result is looked at, as vLLM ends those whose KV did not load.

    vLLM caches blocks when it schedules them. What the request has cached is not found any more.
    """
    from vllm.v1.request import RequestStatus

    row = guard.row(request_id)
    if row is not None:
        scheduler.kv_cache_manager.evict_blocks(set(guard.cached[row]))
    guard.freeable = set(guard.tracker.abort(violation).sound_pages.tolist())
    try:
        ended: Sequence[Any] = scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
    finally:
        guard.freeable = None
    return ended


def _starting(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    mode = read_mode()
    with stops_the_server(mode):
        check_installed(HOOKS, _engine())
        if reasons := unsupported(scheduler):
            raise IntegrityError(
                f"KV-cache integrity does not cover {', '.join(reasons)}",
                hint="leave these out, or set HALFBYTE_KV_INTEGRITY=off",
            )
        pool = scheduler.kv_cache_manager.block_pool
        tokens = scheduler.max_model_len + scheduler.num_lookahead_tokens
        requests = 2 * scheduler.max_num_running_reqs
        per_request = min(pool.num_gpu_blocks, -(-tokens // scheduler.block_size) + 1)
        attach(mode, pool, requests=requests, blocks_per_request=per_request)
        logger.info(
            "kv-integrity mode=%s engine=%s blocks=%d block_size=%d requests=%d hooks=%d",
            mode, _engine(), pool.num_gpu_blocks - 1, scheduler.block_size, requests, len(HOOKS),
        )  # fmt: skip


def unsupported(scheduler: Any) -> list[str]:
    """What of a scheduler's configuration moves blocks in ways that no hook sees."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    specs = [type(group.kv_cache_spec).__name__ for group in groups]
    found = {
        "KV connectors": scheduler.connector is not None,
        f"{len(groups)} groups of KV blocks": len(groups) != 1,
        f"layers of kind {', '.join(specs)}": any(spec not in SPECS for spec in specs),
        "encoder-decoder models": scheduler.is_encoder_decoder,
        "context parallelism": scheduler.dcp_world_size * scheduler.pcp_world_size > 1,
    }
    return [name for name, present in found.items() if present]


_CORE = "vllm.v1.core"
_POOL = f"{_CORE}.block_pool.BlockPool"
_MANAGER = f"{_CORE}.kv_cache_manager.KVCacheManager"
_SCHEDULER = f"{_CORE}.sched.scheduler.Scheduler"

HOOKS = (
    Hook(f"{_POOL}.get_new_blocks", "self num_blocks", _acquiring),
    Hook(f"{_POOL}.evict_blocks", "self block_ids", _evicting),
    Hook(f"{_POOL}._remove_cached_block_hashes", "self block", _uncaching),
    Hook(f"{_POOL}.free_blocks", "self ordered_blocks", _freeing),
    Hook(f"{_POOL}.reset_prefix_cache", "self", _resetting),
    Hook(
        f"{_POOL}.cache_full_blocks",
        "self request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id "
        "block_mask",
        _caching,
    ),
    Hook(
        f"{_MANAGER}.allocate_slots",
        "self request num_new_tokens num_new_computed_tokens new_computed_blocks "
        "num_lookahead_tokens num_external_computed_tokens delay_cache_blocks num_encoder_tokens "
        "full_sequence_must_fit reserved_blocks has_scheduled_reqs skip_zeroing_group_ids",
        _allocating,
    ),
    Hook(f"{_MANAGER}.free", "self request", _ending),
    Hook(f"{_MANAGER}.pop_blocks_for_free", "self request", _ending),
    Hook(f"{_SCHEDULER}.schedule", "self throttle_prefills", _scheduling),
    Hook(
        f"{_SCHEDULER}.update_from_output", "self scheduler_output model_runner_output", _updating
    ),
    Hook(
        f"{_SCHEDULER}.__init__",
        "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
        "mm_registry include_finished_set log_stats",
        _starting,
    ),
)


def _engine() -> str:
    return f"vllm {metadata.version('vllm')}"


def install() -> None:
    """vLLM calls this in each of its processes. Does nothing if HALFBYTE_KV_INTEGRITY is off. In
    modes abort and raise the process ends if the hooks do not fit."""
    mode = read_mode()
    if mode == "off":
        return
    with stops_the_server(mode):
        check_targets(HOOKS, _engine())
        for hook in HOOKS:
            if not is_installed(hook):
                put_in_place(hook)
