"""A running server as the model: OpenAI's completions, as vLLM and others speak them, or SGLang's
`/generate`.

Requests are those of lm-eval's `local-completions` and `sglang-generate` models, with prompts as
token ids. The client is our own, since a server can be wrong in ways that those score without an
error: log-probabilities that are missing, a prompt that was cut, another tokenizer, and SGLang's
greedy flag, which they read the other way round. Here each reply is checked against its request.

OpenAI: https://platform.openai.com/docs/api-reference/completions (with `echo` and `logprobs`).
SGLang: https://docs.sglang.ai/basic_usage/native_api.html
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from halfbyte import env
from halfbyte.calibration.data import load_tokenizer
from halfbyte.errors import EvaluationError, UsageError
from halfbyte.evals.asking import Engine
from halfbyte.progress import Progress

if TYPE_CHECKING:
    import httpx

Api = Literal["openai", "sglang"]

PROBE = "In 1984 the naïve café charged £3.50; def f(x): return x ** 2  # 東京"
"""Text that tokenizers split in different ways."""

WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try."""
LONGEST_WAIT = 60.0
CONNECT_SECONDS = 10.0
FIND_SECONDS = 60.0
ANSWER_SECONDS = 900.0
LARGEST_REPLY = 128 << 20
"""Bytes; log-probabilities of 100,000 tokens are about 20 MB."""
WORTH_A_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})
SEED = 1234
"""lm-eval's default."""

SGLANG_FLAGS = (
    "tp_size", "dp_size", "ep_size", "kv_cache_dtype", "attention_backend", "moe_runner_backend",
    "enable_deterministic_inference",
)  # fmt: skip
"""What of SGLang's own settings may change an answer."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens. `api` None asks it what it speaks."""

    url: str
    api: Api | None = None
    model: str | None = None
    """Name of the model there, for a server that has several."""


class Scored(NamedTuple):
    """What a server says of the tokens of a prompt but the first."""

    log_probs: list[float]
    greedy: list[bool]
    """Whether each is the most likely one."""


class Wire(Protocol):
    """What one API calls things: requests to make, replies to read. `read_*` raise KeyError,
    TypeError, IndexError or ValueError for a reply of another form."""

    path: str

    def score(self, ids: list[int]) -> dict[str, Any]: ...

    def read_scored(self, reply: Any, ids: list[int]) -> Scored: ...

    def generate(self, ids: list[int], new: int, stop: Mapping[str, Any], more: Any) -> Any: ...

    def read_generated(self, reply: Any) -> str: ...

    def prompt_tokens(self, reply: Any) -> int | None:
        """How many tokens of prompt the server has seen, where it tells."""

    def split(self, client: Client, text: str) -> list[int] | int | None:
        """How the server splits a text: token ids, their number, or None if it does not tell."""


class OpenAI:
    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self.model = model

    def score(self, ids: list[int]) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": [ids],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": SEED,
            "echo": True,
        }

    def read_scored(self, reply: Any, ids: list[int]) -> Scored:
        found = reply["choices"][0]["logprobs"]
        values, tops = found["token_logprobs"], found["top_logprobs"]
        # The last is of the token that was generated, where there is one.
        _same_length(len(values) - (len(values) > len(ids)), len(ids))
        values, tops = values[1 : len(ids)], tops[1 : len(ids)]
        best = [max(map(float, top.values())) for top in tops]
        log_probs = [float(value) for value in values]
        return Scored(log_probs, [a == b for a, b in zip(log_probs, best, strict=True)])

    def generate(self, ids: list[int], new: int, stop: Mapping[str, Any], more: Any) -> Any:
        return {
            "prompt": [ids],
            "model": self.model,
            "max_tokens": new,
            "seed": SEED,
            **stop,
            **more,
        }

    def read_generated(self, reply: Any) -> str:
        text = reply["choices"][0]["text"]
        return text if isinstance(text, str) else _not_text()

    def prompt_tokens(self, reply: Any) -> int | None:
        return _count(_object(reply.get("usage")).get("prompt_tokens"))

    def split(self, client: Client, text: str) -> list[int] | int | None:
        whole = {"model": self.model, "prompt": text}
        # vLLM's own addition to the API.
        told = _object(client.find("/tokenize", {**whole, "add_special_tokens": False}))
        if isinstance(ids := told.get("tokens"), list):
            return ids
        reply = client.post(self.path, {**whole, "max_tokens": 1, "temperature": 0})
        return self.prompt_tokens(_object(reply))


class SGLang:
    path = "/generate"

    def score(self, ids: list[int]) -> dict[str, Any]:
        return {
            "input_ids": [ids],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
            "return_logprob": True,
        }

    def read_scored(self, reply: Any, ids: list[int]) -> Scored:
        found = _only(reply)["meta_info"]
        rows, tops = found["input_token_logprobs"], found["input_top_logprobs"]
        _same_length(len(rows), len(ids))
        if [row[1] for row in rows] != ids:
            raise ValueError("it has scored other tokens than those it was sent")
        log_probs = [float(row[0]) for row in rows[1:]]
        return Scored(log_probs, [a == top[0][1] for a, top in zip(ids[1:], tops[1:], strict=True)])

    def generate(self, ids: list[int], new: int, stop: Mapping[str, Any], more: Any) -> Any:
        return {"sampling_params": {"max_new_tokens": new, **stop, **more}, "input_ids": [ids]}

    def read_generated(self, reply: Any) -> str:
        text = _only(reply)["text"]
        return text if isinstance(text, str) else _not_text()

    def prompt_tokens(self, reply: Any) -> int | None:
        return _count(_object(_object(_only(reply)).get("meta_info")).get("prompt_tokens"))

    def split(self, client: Client, text: str) -> list[int] | int | None:
        one = {"max_new_tokens": 1, "temperature": 0}
        body = {"text": text, "sampling_params": one, "return_logprob": True}
        reply = client.post(self.path, {**body, "logprob_start_len": 0})
        with contextlib.suppress(KeyError, IndexError, TypeError):
            return [row[1] for row in _only(reply)["meta_info"]["input_token_logprobs"]]
        return self.prompt_tokens(reply)


def _only(reply: Any) -> Any:
    return reply[0] if isinstance(reply, list) else reply


def _not_text() -> str:
    raise TypeError("the text is missing")


def _same_length(found: int, sent: int) -> None:
    if found != sent:
        raise ValueError(f"it has log-probabilities of {found} tokens for a prompt of {sent}")


class Client:
    """HTTP with bounded tries, time and size, and failures in words."""

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
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"--endpoint {url!r} is no address of a server", hint="--endpoint http://HOST:PORT"
        )
    if "@" in parts.netloc:  # the address is part of what is saved
        raise UsageError("--endpoint: no password in an address", hint="set OPENAI_API_KEY")
    path = parts.path.rstrip("/")
    for known in ("/v1/completions", "/generate", "/v1"):
        if path.endswith(known):
            path = path.removesuffix(known)
            break
    return f"{parts.scheme}://{parts.netloc}{path}"


@contextlib.contextmanager
def open_endpoint(
    endpoint: Endpoint,
    checkpoint_path: Path,
    *,
    parallel: int,
    max_length: int | None,
    limit: int,
    max_new_tokens: int,
    scoring: Sequence[str],
    progress: Progress,
) -> Iterator[Engine]:
    """A server that claims to serve `checkpoint_path`, as an engine.

    Before the first question it is asked for its model, its context length, how it splits a text
    into tokens and, when `scoring` names tasks that need them, for log-probabilities of a prompt.
    `max_length` None takes the smaller of the server's context length and `limit`.

    Raises EvaluationError for a server that cannot be reached, serves another model, cuts at less
    than `max_length`, splits text in another way, or has no log-probabilities.
    """
    tokenizer = load_tokenizer(checkpoint_path)
    client = Client(endpoint.url, parallel)
    try:
        api = endpoint.api or _detect(client)
        served = _sglang(client, endpoint) if api == "sglang" else _openai(client, endpoint)
        progress.note(f"{client.root} serves {served.model} by {served.name}")
        if max_length is not None and served.limit is not None and max_length > served.limit:
            raise EvaluationError(
                f"{client.root} takes prompt and answer of {served.limit} tokens, "
                f"--max-length is {max_length}",
                hint=f"use --max-length {served.limit}, or start the server with a longer context",
            )
        max_length = max_length or min(limit, served.limit or limit)
        lm = _language_model(client, served.wire, tokenizer, max_new_tokens)
        told = served.wire.split(client, PROBE)
        _check_tokenizer(client.root, told, tokenizer, checkpoint_path, progress)
        if scoring:
            _check_scores(client.root, lm, scoring)
        yield Engine(
            lm,
            f"{api} endpoint",
            served.dtype,
            served.versions,
            parallel,
            max_length,
            max_new_tokens,
            served.flags,
            {"url": client.root, "model": served.model},
            parallel=True,
        )
    finally:
        client.close()


class Served(NamedTuple):
    """What a server says of itself."""

    wire: Wire
    name: str
    model: str
    dtype: str
    limit: int | None
    """Tokens of prompt and answer together; None when it does not say."""
    versions: dict[str, str]
    flags: dict[str, str]


AS_SERVED = "as served"
_MODEL_INFO = ("/get_model_info", "/model_info")
_SERVER_INFO = ("/get_server_info", "/server_info")


def _detect(client: Client) -> Api:
    """What a server speaks. SGLang's servers speak both, and tell more by their own."""
    if any("model_path" in _object(client.find(path)) for path in _MODEL_INFO):
        return "sglang"
    if isinstance(_object(client.find("/v1/models")).get("data"), list):
        return "openai"
    raise EvaluationError(
        f"{client.root}: neither an OpenAI-compatible server (/v1/models) nor SGLang's "
        "(/get_model_info)",
        hint="say what it speaks: --api openai or --api sglang",
    )


def _openai(client: Client, endpoint: Endpoint) -> Served:
    models = _models(client)
    if not models:
        raise EvaluationError(
            f"{client.root}/v1/models lists no model", hint="is it an OpenAI-compatible server?"
        )
    if endpoint.model is None and len(models) > 1:
        raise EvaluationError(
            f"{client.root} serves {', '.join(models)}", hint=f"choose one: --model {min(models)}"
        )
    name = endpoint.model or next(iter(models))
    if name not in models:
        raise EvaluationError(
            f"{client.root} does not serve {name}; it serves {', '.join(models)}",
            hint=f"choose one: --model {min(models)}",
        )
    model = models[name]
    software = _text(model.get("owned_by")) or "server"
    version = _text(_object(client.find("/version")).get("version"))
    return Served(
        OpenAI(name),
        "OpenAI's completions",
        name,
        AS_SERVED,
        _count(model.get("max_model_len")),
        {software: version} if version else {},
        {},
    )


def _models(client: Client) -> dict[str, dict[str, Any]]:
    """What OpenAI's API lists, by name. SGLang's servers have it, too."""
    listed = _object(client.find("/v1/models")).get("data")
    entries = map(_object, listed if isinstance(listed, list) else [])
    return {name: entry for entry in entries if (name := _text(entry.get("id")))}


def _sglang(client: Client, endpoint: Endpoint) -> Served:
    if endpoint.model is not None:
        raise UsageError(
            "--model: SGLang's /generate has one model",
            hint="leave --model out, or use --api openai",
        )
    model = next((found for p in _MODEL_INFO if (found := _object(client.find(p)))), {})
    info = next((found for p in _SERVER_INFO if (found := _object(client.find(p)))), {})
    limit = _count(info.get("context_length"))
    for listed in _models(client).values():
        limit = limit or _count(listed.get("max_model_len"))
    version = _text(info.get("version"))
    return Served(
        SGLang(),
        "SGLang's /generate",
        _text(model.get("model_path")) or "a model",
        _text(info.get("dtype")) or AS_SERVED,
        limit,
        {"sglang": version} if version else {},
        {name: json.dumps(info[name]) for name in SGLANG_FLAGS if name in info},
    )


def _language_model(client: Client, wire: Wire, tokenizer: Any, max_new_tokens: int) -> Any:
    """The server as a language model of lm-eval, which asks one question a request."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )

    lock = threading.Lock()  # two threads in one fast tokenizer may fail
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    class ServerModel(TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = (
            tokenizer.bos_token_id if tokenizer.bos_token_id is not None else eot_token_id
        )

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not has_bos_prefix(string, tokenizer.bos_token)
            with lock:
                ids: list[int] = tokenizer.encode(string, add_special_tokens=add_special_tokens)
            return ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [self._score(context, choice) for _, context, choice in requests]

        def _score(self, context: list[int], choice: list[int]) -> tuple[float, bool]:
            scored = self.scores(context + choice)
            begin = len(context) - 1  # the first token of a prompt has no log-probability
            return sum(scored.log_probs[begin:]), all(scored.greedy[begin:])

        def scores(self, ids: list[int]) -> Scored:
            """Of all tokens but the first. Raises EvaluationError when they are not all there."""
            reply = client.post(wire.path, wire.score(ids))
            try:
                scored = wire.read_scored(reply, ids)
                if not all(map(math.isfinite, scored.log_probs)):
                    raise ValueError("a log-probability is not finite")
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise EvaluationError(
                    f"{client.root} returns no usable log-probabilities of a prompt: "
                    f"{_reason(error)}",
                    hint="vLLM and SGLang return them, unless the prompt is longer than their "
                    "context; without them only tasks that generate can be scored",
                ) from error
            return scored

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, prompt: str, arguments: dict[str, Any]) -> str:
            more = normalize_gen_kwargs(dict(arguments), max_new_tokens)
            new = more.pop("max_gen_toks")
            more.pop("do_sample", None)
            until = handle_stop_sequences(more.pop("until", None), tokenizer.eos_token)
            # A server leaves special tokens out of the text in which it looks for stop strings.
            singles = [self.tok_encode(word, add_special_tokens=False) for word in until]
            stop_ids = [ids[0] for ids in singles if len(ids) == 1 and ids[0] in special]
            stop = {"stop": until, "stop_token_ids": stop_ids}
            ids = self.tok_encode(prompt)
            reply = client.post(wire.path, wire.generate(ids, new, stop, more))
            try:
                text = wire.read_generated(reply)
                seen = wire.prompt_tokens(reply)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise EvaluationError(
                    f"{client.root}: a reply without an answer: {_reason(error)}"
                ) from error
            if seen is not None and seen != len(ids):
                raise EvaluationError(
                    f"{client.root} has read {seen} tokens of a prompt of {len(ids)}",
                    hint="start the server with a longer context, or without cutting prompts",
                )
            answer: str = postprocess_generated_text(text, until, None)
            return answer

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

    return ServerModel()


def _check_tokenizer(
    root: str, told: list[int] | int | None, tokenizer: Any, folder: Path, progress: Progress
) -> None:
    if told is None:
        progress.note(f"{root} does not tell how it splits a text; its tokenizer is not checked")
        return
    # A server may or may not put a first token before what it is sent as a text.
    plain, whole = (tokenizer.encode(PROBE, add_special_tokens=flag) for flag in (False, True))
    if told in (plain, whole) or told in (len(plain), len(whole)):
        return
    count = told if isinstance(told, int) else len(told)
    what = f"as {count} tokens" if count != len(plain) else "as other tokens"
    raise EvaluationError(
        f"{root} reads a text {what}, the tokenizer of {folder} as {len(plain)}",
        hint="name the folder of the checkpoint that the server serves",
    )


def _check_scores(root: str, lm: Any, scoring: Sequence[str]) -> None:
    """Refuse a server by which every choice would be as likely as every other."""
    try:
        scored = lm.scores(lm.tok_encode(PROBE))
    except EvaluationError as error:
        raise EvaluationError(
            f"{error}; {_names(scoring)} compared by them", hint=error.hint
        ) from error
    if len(set(scored.log_probs)) == 1:
        raise EvaluationError(
            f"{root} gives each of {len(scored.log_probs)} tokens the log-probability "
            f"{scored.log_probs[0]:g}; {_names(scoring)} compared by them",
            hint="without true log-probabilities only tasks that generate can be scored",
        )


def _names(tasks: Sequence[str]) -> str:
    return f"the choices of {', '.join(tasks[:3])}{', ...' if len(tasks) > 3 else ''} are"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _message(body: bytes) -> str:
    """What the server says went wrong, at most a line of it."""
    text = body[:2000].decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        document = _object(json.loads(body))
        found = _object(document.get("error")).get("message") or document.get("message")
        text = _text(found) or text
    return " ".join(text.split())[:200] or "nothing"


def _words(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; 0 if it does not, or gives a date."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
