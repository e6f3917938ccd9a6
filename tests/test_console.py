"""What goes to stdout and to stderr in each mode, progress, and the error map."""

from __future__ import annotations

import errno
import io
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.console import (
    Column,
    Console,
    Failure,
    Interrupted,
    Mode,
    Table,
    explain,
    render,
    resumable,
)
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.progress import SilentProgress
from halfbyte.progress_display import BarProgress, LineProgress

TABLE = Table(
    columns=(Column("name"), Column("bytes", number=True), Column("reason")),
    rows=(("experts", "450.9 GB", "most of the [bytes]"), ("norms", "1 kB", "one dimension")),
    total=("total", "450.9 GB", ""),
)

TABLE_TEXT = """\
name         bytes   reason
────────────────────────────────────────
experts   450.9 GB   most of the [bytes]
norms         1 kB   one dimension
────────────────────────────────────────
total     450.9 GB"""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def speak(console: Console) -> None:
    console.line("a line")
    console.table(TABLE)
    console.note("a note")
    console.detail("a detail")
    console.warning("a warning")
    console.result({"path": "out"}, quiet="out")


@pytest.mark.parametrize(
    ("mode", "stdout", "stderr"),
    [
        ("human", f"a line\n{TABLE_TEXT}\n", "a note\nwarning: a warning\n"),
        ("json", '{\n  "schema_version": 1,\n  "path": "out"\n}\n', "warning: a warning\n"),
        ("quiet", "out\n", ""),
    ],
)
def test_modes(mode: Mode, stdout: str, stderr: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    speak(Console(mode, stdout=out, stderr=err))
    assert (out.getvalue(), err.getvalue()) == (stdout, stderr)


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_failures_show_in_every_mode_and_only_on_stderr(mode: Mode) -> None:
    out, err = io.StringIO(), io.StringIO()
    Console(mode, stdout=out, stderr=err).failure(Failure("it broke", "mend it", 1))
    assert (out.getvalue(), err.getvalue()) == ("", "error: it broke\nhint: mend it\n")


def test_verbose_shows_details() -> None:
    err = io.StringIO()
    Console(verbose=True, stderr=err).detail("a detail")
    assert err.getvalue() == "a detail\n"


def test_table_wraps_text_but_not_numbers_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = re.sub(r"\x1b\[\d*m", "", render(TABLE, Terminal())).splitlines()
    assert max(map(len, lines)) <= 30
    assert any("450.9 GB" in line for line in lines)


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[3" not in render(TABLE, Terminal())


# Progress.


def progress_kind(console: Console) -> type:
    with console.working() as progress:
        return type(progress)


@pytest.mark.parametrize(
    ("mode", "stream", "variable", "expected"),
    [
        ("human", Terminal, None, BarProgress),
        ("human", io.StringIO, None, LineProgress),
        ("human", Terminal, ("TERM", "dumb"), LineProgress),
        ("human", Terminal, ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), SilentProgress),
        ("json", Terminal, None, SilentProgress),
        ("quiet", Terminal, None, SilentProgress),
    ],
)
def test_progress_suits_mode_and_terminal(
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    stream: Callable[[], io.StringIO],
    variable: tuple[str, str] | None,
    expected: type,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    if variable:
        monkeypatch.setenv(*variable)
    assert progress_kind(Console(mode, stderr=stream())) is expected


def test_line_progress_is_sparse() -> None:
    now = 0.0
    stream = io.StringIO()
    progress = LineProgress(stream, every=10, clock=lambda: now)
    progress.start("quantize", 8_000_000_000, "bytes")
    for _ in range(8):
        now += 4
        progress.advance(1_000_000_000)
    progress.note("layers.3: a note")
    progress.finish()
    progress.finish()
    assert stream.getvalue().splitlines() == [
        "quantize: 8.0 GB",
        "quantize: 3.0 GB of 8.0 GB, 250.0 MB/s, 20.0 s left",
        "quantize: 6.0 GB of 8.0 GB, 250.0 MB/s, 8.0 s left",
        "layers.3: a note",
        "quantize: took 32.0 s",
    ]


def test_a_phase_ends_the_one_before() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, clock=iter([0.0, 2.0, 2.0, 2.1]).__next__)
    progress.start("embed", 3, "sequences")
    progress.start("solve", 4, "layers")
    progress.finish()
    assert stream.getvalue().splitlines() == [
        "embed: 3 sequences",
        "embed: took 2.0 s",
        "solve: 4 layers",  # too short to say how long
    ]


def test_bar_progress_leaves_a_line_per_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = BarProgress(stream)
    progress.start("quantize", 2_000, "bytes")
    progress.advance(1_000)
    progress.note("half [way]")
    progress.start("verify", 5, "tensors")
    progress.advance(5)
    progress.finish()
    progress.finish()
    shown = stream.getvalue()
    assert "half [way]" in shown
    assert "quantize: took" in shown
    assert "verify: took" in shown


def test_what_libraries_print_stays_out_of_the_result() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console("json", stdout=out, stderr=err)
    with console.working():
        print("chatter")
    console.result({})
    assert json.loads(out.getvalue()) == {"schema_version": 1}
    assert err.getvalue() == "chatter\n"


# Errors.


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "message", "hint", "exit_code"),
    [
        (CheckpointError("shard is short", hint="copy it"), "shard is short", "copy it", 1),
        (UsageError("both"), "both", None, 2),
        (Interrupted("interrupted", hint="go on"), "interrupted", "go on", 130),
        (KeyboardInterrupt(), "interrupted", None, 130),
        (OSError(errno.ENOSPC, "", "out/a"), "No space left on device: out/a", "--resume", 1),
        (FileNotFoundError(errno.ENOENT, "", "a"), "No such file or directory: a", None, 1),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            "the package x is not installed",
            "pip install",
            1,
        ),
        (MemoryError(), "out of host memory", "--samples", 1),
        (OutOfMemoryError("CUDA: 3\nmore"), "out of GPU memory: CUDA: 3", "--samples", 1),
        (ValueError("odd"), "unexpected ValueError: odd", "HALFBYTE_DEBUG=1", 1),
    ],
)
def test_error_map(error: BaseException, message: str, hint: str | None, exit_code: int) -> None:
    failure = explain(error)
    assert (failure.message, failure.exit_code) == (message, exit_code)
    assert (hint in failure.hint) if hint and failure.hint else failure.hint == hint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_tells_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantize", "my model", "-o", "out", "--overwrite"])
    before = signal.getsignal(signal.SIGTERM)
    finished = "out keeps what is finished"
    # A shell starts what runs in the background with SIGINT ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match=finished) as caught, resumable(Path("out")):
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert caught.value.hint == "go on with: quantize 'my model' -o out --resume"
    assert signal.getsignal(signal.SIGTERM) is before
