"""Who reads what inside a decoder layer: the linears behind each norm, and down behind up.

AWQ divides a norm's output by one number per channel and multiplies the columns of the linears
that read it. That changes nothing only when it is done to *every* one of them: on GLM the router
and the indexer read the same norms as the linears that are quantized. So the map is complete by
construction: a tensor of the layer that has no place in it is an error.

Free of torch, since the plan asks, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.core import TensorPlan, Unit
from halfbyte.errors import UnsupportedModelError

EXACT_DTYPES = ("BF16", "F32")
"""Stored types that a power of two scales without rounding, at any magnitude weights have."""

EXACT_STEPS = 1
"""Scales per octave where the source stays floating point: powers of two."""
FINE_STEPS = 8
"""Scales per octave where it is quantized itself: little is lost to continuous scales, and a byte
holds each."""

_BLOCK = r"mlp\.(?:shared_experts\.|experts\.\d+\.)?"
_READS: tuple[tuple[str, str | None], ...] = (
    (r"self_attn\.(?:q_a|kv_a|q|k|v)_proj(?:_with_mqa)?", "input_layernorm"),
    (r"self_attn\.indexer\.(?:wk|weights_proj)", "input_layernorm"),
    (r"self_attn\.(?:q_b_proj|indexer\.wq_b)", "self_attn.q_a_layernorm"),
    (r"self_attn\.kv_b_proj", "self_attn.kv_a_layernorm"),
    (r"mlp\.gate", "post_attention_layernorm"),
    (_BLOCK + r"(?:gate|up)_proj", "post_attention_layernorm"),
    (_BLOCK + r"down_proj", None),
    (r"self_attn\.o_proj", None),
    # Around the decoder layer of an MTP layer, not in it.
    (r"eh_proj|embed_tokens|shared_head\.head", None),
)
"""Linears of a layer and the norm they read; None when they read no norm of the layer."""
_LINEARS = tuple((re.compile(pattern), norm) for pattern, norm in _READS)
_NORM = re.compile(
    r"(?:input|post_attention)_layernorm|self_attn\.(?:q_a|kv_a)_layernorm"
    r"|self_attn\.(?:indexer\.k|q|k)_norm|enorm|hnorm|shared_head\.norm"
)
_BIAS_ONLY = re.compile(r"mlp\.gate\.e_score_correction_bias")


@dataclass(frozen=True, slots=True)
class ScalableInput:
    """The input of some linears that may be scaled channel by channel, and who makes it."""

    source: str
    """Module whose output it is: a norm, or the up projection of an MLP."""
    readers: tuple[str, ...]
    """Every linear that reads it, by full module name, the router included."""
    quantized: tuple[str, ...]
    """Those that are made INT4: the ones that profit."""
    steps: int = EXACT_STEPS
    """Scales per octave it may be scaled by."""


def norm_readers(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """Every norm that linears of a layer read, with all these linears.

    `shapes` has the shape of each logical tensor of one decoder layer by its name within the layer,
    `self_attn.q_a_proj.weight`; so are the modules named that come out.
    Raises UnsupportedModelError for a tensor that is none of the known linears, norms and biases.
    """
    readers: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" or _BIAS_ONLY.fullmatch(name) or len(shape) == 0:
            continue
        known = next((norm for p, norm in _LINEARS if p.fullmatch(module)), "")
        is_norm = len(shape) == 1 and _NORM.fullmatch(module)
        if leaf != "weight" or not (is_norm or (len(shape) == 2 and known != "")):
            raise UnsupportedModelError(
                f"AWQ does not know what {name} {list(shape)} of a decoder layer reads",
                hint="without scaling of inputs: --method gptq",
            )
        if known and len(shape) == 2:
            readers.setdefault(known, []).append(module)
    for norm, linears in readers.items():
        if f"{norm}.weight" not in shapes:
            raise UnsupportedModelError(
                f"{linears[0]} should read {norm}, which the layer does not have",
                hint="without scaling of inputs: --method gptq",
            )
    return {norm: tuple(linears) for norm, linears in readers.items()}


def up_and_down(modules: Iterable[str]) -> dict[str, str]:
    """The up projection of each MLP or expert -> its down projection."""
    known = set(modules)
    pairs = ((m, re.sub(r"\bup_proj$", "down_proj", m)) for m in known if m.endswith(".up_proj"))
    return {up: down for up, down in sorted(pairs) if down in known}


def scalable_inputs(unit: Unit) -> tuple[tuple[ScalableInput, ...], tuple[str, ...]]:
    """What AWQ may scale in a decoder (or MTP) layer, and what it may not.

    An input is scalable when a linear that reads it is quantized, and its source and all other
    readers are stored in a type of `EXACT_DTYPES`. A reader that stays FP8 or INT4 as it is rules
    that out: its scales are shared by columns that would get different factors. The second result
    says so, a sentence for each such input.
    Raises UnsupportedModelError as `norm_readers` does.
    """
    head, separator, _ = unit.tensors[0].name.partition(f"layers.{unit.index}.")
    prefix = head + separator
    plans = {t.name.removeprefix(prefix): t for t in unit.tensors if t.action != "drop"}
    by_module = {name.removesuffix(".weight"): t for name, t in plans.items()}
    sources: dict[str, tuple[str, ...]] = {
        **norm_readers({name: t.source.shape for name, t in plans.items()}),
        **{up: (down,) for up, down in up_and_down(by_module).items()},
    }
    scalable, left_out = [], []
    for source, readers in sources.items():
        quantized = [m for m in readers if by_module[m].action == "quantize"]
        if not quantized:
            continue
        rigid = [m for m in (source, *readers) if not _takes_powers_of_two(by_module[m])]
        if rigid:
            tensor = by_module[rigid[0]]
            stored = tensor.outputs[0].dtype
            left_out.append(f"{prefix}{source} is not scaled: {tensor.name} stays {stored}")
            continue
        scalable.append(
            ScalableInput(
                prefix + source,
                tuple(prefix + m for m in readers),
                tuple(prefix + m for m in quantized),
                FINE_STEPS if by_module[source].action == "quantize" else EXACT_STEPS,
            )
        )
    return tuple(scalable), tuple(left_out)


def _takes_powers_of_two(tensor: TensorPlan) -> bool:
    if tensor.action == "copy":
        return tensor.source.encoding == "plain" and tensor.outputs[0].dtype in EXACT_DTYPES
    return True
