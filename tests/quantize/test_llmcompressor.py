"""llm-compressor's solver as an engine, and ours held against it on the same inputs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings

import pytest
import torch

from halfbyte.core import Scheme
from halfbyte.errors import CalibrationError, DependencyError
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize import llmcompressor
from halfbyte.quantize.gptq import factorize, gptq
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales
from halfbyte.testing.numeric import first_difference


@pytest.fixture(scope="module", autouse=True)
def _solver() -> None:
    if importlib.util.find_spec("llmcompressor") is None:
        pytest.skip("llmcompressor is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import llmcompressor.modifiers.gptq.gptq_quantize  # noqa: F401


def inputs(batch: int, rows: int, columns: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, N, K] and second moments [B, K, K] of correlated inputs."""
    generator = torch.Generator().manual_seed(columns + tokens)
    causes = torch.randn(batch, tokens, 6, generator=generator)
    mix = torch.randn(batch, 6, columns, generator=generator)
    noise = torch.randn(batch, tokens, columns, generator=generator)
    x = (causes @ mix + noise) * torch.randn(batch, 1, columns, generator=generator).exp()
    weights = torch.randn(batch, rows, columns, generator=generator) / columns**0.5
    return weights, x.mT @ x / tokens


def weighted_error(
    weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, hessians: torch.Tensor
) -> torch.Tensor:
    """tr(E H Eᵀ) / tr(W H Wᵀ) in float64, [B]."""
    quantized = torch.stack([dequantize_int4(c, s) for c, s in zip(codes, scales, strict=True)])
    w, e, h = weights.double(), (weights - quantized).double(), hessians.double()
    return ((e @ h) * e).sum((1, 2)) / ((w @ h) * w).sum((1, 2))


@pytest.mark.parametrize("group_size", [32, 128, None])
def test_our_error_is_theirs_or_lower(group_size: int | None) -> None:
    """The same scales, inputs and order: only float32 rounding may tell the two apart."""
    scheme, ratios, equal = Scheme(group_size=group_size), [], []
    for columns, tokens in ((128, 1000), (256, 2000), (256, 100), (384, 600)):
        weights, hessians = inputs(3, 32, columns, tokens)
        scales = group_scales(weights, scheme, "minmax")
        ours = gptq(weights, factorize(hessians, 0.01), scales, scheme)
        theirs, fallbacks = llmcompressor.gptq(weights, hessians, scales, scheme)
        assert fallbacks == (None, None, None)
        errors = [weighted_error(weights, c, scales, hessians) for c in (ours, theirs)]
        rounded = round_to_nearest(weights, scales, scheme)
        assert bool((errors[0] < weighted_error(weights, rounded, scales, hessians)).all())
        ratios.append((errors[0] / errors[1]).log())
        equal.append((ours == theirs).float().mean())
    assert float(torch.cat(ratios).mean().exp()) < 1.002
    assert float(torch.stack(equal).mean()) > 0.99


def test_weights_may_share_one_hessian() -> None:
    weights, hessians = inputs(1, 96, 64, 400)
    scales = group_scales(weights, Scheme(), "minmax")
    together, _ = llmcompressor.gptq(weights, hessians, scales, Scheme())
    parts, fallbacks = llmcompressor.gptq(
        weights.view(3, 32, 64), hessians, scales.view(3, 32, 2), Scheme()
    )
    assert fallbacks == (None,)
    assert first_difference(parts.view(1, 96, 64), together) is None


def test_a_matrix_it_cannot_factorize_is_reported_as_plain_rounding() -> None:
    weights, hessians = inputs(2, 16, 64, 400)
    hessians[1] -= 2 * hessians[1].diagonal().mean() * torch.eye(64)
    scales = group_scales(weights, Scheme(), "minmax")
    codes, fallbacks = llmcompressor.gptq(weights, hessians, scales, Scheme())
    assert fallbacks == (None, "rtn")
    assert first_difference(codes[1], round_to_nearest(weights, scales, Scheme())[1]) is None


def test_inputs_are_left_as_they_were() -> None:
    weights, hessians = inputs(1, 8, 64, 200)
    before = weights.clone(), hessians.clone()
    llmcompressor.gptq(weights, hessians, group_scales(weights, Scheme(), "minmax"), Scheme())
    assert first_difference(weights, before[0]) is None
    assert first_difference(hessians, before[1]) is None


def test_a_result_off_the_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmcompressor.modifiers.gptq import gptq_quantize

    def broken(weights: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        return weights, torch.zeros(1), torch.zeros(1, dtype=torch.bool)

    monkeypatch.setattr(gptq_quantize, "quantize_weight", broken)
    weights, hessians = inputs(1, 8, 64, 200)
    scales = group_scales(weights, Scheme(), "minmax")
    with pytest.raises(CalibrationError, match=r"\d+ of 512 values"):
        llmcompressor.gptq(weights, hessians, scales, Scheme())


@pytest.mark.parametrize("found", [None, "0.13.0"])
def test_another_release_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    weights, hessians = inputs(1, 8, 64, 200)
    scales = group_scales(weights, Scheme(), "minmax")
    with pytest.raises(DependencyError, match=found or "not installed") as caught:
        llmcompressor.gptq(weights, hessians, scales, Scheme())
    assert caught.value.hint is not None
    assert llmcompressor.VERSION in caught.value.hint
