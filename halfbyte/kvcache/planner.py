"""How many tokens of KV cache fit beside the weights: a node, a model's sizes, and arithmetic.

    room   = memory free before loading x fraction - weights on the GPU
    tokens = room / bytes of a token, in whole pages, x groups of GPUs with requests of their own

docs/kv-cache.md has the sources and the table against published figures.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.errors import UsageError
from halfbyte.kvcache.layout import Attention, Kv, Part, kv_parts
from halfbyte.units import format_gib

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, and its memory in bytes as CUDA reports it."""

    name: str
    nbytes: int


GPUS: Mapping[str, Gpu] = {
    "h100": Gpu("H100 80GB", round(79.11 * GIB)),
    "h200": Gpu("H200", round(139.80 * GIB)),
    "b200": Gpu("B200", round(178.35 * GIB)),
}
"""By the name that `--gpu` takes. H200 was measured; H100: vllm-project/vllm#27508, B200:
pytorch/ao#4002."""

CONTEXT_BYTES = round(1.3 * GIB)
"""What CUDA's context and NCCL take before weights are loaded; assumed."""
FRACTION = 0.835
"""Of free memory, for weights and KV cache: with this one value three published pools on eight H200
come out within 0.5 %. Servers choose theirs by what they need for activations and graphs."""
LATENT_PAGE, PAGE = 64, 16
"""Tokens of a page: of FlashMLA and DSA, and of vLLM for keys and values."""
CONTEXT = 32_768
"""Tokens of a request, if not told."""
CACHES: tuple[Kv, ...] = ("bf16", "fp8")
"""What is shown, if not told."""


@dataclass(frozen=True, slots=True)
class Node:
    """The GPUs of one server, and how it uses them."""

    gpu: Gpu
    gpus: int = 8
    fraction: float = FRACTION
    """Of memory free before loading, for weights and KV cache (SGLang's --mem-fraction-static)."""
    dp_attention: bool = False
    """Whether every GPU attends to requests of its own, instead of a share of all heads."""

    @property
    def free(self) -> int:
        """Bytes free on a GPU before weights are loaded."""
        return max(0, self.gpu.nbytes - CONTEXT_BYTES)

    @property
    def static(self) -> int:
        """Bytes of a GPU for weights and KV cache together."""
        return int(self.free * self.fraction)

    @property
    def sharing(self) -> int:
        """GPUs that share the attention of a request."""
        return 1 if self.dp_attention else self.gpus

    @property
    def of_total(self) -> float:
        """The same share as vLLM counts it, of all memory and with the context in it."""
        return (self.static + self.gpu.nbytes - self.free) / self.gpu.nbytes


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, or by its memory: `h200`, `96GiB`. Raises UsageError for neither."""
    if known := GPUS.get(name.lower()):
        return known
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*(GiB|GB)", name, flags=re.I | re.ASCII)
    if match and float(match[1]):
        step = GIB if match[2].lower() == "gib" else 10**9
        return Gpu(f"GPU with {match[1]} {match[2]}", round(float(match[1]) * step))
    close = difflib.get_close_matches(name.lower(), GPUS, n=1)
    raise UsageError(
        f"--gpu {name[:40]} is not known; known are {', '.join(GPUS)}",
        hint=f"--gpu {close[0]}" if close else "name its memory as CUDA reports it: --gpu 139.8GiB",
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one node serves with some weights and a cache in some format."""

    weights: str
    """Their format, or the name of a checkpoint."""
    kv: Kv
    on_each: int
    """Bytes of weights on each GPU."""
    parts: tuple[Part, ...]
    room: int
    """Bytes of a GPU left for the cache; negative where the weights do not fit."""
    tokens: int
    """Of all requests together."""
    requests: int
    """Of as many tokens as asked for, at once."""

    @property
    def per_token(self) -> int:
        """Bytes of a token on a GPU that has its request."""
        return sum(part.nbytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.tokens > 0


def tokens_that_fit(room: int, per_token: int, page: int) -> int:
    """Whole pages of tokens in so many bytes of one GPU."""
    return max(0, room) // per_token // page * page


def plan_capacity(
    attention: Attention,
    node: Node,
    weights: str,
    on_each: int,
    kv: Kv,
    *,
    context: int = CONTEXT,
    page: int | None = None,
    mtp: bool = True,
) -> Capacity:
    """The capacity of a node with `on_each` bytes of weights on each of its GPUs.

    Raises UsageError for GPUs that cannot share the heads, or a cache that the model does not have.
    """
    page = page or default_page(attention)
    parts = kv_parts(attention, kv, node.sharing, mtp=mtp)
    room = node.static - on_each
    in_group = tokens_that_fit(room, sum(part.nbytes for part in parts), page)
    groups = node.gpus // node.sharing
    requests = in_group // (-(-context // page) * page) * groups
    return Capacity(weights, kv, on_each, parts, room, in_group * groups, requests)


def default_page(attention: Attention) -> int:
    """Tokens of a page, if not told."""
    return LATENT_PAGE if attention.replicated else PAGE


def assumptions(attention: Attention, node: Node, page: int, *, mtp: bool) -> list[str]:
    """What the figures rest on, a sentence each."""
    gpu = node.gpu
    if node.dp_attention:
        spread = (
            f"DP attention, as SGLang has it: each of {node.gpus} GPUs has requests of its own, and"
            " all of attention and the embedding; experts, MLPs and head are divided"
        )
    elif attention.replicated:
        spread = (
            f"tensor parallel over {node.gpus}: every GPU holds all latent rows, so more GPUs add"
            " room only by holding less of the weights"
        )
    else:
        spread = f"tensor parallel over {node.gpus}: heads of keys and values are divided"
    draft = []
    if attention.mtp_layers:
        draft = ["MTP: its weights and rows are counted" if mtp else "MTP: left out, as is its use"]
    index = []
    if attention.index_layers:
        index = [
            f"index keys: FP8, on the {attention.index_layers} of {attention.layers} layers that"
            " run the indexer, and on every MTP layer"
        ]
    return [
        f"memory: {format_gib(gpu.nbytes)} on each {gpu.name}, {format_gib(node.free)} of it free"
        f" before loading ({format_gib(CONTEXT_BYTES)} for CUDA and NCCL, assumed)",
        f"fraction: {node.fraction:g} of what is free, for weights and cache, as SGLang's"
        f" --mem-fraction-static; vLLM's --gpu-memory-utilization counts from all memory and takes"
        f" activations and graphs out: {node.of_total:.3f} and what these need",
        "weights: as stored, norms, routers, indexer and first latent projections on every GPU;"
        " what servers make of them beside is within the other"
        f" {format_gib(node.free - node.static)}",
        spread,
        *index,
        *draft,
        f"pages of {page} tokens; no prefix that requests share",
    ]
