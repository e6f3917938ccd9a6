"""The Triton kernels against float64 and against their plain-torch twins.

Without a GPU they are interpreted on CPU tensors: that checks what they mean, not how they compile.
The interpreter cuts off what BF16 does not hold, so results in BF16 are compared on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

from halfbyte.core import Scheme
from halfbyte.kernels.reference import add_rows, dequantize_fp8, dequantize_int4, pack_int4
from halfbyte.quantize.scales import divisors_of, group_scales
from halfbyte.testing.numeric import first_difference, relative_error

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; it comes with torch on Linux"
)
import triton.language as tl  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,)
ROUNDING = 3e-6
"""Relative; what float32 makes of a factorization of a few hundred columns."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(batch: int, columns: int, tokens: int = 400) -> torch.Tensor:
    x = random(batch, tokens, 6, seed=1) @ random(batch, 6, columns, seed=2)
    x = x + random(batch, tokens, columns, seed=3)
    return x.mT @ x / tokens


def shuffled(batch: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.stack([torch.randperm(columns, generator=generator) for _ in range(batch)])


def as_tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits of fraction, half to even, from the definition of the format."""
    fraction, exponent = torch.frexp(values.double())
    return torch.ldexp((fraction * 2**11).round() / 2**11, exponent).float()


@pytest.mark.parametrize(("batch", "columns"), [(2, 96), (1, 128), (1, 200)])
def test_cholesky_is_that_of_float64(batch: int, columns: int) -> None:
    from halfbyte.kernels.cholesky import BLOCK, damped_cholesky

    hessians, order = moments(batch, columns), shuffled(batch, columns)
    damping = torch.tensor([0.3, 0.01])[:batch]
    inputs = tuple(t.to(DEVICE) for t in (hessians, order, damping))
    factor, failed = damped_cholesky(*inputs)
    padded = -(-columns // BLOCK) * BLOCK
    assert factor.shape == (batch, padded, padded)
    assert not bool(failed.any())
    for item, found in enumerate(factor.cpu()):
        damped = hessians[item].double()[order[item]][:, order[item]]
        damped += damping[item].double() * torch.eye(columns)
        expected = torch.eye(padded, dtype=torch.float64)
        expected[:columns, :columns] = torch.linalg.cholesky(damped)
        assert relative_error(found.tril(), expected) < ROUNDING
        # Above the diagonal stands what matrix products read.
        assert first_difference(found.triu(1), as_tf32(found.tril(-1)).T) is None
    if batch > 1:
        alone, _ = damped_cholesky(*(t[1:] for t in inputs))
        assert first_difference(alone, factor[1:]) is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of what means nothing
@pytest.mark.parametrize("columns", [40, 136])
def test_cholesky_flags_the_matrix_that_is_not_positive_definite(columns: int) -> None:
    """At its last pivot, or at its first; the other one is sound and does not notice."""
    from halfbyte.kernels.cholesky import damped_cholesky

    hessians = moments(2, columns)
    bad = 0 if columns < 128 else 1
    last = columns - 1
    if bad == 0:
        hessians[bad, 0, 0] = -1
    else:
        before, beside = hessians[bad, :last, :last], hessians[bad, :last, last]
        hessians[bad, last, last] = 0.9 * (beside @ torch.linalg.solve(before, beside))
    order = torch.arange(columns).repeat(2, 1)
    inputs = hessians, order, torch.zeros(2)
    factor, failed = damped_cholesky(*(t.to(DEVICE) for t in inputs))
    assert failed.tolist() == [item == bad for item in range(2)]
    expected = torch.linalg.cholesky(hessians[1 - bad].double())
    found = factor[1 - bad, :columns, :columns].cpu()
    assert relative_error(found.tril(), expected) < ROUNDING


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(256, 32), (288, 96), (256, 128), (256, 256)])
def test_scale_search_finds_the_scales_of_plain_torch(
    columns: int, group: int, signed: bool
) -> None:
    from halfbyte.kernels.scale_search import search_scales

    scheme = Scheme(group_size=group)
    weights = 0.02 * random(2, 9, columns)
    weights[0, 3] *= 40
    weights[1, 2, :group] = 0
    divisors = torch.tensor(divisors_of(scheme, group, signed=signed))
    importance = random(2, columns, seed=5).exp()
    for known in (None, importance):
        root = None if known is None else known.sqrt().to(DEVICE)
        found = search_scales(weights.to(DEVICE), root, divisors.to(DEVICE), group, -8, 7)
        expected = group_scales(weights, scheme, "mse", known, signed=signed)
        assert first_difference(found.cpu(), expected) is None


def test_scale_search_with_one_importance_for_many_weights() -> None:
    from halfbyte.kernels.scale_search import search_scales

    weights, importance = 0.02 * random(2, 9, 64), random(1, 64).exp()
    found = search_scales(
        weights.view(1, 18, 64).to(DEVICE),
        importance.sqrt().to(DEVICE),
        torch.tensor(divisors_of(Scheme(), 32, signed=True), device=DEVICE),
        32,
        -8,
        7,
    )
    expected = group_scales(weights, Scheme(), "mse", importance)
    assert first_difference(found.view(2, 9, 2).cpu(), expected) is None


@pytest.mark.parametrize(("columns", "first"), [(96, 0), (640, 512)])
def test_the_gradient_of_refinement_is_errors_times_damped_hessian(
    columns: int, first: int, bfloat16_products: None
) -> None:
    """First from all errors, then what the change of 128 columns adds for the 128 behind them."""
    from halfbyte.kernels.refinement import _add_product

    rows, pitch = 5, 512 if columns > 512 else 128
    errors = random(2, rows, columns).bfloat16().float().to(DEVICE)
    hessians = moments(2, columns).bfloat16().to(DEVICE)
    damping = torch.tensor([0.5, 0.25], device=DEVICE)
    gradient = torch.full((2, rows, pitch), float("nan"), device=DEVICE)
    width = min(pitch, columns - first)
    launch = {"ROWS": 128, "BLOCK": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
    _add_product[(triton.cdiv(width, 128), 1, 2)](
        errors.bfloat16(), hessians, gradient, damping, errors, rows, columns, columns,
        pitch, first, 0, 0, columns, FRESH=True, **launch,
    )  # fmt: skip
    damped = hessians.double() + damping.double()[:, None, None] * torch.eye(columns, device=DEVICE)
    expected = (errors.double() @ damped)[:, :, first : first + width]
    assert relative_error(gradient[:, :, :width], expected) < 1e-5

    if columns > 512:
        return
    moved = random(2, rows, pitch, seed=9).bfloat16().to(DEVICE)
    _add_product[(1, 1, 2)](
        moved, hessians, gradient, damping, errors, rows, columns, pitch,
        pitch, 32, 32, 0, 32, FRESH=False, **launch,
    )  # fmt: skip
    expected[:, :, 32:] += moved.double()[:, :, :32] @ hessians.double()[:, :32, 32:]
    assert relative_error(gradient[:, :, :width], expected) < 1e-5


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(
    ("rows", "columns", "groups"), [(3, 64, 2), (70, 136, 1), (1, 8, 1), (5, 48, 4)]
)
def test_decoding_is_that_of_the_reference(
    rows: int, columns: int, groups: int, dtype: torch.dtype
) -> None:
    from halfbyte.kernels.decode import decode_packed

    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)
    scales = random(rows, groups).bfloat16()
    found = decode_packed(pack_int4(codes).to(DEVICE), scales.to(DEVICE), dtype)
    assert first_difference(found.cpu(), dequantize_int4(codes, scales, dtype)) is None


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(
    ("shape", "block"),
    [((130, 200), (128, 128)), ((3, 1030), (128, 128)), ((12, 40), (1, 40)), ((30, 50), (7, 16))],
)
def test_fp8_is_decoded_as_the_reference_does(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every byte but NaN, which stays one."""
    from halfbyte.kernels.decode import decode_fp8

    (rows, columns), (height, width) = shape, block
    stored = (torch.arange(rows * columns) % 256).to(torch.uint8).view(shape)
    weight = stored.view(torch.float8_e4m3fn)
    scale = random(-(-rows // height), -(-columns // width)).abs() + 0.01
    found = decode_fp8(weight.to(DEVICE), scale.to(DEVICE), block, dtype).cpu()
    expected = dequantize_fp8(weight, scale, block, dtype)
    missing = (stored & 127) == 127
    assert bool(found[missing].isnan().all())
    assert first_difference(found[~missing], expected[~missing]) is None


def test_codes_and_errors_are_those_of_the_reference() -> None:
    """Ties, values beyond the range and negative scales among them."""
    from halfbyte.kernels import codes as kernels

    scales = random(2, 5, 3).bfloat16()
    weights = 20 * random(2, 5, 96, seed=1) * scales.float().repeat_interleave(32, dim=2)
    weights[0, :, :32] = (torch.arange(32) / 2 - 8) * scales[0, :, :1].float()
    found = kernels.nearest_codes(weights.to(DEVICE), scales.to(DEVICE), -8, 7)
    grouped = weights.double().view(2, 5, 3, 32) / scales.double()[..., None]
    expected = grouped.round().clamp(-8, 7).view_as(weights).to(torch.int8)
    assert first_difference(found.cpu(), expected) is None
    errors = kernels.rounding_errors(weights.to(DEVICE), found, scales.to(DEVICE))
    made = expected.double().view(2, 5, 3, 32) * scales.double()[..., None]
    # The difference of two float32 values, rounded once.
    difference = (weights.double() - made.view_as(weights)).float()
    assert first_difference(errors.cpu(), difference) is None


def test_squared_sums_are_those_of_float64() -> None:
    from halfbyte.kernels.codes import squared_sums

    rows = random(2, 3, 2100) * 1e-3
    found = squared_sums(rows.to(DEVICE)).cpu()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, rows.double().square().sum(-1), rtol=1e-8, atol=0)
    assert squared_sums(rows[:, :0].to(DEVICE)).shape == (2, 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's: exp(100) is infinite
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_gated_activation_is_silu_times_up(dtype: torch.dtype) -> None:
    from halfbyte.kernels.tokens import gated

    gate_up = 4 * random(3, 2 * 1100).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, 100.0, -100.0, -1.0])
    found = gated(gate_up.to(DEVICE)).cpu()
    gate, up = gate_up.double().chunk(2, dim=1)
    opened = (gate / (1 + (-gate).exp())).to(dtype).double()
    assert relative_error(found, opened * up) < (3e-3 if dtype == torch.bfloat16 else 3e-7)
    assert gated(gate_up[:0].to(DEVICE)).shape == (0, 1100)


@pytest.mark.parametrize("dtype", OUTPUTS)
def test_weighted_rows_are_added_as_the_reference_adds_them(dtype: torch.dtype) -> None:
    from halfbyte.kernels.tokens import add_weighted

    total, values = random(9, 200).to(dtype), random(4, 200, seed=1).to(dtype)
    rows, weight = torch.tensor([7, 0, 3, 8]), random(4, 1, seed=2)
    found = total.clone().to(DEVICE)
    add_weighted(found, rows.to(DEVICE), values.to(DEVICE), weight.to(DEVICE))
    add_rows(total, rows, values, weight)
    if DEVICE == "cuda":  # which may fuse the product with the sum
        torch.testing.assert_close(found.cpu(), total)
    else:
        assert first_difference(found, total) is None


@triton.jit
def _apply(values, out, FUNCTION: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(out + place, FUNCTION(tl.load(values + place)))


@pytest.mark.parametrize("name", ["nearest_integer", "nearest_tf32", "nearest_bfloat16"])
def test_rounding_is_half_to_even(name: str) -> None:
    from halfbyte.kernels import rounding

    halves = torch.arange(-512, 512).float() / 2
    ties = 1 + torch.arange(1024).float() / 2**11  # between two of TF32
    values = torch.cat([halves, ties, random(1024) * 100, 1 + torch.arange(1024).float() / 2**8])
    expected = {
        "nearest_integer": values.round(),
        "nearest_tf32": as_tf32(values),
        "nearest_bfloat16": values.bfloat16().float(),
    }[name]
    out = torch.empty_like(values).to(DEVICE)
    _apply[(1,)](values.to(DEVICE), out, FUNCTION=getattr(rounding, name), SIZE=4096)
    assert first_difference(out.cpu(), expected) is None


@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 264), (7, 4096)])
def test_codes_are_packed_as_the_twin_packs_them(shape: tuple[int, ...]) -> None:
    from halfbyte.kernels.codes import pack_codes

    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    packed, outside = pack_codes(codes.to(DEVICE))
    assert not outside
    assert torch.equal(packed.cpu(), pack_int4(codes))
    for wrong in (-9, 8, 127, -128):
        spoiled = codes.clone()
        spoiled.flatten()[-1] = wrong
        assert pack_codes(spoiled.to(DEVICE))[1]
