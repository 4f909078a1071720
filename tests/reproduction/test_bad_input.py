"""A mistake ends with status 2 and one line that names it, and leaves nothing behind."""

import os
import pickle
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import doors
from tests.doors import ROOT, SMALL, Run, evaluate, eventually, snapshot, started, train
from tests.images import write_images

TABLE: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("bad_input.yaml").read_text()
)
CONFIGS = {
    "brackets": "a: [1",
    "unknown": {"lrr": 1},
    "negative": {"lr": -1},
    "none": {},
    "good": {},
}


class Trap:
    """Creates a file when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, ("executed",)


def write_files() -> None:
    """Writes the files that the table names."""
    Path("folder").mkdir()
    Path("table.csv").write_text("not ours\n")
    Path("noise.pt").write_bytes(bytes(range(256)))
    Path("evil.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    torch.save({"weight": torch.ones(2)}, "other.pt")
    write_images(Path("images"), ["cat", "dog"], train=1, held_out=1)
    Path("images/val/dog").rename("images/val/dogs")
    write_images(Path("same"), ["cat"], train=1, held_out=1)
    config, _ = doors.dry("name=good", "output_root=runs")
    for name, change in CONFIGS.items():
        folder = Path("runs", name, "checkpoints")
        folder.mkdir(parents=True)
        broken = (
            change if isinstance(change, str) else {**config, "recipe": config["recipe"] | change}
        )
        folder.with_name("config.yaml").write_text(yaml.safe_dump(broken).strip("'\n"))
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
        words = shlex.split(command, posix="${" not in command)
        program = words.pop(0) if words[0].endswith(".py") else "train.py"
        before = snapshot()
        result = doors.run(program, *words)
        assert result.status == 2, (command, result)
        line = result.err.removesuffix("\n")
        assert line.isprintable() and 0 < len(line) < 2100, (command, result.err)
        assert line.startswith(f"{Path(program).name}: ") and named in line, (command, line)
        assert snapshot() == before, command


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has a GPU")
def test_a_missing_gpu_is_named(here: Path):
    for words in (["device=cuda"], ["compile=cuda-graph", "device=cpu"]):
        result = train(*words)
        assert (result.status, len(result.lines)) == (2, 1)
        assert words[0] in result.err
    assert not [*here.iterdir()]


def test_a_run_that_was_killed_before_its_first_file_can_begin_again(here: Path):
    Path("outputs/mine").mkdir(parents=True)
    Path("outputs/mine/.lock").touch()
    assert train("name=mine", *SMALL).status == 0


def test_weights_of_another_model_or_of_other_classes_are_refused(here: Path):
    root = write_images(Path("images"), ["cat", "dog"], train=4, held_out=2)
    data = ["dataset=image_folder", f"dataset.root={root}", "dataset.workers=0"]
    small = [x for x in SMALL if "limit" not in x]
    assert train("name=mine", *data, *small).status == 0
    for half in ("train", "val"):
        Path(root, half, "cat").rename(Path(root, half, "elk"))
    for which in ("last", "best"):
        result = evaluate("run=outputs/mine", f"weights={which}")
        assert result.status == 2
        assert "cat" in result.err
        assert "elk" in result.err
    weights = "model.weights=outputs/mine/checkpoints/best.safetensors"
    for change, named in [
        ("model.embed_dim=32", "best.safetensors"),
        ("model.depth=3", "blocks.2"),
    ]:
        result = train(weights, *SMALL, change)
        assert (result.status, len(result.lines)) == (2, 1)
        assert named in result.err
    assert not Path("outputs/cct_2_3x2-digits").exists()
    assert len([*Path("outputs").iterdir()]) == 1


def test_a_run_outlives_its_terminal(here: Path):
    with started("name=mine", *SMALL) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stderr.close()
        eventually(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert Run("outputs/mine").summary["status"] == "finished"


@pytest.mark.parametrize("model", ["cct_2_3x2", "vit_tiny_patch16_224"])
def test_help_says_what_is_allowed_for_every_key(here: Path, model: str):
    stack = "augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]"
    words = [f"model={model}", stack, "logger=[wandb,tensorboard]"]
    allowed = dict(re.findall(r"^([\w.]+) +(\S.*)$", train(*words, "--help").out, re.MULTILINE))
    shown = yaml.safe_load(train(*words, "--cfg", "job").out)
    for key in keys_of(shown):
        assert key in allowed or key.startswith(("logger.", "augmentation.chosen.")), key
    assert "auto" in allowed["augmentation.htm.tau"]
    assert "cuda-graph" in allowed["compile"]
    assert "float16" in allowed["recipe.precision"]
    assert ">= 1" in allowed["recipe.epochs"]
    assert ("model.conv_layers" in allowed) == (model == "cct_2_3x2")
    assert not [*here.iterdir()]


def keys_of(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        inner = keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        found += [f"{prefix}{key}"] if inner is None else inner
    return found


@pytest.mark.parametrize("group", ["augmentation", "dataset", "logger", "model", "recipe", ""])
def test_every_key_has_a_comment_in_one_file_of_its_group(group: str):
    paths = (ROOT / "conf" / group).glob("*.yaml") if group else [ROOT / "conf" / "train.yaml"]
    text = "\n".join(
        re.sub(r"(?ms)^(defaults|hydra):.*?(?=^\S|\Z)", "", x.read_text()) for x in paths
    )
    keys = re.findall(r"^ *(\w+): +[^ #\n].*?( #.*)?$", text, re.MULTILINE)
    assert keys
    assert {key for key, _ in keys} == {key for key, comment in keys if comment}
