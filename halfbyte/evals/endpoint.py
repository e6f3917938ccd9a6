"""A running server as the model: OpenAI's completions, as vLLM and others speak them, or SGLang's
`/generate`.

Requests are those of lm-eval's own models for these (`evals.wires`). The client is ours, since a
server can be wrong in ways that those score without an error: log-probabilities that are missing, a
prompt that was cut, another tokenizer, and SGLang's greedy flag, which they read the other way
round. Here a server is asked first, and each reply is checked against its request.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.calibration.data import load_tokenizer
from halfbyte.errors import EvaluationError, UsageError
from halfbyte.evals.asking import Engine
from halfbyte.evals.client import Client
from halfbyte.evals.wires import (
    Api,
    OpenAI,
    Scored,
    SGLang,
    Wire,
    as_count,
    as_object,
    as_text,
)
from halfbyte.progress import Progress

PROBE = "In 1984 the naïve café charged £3.50; def f(x): return x ** 2  # 東京"
"""Text that tokenizers split in different ways."""

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
        served = _served(client, endpoint)
        progress.note(f"{client.root} serves {served.model} by {served.wire.title}")
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
            f"{served.wire.api} endpoint",
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


def describe(endpoint: Endpoint) -> dict[str, str]:
    """What a server says of itself that may decide its answers, by name."""
    client = Client(endpoint.url, 1)
    try:
        served = _served(client, endpoint)
    finally:
        client.close()
    told = {"model": served.model, "dtype": served.dtype, "context": str(served.limit)}
    return {**told, **served.versions, **served.flags}


class Served(NamedTuple):
    """What a server says of itself."""

    wire: Wire
    model: str
    dtype: str
    limit: int | None
    """Tokens of prompt and answer together; None when it does not say."""
    versions: dict[str, str]
    flags: dict[str, str]


AS_SERVED = "as served"
_MODEL_INFO = ("/get_model_info", "/model_info")
_SERVER_INFO = ("/get_server_info", "/server_info")


def _served(client: Client, endpoint: Endpoint) -> Served:
    api = endpoint.api or _detect(client)
    return _sglang(client, endpoint) if api == "sglang" else _openai(client, endpoint)


def _detect(client: Client) -> Api:
    """What a server speaks. SGLang's servers speak both, and tell more by their own."""
    if any("model_path" in as_object(client.find(path)) for path in _MODEL_INFO):
        return "sglang"
    if isinstance(as_object(client.find("/v1/models")).get("data"), list):
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
    software = as_text(model.get("owned_by")) or "server"
    version = as_text(as_object(client.find("/version")).get("version"))
    return Served(
        OpenAI(name),
        name,
        AS_SERVED,
        as_count(model.get("max_model_len")),
        {software: version} if version else {},
        {},
    )


def _models(client: Client) -> dict[str, dict[str, Any]]:
    """What OpenAI's API lists, by name. SGLang's servers have it, too."""
    listed = as_object(client.find("/v1/models")).get("data")
    entries = map(as_object, listed if isinstance(listed, list) else [])
    return {name: entry for entry in entries if (name := as_text(entry.get("id")))}


def _sglang(client: Client, endpoint: Endpoint) -> Served:
    if endpoint.model is not None:
        raise UsageError(
            "--model: SGLang's /generate has one model",
            hint="leave --model out, or use --api openai",
        )
    model = next((found for p in _MODEL_INFO if (found := as_object(client.find(p)))), {})
    info = next((found for p in _SERVER_INFO if (found := as_object(client.find(p)))), {})
    limit = as_count(info.get("context_length"))
    for listed in _models(client).values():
        limit = limit or as_count(listed.get("max_model_len"))
    version = as_text(info.get("version"))
    return Served(
        SGLang(),
        as_text(model.get("model_path")) or "a model",
        as_text(info.get("dtype")) or AS_SERVED,
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
            ids = self.tok_encode(prompt, more.pop("add_special_tokens", None))
            until = handle_stop_sequences(more.pop("until", None), tokenizer.eos_token)
            # A server leaves special tokens out of the text in which it looks for stop strings.
            ends = [self.tok_encode(word, add_special_tokens=False) for word in until]
            stop_ids = [end[0] for end in ends if len(end) == 1 and end[0] in special]
            stop = {"stop": until, "stop_token_ids": stop_ids}
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


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
