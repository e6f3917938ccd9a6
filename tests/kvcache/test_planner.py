"""Tokens that fit, against published pools and a server's log, and the arithmetic around them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import UsageError
from halfbyte.kvcache.layout import Kv, read_attention
from halfbyte.kvcache.planner import (
    CONTEXT_BYTES,
    FRACTION,
    GPUS,
    Capacity,
    Gpu,
    Node,
    assumptions,
    find_gpu,
    plan_capacity,
    tokens_that_fit,
)
from halfbyte.kvcache.sizes import Format, format_sizes, sum_up, tensors_of
from halfbyte.testing.glm52 import glm52_config

from .published import GLM_45, KIMI_K26, QWEN3_235B

GIB = 2**30
GLM_52 = glm52_config()


def capacity(
    config: dict[str, Any],
    weights: Format,
    kv: Kv,
    node: Node = Node(GPUS["h200"]),  # noqa: B008
    **options: Any,
) -> Capacity:
    on_each = sum_up(format_sizes(tensors_of(config), weights)).on_each(node.gpus, node.sharing)
    return plan_capacity(read_attention(config), node, weights, on_each, kv, **options)


def test_tokens_as_logged() -> None:
    """vllm-project/recipes#115: 46.80 GiB of BF16 rows in pages of 64 are 715,072 tokens."""
    assert tokens_that_fit(round(46.80 * GIB), 70_272, 64) == 715_072


@pytest.mark.parametrize(
    ("config", "kv", "published"),
    [(KIMI_K26, "bf16", 686e3), (KIMI_K26, "fp8", 1.37e6), (GLM_52, "fp8", 1.18e6)],
)
def test_published_pools_at_one_fraction(config: dict[str, Any], kv: Kv, published: float) -> None:
    """INT4 weights on eight H200. The fraction is not published, but it is one for all three."""
    assert capacity(config, "int4", kv).tokens == pytest.approx(published, rel=0.006)


def test_int4_leaves_more_than_twice_the_room_of_fp8() -> None:
    int4, fp8 = (capacity(GLM_52, form, "fp8") for form in ("int4", "fp8"))
    assert 2.2 < int4.tokens / fp8.tokens < 2.5
    assert int4.on_each + int4.room == fp8.on_each + fp8.room == int((139.8 - 1.3) * GIB * FRACTION)


def test_weights_that_do_not_fit() -> None:
    found = capacity(GLM_52, "bf16", "fp8")
    assert (found.tokens, found.requests, found.fits) == (0, 0, False)
    assert found.room == pytest.approx(-62.5 * GIB, abs=0.1 * GIB)


def test_dp_attention_holds_other_requests_on_every_gpu() -> None:
    node = Node(GPUS["h200"], dp_attention=True)
    shared, apart = capacity(GLM_52, "int4", "fp8"), capacity(GLM_52, "int4", "fp8", node)
    assert apart.per_token == shared.per_token == 54_728
    assert apart.tokens == 8 * tokens_that_fit(apart.room, 54_728, 64)
    # Attention but for what every GPU has anyway, and the embedding: on each GPU, not an eighth.
    attention = 2 * (79 * (33_554_432 + 14_680_064 + 100_663_296) + 154_880 * 6144)
    assert apart.on_each - shared.on_each == attention - attention // 8
    # Keys and values: all heads of a GPU's own requests instead of some heads of all requests.
    assert capacity(GLM_45, "fp8", "bf16", node).per_token == 93 * 8 * 2 * 128 * 2


def test_requests_take_whole_pages_of_one_group() -> None:
    attention, node = read_attention(KIMI_K26), Node(GPUS["h200"], gpus=2, dp_attention=True)
    room = 1000 * 64 * 70_272
    plan = lambda context: plan_capacity(  # noqa: E731
        attention, node, "int4", node.static - room, "bf16", context=context
    )
    assert plan(64).tokens == 2 * 64_000
    assert [plan(n).requests for n in (1, 64, 65, 21_333, 21_440, 64_000, 64_001)] == [
        2000, 2000, 1000, 4, 4, 2, 0,
    ]  # fmt: skip


def test_without_the_mtp_layer() -> None:
    attention = read_attention(GLM_52)
    assert sum(p.nbytes for p in capacity(GLM_52, "int4", "fp8", mtp=False).parts) == (
        78 * 656 + 21 * 132
    )
    node = Node(GPUS["h200"])
    assert "MTP: left out" in "\n".join(assumptions(attention, node, 64, mtp=False))


@given(
    room=st.integers(-(10**12), 10**12), per_token=st.integers(1, 10**6), page=st.integers(1, 4096)
)
def test_tokens_fill_the_room(room: int, per_token: int, page: int) -> None:
    tokens = tokens_that_fit(room, per_token, page)
    assert tokens % page == 0
    assert tokens * per_token <= max(room, 0) < (tokens + page) * per_token


@given(total=st.integers(2 * GIB, 400 * GIB), fraction=st.floats(0.01, 1.0), gpus=st.integers(1, 8))
def test_both_servers_ways_to_count_the_fraction(total: int, fraction: float, gpus: int) -> None:
    """SGLang: of free memory before loading. vLLM: of all memory, the context in it."""
    node = Node(Gpu("any", total), gpus, fraction)
    assert node.of_total * total - CONTEXT_BYTES == pytest.approx(node.static, abs=1)
    assert 0 < node.static <= total - CONTEXT_BYTES


def test_gpus() -> None:
    assert find_gpu("H200") == GPUS["h200"]
    assert find_gpu("96GiB").nbytes == 96 * GIB
    assert find_gpu("141 gb").nbytes == 141 * 10**9
    with pytest.raises(UsageError, match="--gpu h20 is not known; known are h100, h200, b200") as e:
        find_gpu("h20")
    assert e.value.hint == "--gpu h200"
    for wrong in ("", "0GiB", "-5GiB", "1e9GiB", "tpu", "9" * 5000 + "GiB"):
        with pytest.raises(UsageError, match="is not known"):
            find_gpu(wrong)


def test_a_context_larger_than_the_gpu_leaves_nothing() -> None:
    assert Node(Gpu("small", GIB)).static == 0


def test_every_assumption_is_said() -> None:
    glm = assumptions(read_attention(GLM_52), Node(GPUS["h200"], 8, 0.835), 64, mtp=True)
    text = "\n".join(glm)
    for fact in (
        "139.8 GiB on each H200, 138.5 GiB of it free",
        "0.835 of what is free",
        "--gpu-memory-utilization counts from all memory",
        "0.837 and what these need",
        "every GPU holds all latent rows",
        "21 of 78 layers",
        "MTP: its weights and rows are counted",
        "pages of 64 tokens",
    ):
        assert fact in text
    qwen = assumptions(read_attention(QWEN3_235B), Node(GPUS["h200"], 4), 16, mtp=True)
    assert "heads of keys and values are divided" in "\n".join(qwen)
    assert not any("MTP" in line or "index" in line.split(":")[0] for line in qwen)
