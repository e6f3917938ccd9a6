"""Measures the routed experts of a layer: work list, both products, SiLU and the sum.

Experts are chosen at random with equal chances, the same ones for all formats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from halfbyte.errors import UsageError
from halfbyte.kernels import fp8, w4a16
from halfbyte.kernels.decode_bench import Bench, Run, check_product
from halfbyte.kernels.decode_time import Experts, Layer, PartTime, Timing
from halfbyte.kernels.fp8 import FP8, GroupedExperts, Scaled
from halfbyte.kernels.reference import decode_int4, experts_int4
from halfbyte.kernels.w4a16 import Packed, Weight

ROUTINGS = 8
"""Choices of experts that a time is the mean of, at least."""
LIMITS = {"fp8": 5e-2, "int4": 1e-2}
"""Of the relative error: what lies between the products is rounded, to FP8 or BF16. The sums of FP8
products on Hopper have about 14 bits."""

Decode = Callable[[int], torch.Tensor]
"""The weight of an expert, float64 [N, K]."""


@dataclass(frozen=True)
class Routing:
    """So many tokens, and the experts that they choose, again and again."""

    batch: int
    x: torch.Tensor
    """BF16 [M, H], of values that FP8 holds."""
    chosen: tuple[torch.Tensor, ...]
    """int32 [M, T] each."""
    router: torch.Tensor
    """float32 [M, T]; those of a token sum to 1."""

    @staticmethod
    def of(experts: Experts, batch: int, bench: Bench) -> Routing:
        generator = torch.Generator().manual_seed(1)
        count = max(ROUTINGS, bench.copies(_token_bytes(experts)))
        order = torch.rand(count, batch, experts.count, generator=generator).argsort(dim=2)
        chosen = order[:, :, : experts.chosen].int().contiguous().to(bench.device)
        router = torch.rand(batch, experts.chosen, device=bench.device) + 0.1
        router /= router.sum(dim=1, keepdim=True)
        x = bench.random(batch, experts.hidden, dtype=FP8).bfloat16()
        return Routing(batch, x, tuple(chosen), router)

    @property
    def active(self) -> float:
        """Experts that some token has, on average."""
        return statistics.mean(len(chosen.unique()) for chosen in self.chosen)

    def exact(self, gate_up: Decode, down: Decode, between: torch.dtype) -> torch.Tensor:
        """The first and the last token of the first choice, float64 [2, H], where what lies between
        the products is rounded to a dtype."""
        rows = []
        for token in (0, -1):
            x = self.x[token].double()
            row = torch.zeros_like(x)
            chosen, router = self.chosen[0][token].tolist(), self.router[token].tolist()
            for expert, weight in zip(chosen, router, strict=True):
                gate, up = (gate_up(expert) @ x).chunk(2)
                gated = (torch.nn.functional.silu(gate) * up).to(between).double()
                row += weight * (down(expert) @ gated)
            rows.append(row)
        return torch.stack(rows)


def check_experts(layer: Layer, bench: Bench) -> None:
    """Raises UsageError for experts that INT4 or its kernels cannot hold."""
    experts = layer.experts
    shapes = zip(("gate and up", "down"), _shapes(experts), strict=True)
    for name, (_, rows, columns) in shapes:
        group = bench.group_size or columns
        reason = ""
        if columns % group or columns % 8:
            reason = f"{columns} columns are no whole groups of {group}"
        elif bench.device.type == "cuda":
            codes = torch.empty(rows, columns // 8, dtype=torch.int32, device="meta")
            scales = torch.empty(rows, columns // group, dtype=torch.bfloat16, device="meta")
            reason = w4a16.unsupported(Packed(codes, scales), gate_up=name != "down")
        if reason:
            raise UsageError(
                f"--tensor-parallel {layer.ranks}: INT4 products cannot take {name} of an expert:"
                f" {reason}",
                hint="choose another --tensor-parallel or --group-size",
            )


def time_experts(experts: Experts, routings: Sequence[Routing], bench: Bench) -> list[PartTime]:
    """The times of each routing. The weights of one format are in memory at a time."""
    int4 = _all_int4(experts, routings, bench)
    eight = _all_fp8(experts, routings, bench)
    return [
        PartTime(experts, (*first, *second), notes)
        for first, (second, notes) in zip(int4, eight, strict=True)
    ]


def _token_bytes(experts: Experts) -> int:
    """About what a token reads of INT4, the least that one run reads."""
    return experts.chosen * 3 * experts.hidden * experts.intermediate // 2


def _shapes(experts: Experts) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    count, hidden, width = experts.count, experts.hidden, experts.intermediate
    return (count, 2 * width, hidden), (count, hidden, width)


def _time(
    name: str, make: Callable[[int, torch.Tensor], torch.Tensor], copies: int, routing: Routing,
    exact: torch.Tensor, limit: float, bench: Bench,
) -> float:  # fmt: skip
    """Of `make` with the copy of that number and a choice of experts."""
    run = _run(make, copies, routing)
    check_product(f"{name} at batch {routing.batch}", run(0)[[0, -1]], exact, limit)
    return bench.timer(run, max(copies, len(routing.chosen)))


def _run(make: Callable[[int, torch.Tensor], torch.Tensor], copies: int, routing: Routing) -> Run:
    chosen = routing.chosen
    return lambda i: make(i % copies, chosen[i % len(chosen)])


# INT4.


def _all_int4(
    experts: Experts, routings: Sequence[Routing], bench: Bench
) -> list[tuple[Timing, ...]]:
    gate_up, down = stored = [_random_int4(shape, bench) for shape in _shapes(experts)]
    if bench.device.type != "cuda":
        pairs = [(weight.codes, weight.scales) for weight in stored]

        def by_torch(
            copy: int, routing: Routing, chosen: torch.Tensor, *, early: bool
        ) -> torch.Tensor:
            return experts_int4(routing.x, pairs[0], pairs[1], chosen, routing.router)

        return [_time_int4(by_torch, 1, stored, routing, bench) for routing in routings]
    copies = [(Weight.of(gate_up), Weight.of(down))]
    while len(copies) < bench.copies(_token_bytes(experts)):
        copies.append((_copied_int4(copies[0][0]), _copied_int4(copies[0][1])))

    def by_kernel(
        copy: int, routing: Routing, chosen: torch.Tensor, *, early: bool
    ) -> torch.Tensor:
        return w4a16.experts(routing.x, *copies[copy], chosen, routing.router, early=early)

    return [_time_int4(by_kernel, len(copies), stored, routing, bench) for routing in routings]


def _time_int4(
    make: Callable[..., torch.Tensor], copies: int, stored: Sequence[Packed], routing: Routing,
    bench: Bench,
) -> tuple[Timing, ...]:  # fmt: skip
    """As usual, and launched early."""
    gate_up, down = stored
    exact = routing.exact(partial(_decoded, gate_up), partial(_decoded, down), torch.bfloat16)

    def timing(early: bool) -> Timing:
        def own(copy: int, chosen: torch.Tensor) -> torch.Tensor:
            return make(copy, routing, chosen, early=early)

        name = "routed experts in int4"
        us = _time(name, own, copies, routing, exact, LIMITS["int4"], bench)
        return Timing("int4", "halfbyte", us, overlapped=early)

    return timing(early=False), timing(early=True)


def _random_int4(shape: tuple[int, int, int], bench: Bench) -> Packed:
    """Random codes, and scales of both signs."""
    *leading, columns = shape
    bound, device = 2**31, bench.device
    codes = torch.randint(-bound, bound, (*leading, columns // 8), dtype=torch.int32, device=device)
    groups = columns // bench.group_size if bench.group_size else 1
    scales = (torch.rand(*leading, groups, device=device) + 0.5) * 0.2 / columns**0.5
    signs = torch.randint(0, 2, scales.shape, device=device) * 2 - 1
    return Packed(codes, (signs * scales).bfloat16())


def _copied_int4(weight: Weight) -> Weight:
    return replace(weight, blocks=weight.blocks.clone())


def _decoded(weight: Packed, expert: int) -> torch.Tensor:
    return decode_int4(weight.codes[expert], weight.scales[expert]).double()


# FP8.


def _all_fp8(
    experts: Experts, routings: Sequence[Routing], bench: Bench
) -> list[tuple[tuple[Timing, ...], tuple[str, ...]]]:
    """The times of each kernel that runs here, and what is to be said of one that does not."""
    gate_up, down = (_random_fp8(shape, bench) for shape in _shapes(experts))
    copies = [(gate_up, down)]
    while len(copies) < bench.copies(2 * _token_bytes(experts)):
        copies.append((_copied_fp8(gate_up), _copied_fp8(down)))
    grouped = [GroupedExperts.of(*each) for each in copies]
    return [_time_fp8(copies, grouped, routing, bench) for routing in routings]


def _time_fp8(
    copies: Sequence[tuple[Scaled, Scaled]], grouped: Sequence[GroupedExperts], routing: Routing,
    bench: Bench,
) -> tuple[tuple[Timing, ...], tuple[str, ...]]:  # fmt: skip
    gate_up, down = copies[0]
    exact = routing.exact(gate_up.decoded, down.decoded, FP8)
    x = routing.x.to(FP8)

    def in_groups(copy: int, chosen: torch.Tensor) -> torch.Tensor:
        return grouped[copy](x, chosen, routing.router)

    time = partial(_time, routing=routing, exact=exact, limit=LIMITS["fp8"], bench=bench)
    own = _own_fp8(copies, x, routing, bench)
    timings = [Timing("fp8", "halfbyte", time("routed experts in fp8", own, len(copies)))]
    notes = []
    try:
        in_groups(0, routing.chosen[0])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        notes.append(f"torch's grouped FP8 products do not run here: {reason:.200}")
    else:
        us = time("routed experts in fp8, grouped by torch", in_groups, len(copies))
        timings.append(Timing("fp8", "torch, grouped", us))
    return tuple(timings), tuple(notes)


def _own_fp8(
    copies: Sequence[tuple[Scaled, Scaled]], x: torch.Tensor, routing: Routing, bench: Bench
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Our kernels, launched in the way that is fastest for this routing."""
    router = routing.router
    if bench.device.type != "cuda":
        return lambda copy, chosen: fp8.experts(x, *copies[copy], chosen, router)
    from halfbyte.kernels import fp8_experts
    from halfbyte.kernels.fp8_experts import Launch

    def made(first: Launch, second: Launch) -> Callable[[int, torch.Tensor], torch.Tensor]:
        return lambda copy, chosen: fp8_experts.experts(
            x, *copies[copy], chosen, router, first, second
        )

    def us(first: Launch, second: Launch) -> float:
        run = _run(made(first, second), len(copies), routing)
        return bench.timer(run, max(len(copies), len(routing.chosen)))

    firsts, seconds = (
        fp8_experts.launches(weight.values.shape[2], bench.device) for weight in copies[0]
    )
    first = min(firsts, key=lambda launch: us(launch, seconds[0]))
    return made(first, min(seconds, key=lambda launch: us(first, launch)))


def _random_fp8(shape: tuple[int, int, int], bench: Bench) -> Scaled:
    """Normal values; scales that keep what comes out near 1."""
    count, _, columns = shape
    scales = (torch.rand(count, device=bench.device) + 0.5) / columns**0.5
    return Scaled(bench.random(*shape, dtype=FP8), scales)


def _copied_fp8(weight: Scaled) -> Scaled:
    return Scaled(weight.values.clone(), weight.scales)
