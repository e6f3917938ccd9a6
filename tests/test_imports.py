"""Imports go one way, and what starts the command line loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte

PACKAGE = Path(halfbyte.__file__).parent
FILES = sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "demo").rglob("*.py")))
"""All code of the package; what lies in demo/ is data: task files that lm-eval reads."""

BASE = {"core", "devices", "env", "errors", "models", "progress", "ranks", "units"}
FORMATS = BASE | {"kernels"}
METHODS = FORMATS | {"formats"}
CALIBRATION = METHODS | {"kvcache"}
EVALS = CALIBRATION | {"calibration", "quantize"}
CONSOLE = BASE | {"console", "progress_display"}

MAY_IMPORT = {
    "core": set(),
    "errors": set(),
    "progress": set(),
    "units": set(),
    "env": {"errors"},
    "ranks": {"env", "errors"},
    "devices": {"errors"},
    "models": {"core", "errors"},
    "kernels": BASE,
    "formats": FORMATS,
    "kvcache": METHODS,
    "calibration": CALIBRATION,
    "quantize": CALIBRATION | {"calibration"},
    "evals": EVALS,
    "report": EVALS | {"evals"},
    "testing": METHODS | {"kvcache"},
    "__init__": EVALS | {"evals"},
    "progress_display": BASE,
    "console": CONSOLE,
    "commands": CONSOLE | EVALS | {"evals", "report", "publish", "__init__"},
    "cli": CONSOLE | {"commands", "__init__"},
    "__main__": {"cli"},
    "publish": EVALS | {"evals"},
}
"""Part of the package -> the other parts that it may import, at any depth of its code."""

HEAVY = {
    "compressed_tensors",
    "datasets",
    "llmcompressor",
    "lm_eval",
    "numpy",
    "torch",
    "transformers",
}

STARTS_WITHOUT_THEM = (
    "halfbyte.cli",
    "halfbyte.commands.capacity_tables",
    "halfbyte.commands.decode_tables",
    "halfbyte.commands.environment",
    "halfbyte.commands.scores",
    "halfbyte.commands.tables",
    "halfbyte.formats.checkpoint",
    "halfbyte.formats.hub",
    "halfbyte.formats.int4",
    "halfbyte.formats.source",
    "halfbyte.formats.weights",
    "halfbyte.kernels.decode_time",
    "halfbyte.kvcache.integrity.tracker",
    "halfbyte.kvcache.planner",
    "halfbyte.kvcache.ranges",
    "halfbyte.models",
    "halfbyte.quantize.plan",
    "halfbyte.quantize.recipe",
)


def part_of(module: str) -> str:
    """`halfbyte.formats.int4` -> `formats`; `halfbyte` -> `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def own_imports(tree: ast.AST) -> Iterator[str]:
    """Every module of halfbyte that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.split(".")[0] == "halfbyte")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            if node.module == "halfbyte":
                names = [n.name for n in node.names]
                yield from (f"halfbyte.{n}" if n in MAY_IMPORT else "halfbyte" for n in names)
            elif node.module and node.module.startswith("halfbyte."):
                yield node.module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file: Path) -> None:
    importer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert importer in MAY_IMPORT, f"say in MAY_IMPORT what {importer} may import"
    imported = {part_of(module) for module in own_imports(ast.parse(file.read_text()))}
    assert imported - MAY_IMPORT[importer] - {importer} == set()


def test_import_graph_finds_imports_inside_functions() -> None:
    tree = ast.parse(
        "def f():\n    from halfbyte.evals.gate import gate\n    from halfbyte import env"
    )
    assert sorted(own_imports(tree)) == ["halfbyte.env", "halfbyte.evals.gate"]


def test_commands_start_without_heavy_libraries() -> None:
    code = (
        "import importlib, sys\n"
        f"for module in {STARTS_WITHOUT_THEM!r}: importlib.import_module(module)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_public_names_resolve() -> None:
    for name in halfbyte.__all__:
        assert getattr(halfbyte, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        halfbyte.absent  # noqa: B018


def test_files_that_are_no_code_are_packaged() -> None:
    pyproject = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["halfbyte"]
    packaged = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    others = {
        file
        for file in PACKAGE.rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    }
    assert {str(file.relative_to(PACKAGE)) for file in others - packaged} == set()
