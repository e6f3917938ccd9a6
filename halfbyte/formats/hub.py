"""Repositories of the Hugging Face Hub: what one holds at a commit, headers of shards, whole files.

A revision is resolved to a commit once, and everything else is asked of that commit, so what is
read belongs together. All of it goes through huggingface_hub: endpoint, token, proxies and Xet are
set up as for `hf download`, and small files lie in its cache. What comes is held against the Hub's
listing of the commit: sizes, and the hash of every file that is downloaded whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    build_hf_headers,
    disable_progress_bars,
    get_session,
    hf_raise_for_status,
    logging,
)

from halfbyte.core import Checkpoint, Repository, RepositoryFile
from halfbyte.errors import CheckpointError, HubError
from halfbyte.formats.checkpoint import (
    Header,
    merged,
    parse_header,
    read_json_object,
    read_weight_map,
    shard_names,
    side_files,
)
from halfbyte.formats.files import file_sha256
from halfbyte.formats.folder import CONFIG_FILE, INDEX_FILE
from halfbyte.models import RepositoryName

T = TypeVar("T")

ATTEMPTS = 6
"""Times that a request is made before its failure is final."""
LONGEST_WAIT = 300.0
"""Seconds to wait at most between two of them, whatever the Hub asks for."""
FIRST_REQUEST = 128 << 10
"""Bytes of a shard that are asked for at once: the headers of GLM-5.2 take about 105 KB."""
HEADERS_AT_ONCE = 8

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


def open_repository(name: RepositoryName) -> Checkpoint:
    """Describe the checkpoint in a repository by its config, its index and the headers of its
    shards, read by range; config and side files are downloaded.

    Raises `HubError` for what the Hub refuses or does not have, `CheckpointError` as
    `formats.checkpoint.open_checkpoint` does.
    """
    repository = list_repository(name)
    place = str(repository)
    if CONFIG_FILE not in repository.files:
        raise CheckpointError(f"{place} has no {CONFIG_FILE}")
    side = side_files(repository.files)
    config_path = download(repository, CONFIG_FILE)
    weight_map = None
    if INDEX_FILE in repository.files:
        weight_map = read_weight_map(download(repository, INDEX_FILE))
    names = shard_names(place, weight_map, repository.files)
    for file in side:
        download(repository, file)
    with ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="header") as pool:
        headers = list(pool.map(lambda shard: _header(repository, shard), names))
    tensors, shards = merged(place, weight_map, dict(zip(names, headers, strict=True)))
    config = read_json_object(config_path)
    return Checkpoint(config_path.parent, config, tensors, shards, side, repository)


def list_repository(name: RepositoryName) -> Repository:
    """What a repository holds at the commit that its revision stands for now. Raises `HubError`."""
    with explained(str(name)):
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled
        api = hub()
        commit = persistently(lambda: api.model_info(name.name, revision=name.revision)).sha
        if not commit:
            raise HubError(f"the Hub names no commit for {name}")
        entries = persistently(lambda: list(api.list_repo_tree(name.name, revision=commit)))
    files: dict[str, RepositoryFile] = {}
    for entry in entries:
        if not _is_inside(entry.path):
            raise HubError(
                f"{name} lists the file {entry.path!a}, which leads out of the repository"
            )
        if isinstance(entry, RepoFile) and "/" not in entry.path:
            sha256 = entry.lfs.sha256 if entry.lfs is not None else None
            files[entry.path] = RepositoryFile(entry.size, sha256, entry.blob_id)
    return Repository(name.name, commit, files)


def download(repository: Repository, file: str, folder: Path | None = None) -> Path:
    """Where a whole file of the repository now lies on this disk: in `folder`, or by default in
    the cache of huggingface_hub, which keeps it.

    Its size and hash are those of the listing. Raises `HubError`; a file that is not the listed one
    is removed first, so that the next attempt downloads it again.
    """
    with explained(f"{repository}, file {file}"):
        path = persistently(
            lambda: Path(
                hf_hub_download(repository.name, file, revision=repository.commit, local_dir=folder)
            )
        )
    if (fault := difference(path, repository.files[file])) is not None:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise HubError(
            f"{file} of {repository} is not what the Hub lists: {fault}",
            hint="run the same command again; it downloads the file anew",
        )
    return path


def difference(path: Path, listed: RepositoryFile) -> str | None:
    """How a file on the disk differs from the one that the Hub lists; None when it does not."""
    size = path.stat().st_size
    if size != listed.size:
        return f"it has {size} bytes, {listed.size} are listed"
    if listed.sha256 is not None:
        found = file_sha256(path)
        return f"SHA-256 is {found}, {listed.sha256} is listed" if found != listed.sha256 else None
    blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            blob.update(chunk)
    found = blob.hexdigest()
    return f"git's object id is {found}, {listed.blob} is listed" if found != listed.blob else None


def hub() -> HfApi:
    """The Hub as the user has set it up for huggingface_hub, which prints nothing here: what fails
    is told once, by our own errors, without addresses that are signed."""
    disable_progress_bars()
    logging.set_verbosity_error()
    return HfApi(library_name="halfbyte")


def persistently(action: Callable[[], T]) -> T:
    """The result of `action`, tried again while its failure is one that passes.

    That is what the network does, what the Hub says when it is busy, and an address in its storage
    that has expired: the next attempt asks the Hub for a new one.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return action()
        except (OSError, httpx.HTTPError, RuntimeError) as error:
            wait = _wait(error, attempt)
            if wait is None:
                raise
            time.sleep(min(wait, LONGEST_WAIT))
    return action()


def _wait(error: BaseException, attempt: int) -> float | None:
    """Seconds until the next attempt is worth it; None when it never is."""
    backoff = float(2 ** (attempt - 1))
    if isinstance(error, (GatedRepoError, OfflineModeIsEnabled)):
        return None
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status, url = error.response.status_code, error.response.request.url
        if status in _TRANSIENT:
            asked = error.response.headers.get("Retry-After", "")
            return float(asked) if asked.isdigit() else backoff
        elsewhere = not str(url).startswith(constants.ENDPOINT + "/") or "Expires=" in str(url)
        return 0.0 if status == 403 and elsewhere else None
    if isinstance(error, httpx.TransportError):
        return backoff
    if _is_short(error):
        return backoff
    # It wraps what kept it from the Hub, and what ended an upload.
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)) and error.__cause__ is not None:
        return _wait(error.__cause__, attempt)
    return None


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of huggingface_hub about `what` into `HubError`, without addresses or tokens."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise HubError(
            f"{what} is on the Hugging Face Hub, and HF_HUB_OFFLINE forbids to ask it",
            hint="unset HF_HUB_OFFLINE, or give the folder of a downloaded checkpoint",
        ) from error
    except GatedRepoError as error:
        name = what.partition("@")[0].partition(",")[0]
        raise HubError(
            f"{what} is gated: the Hub answers {_status(error)}",
            hint=f"accept its terms at {constants.ENDPOINT}/{name}, then: hf auth login",
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"the Hub has no revision {what}", hint="give a branch, tag or commit of the repository"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"the Hub has no repository {what.partition(',')[0]}, or you may not see it: it answers"
            f" {_status(error)}",
            hint="check the name; for a private repository: hf auth login",
        ) from error
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
            raise _unreachable(what, error.__cause__) from error
        raise HubError(f"the Hub does not have {what}") from error
    except HFValidationError as error:
        raise HubError(f"{what} cannot be a repository: {str(error).splitlines()[0]}") from error
    except (httpx.HTTPError, HfHubHTTPError) as error:
        raise _unreachable(what, error) from error
    except RuntimeError as error:  # what ended an upload
        if not isinstance(error.__cause__, (httpx.HTTPError, HfHubHTTPError)):
            raise
        raise _unreachable(what, error.__cause__) from error
    except OSError as error:
        if not _is_short(error):
            raise
        raise HubError(
            f"{what}: the Hub sends another number of bytes than it lists",
            hint="run the same command again; if it stays so, the repository is damaged",
        ) from error


def _is_short(error: BaseException) -> bool:
    """How huggingface_hub says that a body was not as long as announced."""
    return type(error) is OSError and "Consistency check failed" in str(error)


def _unreachable(what: str, error: BaseException) -> HubError:
    if isinstance(error, HfHubHTTPError):
        reason = f"answers {_status(error)}"
        if error.response.status_code in (401, 403):
            return HubError(
                f"{what}: {constants.ENDPOINT} {reason}",
                hint="hf auth login, with a token that may do this",
            )
    else:
        reason = f"cannot be reached ({type(error).__name__})"
    if _wait(error, 1) is not None:
        reason += f", after {ATTEMPTS} attempts"
    return HubError(
        f"{what}: {constants.ENDPOINT} {reason}",
        hint="check the network and HF_ENDPOINT, then run the same command again",
    )


def _status(error: HfHubHTTPError) -> str:
    said = error.server_message
    return f"{error.response.status_code}{f' ({said})' if said else ''}"


def _header(repository: Repository, shard: str) -> Header:
    """The header of a shard, by one request, and a second one if it is longer than usual."""
    size = repository.files[shard].size
    first = _read_range(repository, shard, 0, min(size, FIRST_REQUEST)) if size else b""

    def read(begin: int, end: int) -> bytes:
        if end <= len(first):
            return first[begin:end]
        return first[begin:] + _read_range(repository, shard, len(first), end)

    return parse_header(shard, size, read)


def _read_range(repository: Repository, file: str, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` of a file. Raises `HubError`."""
    url = hf_hub_url(repository.name, file, revision=repository.commit)
    # Else a proxy may compress, and ranges would be those of something else.
    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
    headers["Accept-Encoding"] = "identity"
    listed = repository.files[file]

    def attempt() -> bytes:
        with get_session().stream("GET", url, headers=headers, timeout=60.0) as response:
            hf_raise_for_status(response)
            _require_unchanged(repository, file, (*response.history, response)[0])
            found = response.headers.get("Content-Range", "nothing")
            expected = f"bytes {begin}-{end - 1}/{listed.size}"
            if response.status_code != 206 or found != expected:
                raise HubError(
                    f"{file} of {repository}: asked for {expected}, the Hub sends {found} with"
                    f" status {response.status_code}"
                )
            data = b""
            for chunk in response.iter_raw():
                data += chunk
                if len(data) > end - begin:
                    raise HubError(f"{file} of {repository}: the Hub sends more than {expected}")
        if len(data) < end - begin:
            raise httpx.RemoteProtocolError(f"{len(data)} of {end - begin} bytes came")
        return data

    with explained(f"{repository}, file {file}"):
        return persistently(attempt)


def _require_unchanged(repository: Repository, file: str, answer: httpx.Response) -> None:
    """Raises `HubError` when the Hub's first answer is about another file than the listed one."""
    commit = answer.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
    etag = answer.headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG, "").strip('W/"')
    listed = repository.files[file].sha256
    if commit not in (None, repository.commit) or (etag and listed and etag != listed):
        raise HubError(
            f"{file} of {repository} changed while it was read: the Hub lists {listed}, now it"
            f" sends {etag or 'no ETag'} of commit {commit}",
            hint="a commit cannot change; check what HF_ENDPOINT points to",
        )


def _is_inside(path: str) -> bool:
    return (
        path.isprintable()
        and not path.startswith("/")
        and "\\" not in path
        and not {"", ".", ".."} & set(path.split("/"))
    )
