"""The wheel holds only the typed library, and version numbers agree across files."""

import os
import re
import shlex
import shutil
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
    for name in ("src/tokenmixup", "src/reproduction", "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy / name)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_only_the_library(wheel: zipfile.ZipFile):
    modules = {f"tokenmixup/{path.name}" for path in (ROOT / "src/tokenmixup").glob("*.py")}
    info = f"tokenmixup-{tokenmixup.__version__}.dist-info"
    metadata_files = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt")}
    metadata_files.add(f"{info}/licenses/LICENSE")
    assert {*wheel.namelist()} == modules | metadata_files | {"tokenmixup/py.typed"}
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: MIT" in metadata
    dependencies = re.findall(r"^Requires-Dist: (\w+)", metadata, re.MULTILINE)
    assert dependencies == ["torch", "numpy", "scipy", "einops"]


def test_wheel_requires_the_tested_versions(wheel: zipfile.ZipFile):
    lowest = dict(re.findall(r"^(\w+)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    for package, version in re.findall(
        r"^Requires-Dist: (\w+)>=([\d.]+)", wheel.read(name).decode(), re.M
    ):
        assert lowest[package] == version


def test_the_license_is_mit_and_names_its_holders(wheel: zipfile.ZipFile):
    (name,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    text = wheel.read(name).decode()
    assert text.startswith("MIT License") and "the authors of this repository" in text


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs make as from a shell, also if make runs the tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")} | variables
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "SEED=1"), "SEED=1: make status does not use it, allowed are PYTHON SCALE "),
        (("runs", "RUN=x"), "RUN=x: make runs does not use it, allowed are PYTHON RUNS OUTPUTS "),
        (("RUNS=x",), "RUNS=x: make help does not use it, allowed are PYTHON."),
        (("study", "FILE=x", "DRY_RUN=no"), "DRY_RUN=no: must be one of 0 1."),
    ],
)
def test_make_refuses_a_variable_or_value_that_would_be_ignored(
    arguments: tuple[str, ...], message: str
):
    result = make(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert message in line


def test_make_takes_variables_of_its_targets_and_any_of_the_environment():
    assert make("status", "SEEDS=2", "SCALE=smoke").returncode == 0
    assert make("lint", "runs", "RUNS=x").returncode == 0
    assert make("status", SEED="1", DRY_RUN="no").returncode == 0
    assert make("status", "--environment-overrides", SEED="1").returncode == 0
    assert "--dry-run" in make("study", "FILE=x", "DRY_RUN=1").stdout
    assert "--dry-run" not in make("study", "FILE=x", "DRY_RUN=0").stdout


def test_make_knows_the_variables_that_each_recipe_uses():
    text = (ROOT / "Makefile").read_text()
    macros = dict(re.findall(r"^([A-Z_]+) = ((?:.*\\\n)*.*)", text, re.M))
    listed = make("--print-data-base", "help").stdout
    known = dict(re.findall(r"^USED_BY_(\S+) :?= ?(.*)", listed, re.M))
    assert len(known) > 15
    for targets, body in re.findall(r"^([a-z0-9 -]+):.*\n((?:\t.*\n?)+)", text, re.M):
        recipe = body
        while found := re.search(rf"\$\(({'|'.join(macros)})\)", recipe):
            recipe = recipe.replace(found[0], macros[found[1]])
        used = set(re.findall(r"\b([A-Z_]{3,})\)", recipe)) - {"PYTHON", "BIN", "MAKEFILE_LIST"}
        for target in targets.split():
            assert used == {*known.get(target, "").split()}, target


def test_a_target_only_sets_up_development():
    """The environment of `make test`, without its tests."""
    needed = re.findall(r"^(?:setup-dev|test): (.*?)  ##", (ROOT / "Makefile").read_text(), re.M)
    assert len(needed) == 2 and len({*needed}) == 1
    assert "pytest" not in make("setup-dev", "--always-make").stdout.splitlines()[-1]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_setup_says_what_it_installs_and_shows_progress_on_a_terminal(
    tmp_path: Path, is_terminal: bool
):
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"  # makes an environment whose pip prints its arguments
    pip = "echo 'echo pip \"$@\"' > pip && chmod +x pip"
    python.write_text(f"#!/bin/sh\nmkdir -p .venv/bin && cd .venv/bin && {pip}\n")
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}"]
    if is_terminal:
        command = ["script", "--quiet", "--return", "--command", shlex.join(command), "/dev/null"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    result = subprocess.run(
        command, check=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    first, *lines = [x for x in result.stdout.splitlines() if x.startswith(("Installing", "pip "))]
    assert first.startswith("Installing PyTorch with CUDA") and "about 6 GB" in first
    locked = [line for line in lines if "--require-hashes" in line]
    assert len(locked) == 2 and all(("--quiet" in x) != is_terminal for x in locked)


def test_a_module_of_tests_names_pytest_if_it_is_missing():
    code = "import sys, runpy; sys.modules['pytest'] = None; "
    code += "runpy.run_module('tests.reproduction.test_frozen', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "needs pytest, which make setup-dev installs" in line


def test_changelog_covers_this_version():
    assert f"## {tokenmixup.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["CITATION.cff", ".pre-commit-config.yaml"])
def test_metadata_files_are_valid_yaml(name: str):
    assert yaml.safe_load((ROOT / name).read_text())


def test_pre_commit_and_lint_use_the_same_ruff():
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "requirements-dev.txt").read_text(), re.M)
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert pinned is not None and repo["rev"] == f"v{pinned[1]}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda p: p.name
)
def test_workflows_run_existing_make_targets(path: Path):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    (job,) = yaml.safe_load(path.read_text())["jobs"].values()
    for step in job["steps"]:
        if step.get("run", "").startswith("make "):
            assert step["run"].split()[1] in targets
