"""Answers that a model has given so far, kept in a file, so that an evaluation that was killed
need not ask again.

The first line says whose answers these are: the checkpoint's fingerprint, the settings, the tasks
and their versions, the server. Each further line holds a batch of answers. An answer is found by a
hash of its question, and only in a file of exactly the same evaluation: another model never gets
this one's answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from halfbyte.errors import EvaluationError
from halfbyte.progress import Progress

KEPT_SCHEMA = 1

RawAnswer: TypeAlias = str | tuple[float, bool]
"""As lm-eval has it: a text; or the log-likelihood of a choice, and whether greedy decoding would
give it."""


def kept_path(output: Path) -> Path:
    """Where the answers are kept while the evaluation that ends in `output` runs."""
    return output.with_name(output.name + ".answers")


def question_keys(kind: str, questions: Sequence[Sequence[Any]]) -> list[str]:
    """A key for each question: a hash of all that is asked, and which time it is asked, since a
    task may want several samples of one answer."""
    seen: Counter[str] = Counter()
    keys = []
    for question in questions:
        digest = hashlib.sha256(json.dumps([kind, *question]).encode()).hexdigest()
        keys.append(f"{digest}:{seen[digest]}")
        seen[digest] += 1
    return keys


class KeptAnswers:
    """Answers by the key of their question. Without a file they last as long as the object."""

    def __init__(self, answers: dict[str, RawAnswer], file: BinaryIO | None = None) -> None:
        self._answers = answers
        self._file = file

    def get(self, key: str) -> RawAnswer | None:
        return self._answers.get(key)

    def add(self, keys: Sequence[str], answers: Sequence[RawAnswer]) -> None:
        """Keep a batch, as a whole or not at all. It survives the death of the process."""
        batch = list(zip(keys, answers, strict=True))
        self._answers.update(batch)
        if self._file is not None:
            self._file.write(json.dumps(batch).encode() + b"\n")
            self._file.flush()


@contextlib.contextmanager
def keep_answers(
    path: Path | None, identity: Mapping[str, Any], progress: Progress
) -> Iterator[KeptAnswers]:
    """The answers of the evaluation that `identity` describes, those in the file at `path` first.

    Answers of any other evaluation are dropped, with a note that says what is different. None for
    `path` keeps nothing. The file stays until the caller removes it.

    Raises EvaluationError when another process keeps its answers there.
    """
    if path is None:
        yield KeptAnswers({})
        return
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EvaluationError(
                f"{path}: another evaluation is keeping its answers here",
                hint="wait for it to end, or give this one another -o",
            ) from error
        file.seek(0)
        header = json.loads(json.dumps({"schema_version": KEPT_SCHEMA, **identity}))
        found = _line(file.readline())
        answers: dict[str, RawAnswer] = {}
        if found == header:
            answers = _read(file)
            if answers:
                progress.note(f"{path}: {len(answers):,} answers are kept")
        else:
            if found is not None:
                progress.note(f"{path}: kept answers are of another {_difference(found, header)}")
            file.truncate(0)
            file.write(json.dumps(header).encode() + b"\n")
            file.flush()
        yield KeptAnswers(answers, file)


def _read(file: BinaryIO) -> dict[str, RawAnswer]:
    """All whole batches from here on; what a killed process left of one is cut off."""
    answers: dict[str, RawAnswer] = {}
    end = file.tell()
    for line in iter(file.readline, b""):
        batch = _line(line)
        if not isinstance(batch, list) or not all(_is_answer(entry) for entry in batch):
            break
        answers.update((key, _answer(value)) for key, value in batch)
        end = file.tell()
    file.truncate(end)
    file.seek(end)
    return answers


def _line(line: bytes) -> Any:
    """The JSON of a line; None for one that is not whole."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None


def _is_answer(entry: Any) -> bool:
    match entry:
        case [str(), str()] | [str(), [int() | float(), bool()]]:
            return True
    return False


def _answer(value: Any) -> RawAnswer:
    return value if isinstance(value, str) else (float(value[0]), value[1])


def _difference(found: Any, header: Mapping[str, Any]) -> str:
    """The first part of the identity that differs, in words."""
    if not isinstance(found, dict):
        return "kind"
    return next(name for name in header if found.get(name) != header[name])
