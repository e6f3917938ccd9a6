"""Perplexity and divergence of a checkpoint on a text, for models larger than memory.

The model runs layer by layer, and within a layer expert by expert, so memory is that of the hidden
states plus one layer without its experts. A baseline is run the same way; logits of both exist
only for a few thousand positions at a time and are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.attention import layer_caches
from halfbyte.calibration.data import consecutive_windows, load_tokenizer, text_sha256
from halfbyte.calibration.runner import LayerRunner
from halfbyte.core import Checkpoint
from halfbyte.errors import EvaluationError
from halfbyte.evals.report import (
    Divergence,
    Histogram,
    TextMetrics,
    WorstToken,
    checkpoint_fingerprint,
)
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.rows import Rows
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.kvcache.layout import Kv
from halfbyte.progress import Progress, SilentProgress

LOGITS_AT_ONCE = 1 << 24
"""Elements of a block of logits, at least one window; a few such blocks exist at a time."""

KL_EDGES = tuple(10 ** (quarter / 4) for quarter in range(-32, 9))
"""Nats; four bins to a decade from 1e-8 to 100."""
WORST_TOKENS = 20
CONTEXT_TOKENS = 24
"""Tokens that are shown before one of the worst."""


def evaluate_text(
    candidate: Path,
    text: Path,
    *,
    baseline: Path | None = None,
    sequence_length: int = 2048,
    max_windows: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    kv_cache: Kv | None = None,
    progress: Progress | None = None,
) -> TextMetrics:
    """Perplexity of `candidate` on `text`, and with `baseline` its divergence from it.

    KL is KL(baseline || candidate) in nats per predicted position; top-1 agreement is the share of
    positions where both put the same token first. Windows are consecutive; `max_windows` takes
    that many, evenly spread. Tokens are those of the candidate's tokenizer. With `kv_cache` the
    candidate's attention reads keys and values as a server's cache in that format gives them back;
    the baseline's reads what was computed.

    Raises EvaluationError when the two do not share a vocabulary or a window has no position to
    predict, and what reading and running a checkpoint raise.
    """
    if sequence_length < 2:
        raise EvaluationError(
            f"a window of {sequence_length} token predicts nothing",
            hint="use --sequence-length 2 or more",
        )
    progress = progress or SilentProgress()
    paths = [candidate] if baseline is None else [candidate, baseline]
    checkpoints = [open_checkpoint(path) for path in paths]  # before hours of work on the first
    tokens = consecutive_windows(text, candidate, sequence_length, max_windows)
    caches = [kv_cache, None]
    finals = [
        _run(checkpoint, tokens, device, dtype, cache, progress)
        for checkpoint, cache in zip(checkpoints, caches, strict=False)
    ]
    if len({final.head.shape[0] for final in finals}) > 1:
        raise EvaluationError(
            f"{candidate} has a vocabulary of {finals[0].head.shape[0]}, "
            f"{baseline} of {finals[1].head.shape[0]}: not the same model"
        )
    positions = _compare(finals, tokens.to(device), progress)
    count = positions.count
    divergence = None
    if baseline is not None:
        kl = torch.cat(positions.divergence).sort().values
        divergence = Divergence(
            baseline=checkpoint_fingerprint(checkpoints[1]),
            mean_kl=kl.double().mean().item(),
            median_kl=_quantile(kl, 0.5),
            p99_kl=_quantile(kl, 0.99),
            top1_agreement=positions.agreeing / count,
            histogram=_histogram(kl),
            worst=_in_words(positions.worst, tokens, candidate),
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


@dataclass(frozen=True)
class _Final:
    """What a model makes of all windows, up to its last norm and its head."""

    hidden: Rows
    """[sequences, length, hidden_size] after the last layer."""
    norm: torch.nn.Module
    head: torch.Tensor
    """[vocabulary, hidden_size]."""

    def log_probabilities(self, sequences: slice) -> torch.Tensor:
        """Of each next token, float32 [n, vocabulary], all positions of a window but its last."""
        hidden = self.norm(self.hidden[sequences][:, :-1]).flatten(0, 1)
        return torch.log_softmax((hidden @ self.head.T).float(), -1)


@torch.no_grad()
def _run(
    checkpoint: Checkpoint,
    tokens: torch.Tensor,
    device: str,
    dtype: str,
    kv_cache: Kv | None,
    progress: Progress,
) -> _Final:
    architecture = Architecture.of(checkpoint)
    cache = None if kv_cache is None else layer_caches(checkpoint, kv_cache)
    with ShardReader(checkpoint) as reader:
        runner = LayerRunner(
            architecture,
            logical_weights(checkpoint),
            reader,
            device=device,
            dtype=getattr(torch, dtype),
        )
        progress.start(f"run {checkpoint.path.name}", architecture.layers, "layers")
        state = runner.embed(tokens)
        for index in range(architecture.layers):
            runner.advance(index, state, cache=None if cache is None else cache(index))
            progress.advance(1)
        return _Final(state.hidden, runner.norm("model.norm.weight"), runner.head())


class _Worst(NamedTuple):
    """A position of large divergence, by token ids."""

    kl: float
    place: int
    """Number of the position among all that are predicted."""
    probability: float
    baseline_probability: float
    choice: int
    baseline_choice: int


@dataclass
class _Positions:
    """Sums over the predicted positions seen so far."""

    count: int = 0
    nll: float = 0.0
    divergence: list[torch.Tensor] = field(default_factory=list)
    """KL per position, float32."""
    agreeing: int = 0
    worst: list[_Worst] = field(default_factory=list)
    """The largest divergence first, `WORST_TOKENS` at most."""


@torch.no_grad()
def _compare(finals: list[_Final], tokens: torch.Tensor, progress: Progress) -> _Positions:
    """Sums over all windows `tokens` [sequences, length]; the candidate first, a baseline after."""
    sums = _Positions()
    count, length = tokens.shape
    step = max(1, LOGITS_AT_ONCE // ((length - 1) * finals[0].head.shape[0]))
    progress.start("compare logits", count, "windows")
    for start in range(0, count, step):
        sequences = slice(start, min(start + step, count))
        candidate, *baseline = (final.log_probabilities(sequences) for final in finals)
        text = tokens[sequences, 1:].reshape(-1, 1)
        sums.nll -= candidate.gather(-1, text).sum(dtype=torch.float64).item()
        sums.count += len(candidate)
        for base in baseline:
            kl = (base.exp() * (base - candidate)).sum(-1)
            sums.divergence.append(kl.cpu())
            sums.agreeing += int((candidate.argmax(-1) == base.argmax(-1)).sum())
            sums.worst += _worst(kl, candidate, base, text, start * (length - 1))
            # Equal ones by place, so that the size of blocks decides nothing.
            sums.worst = sorted(sums.worst, key=lambda w: (-w.kl, w.place))[:WORST_TOKENS]
        progress.advance(sequences.stop - sequences.start)
    return sums


def _worst(
    kl: torch.Tensor, candidate: torch.Tensor, base: torch.Tensor, text: torch.Tensor, first: int
) -> Iterator[_Worst]:
    """The positions of a block that diverge most. `candidate` and `base` are log probabilities
    [n, vocabulary] of the next token, which is `text` [n, 1]; the block begins with place `first`.
    """
    rows = kl.topk(min(WORST_TOKENS, len(kl))).indices
    own, theirs, token = candidate[rows], base[rows], text[rows]
    columns = (
        kl[rows],
        rows + first,
        own.gather(-1, token).exp()[:, 0],
        theirs.gather(-1, token).exp()[:, 0],
        own.argmax(-1),
        theirs.argmax(-1),
    )
    return map(_Worst._make, zip(*(column.tolist() for column in columns), strict=True))


def _in_words(
    worst: Sequence[_Worst], tokens: torch.Tensor, folder: Path
) -> tuple[WorstToken, ...]:
    """The same by the tokenizer of `folder`; `tokens` are the windows [sequences, length]."""
    tokenizer = load_tokenizer(folder)

    def words(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    found = []
    for one in worst:
        window, place = divmod(one.place, tokens.shape[1] - 1)
        position = place + 1
        ids = tokens[window].tolist()
        found.append(
            WorstToken(
                window=window,
                position=position,
                kl=one.kl,
                context=words(ids[max(0, position - CONTEXT_TOKENS) : position]),
                token=words([ids[position]]),
                probability=one.probability,
                baseline_probability=one.baseline_probability,
                choice=words([one.choice]),
                baseline_choice=words([one.baseline_choice]),
            )
        )
    return tuple(found)


def _histogram(kl: torch.Tensor) -> Histogram:
    edges = torch.tensor(KL_EDGES, dtype=torch.float64)
    counts = torch.bucketize(kl.double(), edges).bincount(minlength=len(KL_EDGES) + 1)
    return Histogram(KL_EDGES, tuple(counts.tolist()))


def _quantile(ordered: torch.Tensor, share: float) -> float:
    """The smallest value that at least `share` of the sorted values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1].item()
