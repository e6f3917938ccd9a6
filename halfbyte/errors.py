"""One error tree. Each error says what failed, where, and the command or change that helps."""

from __future__ import annotations


class HalfbyteError(Exception):
    """A failure that its message explains. `hint` is a line that tells the way out."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class CheckpointError(HalfbyteError):
    """The input checkpoint is damaged, incomplete or not what its index says."""


class HubError(HalfbyteError):
    """What the Hugging Face Hub refuses, does not have, or has changed meanwhile."""


class UnsupportedModelError(HalfbyteError):
    """An architecture that cannot be calibrated, or whose KV cache is not known."""


class RecipeError(HalfbyteError):
    """A recipe that does not parse, leaves a tensor out, or asks for what servers cannot load."""


class CalibrationError(HalfbyteError):
    """Calibration text that cannot be used, or activations that are not finite."""


class OutputError(HalfbyteError):
    """The output folder cannot be written: not empty, read-only, or too little room."""


class ResumeError(HalfbyteError):
    """What `--resume` finds is not the run that was asked for."""


class RankError(HalfbyteError):
    """Another process of the run has ended, or is not heard of."""


class VerifyError(HalfbyteError):
    """A finished checkpoint that does not hold what it should."""


class EvaluationError(HalfbyteError):
    """Evaluation inputs that cannot be used."""


class IntegrityError(HalfbyteError):
    """A KV-cache page that is not its user's, or a step whose pages were not checked."""


class DependencyError(HalfbyteError):
    """A package that an option needs is missing or has the wrong version."""


class UsageError(HalfbyteError):
    """Options that contradict each other."""

    exit_code = 2
