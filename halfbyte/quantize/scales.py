"""Group scales: one number per row and group of columns, fixed before any rounding.

Codes reach one step further down than up (-8 to 7), so a group whose largest weight is positive
does better with a negative scale, which turns it around: the largest weight then gets the code -8
and the step is a sixteenth smaller. Readers multiply a code by its scale and
never look at its sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from halfbyte.core import ScaleSearch, Scheme

SHRINK_STEP = 0.02
SMALLEST_SHRINK = {128: 0.7, None: 0.4}
"""By the largest group it is for. Normal weights in one group of 6144 want 0.6, heavy tails less;
groups of 128 want 0.8."""
CACHED = 1 << 18
"""Elements that a CPU searches at a time, so that they and their errors stay in its cache."""
THREADS = 8
"""At most; more would only wait for each other in Python."""


def group_scales(
    weights: torch.Tensor,
    scheme: Scheme,
    search: ScaleSearch,
    importance: torch.Tensor | None = None,
    *,
    signed: bool = True,
) -> torch.Tensor:
    """Scales of `weights` float32 [B, N, K] as bfloat16 [B, N, groups]: normal numbers, never zero.

    `minmax` is compressed-tensors' rule: the largest magnitude of the group over half the code
    range, 7.5 for INT4. `mse` tries that, the largest magnitude over the largest code of either
    side (7 and 8), and smaller scales, which clip; all of it with both signs when `signed`. Each
    group takes what rounds its weights with the least squared error, measured with the scale as it
    is stored. `importance` float32 [B or 1, K] weighs the squared error of each column.
    """
    columns = weights.shape[-1]
    group = scheme.columns_per_group(columns)
    divisors = divisors_of(scheme, group, signed=signed)
    if weights.is_cuda and search == "mse":
        from halfbyte.kernels.scale_search import LARGEST_GROUP, search_scales

        if group <= LARGEST_GROUP:
            hessians = 1 if importance is None else importance.shape[0]
            return search_scales(
                weights.reshape(hessians, -1, columns).contiguous(),
                None if importance is None else importance.sqrt(),
                torch.tensor(divisors, device=weights.device),
                group,
                scheme.code_min,
                scheme.code_max,
            ).reshape(*weights.shape[:-1], -1)
    grouped = weights.unflatten(-1, (scheme.groups(weights.shape[-1]), -1))
    if search == "minmax":
        return stored_scales(grouped.abs().amax(-1) / _half_range(scheme))
    scales = weights.new_empty(grouped.shape[:-1], dtype=torch.bfloat16)
    column_weights = None
    if importance is not None:
        # Multiplies the error before it is squared.
        root = importance.sqrt().unflatten(-1, grouped.shape[-2:])
        column_weights = root.expand(weights.shape[0], -1, -1)
    # One weight at a time: working memory stays at one matrix whatever the batch.
    for item, weight in enumerate(grouped):
        own = None if column_weights is None else column_weights[item]
        search_rows = partial(
            least_squares_scales, scheme=scheme, divisors=divisors, column_weights=own
        )
        scales[item] = _by_rows(search_rows, weight) if weight.is_cpu else search_rows(weight)
    return scales


def _by_rows(
    search_rows: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor
) -> torch.Tensor:
    """The same for a few rows at a time; a row's scales depend on no other row."""
    parts = weight.split(max(1, CACHED // weight[0].numel()))
    threads = min(torch.get_num_threads(), THREADS, len(parts))
    if threads == 1:
        return torch.cat([search_rows(part) for part in parts])
    # Each thread of ours takes a part, instead of torch's threads sharing every operation on it.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return torch.cat(list(pool.map(search_rows, parts)))
    finally:
        torch.set_num_threads(before)


def least_squares_scales(
    weight: torch.Tensor,
    scheme: Scheme,
    divisors: Sequence[float],
    column_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Of each group of `weight` [N, groups, group size] the largest magnitude over that of the
    divisors with the least error, the first of equals: bfloat16 [N, groups]. Errors are multiplied
    with `column_weights` [groups, group size] before they are squared."""
    largest = weight.abs().amax(-1)
    best = torch.empty_like(largest, dtype=torch.bfloat16)
    least = torch.full_like(largest, float("inf"))
    error = torch.empty_like(weight)
    for divisor in divisors:
        candidate = stored_scales(largest / divisor)
        step = candidate.float().unsqueeze(-1)
        torch.mul(weight, 1 / step, out=error)
        error.round_().clamp_(scheme.code_min, scheme.code_max).mul_(step).sub_(weight)
        if column_weights is not None:
            error.mul_(column_weights)
        total = torch.linalg.vector_norm(error, dim=-1)
        better = total < least
        torch.where(better, total, least, out=least)
        torch.where(better, candidate, best, out=best)
    return best


def divisors_of(scheme: Scheme, group: int, *, signed: bool) -> tuple[float, ...]:
    """What a search divides the largest magnitude of a group of `group` columns by, the usual one
    first: it wins ties."""
    half_range = _half_range(scheme)
    smallest = SMALLEST_SHRINK[128 if group <= 128 else None]
    steps = range(1, round((1 - smallest) / SHRINK_STEP) + 1)
    ends = (scheme.code_max, -scheme.code_min) if signed else (scheme.code_max,)
    one_side = (half_range, *ends, *(half_range / (1 - i * SHRINK_STEP) for i in steps))
    return (*one_side, *(-divisor for divisor in one_side)) if signed else one_side


def _half_range(scheme: Scheme) -> float:
    return (scheme.code_max - scheme.code_min) / 2


def stored_scales(scales: torch.Tensor) -> torch.Tensor:
    """As the checkpoint holds them. A group of zeros gets the smallest normal number, not zero:
    loaders take a zero scale for a missing one, and nothing may divide by it."""
    tiny = torch.finfo(torch.bfloat16).tiny
    stored = scales.bfloat16()
    return torch.where(stored.abs() < tiny, tiny, stored)
