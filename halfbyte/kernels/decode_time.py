"""The matrix products of one decoder layer when tokens are generated, and what their times add up
to. Free of torch; `decode_run` measures them.

A layer is one with routed experts, as one GPU of a tensor-parallel group has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.errors import CheckpointError, UsageError

Format = Literal["bf16", "fp8", "int4"]
"""Of weights. Activations are FP8 beside FP8 weights, else BF16."""
BYTES: Mapping[Format, int] = {"bf16": 2, "fp8": 1}
"""Of a weight, and of an activation beside it."""

LayerFormat = Literal["fp8", "int4", "int4-fp8"]
LAYER_FORMATS: Mapping[LayerFormat, tuple[Format, Format]] = {
    "fp8": ("fp8", "fp8"),
    "int4": ("int4", "bf16"),
    "int4-fp8": ("int4", "fp8"),
}
"""Of routed experts, and of the other linears: an FP8 checkpoint, the recipe `glm-5`, and
`glm-5-fp8-rest`."""

LEFT_OUT = (
    "attention itself",
    "the indexer",
    "norms and activation functions outside of routed experts",
    "rounding activations to FP8",
    "communication between GPUs",
    "dense layers, embedding and head",
)
"""What takes time in a decoder and is not measured."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A product of every token with a weight [rows, columns], or with one to a head, each with
    inputs of its own."""

    name: str
    rows: int
    columns: int
    count: int = 1
    by_head: bool = False
    quantized: bool = True
    """Whether it is FP8 in an FP8 checkpoint; else BF16 in all."""

    @property
    def formats(self) -> tuple[Format, ...]:
        return ("bf16", "fp8") if self.quantized else ("bf16",)

    def format_in(self, layer: LayerFormat) -> Format:
        return LAYER_FORMATS[layer][1] if self.quantized else "bf16"

    def nbytes(self, form: Format, tokens: int) -> int:
        """Weights and activations once; results are BF16."""
        size = BYTES[form]
        weights = self.rows * self.columns * size
        return self.count * (weights + tokens * (self.columns * size + 2 * self.rows))


@dataclass(frozen=True, slots=True)
class Experts:
    """Both products of the routed experts, SiLU between them and the sum behind them."""

    count: int
    chosen: int
    """Of a token."""
    hidden: int
    intermediate: int
    name: str = "routed experts"

    def nbytes_fp8(self, active: float, tokens: int) -> float:
        """Weights of the experts that some token has, activations and results once."""
        return active * 3 * self.hidden * self.intermediate + tokens * 3 * self.hidden


@dataclass(frozen=True, slots=True)
class Layer:
    """What one of `ranks` GPUs multiplies in a layer."""

    ranks: int
    linears: tuple[Linear, ...]
    experts: Experts


def decoder_layer(config: Mapping[str, Any], ranks: int) -> Layer:
    """The layer of the text config `config`, split over `ranks` GPUs as servers split it.

    Raises CheckpointError for a config that lacks a size, and UsageError for `ranks` that do not
    divide what they split.
    """
    hidden = _size(config, "hidden_size")
    width = _split(config, "moe_intermediate_size", ranks)
    experts = Experts(
        _size(config, "n_routed_experts"), _size(config, "num_experts_per_tok"), hidden, width
    )
    if experts.chosen > experts.count:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {experts.chosen}, and n_routed_experts"
            f" {experts.count}"
        )
    latent = "kv_lora_rank" in config
    attention = _latent_attention if latent else _grouped_attention
    shared = _size(config, "n_shared_experts", 0) * width
    linears = [
        *attention(config, hidden, ranks),
        Linear("router", experts.count, hidden, quantized=False),
    ]
    if shared:
        linears.append(Linear("shared gate and up", 2 * shared, hidden))
        linears.append(Linear("shared down", hidden, shared))
    return Layer(ranks, tuple(linears), experts)


def _latent_attention(config: Mapping[str, Any], hidden: int, ranks: int) -> Iterator[Linear]:
    """Multi-head latent attention. Servers hold the first projections as one linear on every GPU,
    and decode kv_b, which they multiply queries and results with, head by head."""
    heads = _split(config, "num_attention_heads", ranks)
    latent, plain, rotary, value = (
        _size(config, key)
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query = config.get("q_lora_rank")
    if query is None:
        yield Linear("q", heads * (plain + rotary), hidden)
        yield Linear("kv_a", latent + rotary, hidden)
    else:
        query = _size(config, "q_lora_rank")
        yield Linear("q_a and kv_a", query + latent + rotary, hidden)
        yield Linear("q_b", heads * (plain + rotary), query)
    yield Linear("kv_b of keys", latent, plain, heads, by_head=True, quantized=False)
    yield Linear("kv_b of values", value, latent, heads, by_head=True, quantized=False)
    yield Linear("o", hidden, heads * value)


def _grouped_attention(config: Mapping[str, Any], hidden: int, ranks: int) -> Iterator[Linear]:
    """Grouped-query attention. Where key heads are fewer than GPUs, several have the same one."""
    heads = _split(config, "num_attention_heads", ranks)
    total = _size(config, "num_attention_heads")
    size = _size(config, "head_dim", hidden // total)
    keys = _size(config, "num_key_value_heads", total)
    if keys % ranks and ranks % keys:
        raise _indivisible("num_key_value_heads", keys, ranks)
    yield Linear("q, k and v", (heads + 2 * max(1, keys // ranks)) * size, hidden)
    yield Linear("o", hidden, heads * size)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        what = "no routed experts" if key == "n_routed_experts" else f"no {key}"
        raise CheckpointError(
            f"config.json has {what}: {key} is missing",
            hint="what is measured is a layer of a mixture-of-experts model, as GLM-5.2",
        )
    if type(value) is not int or value < (0 if default == 0 else 1):
        raise CheckpointError(f"config.json: {key} is {value!r:.80}, not a number of things")
    return value


def _split(config: Mapping[str, Any], key: str, ranks: int) -> int:
    size = _size(config, key)
    if size % ranks:
        raise _indivisible(key, size, ranks)
    return size // ranks


def _indivisible(key: str, size: int, ranks: int) -> UsageError:
    return UsageError(
        f"--tensor-parallel {ranks} does not divide {key}, which is {size}",
        hint=f"name the numbers of GPUs to measure for: --tensor-parallel 1{_other(size)}",
    )


def _other(size: int) -> str:
    best = max((n for n in (2, 4, 8, 16) if size % n == 0), default=0)
    return f" --tensor-parallel {best}" if best else ""


# Times.


@dataclass(frozen=True, slots=True)
class Timing:
    """A product in a format of weights, by a kernel."""

    format: Format
    kernel: str
    us: float
    overlapped: bool = False
    """Launched so that weights load before the kernel ahead has ended; never part of a sum."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """A product in all its formats; `product` says which."""

    product: Linear | Experts
    timings: tuple[Timing, ...]
    notes: tuple[str, ...] = ()
    """Of kernels that do not run here."""

    def fastest(self, form: Format) -> Timing:
        found = [t for t in self.timings if t.format == form and not t.overlapped]
        return min(found, key=lambda timing: timing.us)

    def in_layer(self, layer: LayerFormat) -> Timing:
        if isinstance(self.product, Experts):
            return self.fastest(LAYER_FORMATS[layer][0])
        return self.fastest(self.product.format_in(layer))


@dataclass(frozen=True, slots=True)
class LayerTime:
    """A layer of one GPU of `ranks` at a batch of so many tokens, one of each request."""

    ranks: int
    batch: int
    active: float
    """Experts that some token has, on average."""
    parts: tuple[PartTime, ...]
    bandwidth: float
    """Bytes a second that reading memory reached."""

    def us(self, layer: LayerFormat) -> float:
        return sum(part.in_layer(layer).us for part in self.parts)

    @property
    def bound_us(self) -> float:
        """What FP8 would take if every product read its bytes at the speed of memory."""
        total = 0.0
        for part in self.parts:
            match part.product:
                case Experts() as experts:
                    total += experts.nbytes_fp8(self.active, self.batch)
                case Linear() as linear:
                    total += linear.nbytes(linear.format_in("fp8"), self.batch)
        return total / self.bandwidth * 1e6

    def gain(self, layer: LayerFormat) -> float:
        """Percent by which it is faster than FP8 as measured."""
        return 100 * (self.us("fp8") / self.us(layer) - 1)

    def gain_over_bound(self, layer: LayerFormat) -> float:
        """The same over FP8 at the speed of memory."""
        return 100 * (self.bound_us / self.us(layer) - 1)
