"""AWQ: scale the channels of an input so that its readers lose less when they are rounded.

For a linear with weight W [N, K] and input x, W x = (W S)(S⁻¹ x) with S = diag(s). Rounding W S
instead of W leaves the error E' = W S - Q, and with it an output error of

    tr(E' H' E'ᵀ),    H' = S⁻¹ H S⁻¹,    H the second moment of x,

so channels that matter can have finer steps at the cost of the others in their group (Lin et al.,
arXiv 2306.00978). What makes x is divided by s: a norm's weight, or the rows of the up projection.
The scales are those of the paper, a power of the channels' activation magnitude over a power of
their weight magnitude, with the exponent that does best on a grid. Where the paper runs the block
for each grid point, the second moment gives the same error of the readers' outputs.

Scales lie on a grid, too. Those of an input that a norm makes, or anything else that stays floating
point, are powers of two: dividing it, and multiplying those of its readers that stay floating point
(router, indexer, shared experts), is then exact, so all of the model but its INT4 weights computes
bit for bit what it did before. Between an up and a down projection that are both quantized the grid
is finer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from halfbyte.calibration.limits import GRID, READERS_IN_SEARCH
from halfbyte.core import Scheme
from halfbyte.errors import CalibrationError
from halfbyte.kernels.reference import rounding_errors
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales

T = TypeVar("T")

LARGEST_POWER = 8
"""Scales lie within 2^-8 ... 2^8."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A linear that will be quantized, as the search sees it."""

    weight: torch.Tensor
    """Float32 [N, K]; linears that read the same vectors may be stacked to one."""
    cost: torch.Tensor
    """Float32 [K, K]: the second moment H of its input, for what rounding alone costs. Or [K]:
    GPTQ's pivots D of H = U D Uᵀ, what a squared rounding error costs that later columns make up
    for. Under scales H' has the pivots D / s², so they too are needed only once."""
    scheme: Scheme
    share: float = 1.0
    """What its errors count: the share of all tokens that it reads."""


@dataclass(frozen=True, slots=True)
class ChannelScales:
    """What the search found for one input."""

    scales: torch.Tensor
    """Float32 [K]: columns of readers are multiplied by them, what makes the input is divided."""
    exponent: float | None
    """The grid point; None when leaving the input as it is was best."""
    gain: float
    """Error of the readers by the search's own measure, relative to leaving the input as it is."""


def identity(channels: int, device: torch.device | str = "cpu") -> ChannelScales:
    """Leave an input of so many channels as it is."""
    return ChannelScales(torch.ones(channels, device=device), None, 1.0)


def scales_on_grid(powers: torch.Tensor, steps: int) -> torch.Tensor:
    """2^(power / steps) as float32, of integers within `steps` times `LARGEST_POWER`.

    From a table: the same bits on every device.
    """
    bound = LARGEST_POWER * steps
    table = torch.tensor([2.0 ** (p / steps) for p in range(-bound, bound + 1)])
    scales: torch.Tensor = table.to(powers.device)[powers.long() + bound]
    return scales


def search_scales(readers: Callable[[], Iterable[Reader]], where: str, steps: int) -> ChannelScales:
    """The scales on the grid, `steps` of them per octave, with which an input's readers lose least.

    `readers` is called twice and gives the same readers each time, so that an iterator can load
    one after the other. Leaving the input as it is, is always tried, and wins ties.
    Raises CalibrationError, naming `where`, when a second moment is not finite.
    """
    magnitude = weight = torch.zeros(())
    rows = 0
    for reader in readers():
        if not bool(torch.isfinite(reader.cost).all()):
            raise CalibrationError(
                f"the inputs of {where} are not finite", hint="compute in float32: --dtype float32"
            )
        diagonal = reader.cost.diagonal() if reader.cost.dim() == 2 else reader.cost
        profile = _relative_magnitude(reader.weight, reader.scheme).sum(0)
        magnitude = reader.share * diagonal + magnitude.to(profile.device)
        weight = profile + weight.to(profile.device)
        rows += reader.weight.shape[0]
    candidates = list(_candidates(magnitude.sqrt(), weight / rows, steps))
    totals = weight.new_zeros(len(candidates), dtype=torch.float64)
    for reader in readers():
        for i, (_, scales) in enumerate(candidates):
            totals[i] += reader.share * output_error(reader, scales)
    best = int(totals.argmin())  # the first of equals
    before, after = totals[[0, best]].tolist()
    if not best or not after < before:
        return identity(len(weight), weight.device)
    return ChannelScales(candidates[best][1], candidates[best][0], after / before)


def output_error(reader: Reader, scales: torch.Tensor) -> torch.Tensor:
    """tr(E' H' E'ᵀ) of one reader under `scales` [K], float64; each group is rounded to the nearest
    code with the scale of its largest weight."""
    scaled = reader.weight * scales
    steps = group_scales(scaled[None], reader.scheme, "minmax")[0]
    error = rounding_errors(scaled, round_to_nearest(scaled, steps, reader.scheme), steps)
    error /= scales  # E' S⁻¹ costs with H what E' costs with H'
    costs: torch.Tensor
    if reader.cost.dim() == 1:
        costs = error.square_().sum(0, dtype=torch.float64) * reader.cost
    else:
        costs = (error @ reader.cost).mul_(error)
    return costs.sum(dtype=torch.float64)


def scaled_moment(hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """S⁻¹ H S⁻¹ of H [K, K]: the second moment of an input after it was divided by `scales` [K]."""
    moment: torch.Tensor = hessian / (scales[:, None] * scales)
    return moment


def evenly_spread(items: Sequence[T]) -> list[T]:
    """At most `READERS_IN_SEARCH` of the items, evenly spread, first and last among them."""
    if len(items) <= READERS_IN_SEARCH:
        return list(items)
    step = (len(items) - 1) / (READERS_IN_SEARCH - 1)
    return [items[round(i * step)] for i in range(READERS_IN_SEARCH)]


def _relative_magnitude(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """|W| relative to the largest of its group, [N, K]."""
    grouped = weight.abs().unflatten(-1, (scheme.groups(weight.shape[-1]), -1))
    largest = grouped.amax(-1, keepdim=True).clamp_(min=torch.finfo(weight.dtype).tiny)
    relative: torch.Tensor = grouped / largest
    return relative.flatten(-2)


def _candidates(
    activation: torch.Tensor, weight: torch.Tensor, steps: int
) -> Iterator[tuple[float | None, torch.Tensor]]:
    """Exponents a, and the scales [K] activationᵃ / weight¹⁻ᵃ on the grid; no scaling comes first.

    The largest and the smallest scale are inverse to each other. A channel that never carries
    anything, or that no weight reads, keeps the scale 1.
    """
    before = torch.ones_like(weight)
    yield None, before
    alive = (activation > 0) & (weight > 0)
    if not bool(alive.any()):
        return
    tiny = torch.finfo(weight.dtype).tiny
    log_activation, log_weight = (v.clamp(min=tiny).log2() for v in (activation, weight))
    for step in range(GRID):
        exponent = step / GRID
        power = exponent * log_activation - (1 - exponent) * log_weight
        middle = (power[alive].amax() + power[alive].amin()) / 2
        power = power.sub_(middle).clamp_(-LARGEST_POWER, LARGEST_POWER).mul_(steps)
        scales = scales_on_grid(power.round_().where(alive, 0), steps)
        if not torch.equal(scales, before):  # coarse grids repeat themselves
            yield exponent, scales
        before = scales
