"""Mistyped commands end with one line that names the mistake, status 2 and an unchanged disk."""

import io
import os
import pickle
import re
import runpy
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from reproduction.config import CONF_DIR
from reproduction.data.sources import _open
from reproduction.models.build import build_model
from reproduction.runs import compose as composing
from reproduction.runs.folder import RunFolder
from reproduction.start import command as cli
from tests.reproduction.conftest import (
    SMALL,
    SMALL_VIT,
    Command,
    config_of,
    snapshot,
    write_images,
)

ROOT = Path(__file__).parents[2]
REFUSED = Path(__file__).with_name("refused.yaml")  # kind -> command -> error line
TABLE: dict[str, dict[str, str]] = yaml.safe_load(REFUSED.read_text())
TABLE["texts that cannot be read"] |= {  # too long for the file
    f"train.py seed={'1' * 5000}": "train.py: seed=111...: cannot be read: ValueError: ...",
    f"train.py 'name={'[' * 400}'": "train.py: name=[[[...: cannot be read, a bracket ...",
}
CLEAR = (  # phrases that state what is allowed, or what is wrong
    *("must", "allowed", "needs", "choose", "or add", "add -m", "leave", "goes with"),
    *("resume it with", "set exactly one", "only one", "quote", "expected", "required"),
    *("is not 1 or more", "not available", "unknown", "does not", "cannot", "there is no"),
    *("there are", "no such", "is not a ", "is no ", "no value", "exists", "omit name"),
    *("not readable", "not measured", "unrecognized", "more than once", "another run", "holds no"),
    *("has 12 blocks", "has no points", "refuses", "name the folder", "Did you mean"),
    *("Could not", "invalid"),
)
BROKEN = {  # contents of a run folder's config.yaml
    "brackets": "a: [1",
    "list": "[1]",
    "empty": "",
    "tag": "!!python/object/apply:os.mknod [executed]",
    "twice": "seed: 0\nseed: 1\n",
}


def write_files(folder: Path) -> None:
    """Writes the files and folders that the commands of the table name."""
    (folder / "folder").mkdir()
    (folder / "outputs").mkdir()
    (folder / "file.txt").write_text("text")
    (folder / "table.csv").touch()
    rows = "{a: {overrides: [dataset=image_folder]}}"
    (folder / "study.yaml").write_text(f"title: x\nrows: {rows}\n")
    (folder / "empty.pt").touch()
    (folder / "zip.pt").write_bytes(b"PK")
    (folder / "noise.pt").write_bytes(bytes(range(256)) * 8)
    (folder / "evil.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    (folder / "text.safetensors").write_text("text")
    torch.save({"weight": torch.ones(2)}, folder / "other.pt")
    write_images(folder / "images", ["cat", "dog"], train=1, held_out=1)
    (folder / "images" / "val" / "dog").rename(folder / "images" / "val" / "dogs")
    write_images(folder / "same", ["cat"], train=1, held_out=1)
    config = asdict(config_of("name=good", "output_root=runs"))
    saved = {name: yaml.safe_dump(config) for name in ("good", "none", "summary")}
    for name, change in (("unknown", {"lrr": 1}), ("negative", {"lr": -1})):
        saved[name] = yaml.safe_dump({**config, "recipe": {**config["recipe"], **change}})
    recipe = {key: value for key, value in config["recipe"].items() if key != "lr"}
    saved["missing"] = yaml.safe_dump({**config, "recipe": recipe})
    for name, text in (saved | BROKEN).items():
        run = RunFolder(folder / "runs" / name)
        run.last_path.parent.mkdir(parents=True)
        run.config_path.write_text(text)
        if name != "none":
            run.last_path.write_bytes((folder / "other.pt").read_bytes())
    (folder / "runs" / "summary" / "summary.json").write_text('{"status":')
    (folder / "runs" / "folder" / "config.yaml").mkdir(parents=True)
    (folder / "runs" / "thesis").mkdir()
    (folder / "runs" / "thesis" / "thesis.txt").write_text("not ours")


class Trap:
    """Creates a file when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, ("executed",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


def run_here(arguments: list[str]) -> tuple[int, str]:
    """Runs a command in this process; returns its status and stderr."""
    script, *rest = arguments
    err = io.StringIO()
    with (
        patch.object(sys, "argv", [script, *rest]),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return int(end.value.code or 0), err.getvalue()


@pytest.mark.parametrize("kind", TABLE)
def test_bad_input_is_refused_in_one_clear_line(
    kind: str, files: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", "/nonexistent")  # without wandb credentials
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for command, line in TABLE[kind].items():
        before = snapshot(files)
        status, err = run_here(shlex.split(command))
        assert status == 2, (command, err)
        assert err.endswith("\n") and err[:-1].isprintable() and len(err) < 2100, (command, err)
        assert err.startswith(f"{Path(shlex.split(command)[0]).name}: ")
        assert any(word in err for word in CLEAR), (command, err)
        assert fits(portable(err, files), line), (command, err, f"python -m {__name__} rewrites it")
        assert snapshot(files) == before, command


def portable(err: str, files: Path) -> str:
    """Replaces the folders of this machine in an error line."""
    return err.strip().replace(str(files), "FILES").replace(str(ROOT), "ROOT")


def fits(line: str, recorded: str) -> bool:
    """Returns whether a line matches the recorded one, in which `...` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, recorded.split("..."))), line) is not None


def record() -> None:
    """Rewrites the lines that have changed; replace words of libraries in them by `...`."""
    table = yaml.safe_load(REFUSED.read_text())
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_files(Path(folder))
        for lines in table.values():
            for command, recorded in lines.items():
                line = portable(run_here(shlex.split(command))[1], Path(folder))
                lines[command] = recorded if fits(line, recorded) else line
    head = "".join(REFUSED.read_text().splitlines(keepends=True)[:2])
    text = yaml.safe_dump(table, sort_keys=False, width=10**6, allow_unicode=True)
    REFUSED.write_text(head + text)
    print(f"written to {REFUSED}")


def test_table_has_lost_no_line():
    assert sum(map(len, TABLE.values())) >= 354 and len(TABLE) >= 49


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has a GPU")
def test_train_refuses_a_missing_gpu(command: Command, tmp_path: Path):
    result = command("train", "device=cuda")
    assert (result.status, len(result.lines)) == (2, 1)
    assert "device=cuda" in result.err and "allowed is cpu" in result.err
    assert list(tmp_path.iterdir()) == []


def test_experiment_cannot_enable_augmentations_outside_its_stack(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even by giving all settings of the augmentation."""
    conf = tmp_path / "conf"
    for path in CONF_DIR.rglob("*.yaml"):
        copied = conf / path.relative_to(CONF_DIR)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(path.read_text())
    htm = yaml.safe_load((CONF_DIR / "augmentation" / "htm.yaml").read_text())
    experiment = {"defaults": [{"override /augmentation": ["mixup"]}], "augmentation": htm}
    text = "# @package _global_\n" + yaml.safe_dump(experiment, sort_keys=False)
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "sly.yaml").write_text(text)
    monkeypatch.setattr(cli, "CONF_DIR", conf)
    monkeypatch.setattr(composing, "CONF_DIR", conf)
    result = command("train", "experiment=sly")
    assert result.status == 2
    assert "augmentation=[mixup] does not name htm" in result.err
    assert not (tmp_path / "outputs").exists()


def test_existing_run_is_refused_or_resumed(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    before = (tmp_path / "outputs/mine/summary.json").read_text()
    again = command("train", "name=mine", *SMALL)
    assert again.status == 2
    assert "resume=auto" in again.err and "another name" in again.err
    other = command("train", "name=mine", "resume=auto", "seed=5", *SMALL)
    assert other.status == 2
    assert "holds another run, this one has seed=5 instead of 0; choose another name=" in other.err
    same = command("train", "name=mine", "resume=auto", "dataset.workers=1", *SMALL)
    assert same.status == 0
    assert "mine: top-1" in same.out
    assert (tmp_path / "outputs/mine/summary.json").read_text() == before


def test_eval_refuses_checkpoints_that_do_not_fit_the_model(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    file = tmp_path / "outputs/mine/checkpoints/last.pt"
    wide = command("eval", f"checkpoint={file}", "model.embed_dim=32")
    assert wide.status == 2
    assert "the model has" in wide.err
    deep = command("eval", f"checkpoint={file}", "model.embed_dim=16", "model.depth=3")
    assert deep.status == 2
    assert "blocks.2" in deep.err
    file.write_bytes(file.read_bytes()[:1000])
    cut = command("eval", f"checkpoint={file}")
    assert cut.status == 2
    assert "not readable" in cut.err
    assert len(cut.lines) == 1


def test_eval_refuses_other_classes(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=4, held_out=2)
    small = [x for x in SMALL if "limit" not in x]
    data = ["dataset=image_folder", f"dataset.root={root}", "dataset.workers=0"]
    assert command("train", "name=mine", *data, *small).status == 0
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "elk")
    for which in (["run=outputs/mine"], ["run=outputs/mine", "weights=best"]):
        _open.cache_clear()
        result = command("eval", *which)
        assert result.status == 2
        assert "cat, dog" in result.err and "dog, elk" in result.err


def test_eval_does_not_need_the_initial_weights(command: Command, tmp_path: Path):
    vit = ["model=vit_tiny_patch16_224", "model.image_size=32", *SMALL_VIT]
    start = tmp_path / "start.pth"
    vit += ["dataset.limit=10", "device=cpu"]
    config = config_of(*vit)
    torch.save(build_model(config.model, 10).state_dict(), start)
    args = [*vit, f"model.weights={start}", "recipe.epochs=1", "recipe.batch_size=10"]
    assert command("train", "name=mine", *args).status == 0
    start.unlink()
    assert command("eval", "run=outputs/mine").status == 0


def test_rank_variable_without_torchrun_is_ignored(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "1")  # as some clusters set it
    assert command("train", "name=mine", *SMALL).status == 0
    again = command("train", "name=mine", "seed=7", *SMALL)
    assert again.status == 2
    assert "resume=auto" in again.err


def test_run_killed_before_writing_its_config_can_restart(command: Command, tmp_path: Path):
    (tmp_path / "outputs/mine/checkpoints").mkdir(parents=True)
    assert command("train", "name=mine", *SMALL).status == 0
    (tmp_path / "outputs/other").mkdir()
    (tmp_path / "outputs/other/thesis.txt").write_text("not ours")
    refused = command("train", "name=other", "resume=auto", *SMALL)
    assert refused.status == 2
    assert "is not a run folder" in refused.err


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_image_is_named(command: Command, tmp_path: Path, workers: int):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=4, held_out=2)
    broken = root / "val" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    small = [x for x in SMALL if "limit" not in x]
    data = ["dataset=image_folder", f"dataset.root={root}", f"dataset.workers={workers}"]
    data += ["augmentation.htm.tau=0.5"]  # with 2 classes, a higher tau causes a warning
    held = command("train", "name=mine", *data, *small)
    assert (held.status, len(held.lines)) == (2, 1)
    assert f"{broken}: no readable image" in held.err
    count = "1 of 4 images of this folder are broken"
    assert held.err.endswith(f"; {count}; dataset.broken_images=skip leaves such files out\n")
    result = command("train", "name=mine", "dataset.memory_mib=0", *data, *small)
    assert (result.status, len(result.lines)) == (1, 1)
    assert f"{broken}: no readable image" in result.err
    assert "dataset.broken_images=skip leaves such files out" in result.err


def test_images_of_more_than_8_bits_are_refused(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=2, held_out=2)
    for path in (root / "train").rglob("*.png"):
        Image.fromarray(np.full((8, 8), 3000, dtype=np.uint16)).save(path)
    result = command("train", "dataset=image_folder", f"dataset.root={root}", "dataset.workers=0")
    assert result.status == 2
    assert "convert them to 8 bits" in result.err and ".png" in result.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"PK"])
def test_eval_refuses_unreadable_files(command: Command, tmp_path: Path, content: bytes):
    for name in ("x.pt", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        result = command("eval", f"checkpoint={name}")
        assert result.status == 2, result.err
        assert f"checkpoint={name}: not readable" in result.err
        assert len(result.lines) == 1


if __name__ == "__main__":
    record()
