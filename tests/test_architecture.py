"""Imports point one way: tests, scripts -> studies -> ... -> reproduction.machine, tokenmixup."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

# Packages and modules of `reproduction`; each may import those of the lines above its own.
LAYERS = (
    ("files", "machine"),
    ("errors",),
    ("function_keys",),
    ("config",),
    ("identity",),
    ("data", "models"),
    ("folder", "help"),
    ("training",),
    ("compose", "reporting"),
    ("jobs", "studies"),
    ("sweep",),
    ("application",),
    ("__init__",),
)
LIBRARY = {"torch", "numpy", "scipy", "einops", "tokenmixup"}  # what the library may import
MORE = {  # file of the library -> what it alone may import
    "module": {"timm"},  # where timm has called
    "assignment_kernel": {"triton"},
    "attention_kernel": {"triton"},
}
STANDARD = {"collections", "contextlib", "dataclasses", "functools", "importlib", "inspect"}
STANDARD |= {
    "itertools",
    "math",
    "numbers",
    "operator",
    "pickle",
    "pkgutil",
    "random",
    "re",
    "types",
    "typing",
    "warnings",
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def test_the_library_imports_what_it_requires():
    for path in (SOURCE / "tokenmixup").glob("*.py"):
        tops = {module.partition(".")[0] for module in imports(path)}
        assert tops <= LIBRARY | STANDARD | MORE.get(path.stem, set()), path


def test_only_hydra_loads_the_plugins_which_import_the_experiments():
    for path in (*SOURCE.rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py")):
        modules = {*imports(path)}
        assert not any(module.startswith("hydra_plugins") for module in modules), path
        if path.parent.name == "hydra_plugins":
            tops = {module.partition(".")[0] for module in modules}
            assert tops <= STANDARD | {
                "hydra",
                "omegaconf",
                "pathlib",
                "reproduction",
            }, path


def test_imports_of_the_experiments_point_one_way():
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path in (SOURCE / "reproduction").rglob("*.py"):
        ours = path.relative_to(SOURCE / "reproduction").with_suffix("").parts[0]
        for module in imports(path):
            top, _, rest = module.partition(".")
            assert top not in ("scripts", "tests"), (path, module)
            theirs = rest.partition(".")[0]
            if top == "reproduction" and theirs != ours:
                assert level[theirs] < level[ours], (path, module)
