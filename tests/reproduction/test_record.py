"""What lay behind a run's paths: other data are refused and not averaged; spellings are one run."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file

from reproduction.config import Config
from reproduction.data import record
from reproduction.data.record import record_of
from reproduction.data.sources import _open
from reproduction.models.build import build_model
from reproduction.runs.compose import compose
from reproduction.runs.folder import find_runs
from reproduction.runs.identity import run_hash
from reproduction.start.resolve import resolve
from reproduction.studies.runs import left, newest, read_runs, state_text
from reproduction.studies.sweeps import runs_table
from reproduction.system.errors import UserError
from scripts.reproduce import reproduce
from tests.reproduction.conftest import Command, config_of, load_source, snapshot, write_images
from tests.reproduction.tables import set_time, write_run

TINY = [
    *("model.image_size=16", "model.embed_dim=16", "recipe.epochs=1", "recipe.batch_size=6"),
    *("dataset.workers=0", "device=cpu"),
]
FOLDER = ["dataset=image_folder", "dataset.root=d", *TINY]
BEFORE, AFTER = ("12 + 3 images of 3 classes", "40 + 8 images of 4 classes")


def test_finished_run_is_not_the_result_of_other_images(command: Command, tmp_path: Path):
    write_images(tmp_path / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    assert command("train", *FOLDER).status == 0
    (run,) = (tmp_path / "outputs").iterdir()
    kept = json.loads((run / "summary.json").read_text())["data"]
    assert [*kept] == ["images"] and kept["images"].startswith(f"{BEFORE}, names and sizes ")
    again = command("train", *FOLDER, "resume=auto")
    assert again.status == 0 and "top-1" in again.out and not again.err
    assert command("eval", f"run={run}").err == ""
    (tmp_path / "d").rename(tmp_path / "old")
    write_images(tmp_path / "d", ["ape", "bug", "cow"], train=4, held_out=1, size=16)
    before = snapshot(tmp_path)
    for more in ([], ["-m", "seed=1,0"]):
        result = command("train", *more, *FOLDER, "resume=auto")
        assert result.status == 2 and len(result.lines) == 1 and snapshot(tmp_path) == before
        start = f"train.py: name={run.name}: outputs/{run.name} was trained on other data: d: "
        assert result.err.startswith(f"{start}{kept['images']} then, {BEFORE}, names and sizes ")
        assert result.err.endswith(
            " now; choose another output_root=..., or move that folder away\n"
        )
    evaluated = command("eval", f"run={run}")
    assert evaluated.status == 2 and "classes" in evaluated.err  # of the weights
    assert f"warning: {run} was trained on other data: d: {BEFORE}, " in evaluated.err
    assert command("train", *FOLDER, "resume=auto", "name=other").status == 0


def test_a_run_without_a_checkpoint_begins_anew_on_mended_images(command: Command, tmp_path: Path):
    write_images(tmp_path / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    image = next(tmp_path.glob("d/train/ant/*"))
    content = image.read_bytes()
    image.write_bytes(b"none")
    words = [*FOLDER, "name=mine", "dataset.memory_mib=0", "resume=auto"]
    failed = command("train", *words)
    assert failed.status == 1 and "no readable image" in failed.err
    image.write_bytes(content)
    assert command("train", *words).status == 0


def test_seeds_on_grown_data_are_not_averaged(command: Command, tmp_path: Path):
    write_images(tmp_path / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    assert command("train", *FOLDER).status == 0
    write_images(tmp_path / "more", ["ant", "bee", "cat", "dog"], train=10, held_out=2, size=16)
    os.rename(tmp_path / "d", tmp_path / "old")
    os.rename(tmp_path / "more", tmp_path / "d")
    refused = command("train", "-m", "seed=0,1", *FOLDER, "resume=auto")
    assert refused.status == 2 and len(refused.lines) == 1 and "run 1 of 2" not in refused.out
    assert f": d: {BEFORE}, " in refused.err and f" then, {AFTER}, " in refused.err
    assert command("train", *FOLDER, "resume=auto", "seed=1").status == 0
    runs = read_runs(tmp_path / "outputs")
    assert newest(runs).seed.tolist() == [1]
    (other,) = left(runs).itertuples()
    assert (other.seed, state_text(other)) == (0, "other data")
    text = "\n".join(runs_table(runs).lines())
    assert "1 finished; seed 0 other data" in text
    assert (
        f"{other.folder}: left out, other data: {BEFORE}, names" in text
        and f" then, {AFTER}, names" in text
    )


def test_a_study_does_not_mix_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    study = {"title": "x", "rows": {"a": ["augmentation=[]", *FOLDER]}, "scales": {"smoke": []}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    words = ["study.yaml", "--scale", "smoke", "--data", "d", "--seeds"]
    assert reproduce([*words, "1"]) == 0
    (tmp_path / "d" / "train" / "ant" / "0.png").rename(tmp_path / "d" / "train" / "ant" / "4.png")
    _open.cache_clear()
    for more in (["1"], ["2"], ["1", "--task", "0"]):
        with pytest.raises(UserError, match="was trained on other data: d: 12 "):
            reproduce([*words, *more])
    (tmp_path / "d").rename(tmp_path / "gone")
    assert reproduce([*words, "1"]) == 0  # nothing is known against the run


def test_weights_of_the_same_name_may_be_others(command: Command, tmp_path: Path):
    def write(scale: float) -> None:
        state = build_model(config_of(*TINY).model, 10).state_dict()
        save_file({name: value * scale for name, value in state.items()}, tmp_path / "w.st")

    write(1.0)
    args = ["model.weights=./w.st", "dataset.limit=20", "resume=auto", *TINY]
    for _ in range(2):
        assert command("train", *args).status == 0
    write(0.5)
    result = command("train", *args)
    assert result.status == 2 and len(result.lines) == 1
    assert " was trained on other data: digits: model.weights with sha256 " in result.err


def test_spellings_of_a_path_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write_images(Path("d"), ["ant", "bee"], train=1, held_out=1)
    Path("w.st").touch()
    here = Path.cwd()

    def config(root: str, weights: str = "w.st") -> Config:
        words = ["dataset=image_folder", f"dataset.root={root}", f"model.weights={weights}"]
        return resolve(compose("train", words))

    one = config("d")
    for root in ("d/", "./d", f"{here}/d", "../work/d", "d/../d"):
        other = config(root, root.rstrip("/").removesuffix("d") + "w.st")
        assert (run_hash(other), other.name) == (run_hash(one), one.name), root
    (here / "outputs" / "mine").mkdir(parents=True)
    saved = asdict(replace(one, dataset=replace(one.dataset, root=f"{here}/d")))
    (here / "outputs" / "mine" / "config.yaml").write_text(yaml.safe_dump(saved))
    assert [*find_runs("outputs")] == [run_hash(one)]  # that was saved as typed
    Path("e").symlink_to("d")
    (tmp_path / "d").symlink_to("work/d")
    assert len({run_hash(config(root)) for root in ("d", "e", "../d")}) == 3


def test_record_counts_all_images_and_has_a_digest_of_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = write_images(tmp_path / "d", ["ant", "bee"], train=3, held_out=1, test=2)
    (root / "train" / "ant" / "x.png").symlink_to("gone")
    folder = config_of("dataset=image_folder", f"dataset.root={root}", "dataset.limit=2")
    text = record_of(folder)["images"]
    assert text.startswith("7 + 2 + 4 images of 2 classes, names and sizes ")
    source = load_source("image_folder", str(root), None)
    monkeypatch.setattr(record, "open_source", lambda dataset: source)
    imagenet = replace(folder, dataset=replace(folder.dataset, name="imagenet1k"))
    assert record_of(imagenet) == {"images": "7 + 2 + 4 images of 2 classes"}
    monkeypatch.undo()
    monkeypatch.chdir(root)
    here = replace(folder, dataset=replace(folder.dataset, root="."))
    assert record_of(here)["images"] == text


def test_rows_average_what_agrees_and_say_what_they_were_trained_on(tmp_path: Path):
    """Runs of before, without a record, agree with all."""
    few, many = "12 + 6 images of 3 classes", "40 + 6 images of 3 classes"

    def write(name: str, seed: int, drop: float, images: str | None) -> None:
        record = {} if images is None else {"data": {"images": images}}
        run = write_run(tmp_path, config_of(f"model.drop={drop}"), seed, name, **record)
        set_time(run, len([*tmp_path.iterdir()]))

    for run in (("a", 0, 0.1, few), ("b", 1, 0.1, many), ("c", 2, 0.1, None), ("d", 0, 0.2, many)):
        write(*run)
    table = runs_table(read_runs(tmp_path))
    assert [*table.heads] == ["drop"] and table.numbers.runs.tolist() == [["b", "c"], ["d"]]
    assert f"a: left out, other data: {few} then, {many} now" in table.notes
    write("e", 0, 0.3, few)
    table = runs_table(read_runs(tmp_path), against="drop=0.1")
    assert table.shown().images.tolist() == [few, many, many]
    assert table.numbers.base.notna().tolist() == [False, True, True]
