"""Write docs/cli.md from the commands themselves, and the table of docs/kv-integrity.md from the
list of faults that tests inject; with --check, fail if either would change."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from halfbyte import env
from halfbyte.cli import COMMANDS, app
from halfbyte.testing.kv_faults import FAULTS

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- faults: written by `make docs` -->\n", "<!-- end of faults -->\n"

INTRODUCTION = """\
# Command line

<!-- Written by `make docs` from the commands themselves; edits here are lost. -->

- `quantize SOURCE --to int4` is short for `quantize run SOURCE --to int4`.
- Data goes to stdout, everything else (progress, warnings, errors, hints) to stderr.
- `--json` prints one document at the end. Its `schema_version` rises when a field changes its
  meaning or goes away. A command that fails prints nothing on stdout; a verdict (`verify`, `gate`)
  is a result, whatever it says.
- `-q` prints nothing but the path of what was written.
- A flag wins over an environment variable, that over the recipe, that over the built-in default.
- Nothing is overwritten, and nothing is asked: a folder that is not empty is an error that names
  `--resume` and `--overwrite`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed, and the message explains why; `verify`: mismatches found |
| 2 | wrong usage |
| 3 | `gate`, `demo`: accuracy did not hold |
| 4 | `gate`, `demo`: inconclusive |
| 5 | `gate`, `demo`: the evaluations cannot be compared |
| 130 | interrupted by Ctrl-C or SIGTERM; `--resume` goes on |
"""


def main() -> int:
    """Exit code 1 when `--check` finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    integrity = DOCS / "kv-integrity.md"
    pages = {DOCS / "cli.md": render_page(), integrity: with_faults(integrity.read_text("utf-8"))}
    check, stale = parser.parse_args().check, 0
    for path, page in pages.items():
        if not check:
            path.write_text(page, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != page:
            print(f"{path.name} is out of date; run: make docs", file=sys.stderr)
            stale = 1
    return stale


def with_faults(page: str) -> str:
    """The page with the table of faults between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise RuntimeError("kv-integrity.md has lost the marks around its table of faults")
    rows = [
        f"| {fault.number} | `{fault.name}` | {', '.join(fault.threads)} | {fault.what} |"
        f" {fault.outcome.value} | {fault.why} |"
        for fault in FAULTS
    ]
    head = [
        "| | fault | seen in | what goes wrong | found by | how, or why not |",
        "|---" * 6 + "|",
    ]
    return "".join([before, BEGIN, "\n".join([*head, *rows]), "\n", END, after])


def render_page() -> str:
    """The whole page."""
    sections = [INTRODUCTION, _environment(), _section("quantize", [])]
    sections += [_section(f"quantize {name}", [name]) for name in COMMANDS]
    return "\n".join(sections)


def _environment() -> str:
    rows = "\n".join(
        f"| {' '.join((inspect.getdoc(function) or '').split()).replace(': ', ' | ', 1)} |"
        for name, function in vars(env).items()
        if inspect.isfunction(function) and not name.startswith("_")
    )
    return f"| environment variable | meaning |\n|---|---|\n{rows}\n"


def _section(title: str, words: list[str]) -> str:
    # A width of its own, so that the page does not depend on who makes it.
    os.environ["COLUMNS"] = "80"
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="quantize")
    if result.exit_code != 0:
        raise RuntimeError(f"{title} --help failed: {result.output}")
    return f"## {title}\n\n```\n{result.stdout.rstrip()}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
