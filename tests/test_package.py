"""The wheel holds only the typed library, and the files beside the code agree with each other."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import tokenmixup

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    copy = folder / "source"  # setuptools leaves a build folder beside the sources
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy / name)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_only_the_library_and_its_licence(wheel: zipfile.ZipFile):
    modules = {f"tokenmixup/{path.name}" for path in (ROOT / "src/tokenmixup").glob("*.py")}
    info = f"tokenmixup-{tokenmixup.__version__}.dist-info"
    files = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt")}
    licence = f"{info}/licenses/LICENSE"
    assert {*wheel.namelist()} == modules | files | {licence, "tokenmixup/py.typed"}
    assert wheel.read(licence).startswith(b"MIT License")
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: MIT" in metadata
    needed = dict(re.findall(r"^Requires-Dist: (\w+)>=([\d.]+)", metadata, re.MULTILINE))
    lowest = dict(re.findall(r"^(\w+)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    assert needed == {x: lowest[x] for x in ("torch", "numpy", "scipy", "einops")}


def test_workflows_run_targets_of_make():
    targets = {*re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)}
    for path in [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / ".ci/run"]:
        found = re.findall(r"\bmake ([a-z-]+)", path.read_text())
        assert {*found} <= targets, path


def test_files_beside_the_code_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "requirements-dev.txt").read_text(), re.M)
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert pinned is not None
    assert repo["rev"] == f"v{pinned[1]}"
