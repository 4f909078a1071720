"""The imports go one way: scripts, tests -> reproduction -> tokenmixup -> torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))

# room -> modules that it may import from this project
ALLOWED = {
    "tokenmixup": ["tokenmixup"],
    "reproduction/data": [
        "reproduction.data",
        "reproduction.config",
        "reproduction.errors",
        "reproduction.stdout",
    ],
    "reproduction/models": [
        "reproduction.models",
        "reproduction.config",
        "reproduction.model_config",
        "reproduction.errors",
        "reproduction.digest",
        "reproduction.heap",
        "reproduction.ranks",
        "reproduction.stdout",
        "tokenmixup",
    ],
    "reproduction/reporting": [
        "reproduction.reporting",
        "reproduction.ranks",
        "reproduction.errors",
        "reproduction.locking",
        "reproduction.reading",
        "reproduction.identity",
        "reproduction.runs",
        "reproduction.stdout",
        "reproduction.storage",
        "reproduction.cells",
        "reproduction.scales",
        "reproduction.config",
        "reproduction.model_config",
        "reproduction.parse",
        "reproduction.models",
        "reproduction.data",
        "tokenmixup",
    ],
}
LIBRARY_NEEDS = {"torch", "numpy", "scipy", "einops", "tokenmixup"}
KNOW_HYDRA = {"reproduction/cli.py", "reproduction/compose.py"}
STANDARD = {
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
    "inspect",
    "math",
    "typing",
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_one_way(file: Path):
    for module in imports(SOURCE / file):
        top = module.partition(".")[0]
        assert top not in ("scripts", "tests"), module
        if file.parts[0] == "tokenmixup":
            assert top in LIBRARY_NEEDS | STANDARD, module
        if top in ("hydra", "omegaconf"):
            assert str(file) in KNOW_HYDRA, module
        room = "/".join(file.parts[:2]) if len(file.parts) > 2 else file.parts[0]
        if top in ("reproduction", "tokenmixup") and room in ALLOWED:
            assert any(
                module == allowed or module.startswith(f"{allowed}.") for allowed in ALLOWED[room]
            ), module


def test_a_mistyped_command_is_refused_before_torch_is_imported(tmp_path: Path):
    code = (
        "import sys, runpy\n"
        "sys.argv = ['train.py', 'recipe.epochs=0']\n"
        "try: runpy.run_path(r'%s', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)\n" % (ROOT / "train.py")
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["2", "False"]


def test_modules_that_check_a_configuration_do_not_import_torch():
    light = [
        "cli.py",
        "compose.py",
        "launchers.py",
        "children.py",
        "options.py",
        "slurm.py",
        "config.py",
        "fields.py",
        "model_config.py",
        "parse.py",
        "checks.py",
        "errors.py",
        "ranks.py",
        "identity.py",
        "runs.py",
        "storage.py",
        "digest.py",
        "reading.py",
        "stdout.py",
        "jobs.py",
        "locking.py",
        "plan.py",
        "scales.py",
        "terminal.py",
        "cost.py",
        "states.py",
        "evaluation.py",
        "export.py",
        "data/folders.py",
    ]
    for name in light:
        for module in imports(SOURCE / "reproduction" / name):
            assert module.partition(".")[0] not in ("torch", "torchvision", "timm"), (name, module)


ENTRY_POINTS = ["train.py", "eval.py", *(f"scripts/{p.name}" for p in ROOT.glob("scripts/*.py"))]


@pytest.mark.parametrize("file", ENTRY_POINTS)
def test_entry_points_stay_short(file: str):
    assert len((ROOT / file).read_text().splitlines()) <= 80
