"""Publishes a finished checkpoint on the Hugging Face Hub: verified before, compared after.

Large files are uploaded first, a few at a time, and one commit then makes all of them visible: a
repository never shows half a model. What the Hub has received of a push that was killed it need not
receive again, so going on is pushing again, and nothing is kept here for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.core import Repository
from halfbyte.errors import HubError, UsageError, VerifyError
from halfbyte.evals.report import checkpoint_fingerprint
from halfbyte.formats.checkpoint import open_checkpoint, side_files
from halfbyte.formats.folder import CARD_FILE, CONFIG_FILE, GATE_FILE, INDEX_FILE, REPORT_FILE
from halfbyte.models import REPOSITORY, RepositoryName
from halfbyte.progress import Progress, SilentProgress
from halfbyte.quantize.verify import verify

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

FILES_AT_ONCE = 4
"""Files that are uploaded side by side; addresses to upload to expire, so they are asked for as
they are needed."""


@dataclass(frozen=True)
class Publication:
    """What was published, or would be."""

    repository: str
    revision: str | None
    private: bool
    files: Mapping[str, int]
    """Name -> bytes, of all that belongs to the checkpoint."""
    notes: tuple[str, ...]
    """What is worth knowing before, and what `force` has overruled."""
    commit: str | None = None
    """None when nothing was published."""
    url: str | None = None
    """Of the commit, or of the pull request."""

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def push(
    folder: Path,
    name: str,
    *,
    revision: str | None = None,
    pull_request: bool = False,
    public: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Publication:
    """Publish the checkpoint in `folder` as the repository `name`, on the branch `revision`.

    A repository that does not exist is made, private unless `public`. With `force` a folder is
    published although it does not verify or its gate did not pass. `dry_run` asks nothing of the
    Hub. Raises VerifyError for what `force` would overrule, UsageError, CheckpointError, and
    HubError for what the Hub refuses or has made of it.
    """
    progress = progress or SilentProgress()
    if not REPOSITORY.fullmatch(name):
        raise UsageError(f"{name} is no repository", hint="write ORG/NAME")
    if pull_request and revision not in (None, "main"):
        raise UsageError("--pr and --revision exclude each other: a pull request is for main")
    notes, hashes = _examined(folder, force, progress)
    files = _files(folder)
    if ignored := sorted(p.name for p in folder.iterdir() if p.name not in files):
        notes.append(f"not published: {', '.join(ignored)}")
    if CARD_FILE not in files:
        notes.append(f"there is no {CARD_FILE}: the repository gets no model card")
    sizes = {file: path.stat().st_size for file, path in files.items()}
    planned = Publication(name, revision, not public, sizes, tuple(notes))
    if dry_run:
        return planned
    with _explained(name):
        private = _prepare_repository(planned, pull_request)
        if public and private:
            notes.append(
                f"{name} is private and stays so; hf repos settings {name} --public shows it to all"
            )
        commit, url = _upload(files, planned, pull_request, progress)
    from halfbyte.formats.hub import list_repository

    _require_equal(files, hashes, list_repository(RepositoryName(name, commit)))
    progress.finish()
    return replace(planned, private=private, notes=tuple(notes), commit=commit, url=url)


def _examined(folder: Path, force: bool, progress: Progress) -> tuple[list[str], Mapping[str, str]]:
    """Notes on a folder that may be published, and the SHA-256 of its shards as far as verified."""
    result = verify(folder, progress=progress)
    faults = [str(mismatch) for mismatch in result.mismatches]
    gate = folder / GATE_FILE
    notes = [*result.notes]
    if not gate.exists():
        notes.append(f"there is no {GATE_FILE}: whether accuracy held is not known")
    else:
        verdict, judged = _verdict(gate)
        if verdict != "pass":
            faults.append(f"gate: {GATE_FILE}: the verdict is {verdict}")
        elif judged != checkpoint_fingerprint(open_checkpoint(folder)):
            faults.append(f"gate: {GATE_FILE}: the verdict is on another checkpoint")
    if faults and not force:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise VerifyError(
            f"{folder} is not fit to be published: {faults[0]}{more}",
            hint=f"quantize verify {folder} shows everything; --force publishes it all the same",
        )
    hashes = {}
    if not faults and (folder / REPORT_FILE).exists():
        hashes = json.loads((folder / REPORT_FILE).read_bytes())["shards"]
    return [*notes, *(f"published in spite of {fault}" for fault in faults)], hashes


def _verdict(path: Path) -> tuple[str, str]:
    """What `quantize gate -o` saved, and the fingerprint of what it judged; "unreadable" for
    anything else."""
    try:
        record = json.loads(path.read_bytes())
        return str(record["verdict"])[:40], str(record["candidate"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable", ""


def _files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint by name, those that are needed to load it last.

    Only what belongs to it: neither the work folder nor what a crash left. Links may lead to
    anything, so those are left out, too; raises VerifyError when a shard is one.
    """
    present = {p.name for p in folder.iterdir() if p.is_file() and not p.is_symlink()}
    shards = open_checkpoint(folder).shards
    if links := [name for name in shards if name not in present]:
        raise VerifyError(
            f"{folder / links[0]} is a link, and links are not published",
            hint="copy the files that links lead to: cp -rL DIR COPY",
        )
    wanted = [
        *shards,
        *side_files(present),
        *(CARD_FILE, GATE_FILE, REPORT_FILE, INDEX_FILE, CONFIG_FILE),
    ]
    return {name: folder / name for name in wanted if name in present}


def _prepare_repository(planned: Publication, pull_request: bool) -> bool:
    """Make repository and branch if need be; whether the repository is private.

    Raises HubError when it holds other weights than ours, or all can see what none should.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    from halfbyte.formats.hub import hub, list_repository, persistently

    api, name = hub(), planned.repository
    try:
        private = bool(persistently(lambda: api.model_info(name)).private)
    except RepositoryNotFoundError:
        if pull_request:
            raise
        persistently(lambda: api.create_repo(name, private=planned.private, exist_ok=True))
        private = planned.private
    if planned.private and not private:
        raise HubError(f"{name} is public already", hint="publish there with --public")
    branch = planned.revision
    if branch is not None:
        persistently(lambda: api.create_branch(name, branch=branch, exist_ok=True))
    there = list_repository(RepositoryName(name, branch)).files
    foreign = [f for f in sorted(there) if f.endswith(".safetensors") and f not in planned.files]
    if foreign:
        raise HubError(
            f"{name} holds {len(foreign)} shards that are not ours, {foreign[0]} the first, which"
            " a reader would take for a part of the model",
            hint=f'hf repos delete-files {name} "*.safetensors", or another --revision',
        )
    return private


def _upload(
    files: Mapping[str, Path], planned: Publication, pull_request: bool, progress: Progress
) -> tuple[str, str]:
    """Upload what the Hub does not have yet, and commit; the commit and where to see it."""
    from huggingface_hub import CommitOperationAdd

    from halfbyte.formats.hub import hub, persistently

    api, name, revision = hub(), planned.repository, planned.revision
    additions = [CommitOperationAdd(file, str(path)) for file, path in files.items()]
    progress.start("upload", planned.nbytes, "bytes")
    for group in _groups(additions):

        def send(group: Sequence[CommitOperationAdd] = group) -> None:
            api.preupload_lfs_files(
                name, group, revision=revision, create_pr=pull_request, free_memory=False
            )

        persistently(send)
        progress.advance(sum(planned.files[addition.path_in_repo] for addition in group))

    def commit() -> Any:
        return api.create_commit(
            name,
            additions,
            commit_message="Upload checkpoint",
            revision=revision,
            create_pr=pull_request,
        )

    # A commit that is made twice is empty the second time; a pull request would be there twice.
    made = commit() if pull_request else persistently(commit)
    return str(made.oid), str(made.pr_url or made.commit_url)


def _groups(additions: Sequence[CommitOperationAdd]) -> Iterator[Sequence[CommitOperationAdd]]:
    for start in range(0, len(additions), FILES_AT_ONCE):
        yield additions[start : start + FILES_AT_ONCE]


def _require_equal(
    files: Mapping[str, Path], hashes: Mapping[str, str], published: Repository
) -> None:
    """Raises HubError unless the Hub lists every file as it is here, and was when it was verified
    to have one of the `hashes`."""
    from halfbyte.formats.hub import difference

    for name, path in files.items():
        listed = published.files.get(name)
        if listed is None:
            fault: str | None = "it is not there"
        elif name in hashes and listed.sha256 is not None:
            fault = None
            if listed.sha256 != hashes[name]:
                fault = f"SHA-256 is {listed.sha256}, {hashes[name]} was verified"
        else:
            fault = difference(path, listed)
        if fault is not None:
            raise HubError(
                f"{published} does not hold {name} as it is in {path.parent}: {fault}",
                hint="push again; if the folder was changed meanwhile, verify it first",
            )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Also of what huggingface_hub reports as a ValueError: a bad model card, a full account."""
    from halfbyte.formats.hub import explained

    with explained(name):
        try:
            yield
        except ValueError as error:
            raise HubError(f"{name}: {' '.join(str(error).split())[:400]}") from error
