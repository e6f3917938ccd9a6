"""A Hugging Face Hub on loopback: as much of its HTTP protocol as huggingface_hub uses, on files.

Model repositories with branches and pull requests, listings in pages, downloads by range through
redirects to addresses that are signed and expire, uploads by LFS in one part or several, commits.
Xet is not offered. What it sends is counted, and it fails where a test asks it to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch
from urllib.parse import parse_qs, quote, unquote, urlsplit

from halfbyte.formats.files import file_sha256

TOKEN = "hf_loopback"
PAGE = 50
"""Entries of a listing's page."""
PART = 3 << 17
"""Bytes of a part of an upload; what is larger is uploaded in several."""
CHUNK = 1 << 16

FaultKind = Literal["429", "503", "truncate", "reset", "expired", "changed"]


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of a commit: its bytes, and how it is listed."""

    path: Path
    size: int
    oid: str
    """SHA-256 of a large file, git's object id of a small one."""
    lfs: bool


@dataclass
class Repo:
    """A repository. A commit is what it holds by path."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Mapping[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)

    def add(self, ref: str, files: Mapping[str, Blob]) -> str:
        salt = f"{len(self.commits)} {ref}"
        text = salt + "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD /path?query" matches."""

    pattern: str
    act: FaultKind | Callable[[], None]
    times: int = 1
    skip: int = 0
    """Requests that go well before."""


class LoopbackHub:
    """The server, in threads of this process; `folder` is where uploads are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """"METHOD /path?query" of each, in the order of their coming."""
        self.served = 0
        """Bytes of bodies that were sent."""
        self.received = 0
        """Bytes of files that came in uploads."""
        self.objects: dict[str, Path] = {}
        self.signatures: set[str] = set()
        self.lock = threading.RLock()
        self._server = _Server(self)
        port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}"
        """The same server by another name, since a token must not follow to another host."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> LoopbackHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(
        self, name: str, folder: Path, *, hashes: bool = True, gated: bool = False, **more: Blob
    ) -> str:
        """Offer the files of a folder, read where they lie, as repository `name`; its commit.

        Without `hashes` those of shards are made up, for shards that nobody will read whole.
        """
        repo = self.repos.setdefault(name, Repo(gated=gated))
        files = {p.name: _blob(p, hashes) for p in sorted(folder.iterdir()) if p.is_file()}
        return repo.add("main", {**files, **more})

    def fail(
        self, pattern: str, act: FaultKind | Callable[[], None], times: int = 1, skip: int = 0
    ) -> None:
        """Have requests fail; a function is called, and the request then answered as ever."""
        self.faults.append(Fault(pattern, act, times, skip))

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that is to use this Hub, with its caches in `home`."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    @contextmanager
    def in_use(self, home: Path, *, offline: bool = False) -> Iterator[None]:
        """The same for this process, whose huggingface_hub has read its variables already."""
        from huggingface_hub import constants
        from huggingface_hub.utils import close_session

        values: dict[str, Any] = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": (
                self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            ),
            "HF_HUB_OFFLINE": offline,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": True,
        }
        close_session()
        with patch.multiple(constants, **values), patch.dict(os.environ, {"HF_TOKEN": TOKEN}):
            yield
        close_session()

    def take_fault(self, request: str) -> FaultKind | None:
        """Log a request, and say what goes wrong with it."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    if not callable(fault.act):
                        return fault.act
                    fault.act()
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def _blob(path: Path, hashes: bool = True) -> Blob:
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        data = path.read_bytes()
        oid = hashlib.sha1(b"blob %d\0" % size + data, usedforsecurity=False).hexdigest()
        return Blob(path, size, oid, lfs=False)
    oid = file_sha256(path) if hashes else hashlib.sha256(path.name.encode()).hexdigest()
    return Blob(path, size, oid, lfs=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub

    def handle_one(self) -> None:
        """Any request."""
        self.fault = self.hub.take_fault(f"{self.command} {self.path}")
        if self.fault == "reset" and self.command in ("POST", "PUT"):
            return self._reset()
        if self.fault in ("429", "503"):
            self._body()
            wait = {"Retry-After": "0"} if self.fault == "429" else {}
            return self._json({"error": "later"}, int(self.fault), wait)
        url = urlsplit(self.path)
        path, query = unquote(url.path), {k: v[0] for k, v in parse_qs(url.query).items()}
        for pattern, method in _ROUTES:
            if (match := re.fullmatch(pattern, f"{self.command} {path}")) is not None:
                return method(self, query, **match.groupdict())
        self._body()
        return self._json({"error": f"no route for {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    # What is asked.

    def _info(self, _: Mapping[str, str], name: str, rev: str | None = None) -> None:
        if (found := self._found(name, rev or "main")) is not None:
            commit, _files = found
            repo = self.hub.repos[name]
            self._json({"id": name, "sha": commit, "private": repo.private, "siblings": []})

    def _tree(self, query: Mapping[str, str], name: str, rev: str) -> None:
        if (found := self._found(name, rev)) is None:
            return
        entries: list[dict[str, Any]] = []
        for path, blob in sorted(found[1].items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": blob.size}
            entry["oid"] = blob.oid[:40]
            if blob.lfs:
                entry["lfs"] = {"oid": blob.oid, "size": blob.size, "pointerSize": 134}
            entries.append(entry)
        start = int(query.get("cursor", "0"))
        headers = {}
        if start + PAGE < len(entries):
            following = f"{self.hub.endpoint}{urlsplit(self.path).path}?cursor={start + PAGE}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._json(entries[start : start + PAGE], headers=headers)

    def _resolve(self, _: Mapping[str, str], name: str, rev: str, path: str) -> None:
        # A revision may have a slash, which clients quote and we no longer see; a commit has none.
        if (found := self._found(name, rev)) is None:
            return None
        commit, files = found
        blob = files.get(path)
        headers = {"X-Repo-Commit": commit}
        if blob is None:
            return self._json({}, 404, headers | {"X-Error-Code": "EntryNotFound"})
        if not blob.lfs:
            return self._file(blob.path, headers | {"ETag": f'"{blob.oid}"'})
        oid = blob.oid
        if self.fault == "changed":
            oid = hashlib.sha256(b"changed").hexdigest()
        signature = secrets.token_hex(8)
        if self.fault != "expired":
            self.hub.signatures.add(signature)
        with self.hub.lock:
            self.hub.objects.setdefault(blob.oid, blob.path)
        headers["Location"] = (
            f"{self.hub.storage}/cdn/{blob.oid}?Expires=1&Signature={signature}&name={quote(path)}"
        )
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(blob.size)}
        return self._json({}, 302, headers)

    def _cdn(self, query: Mapping[str, str], oid: str) -> None:
        if query.get("Signature") not in self.hub.signatures:
            return self._json({"error": "expired"}, 403)
        if "Authorization" in self.headers:
            return self._json({"error": "a token where it does not belong"}, 400)
        return self._file(self.hub.objects[oid], {"ETag": f'"{oid}"'})

    # What is sent.

    def _create(self, _: Mapping[str, str]) -> None:
        body = json.loads(self._body())
        name = f"{body['organization']}/{body['name']}"
        url = f"{self.hub.endpoint}/{name}"
        if not self._authorized():
            return self._json({"error": "no token"}, 401)
        if name in self.hub.repos:
            return self._json({"url": url, "error": "exists"}, 409)
        private = body.get("private", body.get("visibility") == "private")
        repo = self.hub.repos[name] = Repo(private=bool(private))
        repo.add("main", {})
        return self._json({"url": url, "id": name})

    def _branch(self, _: Mapping[str, str], name: str, branch: str) -> None:
        self._body()
        repo = self.hub.repos[name]
        if branch in repo.refs:
            return self._json({"error": "exists"}, 409)
        repo.refs[branch] = repo.refs["main"]
        return self._json({})

    def _preupload(self, _: Mapping[str, str], name: str, rev: str) -> None:
        body = json.loads(self._body())
        if (found := self._found(name, rev)) is None:
            return
        answer = []
        for file in body["files"]:
            known = found[1].get(file["path"])
            lfs = file["path"].endswith(".safetensors")
            entry = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular"}
            answer.append({**entry, "shouldIgnore": False, "oid": known.oid if known else None})
        self._json({"files": answer})

    def _batch(self, _: Mapping[str, str], name: str) -> None:
        objects = []
        for entry in json.loads(self._body())["objects"]:
            oid, size = entry["oid"], entry["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.objects:
                href = f"{self.hub.storage}/lfs/{oid}"
                upload: dict[str, Any] = {"href": href}
                if size > PART:
                    parts = range(1, -(-size // PART) + 1)
                    upload["header"] = {f"{n:05d}": f"{href}/{n}" for n in parts}
                    upload["header"]["chunk_size"] = str(PART)
                answer["actions"] = {
                    "upload": upload,
                    "verify": {"href": f"{self.hub.endpoint}/lfs/{oid}/verify"},
                }
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _put(self, _: Mapping[str, str], oid: str, part: str | None = None) -> None:
        data = self._body()
        path = self.hub.folder / (oid if part is None else f"{oid}.{part}")
        path.write_bytes(data)
        with self.hub.lock:
            self.hub.received += len(data)
        if part is None and not self._keep(oid, path):
            return
        self._json({}, headers={"ETag": hashlib.md5(data, usedforsecurity=False).hexdigest()})

    def _complete(self, _: Mapping[str, str], oid: str) -> None:
        parts = json.loads(self._body())["parts"]
        path = self.hub.folder / oid
        with path.open("wb") as file:
            for part in parts:
                piece = self.hub.folder / f"{oid}.{part['partNumber']}"
                file.write(piece.read_bytes())
                piece.unlink()
        if self._keep(oid, path):
            self._json({})

    def _keep(self, oid: str, path: Path) -> bool:
        if file_sha256(path) != oid:
            self._json({"error": "not that object"}, 400)
            return False
        self.hub.objects[oid] = path
        return True

    def _verify(self, _: Mapping[str, str], oid: str) -> None:
        body = json.loads(self._body())
        known = self.hub.objects.get(oid)
        fits = known is not None and known.stat().st_size == body["size"]
        self._json({}, 200 if fits else 404)

    def _commit(self, query: Mapping[str, str], name: str, rev: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        if (found := self._found(name, rev)) is None:
            return None
        files = dict(found[1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                path = self.hub.folder / secrets.token_hex(8)
                path.write_bytes(base64.b64decode(value["content"]))
                files[value["path"]] = _blob(path)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self._json({"error": f"{value['path']} was never uploaded"}, 400)
                path = self.hub.objects[value["oid"]]
                files[value["path"]] = Blob(path, path.stat().st_size, value["oid"], lfs=True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repo = self.hub.repos[name]
        ref, url = rev, f"{self.hub.endpoint}/{name}"
        answer: dict[str, Any] = {"success": True}
        if query.get("create_pr"):
            number = 1 + sum(r.startswith("refs/pr/") for r in repo.refs)
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{url}/discussions/{number}"
        answer["commitOid"] = repo.add(ref, files)
        answer["commitUrl"] = f"{url}/commit/{answer['commitOid']}"
        return self._json(answer)

    def _yaml(self, _: Mapping[str, str]) -> None:
        self._body()
        self._json({"errors": [], "warnings": []})

    # How it is answered.

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _found(self, name: str, rev: str) -> tuple[str, Mapping[str, Blob]] | None:
        """Commit and files of a revision; None when the answer is given already."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._authorized()):
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._json({}, 404 if self._authorized() else 401, headers)
            return None
        if repo.gated:
            self._json({}, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Ask for access"})
            return None
        if (commit := repo.commit_of(rev)) is None:
            headers = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev {rev}"}
            self._json({}, 404, headers)
            return None
        return commit, repo.commits[commit]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(
        self, answer: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        data = json.dumps(answer).encode()
        self._head(status, len(data), {"Content-Type": "application/json", **(headers or {})})
        self._send(data)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, data: bytes) -> None:
        if self.command == "HEAD":
            return
        self.wfile.write(data)
        with self.hub.lock:
            self.hub.served += len(data)

    def _file(self, path: Path, headers: Mapping[str, str]) -> None:
        """A file, or the range of it that is asked for; half of it under some faults."""
        size = path.stat().st_size
        begin, end, status = 0, size, 200
        if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is not None:
            begin, end, status = int(asked[1]), min(size, int(asked[2] or size - 1) + 1), 206
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        self._head(status, end - begin, {**headers, "Accept-Ranges": "bytes"})
        cut = begin + (end - begin) // 2 if self.fault in ("truncate", "reset") else end
        with path.open("rb") as file:
            file.seek(begin)
            while begin < cut and self.command != "HEAD":
                data = file.read(min(CHUNK, cut - begin))
                self._send(data)
                begin += len(data)
        if cut < end:
            self.close_connection = True
            if self.fault == "reset":
                self._reset()

    def _reset(self) -> None:
        """End the connection the hard way, whatever is on its way."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()


_NAME = r"(?P<name>[^/]+/[^/]+?)"
_OID = r"(?P<oid>[0-9a-f]{64})"
_ROUTES: tuple[tuple[str, Callable[..., None]], ...] = (
    (rf"GET /api/models/{_NAME}", _Handler._info),
    (rf"GET /api/models/{_NAME}/revision/(?P<rev>.+)", _Handler._info),
    (rf"GET /api/models/{_NAME}/tree/(?P<rev>.+)", _Handler._tree),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _Handler._resolve),
    (rf"(?:GET|HEAD) /cdn/{_OID}", _Handler._cdn),
    (r"POST /api/repos/create", _Handler._create),
    (rf"POST /api/models/{_NAME}/branch/(?P<branch>.+)", _Handler._branch),
    (rf"POST /api/models/{_NAME}/preupload/(?P<rev>.+)", _Handler._preupload),
    (rf"POST /api/models/{_NAME}/commit/(?P<rev>.+)", _Handler._commit),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    (rf"PUT /lfs/{_OID}(?:/(?P<part>\d+))?", _Handler._put),
    (rf"POST /lfs/{_OID}", _Handler._complete),
    (rf"POST /lfs/{_OID}/verify", _Handler._verify),
    (r"POST /api/validate-yaml", _Handler._yaml),
)
