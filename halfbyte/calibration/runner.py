"""Runs a model one decoder layer at a time, with the memory of one layer.

A layer is one forward pass of transformers' own module with the routed experts taken out, which
leaves the residual stream and, for every token, the experts' input and its routing; then each
expert in turn adds its share. So a layer with hundreds of experts never exists as a whole, and
quantizing an expert, measuring its inputs and moving the tokens on happen in one pass over it.

Routing is native: the experts a token reaches are those its router picks from the hidden states
that the layers before (quantized or not) produced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.attention import put_cache
from halfbyte.calibration.indexer import SlicedIndexer
from halfbyte.calibration.limits import BATCH_TOKENS, EXPERT_TOKENS
from halfbyte.calibration.routing import Dispatch, ExpertsTakenOut, Routing
from halfbyte.core import Placement, StoredWeight
from halfbyte.errors import CalibrationError, CheckpointError
from halfbyte.formats.rows import Rows, new_rows
from halfbyte.formats.shards import Checks, ShardReader
from halfbyte.kernels.reference import add_rows, silu_gated
from halfbyte.kvcache.rows import Cache

EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass
class State:
    """What one layer hands to the next, for all calibration sequences."""

    hidden: Rows
    """[sequences, length, hidden_size], compute dtype."""
    topk: Rows | None = None
    """int32 [sequences, length, index_topk]: the tokens that sparse attention selected, for layers
    that share an indexer. None while every token is selected (length <= index_topk)."""


class LayerRunner:
    """Builds layers from a checkpoint of any encoding and moves a `State` through them."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, StoredWeight],
        reader: ShardReader,
        *,
        device: str,
        dtype: torch.dtype,
        placement: Placement = Placement(1),  # noqa: B008
        work: Path | None = None,
    ) -> None:
        """`placement` says where hidden states and experts' inputs lie; on the disk it is in the
        folder `work`, which need not exist yet."""
        self.architecture = architecture
        self._placement = placement
        self._work = work
        self.device = torch.device(device)
        self.dtype = dtype
        self._weights = weights
        self._reader = reader
        self._rotary = architecture.rotary(self.device)

    def read(
        self, name: str, dtype: torch.dtype | None = None, checks: Checks | None = None
    ) -> torch.Tensor:
        """A weight, decoded, on the compute device. Raises CheckpointError when it is missing."""
        stored = self._stored(name)
        return self._reader.read_weight(stored, dtype or self.dtype, self.device, checks)

    def _stored(self, name: str) -> StoredWeight:
        if (stored := self._weights.get(name)) is None:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        return stored

    def embed(self, tokens: torch.Tensor) -> State:
        """State before layer 0. `tokens` is int64 [sequences, length]."""
        table = self.read(self.architecture.prefix + "model.embed_tokens.weight")
        state = State(self.new_states((*tokens.shape, table.shape[1])))
        for rows in batches(*tokens.shape):
            state.hidden[rows] = nn.functional.embedding(tokens[rows].to(self.device), table)
        return state

    def new_states(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Rows:
        """Room for what layers hand on [sequences, length, width], in the compute dtype if no other
        is given."""
        place = self._placement.states
        return new_rows(place, shape, dtype or self.dtype, self.device, self._work)

    def new_inputs(self, tokens: int, width: int) -> Rows:
        """Room for the input of a layer's routed experts [tokens, width]."""
        place = self._placement.inputs
        return new_rows(place, (tokens, width), self.dtype, self.device, self._work)

    def norm(self, name: str) -> nn.Module:
        """An RMSNorm of the model, by the name of its weight without the prefix."""
        norm = self.architecture.norm()
        norm.weight = nn.Parameter(self.read(self.architecture.prefix + name), requires_grad=False)
        return norm

    def head(self) -> torch.Tensor:
        """[vocabulary, hidden_size]: the output projection, which may be the embedding."""
        prefix = self.architecture.prefix
        name = prefix + "lm_head.weight"
        return self.read(name if name in self._weights else prefix + "model.embed_tokens.weight")

    def check_layer(self, index: int) -> nn.Module:
        """A decoder layer without its weights, which the checkpoint has, and in its shapes.

        Raises CheckpointError for the first that is missing or of another shape.
        """
        layer = self.architecture.layer(index)
        prefix = self.architecture.layer_name(index)
        shapes = {name: tensor.shape for name, tensor in _tensors(layer) if ".experts." not in name}
        if hasattr(layer.mlp, "experts"):
            config = self.architecture.config
            wide = torch.Size([config.moe_intermediate_size, config.hidden_size])
            for expert in range(config.n_routed_experts):
                for leaf in EXPERT_LINEARS:
                    shape = wide if leaf != "down_proj" else wide[::-1]
                    shapes[f"mlp.experts.{expert}.{leaf}.weight"] = torch.Size(shape)
        for name, shape in shapes.items():
            stored = self._stored(prefix + name)
            if stored.shape != tuple(shape):
                raise CheckpointError(
                    f"{prefix + name} has shape {list(stored.shape)}, "
                    f"the configuration says {list(shape)}"
                )
        return layer

    def load_layer(self, index: int) -> nn.Module:
        """A decoder layer with all its weights but the routed experts'.

        Raises CheckpointError as `check_layer` does.
        """
        layer = self.check_layer(index)
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ExpertsTakenOut(self.architecture.config.num_experts_per_tok)
        attention: Any = layer.self_attn
        if getattr(attention, "indexer", None) is not None:
            attention.indexer = SlicedIndexer(attention.indexer)
        prefix, checks = self.architecture.layer_name(index), Checks()
        for name, empty in _tensors(layer):
            # The router decides in float32 in the reference; so do the indexer's head weights.
            exact = "mlp.gate." in name or "weights_proj" in name
            tensor = self.read(prefix + name, torch.float32 if exact else None, checks)
            owner, _, leaf = name.rpartition(".")
            setattr(
                layer.get_submodule(owner),
                leaf,
                nn.Parameter(tensor, requires_grad=False)
                if isinstance(empty, nn.Parameter)
                else nn.Buffer(tensor),
            )
        checks.settle()
        return layer

    @torch.no_grad()
    def forward(self, layer: nn.Module, state: State, *, keep: bool = True) -> Routing | None:
        """Move `state` through a layer, the routed experts excepted.

        Returns what they need, None for a dense layer. With `keep=False` the state stays as it
        was; forward hooks on the layer's linears then see their inputs and nothing else happens.
        """
        length = state.hidden.shape[1]
        self.architecture.choose_attention(length)
        position = torch.arange(length, device=self.device)[None]
        always = {
            "position_ids": position,
            "position_embeddings": self._rotary(state.hidden[:1], position),
        }
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None and keep:
            experts.expect(self.new_inputs(len(state.hidden) * length, state.hidden.shape[2]))
        sparse = self.architecture.index_topk is not None
        selected = state.topk
        for rows in batches(*state.hidden.shape[:2]):
            arguments = self._sparse_arguments(layer, state, rows) if sparse else {}
            out = layer(state.hidden[rows], **always, **arguments)
            if sparse:
                out, chosen = out
                if keep and chosen.shape[-1] < length:
                    if selected is None:
                        shape = (len(state.hidden), length, chosen.shape[-1])
                        selected = self.new_states(shape, torch.int32)
                    selected[rows] = chosen
            if keep:
                state.hidden[rows] = out
        if not keep:
            return None
        state.topk = selected
        if experts is None:
            return None
        hidden, index, weight = experts.take()
        return Routing(hidden, index, weight, self.architecture.config.n_routed_experts)

    def _sparse_arguments(
        self, layer: nn.Module, state: State, rows: slice
    ) -> dict[str, torch.Tensor]:
        """What a layer with sparse attention wants besides: the causal mask, as its indexer needs
        it, and the selection that a layer without an indexer reuses."""
        length, topk = state.hidden.shape[1], self.architecture.index_topk
        assert topk is not None
        mask = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        if state.topk is not None:
            chosen = state.topk[rows]
        else:
            every = torch.arange(length, dtype=torch.int32, device=self.device)
            chosen = every.expand(_count(rows), length, length)
        if length <= topk:
            # An indexer would select every token: give the layer that instead of running it.
            attention: Any = layer.self_attn
            attention.indexer = None
        return {
            "attention_mask": mask.expand(_count(rows), 1, -1, -1),
            "prev_topk_indices": chosen,
        }

    def load_experts(
        self, index: int, experts: Sequence[int], leaves: Sequence[str]
    ) -> torch.Tensor:
        """Linears of some experts, each expert's stacked by their rows: float32 [experts, N, K]."""
        prefix = f"{self.architecture.layer_name(index)}mlp.experts."
        stored = [[self._stored(f"{prefix}{e}.{leaf}.weight") for leaf in leaves] for e in experts]
        heights = [weight.shape[0] for weight in stored[0]]
        shape = len(experts), sum(heights), stored[0][0].shape[1]
        stack = torch.empty(shape, device=self.device)
        checks = Checks()
        for own, rows in zip(stored, stack, strict=True):
            for weight, part in zip(own, rows.split(heights), strict=True):
                self._reader.read_weight(weight, torch.float32, self.device, checks, out=part)
        checks.settle()
        return stack

    @torch.no_grad()
    def inner(self, hidden: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        """Input of an expert's down projection, [n, I]: act(x gateᵀ) * (x upᵀ).

        `gate_up` [2 I, H] are the weights of both, gate first.
        """
        both = hidden @ gate_up.T.to(self.dtype)
        if self.architecture.config.hidden_act == "silu":
            return silu_gated(both)
        gate, up = both.chunk(2, dim=-1)
        inner: torch.Tensor = self.architecture.activation()(gate)
        return inner.mul_(up)

    @torch.no_grad()
    def add_expert(
        self,
        hidden: torch.Tensor,
        inputs: torch.Tensor,
        dispatch: Dispatch,
        expert: int,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Add one expert's weighted output to `hidden` [n, hidden_size], in place.

        `weights` are gate_up [2 I, H] and down [H, I].
        `inputs` [n, hidden_size] are the experts' input for the same tokens, which `dispatch`
        sends to their experts.
        """
        if not dispatch.tokens(expert):
            return
        rows = dispatch.rows(expert)
        output = self.inner(inputs[rows], weights["gate_up"]) @ weights["down"].T.to(self.dtype)
        # A token reaches an expert once, so the order of additions is that of the experts.
        add_rows(hidden, rows, output, dispatch.weight(expert))

    def advance(self, index: int, *states: State, cache: Cache | None = None) -> None:
        """Move each of `states`, whose sequences may differ in length, through layer `index` as the
        checkpoint holds it, experts one at a time. With `cache` the layer attends to what that
        gives back."""
        layer = self.load_layer(index)
        if cache is not None:
            put_cache(layer.get_submodule("self_attn"), cache)
        routed = []
        # The longest first: sequences of at most index_topk tokens take the layer's indexer away.
        for state in sorted(states, key=lambda state: -state.hidden.shape[1]):
            if (routing := self.forward(layer, state)) is not None:
                routed.append((state, state.hidden[:], routing.hidden[:], routing.dispatch()))
        experts = self.architecture.config.n_routed_experts if routed else 0
        for expert in range(experts):
            if any(dispatch.tokens(expert) for *_, dispatch in routed):
                gate_up = self.load_experts(index, [expert], ("gate_proj", "up_proj"))[0]
                down = self.load_experts(index, [expert], ("down_proj",))[0]
                weights = {"gate_up": gate_up, "down": down}
                for _, whole, inputs, dispatch in routed:
                    self.add_expert(whole.flatten(0, 1), inputs, dispatch, expert, weights)
        for state, whole, *_ in routed:
            state.hidden[:] = whole
        for state in states:
            check_finite(state.hidden, f"layer {index}")


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by name."""
    return [*module.named_parameters(), *module.named_buffers()]


def batches(sequences: int, length: int) -> Iterator[slice]:
    """Slices of whole sequences, of about `BATCH_TOKENS` tokens; none when there are no tokens."""
    step = max(1, BATCH_TOKENS // max(1, length))
    for start in range(0, sequences if length else 0, step):
        yield slice(start, min(start + step, sequences))


def expert_batches(sequences: int, length: int) -> list[slice]:
    """Slices of whole batches, of about `EXPERT_TOKENS` tokens: what goes through the experts of a
    layer together, and what a rank is given whole, so that no sum depends on how many there are."""
    length = max(1, length)
    step = max(1, BATCH_TOKENS // length) * max(1, EXPERT_TOKENS // BATCH_TOKENS)
    return [slice(start, min(start + step, sequences)) for start in range(0, sequences, step)]


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)


def check_finite(hidden: Rows, where: str) -> None:
    """Raises CalibrationError when an activation [sequences, length, width] is NaN or infinite."""
    # The extremes carry NaN and infinity, and need no memory of the size of the states.
    parts = list(batches(*hidden.shape[:2]))
    extremes = [extreme for rows in parts for extreme in hidden[rows].aminmax()]
    if extremes and not bool(torch.isfinite(torch.stack(extremes)).all()):
        bad = sum(int((~torch.isfinite(hidden[rows])).sum()) for rows in parts)
        raise CalibrationError(
            f"{bad} of {hidden.shape.numel()} activations after {where} are NaN or infinite",
            hint="compute in float32: --dtype float32",
        )
