"""A mistake ends with status 2 and one line that names it, and leaves nothing behind."""

import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import programs
from tests.images import write_images
from tests.programs import (
    SHORT,
    SMALL,
    Run,
    assert_refused,
    evaluate,
    eventually,
    runs,
    snapshot,
    started,
    train,
    trained,
)

TABLE: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("bad_input.yaml").read_text()
)
CONFIGS: dict[str, Any] = {  # runs -> a text, or what is changed in a recipe
    "brackets": "a: [1",
    "unknown": {"lrr": 1},
    "negative": {"lr": -1},
    "none": {},
    "good": {},
}


def write_files() -> None:
    """Writes the files that the table names."""
    Path("folder").mkdir()
    Path("table.csv").write_text("not ours\n")
    Path("lines.jsonl").write_text("{}\n{}\n")
    Path("noise.pt").write_bytes(bytes(range(256)))
    torch.save({"weight": torch.ones(2)}, "other.pt")
    config, _ = programs.dry("name=good", "output_root=runs")
    for name, change in CONFIGS.items():
        folder = Path("runs", name, "checkpoints")
        folder.mkdir(parents=True)
        text = change
        if isinstance(change, dict):
            text = yaml.safe_dump({**config, "recipe": config["recipe"] | change})
        folder.with_name("config.yaml").write_text(text)
        if name != "none":
            (folder / "last.pt").write_bytes(Path("other.pt").read_bytes())
    Path("runs/thesis").mkdir()
    Path("runs/thesis/thesis.txt").write_text("not ours")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    with chdir(folder):
        write_files()
    return folder


@pytest.mark.parametrize("kind", TABLE)
def test_a_mistake_is_refused_in_one_line_that_names_it(
    kind: str, files: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(files)
    for command, named in TABLE[kind].items():
        overrides = shlex.split(command, posix="${" not in command)
        program = "train.py"
        if overrides[0].endswith(".py"):
            program = overrides.pop(0)
        before = snapshot()
        result = programs.run(program, overrides)
        assert_refused(result, named)
        line = result.err.removesuffix("\n")
        assert line.startswith(f"{Path(program).name}: "), command
        assert "\n" not in line, command
        assert len(line) < 2100, command
        assert snapshot() == before, command


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has a GPU")
def test_a_missing_gpu_is_named(here: Path):
    assert_refused(train("device=cuda"), "device=cuda")
    assert_refused(train("compile=cuda-graph", "device=cpu"), "compile=cuda-graph")
    assert not snapshot()


def test_weights_of_other_classes_are_refused(here: Path):
    root = write_images(Path("images"), ["cat", "dog"], train=4, held_out=2)
    data = ("dataset=image_folder", f"dataset.root={root}", "dataset.workers=0")
    trained(data, SHORT)
    for half in ("train", "val"):
        Path(root, half, "cat").rename(Path(root, half, "elk"))
    for which in ("last", "best"):
        result = evaluate("run=outputs/mine", f"weights={which}")
        assert result.status == 2
        assert "cat" in result.err
        assert "elk" in result.err
    assert [run.path.name for run in runs()] == ["mine"]


@pytest.mark.slow
def test_a_run_outlives_its_terminal(here: Path):
    with started("name=mine", SMALL) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stderr.close()
        eventually(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert Run("outputs/mine").summary["status"] == "finished"
