"""The MTP layer against its definition, and against the acceptance its trainer measured."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaRotaryEmbedding,
)

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.data import consecutive_windows
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.runner import LayerRunner
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.testing.tiny import write_tiny


@torch.no_grad()
def test_mtp_layer_equals_its_definition(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    tokens = torch.randint(10, 300, (3, 24), generator=torch.Generator().manual_seed(2))
    with ShardReader(open_checkpoint(path)) as reader:
        runner = LayerRunner(
            Architecture.of(reader.checkpoint),
            logical_weights(reader.checkpoint),
            reader,
            device="cpu",
            dtype=torch.float32,
        )
        state = runner.embed(tokens)
        for index in range(4):
            runner.advance(index, state)
        ours = mtp_input(runner, 4, state, tokens, depth=0)
        runner.advance(4, ours)

    stored = {k: v.float() for f in path.glob("*.safetensors") for k, v in load_file(f).items()}
    own = {k.removeprefix("model.layers.4."): v for k, v in stored.items() if ".layers.4." in k}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]  # after the final norm

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = GlmMoeDsaRMSNorm(x.shape[-1], model.config.rms_norm_eps)
        module.weight.copy_(own[name])
        return module(x)

    embedded = stored["model.embed_tokens.weight"][tokens[:, 1:]]
    both = [norm("enorm.weight", embedded), norm("hnorm.weight", hidden)]
    x = torch.nn.functional.linear(torch.cat(both, -1), own["eh_proj.weight"])

    config = copy.deepcopy(AutoConfig.from_pretrained(path))
    config.indexer_types = [*config.indexer_types, "full"]
    config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    layer = GlmMoeDsaDecoderLayer(config, 4)
    fused = {
        k: v
        for k, v in own.items()
        if ".experts." not in k
        and not k.startswith(("eh_proj.", "enorm.", "hnorm.", "shared_head."))
    }
    experts = range(config.n_routed_experts)
    fused["mlp.experts.gate_up_proj"] = torch.stack(
        [
            torch.cat([own[f"mlp.experts.{e}.{leaf}.weight"] for leaf in ("gate_proj", "up_proj")])
            for e in experts
        ]
    )
    fused["mlp.experts.down_proj"] = torch.stack(
        [own[f"mlp.experts.{e}.down_proj.weight"] for e in experts]
    )
    layer.load_state_dict(fused)
    length = x.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None].expand(3, -1, -1, -1)
    theirs, _ = layer(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=GlmMoeDsaRotaryEmbedding(config)(x, positions),
    )
    torch.testing.assert_close(ours.hidden[:], theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_acceptance_is_what_training_measured(testbed: Path) -> None:
    """The trainer of the test model reports a greedy MTP acceptance of 0.654 on held-out text."""
    path = testbed / "glm-small-fp8"
    tokens = consecutive_windows(testbed / "heldout.jsonl", path, 512, 8)
    with ShardReader(open_checkpoint(path)) as reader:
        runner = LayerRunner(
            Architecture.of(reader.checkpoint),
            logical_weights(reader.checkpoint),
            reader,
            device="cpu",
            dtype=torch.float32,
        )
        state = runner.embed(tokens)
        for index in range(runner.architecture.layers):
            runner.advance(index, state)
        head = runner.head()
        target = (runner.norm("model.norm.weight")(state.hidden[:]) @ head.T).argmax(-1)
        mtp = mtp_input(runner, runner.architecture.layers, state, tokens, depth=0)
        runner.advance(runner.architecture.layers, mtp)
        normed = runner.norm(f"model.layers.{runner.architecture.layers}.shared_head.norm.weight")
        draft = (normed(mtp.hidden[:]) @ head.T).argmax(-1)
    accepted = (draft == target[:, 1:]).float().mean().item()
    assert 0.60 < accepted < 0.70


def test_one_token_leaves_nothing_to_predict(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny", source="bf16")
    tokens = torch.tensor([[5]])
    with ShardReader(open_checkpoint(path)) as reader:
        runner = LayerRunner(
            Architecture.of(reader.checkpoint),
            logical_weights(reader.checkpoint),
            reader,
            device="cpu",
            dtype=torch.float32,
        )
        state = mtp_input(runner, 4, runner.embed(tokens), tokens, depth=0)
        assert state.hidden.shape == (1, 0, 128)
        runner.advance(4, state)
        assert state.hidden.shape == (1, 0, 128)
