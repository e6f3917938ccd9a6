"""Ranges of cached values against the values themselves, taken from whole transformers models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from halfbyte.calibration.kv import PartSums, measure_ranges
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.ranges import LayerRange, PartRange
from halfbyte.progress import SilentProgress
from halfbyte.testing.tiny import write_tiny


def windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, 300, shape, generator=generator) for shape in ((3, 12), (2, 40))]


def check(part: PartRange, values: torch.Tensor) -> None:
    """A range against its values, by definition."""
    sizes = values.double().abs().flatten()
    assert part.count == sizes.numel() == sum(part.histogram)
    assert part.amax == pytest.approx(sizes.max().item(), rel=1e-4)
    assert part.subnormal == pytest.approx((sizes < 2.0**-6).double().mean().item(), abs=2e-4)
    for bound, share in ((part.p99_9, 0.999), (part.p99_99, 0.9999)):
        exact = sizes.quantile(share, interpolation="higher").item()
        assert exact * 0.999 <= bound <= 2.001 * exact
    noise = (values - values.to(torch.float8_e4m3fn).float()).double().square().sum()
    expected = 10 * torch.log10(values.double().square().sum() / noise).item()
    assert part.decibels == pytest.approx(expected, abs=0.02)


def test_keys_and_values_are_those_that_transformers_caches(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", model_type="glm4_moe", source="bf16", mtp=False)
    found = measure_ranges(
        open_checkpoint(folder),
        windows(),
        device="cpu",
        dtype="float32",
        progress=SilentProgress(),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    caches = []
    for tokens in windows():
        caches.append(DynamicCache())
        with torch.no_grad():
            model(tokens, past_key_values=caches[-1], use_cache=True)
    assert len(found.layers) == model.config.num_hidden_layers
    for layer in found.layers:
        held = [cache.layers[layer.layer] for cache in caches]
        for part in layer.parts:
            rows = [getattr(one, f"{part.part}s")[:, part.head] for one in held]
            check(part, torch.cat([values.flatten() for values in rows]))
        largest = max(one.keys.abs().max().item() for one in held)
        assert 112 < largest / layer.scale("key") <= 224


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm_moe_dsa"])
def test_latents_are_normed_and_rope_keys_turned(tmp_path: Path, model_type: str) -> None:
    """With sequences on both sides of index_topk, so that the indexer runs for one of them."""
    folder = write_tiny(tmp_path / "tiny", model_type=model_type, source="bf16")  # type: ignore[arg-type]
    found = measure_ranges(
        open_checkpoint(folder),
        windows(),
        device="cpu",
        dtype="float32",
        progress=SilentProgress(),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    latents: dict[int, list[torch.Tensor]] = {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.kv_a_layernorm.register_forward_hook(
            lambda _, __, out, n=number: latents.setdefault(n, []).append(out.flatten())
        )
    with torch.no_grad():
        for tokens in windows():
            model(tokens, use_cache=False)
    assert len(found.layers) == model.config.num_hidden_layers + 1  # the MTP layer
    for layer in found.layers[:-1]:
        check(layer.parts[0], torch.cat(latents[layer.layer]))
        assert [part.part for part in layer.parts] == ["latent", "rope"]
    last = found.layers[-1].parts
    assert last[0].count == (3 * 11 + 2 * 39) * model.config.kv_lora_rank
    assert last[1].count == (3 * 11 + 2 * 39) * model.config.qk_rope_head_dim


def test_sums_are_the_same_in_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(6, 2, 50, 40, generator=generator)
    whole, parts = PartSums(2), PartSums(2)
    whole.add(values)
    for part in values.split(2):
        parts.add(part)
    for one, other in zip(whole.ranges("key"), parts.ranges("key"), strict=True):
        assert one.histogram == other.histogram
        assert (one.amax, one.p99_99, one.count) == (other.amax, other.p99_99, other.count)
        assert one.decibels == pytest.approx(other.decibels, abs=1e-9)


def range_of(values: torch.Tensor) -> LayerRange:
    sums = PartSums(1)
    sums.add(values[None, None])
    return LayerRange(0, tuple(sums.ranges("latent")))


def test_what_a_cache_without_scales_cannot_hold() -> None:
    normal = torch.randn(400, 128, generator=torch.Generator().manual_seed(2))
    assert range_of(normal).safe
    assert range_of(normal).fold == 0
    for exponent in (-12, -8, 8, 12):
        moved = normal * 2.0**exponent
        layer = range_of(moved)
        assert not layer.safe
        folded = moved * 2.0**-layer.fold
        assert 112 < folded.abs().max() <= 224
        assert range_of(folded).safe
    assert "are above 448" in range_of(normal * 2.0**12).reasons[0]
    assert "are below 2^-6" in range_of(normal * 2.0**-12).reasons[0]
    assert "less than half of 448" in range_of(300 * torch.ones(1, 1)).reasons[0]
    odd = range_of(torch.tensor([[1.0, float("nan"), float("inf"), 0.0, 2.0**-50]])).parts[0]
    assert (odd.nonfinite, odd.count, sum(odd.histogram), odd.amax) == (2, 5, 3, 1.0)
    assert odd.reason == "2 of 5 values are NaN or infinite"
    assert odd.subnormal == 0.2
    assert (odd.histogram[0], odd.histogram[40]) == (2, 1)
