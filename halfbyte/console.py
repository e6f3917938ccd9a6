"""The one place where halfbyte prints: results, progress, errors, exit codes.

Data goes to stdout, everything else to stderr. Three modes: `human` prints tables, `json` prints
one document at the end, `quiet` prints the result's path and nothing more.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from halfbyte import env
from halfbyte.errors import HalfbyteError
from halfbyte.progress import Progress, SilentProgress
from halfbyte.progress_display import BarProgress, LineProgress

Mode = Literal["human", "json", "quiet"]

SCHEMA_VERSION = 1
"""Version of every `--json` document; raised when a field changes its meaning or goes away."""

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Column:
    """A table column. Numbers are right-aligned; only text may wrap on a narrow terminal."""

    title: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of finished text under titled columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str | None = None
    total: tuple[str, ...] | None = None
    """A last row, set apart from the others."""


class Console:
    """Where every command sends what it has to say."""

    def __init__(
        self,
        mode: Mode = "human",
        *,
        verbose: bool = False,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.mode = mode
        self.verbose = verbose
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr

    # Data, on stdout.

    def line(self, text: str = "") -> None:
        """A line of the result, for people."""
        if self.mode == "human":
            print(text, file=self._stdout)

    def table(self, table: Table) -> None:
        """A table of the result, for people."""
        if self.mode == "human":
            print(render(table, self._stdout), file=self._stdout)

    def result(self, record: Mapping[str, Any], *, quiet: str = "") -> None:
        """The whole result, for programs: the JSON document, or the one line that `-q` prints."""
        if self.mode == "json":
            document = {"schema_version": SCHEMA_VERSION, **record}
            print(json.dumps(document, indent=2, ensure_ascii=False), file=self._stdout)
        elif self.mode == "quiet" and quiet:
            print(quiet, file=self._stdout)

    # Everything else, on stderr.

    def note(self, text: str) -> None:
        """Something worth knowing that is no part of the result."""
        if self.mode == "human":
            self._say(text)

    def detail(self, text: str) -> None:
        """A note for `-v` alone."""
        if self.verbose:
            self.note(text)

    def warning(self, text: str) -> None:
        """Something that may go wrong later. Shown in every mode but quiet."""
        if self.mode != "quiet":
            self._say(f"warning: {text}")

    def failure(self, failure: Failure) -> None:
        """What went wrong and the way out; shown in every mode."""
        self._say(f"error: {failure.message}")
        if failure.hint:
            self._say(f"hint: {failure.hint}")

    @contextmanager
    def working(self) -> Iterator[Progress]:
        """Long work: yields its progress, and keeps what libraries print out of the result."""
        if self.verbose:
            logging.basicConfig(level=logging.INFO, stream=self._stderr)
        progress = self._progress()
        with redirect_stdout(self._stderr):
            try:
                yield progress
            finally:
                progress.finish()

    def _progress(self) -> Progress:
        if self.mode != "human" or env.progress_disabled():
            return SilentProgress()
        if self._stderr.isatty() and not env.dumb_terminal():
            return BarProgress(self._stderr)
        return LineProgress(self._stderr)

    def _say(self, text: str) -> None:
        print(text, file=self._stderr, flush=True)


# Tables.


def render(table: Table, stream: IO[str] | None = None) -> str:
    """The table as text, as wide as it needs to be, or as the terminal `stream` is."""
    from rich import box
    from rich.console import Console as RichConsole
    from rich.table import Table as RichTable

    terminal = RichConsole(
        file=stream,
        width=None if stream is not None and stream.isatty() else 100_000,
        markup=False,
        highlight=False,
    )
    rich = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        show_footer=table.total is not None,
    )
    for i, column in enumerate(table.columns):
        rich.add_column(
            column.title,
            footer=table.total[i] if table.total is not None else "",
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    for row in table.rows:
        rich.add_row(*row)
    with terminal.capture() as capture:
        terminal.print(rich)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


# Errors.


class Interrupted(HalfbyteError):
    """Ctrl-C or SIGTERM, where there is something to say about what is left on the disk."""

    exit_code = EXIT_INTERRUPTED


@contextmanager
def resumable(
    output: Path, begin_anew: Sequence[str] = ("--overwrite",), go_on: Sequence[str] = ("--resume",)
) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an explanation of how to go on with what is in `output`: the
    same command without the flags `begin_anew`, and with `go_on`."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        words = [word for word in sys.argv[1:] if word not in (*begin_anew, *go_on)]
        raise Interrupted(
            f"interrupted; {output} keeps what is finished",
            hint=f"go on with: {shlex.join(['quantize', *words, *go_on])}",
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a user is told about an exception."""

    message: str
    hint: str | None
    exit_code: int


def explain(error: BaseException) -> Failure:
    """The ordered error map: the first kind that fits decides; what fits none is a bug of ours."""
    if isinstance(error, HalfbyteError):
        return Failure(str(error), error.hint, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", None, EXIT_INTERRUPTED)
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename is not None else ""
        return Failure(
            f"{os.strerror(error.errno)}{where}", _OS_HINTS.get(error.errno), EXIT_FAILURE
        )
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("halfbyte"):
        return Failure(
            f"the package {error.name} is not installed",
            "install halfbyte with its dependencies: pip install halfbyte",
            EXIT_FAILURE,
        )
    if isinstance(error, MemoryError):
        return Failure("out of host memory", _LESS_MEMORY, EXIT_FAILURE)
    # torch.OutOfMemoryError, by name: an error must not be the reason to import torch.
    if type(error).__name__ == "OutOfMemoryError":
        return Failure(f"out of GPU memory: {_first_line(error)}", _LESS_MEMORY, EXIT_FAILURE)
    return Failure(
        f"unexpected {type(error).__name__}: {_first_line(error)}",
        "this is a bug in halfbyte; HALFBYTE_DEBUG=1 shows the traceback, "
        "`quantize env` the versions to report with it",
        EXIT_FAILURE,
    )


_LESS_MEMORY = (
    "use fewer --samples or a shorter --sequence-length; `quantize plan` predicts the peak"
)

_OS_HINTS: Mapping[int, str] = {
    errno.ENOSPC: "free some space, or choose another disk with --output; "
    "what is finished is kept for --resume",
    errno.EDQUOT: "your quota on this disk is used up; choose another with --output",
    errno.EROFS: "the file system is read-only; choose another folder with --output",
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.EMFILE: "raise the limit of open files with `ulimit -n 4096`",
    errno.EIO: "the disk reports a hardware error; check the file against its published hash",
}


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
