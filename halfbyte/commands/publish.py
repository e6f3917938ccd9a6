"""Commands that show a finished output to others: `card`, `report` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.commands.options import Json, Quiet, Verbose, open_console
from halfbyte.errors import OutputError, UsageError

EvalOption = Annotated[
    Path | None,
    typer.Option("--eval", help="Evaluation of DIR by `eval -o`, with --text and --baseline."),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The finished output of a run.")]
GateOption = Annotated[
    Path | None,
    typer.Option("--gate", help="Verdict of `gate -o`. [default: gate.json in DIR, if there]"),
]


def card(folder: Folder, gate: GateOption = None, json: Json = False, quiet: Quiet = False) -> None:
    """Write the model card, README.md, from what a run left in its folder."""
    from halfbyte.evals.report import require_of
    from halfbyte.report.card import write_card
    from halfbyte.report.output import read_output

    console = open_console(json, quiet)
    found = read_output(folder, gate)
    if found.gate is not None:
        require_of(folder, found.gate.candidate, "the verdict")
    path = write_card(folder, found)
    console.line(f"{path} written")
    console.result({"card": str(path)}, quiet=str(path))


def report(
    folder: Folder,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File to write. [default: halfbyte_report.html in DIR]"
        ),
    ] = None,
    evaluation: EvalOption = None,
    gate: GateOption = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page with all that is known of a run: sizes, errors, divergence, verdict.

    The page needs no network and no server.
    """
    from halfbyte.evals.report import EvalReport, require_of
    from halfbyte.formats.files import write_atomic
    from halfbyte.formats.folder import PAGE_FILE
    from halfbyte.report.output import read_output
    from halfbyte.report.page import page

    console = open_console(json, quiet)
    path = folder / PAGE_FILE if output is None else output
    if path.is_dir():
        raise UsageError(f"-o {path} is a folder", hint="name a file: -o report.html")
    measured = None if evaluation is None else EvalReport.read(evaluation)
    found = read_output(folder, gate)
    if measured is not None:
        require_of(folder, measured.fingerprint, "the evaluation")
    if found.gate is not None:
        require_of(folder, found.gate.candidate, "the verdict")
    made = page(found, measured)
    try:
        write_atomic(path, made.encode())
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}", hint="name another file with -o FILE"
        ) from error
    console.line(f"{path} written")
    console.result({"page": str(path)}, quiet=str(path))


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A quantized checkpoint.")],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Where to publish it; made if need be.")
    ],
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="BRANCH", help="Branch to commit to. [default: main]"),
    ] = None,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead.")] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see a repository that is made.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Publish what does not verify, or what its gate.json did not pass."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and publish nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Publish a checkpoint on the Hugging Face Hub, private unless told otherwise.

    It is verified first, and compared with what the Hub lists afterwards. A push that was
    interrupted goes on when it is repeated. Token and address are those of the `hf` command.
    """
    from halfbyte.commands import tables
    from halfbyte.publish import push as publish

    console = open_console(json, quiet, verbose)
    with console.working() as progress:
        publication = publish(
            folder,
            repository,
            revision=revision,
            pull_request=pr,
            public=public,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    for note in publication.notes:
        console.warning(note)
    if dry_run:
        console.table(tables.publication_table(publication))
    console.line(tables.publication_line(publication))
    console.result(tables.publication_record(publication), quiet=publication.url or "")
