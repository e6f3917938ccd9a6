"""The nouns of halfbyte: frozen data types that every other module shares.

This module imports nothing of ours, and torch only for typing, so that planning and
inspecting a checkpoint never pay for torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes per element of each safetensors dtype that we accept."""

Action = Literal["quantize", "dequantize", "copy", "drop"]
Encoding = Literal["plain", "fp8", "int4"]
Method = Literal["gptq", "awq", "awq+gptq", "rtn"]
Engine = Literal["halfbyte", "llmcompressor"]
ScaleSearch = Literal["minmax", "mse"]
ExpertHessian = Literal["routed", "blend", "all"]
Rung = Literal["routed", "blended", "all-tokens", "weights-only"]


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor. `dtype` is a safetensors spelling, a key of `DTYPE_BYTES`."""
    return DTYPE_BYTES[dtype] * math.prod(shape)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor, known from a shard's header alone."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    """File name inside the checkpoint folder."""
    begin: int
    """First byte of the data, counted from the start of the file."""
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository as the Hub lists it."""

    size: int
    sha256: str | None
    """Of files in large file storage; None for those that git itself holds."""
    blob: str
    """Git's object id: of a file without `sha256` the SHA-1 over "blob <size>\\0" and the bytes."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the Hugging Face Hub at one commit; made by `formats.hub`."""

    name: str
    """ORG/NAME."""
    commit: str
    files: Mapping[str, RepositoryFile]
    """Those at the top of it, by name."""

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its headers say; made by `formats.source.open_source`."""

    path: Path
    """Its folder. That of a repository holds config and side files, and some of the shards."""
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: Mapping[str, int]
    """Shard file name -> size in bytes, in name order."""
    side_files: tuple[str, ...]
    """Files that travel with the weights (tokenizer, chat template, generation config)."""
    repository: Repository | None = None
    """Where shards come from that are not in the folder."""

    @property
    def origin(self) -> str:
        """What people know it by: its folder, or repository and commit."""
        return str(self.repository or self.path)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data, headers not counted (what an index calls total_size)."""
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the config and all headers (not over the data)."""
        table = [(t.name, t.dtype, t.shape, t.shard, t.begin) for t in self.tensors.values()]
        return fingerprint({"config": self.config, "tensors": sorted(table)})


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One logical tensor and the stored tensors that carry it.

    `plain`: `parts["weight"]` holds the values. `fp8`: `parts["weight"]` F8_E4M3 [N, K] times
    `parts["scale"]`, one scale per `block` (rows, columns); a channel scale is the block
    (1, K), a tensor scale the block (N, K). `int4`: compressed-tensors pack-quantized,
    `parts["packed"]`, `parts["scale"]`, `parts["shape"]`, with `scheme`.
    """

    name: str
    """Name of the logical tensor, for a linear `<module>.weight`."""
    shape: tuple[int, ...]
    encoding: Encoding
    parts: Mapping[str, TensorInfo]
    block: tuple[int, int] | None = None
    scheme: Scheme | None = None

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts.values())


SEARCHED_GROUP = 32
"""Columns of a group whose scale is searched when its turn comes. Keeping columns together costs
act-order some of its effect: with groups of 128 more than the search brings."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Symmetric integer weights; maps one to one to compressed-tensors' `QuantizationArgs`."""

    bits: int = 4
    group_size: int | None = 32
    """Columns that share one scale; None is one scale per output channel (row)."""
    scale_dtype: str = "BF16"

    @property
    def code_min(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def columns_per_group(self, columns: int) -> int:
        return columns if self.group_size is None else self.group_size

    def groups(self, columns: int) -> int:
        """Scales per row of a weight with `columns` input features."""
        return columns // self.columns_per_group(columns)

    def __str__(self) -> str:
        return f"INT{self.bits} " + (
            "channel" if self.group_size is None else f"g{self.group_size}"
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """A recipe's line: tensors whose whole name matches `pattern` get `action`, for `reason`."""

    pattern: str
    action: Action
    reason: str
    scheme: Scheme | None = None
    optional: bool = False
    """An optional rule may match nothing (indexers are absent from many checkpoints)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered rules; the first match decides. `origin` is "built-in" or the file it came from."""

    name: str
    description: str
    rules: tuple[Rule, ...]
    origin: str = "built-in"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything besides checkpoint and recipe that decides the output bytes of a run."""

    method: Method = "gptq"
    """How codes are chosen: `rtn` rounds, `gptq` makes up for errors in later columns; `awq` and
    `awq+gptq` do so after scaling the inputs."""
    engine: Engine = "halfbyte"
    scale_search: ScaleSearch = "mse"
    signed_scales: bool = True
    """Whether a scale may be negative, which lets every group use the code -8."""
    refine: int = 2
    """Sweeps of coordinate descent over codes and scales after GPTQ; 0 leaves GPTQ's own."""
    row_feedback: bool = True
    """Whether rows that write into the residual stream make up for each other's errors."""
    expert_hessian: ExpertHessian = "blend"
    """Which tokens a routed expert is calibrated on; see `calibration.inputs`."""
    affinity: bool = False
    """Whether an expert's tokens count by the square of their router weight."""
    dampening: float = 0.01
    """Share of the mean Hessian diagonal added to the diagonal (GPTQ's percdamp)."""
    block_size: int = 128
    samples: int = 256
    sequence_length: int = 2048
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int | None = None
    """CPU threads of a calibrated run, which decide the order of sums and so the last bits; None is
    torch's own."""
    seed: int = 0
    calibration_sha256: str | None = None
    """Hash of the token ids the model is calibrated on, set by the run that has them."""

    @property
    def scales_inputs(self) -> bool:
        """Whether linear inputs are scaled (AWQ) before weights are rounded."""
        return self.method in ("awq", "awq+gptq")

    @property
    def compensates(self) -> bool:
        """Whether a column's rounding error is made up for in later columns (GPTQ)."""
        return self.method in ("gptq", "awq+gptq")

    @property
    def feeds_back(self) -> bool:
        """Whether rows make up for each other: not in another engine's GPTQ."""
        return self.row_feedback and self.compensates and self.engine == "halfbyte"

    def searches_in_turn(self, group: int) -> bool:
        """Whether groups of so many columns have their scale searched when GPTQ comes to them."""
        able = self.compensates and self.engine == "halfbyte" and self.scale_search == "mse"
        return able and group == SEARCHED_GROUP

    def identity(self) -> dict[str, Any]:
        """By name, for comparison: which of several GPUs it was does not matter."""
        return asdict(self) | {"device": self.device.split(":")[0]}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor that the finished checkpoint will hold, known before any weight is read."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The decision for one logical tensor: where it comes from, what is done, what comes out."""

    source: StoredWeight
    action: Action
    scheme: Scheme | None
    rule: int
    """Index into `Plan.recipe.rules`."""
    outputs: tuple[OutputTensor, ...]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def module(self) -> str:
        return self.source.name.removesuffix(".weight")


UnitKind = Literal["embedding", "layer", "head", "mtp", "other"]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read, quantized and committed together: a decoder layer, the embedding, the head, or
    in a data-free run a part of one."""

    name: str
    """"embedding", "layers.<i>", "head" or "other", of a part followed by " part <n>"."""
    kind: UnitKind
    index: int | None
    """Decoder layer index for kinds "layer" and "mtp"."""
    tensors: tuple[TensorPlan, ...]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One output shard but for the data: the header, then each tensor at its offset."""

    file: str
    header: bytes
    """The 8 length bytes and the JSON, padded: what the file starts with."""
    offsets: Mapping[str, tuple[int, int]]
    """Output tensor name -> (begin, end) in the file."""
    nbytes: int
    """Size of the finished file."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that a run may take at its peak; None sets no limit. It decides where things are kept
    and how much is done at once, never a byte of the output."""

    gpu: int | None = None
    host: int | None = None


Place = Literal["device", "host", "disk"]
"""Where a large tensor lies. On a CPU the device's memory is that of the host."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Bytes of host memory that are on their way from and to the disk at most."""

    read_ahead: int = 32 << 20
    """Read and not yet asked for."""
    write_behind: int = 32 << 20
    """Handed to the writer and not yet in the file."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a run uses memory; all but `streams` is for calibrated runs only."""

    experts_at_once: int
    """Routed experts of a layer that are solved as one batch."""
    states: Place = "device"
    """Where hidden states lie between layers."""
    inputs: Place = "device"
    """Where the input of a layer's routed experts lies, as large as the hidden states."""
    experts_on_host: bool = False
    """Whether quantized experts wait in host memory until the tokens go through them."""
    streams: Streams = Streams()


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak bytes predicted for a run, for each process of it. `gpu` is 0 when it computes on the
    CPU."""

    host: int
    gpu: int
    detail: Mapping[str, int]
    """What the peaks are made of, by name, in bytes."""
    placement: Placement = Placement(1)
    ranks: int = 1
    """Processes that share the run."""


@dataclass(frozen=True)
class Plan:
    """What a run will do, complete before it reads a weight; made by `quantize.plan.make_plan`."""

    checkpoint: Checkpoint
    recipe: Recipe
    settings: Settings
    units: tuple[Unit, ...]
    shards: tuple[ShardLayout, ...]
    quantization_config: Mapping[str, Any] | None
    """`quantization_config` of the output's config.json; None when nothing is quantized."""
    memory: MemoryEstimate
    disk: int
    """Bytes the output folder will take, state kept for `--resume` and hidden states that have no
    room in memory included."""
    warnings: tuple[str, ...]
    fingerprint: str
    """SHA-256 over all that decides the output bytes: same inputs, same fingerprint."""

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        return tuple(t for u in self.units for t in u.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(o.nbytes for t in self.tensors for o in t.outputs)


@dataclass(frozen=True, slots=True)
class InputStats:
    """Second moments of one linear input, shared by every linear that reads it."""

    hessian: torch.Tensor
    """Mean of x xᵀ over these tokens and what topped them up, float32 [K, K]."""
    tokens: int
    """Tokens that reach the input by themselves."""
    rung: Rung = "routed"
    """Which tokens the mean is over; see `calibration.inputs`."""
    held_out: torch.Tensor | None = None
    """Inputs [m, K] that are not in the mean, to check a result on."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Integer codes and scales of one linear, in natural column order."""

    codes: torch.Tensor
    """int8 [N, K], within the scheme's code range."""
    scales: torch.Tensor
    """bfloat16 [N, groups]; the weight is codes * scales, one scale per group of columns."""
    error: float = 0.0
    """|E x|² / |W x|² over held-out inputs x, E = W - Q; without any, tr(E H Eᵀ) / tr(W H Wᵀ) with
    the undamped Hessian; without one, |E|² / |W|²."""
    rtn_error: float = 0.0
    """The same for plain rounding with the scales that the search found."""
    weight_error: float = 0.0
    """|E|² / |W|²."""
    fallback: str | None = None
    """None, or what took the place of GPTQ as asked for: "damping x10", ..., "diagonal", "rtn"."""
    smallest_scale: float = 0.0
    """Of all groups, signs aside."""
    mean_scale: float = 0.0
    largest_scale: float = 0.0
    peak: float = 0.0
    """Largest weight over their root mean square."""


@dataclass(frozen=True, slots=True)
class LinearReport:
    """What happened to one quantized linear; a line of the run report."""

    name: str
    scheme: str
    error: float
    rtn_error: float
    """The same error measure for plain rounding, with the scales that GPTQ started from."""
    weight_error: float
    """|W - Q|² / |W|² of the weight after scaling, whatever the inputs: what a reader of the
    checkpoint can check."""
    tokens: int
    rung: Rung
    fallback: str | None
    smallest_scale: float
    """Smallest, mean and largest scale of a group, signs aside."""
    mean_scale: float
    largest_scale: float
    peak: float
    """Largest weight over their root mean square, of the weight after scaling: what outliers there
    are."""


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """What a rule of the recipe decided; rules that matched nothing have none."""

    pattern: str
    action: Action
    """The rule's: "dequantize" copies a tensor that is plain already."""
    scheme: str | None
    tensors: int
    bytes_in: int
    bytes_out: int
    reason: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a source checkpoint came from and what its card says, as far as the folder tells; made
    by `formats.origin.read_origin`. Text in it is the source's: not trusted."""

    name: str
    """Name of the folder."""
    repo: str | None = None
    """Repository on the Hugging Face Hub."""
    revision: str | None = None
    """Commit of that repository, 40 hexadecimal digits."""
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    pipeline_tag: str | None = None
    library_name: str | None = None
    language: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaledInput:
    """What AWQ did to one input of linears; a line of the run report."""

    name: str
    """Module that makes the input: a norm, or the up projection of an MLP."""
    readers: int
    """Linears that read it, all of which were compensated."""
    exponent: float | None
    """Grid point of the search; None when leaving the input as it is was best."""
    gain: float
    """Error of its quantized readers by the search's measure, relative to no scaling."""
    smallest: float
    """Smallest and largest scale of a channel."""
    largest: float
    steps: int
    """Scales per octave."""
    powers: str
    """Of each channel log2(scale) times `steps`, one signed byte each, base64; empty for all 0.
    With it a reader of the checkpoint can tell what became of the source."""


@dataclass(frozen=True, slots=True)
class UnitTime:
    """What a unit of a run took."""

    unit: str
    seconds: float
    """From the unit before until it was handed to the writer."""
    host: int
    """Peak resident bytes of the process so far."""
    gpu: int
    """Peak bytes of tensors on its GPU so far; 0 on a CPU."""
    phases: Mapping[str, float]
    """Seconds by phase; empty on a GPU, where timing phases would hold it up."""


REPORT_SCHEMA = 3
_VOLATILE = ("output", "seconds", "peak_bytes", "times", "already_finished")


@dataclass(frozen=True)
class RunReport:
    """Result of a run. What `to_json` gives is deterministic and stored beside the weights."""

    output: str
    fingerprint: str
    settings: Settings
    recipe: Mapping[str, Any]
    """The whole recipe, so that the plan can be made again from the source."""
    source: str
    """`Checkpoint.fingerprint` of what was quantized."""
    versions: Mapping[str, str]
    origin: Origin
    rules: tuple[RuleOutcome, ...]
    bytes_in: int
    bytes_out: int
    whole_in: int
    """Bytes of the source that every GPU of a tensor-parallel server holds; the rest is divided."""
    whole_out: int
    """The same of the output."""
    shards: Mapping[str, str]
    """Shard file -> SHA-256 of the whole file."""
    linears: tuple[LinearReport, ...]
    scaled: tuple[ScaledInput, ...]
    warnings: tuple[str, ...]
    seconds: float = 0.0
    peak_bytes: int = 0
    """Resident, of the process that took most."""
    times: tuple[UnitTime, ...] = ()
    """In the order of the plan, also of units that were done before an interruption."""
    already_finished: bool = False
    repository: str | None = None
    """ORG/NAME of the source on the Hugging Face Hub; None when it was a folder."""
    commit: str | None = None
    """The commit of `repository` that was read."""
    schema_version: int = field(default=REPORT_SCHEMA)

    def to_json(self) -> dict[str, Any]:
        """The deterministic part, ready for `json.dumps`."""
        record = asdict(self)
        for volatile in _VOLATILE:
            del record[volatile]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any], **volatile: Any) -> RunReport:
        """What `to_json` stored, with the parts it leaves out given or at their defaults."""
        fields = dict(record)
        if fields.get("schema_version") != REPORT_SCHEMA:
            raise ValueError(f"schema_version is {fields.get('schema_version')!r:.40}")
        for name in ("recipe", "versions", "shards"):
            if not isinstance(fields.get(name), dict):
                raise TypeError(f"{name} is not an object")
        fields["settings"] = Settings(**fields["settings"])
        origin = {**fields["origin"], "language": tuple(fields["origin"]["language"])}
        fields["origin"] = Origin(**origin)
        fields["rules"] = tuple(RuleOutcome(**rule) for rule in fields["rules"])
        fields["linears"] = tuple(LinearReport(**linear) for linear in fields["linears"])
        fields["scaled"] = tuple(ScaledInput(**scaled) for scaled in fields["scaled"])
        fields["warnings"] = tuple(fields["warnings"])
        return cls(**fields, **volatile)


def fingerprint(record: Any) -> str:
    """SHA-256 of a JSON-able record in canonical form (sorted keys, no spaces)."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
