"""Broken images are replaced in training and left out of the accuracy; batches keep their size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.data.build import (
    build_evaluation_loader,
    build_training_images,
    build_training_loader,
)
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import _open, build_source
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import run_hash
from reproduction.system.errors import UserError
from reproduction.training.distributed import World
from reproduction.training.evaluate import evaluate
from scripts import look
from tests.reproduction.conftest import SMALL, Command, config_of, load_source, write_images
from tests.reproduction.test_training import assert_same_result, interrupt_at

BROKEN = ("train/cat/2.png", "train/dog/5.png", "train/dog/6.png", "val/dog/1.png")
SLOW_LOADER = pytest.param(3, 64, marks=pytest.mark.slow)
REPLACED = {2: 3, 13: 15, 14: 15}  # indices among 2 x 8 training images


def write_broken(root: Path, broken: tuple[str, ...] = BROKEN) -> Path:
    write_images(root, ["cat", "dog"], train=8, held_out=4)
    for name in broken:
        (root / name).write_bytes((root / name).read_bytes()[:200])
    return root


def folder_config(root: Path, *overrides: str) -> Config:
    data = ["dataset=image_folder", f"dataset.root={root}", "dataset.broken_images=skip"]
    return config_of(*data, "recipe.batch_size=5", *overrides)


def epoch_of(config: Config, epoch: int) -> tuple[list[Any], list[Any]]:
    """Loads the batches of a training epoch and of the held-out images."""
    source = build_source(config.dataset)
    batches = TrainingBatches(len(source.train), 5, config.seed)
    batches.start_at(epoch, 0)
    training = build_training_loader(config, source, batches, False)
    return list(training), list(build_evaluation_loader(config, source.held_out, 0, 1, False))


def expected_batches(config: Config, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Returns batches built image by image: the next readable file replaces a broken one."""
    files = load_source("image_folder", config.dataset.root, None).train
    files = files.take([REPLACED.get(index, index) for index in range(len(files))])
    images = build_training_images(config, files)
    batches = TrainingBatches(len(files), 5, config.seed)
    batches.start_at(epoch, 0)
    loaded = ([images[key] for key in batch] for batch in batches)
    return [(torch.stack([x for x, _ in k]), torch.tensor([y for _, y in k])) for k in loaded]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("workers", "memory"), [(0, 0), (0, 64), (1, 0), SLOW_LOADER])
def test_the_next_image_replaces_a_broken_one_for_any_loader(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, memory: int
):
    root = write_broken(tmp_path / "images")
    config = folder_config(root, f"dataset.workers={workers}", f"dataset.memory_mib={memory}")
    for epoch in (0, 1):
        training, held_out = epoch_of(config, epoch)
        for ours, expected in zip(training, expected_batches(config, epoch), strict=True):
            assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
        assert [targets.tolist() for _, targets in held_out] == [[0, 0, 0, 0, 1], [-1, 1, 1]]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(BROKEN)
    for name in BROKEN:
        assert sum(f"warning: left out: {root / name}: no readable" in line for line in lines) == 1


def test_evaluation_counts_readable_images_only():
    model = torch.nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[1.0], [0.0]])  # predicts class 0
    batches = [[torch.ones(3, 1), torch.tensor(classes)] for classes in ([0, -1, 1], [0, 0, -1])]
    found = evaluate(model, lambda x: x, batches, World(0, 1, torch.device("cpu")), "float32")
    losses = -torch.tensor([1.0, 0.0]).log_softmax(0)
    assert found["top1"] == 75 and found["broken_images"] == 2
    assert found["eval_loss"] == pytest.approx(float((3 * losses[0] + losses[1]) / 4))


def train(command: Command, root: Path, name: str, *overrides: str) -> Any:
    small = [x for x in SMALL if "limit" not in x and "batch_size" not in x]
    data = ["dataset=image_folder", f"dataset.root={root}", "dataset.workers=0"]
    return command("train", f"name={name}", *data, *small, "recipe.batch_size=5", *overrides)


@pytest.mark.parametrize(
    "settings",
    [
        ["recipe.batch_size=4", "recipe.grad_accum_steps=4"],
        pytest.param(["recipe.batch_size=1"], marks=pytest.mark.slow),
        pytest.param(["devices=2", "recipe.batch_size=2"], marks=pytest.mark.slow),
    ],
)
def test_one_broken_image_of_twelve_ends_no_run(
    command: Command, tmp_path: Path, settings: list[str]
):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=6, held_out=2)
    (root / "train" / "dog" / "3.png").write_bytes(b"")
    result = train(command, root, "mine", "dataset.broken_images=skip", *settings)
    assert result.status == 0, result.err
    assert "devices=2" in settings or result.err.count("warning: left out: ") == 1
    assert "training: cct_2_3x2 on 12 images of image_folder, 2 classes, 4 held out" in result.out
    steps = RunFolder(tmp_path / "outputs" / "mine").read_summary()
    assert steps["images"] == 2 * 12 and steps["broken_images"] == 0


def test_run_counts_skipped_images_across_an_interruption(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    root, skip = write_broken(tmp_path / "images"), "dataset.broken_images=skip"
    refused = train(command, root, "refused")
    assert refused.status == 2 and "train/cat/2.png: no readable image" in refused.lines[-1]
    assert "; 3 of 16 images of this folder are broken; dataset.broken_images=skip" in refused.err
    undisturbed = train(command, root, "undisturbed", skip)
    assert undisturbed.status == 0 and undisturbed.err.count("warning: left out: ") == len(BROKEN)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6, KeyboardInterrupt())
        assert train(command, root, "halves", skip).status == 130
    later = train(command, root, "halves", skip, "resume=auto", "dataset.memory_mib=0")
    assert later.status == 0
    runs = [RunFolder(tmp_path / "outputs" / name) for name in ("undisturbed", "halves")]
    assert_same_result(*runs)
    assert [run.read_summary()["broken_images"] for run in runs] == [1, 1]
    assert later.err.count("warning: left out: ") == 0  # by this process
    _open.cache_clear()
    evaluated = command("eval", f"run={runs[0].path}", "devices=2", "dataset.memory_mib=0")
    assert evaluated.status == 0 and evaluated.err.count("warning: left out: ") == 1  # by rank 1
    assert '"images": 7' in (runs[0].path / "evaluation-last.json").read_text()
    runs[0].config_path.write_text(runs[0].config_path.read_text().replace(": skip", ": refuse"))
    monkeypatch.setattr("sys.argv", ["look.py", str(runs[0].path), "--saliency"])
    capfd.readouterr()
    with pytest.raises(SystemExit, match="1"):
        look.main()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("look.py: ") and "no readable image" in line


@pytest.mark.parametrize(
    ("split", "spared", "status", "message"),
    [
        ("train", (), 2, "no readable image among the 16 training images"),
        ("train", ("cat/3",), 0, ""),
        ("val", (), 1, "none of the images is readable"),
    ],
)
def test_too_few_readable_images_are_refused_in_one_line(
    command: Command, tmp_path: Path, split: str, spared: tuple[str, ...], status: int, message: str
):
    root = write_broken(tmp_path / "images", ())
    for path in (root / split).rglob("*.png"):
        if str(path.relative_to(root / split).with_suffix("")) not in spared:
            path.write_bytes(b"")
    result = train(command, root, "mine", "dataset.broken_images=skip")
    assert result.status == status and message in (result.lines or [""])[-1]
    _open.cache_clear()


def test_skipping_needs_a_folder_and_changes_the_identity(tmp_path: Path):
    root = write_broken(tmp_path / "images")
    skips, refuses = folder_config(root), folder_config(root, "dataset.broken_images=refuse")
    assert run_hash(skips) != run_hash(refuses)
    with pytest.raises(UserError, match=r"dataset\.broken_images=skip: digits has no image files"):
        config_of("dataset.broken_images=skip")
