"""Products of activations with INT4 weights as they are stored, and what float64 makes of them.

What a result may be off by follows from the formats alone: its own rounding, and that of float32
sums. `Linear` is one weight, `Together` all routed experts of a layer in one launch. Kernels run
where the GPU and the weight allow it, their plain torch twins elsewhere.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from halfbyte.calibration.inputs import evenly
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import EXPERT_LINEARS
from halfbyte.core import StoredWeight
from halfbyte.formats.config import text_config
from halfbyte.kernels import reference
from halfbyte.kernels.w4a16 import Packed, usable

TOKENS = (1, 8, 128)
"""Of the products: decoding of one and of eight requests, and prefill."""
DTYPE = torch.bfloat16
"""Of activations, as servers have them."""
ROUNDED_BEYOND = 16
"""Tokens beyond which a kernel may round weights to the dtype of activations, as it costs less."""
_SMALLEST = 2.0**-126
"""Below it numbers may be taken as zero."""


class Linear(NamedTuple):
    """A stored linear and what it stands for, float32 [N, K], decoded without any kernel."""

    stored: Packed
    weight: torch.Tensor

    def judged(self, x: torch.Tensor) -> tuple[list[Judged], torch.Tensor]:
        """Its products with the first rows of `x` [M, K], and the one with all of them."""
        expected = [Expected.of(x, weight, self.stored.scales) for weight in self.alternatives()]
        results = []
        for count in token_counts(len(x)):
            with poisoned():
                y = reference.linear_int4(x[:count], *self.stored)
            results.append(judge(y, expected, count))
        return results, y

    def alternatives(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight, and rounded as for products of many tokens."""
        return self.weight, self.weight.to(DTYPE).float()


def token_counts(tokens: int) -> list[int]:
    """Tokens of the products that can be made of so many, the largest last."""
    return sorted({min(count, tokens) for count in TOKENS})


# The bound.


def float32_share(terms: int) -> float:
    """What a float32 sum of so many products may be off by, as a share of the sum of their sizes.

    Rounding wanders, in any order, by a few times the square root; tensor cores cut off instead,
    after every sixteen products, which adds up.
    """
    return 2.0**-24 * (terms / 8 + 4 * math.sqrt(terms) + 4)


class Expected(NamedTuple):
    """A product in float64 [M, N], and what a float32 sum of it may be off by."""

    value: torch.Tensor
    slack: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> Expected:
        """Of x [M, K] and a weight [N, K] with its scales [N, groups].

        A kernel may take codes as they are stored, 0 to 15, and 8 times the activations away: four
        sums, cut off, of up to 16 steps.
        """
        x, weight = x.double(), weight.double()
        steps = scales.double().abs().repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        sizes = weight.abs().mul_(float32_share(x.shape[1])).add_(steps, alpha=64 * 2.0**-23)
        return Expected(x @ weight.T, x.abs() @ sizes.T)

    def first(self, tokens: int) -> Expected:
        return Expected(self.value[:tokens], self.slack[:tokens])


class Judged(NamedTuple):
    """How far off a product is, relative to its norm. None is what no number says: outputs that are
    not finite, or are too few."""

    error: float | None
    rounding: float | None
    """Of the float64 product, rounded to the dtype of the result."""
    of_allowance: float | None
    """Largest share, of any output, of what float32 sums may be off by."""
    fault: str | None = None


def judge(y: torch.Tensor, expected: Sequence[Expected], tokens: int) -> Judged:
    """Hold the product of the first `tokens` rows against float64: `expected` with the weights, and
    with rounded ones, which many tokens allow.

    A sum that is off by d before it is rounded is off by at most 2 d more than the rounded float64
    is, whichever way it is rounded.
    """
    exact, rounded_weights = (one.first(tokens) for one in expected)
    value = exact.value
    rounding = (value.to(DTYPE).double() - value).abs_()
    norm = max(float(value.norm()), _SMALLEST)
    rounded = _number(float(rounding.norm()) / norm)
    which = f"with {tokens} token{'s' if tokens > 1 else ''}"
    if (y.dtype, y.shape) != (DTYPE, value.shape):
        found = f"{y.dtype} {list(y.shape)}, not {DTYPE} {list(value.shape)}"
        return Judged(None, rounded, None, f"{which} the product is {found}")
    off = (y.double() - value).abs_()
    share = _share(y, exact)
    if tokens > ROUNDED_BEYOND:
        share = torch.minimum(share, _share(y, rounded_weights))
    worst = float(share.max())
    judged = Judged(_number(float(off.norm()) / norm), rounded, _number(worst))
    if worst <= 1:
        return judged
    token, row = divmod(int(share.argmax()), share.shape[1])
    at, bad = (token, row), share > 1
    allowed = float(rounding[at]) + 2 * float(exact.slack[at])
    return judged._replace(
        fault=f"{which} the output of token {token}, row {row} is {float(y[at]):.6g}, in float64 "
        f"{float(value[at]):.6g}: off by {float(off[at]):.3g}, at most "
        f"{allowed:.3g} is rounding; {int(bad.sum()):,} of "
        f"{bad.numel():,} outputs and {int(bad.any(0).sum()):,} of {bad.shape[1]:,} rows are so"
    )


def _share(y: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Of what float32 sums may be off by, [M, N]."""
    value, slack = expected
    rounding = (value.to(DTYPE).double() - value).abs_()
    beyond = (y.double() - value).abs_().sub_(rounding)
    share = beyond.div_(2 * slack + _SMALLEST).clamp_(min=0)
    return share.nan_to_num_(nan=math.inf, posinf=math.inf)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated and not written is NaN meanwhile, so that an output left out shows."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


# The experts of a layer together.


_EXPERT = re.compile(
    r"(?P<prefix>.*\.mlp\.)experts\.(?P<expert>\d{1,9})\.(?P<leaf>gate_proj|up_proj|down_proj)"
    r"\.weight"
)


class Width(NamedTuple):
    """What the routed experts of a layer are like."""

    prefix: str
    experts: int
    intermediate: int
    hidden: int
    per_token: int

    @staticmethod
    def of(weights: Mapping[str, StoredWeight], config: Mapping[str, Any]) -> Width | str | None:
        """Of the weights of one layer; why one launch cannot take its experts, or None when there
        are none."""
        experts: dict[int, dict[str, StoredWeight]] = {}
        prefix = ""
        for name, weight in weights.items():
            if match := _EXPERT.fullmatch(name):
                prefix = match["prefix"]
                experts.setdefault(int(match["expert"]), {})[match["leaf"]] = weight
        if not experts:
            return None
        model = text_config(config)
        per_token = model.get("num_experts_per_tok")
        kinds = {
            tuple((leaf, w[leaf].shape, w[leaf].scheme) for leaf in sorted(w))
            for w in experts.values()
        }
        if sorted(experts) != list(range(len(experts))) or len(kinds) > 1:
            return "they are not alike"
        first = experts[0]
        if len(first) != len(EXPERT_LINEARS) or any(w.encoding != "int4" for w in first.values()):
            return "they are not gate, up and down in INT4"
        if model.get("hidden_act", "silu") != "silu":
            return f"their activation is {model['hidden_act']!r:.40}, not silu"
        if not isinstance(per_token, int) or not 0 < per_token <= len(experts):
            return f"num_experts_per_tok is {per_token!r:.40}"
        intermediate, hidden = first["gate_proj"].shape
        return Width(prefix, len(experts), intermediate, hidden, per_token)


class Routed(NamedTuple):
    """Tokens and where they go."""

    x: torch.Tensor
    """[M, H] bfloat16."""
    chosen: torch.Tensor
    """int32 [M, experts of a token]."""
    router: torch.Tensor
    """float32, of the same shape."""

    @staticmethod
    def at_random(x: torch.Tensor, width: Width) -> Routed:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(len(x), width.experts, generator=generator).to(x.device)
        router, chosen = scores.topk(width.per_token, dim=1)
        return Routed(x.to(DTYPE), chosen.int(), router / router.sum(1, keepdim=True))

    @staticmethod
    def sample(routing: Routing) -> Routed:
        """Tokens evenly spread over those of a text."""
        rows = evenly(TOKENS[-1], len(routing.hidden), routing.index.device)
        x, chosen = routing.hidden[rows].to(DTYPE), routing.index[rows].int()
        return Routed(x, chosen, routing.weight[rows].float())


class Together:
    """Gathers a layer's experts, as one launch takes them, and what float64 makes of them."""

    def __init__(self, routed: Routed, width: Width) -> None:
        self.width = width
        self._routed = routed
        self._stacks: dict[str, Packed] = {}
        self._waiting: dict[str, Linear] = {}
        """Of an expert, until all three are there."""
        nothing = torch.zeros_like(routed.x, dtype=torch.float64)
        self._expected = [Expected(nothing.clone(), nothing.clone()) for _ in range(2)]
        """With the weights, and with rounded ones."""

    def take(self, name: str, linear: Linear) -> None:
        """A linear of an expert, expert by expert; one of no routed expert is left alone."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return
        expert, leaf = int(match["expert"]), match["leaf"]
        rows = linear.weight.shape[0]
        stack = "down" if leaf == "down_proj" else "gate_up"
        height = rows if stack == "down" else 2 * rows
        if stack not in self._stacks:
            self._stacks[stack] = Packed(
                *(
                    part.new_empty(self.width.experts, height, part.shape[1])
                    for part in linear.stored
                )
            )
        first = rows if leaf == "up_proj" else 0
        for whole, part in zip(self._stacks[stack], linear.stored, strict=True):
            whole[expert, first : first + rows] = part
        self._waiting[leaf] = linear
        if len(self._waiting) == len(EXPERT_LINEARS):
            linears = [self._waiting.pop(leaf) for leaf in EXPERT_LINEARS]
            scales = [one.stored.scales for one in linears]
            weights = zip(*(one.alternatives() for one in linears), strict=True)
            for expected, alternative in zip(self._expected, weights, strict=True):
                self._add(expected, expert, alternative, scales)

    @property
    def by_kernel(self) -> bool:
        """Whether CUDA kernels make all their products."""
        stacks = self._stacks.items()
        return all(usable(stack, gate_up=name == "gate_up") for name, stack in stacks)

    def judged(self) -> list[Judged]:
        """The products of the first tokens, once all linears were taken."""
        results = []
        for count in token_counts(len(self._routed.x)):
            with poisoned():
                y = self._product(count)
            results.append(judge(y, self._expected, count))
        return results

    def _product(self, tokens: int) -> torch.Tensor:
        x, chosen, router = (part[:tokens].contiguous() for part in self._routed)
        return reference.experts_int4(
            x, self._stacks["gate_up"], self._stacks["down"], chosen, router
        )

    def _add(
        self,
        expected: Expected,
        expert: int,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
    ) -> None:
        """Add an expert's share to the float64 outputs, and to what they may be off by; of gate, up
        and down.

        The gated product is rounded to the dtype in between: where float32 may fall on either side
        of a step, the outputs may be off by that step.
        """
        token, place = (self._routed.chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            return
        x = self._routed.x[token]
        g, g_off = Expected.of(x, weights[0], scales[0])
        u, u_off = Expected.of(x, weights[1], scales[1])
        acted = torch.nn.functional.silu(g)
        exact = acted * u
        # The slope of silu is below 1.1; exponential and division are good to a few units.
        off = 1.1 * g_off * (u.abs() + u_off) + acted.abs() * u_off
        off += exact.abs() * (8 + 2 * g.abs()) * 2.0**-23
        middle = exact.to(DTYPE).double()
        step = torch.maximum(
            (exact + off).to(DTYPE).double() - middle, middle - (exact - off).to(DTYPE).double()
        )
        made = Expected.of(middle, weights[2], scales[2])
        sizes = weights[2].double().abs()
        share = (self.width.per_token + 2) * 2.0**-24
        slack = made.slack + step @ sizes.T + share * (middle.abs() @ sizes.T)
        router = self._routed.router[token, place, None].double()
        expected.value.index_add_(0, token, made.value * router)
        expected.slack.index_add_(0, token, slack * router.abs())
