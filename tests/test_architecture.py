"""Imports point one way: scripts, tests -> reproduction -> tokenmixup -> torch."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))

# Layer -> layers it may import, from the bottom up. All but `tokenmixup` are packages or modules of
# `reproduction`.
MAY_IMPORT = {
    "tokenmixup": [],
    "system": [],
    "config": ["tokenmixup", "system"],
    "data": ["config", "system"],
    "models": ["tokenmixup", "config", "system"],
    "runs": ["tokenmixup", "data", "config", "system"],
    "training": ["tokenmixup", "models", "data", "runs", "config", "system"],
    "reporting": ["tokenmixup", "models", "data", "runs", "config", "system"],
    "start": ["training", "models", "data", "runs", "config", "system"],
    "studies": [
        *("start", "reporting", "training", "tokenmixup"),
        *("models", "data", "runs", "config", "system"),
    ],
    "__init__": ["training", "models", "data", "runs", "config"],
}
LIBRARY_DEPENDENCIES = {"torch", "numpy", "scipy", "einops", "tokenmixup"}
TIMM_USERS = {"tokenmixup/timm_task.py"}
TRITON_USERS = {"tokenmixup/device_assignment.py", "tokenmixup/kernels.py"}  # torch's, on a GPU
HYDRA_USERS = {
    "reproduction/start/command.py",
    "reproduction/runs/compose.py",
}
STANDARD_LIBRARY = {
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
    "inspect",
    "itertools",
    "math",
    "re",
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
def test_imports_point_one_way(file: Path):
    name = ".".join(file.with_suffix("").parts)
    for module in imports(SOURCE / file):
        top = module.partition(".")[0]
        assert top not in ("scripts", "tests"), module
        if file.parts[0] == "tokenmixup":
            more = {"timm"} if str(file) in TIMM_USERS else set()
            more |= {"triton"} if str(file) in TRITON_USERS else set()
            assert top in LIBRARY_DEPENDENCIES | STANDARD_LIBRARY | more, module
        if top in ("hydra", "omegaconf"):
            assert str(file) in HYDRA_USERS and "._" not in module, module
        if top in ("reproduction", "tokenmixup"):
            assert layer_of(module) in [layer_of(name), *MAY_IMPORT[layer_of(name)]], module


def layer_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return first if first == "tokenmixup" else rest.partition(".")[0]


def test_layers_are_complete_and_import_only_lower_ones():
    modules = {path.stem for path in (SOURCE / "reproduction").iterdir()}
    assert modules - {"__pycache__"} | {"tokenmixup"} == set(MAY_IMPORT)
    layers = list(MAY_IMPORT)
    for level, allowed in enumerate(MAY_IMPORT.values()):
        assert set(allowed) <= set(layers[:level])


def test_invalid_command_is_refused_before_torch_is_imported(tmp_path: Path):
    code = (
        "import sys, runpy\n"
        "sys.argv = ['train.py', 'recipe.epochs=0']\n"
        "try: runpy.run_path(r'%s', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)\n" % (ROOT / "train.py")
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    "modules",
    ["start.command start.resolve", "studies.options studies.launch"],
)
def test_command_checks_import_no_torch(modules: str):
    names = ", ".join(f"reproduction.{name}" for name in modules.split())
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Public names with several homes, and why.
TWICE = {
    "main": "of each program",
    "check_all": "of each program: what it checks before the first run",
    "CCT": "the configuration of a model, and the model",
    "load_run": "of the package, which imports torch when it is called",
    "received": "a kernel, and what it stands for",
}


def definitions(path: Path) -> Iterator[str]:
    """Yields the public names that a module defines, but for type variables."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_a_public_name_has_one_home():
    homes: dict[str, list[str]] = defaultdict(list)
    programs = [*ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    for path in [*(SOURCE / file for file in FILES), *programs]:
        for name in {*definitions(path)}:
            homes[name].append(str(path.relative_to(ROOT)))
    twice = {name: files for name, files in homes.items() if len(files) > 1 and name[0] != "_"}
    assert twice.keys() == TWICE.keys(), {x: twice.get(x) for x in twice.keys() ^ TWICE.keys()}


@pytest.mark.parametrize("file", ["train.py", "eval.py"])
def test_entry_points_stay_short(file: str):
    assert len((ROOT / file).read_text().splitlines()) <= 80


def test_scripts_stay_short():
    sizes = [len(path.read_text().splitlines()) for path in ROOT.glob("scripts/*.py")]
    assert max(sizes) <= 180 and sum(sizes) <= 800, sizes
