"""KV-cache integrity in vLLM 0.33.0, by hooks on its block pool and its scheduler.

vLLM keeps its books on the host, so the tracker is `HostTracker`, and a page is a block. A block
counts as in use as long as a request or the prefix cache has it: one in the free queue that has a
hash becomes free when it loses that. Of the page table, what the scheduler newly tells the workers
is held against what the manager gave the request. No hook runs for a request without news.

Each step is checked when it is scheduled. When its result comes, a bad request is ended with
FINISHED_ERROR, without this step's token.

Not covered, and refused when the server starts: `unsupported`. What a worker makes of the block
table that it is told is not seen from here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.host import HostTracker
from halfbyte.kvcache.integrity.state import QUARANTINED
from halfbyte.kvcache.integrity.tracker import Mode, Violation
from halfbyte.kvcache.plugins.hooks import (
    Hook,
    check_installed,
    check_targets,
    is_installed,
    put_in_place,
    read_mode,
    require_covered,
    stops_the_server,
)

logger = logging.getLogger(__name__)

SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Layers whose blocks one request owns or the prefix cache holds."""


@dataclass(slots=True)
class Held:
    """What a request has."""

    row: int
    """Of the tracker."""
    given: int
    """How many blocks."""
    cached: list[int] = field(default_factory=list)
    """The blocks that it has put into the prefix cache."""


class Guard:
    """The tracker of one block pool, and what the hooks know besides."""

    def __init__(self, mode: Mode, pool: Any, block_size: int) -> None:
        self.mode = mode
        self._pool, self._block_size = pool, block_size
        self.tracker = HostTracker(mode, pool.num_gpu_blocks)
        self.prefix = [0] * pool.num_gpu_blocks
        """The tag under which the prefix cache was given each block; 0 where it has none."""
        self.requests: dict[str, Held] = {}
        self._batch: tuple[list[str], list[int]] = [], []
        """The requests of the last step and their rows, unless one has come or gone since."""
        self._steps: deque[tuple[Any, Sequence[int], list[str], list[int]]] = deque()
        self.uncached: list[int] | None = None
        """Blocks that have lost their hash and are in no request, while these are collected."""
        self.freeable: set[int] | None = None
        """The blocks that the request which is being ended may give back; None for all."""

    def extend(self, request: Any, blocks: Sequence[Any], hits: int) -> Held:
        """A request has `blocks` now; those that it was not given before are new. If it is unknown,
        the prefix cache found the first `hits`."""
        held = self.requests.get(request.request_id)
        if held is None:
            held = self._bind(request, blocks[:hits])
        if held.given < len(blocks):
            self.tracker.extend(held.row, [block.block_id for block in blocks[held.given :]])
            held.given = len(blocks)
        return held

    def _bind(self, request: Any, found: Sequence[Any]) -> Held:
        held = Held(self.tracker.bind(), given=len(found))
        self.requests[request.request_id] = held
        self._batch = [], []
        if found:
            hashes = _hashes(self._pool, request, self._block_size, len(found))
            pages = [block.block_id for block in found]
            # A block that is cached for something else by now has no tag for this.
            tags = [
                self.prefix[block.block_id] if block.block_hash == key else 0
                for block, key in zip(found, hashes, strict=True)
            ]
            self.tracker.expect_prefix(held.row, pages, tags)
        return held

    def unbind(self, request_id: str) -> None:
        if held := self.requests.pop(request_id, None):
            self.tracker.unbind(held.row)
            self._batch = [], []

    def cache(self, request: Any, blocks: Sequence[Any], start: int, stop: int) -> None:
        """The blocks `start` to `stop` of a request have gone into the prefix cache. It has no
        other before these but those of its hits."""
        held = self.extend(request, blocks, hits=start)
        tags = self.tracker.share(held.row, start, stop)
        for block, tag in zip(blocks[start:stop], tags, strict=True):
            page = block.block_id
            # What is cached for two texts is out of date for one of them: it fits neither.
            self.prefix[page] = QUARANTINED if self.prefix[page] else tag
            held.cached.append(page)

    def release(self, block_ids: Sequence[int]) -> None:
        self.tracker.release(block_ids)
        if self.tracker.quarantined:
            self._withhold(self._pool.blocks[block_id] for block_id in block_ids)

    def withhold(self, block: Any) -> None:
        """Takes a block that was freed twice out of the free queue and the prefix cache."""
        if self.mode != "log":
            if block.next_free_block is not None:
                self._pool.free_block_queue.remove(block)
            self._pool.evict_blocks({block.block_id})

    def _withhold(self, blocks: Iterable[Any]) -> None:
        """Takes those of `blocks` that are in quarantine out of the free queue."""
        for block in blocks:
            queued = block.next_free_block is not None
            if self.mode != "log" and queued and not self.tracker.is_usable(block.block_id):
                self._pool.free_block_queue.remove(block)

    def check(self, scheduler: Any, output: Any) -> None:
        """A step is scheduled. Of requests with new blocks, what they were given is taken from the
        manager, and what the workers are told from the scheduler's output."""
        for new in output.scheduled_new_reqs:
            self._tell(scheduler, new.req_id, new.num_computed_tokens, new.block_ids, anew=True)
        cached = output.scheduled_cached_reqs
        for i, block_ids in enumerate(cached.new_block_ids):
            if block_ids is not None:
                name, computed = cached.req_ids[i], cached.num_computed_tokens[i]
                anew = name in cached.resumed_req_ids
                self._tell(scheduler, name, computed, block_ids, anew=anew)
        ids = list(output.num_scheduled_tokens)
        if ids:
            if ids != self._batch[0]:
                self._batch = ids, [self.requests[request_id].row for request_id in ids]
            rows = self._batch[1]
            self._steps.append((output, self.tracker.check(rows), ids, rows))

    def _tell(
        self, scheduler: Any, name: str, computed: int, block_ids: Sequence[list[int]], anew: bool
    ) -> None:
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        blocks = manager.req_to_blocks[name]
        held = self.extend(scheduler.requests[name], blocks, computed // self._block_size)
        self.tracker.tell(held.row, block_ids[0], anew=anew)

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
        violations = self.tracker.settle(report, rows)
        return [(ids[v.position], v) for v in violations if self.mode == "abort"]


def guard_of(pool: Any) -> Guard | None:
    """Kept with the pool: looking it up elsewhere would be a good part of a hook's time."""
    guard: Guard | None = getattr(pool, "halfbyte_guard", None)
    return guard


def attach(mode: Mode, pool: Any, *, block_size: int) -> Guard:
    """Tracks the blocks of `pool`, of `block_size` tokens each, from now on; nothing may be in use.

    Raises IntegrityError for a pool that is not known, and if blocks are in use.
    """
    if type(pool).__name__ != "BlockPool":
        raise IntegrityError(
            f"KV-cache integrity does not know {type(pool).__name__}, but BlockPool",
            hint="HALFBYTE_KV_INTEGRITY=off runs the server without it",
        )
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if used:
        raise IntegrityError(f"{used} of {pool.num_gpu_blocks} KV blocks are in use already")
    guard = pool.halfbyte_guard = Guard(mode, pool, block_size)
    return guard


def _acquiring(original: Callable[..., Any], pool: Any, num_blocks: int) -> Any:
    guard = guard_of(pool)
    if guard is None:
        return original(pool, num_blocks)
    blocks = _releasing_uncached(guard, lambda: original(pool, num_blocks))
    if blocks:
        guard.tracker.acquire([block.block_id for block in blocks])
    return blocks


def _evicting(original: Callable[..., Any], pool: Any, block_ids: set[int]) -> None:
    if guard := guard_of(pool):
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
    guard, cached = guard_of(pool), block.block_hash is not None
    removed = original(pool, block)
    if guard is not None and cached:
        guard.prefix[block.block_id] = 0
        if block.ref_cnt == 0:
            if guard.uncached is None:
                guard.release([block.block_id])
            else:
                guard.uncached.append(block.block_id)
    return removed


def _freeing(original: Callable[..., Any], pool: Any, ordered_blocks: Iterable[Any]) -> None:
    guard = guard_of(pool)
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
    guard = guard_of(pool)
    cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
    done: bool = original(pool)
    if guard is not None and done:
        guard.prefix = [0] * len(guard.prefix)
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
    guard = guard_of(pool)
    if guard is not None and num_cached_blocks < num_full_blocks:
        guard.cache(request, blocks, num_cached_blocks, num_full_blocks)


def _hashes(pool: Any, request: Any, size: int, count: int) -> Sequence[Any]:
    """Under which the first `count` blocks of a request are cached, `size` tokens each."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

    hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, size)
    return [make_block_hash_with_group_id(hashes[i], 0) for i in range(count)]


def _ending(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    # First, since what a request gives back itself is not taken from it.
    if guard := guard_of(manager.block_pool):
        guard.unbind(request.request_id)
    return original(manager, request)


def _scheduling(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(scheduler, *args, **kwargs)
    if guard := guard_of(scheduler.kv_cache_manager.block_pool):
        guard.check(scheduler, output)
    return output


def _updating(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    guard = guard_of(scheduler.kv_cache_manager.block_pool)
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

    scheduler.kv_cache_manager.evict_blocks(set(guard.requests[request_id].cached))
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
        require_covered(unsupported(scheduler))
        pool = scheduler.kv_cache_manager.block_pool
        attach(mode, pool, block_size=scheduler.block_size)
        logger.info(
            "kv-integrity mode=%s engine=%s blocks=%d block_size=%d requests=%d hooks=%d",
            mode, _engine(), pool.num_gpu_blocks - 1, scheduler.block_size,
            scheduler.max_num_running_reqs, len(HOOKS),
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
