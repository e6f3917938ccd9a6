"""Every environment variable that halfbyte itself reads, parsed in one place and loudly.

Not listed: what the libraries read on their own (`HF_HOME`, `HF_TOKEN`, `CUDA_VISIBLE_DEVICES`,
`NO_COLOR`). A flag on the command line always wins over a variable.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from halfbyte.errors import UsageError


def debug() -> bool:
    """`HALFBYTE_DEBUG=1`: print the traceback of every error, not only its message."""
    return _switch("HALFBYTE_DEBUG")


def progress_disabled() -> bool:
    """`HF_HUB_DISABLE_PROGRESS_BARS=1`, the switch that users of `hf` know: no progress output."""
    return _switch("HF_HUB_DISABLE_PROGRESS_BARS")


def cache_folder() -> Path:
    """`HALFBYTE_CACHE`, or `halfbyte` in `XDG_CACHE_HOME`: what can be made again at any time."""
    if folder := os.environ.get("HALFBYTE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfbyte"


def api_key() -> str | None:
    """`OPENAI_API_KEY`: what a server that `quantize eval --endpoint` asks wants to be shown."""
    return os.environ.get("OPENAI_API_KEY") or None


def kv_integrity() -> Literal["off", "log", "abort", "raise"]:
    """`HALFBYTE_KV_INTEGRITY`: what the plugins for SGLang and vLLM do about a KV-cache page
    that is not its request's. Off, unless set, and then no function of the engine is replaced."""
    match os.environ.get("HALFBYTE_KV_INTEGRITY", "").strip().lower():
        case "" | "off":
            return "off"
        case "log" | "abort" | "raise" as mode:
            return mode
        case value:
            raise UsageError(
                f"environment variable HALFBYTE_KV_INTEGRITY is {value!r}",
                hint="set HALFBYTE_KV_INTEGRITY to off, log, abort or raise",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A process among those that `torchrun` started."""

    rank: int
    local_rank: int
    """Its number on this machine, which is the number of its GPU."""
    count: int
    """How many there are, on all machines."""


def torchrun() -> Launch | None:
    """`WORLD_SIZE`, `RANK`, `LOCAL_RANK`: set by `torchrun` in each of the processes it starts."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return None
    return Launch(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), count)


def dumb_terminal() -> bool:
    """`TERM=dumb`: a terminal that cannot move its cursor gets plain lines instead of bars."""
    return os.environ.get("TERM") == "dumb"


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in {"", "0", "false", "no", "off"}:
        return False
    if value in {"1", "true", "yes", "on"}:
        return True
    raise UsageError(f"environment variable {name} is {value!r}", hint=f"set {name}=1 or {name}=0")
