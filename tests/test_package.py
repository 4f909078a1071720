"""The wheel holds only the typed library, and the files beside the code agree with each other."""

import os
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
    copy.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy / name)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_only_the_library_and_its_licence(wheel: zipfile.ZipFile):
    sources = (ROOT / "src/tokenmixup").glob("*.py")
    info = f"tokenmixup-{tokenmixup.__version__}.dist-info"
    licence = f"{info}/licenses/LICENSE"
    expected = [f"tokenmixup/{path.name}" for path in sources]
    expected += ["tokenmixup/py.typed", licence]
    expected += [f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt")]
    assert sorted(wheel.namelist()) == sorted(expected)
    assert wheel.read(licence).startswith(b"MIT License")


def test_wheel_requires_what_is_tested(wheel: zipfile.ZipFile):
    info = f"tokenmixup-{tokenmixup.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: MIT" in metadata
    needed = dict(re.findall(r"^Requires-Dist: (\w+)>=([\d.]+)", metadata, re.MULTILINE))
    requirements = (ROOT / "requirements.txt").read_text()
    lowest = dict(re.findall(r"^(\w+)>=([\d.]+)", requirements, re.MULTILINE))
    assert needed == {name: lowest[name] for name in ("torch", "numpy", "scipy", "einops")}


def test_workflows_run_targets_of_make():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    workflows = (ROOT / ".github/workflows").glob("*.yml")
    for path in [*workflows, ROOT / ".ci/run"]:
        found = re.findall(r"\bmake ([a-z-]+)", path.read_text())
        assert set(found) <= set(targets), path


def made(*words: str) -> subprocess.CompletedProcess[str]:
    """What make would do."""
    command = ["make", "-n", "-C", str(ROOT), *words]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_folder_with_a_space_is_one_word_of_every_target():
    for target in ("runs", "report", "reproduce-table2", "bench"):
        result = made(target, "OUTPUTS=o p")
        assert result.returncode == 0, result
        assert re.search(r'[ =]"o p["/]', result.stdout), result


def test_files_beside_the_code_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())
    requirements = (ROOT / "requirements-dev.txt").read_text()
    (version,) = re.findall(r"^ruff==(.+)$", requirements, re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repo,) = hooks["repos"]
    assert repo["rev"] == f"v{version}"
