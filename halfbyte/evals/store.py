"""Evaluations of baselines, kept so that none is made twice and none is used that does not fit.

A folder of files, one for each evaluation, named after all that decides its result: checkpoint,
questions, settings, versions. One that differs in anything is another evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.core import fingerprint
from halfbyte.errors import EvaluationError
from halfbyte.evals.integrity import differences
from halfbyte.evals.report import EvalReport
from halfbyte.formats.files import write_atomic

STORE_SCHEMA = 1

Identity = Mapping[str, str]
"""What was evaluated, and how, by the name of each part; `checkpoint` is its fingerprint."""


class BaselineStore:
    """The evaluations in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, identity: Identity) -> EvalReport | None:
        """The evaluation of just this, or None. Raises EvaluationError when its file is damaged."""
        path = self._path(identity)
        if not path.exists():
            return None
        found, report = _read(path)
        if found != dict(identity):
            raise EvaluationError(f"{path}: it is not the evaluation that its name says")
        return report

    def near(self, identity: Identity) -> str | None:
        """The evaluation of the same checkpoint that differs in the fewest parts, and in which;
        None when there is none of it."""
        best: tuple[int, str] | None = None
        for path, found, _ in self._all():
            if found.get("checkpoint") != identity["checkpoint"]:
                continue
            parts = sorted(
                part
                for part in found.keys() | identity.keys()
                if found.get(part) != identity.get(part)
            )
            told = [
                f"{part} was {found.get(part, 'nothing')}, now {identity.get(part, 'nothing')}"
                for part in parts
            ]
            if told and (best is None or len(told) < best[0]):
                more = f" and {len(told) - 3} more" if len(told) > 3 else ""
                best = len(told), f"{path.name}: {'; '.join(told[:3])}{more}"
        return None if best is None else best[1]

    def add(self, identity: Identity, report: EvalReport) -> Path:
        """Keep an evaluation; the path of its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(identity)
        record = {
            "schema_version": STORE_SCHEMA,
            "identity": dict(identity),
            "report": report.to_json(),
        }
        write_atomic(path, json.dumps(record, ensure_ascii=False, allow_nan=False).encode())
        return path

    def baseline_for(self, candidate: EvalReport) -> EvalReport:
        """The one evaluation of another checkpoint, or with another KV cache, that asked what
        `candidate` was asked, in the same way.

        Raises EvaluationError when there is none, with what the nearest differs in, or when there
        are several.
        """
        fitting: list[tuple[Path, EvalReport]] = []
        nearest: tuple[int, str] | None = None
        for path, _, report in self._all():
            same = report.fingerprint == candidate.fingerprint
            if same and report.kv_cache == candidate.kv_cache:
                continue
            found = list(differences(report, candidate))
            if not found:
                fitting.append((path, report))
            elif nearest is None or len(found) < nearest[0]:
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                nearest = len(found), f"; the nearest, {path.name}: {found[0]}{more}"
        if len(fitting) > 1:
            names = ", ".join(
                f"{path.name} of {report.checkpoint}"
                + (f" with KV cache {report.kv_cache}" if report.kv_cache else "")
                for path, report in fitting
            )
            raise EvaluationError(
                f"{self.folder}: {len(fitting)} evaluations fit the candidate: {names}",
                hint="name the file of one of them as the baseline",
            )
        if not fitting:
            raise EvaluationError(
                f"{self.folder}: no evaluation fits the candidate"
                + (nearest[1] if nearest else ""),
                hint="evaluate the baseline in the same way: quantize eval DIR --store "
                f"{self.folder}",
            )
        return fitting[0][1]

    def _path(self, identity: Identity) -> Path:
        return self.folder / f"{fingerprint(dict(identity))}.json"

    def _all(self) -> Iterator[tuple[Path, dict[str, str], EvalReport]]:
        for path in sorted(self.folder.glob("*.json")):
            yield path, *_read(path)


def content_sha256(place: Path) -> str:
    """SHA-256 over the names and bytes of all files below a folder, or over one file."""
    digest = hashlib.sha256()
    found = place.rglob("*") if place.is_dir() else [place]
    for path in sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts):
        digest.update(f"{path.relative_to(place).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def read_baseline(path: Path, candidate: EvalReport) -> EvalReport:
    """The baseline that `path` names: an evaluation, a file of a store, or the store itself, which
    has to have one that fits `candidate`."""
    if path.is_dir():
        return BaselineStore(path).baseline_for(candidate)
    try:
        stored = "identity" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        stored = False  # for the one who reads evaluations to explain
    return _read(path)[1] if stored else EvalReport.read(path)


def _read(path: Path) -> tuple[dict[str, str], EvalReport]:
    try:
        record: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: not a stored evaluation: {error}") from error
    parts = record if isinstance(record, dict) else {}
    if parts.get("schema_version") != STORE_SCHEMA:
        raise EvaluationError(
            f"{path}: schema_version is {parts.get('schema_version')!r:.40}, this version reads "
            f"{STORE_SCHEMA}",
            hint="remove the file and evaluate again",
        )
    identity = parts.get("identity")
    if not isinstance(identity, dict) or not all(isinstance(v, str) for v in identity.values()):
        raise EvaluationError(f"{path}: identity is not an object of strings")
    try:
        return identity, EvalReport.from_json(parts.get("report"))
    except EvaluationError as error:
        raise EvaluationError(f"{path}: {error}", hint=error.hint) from error
