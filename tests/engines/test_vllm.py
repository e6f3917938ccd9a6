"""The plugin on vLLM's own scheduler, cache manager and block pool.

`Server` is vLLM's loop around these, with a worker that needs no GPU: it keeps the block tables
that the scheduler tells it, and what it samples depends on every token that it finds in the KV
cache, so a request that reads another's block answers something else than it would alone.
"""

from __future__ import annotations

import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.tracker import Mode
from halfbyte.kvcache.plugins import vllm as plugin
from halfbyte.kvcache.plugins.hooks import check_installed

VOCABULARY = 997
CONTEXT = 512


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


class Settings(SimpleNamespace):
    """vLLM's configuration, where what is not named is off."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


def scheduler(blocks: int, block_size: int, spec: type, **options: Any) -> Scheduler:
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    off = Settings()
    config = Settings(
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=CONTEXT,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        model_config=Settings(max_model_len=CONTEXT, runner_type="generate"),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        ec_manager_config=Settings(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=off,
        max_concurrent_batches=1,
        **dict.fromkeys(
            ("lora_config", "kv_events_config", "kv_transfer_config", "ec_transfer_config",
             "speculative_config")
        ),
    )  # fmt: skip
    group = KVCacheGroupSpec(
        ["layer"],
        spec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, **options),
    )
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    manager = SimpleNamespace(accept_tokens=lambda *_: True)
    return Scheduler(config, kv, manager, block_size=block_size)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    """The plugin as vLLM loads it, first in mode off."""
    init_none_hash(sha256)
    targets = [hook.target for hook in plugin.HOOKS]
    before = [pkgutil.resolve_name(target) for target in targets]
    os.environ.pop("HALFBYTE_KV_INTEGRITY", None)
    plugin.install()
    after = [pkgutil.resolve_name(target) for target in targets]
    assert all(a is b for a, b in zip(before, after, strict=True)), "nothing is replaced"
    os.environ["HALFBYTE_KV_INTEGRITY"] = "abort"
    plugin.install()
    installed = [pkgutil.resolve_name(target) for target in targets]
    plugin.install()
    assert installed == [pkgutil.resolve_name(target) for target in targets], "once is enough"
    check_installed(plugin.HOOKS, "vllm")
    yield
    del os.environ["HALFBYTE_KV_INTEGRITY"]


class Server:
    def __init__(self, blocks: int, block_size: int, mode: Mode = "abort") -> None:
        os.environ["HALFBYTE_KV_INTEGRITY"] = mode
        self.scheduler = scheduler(blocks, block_size, FullAttentionSpec)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.guard: Any = plugin.guard_of(self.pool)
        self.block_size = block_size
        self.kv = torch.zeros(blocks, block_size, dtype=torch.int64)
        self.tables: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.streamed: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.hits = self.preemptions = 0

    def submit(self, name: str, prompt: Sequence[int], count: int) -> None:
        parameters = SamplingParams(max_tokens=count, ignore_eos=True)
        hasher = get_request_block_hasher(self.block_size, sha256)
        self.prompts[name], self.streamed[name] = list(prompt), []
        request = Request(name, list(prompt), parameters, None, block_hasher=hasher)
        self.scheduler.add_request(request)

    def work(self, output: Any) -> ModelRunnerOutput:
        """What a worker does with a step."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.hits += new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
                self.preemptions += 1
            self.tables[name] += blocks[0] if blocks else []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            tokens = list(self.scheduler.requests[name].all_token_ids)
            stop = starts[name] + output.num_scheduled_tokens[name]
            table = self.tables[name]
            for at in range(starts[name], stop):
                self.kv[table[at // self.block_size], at % self.block_size] = tokens[at]
            read = self.kv[table].flatten()[:stop].tolist()
            sampled.append([answer(read)] if stop == len(tokens) else [])
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def step(self) -> None:
        output = self.scheduler.schedule()
        result = self.work(output)
        for client in self.scheduler.update_from_output(output, result).values():
            for item in client.outputs:
                self.streamed[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    self.ended[item.request_id] = item.finish_reason

    def run(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests that never end")

    def right(self) -> set[str]:
        """Requests whose tokens are what they would be alone."""
        return {
            name
            for name, tokens in self.streamed.items()
            if tokens == answers(self.prompts[name], len(tokens))
        }

    def aborted(self) -> set[str]:
        return {name for name, reason in self.ended.items() if reason == FinishReason.ERROR}

    def violations(self) -> dict[str, int]:
        """Counts of what was found, by kind, without zeros."""
        counts = self.guard.tracker.metrics().items()
        return {k.removeprefix("violations_"): n for k, n in counts if "violations" in k and n}

    def blocks(self, name: str) -> list[Any]:
        return list(self.scheduler.kv_cache_manager.coordinator.get_blocks(name)[0])


@pytest.mark.parametrize(("blocks", "block_size"), [(400, 1), (110, 4), (26, 16)])
def test_ordinary_traffic_raises_no_alarm(blocks: int, block_size: int) -> None:
    """Chunked prefill, shared prefixes, eviction and preemption; mode raise fails at any fault."""
    server = Server(blocks, block_size, "raise")
    chance = random.Random(block_size)

    def tokens(length: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(length)]

    stems = [tokens(60) for _ in range(3)]
    for i in range(1500):
        prompt = chance.choice(stems)[: chance.randrange(61)] + tokens(chance.randint(3, 30))
        server.submit(str(i), prompt, chance.randint(1, 40))
        for _ in range(chance.randint(1, 4)):
            server.step()
        if i == 750:
            server.run()
            assert server.pool.reset_prefix_cache()
    server.run()
    assert len(server.ended) == 1500
    assert server.right() == set(server.streamed)
    assert server.violations() == {}
    metrics = server.guard.tracker.metrics()
    assert metrics["checks"] == metrics["steps"] > 3000
    assert server.hits > 500
    assert server.preemptions > 0


def started(block_size: int, mode: Mode = "abort") -> Server:
    """A server whose requests, with a shared beginning, are all being decoded."""
    server = Server(2400 // block_size + 20, block_size, mode)
    stem = [(7 * i) % VOCABULARY for i in range(2 * block_size + 3)]
    for i in range(4):
        server.submit(str(i), [*stem, 100 + i, *range(i)], 3 * block_size + 20)
        for _ in range(3):
            server.step()
    return server


def free_in_use(server: Server) -> None:
    """vllm#32255: blocks are freed that a running request still reads."""
    own = [block for block in server.blocks("1") if block.ref_cnt == 1]
    server.pool.free_blocks(own)
    server.pool.evict_blocks({block.block_id for block in own})


def free_shared(server: Server) -> None:
    """A count of uses that is too low by one for each: a shared prefix goes while it is in use."""
    for _ in range(4):
        server.pool.free_blocks(server.blocks("1")[:2])
    server.pool.evict_blocks({block.block_id for block in server.blocks("1")[:2]})


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("fault", [free_in_use, free_shared], ids=lambda fault: fault.__name__)
def test_stale_mapping_ends_its_requests_alone(
    fault: Callable[[Server], None], block_size: int
) -> None:
    server = started(block_size)
    before = {name: len(tokens) for name, tokens in server.streamed.items()}
    fault(server)
    for i in range(4, 8):  # these take what was freed
        server.submit(str(i), [200 + i] * (block_size + 9 * i), 2 * block_size + 9)
    server.run()
    everyone = {str(i) for i in range(8)}
    assert set(server.ended) == everyone
    victims = {"0", "1", "2", "3"} if fault is free_shared else {"1"}
    assert server.aborted() == victims
    assert server.right() == everyone, "no token that another's KV has a part in leaves"
    for name in victims:
        assert len(server.streamed[name]) == before[name]
    assert server.violations() == {"tag": len(victims)}
    if fault is free_in_use:
        hits = server.hits
        server.submit("again", [*server.prompts["1"], *server.streamed["1"], 1], 3)
        server.run()
        shared = len(server.prompts["0"]) - 1
        assert server.hits - hits <= shared, "what the bad request cached is not found"


@pytest.mark.parametrize("block_size", [1, 16])
def test_hash_that_outlives_its_block_fails_whoever_hits_it(block_size: int) -> None:
    """A block goes to another request, and the prefix cache still finds it by its old hash."""
    server = Server(40, block_size)
    prompt = [(5 * i) % VOCABULARY for i in range(2 * block_size + 3)]
    server.submit("first", prompt, 2)
    server.step()
    stale = [(block, block.block_hash) for block in server.blocks("first")[:2]]
    server.run()
    others = 0
    while any(block.block_hash == hash_ for block, hash_ in stale):
        server.submit(f"other {others}", [600 + others] * (5 * block_size), 2)
        server.run()
        others += 1
    for block, hash_ in stale:
        server.pool.cached_block_hash_to_block.insert(hash_, block)
    server.submit("hit", prompt, 8)
    server.submit("last", [3] * 7, 8)
    server.run()
    assert server.hits >= 2 * block_size
    assert server.aborted() == {"hit"}
    assert server.streamed["hit"] == []
    assert server.right() == set(server.streamed)


def test_block_table_that_is_told_wrong_ends_its_request() -> None:
    """The worker reads another request's block, though the manager gave out the right one."""
    server = started(16)
    tell = server.scheduler._make_cached_request_data
    changed = []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        data = tell(*args, **kwargs)
        if "1" in data.req_ids and not changed:
            i = data.req_ids.index("1")
            if data.new_block_ids[i] is not None:
                changed.append(i)
                data.new_block_ids[i] = ([server.blocks("2")[2].block_id],)
        return data

    server.scheduler._make_cached_request_data = wrong
    server.run()
    assert changed
    assert server.aborted() == {"1"}
    assert server.violations() == {"table": 1}
    assert server.streamed["1"] == answers(server.prompts["1"], len(server.streamed["1"]))


def test_double_free_is_counted_and_its_block_withheld() -> None:
    server = Server(40, 16)
    blocks = server.pool.get_new_blocks(2)
    server.pool.free_blocks(blocks)
    server.pool.free_blocks(blocks[:1])
    server.submit("a", [5] * 20, 3)
    server.run()
    assert server.violations()["release"] == 1
    metrics = server.guard.tracker.metrics()
    assert metrics["quarantined_pages"] == 1
    free = {block.block_id for block in server.pool.free_block_queue.get_all_free_blocks()}
    assert blocks[0].block_id not in free


def test_modes_log_and_raise() -> None:
    server = started(16, "log")
    free_in_use(server)
    server.step()
    assert server.violations() == {"tag": 1}
    assert server.aborted() == set()
    server = started(16, "raise")
    free_in_use(server)
    with pytest.raises(IntegrityError, match="1 requests are affected"):
        server.step()


def test_step_without_a_check_is_an_error() -> None:
    server = started(16)
    output = server.scheduler.schedule()
    server.guard._steps.clear()
    with pytest.raises(IntegrityError, match="a step ran that was not checked"):
        server.scheduler.update_from_output(output, server.work(output))


def test_what_is_not_known_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["HALFBYTE_KV_INTEGRITY"] = "abort"
    with pytest.raises(SystemExit, match="does not cover layers of kind SlidingWindowSpec"):
        scheduler(40, 16, SlidingWindowSpec, sliding_window=32)
    os.environ["HALFBYTE_KV_INTEGRITY"] = "log"
    assert scheduler(40, 16, SlidingWindowSpec, sliding_window=32) is not None

    class Other(BlockPool):
        """A pool that may move blocks in its own way."""

    pool = Other(40, True, 16)
    with pytest.raises(IntegrityError, match="does not know Other"):
        plugin.attach("abort", pool, block_size=16)
    plain = BlockPool(40, True, 16)
    plain.get_new_blocks(3)
    with pytest.raises(IntegrityError, match="3 of 40 KV blocks are in use already"):
        plugin.attach("abort", plain, block_size=16)


INSTALLATION = """
import os
from vllm import plugins
from halfbyte.kvcache.plugins import hooks, vllm as plugin
for mode in ("off", "abort"):
    os.environ["HALFBYTE_KV_INTEGRITY"] = mode
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    print(mode, all(hooks.is_installed(hook) for hook in plugin.HOOKS))
"""


def test_vllm_finds_the_plugin() -> None:
    """vLLM's own loading by entry point."""
    result = subprocess.run([sys.executable, "-c", INSTALLATION], capture_output=True, text=True)
    assert result.stdout.splitlines()[-2:] == ["off False", "abort True"]
