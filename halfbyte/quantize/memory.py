"""Predicts the peak memory of a run from its plan, before anything is read.

Memory is bounded by one decoder layer: its plain weights, as many experts as fit the working set,
and the hidden states of all calibration tokens. It does not grow with the number of layers. A
calibrated layer has two phases, the forward pass and the experts; the larger one is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from halfbyte.calibration.families import is_routed_expert
from halfbyte.calibration.limits import (
    BATCH_TOKENS,
    EXPERT_TOKENS,
    MOMENT_TOKENS,
    SAMPLE,
    SCORES_AT_ONCE,
)
from halfbyte.core import (
    MemoryBudget,
    MemoryEstimate,
    Place,
    Placement,
    Settings,
    Streams,
    TensorPlan,
    Unit,
)
from halfbyte.errors import UsageError
from halfbyte.formats.budgets import COPYING, LAYERS_ON_GPU, LAYERS_ON_GPUS, ON_CPU, ON_GPU, PIECE
from halfbyte.formats.config import config_count
from halfbyte.units import format_gib

TORCH = {"cpu": 250_000_000, "cuda": 1_750_000_000}
"""Resident bytes of Python with torch imported, and on a GPU of its libraries in use and of the
driver; measured, torch 2.13 and 2.11 on x86-64."""
TRANSFORMERS = 340_000_000
"""What transformers' modules and a tokenizer add."""
EXPERTS_IN_WORK = {"cpu": 1 << 30, "cuda": 24 << 30}
"""Working memory for experts that are solved together; one expert may need more."""
DOWN_CHUNKS = 3
"""Batches of experts, gate and up solved, that wait until their down projections are solved
together: a block of these has few rows, which leaves a GPU badly busy."""
BATCH_ELEMENTS = {"cpu": 0, "cuda": 1 << 27}
"""Elements of linears that are rounded together; one linear may have more."""
ALLOCATOR = {"cpu": 1.2, "cuda": 1.1}
"""What the allocator keeps beyond what is asked for."""
PLACES: Mapping[str, Sequence[Sequence[tuple[Place, Place, bool]]]] = {
    "cpu": (
        (("device", "device", False),),
        (("disk", "device", False),),
        (("disk", "disk", False),),
    ),
    "cuda": (
        (("device", "device", False), ("host", "device", False), ("host", "device", True)),
        (("host", "host", True),),
        (("disk", "device", False), ("disk", "device", True)),
        (("disk", "disk", False), ("disk", "disk", True)),
    ),
}
"""Where hidden states and experts' inputs lie, and whether quantized experts wait on the host: the
fastest first, in groups between which even a batch of one expert costs less than the next group."""


def calibrates(settings: Settings) -> bool:
    """Whether the run sends tokens through the model."""
    return settings.method != "rtn"


def hidden_bytes(settings: Settings, model: Mapping[str, Any]) -> int:
    """Hidden states of all calibration tokens, between two layers."""
    if not calibrates(settings):
        return 0
    return _tokens(settings) * config_count(model, "hidden_size") * _element_bytes(settings)


def state_bytes(settings: Settings, model: Mapping[str, Any]) -> int:
    """What one layer hands to the next: hidden states, and what sparse attention selected."""
    if not calibrates(settings):
        return 0
    topk = config_count(model, "index_topk")
    selected = 4 * _tokens(settings) * topk if topk < settings.sequence_length else 0
    return hidden_bytes(settings, model) + selected


def disk_bytes(
    settings: Settings, model: Mapping[str, Any], placement: Placement, ranks: int = 1
) -> int:
    """What a run takes on the disk besides its result: the states for `--resume`, that of a layer
    beside the one before it, and what has no room in the memory of the `ranks`: the whole for each
    and, while they exchange, the parts."""
    copies = 1 if ranks == 1 else ranks + 1
    states = [2 * state_bytes(settings, model)]
    if placement.states == "disk":
        states.append(copies * state_bytes(settings, model))
    if placement.inputs == "disk":
        states.append(copies * hidden_bytes(settings, model))
    return sum(states)


def estimate_memory(
    units: Sequence[Unit],
    settings: Settings,
    model: Mapping[str, Any],
    budget: MemoryBudget = MemoryBudget(),  # noqa: B008
    ranks: int = 1,
) -> MemoryEstimate:
    """Peak bytes of a run over `units`, of each of the `ranks` that share it; `model` is the
    language model's part of config.json.

    Of the ways to use memory that keep within `budget` the fastest is chosen. Raises UsageError,
    with what is needed at least, when none does.
    """
    tensors = [t for u in units for t in u.tensors]
    converted = [t for t in tensors if not calibrates(settings) or t.action != "quantize"]
    on_gpu = not settings.device.startswith("cpu")
    torch = TORCH[settings.device.partition(":")[0]]
    conversion = 0 if on_gpu else max((_conversion(t) for t in converted), default=0)
    if not calibrates(settings):
        streams = ON_GPU if on_gpu else ON_CPU
        host = {"torch": torch, "largest tensor in conversion": conversion}
        host |= _on_their_way(tensors, streams, on_gpu=on_gpu)
        gpu = {"linears in work": _linears_in_work(converted, settings)} if on_gpu else {}
        estimate = MemoryEstimate(
            sum(host.values()),
            sum(gpu.values()),
            host | gpu,
            Placement(1, streams=streams),
            ranks,
        )
        return _within(budget, [estimate])
    layers = [u.tensors for u in units if u.kind in ("layer", "mtp")]
    plain = max((_plain(layer, settings) for layer in layers), default=0)
    hessians = max((_hessians(layer) for layer in layers), default=0)
    hidden, waiting = hidden_bytes(settings, model), _quantized_experts(model)
    # What is of a rank's own sequences and experts; plain linears are measured by all for all.
    own = replace(settings, samples=_own_sequences(settings, ranks))
    own_experts = _own_experts(model, ranks)
    own_waiting = waiting * own_experts // max(1, config_count(model, "n_routed_experts"))
    own_hidden, own_states = hidden_bytes(own, model), state_bytes(own, model)

    def exchanged(whole: int, part: int) -> int:
        """A rank has its part beside the whole while they exchange."""
        return whole if ranks == 1 else whole + part

    all_hidden = exchanged(hidden, own_hidden)
    # Half a matrix of what errors ask of rows.
    feedback = 2 * config_count(model, "hidden_size") ** 2 if settings.feeds_back else 0
    all_states = exchanged(state_bytes(settings, model), own_states)
    sample = 0
    if settings.expert_hessian != "routed":
        seen = SAMPLE * config_count(model, "moe_intermediate_size")
        sample = hidden * min(seen, _tokens(settings)) // max(1, _tokens(settings))

    def with_placement(placement: Placement) -> MemoryEstimate:
        libraries = {"torch and transformers": torch + TRANSFORMERS}
        libraries |= _on_their_way(tensors, placement.streams, on_gpu=on_gpu)
        state = own_states if placement.states == "device" else 0
        measured = all_states if hessians and placement.states == "device" else state
        on_device = placement.inputs == "device"
        forward = {
            "hidden states": measured,
            "experts' input": own_hidden if on_device else 0,
            "routing": _routing(own, model),
            "plain weights of a layer": plain,
            "activations of a batch": _activations(own, model),
            "Hessians of plain linears": hessians,
            "row feedback": feedback,
        }
        exchange = {
            "hidden states": state,
            "experts' input": all_hidden if on_device else 0,
            "routing": exchanged(_routing(settings, model), _routing(own, model)),
        }
        experts = {
            "hidden states": state,
            "experts' input": hidden if on_device else 0,
            "routing": _routing(settings, model),
            "quantized experts": 0 if placement.experts_on_host else own_waiting,
            "tokens that all experts see": sample,
            "experts in work": placement.experts_at_once * _expert_bytes(model),
            "activations of an expert": _measured_activations(settings, model),
            "row feedback": feedback,
        }
        waits = 0 if placement.experts_on_host else exchanged(waiting, own_waiting)
        passing = experts | {"quantized experts": waits}
        passing["activations of an expert"] = _passing_activations(
            settings, model, copies=[placement.states, placement.inputs]
        )
        del passing["experts in work"], passing["tokens that all experts see"]
        phase = max(forward, exchange, experts, passing, key=lambda phase: sum(phase.values()))
        kept = {"hidden states", "experts' input", "quantized experts"} if on_gpu else set()
        allocator = ALLOCATOR["cuda" if on_gpu else "cpu"]
        phase = {
            name: size if name in kept else int(allocator * size) for name, size in phase.items()
        }
        if not on_gpu:
            # A tensor is converted after the layer's phases, beside the hidden states only.
            detail = libraries | phase
            host = max(sum(detail.values()), sum(libraries.values()) + conversion)
            return MemoryEstimate(host, 0, detail, placement, ranks)
        on_host = libraries | {
            "hidden states in host memory": all_states if placement.states == "host" else 0,
            "experts' input in host memory": all_hidden if placement.inputs == "host" else 0,
            # Small buffers of page-locked memory are rounded up to a power of two.
            "experts in host memory": exchanged(waiting, own_waiting) * 4 // 3
            if placement.experts_on_host
            else 0,
        }
        gpu = sum(phase.values())
        return MemoryEstimate(sum(on_host.values()), gpu, on_host | phase, placement, ranks)

    most = _experts_at_once(model, settings.device, own_experts)
    of_layers = LAYERS_ON_GPU if ranks == 1 else LAYERS_ON_GPUS
    return _within(
        budget,
        (
            with_placement(Placement(count, *places, streams))
            for group in PLACES["cuda" if on_gpu else "cpu"]
            for streams in ((of_layers, ON_GPU) if on_gpu else (ON_CPU,))
            # Small batches leave a GPU idle: below half of the best, moving data costs less.
            for counts, order in (
                (range(most, most // 2, -1), group),
                (range(most // 2, 0, -1), group[::-1]),
            )
            for places in order
            for count in counts
        ),
    )


def _within(budget: MemoryBudget, estimates: Iterable[MemoryEstimate]) -> MemoryEstimate:
    """The first that keeps within the budget."""
    least: list[tuple[str, int, int]] = []
    for estimate in estimates:
        over = [
            (option, limit, needed)
            for option, limit, needed in (
                ("--max-gpu-memory", budget.gpu, estimate.gpu),
                ("--max-host-memory", budget.host, estimate.host),
            )
            if limit is not None and needed > limit
        ]
        if not over:
            return estimate
        least = min(least or over, over, key=lambda o: sum(n - limit for _, limit, n in o))
    raise UsageError(
        "; ".join(
            f"{option} {format_gib(limit)} is too little, the run needs {format_gib(needed)}"
            for option, limit, needed in least
        ),
        hint="raise it, or calibrate on less: --samples, --sequence-length",
    )


def _experts_at_once(model: Mapping[str, Any], device: str, own_experts: int) -> int:
    """Routed experts of a layer that are solved as one batch when memory allows: all batches of
    those that a rank has are of that size, or one less."""
    most = max(1, EXPERTS_IN_WORK[device.partition(":")[0]] // _expert_bytes(model))
    return math.ceil(own_experts / math.ceil(own_experts / most))


def _own_sequences(settings: Settings, ranks: int) -> int:
    """Of the rank that has the most: they are dealt in what goes through the experts together."""
    length = settings.sequence_length
    step = max(1, BATCH_TOKENS // length) * max(1, EXPERT_TOKENS // BATCH_TOKENS)
    batches = math.ceil(settings.samples / step)
    return min(settings.samples, math.ceil(batches / ranks) * step)


def _own_experts(model: Mapping[str, Any], ranks: int) -> int:
    """Of the rank that has the most."""
    return max(1, math.ceil(config_count(model, "n_routed_experts") / ranks))


def _tokens(settings: Settings) -> int:
    return settings.samples * settings.sequence_length


def _element_bytes(settings: Settings) -> int:
    return {"float32": 4, "bfloat16": 2}[settings.dtype]


def _on_their_way(
    tensors: Sequence[TensorPlan], streams: Streams, *, on_gpu: bool
) -> dict[str, int]:
    """Weights on their way from and to the disk."""
    read = sum(t.source.nbytes for t in tensors)
    written = sum(o.nbytes for t in tensors for o in t.outputs)
    copying = {"copied to the GPU": min(read, COPYING)} if on_gpu else {}
    return copying | {
        "read ahead": min(read, streams.read_ahead),
        "written behind": min(written, streams.write_behind),
    }


def _conversion(tensor: TensorPlan) -> int:
    """As stored, decoded in float32, and as written. What is written is counted on its own while
    it fits what may be written behind, and copies go in pieces."""
    if tensor.action == "copy":
        return min(PIECE, tensor.source.nbytes)
    return tensor.source.nbytes + 4 * math.prod(tensor.source.shape)


def _linears_in_work(tensors: Sequence[TensorPlan], settings: Settings) -> int:
    """Float32: the weights of a batch as read and stacked, and two of their size on the way to
    codes and errors."""
    largest = max((math.prod(t.source.shape) for t in tensors if t.action != "copy"), default=0)
    total = sum(math.prod(t.source.shape) for t in tensors if t.action == "quantize")
    return 4 * 4 * max(largest, min(total, BATCH_ELEMENTS[settings.device.partition(":")[0]]))


def _plain(layer: Sequence[TensorPlan], settings: Settings) -> int:
    plain = (t for t in layer if not is_routed_expert(t.module))
    return _element_bytes(settings) * sum(math.prod(t.source.shape) for t in plain)


def _hessians(layer: Sequence[TensorPlan]) -> int:
    """Of the plain linears that are quantized: one for each, with its factor."""
    columns = [
        t.source.shape[1]
        for t in layer
        if t.action == "quantize" and not is_routed_expert(t.module)
    ]
    return sum(4 * k * k for k in columns) + 2 * max((4 * k * k for k in columns), default=0)


def _expert_bytes(model: Mapping[str, Any]) -> int:
    """Of one of the experts that are solved together: while its gate and up are, their Hessian and
    its factor, their weights and errors in float32, and what down reads; or its share of the down
    projections, with their errors and those of plain rounding."""
    hidden, inner = config_count(model, "hidden_size"), config_count(model, "moe_intermediate_size")
    moment = 4 * inner * inner
    gate_up = 8 * hidden * hidden + 22 * hidden * inner + DOWN_CHUNKS * moment
    down = DOWN_CHUNKS * (14 * hidden * inner + moment)
    return max(1, gate_up, down)


def _quantized_experts(model: Mapping[str, Any]) -> int:
    """Codes and scales of all experts of a layer, which wait for the tokens."""
    hidden, inner = config_count(model, "hidden_size"), config_count(model, "moe_intermediate_size")
    per_weight = 1 / 2 + 2 / 32  # a code, and its part of a scale
    return int(3 * hidden * inner * config_count(model, "n_routed_experts") * per_weight)


def _routing(settings: Settings, model: Mapping[str, Any]) -> int:
    """Of all tokens the experts and weights that the router gives, and the tokens by expert."""
    return _tokens(settings) * (24 * config_count(model, "num_experts_per_tok") + 16)


def _measured_activations(settings: Settings, model: Mapping[str, Any]) -> int:
    """Of a slice of one expert's tokens: their hidden states as gathered, gate and up, and the
    input of its down projection."""
    hidden, inner = config_count(model, "hidden_size"), config_count(model, "moe_intermediate_size")
    tokens = min(_tokens(settings), MOMENT_TOKENS[settings.device.partition(":")[0]])
    return tokens * (hidden + 3 * inner) * _element_bytes(settings)


def _passing_activations(
    settings: Settings, model: Mapping[str, Any], *, copies: Sequence[Place]
) -> int:
    """Of an expert when tokens go through all of them together. `copies` says where their hidden
    states and inputs lie, which are copied from anywhere but the device."""
    hidden, inner = config_count(model, "hidden_size"), config_count(model, "moe_intermediate_size")
    together = min(_tokens(settings), EXPERT_TOKENS)
    share = together * config_count(model, "num_experts_per_tok")
    share //= max(1, config_count(model, "n_routed_experts"))
    # A hot expert gets three times its share.
    passing = min(together, 3 * share) * (2 * hidden + 3 * inner)
    passing += sum(place != "device" for place in copies) * together * hidden
    return passing * _element_bytes(settings)


def _activations(settings: Settings, model: Mapping[str, Any]) -> int:
    """Of one batch in attention, with its mask, or in the dense or shared MLP."""
    length = settings.sequence_length
    tokens = min(_tokens(settings), max(length, BATCH_TOKENS // length * length))
    heads, hidden = config_count(model, "num_attention_heads"), config_count(model, "hidden_size")
    head = config_count(model, "qk_head_dim") or config_count(model, "head_dim")
    value = config_count(model, "v_head_dim") or head
    shared = config_count(model, "moe_intermediate_size") * max(
        1, config_count(model, "n_shared_experts")
    )
    attention = tokens * (3 * heads * (head + value) + 4 * hidden)
    mlp = tokens * (3 * max(config_count(model, "intermediate_size"), shared) + 3 * hidden)
    mask = 0
    if topk := config_count(model, "index_topk"):
        # Selected tokens as int32 and int64, and the mask they make as bool and as float.
        mask = tokens * (12 * min(topk, length) + 6 * length)
        if topk < length:
            scores = min(SCORES_AT_ONCE, tokens * config_count(model, "index_n_heads") * length)
            mask += 2 * 4 * scores
    return max(attention, mlp) * _element_bytes(settings) + mask
