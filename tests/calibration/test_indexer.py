"""The sliced indexer selects what transformers' indexer selects."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaIndexer,
    GlmMoeDsaRotaryEmbedding,
)

from halfbyte.calibration import indexer
from halfbyte.calibration.indexer import SlicedIndexer


@pytest.mark.parametrize("length", [1, 7, 50])
@pytest.mark.parametrize("at_once", [1, 300, 1 << 25])
@torch.no_grad()
def test_selection_equals_transformers(
    length: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", at_once)
    torch.manual_seed(length)
    config = GlmMoeDsaConfig(
        hidden_size=48,
        q_lora_rank=24,
        index_n_heads=3,
        index_head_dim=32,
        index_topk=9,
        qk_rope_head_dim=16,
        num_hidden_layers=2,
    )
    theirs = GlmMoeDsaIndexer(config, 0)
    torch.nn.init.normal_(theirs.k_norm.weight)
    torch.nn.init.normal_(theirs.k_norm.bias)
    hidden, latent = torch.randn(4, length, 48), torch.randn(4, length, 24)
    position = torch.arange(length)[None]
    rotary = GlmMoeDsaRotaryEmbedding(config)(hidden, position)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None]
    expected = theirs(hidden, latent, rotary, mask.expand(4, -1, -1), position)
    found = SlicedIndexer(theirs)(hidden, latent, rotary, mask.expand(4, -1, -1), position)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape

    def allowed(chosen: torch.Tensor) -> torch.Tensor:
        """What attention sees: chosen and not masked, whatever the order."""
        return torch.zeros(4, length, length).scatter(-1, chosen.long(), 1).bool() & mask

    assert torch.equal(allowed(found), allowed(expected))
