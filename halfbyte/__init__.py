"""halfbyte: FP8 checkpoints to verified INT4 checkpoints, one decoder layer at a time.

The public names are loaded when they are first used, so that importing halfbyte is instant:

    from halfbyte import Settings, load_recipe, make_plan, open_checkpoint, run, verify
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.core import Settings
    from halfbyte.formats.checkpoint import open_checkpoint
    from halfbyte.quantize.pipeline import run
    from halfbyte.quantize.plan import make_plan
    from halfbyte.quantize.recipe import load_recipe
    from halfbyte.quantize.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Settings",
    "__version__",
    "load_recipe",
    "make_plan",
    "open_checkpoint",
    "run",
    "verify",
]

_HOMES = {
    "Settings": "halfbyte.core",
    "load_recipe": "halfbyte.quantize.recipe",
    "make_plan": "halfbyte.quantize.plan",
    "open_checkpoint": "halfbyte.formats.checkpoint",
    "run": "halfbyte.quantize.pipeline",
    "verify": "halfbyte.quantize.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
