"""The architectures that can be calibrated, by model type. Free of torch: the plan asks, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.core import Checkpoint
from halfbyte.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """Where transformers has the modules of an architecture."""

    module: str
    """Package under `transformers.models`."""
    classes: str
    """Prefix of its class names."""


FAMILIES: Mapping[str, Family] = {
    "glm_moe_dsa": Family("glm_moe_dsa", "GlmMoeDsa"),
    "glm4_moe": Family("glm4_moe", "Glm4Moe"),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3"),
    "kimi_k2": Family("deepseek_v3", "DeepseekV3"),
}
"""Model type of a config.json -> its modules. Kimi-K2's text model is DeepSeek-V3's."""


def language_model(checkpoint: Checkpoint) -> tuple[Family, Mapping[str, Any], str]:
    """Family, configuration and tensor name prefix of a checkpoint's language model.

    Raises UnsupportedModelError for a model type that cannot be run layer by layer.
    """
    text = checkpoint.config.get("text_config")
    fields, prefix = checkpoint.config, ""
    if isinstance(text, Mapping):
        fields, prefix = text, "language_model."
    model_type = str(fields.get("model_type", "unknown"))
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{checkpoint.path} has model_type {model_type}, which cannot be calibrated; "
            f"supported are {', '.join(FAMILIES)}",
            hint="round without calibration: --method rtn",
        )
    return FAMILIES[model_type], fields, prefix


def is_routed_expert(module: str) -> bool:
    """Whether a module is a linear of a routed expert."""
    return re.search(r"\.experts\.\d+\.(gate|up|down)_proj$", module) is not None
