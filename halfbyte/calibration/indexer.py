"""The indexer of DeepSeek sparse attention (DSA), in memory that does not grow with the square.

transformers' own forward broadcasts the keys to every query, [sequences, length, head_dim, length]:
tens of gigabytes for one long sequence. This one scores a slice of queries at a time with the same
weights; the selection is the same up to float32 rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfbyte.calibration.limits import SCORES_AT_ONCE


class SlicedIndexer(nn.Module):
    """Takes the place of a layer's `self_attn.indexer`, and its weights."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.wq_b, self.wk = indexer.wq_b, indexer.wk
        self.k_norm, self.weights_proj = indexer.k_norm, indexer.weights_proj
        self._heads, self._head_dim = int(indexer.n_heads), int(indexer.head_dim)
        self._rotary_dim, self._topk = int(indexer.qk_rope_head_dim), int(indexer.index_topk)

    def forward(
        self,
        hidden: torch.Tensor,
        query_latent: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: None = None,
    ) -> torch.Tensor:
        """The tokens each query may attend to: int32 [sequences, length, topk].

        `hidden` [sequences, length, hidden_size]; `query_latent` is the normed output of q_a_proj;
        `mask` bool, true where a query may look, broadcastable to [sequences, length, length].
        """
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
            apply_rotary_pos_emb_interleave,
        )

        sequences, length, _ = hidden.shape
        rotary = self._rotary_dim
        query = self.wq_b(query_latent).view(sequences, length, self._heads, self._head_dim)
        key = self.k_norm(self.wk(hidden)).unsqueeze(2)
        turned = apply_rotary_pos_emb_interleave(
            query[..., :rotary], key[..., :rotary], *position_embeddings, unsqueeze_dim=2
        )
        query = torch.cat([turned[0], query[..., rotary:]], -1).float()
        key = torch.cat([turned[1], key[..., rotary:]], -1).squeeze(2).float().mT
        weight = self.weights_proj(hidden.to(self.weights_proj.weight.dtype)).float()
        weight = weight * (self._heads**-0.5 * self._head_dim**-0.5)
        topk = min(self._topk, length)
        chosen = hidden.new_empty(sequences, length, topk, dtype=torch.int32)
        step = max(1, SCORES_AT_ONCE // (sequences * self._heads * length))
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            scores = (query[:, rows].flatten(1, 2) @ key).relu_()
            scores = scores.unflatten(1, (-1, self._heads))
            total = scores.mul_(weight[:, rows, :, None]).sum(2)
            total.masked_fill_(~mask[:, rows], float("-inf"))
            chosen[:, rows] = total.topk(topk, -1).indices.to(torch.int32)
        return chosen
