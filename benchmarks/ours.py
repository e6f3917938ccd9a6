"""`quantize run` in a process that also notes what the run took.

    python -m benchmarks.ours REPORT SOURCE [any option of `quantize run`]

REPORT is a `benchmarks.cost.Cost` as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cost import Cost
from halfbyte.cli import main as quantize


def main(argv: Sequence[str]) -> int:
    report, *arguments = argv
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = quantize(["run", *arguments, "--json"])
    if code == 0:
        record = json.loads(stdout.getvalue())
        calibrated = record["settings"]["calibration_sha256"] is not None
        Cost.now(
            seconds=record["seconds"],
            tokens_sha256=record["settings"]["calibration_sha256"],
            solved=sum(record["rungs"].values()) if calibrated else None,
            fallbacks=record["fallbacks"],
        ).write(Path(report))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
