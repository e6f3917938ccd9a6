"""Prefill and decode apart: which checkpoint serves which pool, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.kvcache.layout import read_attention
from halfbyte.kvcache.planner import GPUS, Capacity, Node, plan_capacity


@dataclass(frozen=True, slots=True)
class Pool:
    """Servers that do one half of the work."""

    role: Literal["prefill", "decode"]
    node: Node
    capacity: Capacity

    @property
    def flags(self) -> tuple[str, ...]:
        """What SGLang's command needs beside the checkpoint; vLLM takes the same cache format."""
        divided = ("--tp-size", str(self.node.gpus)) if self.node.gpus > 1 else ()
        return (
            *divided,
            "--kv-cache-dtype",
            "fp8_e4m3",
            "--disaggregation-mode",
            self.role,
        )


WORTH_IT = 1.01
"""Times the tokens from which on INT4 leaves more room, rather than as much."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Prefill by the source of a checkpoint, decode by the checkpoint."""

    prefill: Pool
    decode: Pool

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.prefill, self.decode

    @property
    def reason(self) -> str:
        """Why, in a sentence: what the figures of both pools say."""
        before, after = self.prefill.capacity, self.decode.capacity
        halves = "prefill is bound by arithmetic and takes the source, decode by memory and takes"
        if not after.fits:
            return "the INT4 checkpoint does not fit on such a node"
        if not before.fits:
            return f"{halves} INT4; the source does not fit on such a node"
        if after.tokens <= WORTH_IT * before.tokens:
            return "INT4 leaves no more room than the source, so decode gains none by it"
        return f"{halves} INT4, with room for {after.tokens / before.tokens:.2f} times the tokens"


def disaggregated(
    config: Mapping[str, Any], gpus: int, source: tuple[str, int], output: tuple[str, int]
) -> Apart:
    """A pool of H200 nodes for each half; `source` and `output` are the name of a checkpoint and
    its bytes of weights on each of `gpus`.

    Prefill is bound by arithmetic: tensor cores multiply FP8 faster than the BF16 that INT4 weights
    become. Decode is bound by memory: fewer bytes to read for a token, more room for requests. Rows
    are sent from one to the other as they are, so both caches are FP8.

    Raises what `kvcache.layout.read_attention` and `kv_parts` raise.
    """
    attention, node = read_attention(config), Node(GPUS["h200"], gpus)
    return Apart(
        Pool("prefill", node, plan_capacity(attention, node, *source, "fp8")),
        Pool("decode", node, plan_capacity(attention, node, *output, "fp8")),
    )
