"""Row feedback: outputs of a linear make up for each other's rounding errors.

GPTQ counts an error the same in every output. What a down projection writes goes into the residual
stream, where some directions move the logits more than others. With G [N, N] for what an error in
the outputs costs and H [K, K] for the second moment of the inputs, a weight's loss is

    tr(G E H Eᵀ),    E = W - Q,

the two-sided form of YAQA (arXiv 2505.22988). With G = L Lᵀ and the rows in blocks, from the last
to the first, block b is solved by GPTQ on H alone, but for the weights

    W_b + (L_done,b L_bb⁻¹)ᵀ E_done,

E_done the errors of the blocks behind it: the same completion of the square that moves errors from
column to column in GPTQ, here from row to row.

G is taken from the head of the model, without gradients: if the error went straight into the final
norm and the head W, for a token whose predictions are the unigram frequencies p of the calibration
text, KL divergence would grow by half of eᵀ γ Wᵀ (diag p - p pᵀ) W γ e (γ the norm's weight). The
layers in between make something else of it, which `IDENTITY` stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from halfbyte.ranks import even_parts

IDENTITY = 2.0
"""What is added to the diagonal of G, relative to its mean."""
BLOCKS = 8
"""Parts of a weight that are solved one after the other."""
_VOCABULARY_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class RowFeedback:
    """How the rows [N] of a weight are solved: in which blocks, and what errors ask of them."""

    blocks: tuple[torch.Tensor, ...]
    """int64 [n] of each block: its rows, in the order of solving."""
    shifts: tuple[torch.Tensor, ...]
    """Of each block L_done,b L_bb⁻¹ [rows solved before it, n], those of the latest block first."""

    def targets(
        self, weights: torch.Tensor, errors: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of each block in turn, and the weights float32 [B, n, K] to round there.

        `weights` float32 [B, N, K]; `errors` [B, N, K] must have the errors of a block, weights
        minus what they became, before the next one is asked for.
        """
        done = weights.new_empty(0, dtype=torch.int64)
        for rows, shift in zip(self.blocks, self.shifts, strict=True):
            target = weights[:, rows]
            if len(done):
                # One by one: a library may add up a batch of products in another order.
                for own, error in zip(target, errors, strict=True):
                    own += shift.mT.to(error) @ error[done]
            yield rows, target
            done = torch.cat([rows, done])


def row_feedback(metric: torch.Tensor, blocks: int = BLOCKS) -> RowFeedback:
    """For outputs whose errors cost `metric` float32 [N, N], which is positive definite.

    Rows that cost the most come first, while others can still make up for them.
    """
    order = metric.diagonal().argsort(stable=True)
    lower = torch.linalg.cholesky(metric[order][:, order])
    blocks = min(blocks, len(order))
    rows, shifts = [], []
    for part in reversed(even_parts(len(order), blocks)):
        block, stop = slice(part.start, part.stop), part.stop
        shift = torch.linalg.solve_triangular(
            lower[block, block], lower[stop:, block], upper=False, left=False
        )
        rows.append(order[block])
        shifts.append(shift)
    return RowFeedback(tuple(rows), tuple(shifts))


def logit_metric(
    head: torch.Tensor, norm: torch.Tensor, tokens: torch.Tensor, identity: float = IDENTITY
) -> torch.Tensor:
    """G float32 [K, K], its diagonal 1 on average, for what is added to the residual stream [K].

    `head` [V, K] are the output projection and `norm` [K] the weight of the norm before it;
    `tokens` int64 give the frequencies.
    """
    vocabulary, width = head.shape
    counts = torch.bincount(tokens.flatten().cpu(), minlength=vocabulary).to(head.device)
    share = counts.float() / counts.sum()
    norm = norm.float()
    metric = norm.new_zeros(width, width)
    mean = norm.new_zeros(width)
    for start in range(0, vocabulary, _VOCABULARY_AT_ONCE):
        part = slice(start, start + _VOCABULARY_AT_ONCE)
        rows = head[part].float() * norm
        metric.addmm_((rows * share[part, None]).mT, rows)
        mean += share[part] @ rows
    metric -= torch.outer(mean, mean)
    scale = metric.diagonal().mean()
    metric = metric / scale if bool(scale > 0) else torch.zeros_like(metric)
    metric.diagonal().add_(identity)
    return metric / metric.diagonal().mean()
