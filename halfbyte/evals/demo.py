"""The whole job on the model that ships with the package: quantize, verify, evaluate, gate.

The model is small but trained, so what INT4 does to it can be measured. Its accuracy says nothing
about a real one; that the whole line works on this machine it does say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.core import Method, Settings
from halfbyte.errors import VerifyError
from halfbyte.evals.gate import GateVerdict, gate
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import EvalReport
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.progress import Progress

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parent.parent / "demo"
SOURCE = FOLDER / "glm-nano-fp8"
SAMPLES = 96
SEQUENCE_LENGTH = 256
SEED = 0
MARGIN_POINTS = 10.0
"""The demo asks so few questions that one is worth 1 to 3 points, and that no statistics could pass
it; a real gate uses 0.8."""


@dataclass(frozen=True)
class DemoVariant:
    """One checkpoint of the demo, measured."""

    name: str
    nbytes: int
    """Tensor data of the checkpoint."""
    evaluation: EvalReport


@dataclass(frozen=True)
class DemoReport:
    """What the demo made: FP8, RTN and GPTQ in this order, and the verdict on GPTQ."""

    output: str
    variants: tuple[DemoVariant, ...]
    verdict: GateVerdict


def run_demo(output: Path, progress: Progress) -> DemoReport:
    """Quantize the embedded FP8 model with RTN and GPTQ into `output`, and judge the GPTQ result.

    Writes the checkpoints `rtn` and `gptq`, an evaluation of each and of the source under
    `evaluations`, and replaces those of an earlier demo. Raises VerifyError when a checkpoint is
    not what its plan says.
    """
    from halfbyte.calibration.data import token_windows

    tokens = token_windows(FOLDER / "calibration.jsonl", SOURCE, SAMPLES, SEQUENCE_LENGTH, SEED)
    folders = {"FP8": SOURCE}
    methods: tuple[Method, ...] = ("rtn", "gptq")
    for method in methods:
        folder = output / method
        progress.note(f"{method.upper()}: {SOURCE.name} to {folder}")
        _quantize(method, tokens, folder, progress)
        folders[method.upper()] = folder
    variants = tuple(_measure(name, path, output, progress) for name, path in folders.items())
    policy = load_policy("article", MARGIN_POINTS)
    verdict = gate(variants[0].evaluation, variants[-1].evaluation, policy)
    return DemoReport(str(output), variants, verdict)


def _quantize(method: Method, tokens: torch.Tensor, folder: Path, progress: Progress) -> None:
    """Plan, run and verify one checkpoint."""
    from halfbyte.models import recipe_for
    from halfbyte.quantize.pipeline import run
    from halfbyte.quantize.plan import make_plan
    from halfbyte.quantize.recipe import load_recipe
    from halfbyte.quantize.verify import verify

    calibrated = method != "rtn"
    checkpoint = open_checkpoint(SOURCE)
    settings = Settings(
        method=method,
        samples=SAMPLES,
        sequence_length=SEQUENCE_LENGTH,
        seed=SEED,
    )
    plan = make_plan(checkpoint, load_recipe(recipe_for(checkpoint)), settings)
    run(
        plan,
        folder,
        tokens=tokens if calibrated else None,
        overwrite=folder.exists(),
        progress=progress,
    )
    result = verify(folder, SOURCE, progress=progress)
    if result.mismatches:
        raise VerifyError(
            f"{folder}: {len(result.mismatches)} mismatches, the first is {result.mismatches[0]}",
            hint=f"list them all: quantize verify {folder} --source {SOURCE}",
        )
    progress.note(f"verified: {result.tensors} tensors, {result.compared} compared with the source")


def _measure(name: str, path: Path, output: Path, progress: Progress) -> DemoVariant:
    """Evaluate one checkpoint on held-out text, against FP8, and on the tasks; save the result."""
    from halfbyte.evals.evaluation import Evaluation

    progress.note(f"{name}: held-out text and tasks")
    asked = Evaluation(
        path,
        text=FOLDER / "heldout.jsonl",
        baseline=None if path == SOURCE else SOURCE,
        sequence_length=SEQUENCE_LENGTH,
        tasks=FOLDER / "tasks",
    )
    report = asked.run(None, progress)
    evaluations = output / "evaluations"
    evaluations.mkdir(exist_ok=True)
    report.write(evaluations / f"{name.lower()}.json")
    progress.finish()
    return DemoVariant(name, open_checkpoint(path).nbytes, report)
