"""Greedy answers against a plain loop over the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.calibration.data import load_tokenizer
from halfbyte.errors import EvaluationError
from halfbyte.evals.generation import ModelGenerator, stop_tokens
from halfbyte.evals.model import load_model
from halfbyte.progress import SilentProgress

MODEL = Path(__file__).resolve().parents[2] / "halfbyte" / "demo" / "glm-nano-fp8"
PROMPTS = ["The", "[gMASK]<sop><|user|>\nWhat is 17 + 5?<|assistant|>\n", "A list of words is a"]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL)


def generator(model: Any, **changes: int) -> ModelGenerator:
    sizes = {"batch_size": 2, "max_length": 64} | changes
    return ModelGenerator(model, load_tokenizer(MODEL), **sizes, progress=SilentProgress())


def greedy(model: Any, prompt: str, stop: list[int]) -> list[int]:
    ids = load_tokenizer(MODEL)(prompt, add_special_tokens=False)["input_ids"]
    answer: list[int] = []
    with torch.inference_mode():
        while len(answer) < 12:
            best = int(model(torch.tensor([ids + answer])).logits[0, -1].argmax())
            if best in stop:
                break
            answer.append(best)
    return answer


def test_answers_are_the_most_likely_ones(model: Any) -> None:
    tokenizer = load_tokenizer(MODEL)
    stop = stop_tokens(MODEL, tokenizer)
    found = generator(model).generate(PROMPTS, 12, stop)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in stop]
    expected = [greedy(model, prompt, ids) for prompt in PROMPTS]
    assert found == [tokenizer.decode(answer) for answer in expected]
    # A token that one answer has stops it there, and is not part of it.
    first = tokenizer.convert_ids_to_tokens(expected[0])[3]
    cut = generator(model).generate(PROMPTS[:1], 12, [first])
    assert cut == [tokenizer.decode(greedy(model, PROMPTS[0], [expected[0][3]]))]
    assert len(cut[0]) < len(found[0])


def test_what_cannot_be_generated(model: Any) -> None:
    with pytest.raises(EvaluationError, match=r"prompt 2 of 3 has .* tokens; with 12 of an answer"):
        generator(model, max_length=20).generate(PROMPTS, 12, ["<|user|>"])
    with pytest.raises(EvaluationError, match="'no such token' should end an answer"):
        generator(model).generate(PROMPTS, 12, ["no such token"])


def test_stop_tokens_fall_back_as_in_transformers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    (tmp_path / "config.json").write_text('{"eos_token_id": 4091}')
    assert stop_tokens(tmp_path, tokenizer) == [tokenizer.convert_ids_to_tokens(4091)]
    (tmp_path / "config.json").write_text("{}")
    assert stop_tokens(tmp_path, tokenizer) == [tokenizer.eos_token]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [true]}')
    with pytest.raises(EvaluationError, match=r"eos_token_id is \[True\], the tokenizer has 4096"):
        stop_tokens(tmp_path, tokenizer)
