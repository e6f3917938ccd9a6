"""Tasks keep their order and their budget; an error is raised once for all and never lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from halfbyte.formats.background import Background


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background("test", 100)
    yield background
    background.close()
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_tasks_are_done_in_order(background: Background) -> None:
    done: list[int] = []
    for number in range(500):
        background.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    background.drain()
    assert done == list(range(500))


def test_the_budget_is_never_exceeded(background: Background) -> None:
    seen: list[int] = []
    for size in [30, 60, 1, 50, 99, 100, 2] * 30:
        background.reserve(size)
        seen.append(background.used)
        background.submit(lambda: seen.append(background.used), size)
    background.drain()
    assert max(seen) <= 100
    assert background.used == 0


def test_a_task_larger_than_the_budget_is_alone(background: Background) -> None:
    alone: list[bool] = []
    for size in (10, 500, 10):
        background.reserve(size)
        alone.append(background.used == size)
        background.submit(lambda: None, size)
    background.drain()
    assert alone[1:] == [True, True]


def test_close_finishes_what_was_given(gate: threading.Event) -> None:
    background = Background("test", 100)
    done: list[str] = []
    background.submit(gate.wait)
    background.submit(lambda: done.append("done"))
    gate.set()
    background.close()
    assert done == ["done"]


class Crash(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Crash(), MemoryError()])
def test_an_error_drops_what_is_behind_it_and_is_raised_from_then_on(
    error: BaseException, gate: threading.Event
) -> None:
    background = Background("test", 100)
    done: list[str] = []

    def fail() -> None:
        gate.wait()
        raise error

    background.reserve(100)
    background.submit(fail, 100)
    background.submit(lambda: done.append("behind"))
    threading.Timer(0.02, gate.set).start()
    for call in (
        lambda: background.reserve(1),  # waits for room, and must not wait for ever
        background.drain,
        lambda: background.submit(lambda: done.append("later")),
    ):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
    background.close()
    assert done == []


def test_an_interrupt_while_closing_drops_what_is_not_begun(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = Background("test", 100)
    done: list[str] = []
    begun = threading.Event()

    def first() -> None:
        begun.set()
        gate.wait()
        done.append("begun")

    background.submit(first)
    background.submit(lambda: done.append("not begun"))
    begun.wait()
    thread = background._thread
    join = thread.join

    def interrupted() -> None:
        monkeypatch.setattr(thread, "join", join)
        threading.Timer(0.02, gate.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        background.close()
    assert done == ["begun"]
    assert not thread.is_alive()
