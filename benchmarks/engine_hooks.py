"""The time that the plugins' hooks take in a decode step, on the engines' own classes.

Of vLLM these are the cache manager and the block pool; of SGLang the allocators, the page table,
the prefix cache and the batch, with a model that does nothing. What the functions take that the
hooks replace is taken off. `bench_integrity` runs this for the engines that are installed.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from halfbyte.errors import HalfbyteError


def lines(batches: Sequence[int], steps: int) -> Iterator[dict[str, Any]]:
    """One for each engine that is installed, page size and number of requests."""
    if find_spec("vllm") is not None:
        clock = time_vllm_hooks()
        for batch in batches:
            yield vllm_line(batch, steps, clock)
    if find_spec("sglang") is not None:
        clock = time_sglang_hooks()
        for page_size in (64, 1):
            for batch in batches:
                yield sglang_line(batch, page_size, steps, clock)


class Clock:
    """Time spent in hooks, without what the functions take that they replace, and without what
    it takes to look at the clock."""

    def __init__(self) -> None:
        self.seconds = self.overhead = 0.0
        self.tracker = 0.0
        """Of `seconds`, what the tracker's own calls took."""
        nothing = self.around(lambda original: original())
        spent = []
        for _ in range(10_000):
            self.seconds = 0.0
            nothing(lambda: None)
            spent.append(self.seconds)
        self.overhead = statistics.median(spent)

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        now = time.perf_counter

        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def untimed(*args: Any, **kwargs: Any) -> Any:
                start = now()
                try:
                    return original(*args, **kwargs)
                finally:
                    self.seconds -= now() - start

            start = now()
            try:
                return hook(untimed, *args, **kwargs)
            finally:
                self.seconds += now() - start - self.overhead

        return timed

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the tracker, within a hook."""
        now = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                self.tracker += now() - start

        return timed


def time_vllm_hooks() -> Clock:
    """Puts the plugin's hooks in place, each under the clock."""
    from halfbyte.kvcache.plugins import hooks, vllm

    clock = Clock()
    for hook in vllm.HOOKS:
        hooks.put_in_place(replace(hook, around=clock.around(hook.around)))
    return clock


VLLM_TOKENS, VLLM_BLOCK = 21_400, 16


def vllm_line(batch: int, steps: int, clock: Clock) -> dict[str, Any]:
    """Microseconds of the hooks in a decode step: the median and the 99th percentile. One in
    sixteen requests gets a block. Every block that is free was cached before."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    from halfbyte.kvcache.plugins import vllm as plugin

    init_none_hash(sha256)
    hasher, most = get_request_block_hasher(VLLM_BLOCK, sha256), VLLM_TOKENS + steps + VLLM_BLOCK

    def request(name: str, first: int, tokens: int) -> Any:
        prompt = [first, *range(1, tokens)]
        parameters = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
        return Request(name, prompt, parameters, None, block_hasher=hasher)

    blocks = batch * -(-most // VLLM_BLOCK) + 1
    spec = FullAttentionSpec(VLLM_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, 2**20, VLLM_BLOCK, VLLM_BLOCK, enable_caching=True)
    guard = plugin.attach("abort", manager.block_pool, block_size=VLLM_BLOCK)
    for i in range(batch):
        old = request(f"old {i}", 10**6 + i, (blocks - 1) // batch * VLLM_BLOCK)
        manager.allocate_slots(old, old.num_tokens)
    for i in range(batch):
        manager.free(SimpleNamespace(request_id=f"old {i}"))

    scheduler = SimpleNamespace(kv_cache_manager=manager, requests={})
    running = scheduler.requests
    new = []
    for i in range(batch):
        one = request(str(i), i, VLLM_TOKENS + i % VLLM_BLOCK)
        given = manager.allocate_slots(one, one.num_tokens)
        ids = given.get_block_ids()
        new.append(SimpleNamespace(req_id=str(i), block_ids=ids, num_computed_tokens=0))
        running[str(i)], one.num_computed_tokens = one, one.num_tokens
    names, tokens = list(running), dict.fromkeys(running, 1)

    def step(output: Any) -> None:
        clock.around(plugin._scheduling)(lambda _: output, scheduler)
        clock.around(plugin._updating)(lambda *_: {}, scheduler, output, None)

    def told(new: list[Any], ids: list[Any]) -> Any:
        cached = SimpleNamespace(
            req_ids=names[: len(ids)], new_block_ids=ids, resumed_req_ids=set(),
            num_computed_tokens=[0] * len(ids),
        )  # fmt: skip
        return SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens
        )

    step(told(new, []))
    gc.collect()
    gc.freeze()  # as vLLM does when it has started
    times = []
    for _ in range(steps):
        clock.seconds = 0.0
        ids = []
        for one in running.values():
            one.append_output_token_ids(0)
            ids.append(manager.allocate_slots(one, 1).get_block_ids(allow_none=True))
            one.num_computed_tokens += 1
        step(told([], ids))
        times.append(clock.seconds * 1e6)
    _prove(guard.tracker.metrics(), batch, steps + 1)
    return {
        "what": "vllm", "requests": batch, "tokens": VLLM_TOKENS, "block_size": VLLM_BLOCK,
        "us": statistics.median(times), "us_p99": statistics.quantiles(times, n=100)[-1],
    }  # fmt: skip


def _prove(metrics: Any, batch: int, steps: int) -> None:
    """Raises HalfbyteError unless every step was checked, and nothing found."""
    if metrics["checks"] != steps or metrics["rows_checked"] != batch * steps:
        raise HalfbyteError(f"{metrics['checks']} checks in {steps} steps")
    if found := [k for k, n in metrics.items() if k.startswith("violations") and n]:
        raise HalfbyteError(f"{found}, where there is no fault")


def time_sglang_hooks() -> Clock:
    """The same for SGLang, whose model and processing of results do nothing here."""
    _import_torchvision()
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_context

    from halfbyte.kvcache.plugins import sglang

    get_context().override_server_args(attention_backend="torch_native", device="cpu").install()
    processor = batch_result_processor.SchedulerBatchResultProcessor
    processor.process_batch_result_prefill = lambda self, batch, result: None
    processor.process_batch_result_decode = lambda self, batch, result: None
    TpModelWorker.forward_batch_generation = lambda self, batch: GenerationBatchResult(
        next_token_ids=batch.seq_lens
    )
    clock = Clock()
    for hook in sglang.HOOKS:
        HookRegistry.register(hook.target, clock.around(hook.around), HookType.AROUND)
    HookRegistry.apply_hooks()
    return clock


def _import_torchvision() -> None:
    """SGLang imports it. A build for CUDA asks for these two operators, which torch for the CPU
    does not load; nothing here calls them."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
SGLANG_TOKENS = 64


def sglang_line(batch: int, page_size: int, steps: int, clock: Clock) -> dict[str, Any]:
    """Microseconds of the hooks in a decode step, the median: `us` with the tracker's calls, which
    here are plain torch on the CPU and on a GPU launches, and `us_hooks` without these."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor as Processor,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from halfbyte.kvcache.plugins import sglang as plugin

    each = -(-(SGLANG_TOKENS + steps) // page_size) + 1
    size = batch * each * page_size
    options = {"dtype": torch.bfloat16, "device": "cpu", "need_sort": False}
    options["kvcache"] = MLATokenToKVPool.__new__(MLATokenToKVPool)
    allocator: Any = (
        TokenToKVPoolAllocator(size, **options)
        if page_size == 1
        else PagedTokenToKVPoolAllocator(size, page_size, **options)
    )
    table = ReqToTokenPool(batch, each * page_size, "cpu", False)
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable=False, req_to_token_pool=table, token_to_kv_pool_allocator=allocator,
            page_size=page_size, tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
    )  # fmt: skip
    guard = plugin.attach("abort", allocator, table)
    tracker = guard.tracker
    calls = {n: getattr(tracker, n) for n in dir(tracker) if not n.startswith("_")}
    guard.tracker = SimpleNamespace(
        **{name: clock.inside(call) for name, call in calls.items() if callable(call)}
    )
    model = SimpleNamespace(
        vocab_size=10**6, is_encoder_decoder=False, self_opened_think_start_ids=None
    )
    processor = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    reqs = []
    for i in range(batch):
        parameters = SamplingParams(max_new_tokens=steps + 1, ignore_eos=True)
        parameters.normalize(None)
        prompt = array("q", [i, *range(1, SGLANG_TOKENS)])
        req = Req(str(i), "", prompt, parameters, vocab_size=model.vocab_size)
        req.init_next_round_input(cache)
        req.extend_end = SGLANG_TOKENS
        req.lock = cache.lock(req.last_node)
        reqs.append(req)
    running = ScheduleBatch.init_new(
        reqs, table, allocator, cache, model, True, SpeculativeAlgorithm.NONE, chunked_req=None
    )

    def run(process: Callable[..., None]) -> None:
        result = TpModelWorker.forward_batch_generation(None, running)
        result.copy_done = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
        process(processor, running.copy(), result)

    both, hooks = [], []
    with get_parallel().override(dcp_enabled=False):
        running.prepare_for_extend()
        run(Processor.process_batch_result_prefill)
        for _ in range(steps):
            clock.seconds = clock.tracker = 0.0
            running.prepare_for_decode()
            run(Processor.process_batch_result_decode)
            both.append(clock.seconds * 1e6)
            hooks.append((clock.seconds - clock.tracker) * 1e6)
    _prove(tracker.metrics(), batch, steps + 1)
    return {
        "what": "sglang", "requests": batch, "page_size": page_size,
        "us": statistics.median(both), "us_hooks": statistics.median(hooks),
    }  # fmt: skip
