"""Which checkpoint serves which pool, for sizes of every kind."""

from __future__ import annotations

import pytest

from halfbyte.errors import UnsupportedModelError
from halfbyte.kvcache.advice import Apart, disaggregated
from halfbyte.kvcache.sizes import format_sizes, sum_up, tensors_of
from halfbyte.testing.glm52 import glm52_config

from .published import GLM_45

GIB = 2**30
GLM_52 = glm52_config()


def advice(source: int, output: int, gpus: int = 8) -> Apart:
    return disaggregated(GLM_52, gpus, ("GLM-FP8", source), ("GLM-INT4", output))


def test_glm_52_apart() -> None:
    source, output = (
        sum_up(format_sizes(tensors_of(GLM_52), form)).on_each(8, 8) for form in ("fp8", "int4")
    )
    apart = advice(source, output)
    assert [(p.role, p.capacity.weights, p.capacity.tokens) for p in apart.pools] == [
        ("prefill", "GLM-FP8", 513_088),
        ("decode", "GLM-INT4", 1_185_472),
    ]
    assert apart.reason == (
        "prefill is bound by arithmetic and takes the source, decode by memory and takes INT4,"
        " with room for 2.31 times the tokens"
    )
    for pool in apart.pools:
        assert pool.capacity.per_token == 54_728
        assert " ".join(pool.flags) == (
            f"--tp-size 8 --kv-cache-dtype fp8_e4m3 --disaggregation-mode {pool.role}"
        )


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        (150, 60, "takes INT4; the source does not fit on such a node"),
        (150, 140, "the INT4 checkpoint does not fit on such a node"),
        (60, 60, "INT4 leaves no more room than the source, so decode gains none by it"),
        (50, 60, "INT4 leaves no more room than the source, so decode gains none by it"),
        (88, 52, "with room for 2.3"),
    ],
)
def test_the_reason_is_what_the_figures_say(source: int, output: int, expected: str) -> None:
    assert expected in advice(source * GIB, output * GIB).reason


def test_one_gpu_is_not_divided() -> None:
    assert "--tp-size" not in advice(1, 1, gpus=1).decode.flags


def test_an_unknown_cache_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError):
        disaggregated(GLM_45 | {"model_type": "mamba"}, 8, ("a", 1), ("b", 1))
