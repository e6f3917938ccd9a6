"""llm-compressor's GPTQ and AWQ, and AutoRound, through llm-compressor's `oneshot`.

    python -m benchmarks.peers.oneshot REPORT BF16 -o OUTPUT --method gptq --group-size 32 ...

Everything that no option here names is llm-compressor's default. Only routed experts are
quantized. REPORT is a `benchmarks.cost.Cost` as JSON.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor.core import active_session
from llmcompressor.entrypoints.oneshot import oneshot
from loguru import logger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cost import Cost
from halfbyte.calibration.data import text_sha256, token_windows

UNTOUCHED = [
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.gate$",
    r"re:.*mlp\.(gate|up|down)_proj$",
]
"""All linears but the routed experts. They are ignored, not merely no targets: AutoRoundModifier
quantizes on its own what its targets leave out, and stores that as BF16."""


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    tokens = token_windows(
        options.calibration, options.model, options.samples, options.sequence_length, seed=0
    )
    losses = _Losses()
    if options.device == "cpu":
        # AWQ pins memory whatever the device, which torch refuses where nothing could use it.
        torch.Tensor.pin_memory = _unpinned  # type: ignore[assignment, method-assign]
    started = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    if options.method == "autoround":
        # It holds every layer by the name model.layers.0, and its rule for this model type leaves
        # the MLPs of the first (dense) layers alone, by name: no expert would be tuned.
        model.config.first_k_dense_replace = 0
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=_loader(tokens, options.windows_per_batch),
        num_calibration_samples=len(tokens),
        recipe=_recipe(options),
        moe_calibrate_all_experts=options.experts == "all",
    )
    fallbacks = _fallbacks()
    model.save_pretrained(options.output, save_compressed=True)
    tokenizer.save_pretrained(options.output)
    Cost.now(
        seconds=time.monotonic() - started,
        tokens_sha256=text_sha256(tokens),
        solved=None if options.method == "awq" else losses.count,
        fallbacks=fallbacks,
    ).write(options.report)
    return 0


def _unpinned(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--method", choices=["gptq", "awq", "autoround"], required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--experts", choices=["routed", "all"], default="all")
    parser.add_argument("--observer", help="of weights; default: llm-compressor's")
    parser.add_argument("--iterations", type=int, default=200, help="of AutoRound")
    parser.add_argument(
        "--mappings", choices=["default", "up-down"], default="default", help="what AWQ scales"
    )
    parser.add_argument("--windows-per-batch", type=int, default=1)
    options = parser.parse_args(argv)
    if options.device == "cpu" and torch.accelerator.is_available():
        parser.error("llm-compressor takes an accelerator that it sees: hide it")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    return options


def _loader(tokens: torch.Tensor, windows: int) -> DataLoader[Mapping[str, torch.Tensor]]:
    # AutoRound reads the mask; without padding it is all ones.
    batches: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    return DataLoader(batches, batch_size=windows)


def _recipe(options: argparse.Namespace) -> list[Any]:
    observer = {} if options.observer is None else {"observer": options.observer}
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=options.group_size,
        **observer,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    quantized: dict[str, Any] = {"config_groups": {"group_0": scheme}, "ignore": UNTOUCHED}
    if options.method == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        return [GPTQModifier(**quantized)]
    if options.method == "autoround":
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        # Compiling changes what a step costs, not what it computes.
        return [
            AutoRoundModifier(iters=options.iterations, enable_torch_compile=False, **quantized)
        ]
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    mappings = None
    if options.mappings == "up-down":
        experts = r"re:.*mlp\.experts\.\d+\."
        mappings = [AWQMapping(f"{experts}up_proj$", [f"{experts}down_proj$"])]
    return [AWQModifier(mappings=mappings), QuantizationModifier(**quantized)]


def _fallbacks() -> dict[str, int]:
    """Linears that GPTQ gave up on and rounded."""
    modifiers = active_session().lifecycle.recipe.modifiers
    count = sum(len(getattr(m, "_rtn_fallback_module_names", ())) for m in modifiers)
    return {"rtn": count} if count else {}


class _Losses(logging.Handler):
    """Counts the linears that GPTQ (in loguru's log) or AutoRound (in logging's) report on."""

    AUTOROUND = re.compile(r"quantized (\d+)/\d+ layers in the block, loss iter")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        logger.add(self._gptq, level=0, format="{message}", filter=_is_loss)
        logging.getLogger("autoround").addHandler(self)

    def _gptq(self, _message: str) -> None:
        self.count += 1

    def emit(self, record: logging.LogRecord) -> None:
        if found := self.AUTOROUND.search(record.getMessage()):
            self.count += int(found[1])


def _is_loss(record: Mapping[str, Any]) -> bool:
    message: str = record["message"]
    return record["level"].name == "METRIC" and message.startswith("error ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
