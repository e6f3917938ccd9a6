"""Marlin's layout against golden bytes, the formula element by element, and the original packer's
procedure of permutations."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from halfbyte.core import Scheme
from halfbyte.errors import CheckpointError, RecipeError
from halfbyte.formats.int4 import pack
from halfbyte.formats.marlin import (
    check_dense,
    check_experts,
    pad,
    padded_shape,
    scales_from_marlin,
    scales_to_marlin,
    unpad,
    weights_from_marlin,
    weights_to_marlin,
)
from halfbyte.kernels.reference import dequantize_int4, unpack_int4

GROUP_SIZES = [32, 64, 128, None]
SCHEMES = [Scheme(group_size=size) for size in GROUP_SIZES]

TILE = (
    "8019b34ca23bd56ec45df780e67f19a2e67f19a208913bc42ab35de64cd57f08"
    "4cd57f086ef7912a8019b34ca23bd56ea23bd56ec45df780e67f19a208913bc4"
    "d56e0891f7802ab319a24cd53bc46ef73bc46ef75de680197f08a23b912ac45d"
    "912ac45db34ce67fd56e0891f7802ab3f7802ab319a24cd53bc46ef75de68019"
    "2ab35de64cd57f086ef7912a8019b34c8019b34ca23bd56ec45df780e67f19a2"
    "e67f19a208913bc42ab35de64cd57f084cd57f086ef7912a8019b34ca23bd56e"
    "7f08a23b912ac45db34ce67fd56e0891d56e0891f7802ab319a24cd53bc46ef7"
    "3bc46ef75de680197f08a23b912ac45d912ac45db34ce67fd56e0891f7802ab3"
    "c45df780e67f19a208913bc42ab35de62ab35de64cd57f086ef7912a8019b34c"
    "8019b34ca23bd56ec45df780e67f19a2e67f19a208913bc42ab35de64cd57f08"
    "19a24cd53bc46ef75de680197f08a23b7f08a23b912ac45db34ce67fd56e0891"
    "d56e0891f7802ab319a24cd53bc46ef73bc46ef75de680197f08a23b912ac45d"
    "6ef7912a8019b34ca23bd56ec45df780c45df780e67f19a208913bc42ab35de6"
    "2ab35de64cd57f086ef7912a8019b34c8019b34ca23bd56ec45df780e67f19a2"
    "b34ce67fd56e0891f7802ab319a24cd519a24cd53bc46ef75de680197f08a23b"
    "7f08a23b912ac45db34ce67fd56e0891d56e0891f7802ab319a24cd53bc46ef7"
)
"""A tile of nibbles (5 n + 3 k + n // 8) mod 16."""


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator)


def random_scales(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 0.1 + 0.001).to(torch.bfloat16)


def int32(words: list[list[int]]) -> torch.Tensor:
    """Unsigned words as the int32 of the same bits."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def by_formula(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] -> int32 [K/16, 2N]: a place for each element."""
    rows, columns = codes.shape
    values = codes.tolist()
    words = [[0] * (2 * rows) for _ in range(columns // 16)]
    for n, k in product(range(rows), range(columns)):
        kk, nn = k & 15, n & 63
        lane = 4 * (nn & 7) + ((kk & 7) >> 1)
        nibble = 4 * (kk & 1) + 2 * ((nn >> 3) & 1) + (kk >> 3)
        words[k >> 4][128 * (n >> 6) + 4 * lane + (nn >> 4)] |= (values[n][k] + 8) << (4 * nibble)
    return int32(words)


def by_permutation(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] -> int32 [K/16, 2N], as the original packer goes about it.

    Wᵀ is cut into 16 x 16 tiles, which are written out one after another. Each run of four tiles is
    put into the order in which lanes want it: a lane has, in each tile, the elements of its mma
    fragment for two blocks of 8 columns. Eights of them are packed, even places before odd ones.
    """
    fragments = []
    for lane in range(32):
        column, first = lane // 4, 2 * (lane % 4)
        of_a_tile = [
            16 * row + column + block
            for block in (0, 8)
            for row in (first, first + 1, first + 8, first + 9)
        ]
        fragments += [256 * tile + place for tile in range(4) for place in of_a_tile]
    values = (codes.t() + 8).tolist()
    words = []
    for top in range(0, len(values), 16):
        tiles = [
            values[top + row][left + column]
            for left in range(0, len(values[0]), 16)
            for row in range(16)
            for column in range(16)
        ]
        ordered = [tiles[run + at] for run in range(0, len(tiles), 1024) for at in fragments]
        eights = [ordered[at : at + 8] for at in range(0, len(ordered), 8)]
        words.append(
            [
                sum(value << (4 * nibble) for nibble, value in enumerate(eight[::2] + eight[1::2]))
                for eight in eights
            ]
        )
    return int32(words)


def scales_one_by_one(scales: torch.Tensor) -> torch.Tensor:
    """Scales [N, G] -> [G, N]: a place for each scale."""
    rows, groups = scales.shape
    placed = torch.full((groups, rows), float("nan"), dtype=scales.dtype)
    for n, group in product(range(rows), range(groups)):
        if groups > 1:
            place = (n & ~63) + 8 * (n & 7) + ((n & 63) >> 3)
        else:
            place = (n & ~31) + 8 * ((n & 7) >> 1) + 2 * ((n & 31) >> 3) + (n & 1)
        placed[group, place] = scales[n, group]
    return placed


def test_columns_are_where_lanes_look_for_them() -> None:
    """Nibbles that are k: a lane has k, k + 8 of two rows, then k + 1, k + 9 of the two."""
    codes = torch.arange(-8, 8, dtype=torch.int8).expand(64, 16)
    words = [0x91918080, 0xB3B3A2A2, 0xD5D5C4C4, 0xF7F7E6E6]
    expected = 8 * [word for word in words for _ in range(4)]
    assert torch.equal(weights_to_marlin(pack(codes)), int32([expected]))


def test_rows_are_where_lanes_look_for_them() -> None:
    """Nibbles that are n % 16: four lanes have rows n and n + 8 of each of four blocks."""
    codes = (torch.arange(64) % 16 - 8).to(torch.int8)[:, None].expand(64, 16)
    words = [0x88008800 + 0x11111111 * row for row in range(8)]
    expected = [word for word in words for _ in range(16)]
    assert torch.equal(weights_to_marlin(pack(codes)), int32([expected]))


def test_blocks_of_rows_are_a_lanes_four_words() -> None:
    """Nibbles that are n // 16."""
    codes = (torch.arange(64) // 16 - 8).to(torch.int8)[:, None].expand(64, 16)
    expected = int32([32 * [0x00000000, 0x11111111, 0x22222222, 0x33333333]])
    assert torch.equal(weights_to_marlin(pack(codes)), expected)


def test_bytes_of_a_tile() -> None:
    n, k = torch.arange(64)[:, None], torch.arange(16)
    packed = pack(((5 * n + 3 * k + n // 8) % 16 - 8).to(torch.int8))
    weights = weights_to_marlin(packed)
    assert weights.shape == (1, 128)
    assert weights.flatten().view(torch.uint8).numpy().tobytes().hex() == TILE
    assert torch.equal(weights_from_marlin(weights), packed)


@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 16), (64, 128), (128, 64), (256, 64), (192, 128), (128, 48)]
)
def test_weights_are_those_of_the_formula_and_of_the_original_packer(
    rows: int, columns: int
) -> None:
    codes = random_codes(rows, columns, seed=rows + columns)
    weights = weights_to_marlin(pack(codes))
    assert weights.is_contiguous()
    assert torch.equal(weights, by_formula(codes))
    assert torch.equal(weights, by_permutation(codes))


@pytest.mark.parametrize("experts", [(1,), (3,), (2, 2)])
def test_experts_are_laid_out_one_by_one(experts: tuple[int, ...]) -> None:
    codes, scales = random_codes(*experts, 128, 64), random_scales(*experts, 128, 2)
    packed = pack(codes)
    weights, ordered = weights_to_marlin(packed), scales_to_marlin(scales)
    assert (weights.shape, ordered.shape) == ((*experts, 4, 256), (*experts, 2, 128))
    for expert in product(*map(range, experts)):
        assert torch.equal(weights[expert], by_formula(codes[expert]))
        assert torch.equal(ordered[expert], scales_one_by_one(scales[expert]))
    assert torch.equal(weights_from_marlin(weights), packed)
    assert torch.equal(scales_from_marlin(ordered), scales)


def test_no_experts_are_none() -> None:
    weights = weights_to_marlin(torch.empty(0, 128, 8, dtype=torch.int32))
    assert weights.shape == (0, 4, 256)
    assert weights_from_marlin(weights).shape == (0, 128, 8)


def test_views_are_laid_out_like_copies() -> None:
    """The down projection of one of two ranks, and experts of every second."""
    packed, scales = pack(random_codes(4, 128, 256)), random_scales(4, 128, 8)
    for view in (packed[..., 16:], packed[::2], packed[:, 64:]):
        weights = weights_to_marlin(view)
        assert torch.equal(weights, weights_to_marlin(view.clone()))
        assert torch.equal(weights_from_marlin(weights.mT.contiguous().mT), view)
    for view in (scales[..., 4:], scales[::2], scales[:, 64:]):
        ordered = scales_to_marlin(view)
        assert torch.equal(ordered, scales_to_marlin(view.clone()))
        assert torch.equal(scales_from_marlin(ordered.mT.contiguous().mT), view)


@given(
    experts=st.lists(st.integers(1, 3), max_size=2),
    row_tiles=st.integers(1, 4),
    column_tiles=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_weights_come_back(
    experts: list[int], row_tiles: int, column_tiles: int, seed: int
) -> None:
    packed = pack(random_codes(*experts, 64 * row_tiles, 16 * column_tiles, seed=seed))
    weights = weights_to_marlin(packed)
    assert weights.dtype == torch.int32
    assert weights.shape == (*experts, column_tiles, 128 * row_tiles)
    assert torch.equal(weights_from_marlin(weights), packed)
    assert torch.equal(weights_to_marlin(weights_from_marlin(weights)), weights)


@given(
    experts=st.lists(st.integers(1, 3), max_size=2),
    row_tiles=st.integers(1, 4),
    groups=st.integers(1, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_scales_come_back(
    experts: list[int], row_tiles: int, groups: int, dtype: torch.dtype, seed: int
) -> None:
    scales = random_scales(*experts, 64 * row_tiles, groups, seed=seed).to(dtype)
    ordered = scales_to_marlin(scales)
    assert (ordered.dtype, ordered.shape) == (dtype, (*experts, groups, 64 * row_tiles))
    back = scales_from_marlin(ordered)
    assert torch.equal(back, scales)
    assert ordered.is_contiguous()
    assert back.is_contiguous()


def test_orders_of_scales() -> None:
    rows = torch.arange(64.0)
    grouped = scales_to_marlin(torch.stack([rows, 100 + rows], dim=-1))
    assert grouped[0, :16].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57]
    assert torch.equal(grouped[1], 100 + grouped[0])
    channelwise = scales_to_marlin(rows[:, None])
    assert channelwise[0, :16].tolist() == [
        0,
        1,
        8,
        9,
        16,
        17,
        24,
        25,
        2,
        3,
        10,
        11,
        18,
        19,
        26,
        27,
    ]
    assert torch.equal(channelwise[0, 32:], 32 + channelwise[0, :32])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (128, 256), (192, 384)])
def test_scales_are_those_of_the_formula(shape: tuple[int, int], scheme: Scheme) -> None:
    rows, columns = shape
    scales = random_scales(rows, scheme.groups(columns), seed=columns)
    assert torch.equal(scales_to_marlin(scales), scales_one_by_one(scales))


def fits(rows: int, columns: int) -> bool:
    return (rows % 64 == 0 and columns % 128 == 0) or (rows % 128 == 0 and columns % 64 == 0)


@given(
    rows=st.integers(1, 700),
    eights=st.integers(1, 90),
    groups=st.integers(1, 12),
    group_size=st.sampled_from(GROUP_SIZES),
)
@settings(max_examples=200, deadline=None)
def test_padded_shapes_fit_and_none_that_fits_is_smaller(
    rows: int, eights: int, groups: int, group_size: int | None
) -> None:
    scheme = Scheme(group_size=group_size)
    columns = 8 * eights if group_size is None else group_size * groups
    step = 1 if group_size in (None, columns) else group_size
    around = product(range(rows, rows + 128), range(columns, columns + 128))
    sizes = [n * k for n, k in around if fits(n, k) and k % step == 0]
    padded = padded_shape(rows, columns, scheme)
    assert fits(*padded)
    assert padded[1] % step == 0
    assert padded[0] * padded[1] == min(sizes)
    if padded == (rows, columns):
        check_dense(rows, columns, scheme)
    else:
        with pytest.raises(RecipeError, match=rf"\[{rows}, {columns}\]") as caught:
            check_dense(rows, columns, scheme)
        assert str(list(padded)) in str(caught.value.hint)


@pytest.mark.parametrize(
    ("shape", "group_size", "padded"),
    [
        ((576, 6144), 128, (576, 6144)),
        ((128, 64), 32, (128, 64)),
        ((64, 64), 32, (128, 64)),
        ((64, 64), 64, (128, 64)),
        ((192, 64), 32, (256, 64)),
        ((64, 320), None, (64, 384)),
        ((32, 128), 128, (64, 128)),
        ((96, 128), 64, (128, 128)),
        ((2112, 7168), 32, (2112, 7168)),
        ((128, 10944), None, (128, 10944)),
        ((64, 10944), None, (64, 11008)),
        ((1, 8), None, (128, 64)),
    ],
)
def test_padded_shapes(
    shape: tuple[int, int], group_size: int | None, padded: tuple[int, int]
) -> None:
    assert padded_shape(*shape, Scheme(group_size=group_size)) == padded


@given(
    experts=st.lists(st.integers(1, 2), max_size=1),
    rows=st.integers(1, 200),
    eights=st.integers(1, 30),
    groups=st.integers(1, 5),
    group_size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_padding_keeps_products_exactly(
    experts: list[int], rows: int, eights: int, groups: int, group_size: int | None, seed: int
) -> None:
    """Through Marlin's layout and back. Integers times bfloat16 are summed without rounding."""
    scheme = Scheme(group_size=group_size)
    columns = 8 * eights if group_size is None else group_size * groups
    codes = random_codes(*experts, rows, columns, seed=seed)
    packed = pack(codes)
    scales = random_scales(*experts, rows, scheme.groups(columns), seed=seed)
    more = pad(packed, scales, scheme)
    shape = padded_shape(rows, columns, scheme)
    assert (more[1][..., rows:, :] == 1).all()
    assert (more[1][..., scales.shape[-1] :] == 1).all()
    weights, ordered = weights_to_marlin(more[0]), scales_to_marlin(more[1])
    assert weights.shape == (*experts, shape[1] // 16, 2 * shape[0])
    back = weights_from_marlin(weights), scales_from_marlin(ordered)

    inputs = torch.randint(-99, 100, (3, shape[1]), dtype=torch.float64)
    for expert in range(experts[0] if experts else 1):
        at = (expert,) if experts else ()
        matrix = dequantize_int4(codes[at], scales[at], torch.float64)
        larger = dequantize_int4(unpack_int4(back[0][at], shape[1]), back[1][at], torch.float64)
        outputs = inputs @ larger.T
        assert torch.equal(outputs[:, :rows], inputs[:, :columns] @ matrix.T)
        assert not outputs[:, rows:].any()

    fewer = unpad(*back, (rows, columns), scheme)
    assert torch.equal(fewer[0], packed)
    assert torch.equal(fewer[1], scales)
    assert all(tensor.is_contiguous() for tensor in fewer)


def test_a_scale_of_the_whole_row_stays_one() -> None:
    """Groups as long as the row are scales of channels: what is added must not make them groups."""
    packed, scales = pack(random_codes(128, 32)), random_scales(128, 1)
    for scheme in (Scheme(group_size=32), Scheme(group_size=None)):
        more = pad(packed, scales, scheme)
        assert (more[0].shape, more[1].shape) == ((128, 8), (128, 1))
        assert torch.equal(unpad(*more, (128, 32), scheme)[1], scales)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_experts_of_glm_fit(group_size: int | None) -> None:
    for intermediate in (2048, 1024, 512, 256, 128):
        check_experts(6144, intermediate, Scheme(group_size=group_size))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "scheme", "numbers"),
    [
        (6144, 64, Scheme(group_size=128), ["64", "128"]),
        (6144, 96, Scheme(group_size=32), ["96", "64"]),
        (6144, 96, Scheme(group_size=64), ["96", "64"]),
        (6144, 32, Scheme(group_size=32), ["32", "64"]),
        (6144, 1000, Scheme(group_size=None), ["1000", "64"]),
        (6080, 2048, Scheme(group_size=32), ["6080", "128"]),
        (6144, 2048, Scheme(group_size=256), ["6144", "256"]),
        (2048, 512, Scheme(group_size=512), ["2048", "512"]),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_both_numbers(
    hidden: int, intermediate: int, scheme: Scheme, numbers: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        check_experts(hidden, intermediate, scheme)
    assert all(number in str(caught.value) for number in numbers)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("columns", "scheme", "numbers"),
    [
        (256, Scheme(group_size=16), ["256", "16"]),
        (512, Scheme(group_size=256), ["512", "256"]),
        (192, Scheme(group_size=96), ["192", "96"]),
        (192, Scheme(group_size=128), ["192", "128"]),
        (80, Scheme(group_size=32), ["80", "32"]),
        (64, Scheme(group_size=128), ["64", "128"]),
        (256, Scheme(bits=8, group_size=32), ["INT8 g32"]),
    ],
)
def test_groups_that_marlin_cannot_read_are_refused_with_both_numbers(
    columns: int, scheme: Scheme, numbers: list[str]
) -> None:
    packed = torch.zeros(128, columns // 8, dtype=torch.int32)
    scales = torch.ones(128, max(1, scheme.groups(columns)))
    for refuse in (
        lambda: check_dense(128, columns, scheme),
        lambda: padded_shape(128, columns, scheme),
        lambda: pad(packed, scales, scheme),
        lambda: unpad(packed, scales, (128, columns), scheme),
        lambda: check_experts(columns, columns, scheme),
    ):
        with pytest.raises(RecipeError) as caught:
            refuse()
        assert all(number in str(caught.value) for number in numbers)


def test_shapes_without_whole_tiles_are_refused_with_both_numbers() -> None:
    with pytest.raises(RecipeError, match="rows of codes in multiples of 64, not 96"):
        weights_to_marlin(torch.zeros(96, 16, dtype=torch.int32))
    with pytest.raises(RecipeError, match="columns of codes in multiples of 16, not 24"):
        weights_to_marlin(torch.zeros(64, 3, dtype=torch.int32))
    for size in (192, 129):
        with pytest.raises(RecipeError, match=f"in multiples of 128, not {size}"):
            weights_from_marlin(torch.zeros(4, size, dtype=torch.int32))
    for refuse, tensor in (
        (scales_to_marlin, torch.zeros(96, 2)),
        (scales_from_marlin, torch.zeros(2, 96)),
    ):
        with pytest.raises(RecipeError, match="grouped scales in multiples of 64, not 96"):
            refuse(tensor)
    for refuse, tensor in (
        (scales_to_marlin, torch.zeros(48, 1)),
        (scales_from_marlin, torch.zeros(1, 48)),
    ):
        with pytest.raises(RecipeError, match="channelwise scales in multiples of 32, not 48"):
            refuse(tensor)


def test_codes_of_another_dtype_are_refused() -> None:
    for refuse in (weights_to_marlin, weights_from_marlin):
        with pytest.raises(CheckpointError, match=r"\[128, 128\] are torch.int64"):
            refuse(torch.zeros(128, 128, dtype=torch.int64))


def test_scales_of_another_weight_are_refused() -> None:
    """A part of a row with the scales of the whole one would pass for smaller groups."""
    packed, scheme = pack(random_codes(2, 64, 256)), Scheme(group_size=128)
    for shape in ((2, 64, 4), (2, 64, 1), (2, 32, 2), (3, 64, 2), (64, 2)):
        scales = random_scales(*shape)
        for refuse in (
            lambda scales: pad(packed, scales, scheme),
            lambda scales: unpad(packed, scales, (64, 256), scheme),
        ):
            with pytest.raises(CheckpointError) as caught:
                refuse(scales)
            assert str(list(shape)) in str(caught.value)
            assert "[64, 2]" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"\[2, 64, 32\]"):
        unpad(packed, random_scales(2, 64, 2), (64, 128), Scheme(group_size=64))
