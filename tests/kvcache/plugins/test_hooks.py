"""Hooks fit the functions that they were written for, or say which they do not fit."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.state import QUARANTINED
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


class Pool:
    """An engine's class."""

    def alloc(self, size: int) -> int:
        return size


def doubled(original: Callable[..., int], pool: Pool, size: int) -> int:
    return 2 * original(pool, size)


@pytest.fixture
def engine() -> Iterator[types.ModuleType]:
    module = types.ModuleType("an_engine")
    module.Pool = type("Pool", (), dict(vars(Pool)))  # type: ignore[attr-defined]
    sys.modules["an_engine"] = module
    yield module
    del sys.modules["an_engine"]


def test_hook_takes_the_place_of_its_target(engine: Any) -> None:
    hook = Hook("an_engine.Pool.alloc", "self size", doubled)
    check_targets([hook], "an_engine 1.0")
    assert not is_installed(hook)
    with pytest.raises(IntegrityError, match=r"an_engine 1.0: hooks are not in place: an_engine"):
        check_installed([hook], "an_engine 1.0")
    put_in_place(hook)
    assert engine.Pool().alloc(3) == 6
    check_installed([hook], "an_engine 1.0")
    check_targets([hook], "an_engine 1.0")

    inner = engine.Pool.alloc
    engine.Pool.alloc = functools.wraps(inner)(lambda *args: 1 + inner(*args))
    assert engine.Pool().alloc(3) == 7
    assert is_installed(hook), "another plugin's wrapper is around it"
    engine.Pool.alloc = lambda self, size: size
    assert not is_installed(hook), "another plugin's function is in its place"


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        ("an_engine.Pool.take", "self size", "has no an_engine.Pool.take"),
        ("an_engine.pools.Pool.alloc", "self size", "has no an_engine.pools.Pool.alloc"),
        ("an_engine.Pool.alloc", "self count", r"Pool.alloc takes \(self size\), not \(self count"),
    ],
)
def test_target_that_does_not_fit_is_named(
    engine: Any, target: str, parameters: str, message: str
) -> None:
    with pytest.raises(IntegrityError, match=message) as caught:
        check_targets([Hook(target, parameters, doubled)], "an_engine 1.0")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("HALFBYTE_KV_INTEGRITY=off")


def test_prefix_tags_tell_of_two_nodes_with_one_page() -> None:
    prefix = PrefixTags(8, "cpu")
    prefix.put(torch.tensor([3, 5]), torch.tensor([11, 13], dtype=torch.int32))
    assert prefix.of(torch.tensor([5, 2, 3])).tolist() == [13, 0, 11]
    prefix.put(torch.tensor([5, 6]), torch.tensor([15, 17], dtype=torch.int32))
    assert prefix.of(torch.tensor([3, 5, 6])).tolist() == [11, QUARANTINED, 17]
    prefix.drop(torch.tensor([5]))
    prefix.put(torch.tensor([5]), torch.tensor([19], dtype=torch.int32))
    assert prefix.of(torch.tensor([5])).tolist() == [19]
    prefix.clear()
    assert prefix.of(torch.arange(8)).tolist() == [0] * 8


def test_process_ends_where_an_engine_would_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HALFBYTE_KV_INTEGRITY", raising=False)
    assert read_mode() == "off"
    monkeypatch.setenv("HALFBYTE_KV_INTEGRITY", "Abort")
    assert read_mode() == "abort"
    monkeypatch.setenv("HALFBYTE_KV_INTEGRITY", "on")
    with pytest.raises(SystemExit, match="HALFBYTE_KV_INTEGRITY is 'on'"):
        read_mode()
    with (
        pytest.raises(SystemExit, match=r"not on: no pool \(take another\)"),
        stops_the_server("abort"),
    ):
        raise IntegrityError("no pool", hint="take another")
    with stops_the_server("log"):
        raise IntegrityError("no pool")
    assert "KV-cache integrity is not on: no pool" in caplog.text
