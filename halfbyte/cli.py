"""The `quantize` command: a table of contents, and the one `try` around everything.

`quantize SOURCE --to int4` is `quantize run SOURCE --to int4`. A command parses, calls one
function and hands its result to the console; it catches no errors, and imports what is heavy
inside its function, so that `--help` and `plan` never load torch.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from halfbyte import __version__, env
from halfbyte.commands import bench, capacity, convert, look, measure, publish
from halfbyte.console import Console, explain
from halfbyte.errors import UsageError

COMMANDS: Mapping[str, Callable[..., None]] = {
    "run": convert.run,
    "plan": convert.plan,
    "capacity": capacity.capacity,
    "inspect": look.inspect,
    "verify": look.verify,
    "eval": measure.evaluate,
    "gate": measure.gate,
    "report": publish.report,
    "card": publish.card,
    "push": publish.push,
    "bench-decode": bench.decode,
    "demo": measure.demo,
    "models": look.models,
    "env": look.environment,
}

EXAMPLES: Mapping[str, str] = {
    "run": """
  quantize GLM-5.2-FP8 --to int4 --calibration text.jsonl
  quantize GLM-5.2-FP8 --to int4 --calibration text.jsonl --resume
  quantize zai-org/GLM-5.2-FP8@main --to int4 --calibration text.jsonl
  quantize GLM-5.2-FP8 --to int4 --method rtn --group-size 128 -o GLM-5.2-INT4""",
    "plan": """
  quantize plan GLM-5.2-FP8
  quantize plan zai-org/GLM-5.2-FP8@main
  quantize plan GLM-5.2-FP8 --recipe glm-5-fp8-rest --json""",
    "capacity": """
  quantize capacity GLM-5.2-FP8
  quantize capacity config.json --gpus 8 --gpu h200 --kv fp8 --context 131072
  quantize capacity GLM-5.2-FP8 --dp-attention --svg tokens.svg --json""",
    "inspect": """
  quantize inspect GLM-5.2-FP8
  quantize inspect GLM-5.2-INT4 --json""",
    "verify": """
  quantize verify GLM-5.2-INT4
  quantize verify GLM-5.2-INT4 --source GLM-5.2-FP8
  quantize verify GLM-5.2-INT4 --source GLM-5.2-FP8 --kernels \\
    --calibration text.jsonl --layers 3,40-42""",
    "eval": """
  quantize eval GLM-5.2-INT4 --text heldout.jsonl --baseline GLM-5.2-FP8
  quantize eval GLM-5.2-INT4 --tasks tasks --limit 200 -o int4.json
  quantize eval GLM-5.2-INT4 --tasks article --backend vllm \\
    --backend-arg tensor_parallel_size=8 --max-length 16384 -o int4.json
  quantize eval GLM-5.2-INT4 --tasks article \\
    --endpoint http://localhost:30000 -o int4.json
  quantize eval GLM-5.2-INT4 --tool-calls bfcl_eval/data -o int4.json
  quantize eval GLM-5.2-FP8 --tasks tasks --store baselines""",
    "gate": """
  quantize eval GLM-5.2-FP8 --tasks tasks -o fp8.json
  quantize eval GLM-5.2-INT4 --tasks tasks -o int4.json
  quantize gate fp8.json int4.json
  quantize gate baselines int4.json
  quantize gate fp8.json int4.json --policy article --margin 0.5
  quantize gate fp8.json int4.json --junit gate.xml --summary summary.md""",
    "report": """
  quantize report GLM-5.2-INT4
  quantize report GLM-5.2-INT4 --eval int4.json --gate gate.json -o page.html""",
    "card": """
  quantize card GLM-5.2-INT4
  quantize gate fp8.json int4.json -o gate.json
  quantize card GLM-5.2-INT4 --gate gate.json""",
    "push": """
  quantize push GLM-5.2-INT4 someone/GLM-5.2-INT4 --dry-run
  quantize push GLM-5.2-INT4 someone/GLM-5.2-INT4
  quantize push GLM-5.2-INT4 someone/GLM-5.2-INT4 --public --revision int4""",
    "bench-decode": """
  quantize bench-decode GLM-5.2-FP8
  quantize bench-decode glm-5.2 --batch 1 --batch 64 --tensor-parallel 8 -v
  quantize bench-decode GLM-5.2-FP8 --json""",
    "demo": """
  quantize demo
  quantize demo -o /tmp/demo""",
    "models": """
  quantize models""",
    "env": """
  quantize env --json""",
}

app = typer.Typer(
    help="FP8 checkpoints of GLM, DeepSeek and Kimi to verified INT4 checkpoints.",
    epilog="""\b
Examples:
  quantize demo
  quantize plan GLM-5.2-FP8
  quantize GLM-5.2-FP8 --to int4 --calibration text.jsonl -o GLM-5.2-INT4

`quantize SOURCE` is short for `quantize run SOURCE`.

\b
Exit codes:
  0 done, 1 failed and explained, 2 wrong usage, 130 interrupted;
  gate and demo: 3 accuracy did not hold, 4 inconclusive, 5 not comparable""",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: rich would double the time of --help, and the docs hold it verbatim.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name, _command in COMMANDS.items():
    app.command(_name, epilog=f"\b\nExamples:{EXAMPLES[_name]}")(_command)


def _show_version(value: bool) -> None:
    if value:
        print(f"quantize {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    debug = False
    try:
        debug = env.debug()
        app(args=insert_run(sys.argv[1:] if argv is None else argv), prog_name="quantize")
    except SystemExit as end:  # how typer returns, with the code of `typer.Exit` or its own
        return int(end.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        failure = explain(error)
        Console().failure(failure)
        return failure.exit_code
    return 0


def insert_run(argv: Sequence[str]) -> list[str]:
    """Put `run` before a first word that is neither an option nor a command.

    Raises UsageError when that word looks like a misspelt command and is no folder.
    """
    if not argv or argv[0].startswith("-") or argv[0] in COMMANDS:
        return list(argv)
    word = argv[0]
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    if close and not Path(word).exists():
        raise UsageError(
            f"{word} is neither a command nor a folder", hint=f"did you mean `quantize {close[0]}`?"
        )
    return ["run", *argv]
