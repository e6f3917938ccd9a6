"""Perplexity and divergence of a checkpoint on a text, for models larger than memory.

The model runs layer by layer, and within a layer expert by expert, so memory is that of the hidden
states plus one layer without its experts. A baseline is run the same way; logits of both exist
only for a few thousand positions at a time and are never stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.data import consecutive_windows, text_sha256
from halfbyte.calibration.runner import LayerRunner
from halfbyte.errors import EvaluationError
from halfbyte.evals.report import Divergence, TextMetrics, checkpoint_fingerprint
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.progress import Progress, SilentProgress

LOGITS_AT_ONCE = 1 << 24
"""Elements of a block of logits; three such blocks of float32 exist at a time."""


def evaluate_text(
    candidate: Path,
    text: Path,
    *,
    baseline: Path | None = None,
    sequence_length: int = 2048,
    max_windows: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> TextMetrics:
    """Perplexity of `candidate` on `text`, and with `baseline` its divergence from it.

    KL is KL(baseline || candidate) in nats per predicted position; top-1 agreement is the share of
    positions where both put the same token first. Windows are consecutive; `max_windows` takes
    that many, evenly spread. Tokens are those of the candidate's tokenizer.

    Raises EvaluationError when the two do not share a vocabulary or a window has no position to
    predict, and what reading and running a checkpoint raise.
    """
    if sequence_length < 2:
        raise EvaluationError(
            f"a window of {sequence_length} token predicts nothing",
            hint="use --sequence-length 2 or more",
        )
    progress = progress or SilentProgress()
    tokens = consecutive_windows(text, candidate, sequence_length, max_windows)
    paths = [candidate] if baseline is None else [candidate, baseline]
    finals = [_final_states(path, tokens, device, dtype, progress) for path in paths]
    heads = [head for _, head in finals]
    if len({head.shape[0] for head in heads}) > 1:
        raise EvaluationError(
            f"{candidate} has a vocabulary of {heads[0].shape[0]}, "
            f"{baseline} of {heads[1].shape[0]}: not the same model"
        )
    positions = _compare(
        [hidden[:, :-1].flatten(0, 1) for hidden, _ in finals],
        heads,
        tokens[:, 1:].flatten().to(device),
        progress,
    )
    count = positions.count
    divergence = None
    if baseline is not None:
        kl = torch.cat(positions.divergence).sort().values
        divergence = Divergence(
            baseline=checkpoint_fingerprint(open_checkpoint(baseline)),
            mean_kl=kl.double().mean().item(),
            median_kl=_quantile(kl, 0.5),
            p99_kl=_quantile(kl, 0.99),
            top1_agreement=positions.agreeing / count,
        )
    return TextMetrics(
        tokens_sha256=text_sha256(tokens),
        windows=tokens.shape[0],
        sequence_length=sequence_length,
        dtype=dtype,
        tokens=count,
        nll=positions.nll / count,
        divergence=divergence,
    )


@torch.no_grad()
def _final_states(
    path: Path, tokens: torch.Tensor, device: str, dtype: str, progress: Progress
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states after the final norm, [sequences, length, hidden_size], and the head."""
    checkpoint = open_checkpoint(path)
    architecture = Architecture.of(checkpoint)
    with ShardReader(checkpoint) as reader:
        runner = LayerRunner(
            architecture,
            logical_weights(checkpoint),
            reader,
            device=device,
            dtype=getattr(torch, dtype),
        )
        progress.start(f"run {path.name}", architecture.layers, "layers")
        state = runner.embed(tokens)
        for index in range(architecture.layers):
            runner.advance(index, state)
            progress.advance(1)
        return runner.final_norm(state.hidden), runner.head()


@dataclass
class _Positions:
    """Sums over the predicted positions seen so far."""

    count: int = 0
    nll: float = 0.0
    divergence: list[torch.Tensor] = field(default_factory=list)
    """KL per position, float32."""
    agreeing: int = 0


@torch.no_grad()
def _compare(
    hidden: list[torch.Tensor],
    heads: list[torch.Tensor],
    targets: torch.Tensor,
    progress: Progress,
) -> _Positions:
    """`hidden` [n, hidden_size] and heads, candidate first, baseline after; `targets` [n]."""
    sums = _Positions()
    step = max(1, LOGITS_AT_ONCE // heads[0].shape[0])
    progress.start("compare logits", len(targets), "positions")
    for start in range(0, len(targets), step):
        rows = slice(start, start + step)
        candidate, *baseline = (
            torch.log_softmax((h[rows] @ head.T).float(), -1)
            for h, head in zip(hidden, heads, strict=True)
        )
        chosen = candidate.gather(-1, targets[rows, None])
        sums.nll -= chosen.sum(dtype=torch.float64).item()
        sums.count += len(candidate)
        for base in baseline:
            sums.divergence.append((base.exp() * (base - candidate)).sum(-1).cpu())
            sums.agreeing += int((candidate.argmax(-1) == base.argmax(-1)).sum())
        progress.advance(len(candidate))
    return sums


def _quantile(ordered: torch.Tensor, share: float) -> float:
    """The smallest value that at least `share` of the sorted values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1].item()
