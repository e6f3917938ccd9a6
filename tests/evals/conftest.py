"""The embedded model behind a server on the loopback interface, and ways for it to misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.calibration.data import load_tokenizer
from halfbyte.evals.model import load_model

MODEL = Path(__file__).resolve().parents[2] / "halfbyte" / "demo" / "glm-nano-fp8"


class Nano:
    """Log-probabilities and greedy answers, one prompt at a time, by plain calls of the model."""

    def __init__(self) -> None:
        self.model = load_model(MODEL)
        self.tokenizer = load_tokenizer(MODEL)
        self._lock = threading.Lock()

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """Of every token after each prefix, [tokens, vocabulary]."""
        with self._lock, torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def generate(
        self, ids: list[int], new: int, stop: list[str], stop_ids: list[int], plain: bool = True
    ) -> str:
        """`plain` leaves special tokens out."""
        ends = {*self.model.config.eos_token_id, *stop_ids}
        found: list[int] = []
        with self._lock, torch.inference_mode():
            step = self.model(torch.tensor([ids]), use_cache=True)
            while len(found) < new:
                token = int(step.logits[0, -1].argmax())
                if token in ends:
                    break
                found.append(token)
                text = self.tokenizer.decode(found, skip_special_tokens=plain)
                if any(word in text for word in stop):
                    return text[: min(text.index(word) for word in stop if word in text)]
                cache = step.past_key_values
                step = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        return self.tokenizer.decode(found, skip_special_tokens=plain)


@dataclass
class Server:
    """A server of `nano`. The fields are what a test may change."""

    nano: Nano
    url: str = ""
    apis: tuple[str, ...] = ("openai",)
    models: tuple[str, ...] = ("nano",)
    limit: int | None = 1024
    """Context length that it tells."""
    cuts_at: int = 10**9
    """Tokens of a prompt that it keeps, without a word."""
    key: str | None = None
    refusals: list[int] = field(default_factory=list)
    """Statuses that the next answers have instead."""
    retry_after: str | None = None
    redirect: str | None = None
    spoil: Callable[[Any], Any] = lambda reply: reply
    """What is done to a good reply."""
    split: Callable[[list[int]], list[int]] = lambda ids: ids
    """What its tokenizer does otherwise than the folder's."""
    tells_tokens: bool = True
    on_question: Callable[[], None] = lambda: None
    questions: list[Any] = field(default_factory=list)
    """Bodies of the requests that were answered, probes left out."""
    most_at_once: int = 0

    def answer(self, path: str, body: Any) -> Any:
        """The reply as JSON, or None where there is nothing."""
        if "openai" in self.apis:
            if path == "/v1/models":
                listed = [
                    {"id": name, "owned_by": "vllm", "max_model_len": self.limit}
                    for name in self.models
                ]
                return {"object": "list", "data": listed}
            if path == "/version":
                return {"version": "0.25.1"}
            if path == "/tokenize" and self.tells_tokens:
                return {"tokens": self._ids(body["prompt"])}
            if path == "/v1/completions" and body["model"] in self.models:
                return self._completion(body)
        if "sglang" in self.apis:
            if path == "/get_model_info":
                return {"model_path": "/models/nano", "is_generation": True}
            if path == "/get_server_info":
                # Of all that is there. A key must not get into a report.
                secret = {"api_key": "secret", "model_path": "/models/nano"}
                told = {"version": "0.5.9", "context_length": self.limit, "tp_size": 2}
                return {**secret, **told}
            if path == "/generate":
                return self._generate(body)
        return None

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.split(self.nano.tokenizer.encode(prompt))
        (ids,) = prompt
        self.questions.append(prompt)
        self.on_question()
        return ids[-self.cuts_at :]

    def _completion(self, body: Any) -> Any:
        ids = self._ids(body["prompt"])
        usage = {"prompt_tokens": len(ids)} if self.tells_tokens else None
        if not body.get("echo"):
            stop, stop_ids = body.get("stop", []), body.get("stop_token_ids", [])
            plain = body.get("skip_special_tokens", True)
            text = self.nano.generate(ids, body["max_tokens"], stop, stop_ids, plain)
            return {"choices": [{"index": 0, "text": text}], "usage": usage}
        table = self.nano.log_probs(ids)
        ids = [*ids, int(table[-1].argmax())]  # and the token that it generates
        names = [f"token_id:{token}" for token in range(table.shape[1])]
        values: list[float | None] = [None]
        tops: list[dict[str, float] | None] = [None]
        for row, token in zip(table, ids[1:], strict=True):
            best = int(row.argmax())
            values.append(float(row[token]))
            tops.append({names[best]: float(row[best]), names[token]: float(row[token])})
        logprobs = {"token_logprobs": values, "top_logprobs": tops}
        text = self.nano.tokenizer.decode(ids)
        return {"choices": [{"index": 0, "text": text, "logprobs": logprobs}], "usage": usage}

    def _generate(self, body: Any) -> Any:
        ids = self._ids(body.get("input_ids") or body["text"])
        settings = body["sampling_params"]
        meta: dict[str, Any] = {"prompt_tokens": len(ids)}
        text = ""
        if body.get("return_logprob"):
            table = self.nano.log_probs(ids)
            best = table.argmax(-1).tolist()
            meta["input_token_logprobs"] = [[None, ids[0], None]] + [
                [float(row[token]), token, None] for row, token in zip(table, ids[1:], strict=False)
            ]
            meta["input_top_logprobs"] = [None] + [
                [[float(row[token]), token, None]]
                for row, token in zip(table[:-1], best[:-1], strict=True)
            ]
        else:
            stop, stop_ids = settings.get("stop", []), settings.get("stop_token_ids", [])
            plain = settings.get("skip_special_tokens", True)
            text = self.nano.generate(ids, settings["max_new_tokens"], stop, stop_ids, plain)
        reply = {"text": text, "meta_info": meta}
        return [reply] if "input_ids" in body else reply


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    at_once, lock = [0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _reply(self, body: Any) -> None:
            if server.redirect is not None and body is not None:
                return self._send(307, {}, location=server.redirect)
            wanted = f"Bearer {server.key}" if server.key else None
            if wanted and self.headers.get("authorization") != wanted:
                return self._send(401, {"error": {"message": "no"}})
            if body is not None and isinstance(_prompt(body), list):
                with lock:
                    status = server.refusals.pop(0) if server.refusals else None
                if status is not None:
                    after = {"retry-after": server.retry_after} if server.retry_after else {}
                    return self._send(status, {"error": {"message": "too busy"}}, **after)
            with lock:
                at_once[0] += 1
                server.most_at_once = max(server.most_at_once, at_once[0])
            reply = server.answer(self.path, body)
            with lock:
                at_once[0] -= 1
            if reply is None:
                return self._send(404, {"detail": "Not Found"})
            spoilt = server.spoil(reply) if body is not None else reply
            return self._send(200, spoilt)

        def _send(self, status: int, document: Any, **headers: str) -> None:
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    return Handler


def _prompt(body: Any) -> Any:
    return body.get("prompt") or body.get("input_ids")


@pytest.fixture(scope="session")
def nano() -> Nano:
    return Nano()


@pytest.fixture
def server(nano: Nano) -> Iterator[Server]:
    """A server that speaks OpenAI's completions, as long as the test does not change that."""
    state = Server(nano)
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(state)) as http:
        state.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield state
        http.shutdown()
        thread.join()
