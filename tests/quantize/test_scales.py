"""Scales: compressed-tensors' own rule, a better one by search, and what both must keep to."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.core import ScaleSearch, Scheme
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize import scales as scales_module
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import divisors_of, group_scales, least_squares_scales
from halfbyte.testing.numeric import first_difference

SMALLEST_NORMAL = 2.0**-126
"""Of bfloat16, as of float32."""

SEARCHES: tuple[ScaleSearch, ...] = ("minmax", "mse")


def weights_like_an_expert(batch: int, rows: int, columns: int) -> torch.Tensor:
    """Normal, with the odd outlier."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(batch, rows, columns, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) > 0.999] *= 5
    return weights * 0.02


def squared_error(
    weights: torch.Tensor, scales: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None
) -> torch.Tensor:
    """Of each group, in float64: [B, N, groups]."""
    codes = round_to_nearest(weights, scales, scheme)
    quantized = torch.stack(
        [dequantize_int4(c, s) for c, s in zip(codes, scales, strict=True)]
    ).double()
    error = (weights.double() - quantized).square()
    if importance is not None:
        error = error * importance.double().unsqueeze(-2)
    return error.unflatten(-1, (scales.shape[-1], -1)).sum(-1)


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_minmax_is_the_rule_of_compressed_tensors(bits: int, group_size: int | None) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = weights_like_an_expert(2, 16, 256)
    scheme = Scheme(bits, group_size)
    grouped = weights.unflatten(-1, (scheme.groups(256), -1))
    arguments = QuantizationArgs(num_bits=bits, symmetric=True)
    expected, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    scales = group_scales(weights, scheme, "minmax")
    assert first_difference(scales, expected.bfloat16()) is None


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("weighted", [False, True])
def test_search_is_no_worse_than_either_convention_in_any_group(
    group_size: int | None, weighted: bool
) -> None:
    weights, scheme = weights_like_an_expert(2, 32, 512), Scheme(group_size=group_size)
    importance = torch.rand(2, 512, generator=torch.Generator().manual_seed(4)) ** 4
    importance = importance if weighted else None
    found = squared_error(
        weights, group_scales(weights, scheme, "mse", importance), scheme, importance
    )
    largest = weights.unflatten(-1, (scheme.groups(512), -1)).abs().amax(-1)
    for divisor in (7.5, 7.0):
        scales = (largest / divisor).bfloat16()
        plain = squared_error(weights, scales, scheme, importance)
        assert bool((found <= plain * (1 + 1e-5)).all())
        assert float(found.sum()) < 0.95 * float(plain.sum())


def test_search_finds_the_minimum_of_a_fine_grid_nearly() -> None:
    weights, scheme = weights_like_an_expert(1, 32, 256), Scheme(group_size=128)
    found = squared_error(weights, group_scales(weights, scheme, "mse"), scheme, None)
    largest = weights.unflatten(-1, (2, 128)).abs().amax(-1)
    fine = torch.stack(
        [
            squared_error(weights, (largest / divisor).bfloat16(), scheme, None)
            for divisor in torch.linspace(6.5, 25, 800).tolist()
        ]
    )
    assert float(found.sum()) < 1.01 * float(fine.amin(0).sum())


@pytest.mark.parametrize("signed", [False, True])
def test_importance_moves_the_scale_towards_the_columns_that_count(signed: bool) -> None:
    """One large weight among small ones: clipped when its input is silent, kept when it is not."""
    weights = torch.full((1, 1, 32), 0.3)
    weights[0, 0, 5] = 1.0
    silent, loud = torch.ones(1, 32), torch.ones(1, 32)
    silent[0, 5], loud[0, 5] = 0, 1e6
    clipping, keeping = (
        float(dequantized(weights, group_scales(weights, Scheme(), "mse", i, signed=signed))[0, 5])
        for i in (silent, loud)
    )
    assert clipping < 0.9
    assert keeping == pytest.approx(1.0, rel=0.01)


def dequantized(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize_int4(round_to_nearest(weights, scales, Scheme())[0], scales[0])


def candidates(scheme: Scheme, group: int, *, signed: bool) -> list[float]:
    """What the largest magnitude may be divided by, the first wins ties: written from the page."""
    half = (2**scheme.bits - 1) / 2
    smallest = 0.7 if group <= 128 else 0.4
    positive = [half, float(scheme.code_max), *([float(-scheme.code_min)] if signed else [])]
    steps = round((1 - smallest) / 0.02)
    positive += [half / (1 - 0.02 * step) for step in range(1, steps + 1)]
    return positive + ([-divisor for divisor in positive] if signed else [])


def brute_force(
    group: list[float], importance: list[float], divisors: list[float], scheme: Scheme
) -> tuple[float, float]:
    """Best scale of one group and its squared error, candidate by candidate in float64."""
    largest = max(abs(w) for w in group)
    best, least = 0.0, float("inf")
    for divisor in divisors:
        scale = float(torch.tensor(largest / divisor).bfloat16())
        error = 0.0
        for weight, factor in zip(group, importance, strict=True):
            code = min(max(round(weight / scale), scheme.code_min), scheme.code_max)
            error += factor * (weight - code * scale) ** 2
        if error < least:
            best, least = scale, error
    return best, least


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", [Scheme(), Scheme(group_size=None), Scheme(bits=8)], ids=str)
def test_search_is_brute_force_over_its_candidates(
    scheme: Scheme, weighted: bool, signed: bool
) -> None:
    weights = weights_like_an_expert(2, 6, 192)
    importance = torch.rand(2, 192, generator=torch.Generator().manual_seed(4)) ** 4
    found = group_scales(weights, scheme, "mse", importance if weighted else None, signed=signed)
    group = scheme.columns_per_group(192)
    divisors = candidates(scheme, group, signed=signed)
    different = 0
    for item, row, column in product(range(2), range(6), range(0, 192, group)):
        part = slice(column, column + group)
        loudness = importance[item, part].tolist() if weighted else [1.0] * group
        values = weights[item, row, part].tolist()
        best, least = brute_force(values, loudness, divisors, scheme)
        scale = float(found[item, row, column // group])
        if scale != best:
            # Only float32 may have decided between two that are equally good.
            different += 1
            divisor = max(abs(v) for v in values) / scale
            _, error = brute_force(values, loudness, [divisor], scheme)
            assert error == pytest.approx(least, rel=1e-5)
    assert different <= found.numel() // 20


def test_a_scale_is_negative_where_that_gives_less_error() -> None:
    weights, scheme = weights_like_an_expert(2, 64, 256), Scheme()
    signed = group_scales(weights, scheme, "mse")
    unsigned = group_scales(weights, scheme, "mse", signed=False)
    assert bool((unsigned > 0).all())
    least = {
        sign: torch.stack(
            [
                squared_error(weights, (largest_of(weights, 32) / d).bfloat16(), scheme, None)
                for d in candidates(scheme, 32, signed=True)
                if d * sign > 0
            ]
        ).amin(0)
        for sign in (1, -1)
    }
    clear = (least[1] - least[-1]).abs() > 1e-5 * least[1]
    assert bool(clear.float().mean() > 0.9)
    assert torch.equal((signed < 0)[clear], (least[-1] < least[1])[clear])
    assert 0.3 < float((signed < 0).float().mean()) < 0.7
    errors = [float(squared_error(weights, s, scheme, None).sum()) for s in (signed, unsigned)]
    assert errors[0] < 0.95 * errors[1]


def test_a_negative_scale_gives_the_largest_weight_the_code_that_only_it_has() -> None:
    weights = torch.linspace(-1, 1, 33)[1:].reshape(1, 1, 32)  # the largest is positive
    scales = group_scales(weights, Scheme(), "mse")
    codes = round_to_nearest(weights, scales, Scheme())
    assert float(scales) < 0
    assert (int(codes[0, 0, -1]), int(codes.min())) == (-8, -8)
    turned = group_scales(-weights, Scheme(), "mse")
    assert float(turned) == -float(scales)


def largest_of(weights: torch.Tensor, group: int) -> torch.Tensor:
    return weights.unflatten(-1, (-1, group)).abs().amax(-1)


def test_groups_of_zeros_keep_a_positive_scale() -> None:
    weights = weights_like_an_expert(1, 8, 96)
    weights[:, :, 32:64] = 0
    scales = group_scales(weights, Scheme(), "mse", torch.rand(1, 96))
    assert bool((scales[:, :, 1] == SMALLEST_NORMAL).all())
    assert bool((scales != 0).all())
    assert not bool(round_to_nearest(weights, scales, Scheme())[:, :, 32:64].any())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("shape", [(2, 129, 384), (1, 3, 40_960), (1, 1, 128)])
@pytest.mark.parametrize("weighted", [False, True])
def test_searching_a_few_rows_at_a_time_changes_no_bit(
    shape: tuple[int, int, int],
    group_size: int | None,
    weighted: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the search over whole matrices."""
    weights, scheme = weights_like_an_expert(*shape), Scheme(group_size=group_size)
    importance = torch.rand(shape[0], shape[2], generator=torch.Generator().manual_seed(4))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(scales_module, "CACHED", 9 * shape[2])
    try:
        found = group_scales(weights, scheme, "mse", importance if weighted else None)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for item, weight in enumerate(weights):
        grouped = weight.unflatten(-1, (scheme.groups(shape[2]), -1))
        columns = importance[item].sqrt().unflatten(-1, grouped.shape[-2:]) if weighted else None
        divisors = divisors_of(scheme, grouped.shape[-1], signed=True)
        whole = least_squares_scales(grouped, scheme, divisors, columns)
        assert torch.equal(found[item].view(torch.int16), whole.view(torch.int16))


def test_one_importance_serves_the_whole_batch() -> None:
    weights, importance = weights_like_an_expert(3, 8, 64), torch.rand(1, 64)
    shared = group_scales(weights, Scheme(), "mse", importance)
    each = group_scales(weights, Scheme(), "mse", importance.expand(3, -1).contiguous())
    assert first_difference(shared, each) is None


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-37])
def test_tiny_groups_get_a_positive_normal_scale(search: ScaleSearch, size: float) -> None:
    weights = torch.full((1, 2, 64), size)
    scales = group_scales(weights, Scheme(), search)
    assert float(scales.min()) >= SMALLEST_NORMAL
    assert not bool(round_to_nearest(torch.zeros(1, 2, 64), scales, Scheme()).any())


def test_no_importance_at_all_means_the_usual_scale() -> None:
    weights = weights_like_an_expert(1, 4, 64)
    scales = group_scales(weights, Scheme(), "mse", torch.zeros(1, 64))
    assert first_difference(scales, group_scales(weights, Scheme(), "minmax")) is None


values = st.floats(-4, 4, width=32)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    scheme = Scheme(group_size=draw(st.sampled_from([8, 32, None])))
    columns = groups * (scheme.group_size or 8)
    flat = draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    return {
        "weights": torch.tensor(flat).view(1, rows, columns),
        "scheme": scheme,
        "search": draw(st.sampled_from(SEARCHES)),
        "signed": draw(st.booleans()),
    }


@given(cases())
@settings(max_examples=150, deadline=None)
def test_scales_and_codes_keep_their_bounds(case: dict[str, Any]) -> None:
    weights, scheme = case["weights"], case["scheme"]
    scales = group_scales(weights, scheme, case["search"], signed=case["signed"])
    assert scales.dtype == torch.bfloat16
    assert scales.shape == (*weights.shape[:2], scheme.groups(weights.shape[-1]))
    assert float(scales.abs().min()) >= SMALLEST_NORMAL
    assert (case["signed"] and case["search"] == "mse") or float(scales.min()) > 0
    codes = round_to_nearest(weights, scales, scheme)
    assert codes.dtype == torch.int8
    assert int(codes.min()) >= scheme.code_min
    assert int(codes.max()) <= scheme.code_max
    error = (weights[0] - dequantize_int4(codes[0], scales[0])).abs()
    step = scales[0].float().repeat_interleave(scheme.columns_per_group(weights.shape[-1]), dim=1)
    inside = (weights[0] / step > scheme.code_min - 0.5) & (
        weights[0] / step < scheme.code_max + 0.5
    )
    assert bool((error[inside] <= step[inside].abs() * (0.5 + 1e-6)).all())
    if case["search"] == "minmax":
        # 7.5 steps, the largest magnitude, may lose half a step and the rounding of the scale.
        assert bool((error <= step * 0.54).all())


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_rows_do_not_depend_on_each_other(case: dict[str, Any], random: Any) -> None:
    weights, scheme = case["weights"], case["scheme"]
    order = list(range(weights.shape[1]))
    random.shuffle(order)
    scales, moved = (
        group_scales(w, scheme, case["search"], signed=case["signed"])
        for w in (weights, weights[:, order])
    )
    assert first_difference(moved, scales[:, order]) is None
    codes = round_to_nearest(weights, scales, scheme)
    assert (
        first_difference(round_to_nearest(weights[:, order], moved, scheme), codes[:, order])
        is None
    )
