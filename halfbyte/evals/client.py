"""HTTP with a server that may be slow, busy or wrong: bounded tries, time and size, and failures in
words."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from halfbyte import env
from halfbyte.errors import EvaluationError, UsageError

if TYPE_CHECKING:
    import httpx

WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try."""
LONGEST_WAIT = 60.0
CONNECT_SECONDS = 10.0
FIND_SECONDS = 60.0
ANSWER_SECONDS = 900.0
LARGEST_REPLY = 128 << 20
"""Bytes; log-probabilities of 100,000 tokens are about 20 MB."""
WORTH_A_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})


class Client:
    """The paths below the address of one server. Threads may share it."""

    def __init__(self, url: str, connections: int) -> None:
        import httpx

        key = env.api_key()
        self.root = server_root(url)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=connections),
        )

    def close(self) -> None:
        self._http.close()

    def find(self, path: str, payload: Any = None) -> Any:
        """The reply as JSON, or None where the server has nothing there. One try."""
        import httpx

        try:
            status, body, _ = self._send(path, payload, FIND_SECONDS)
        except httpx.HTTPError as error:
            raise EvaluationError(
                f"{self.root}: no server answers: {_words(error)}",
                hint="start it, and name its address: --endpoint http://HOST:PORT",
            ) from error
        if status in (401, 403):
            raise self._refused(path, status, body)
        try:
            return json.loads(body) if status == 200 else None
        except (ValueError, RecursionError):
            return None

    def post(self, path: str, payload: Any) -> Any:
        """The reply as JSON. Raises EvaluationError for a request that the server refuses, and for
        one that fails as often as it is tried."""
        import httpx

        for wait in (*WAITS, None):
            asked = 0.0
            try:
                status, body, headers = self._send(path, payload, ANSWER_SECONDS)
            except httpx.HTTPError as error:
                failure = EvaluationError(
                    f"{self.root}{path}: {_words(error)}, in each of {len(WAITS) + 1} tries",
                    hint="see the server's log; with -o the same command goes on from here",
                )
            else:
                if status not in WORTH_A_RETRY:
                    return self._document(path, status, body, headers)
                asked = _retry_after(headers)
                failure = EvaluationError(
                    f"{self.root}{path} answered {status} in each of {len(WAITS) + 1} tries: "
                    f"{_message(body)}",
                    hint="see the server's log, or ask for less at once: --batch-size; "
                    "with -o the same command goes on from here",
                )
            if wait is not None:
                # Not all connections again at the same moment.
                time.sleep(min(LONGEST_WAIT, max(asked, wait * random.uniform(0.75, 1.25))))
        raise failure

    def _document(self, path: str, status: int, body: bytes, headers: Mapping[str, str]) -> Any:
        if status != 200:
            raise self._refused(path, status, body, headers.get("location"))
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EvaluationError(f"{self.root}{path} answered what is no JSON") from error

    def _refused(
        self, path: str, status: int, body: bytes, location: str | None = None
    ) -> EvaluationError:
        if status in (401, 403):
            return EvaluationError(
                f"{self.root}{path} answered {status}: it asks for a key",
                hint="put the server's key into the environment variable OPENAI_API_KEY",
            )
        if location is not None:
            return EvaluationError(
                f"{self.root}{path} answered {status}: it redirects to {location[:200]}",
                hint="name that address: --endpoint",
            )
        return EvaluationError(
            f"{self.root}{path} answered {status}: {_message(body)}",
            hint="--api openai or --api sglang says what the server speaks, --model what it serves",
        )

    def _send(
        self, path: str, payload: Any, seconds: float
    ) -> tuple[int, bytes, Mapping[str, str]]:
        import httpx

        method = "GET" if payload is None else "POST"
        limits = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        url = self.root + path
        with self._http.stream(method, url, json=payload, timeout=limits) as response:
            body = bytearray()
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > LARGEST_REPLY:
                    raise EvaluationError(
                        f"{self.root}{path}: a reply of more than {LARGEST_REPLY >> 20} MiB"
                    )
            return response.status_code, bytes(body), response.headers


def server_root(url: str) -> str:
    """The address that the paths of both APIs follow: without a path of theirs.

    Raises UsageError for what is no plain http address.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        known = False
    if not known or parts.query or parts.fragment:
        raise UsageError(
            f"--endpoint {url!r} is no address of a server", hint="--endpoint http://HOST:PORT"
        )
    if "@" in parts.netloc:  # the address is part of what is saved
        raise UsageError("--endpoint: no password in an address", hint="set OPENAI_API_KEY")
    path = parts.path.rstrip("/")
    for end in ("/v1/completions", "/generate", "/v1"):
        if path.endswith(end):
            path = path.removesuffix(end)
            break
    return f"{parts.scheme}://{parts.netloc}{path}"


def _message(body: bytes) -> str:
    """What the server says went wrong, at most a line of it."""
    text = body[:2000].decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(body)
        if isinstance(document, dict):
            error = document.get("error")
            found = error.get("message") if isinstance(error, dict) else document.get("message")
            text = found if isinstance(found, str) else text
    return " ".join(text.split())[:200] or "nothing"


def _words(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; 0 if it does not, or gives a date."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
