"""Capacities as a table, lines and a JSON record; pure functions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.console import Column, Table
from halfbyte.core import Plan
from halfbyte.errors import HalfbyteError
from halfbyte.formats.servers import parallel_gpus
from halfbyte.kvcache.advice import Apart, disaggregated
from halfbyte.kvcache.layout import Attention
from halfbyte.kvcache.planner import Capacity, Node, assumptions
from halfbyte.kvcache.sizes import Format, sum_up
from halfbyte.units import format_gib


@dataclass(frozen=True)
class Answer:
    """What was asked of `capacity`, and what came out."""

    source: str
    attention: Attention
    stored: Format | None
    """The source's own format; None of a config.json alone."""
    recipe: str
    """Of INT4 weights that a plan gives."""
    node: Node
    context: int
    page: int
    mtp: bool
    capacities: tuple[Capacity, ...]


def record(answer: Answer) -> dict[str, Any]:
    """An answer as JSON; sizes in bytes, of one GPU."""
    node = answer.node
    return {
        "source": answer.source,
        "model_type": answer.attention.model_type,
        "stored": answer.stored,
        "gpu": asdict(node.gpu),
        "gpus": node.gpus,
        "dp_attention": node.dp_attention,
        "memory_fraction": node.fraction,
        "free": node.free,
        "context": answer.context,
        "page": answer.page,
        "mtp": answer.mtp,
        "capacities": [
            {
                "weights": c.weights,
                "kv": c.kv,
                "weights_on_each": c.on_each,
                "room": c.room,
                "bytes_per_token": c.per_token,
                "parts": [{**asdict(part), "nbytes": part.nbytes} for part in c.parts],
                "tokens": c.tokens,
                "requests": c.requests,
                "fits": c.fits,
            }
            for c in answer.capacities
        ],
        "assumptions": _assumptions(answer),
    }


def summary(answer: Answer) -> list[str]:
    """The lines above the tables."""
    stored = "config.json alone" if answer.stored is None else f"stored as {answer.stored.upper()}"
    return [
        f"source  {answer.source} ({answer.attention.model_type}; {stored})",
        f"node    {on(answer.node)}, {format_gib(answer.node.static)} of each for weights and"
        " cache",
    ]


def on(node: Node) -> str:
    """A node in words."""
    return f"{node.gpus} x {node.gpu.name}{' with DP attention' if node.dp_attention else ''}"


def capacity_table(answer: Answer) -> Table:
    """A row for each format of weights and of the cache."""
    return Table(
        columns=(
            Column("weights"),
            Column("KV cache"),
            Column("weights a GPU", number=True),
            Column("left for cache", number=True),
            Column("bytes a token", number=True),
            Column("tokens", number=True),
            Column(f"requests of {answer.context:,}", number=True),
        ),
        rows=tuple(
            (
                c.weights.upper(),
                c.kv.upper(),
                format_gib(c.on_each),
                format_gib(c.room) if c.room > 0 else f"{format_gib(-c.room)} short",
                f"{c.per_token:,}",
                f"{c.tokens:,}" if c.fits else "does not fit",
                f"{c.requests:,}",
            )
            for c in answer.capacities
        ),
    )


def parts_table(answer: Answer) -> Table:
    """What a token takes on a GPU, by pool of the cache, a column for each format of it."""
    by_kv = {c.kv: c for c in answer.capacities}
    first = next(iter(by_kv.values()))
    return Table(
        columns=(
            Column("layers x bytes a token"),
            *(Column(kv.upper(), number=True) for kv in by_kv),
        ),
        rows=tuple(
            (part.name, *(f"{part.layers} x {c.parts[i].row:,}" for c in by_kv.values()))
            for i, part in enumerate(first.parts)
        ),
        total=("total", *(f"{c.per_token:,}" for c in by_kv.values())),
    )


def notes(answer: Answer) -> list[str]:
    """The lines below the tables: every assumption."""
    return ["Assumed:", *(f"- {line}" for line in _assumptions(answer))]


def _assumptions(answer: Answer) -> list[str]:
    lines = assumptions(answer.attention, answer.node, answer.page, mtp=answer.mtp)
    return [*lines, *_formats(answer)]


def _formats(answer: Answer) -> list[str]:
    """Where the bytes of each format come from, and which rows FP8 has."""
    lines = []
    for form in dict.fromkeys(c.weights for c in answer.capacities):
        if form == answer.stored:
            origin = "by the headers"
        elif form == "int4" and answer.stored is not None:
            origin = f"by the plan of `quantize`, recipe {answer.recipe}"
        elif form == "int4":
            origin = "routed experts in groups of 32, everything else BF16"
        elif form == "fp8":
            origin = "linears in blocks of 128 x 128, everything else BF16"
        else:
            origin = "two bytes a value"
        lines.append(f"{form.upper()} weights: {origin}")
    if answer.stored is None:
        lines.append("the language model alone, without a vision part")
    if answer.attention.index_layers and any(c.kv == "fp8" for c in answer.capacities):
        lines.append(
            "FP8 cache: rows with their own scales and BF16 RoPE values (FlashMLA); those of"
            " TRT-LLM and TileLang have neither: --kv fp8-raw"
        )
    return lines


# Prefill and decode apart.


@dataclass(frozen=True)
class Serving:
    """Which checkpoint of a plan serves which pool, or why that is not known."""

    apart: Apart | None
    unknown: str | None = None

    @classmethod
    def of(cls, plan: Plan, output: str) -> Serving:
        """Of a plan whose result will be called `output`."""
        source, config = plan.checkpoint.origin, plan.checkpoint.config
        groups = {t.scheme.group_size or 1 for t in plan.tensors if t.scheme is not None}
        gpus = parallel_gpus(config, max(groups, default=1))
        sizes = (
            [(t.name, t.source.nbytes) for t in plan.tensors],
            [(t.name, sum(o.nbytes for o in t.outputs)) for t in plan.tensors],
        )
        before, after = (sum_up(size).on_each(gpus, gpus) for size in sizes)
        try:
            return cls(disaggregated(config, gpus, (source, before), (output, after)))
        except HalfbyteError as error:
            return cls(None, str(error))


def serving_record(serving: Serving) -> dict[str, Any]:
    """Pools as JSON; sizes in bytes, of one GPU."""
    apart = serving.apart
    return {
        "reason": None if apart is None else apart.reason,
        "pools": [
            {
                "role": pool.role,
                "checkpoint": pool.capacity.weights,
                "gpu": asdict(pool.node.gpu),
                "gpus": pool.node.gpus,
                "memory_fraction": pool.node.fraction,
                "kv": pool.capacity.kv,
                "weights_on_each": pool.capacity.on_each,
                "bytes_per_token": pool.capacity.per_token,
                "tokens": pool.capacity.tokens,
                "sglang_flags": list(pool.flags),
            }
            for pool in (() if apart is None else apart.pools)
        ],
        "unknown": serving.unknown,
    }


def serving_lines(serving: Serving) -> list[str]:
    """The lines below a plan's table: a pool each, and what it needs."""
    apart = serving.apart
    if apart is None:
        return [f"serving      room for KV cache is not estimated: {serving.unknown}"]
    node = apart.decode.node
    lines = [
        f"serving      prefill and decode apart, each on {node.gpus} x {node.gpu.name}, FP8 cache,"
        f" {node.fraction:g} of free memory; `quantize capacity` for others",
        f"             {apart.reason}",
    ]
    for pool in apart.pools:
        found = pool.capacity
        fits = f"{found.tokens:,} tokens of KV cache" if found.fits else "does not fit"
        lines.append(
            f"  {pool.role:<10} {found.weights}: {format_gib(found.on_each)} of weights a GPU,"
            f" {fits}; SGLang: {' '.join(pool.flags)}"
        )
    return lines
