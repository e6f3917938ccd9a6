"""A changed nibble or scale is found, and the place that is named is the right one.

On the outputs of a trained model: what stands out there depends on how real weights are rounded.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halfbyte.core import Scheme
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.quantize import compare
from halfbyte.quantize.locate import Excess, Place, locate
from halfbyte.quantize.verify import LOCATED, verify

from .damage import edit_tensor, read

ONLY = "only one change explains that"


@dataclass(frozen=True)
class Damage:
    """A linear to be damaged, and the places that may be named: row and column, or group."""

    module: str
    places: tuple[tuple[int, int], ...]
    tensor: str
    change: Callable[[torch.Tensor], torch.Tensor]


def linears(folder: Path, count: int) -> list[str]:
    """Some of them, of all shapes and layers."""
    packed = ".weight_packed"
    names = sorted(n.removesuffix(packed) for n in open_checkpoint(folder).tensors if packed in n)
    return random.Random(3).sample(names, count)


def damaged(folder: Path, source: Path, damages: list[Damage], copy: Path) -> dict[str, str]:
    """What `verify` says of the weights of a folder with all this damage, by module."""
    assert len(damages) <= LOCATED
    shutil.copytree(folder, copy)
    for damage in damages:
        name = f"{damage.module}.{damage.tensor}"
        edit_tensor(copy, name, damage.change, rehash=damage is damages[-1])
    found = verify(copy, source).mismatches
    assert {m.kind for m in found} == {"value"}
    assert len(found) == len(damages)
    return {m.name.removesuffix(".weight"): m.message for m in found}


def named(message: str, kind: str) -> tuple[int, int]:
    """The last place in a message: the first one of a rounded linear may be any of a group."""
    found = re.findall(rf"(?:{kind}) \[(\d+), (\d+)\]", message)
    assert found, message
    row, column = found[-1]
    return int(row), int(column)


def flip_code(generator: random.Random, folder: Path, module: str, bit: int) -> Damage:
    rows, words = read(folder, f"{module}.weight_packed").shape
    row, column = generator.randrange(rows), generator.randrange(8 * words)
    mask = 1 << 4 * (column % 8) + bit

    def change(packed: torch.Tensor) -> torch.Tensor:
        packed[row, column // 8] ^= mask - (1 << 32 if mask >> 31 else 0)
        return packed

    return Damage(module, ((row, column),), "weight_packed", change)


@pytest.mark.parametrize("bit", range(4))
def test_a_flipped_bit_of_a_nibble(nano: Path, nano_int4: Path, tmp_path: Path, bit: int) -> None:
    """One to eight steps. The linear is always named; so is the place from two steps on, and of one
    step when the message says that no other change explains the report's number."""
    generator = random.Random(bit)
    damages = [flip_code(generator, nano_int4, m, bit) for m in linears(nano_int4, 16)]
    messages = damaged(nano_int4, nano, damages, tmp_path / "INT4")
    right, certain = 0, 0
    for damage in damages:
        message = messages[damage.module]
        place = re.findall(r"code \[(\d+), (\d+)\]", message)
        hit = place and tuple(map(int, place[-1])) in damage.places
        right += bool(hit)
        certain += ONLY in message
        assert hit or (bit == 0 and ONLY not in message), message
    assert right >= 14
    assert certain >= 12


def swap_scales(generator: random.Random, folder: Path, module: str, least: float) -> Damage:
    """Of two groups of a linear whose scales differ by `least` or more."""
    scales = read(folder, f"{module}.weight_scale").float()
    rows, groups = scales.shape
    while True:
        places = [(generator.randrange(rows), generator.randrange(groups)) for _ in range(2)]
        one, other = (float(scales[place]) for place in places)
        ratio = one / other
        if not 1 / least < ratio < least:
            break

    def change(stored: torch.Tensor) -> torch.Tensor:
        (a, b), (c, d) = places
        stored[a, b], stored[c, d] = stored[c, d].clone(), stored[a, b].clone()
        return stored

    return Damage(module, tuple(places), "weight_scale", change)


@pytest.mark.parametrize("least", [1.2, 2.0])
def test_two_swapped_scales(nano: Path, nano_int4: Path, tmp_path: Path, least: float) -> None:
    """That differ by a fifth or more: one of the two is named."""
    generator = random.Random(7)
    damages = [swap_scales(generator, nano_int4, m, least) for m in linears(nano_int4, 16)]
    messages = damaged(nano_int4, nano, damages, tmp_path / "INT4")
    for damage in damages:
        message = messages[damage.module]
        assert named(message, "scale") in damage.places, message
        assert ONLY not in message


@pytest.mark.parametrize("bit", [1, 3, 6, 8, 15])
def test_a_flipped_bit_of_a_scale(nano: Path, nano_int4: Path, tmp_path: Path, bit: int) -> None:
    """From two units in the last place, 0.8 to 1.6 percent, to the sign."""
    generator = random.Random(bit)
    damages = []
    for module in linears(nano_int4, 12):
        rows, groups = read(nano_int4, f"{module}.weight_scale").shape
        place = generator.randrange(rows), generator.randrange(groups)

        def change(scales: torch.Tensor, place: tuple[int, int] = place) -> torch.Tensor:
            scales.view(torch.int16)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
            return scales

        damages.append(Damage(module, (place,), "weight_scale", change))
    messages = damaged(nano_int4, nano, damages, tmp_path / "INT4")
    hits = 0
    for damage in damages:
        message = messages[damage.module]
        hit = named(message, "scale|code") in damage.places and "scale [" in message
        hits += hit
        assert hit or ONLY not in message, message
    assert hits == 12 if bit > 1 else hits >= 9


def test_what_a_scale_was_is_told(nano: Path, nano_gptq: Path, tmp_path: Path) -> None:
    (module,) = linears(nano_gptq, 1)
    was = float(read(nano_gptq, f"{module}.weight_scale")[5, 2])
    copy = tmp_path / "INT4"
    shutil.copytree(nano_gptq, copy)

    def halve(scales: torch.Tensor) -> torch.Tensor:
        scales[5, 2] /= 2  # one bit of the exponent, or a carry through several
        return scales

    edit_tensor(copy, f"{module}.weight_scale", halve)
    (mismatch,) = verify(copy, nano).mismatches
    assert f"scale [5, 2] is {was / 2:.4g}" in mismatch.message
    told = re.search(r"(?:was|asks for about) (-?[\d.e-]+)", mismatch.message)
    assert told is not None
    assert float(told[1]) == pytest.approx(was, rel=0.15)


def test_without_a_report_large_changes_are_located(
    nano: Path, nano_gptq: Path, tmp_path: Path
) -> None:
    """Of a rounded or calibrated weight of which nothing is known but its source."""
    copy = tmp_path / "INT4"
    shutil.copytree(nano_gptq, copy)
    (copy / REPORT_FILE).unlink()
    assert verify(copy, nano).mismatches == ()
    weight, codes, scales = rounded()
    codes[3, 40] += 4 if codes[3, 40] < 3 else -4
    place = locate(weight, codes, scales, Scheme())
    assert place is not None
    assert (place.row, place.group, place.column, place.alike) == (3, 1, 40, 0)
    assert "stands out most: code [3, 40]" in str(place)


def test_a_fault_of_all_is_not_searched_for(
    nano: Path, nano_rtn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[object] = []
    monkeypatch.setattr(compare, "locate", lambda *_: searched.append(1))
    damages = [swap_scales(random.Random(1), nano_rtn, m, 1.2) for m in linears(nano_rtn, 20)]
    shutil.copytree(nano_rtn, tmp_path / "INT4")
    for damage in damages:
        edit_tensor(tmp_path / "INT4", f"{damage.module}.weight_scale", damage.change)
    assert len(verify(tmp_path / "INT4", nano).mismatches) == 20
    assert len(searched) <= LOCATED


def rounded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    grouped = weight.unflatten(1, (4, 32))
    scales = (grouped.abs().amax(2) / 7).bfloat16()
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    return weight, codes, scales


def distance(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> float:
    """|W - Q|² in float64."""
    made = codes.double() * scales.double().repeat_interleave(32, 1)
    return float((weight.double() - made).square().sum())


def test_every_change_of_one_code_is_told_apart() -> None:
    weight, codes, scales = rounded()
    before = distance(weight, codes, scales)
    for row, column in ((0, 0), (7, 63), (15, 127)):
        was = int(codes[row, column])
        for value in set(range(-8, 8)) - {was}:
            changed = codes.clone()
            changed[row, column] = value
            excess = Excess(distance(weight, changed, scales) - before, 1e-9)
            place = locate(weight, changed, scales, Scheme(), excess)
            assert place == Place(row, column // 32, column, value, was, 1)


def test_a_place_among_a_thousand_is_none() -> None:
    weight, codes, scales = rounded()
    assert locate(weight, codes, scales, Scheme(), Excess(0.0, 1e3)) is None
    few = locate(weight, codes, scales, Scheme(), Excess(0.01, 2e-3))
    assert few is not None
    assert few.alike > 1
    assert f"likeliest of {few.alike} changes" in str(few)
