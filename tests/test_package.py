"""The wheel holds only the typed library; workflows run targets that the Makefile has."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import tokenmixup

ROOT = Path(__file__).parents[1]


def test_wheel_holds_only_the_library_and_requires_what_is_tested(tmp_path: Path):
    source = tmp_path / "source"  # setuptools leaves a build folder beside the sources
    shutil.copytree(ROOT / "src", source / "src")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (path,) = tmp_path.glob("*.whl")
    wheel = zipfile.ZipFile(path)
    info = f"tokenmixup-{tokenmixup.__version__}.dist-info"
    code = {name for name in wheel.namelist() if not name.startswith(f"{info}/")}
    library = {f"tokenmixup/{path.name}" for path in (ROOT / "src/tokenmixup").glob("*.py")}
    assert code == library | {"tokenmixup/py.typed"}
    assert wheel.read(f"{info}/licenses/LICENSE").startswith(b"MIT License")
    metadata = wheel.read(f"{info}/METADATA").decode()
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
