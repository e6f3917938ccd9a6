"""What the APIs of servers call things: the requests to make, and the replies to read.

Requests are those of lm-eval's `local-completions` and `sglang-generate` models, with prompts as
token ids.

OpenAI: https://platform.openai.com/docs/api-reference/completions (with `echo` and `logprobs`).
SGLang: https://docs.sglang.ai/basic_usage/native_api.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from halfbyte.evals.client import Client

Api = Literal["openai", "sglang"]

SEED = 1234
"""lm-eval's default."""


class Scored(NamedTuple):
    """What a server says of the tokens of a prompt but the first."""

    log_probs: list[float]
    greedy: list[bool]
    """Whether each is the most likely one."""


class Wire(Protocol):
    """What one API calls things: requests to make, replies to read. `read_*` raise KeyError,
    TypeError, IndexError or ValueError for a reply of another form."""

    api: Api
    title: str
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
    api: Api = "openai"
    title = "OpenAI's completions"
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
        return as_count(as_object(reply.get("usage")).get("prompt_tokens"))

    def split(self, client: Client, text: str) -> list[int] | int | None:
        whole = {"model": self.model, "prompt": text}
        # vLLM's own addition to the API.
        told = as_object(client.find("/tokenize", {**whole, "add_special_tokens": False}))
        if isinstance(ids := told.get("tokens"), list):
            return ids
        reply = client.post(self.path, {**whole, "max_tokens": 1, "temperature": 0})
        return self.prompt_tokens(as_object(reply))


class SGLang:
    api: Api = "sglang"
    title = "SGLang's /generate"
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
        return as_count(as_object(as_object(_only(reply)).get("meta_info")).get("prompt_tokens"))

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


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def as_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
