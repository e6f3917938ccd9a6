"""One thread that carries out tasks in the order given, so that its caller need not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

Task = Callable[[], None]


class Background:
    """Tasks in order, with at most `budget` bytes in those that are not finished.

    A task's error ends the work: the tasks behind it are dropped, and every later call but `close`
    raises it. One thread may give tasks at a time.
    """

    def __init__(self, name: str, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._tasks: deque[tuple[Task, int]] = deque()
        self._busy = False
        self._closing = False
        self._error: BaseException | None = None
        self._changed = Condition()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def used(self) -> int:
        """Bytes of the tasks that are not finished, and of those announced by `reserve`."""
        return self._used

    def reserve(self, nbytes: int) -> None:
        """Wait until a task may hold `nbytes`. One that exceeds the budget has it for itself."""
        with self._changed:
            self._wait_until(lambda: not self._used or self._used + nbytes <= self._budget)
            self._used += nbytes

    def submit(self, task: Task, reserved: int = 0) -> None:
        """Append a task; when it is done, the bytes reserved for it are free again."""
        with self._changed:
            self._raise()
            self._tasks.append((task, reserved))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until every task is done."""
        with self._changed:
            self._wait_until(lambda: not self._tasks and not self._busy)

    def close(self) -> None:
        """Finish the tasks, unless one has failed, and end the thread. Raises no task's error.

        An interrupt while waiting drops the tasks that are not begun.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self._thread.join()
        except BaseException:
            with self._changed:
                self._tasks.clear()
            self._thread.join()
            raise

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or ready())
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                task, reserved = self._tasks.popleft()
                self._busy = True
            error = _error_of(task)
            del task  # and with it the bytes that it holds
            with self._changed:
                self._busy = False
                self._used -= reserved
                if error is not None:
                    self._error = error
                    self._tasks.clear()
                self._changed.notify_all()


def _error_of(task: Task) -> BaseException | None:
    try:
        task()
    except BaseException as error:
        return error
    return None
