"""A decode loop of a trained model over a paged cache answers as transformers does, and a fault in
it ends the one request that it is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.calibration.data import load_tokenizer
from halfbyte.evals.model import load_model
from halfbyte.kvcache.integrity.tracker import Mode
from halfbyte.testing.kv_faults import free_under_reader
from halfbyte.testing.paged_model import ModelServer, serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 10
CANCELLED = frozenset({4})


@pytest.fixture(scope="module")
def model(testbed: Path) -> Any:
    return load_model(testbed / "glm-nano-fp8", device=DEVICE)


@pytest.fixture(scope="module")
def prompts(testbed: Path) -> list[list[int]]:
    """Of three texts, each with several ends."""
    tokenizer = load_tokenizer(testbed / "glm-nano-fp8")
    with (testbed / "heldout.jsonl").open() as lines:
        texts = [json.loads(next(lines))["text"] for _ in range(3)]
    tokens = [tokenizer(text)["input_ids"][:60] for text in texts]
    return [tokens[n % 3][: 30 + 2 * n] for n in range(12)]


def run(
    model: Any, prompts: list[list[int]], mode: Mode, *, fault: bool = False, page_size: int = 8
) -> ModelServer:
    server = ModelServer(
        model, mode=mode, page_size=page_size, pages=240 // page_size, rows=7, longest=80, chunk=24
    )
    if fault:
        server.before_launch = lambda step: _inject(server)
    serve(server, prompts, COUNT, cancel=CANCELLED)
    return server


def _inject(server: ModelServer) -> None:
    """Before the next step is launched, one page of a request that decodes is freed, and given to
    whoever asks next."""
    if len(server.running) > 3 and free_under_reader(server):
        server.before_launch = lambda step: None


def outputs(server: ModelServer) -> dict[int, list[int]]:
    return {r.number: r.output for r in server.requests}


@pytest.mark.parametrize("page_size", [1, 8])
def test_answers_are_those_of_transformers(
    model: Any, prompts: list[list[int]], page_size: int
) -> None:
    """With shared prefixes, chunks, overlap and a pool that runs out; tracked in mode raise."""
    server = run(model, prompts, "raise", page_size=page_size)
    assert {"hit", "evict", "cancel", "chunk"} <= set(server.events)
    for request in server.requests:
        prompt = torch.tensor([request.prompt], device=DEVICE)
        right = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=COUNT, min_new_tokens=COUNT, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        expected = right[0, prompt.shape[1] :].tolist()
        cancelled = request.number in CANCELLED
        assert request.state == ("cancelled" if cancelled else "done")
        assert request.output == expected[: COUNT // 2 if cancelled else COUNT]
    metrics = server.tracker.metrics()
    assert metrics["checks"] == metrics["steps"] > 0


def test_a_fault_ends_its_request_and_no_other(model: Any, prompts: list[list[int]]) -> None:
    right = outputs(run(model, prompts, "off"))
    server = run(model, prompts, "abort", fault=True)
    bad = [request for request in server.requests if request.state == "aborted"]
    assert len(bad) == 1
    assert bad[0].output == right[bad[0].number][: len(bad[0].output)]
    assert len(bad[0].output) < COUNT
    others = {n: tokens for n, tokens in outputs(server).items() if n != bad[0].number}
    assert others == {n: tokens for n, tokens in right.items() if n != bad[0].number}


def test_the_same_fault_without_a_tracker_is_somebody_elses_text(
    model: Any, prompts: list[list[int]]
) -> None:
    right = outputs(run(model, prompts, "off"))
    assert outputs(run(model, prompts, "off", fault=True)) != right
