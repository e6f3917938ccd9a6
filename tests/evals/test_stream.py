"""Streaming metrics against the same figures from whole transformers models, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfbyte.errors import EvaluationError
from halfbyte.evals import stream
from halfbyte.evals.stream import evaluate_text
from halfbyte.testing.tiny import write_tiny

TEXT = [f"The {n}th of {n * 7} records says {n * n} and no more." for n in range(60)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT))
    return path


def reference(path: Path, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities [n, vocabulary] in float64, and the windows of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids: list[int] = []
    for line in TEXT:
        ids += [*tokenizer(line, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(windows, use_cache=False).logits[:, :-1].double()
    return logits.log_softmax(-1).flatten(0, 1), windows


def test_metrics_equal_whole_model(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LOGITS_AT_ONCE", 320 * 7)  # positions in many blocks
    # Another seed is another model: large divergence, so nothing hides in rounding.
    candidate = write_tiny(tmp_path / "candidate", source="bf16", seed=1)
    baseline = write_tiny(tmp_path / "baseline", source="bf16", seed=0)
    found = evaluate_text(candidate, text, baseline=baseline, sequence_length=24)
    (p, windows), (q, _) = reference(candidate, 24), reference(baseline, 24)
    targets = windows[:, 1:].flatten()
    kl = (q.exp() * (q - p)).sum(-1)
    assert found.tokens == len(targets) == found.windows * 23
    nll = -p.gather(-1, targets[:, None]).mean().item()
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert found.divergence is not None
    assert found.divergence.mean_kl == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.divergence.median_kl == pytest.approx(
        kl.quantile(0.5, interpolation="lower").item(), rel=1e-3
    )
    assert found.divergence.p99_kl == pytest.approx(
        kl.sort().values[math.ceil(0.99 * len(kl)) - 1].item(), rel=1e-3
    )
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert found.divergence.top1_agreement == pytest.approx(agreement, abs=2 / len(kl))
    assert sum(found.divergence.histogram.counts) == len(kl)
    edges = found.divergence.histogram.edges
    assert (edges[0], edges[-1]) == (pytest.approx(1e-8), pytest.approx(100))
    inner = found.divergence.histogram.counts[1:-1]
    for low, high, count in zip(edges[:-1], edges[1:], inner, strict=True):
        slack = 1e-4  # of a value that lies as good as on an edge
        assert ((kl > low * (1 + slack)) & (kl <= high * (1 - slack))).sum() <= count
        assert count <= ((kl > low * (1 - slack)) & (kl <= high * (1 + slack))).sum()
    worst = found.divergence.worst
    order = kl.argsort(descending=True).tolist()
    tokenizer = AutoTokenizer.from_pretrained(candidate)
    assert len(worst) == 20
    assert [w.kl for w in worst] == pytest.approx([kl[n].item() for n in order[:20]], rel=1e-4)
    for place, one in zip(order, worst[:3], strict=False):
        assert (one.window, one.position) == (place // 23, place % 23 + 1)
        before = windows[one.window, : one.position]
        assert one.context == tokenizer.decode(before.tolist())
        token = int(targets[place])
        assert one.token == tokenizer.decode([token])
        assert one.probability == pytest.approx(p[place, token].exp().item(), rel=1e-3)
        assert one.baseline_probability == pytest.approx(q[place, token].exp().item(), rel=1e-3)
        assert one.choice == tokenizer.decode([int(p[place].argmax())])
        assert one.baseline_choice == tokenizer.decode([int(q[place].argmax())])


def test_a_checkpoint_does_not_diverge_from_itself(tmp_path: Path, text: Path) -> None:
    path = write_tiny(tmp_path / "tiny")
    found = evaluate_text(path, text, baseline=path, sequence_length=24, max_windows=3)
    assert found.windows == 3
    assert found.divergence is not None
    assert found.divergence.mean_kl == 0
    assert found.divergence.top1_agreement == 1


def test_published_perplexity_of_the_test_model(testbed: Path) -> None:
    """The makers of the small test model report 8.116 on 64 windows of 512 of this text."""
    found = evaluate_text(
        testbed / "glm-small-fp8", testbed / "heldout.jsonl", sequence_length=512, max_windows=64
    )
    assert found.perplexity == pytest.approx(8.116, abs=0.005)
    assert found.divergence is None


def test_single_token_windows_are_refused(tmp_path: Path, text: Path) -> None:
    with pytest.raises(EvaluationError, match="predicts nothing"):
        evaluate_text(write_tiny(tmp_path / "tiny"), text, sequence_length=1)
