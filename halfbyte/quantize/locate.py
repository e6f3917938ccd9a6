"""Where in an INT4 linear a value is not what the run wrote, from the source and the run's report.

Two kinds of evidence. The report has |W - Q|² to nine digits, and one changed code, or one bit of a
scale, changes it by an amount that can be worked out for every place: few places fit. And a changed
value stands out from its neighbours, which are off from the source by a fraction of a step each.
The first decides where it can; the second is only the likeliest place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfbyte.core import Scheme

_PLAUSIBLE = 4.0
"""Squared steps that a value may have been off before it changed: GPTQ moves some codes by two."""
_SEVERAL_BITS = 1.0
"""Squared steps that a change of several bits has to explain more than that of one, which is what
happens to memory."""
_MANY = 1000
"""Places beyond which none is shown: that would be a guess."""


class Excess(NamedTuple):
    """How much more |W - Q|² is than the report says, and how exactly that is known."""

    value: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Place:
    """A code or a scale that does not fit its source."""

    row: int
    group: int
    column: int | None
    """Of a code; None for the scale of the group."""
    found: float
    expected: float
    """What the run wrote, if `alike` is 1; else the value that fits the source best."""
    alike: int
    """Single changes that explain the report's number, this one among them; 0 when none does, and
    this is only what stands out most."""

    def __str__(self) -> str:
        if self.column is None:
            what = f"scale [{self.row}, {self.group}] is {self.found:.4g}"
        else:
            what = f"code [{self.row}, {self.column}] of group {self.group} is {self.found:.0f}"
        if self.alike == 1:
            was = f"{self.expected:.0f}" if self.column is not None else f"{self.expected:.4g}"
            return f"only one change explains that: {what}, was {was}"
        about = f"about {self.expected:.3g}"
        if self.alike:
            return f"likeliest of {self.alike} changes that explain it: {what}, was {about}"
        return f"what stands out most: {what}, its source asks for {about}"


class _Candidate(NamedTuple):
    gain: float
    """Squared steps that the value is off by now, less those before. Deviations are nearly normal,
    so the more, the likelier that they are not its own."""
    place: Place


def locate(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    scheme: Scheme,
    excess: Excess | None = None,
) -> Place | None:
    """The likeliest place of one change, None where no place is likelier than a thousand others.

    `weight` float32 [N, K] is the source as the run rounded it, `codes` int8 [N, K] and `scales`
    bfloat16 [N, groups] are what is stored. Works in float64 on their device.
    """
    view = _View.of(weight, codes, scales)
    if excess is not None:
        matches = [*_changed_codes(view, scheme, excess), *_flipped_scales(view, scales, excess)]
        if len(matches) > _MANY:
            return None
        if matches:
            best = max(matches, key=lambda match: match.gain).place
            return Place(best.row, best.group, best.column, best.found, best.expected, len(matches))
    return _outlier(view)


@dataclass(frozen=True, slots=True)
class _View:
    """A linear in steps of its scales, float64."""

    codes: torch.Tensor
    """[N, groups, columns of a group]."""
    off: torch.Tensor
    """Codes less what the source would need, in steps, of the same shape."""
    scales: torch.Tensor
    """[N, groups]."""

    @staticmethod
    def of(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> _View:
        groups = scales.shape[1]
        steps, sizes = codes.unflatten(1, (groups, -1)).double(), scales.double()
        exact = weight.unflatten(1, (groups, -1)).double() / sizes[..., None]
        return _View(steps, steps - exact, sizes)


def _changed_codes(view: _View, scheme: Scheme, excess: Excess) -> Iterator[_Candidate]:
    """Places where another code would give the |W - Q|² of the report."""
    squares = view.scales.square()[..., None]
    width = view.codes.shape[2]
    # A change c of a code that is off by e now adds s² (e² - (e - c)²): two solutions at most.
    root = (view.off.square() - excess.value / squares).clamp_(min=0).sqrt_()
    first = (view.off - root).round_()
    second = (view.off + root).round_()
    second[second == first] = 0
    for change in (first, second):
        before, was = view.off - change, view.codes - change
        added = squares * change * (2 * view.off - change)
        fits = (added - excess.value).abs_() <= excess.tolerance
        fits &= (was >= scheme.code_min) & (was <= scheme.code_max) & (change != 0)
        fits &= before.square() <= _PLAUSIBLE
        for row, group, column in fits.nonzero()[: _MANY + 1].tolist():
            at = row, group, column
            found, wrote = float(view.codes[at]), float(was[at])
            gain = float(view.off[at]) ** 2 - float(before[at]) ** 2
            if ((int(found) - scheme.code_min) ^ (int(wrote) - scheme.code_min)).bit_count() > 1:
                gain -= _SEVERAL_BITS
            place = Place(row, group, group * width + column, found, wrote, 1)
            yield _Candidate(gain, place)


def _flipped_scales(view: _View, scales: torch.Tensor, excess: Excess) -> Iterator[_Candidate]:
    """Scales of which one other bit would give the |W - Q|² of the report."""
    if scales.dtype not in (torch.bfloat16, torch.float16):
        return
    energy = view.off.square().sum(2)
    moment, square = (view.codes * view.off).sum(2), view.codes.square().sum(2)
    for bit in range(16):
        mask = 1 << bit if bit < 15 else -(1 << 15)
        ratio = (scales.view(torch.int16) ^ mask).view(scales.dtype).double() / view.scales
        # With the scale s r a code q that is off by e would be off by (e + q (r - 1)) / r.
        then = energy + 2 * (ratio - 1) * moment + (ratio - 1).square() * square
        added = view.scales.square() * (energy - then)
        fits = (added - excess.value).abs_() <= excess.tolerance
        before = _misfit(moment + (ratio - 1) * square, square) / ratio.square()
        fits &= (before <= _PLAUSIBLE) & ratio.isfinite() & (ratio != 0)
        for row, group in fits.nonzero()[: _MANY + 1].tolist():
            found = float(view.scales[row, group])
            place = Place(row, group, None, found, found * float(ratio[row, group]), 1)
            now = _misfit(moment[row, group], square[row, group])
            yield _Candidate(float(now - before[row, group]), place)


def _misfit(moment: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Squared steps that the best scale of a group would save: of codes q that are off by e,
    (q·e)² / q·q."""
    return moment.square() / square.clamp(min=1)


def _outlier(view: _View) -> Place:
    """The code or scale whose replacement brings the linear nearest to its source, in steps."""
    moment, square = (view.codes * view.off).sum(2), view.codes.square().sum(2)
    saved_by_scale = _misfit(moment, square)
    saved_by_code = view.off.square() - (view.off - view.off.round()).square()
    if float(saved_by_scale.max()) > float(saved_by_code.max()):
        row, group = divmod(int(saved_by_scale.argmax()), saved_by_scale.shape[1])
        found = float(view.scales[row, group])
        fit = 1 - float(moment[row, group] / square[row, group])
        return Place(row, group, None, found, found * fit, 0)
    flat = int(saved_by_code.argmax())
    row, group, column = (int(i) for i in torch.unravel_index(torch.tensor(flat), view.off.shape))
    at = row, group, column
    found = float(view.codes[at])
    wanted = found - float(view.off[at])
    return Place(row, group, group * view.off.shape[2] + column, found, wanted, 0)
