"""Answers that outlive a killed evaluation, and go to no other one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.cli import main
from halfbyte.errors import EvaluationError
from halfbyte.evals.asking import as_done, batches
from halfbyte.evals.kept import KeptAnswers, RawAnswer, keep_answers, kept_path, question_keys
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.progress import SilentProgress

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"
TASKS = ["--tasks", str(DEMO / "tasks"), "--task", "glm_arc_like", "--task", "glm_recall"]
LIMIT = 3
ASKED = LIMIT * 4 + LIMIT
"""Choices of the one task, answers to the other."""
SILENT = SilentProgress()


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


BATCHES: list[dict[str, RawAnswer]] = [
    {"a": "text \n", "b": (-1 / 3, True)},
    {"c": (-7.0, False)},
    {"d": "", "e": "é"},
]


def write(path: Path, identity: dict[str, Any]) -> None:
    with keep_answers(path, identity, SILENT) as kept:
        for batch in BATCHES:
            kept.add(list(batch), list(batch.values()))


def read(path: Path, identity: dict[str, Any]) -> dict[str, RawAnswer]:
    with keep_answers(path, identity, SILENT) as kept:
        return {key: found for key in "abcdef" if (found := kept.get(key)) is not None}


@given(cut=st.integers(0, 400))
def test_what_a_killed_process_leaves_is_whole_batches(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("kept") / "answers"
    write(path, {"checkpoint": "x"})
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    count = whole[:cut].count(b"\n") - 1
    expected = {key: value for batch in BATCHES[: max(0, count)] for key, value in batch.items()}
    assert read(path, {"checkpoint": "x"}) == expected
    # It goes on from there.
    write(path, {"checkpoint": "x"})
    assert read(path, {"checkpoint": "x"}) == BATCHES[0] | BATCHES[1] | BATCHES[2]


def test_another_evaluation_gets_nothing(tmp_path: Path) -> None:
    path, notes = tmp_path / "answers", Notes()
    write(path, {"checkpoint": "x", "settings": {"limit": 3}})
    with keep_answers(path, {"checkpoint": "x", "settings": {"limit": 4}}, notes) as kept:
        assert kept.get("a") is None
    assert notes.notes == [f"{path}: kept answers are of another settings"]
    assert read(path, {"checkpoint": "x", "settings": {"limit": 3}}) == {}
    path.write_bytes(b"not\x00ours\n" * 3)
    assert read(path, {"checkpoint": "x"}) == {}


def test_two_evaluations_do_not_share_a_file(tmp_path: Path) -> None:
    with (
        keep_answers(tmp_path / "answers", {}, SILENT),
        pytest.raises(EvaluationError, match="another evaluation is keeping its answers here"),
        keep_answers(tmp_path / "answers", {}, SILENT),
    ):
        pass


def test_questions_are_told_apart() -> None:
    greedy, sampled = ("Q", {"temperature": 0}), ("Q", {"temperature": 1})
    keys = question_keys("generate_until", [greedy, sampled, sampled])
    assert len({*keys, *question_keys("loglikelihood", [greedy])}) == 4
    assert keys == question_keys("generate_until", [greedy, sampled, sampled])


def test_batches_keep_what_belongs_together() -> None:
    choices = [(prompt, choice) for prompt in ("ab", "abcd", "a") for choice in "AB"]
    assert batches(choices, 2) == [[2, 3], [0, 1], [4, 5]]
    how = [{"until": [], "n": n} for n in (1, 2)]
    answers = [("abc", how[0]), ("a", how[1]), ("abcd", how[0])]
    assert batches(answers, 2) == [[2, 0], [1]]


def test_an_error_ends_the_work() -> None:
    begun, over = [], threading.Event()

    def work(task: int) -> int:
        begun.append(task)
        if task == 3:
            raise EvaluationError("three")
        if task > 3:  # as long as an answer takes
            over.wait(60)
        return -task

    with pytest.raises(EvaluationError, match="three"):
        list(as_done(work, range(1000), 4))
    over.set()
    assert len(begun) <= 3 + 4
    assert sorted(as_done(work, [5, 6, 7, 8], 2)) == [(5, -5), (6, -6), (7, -7), (8, -8)]


def evaluate(output: Path, *words: str, checkpoint: Path = MODEL) -> int:
    command = ["eval", str(checkpoint), *TASKS, "--limit", str(LIMIT), "--batch-size", "2"]
    return main([*command, "-q", "-o", str(output), *words])


KILLED = """
import os, signal, sys
from halfbyte.cli import main
from halfbyte.evals.kept import KeptAnswers

def add(self, *batch, add=KeptAnswers.add):
    add(self, *batch)
    os.environ["LEFT"] = str(int(os.environ["LEFT"]) - 1)
    if os.environ["LEFT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

KeptAnswers.add = add
sys.exit(main(sys.argv[1:]))
"""


def evaluate_and_die(output: Path, batches: int, *words: str) -> None:
    """The same in a process that is killed as soon as it has kept some batches."""
    command = ["eval", str(MODEL), *TASKS, "--limit", str(LIMIT), "--batch-size", "2"]
    result = subprocess.run(
        [sys.executable, "-c", KILLED, *command, "-q", "-o", str(output), *words],
        env={**os.environ, "LEFT": str(batches)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the questions that were not answered from the file."""
    keys: list[str] = []

    def add(self: KeptAnswers, batch: Any, answers: Any, add: Any = KeptAnswers.add) -> None:
        keys.extend(batch)
        add(self, batch, answers)

    monkeypatch.setattr(KeptAnswers, "add", add)
    return keys


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    output = tmp_path_factory.mktemp("uninterrupted") / "out.json"
    assert evaluate(output) == 0
    assert not kept_path(output).exists()
    return output.read_bytes()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The answers that a killed evaluation has left."""
    output = tmp_path_factory.mktemp("killed") / "out.json"
    evaluate_and_die(output, 3)
    assert not output.exists()
    return kept_path(output).read_bytes()


def test_killed_and_repeated(
    tmp_path: Path, uninterrupted: bytes, left: bytes, asked: list[str]
) -> None:
    output = tmp_path / "out.json"
    kept_path(output).write_bytes(left)
    kept = sum(len(json.loads(line)) for line in left.splitlines()[1:])
    assert 0 < kept < ASKED
    assert evaluate(output) == 0
    assert len(asked) == ASKED - kept
    assert output.read_bytes() == uninterrupted
    assert not kept_path(output).exists()


def test_answers_go_to_no_other_evaluation(tmp_path: Path, left: bytes, asked: list[str]) -> None:
    output, other = tmp_path / "out.json", tmp_path / "model"
    # Another checkpoint of the same architecture: a bit in the middle of one weight.
    shutil.copytree(MODEL, other)
    info = min(open_checkpoint(other).tensors.values(), key=lambda info: info.nbytes)
    with (other / info.shard).open("r+b") as file:
        file.seek((info.begin + info.end) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    for words, checkpoint in ((["--fresh"], MODEL), (["--max-length", "999"], MODEL), ([], other)):
        kept_path(output).write_bytes(left)
        asked.clear()
        assert evaluate(output, *words, checkpoint=checkpoint) == 0
        assert len(asked) == ASKED, (words, checkpoint)


def test_killed_while_a_server_answers(
    tmp_path: Path, server: Any, uninterrupted: bytes, asked: list[str]
) -> None:
    output, words = tmp_path / "out.json", ("--endpoint", server.url)
    evaluate_and_die(output, 9, *words)
    left = kept_path(output).read_bytes()
    assert len(left.splitlines()) == 1 + 9  # each answer by itself
    server.questions.clear()
    assert evaluate(output, *words) == 0
    assert (len(asked), len(server.questions)) == (ASKED - 9, ASKED - 9 + 1)  # and the probe
    ours, theirs = json.loads(output.read_bytes())["tasks"], json.loads(uninterrupted)["tasks"]
    assert [task["metrics"] for task in ours["tasks"]] == [
        task["metrics"] for task in theirs["tasks"]
    ]
    # What is served there under another name has answers of its own.
    kept_path(output).write_bytes(left)
    server.models = ("other",)
    asked.clear()
    assert evaluate(output, *words) == 0
    assert len(asked) == ASKED
