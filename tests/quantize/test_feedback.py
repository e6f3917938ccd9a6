"""Rows that make up for each other: the metric against autograd, blocks against textbook GPTQ."""

from __future__ import annotations

import pytest
import torch

from halfbyte.core import Scheme, Settings
from halfbyte.quantize.feedback import RowFeedback, logit_metric, row_feedback
from halfbyte.quantize.solver import Inputs, Solved, solve

SETTINGS = Settings(refine=1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positive(size: int, seed: int = 0) -> torch.Tensor:
    """A second moment of correlated numbers."""
    x = random(4 * size, size, seed=seed) @ random(size, size, seed=seed + 1)
    return x.T @ x / len(x)


def test_the_metric_is_the_curvature_of_kl_divergence() -> None:
    """By autograd, in float64, around a token whose predictions are the unigram frequencies."""
    head, norm = random(20, 6), 1 + 0.3 * random(6, seed=1)
    tokens = torch.arange(20).repeat(3)[:50].view(5, 10)
    p = torch.bincount(tokens.flatten(), minlength=20).double() / 50

    def divergence(error: torch.Tensor) -> torch.Tensor:
        logits = p.log() + head.double() @ (norm.double() * error)
        return (p * (p.log() - logits.log_softmax(-1))).sum()

    curvature = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
        divergence, torch.zeros(6, dtype=torch.float64)
    )
    expected = curvature / curvature.diagonal().mean() + 0.7 * torch.eye(6)
    metric = logit_metric(head, norm, tokens, identity=0.7)
    torch.testing.assert_close(metric.double(), expected / 1.7, rtol=1e-5, atol=1e-6)


def test_a_head_that_says_nothing_leaves_rows_alone() -> None:
    metric = logit_metric(torch.ones(9, 4), torch.ones(4), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(metric, torch.eye(4))


def rounded(feedback: RowFeedback, weights: torch.Tensor) -> torch.Tensor:
    """Whole numbers, by blocks."""
    codes, errors = torch.empty_like(weights), torch.full_like(weights, torch.nan)
    for rows, target in feedback.targets(weights, errors):
        codes[:, rows] = target.round()
        errors[:, rows] = weights[:, rows] - codes[:, rows]
    return codes


def test_single_rows_are_gptq_from_row_to_row() -> None:
    """With independent inputs it is GPTQ on the transposed weight, as published (2210.17323)."""
    metric, weights = positive(24), 3 * random(1, 24, 40, seed=7)
    inverse = torch.linalg.inv(metric.double())
    order = metric.diagonal().argsort(stable=True).flip(0)
    upper = torch.linalg.cholesky(inverse[order][:, order], upper=True)
    work, expected = weights[0].double()[order], torch.empty(24, 40)
    for i, row in enumerate(order):
        expected[row] = work[i].round()
        error = (work[i] - work[i].round()) / upper[i, i]
        work[i:] -= upper[i, i:, None] * error
    assert torch.equal(rounded(row_feedback(metric, blocks=24), weights)[0], expected)


def quantized(
    weights: torch.Tensor, hessians: torch.Tensor, feedback: RowFeedback | None
) -> Solved:
    return solve(weights, Scheme(), Inputs(hessians), SETTINGS, feedback=feedback)


def test_what_errors_cost_falls_and_their_size_hardly_grows() -> None:
    weights = random(2, 48, 96)
    hessians = torch.stack([positive(96, seed) for seed in (3, 5)])
    metric = positive(48, 9)
    metric = metric / metric.diagonal().mean() + 2 * torch.eye(48)
    costs: list[tuple[float, float]] = []
    for feedback in (None, row_feedback(metric)):
        solved = quantized(weights, hessians, feedback)
        plain = weighed = 0.0
        for item in range(2):
            error = (weights[item] - solved.dequantized(item)).double()
            moment = error @ hessians[item].double() @ error.T
            plain += float(moment.trace())
            weighed += float((metric.double() * moment).sum())
        costs.append((plain, weighed))
    assert costs[1][1] < 0.97 * costs[0][1]
    assert costs[1][0] < 1.1 * costs[0][0]


def test_rows_that_cost_alike_and_apart_are_solved_as_without() -> None:
    weights, hessians = random(2, 40, 64), torch.stack([positive(64, seed) for seed in (3, 5)])
    alone, together = (
        quantized(weights, hessians, feedback) for feedback in (None, row_feedback(torch.eye(40)))
    )
    assert torch.equal(alone.codes, together.codes)
    assert torch.equal(alone.scales, together.scales)


def test_a_weight_does_not_depend_on_the_others() -> None:
    weights, hessians = random(3, 40, 64), torch.stack([positive(64, seed) for seed in (3, 5, 8)])
    feedback = row_feedback(positive(40) + torch.eye(40))
    together = quantized(weights, hessians, feedback)
    alone = quantized(weights[1:2], hessians[1:2], feedback)
    assert torch.equal(together.codes[1], alone.codes[0])
    assert torch.equal(together.scales[1], alone.scales[0])


@pytest.mark.parametrize("rows", [1, 5])
def test_fewer_rows_than_blocks(rows: int) -> None:
    feedback = row_feedback(positive(rows) + torch.eye(rows))
    assert sorted(torch.cat(feedback.blocks).tolist()) == list(range(rows))
    solved = quantized(random(1, rows, 32), positive(32)[None], feedback)
    assert bool(torch.isfinite(solved.dequantized(0)).all())
