"""Data sets, batches and loaders."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reproduction import load_run
from reproduction.data import loaders
from reproduction.data.build import (
    build_evaluation_loader,
    build_evaluation_transform,
    build_training_images,
    measure_statistics,
    statistics_warning,
)
from reproduction.data.loaders import (
    TrainingBatches,
    data_loader,
)
from reproduction.data.seeding import Purpose, seeded
from reproduction.data.sources import build_source
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import hash_of, run_hash
from reproduction.system.errors import UserError
from reproduction.training import evaluate
from reproduction.training.distributed import World
from reproduction.training.loop import Trainer
from reproduction.training.train import _with_statistics
from tests.reproduction.conftest import SMALL, Command, config_of, load_source, write_images
from tests.reproduction.test_training import assert_same_result

pytestmark = pytest.mark.all_digits


def a_loader(workers: int) -> torch.utils.data.DataLoader[Any]:
    config = config_of(*SMALL)
    images = build_training_images(config, load_source("digits", None, None).train)
    return data_loader(images, TrainingBatches(60, 20, seed=0), workers, pin_memory=False)


def test_workers_send_batches_from_a_long_temporary_folder(tmp_path: Path, monkeypatch):
    """The paths of sockets in it would be too long."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    loader = a_loader(workers=1)
    loader.timeout = 20  # seconds: else a fault would hang the test
    assert [len(targets) for _, targets in loader] == [20, 20, 20]
    monkeypatch.setattr(loaders, "SHORT_FOLDER", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=rf"TMPDIR={folder}: 75 bytes at most.*workers=0"):
        a_loader(workers=1)
    a_loader(workers=0)


def test_workers_are_refused_without_shared_memory(monkeypatch):
    monkeypatch.setattr(loaders, "disk_usage", lambda path: SimpleNamespace(free=2**16))
    with pytest.raises(UserError, match=r"dev.shm: .* 65536 bytes of shared memory.*workers=0"):
        a_loader(workers=2)
    a_loader(workers=0)


def test_digits_are_split_by_class():
    source = load_source("digits", None, None)
    assert (len(source.train), len(source.held_out), len(source.classes)) == (1437, 360, 10)
    counts = np.bincount(source.held_out.targets)
    assert counts.min() >= 34 and counts.max() <= 37
    image, target = source.train[0]
    assert image.mode == "RGB" and image.size == (8, 8)
    assert target == source.train.targets[0]
    assert np.asarray(image).max() == 255


def test_limit_keeps_classes_balanced():
    source = load_source("digits", None, 150)
    assert np.bincount(source.train.targets).tolist() == [15] * 10
    assert [source.train[i][1] for i in range(150)] == source.train.targets
    assert len(source.held_out) == 360


def test_eval_limit_keeps_classes_balanced(command: Command, tmp_path: Path):
    source = load_source("digits", None, None, eval_limit=30)
    assert len(source.train) == 1437 and np.bincount(source.held_out.targets).tolist() == [3] * 10
    with pytest.raises(UserError, match=r"eval_limit=9: there are 360 images of 10 classes"):
        load_source("digits", None, None, eval_limit=9)
    assert run_hash(config_of("dataset.eval_limit=30")) != run_hash(config_of())
    trained = command("train", "name=mine", "dataset.eval_limit=20", *SMALL)
    assert "60 images of digits, 10 classes, 20 held out" in trained.out
    assert "on 20 images of digits" in command("eval", "run=outputs/mine").out
    assert "on 360 images" in command("eval", "run=outputs/mine", "dataset.eval_limit=null").out
    assert len(list((tmp_path / "outputs/mine").glob("evaluation-last*.json"))) == 2


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_image_folder_classes_are_folder_names(tmp_path, held_out):
    root = write_images(tmp_path, ["cat", "ant", "bee"], train=2, held_out=1)
    (root / "val").rename(root / held_out)
    source = load_source("image_folder", str(root), None)
    assert source.classes == ["ant", "bee", "cat"]
    assert source.train.targets == [0, 0, 1, 1, 2, 2]
    assert len(source.held_out) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("images", "batch"), [(100, 12), (97, 12), (25, 12), (8, 12), (24, 12), (1437, 64)]
)
def test_training_batches_give_each_image_to_one_rank_once(images, batch, ranks):
    shares = [TrainingBatches(images, batch, seed=0, rank=r, ranks=ranks) for r in range(ranks)]
    per_rank = [list(share) for share in shares]
    seen = [index for share in per_rank for keys in share for _, index in keys]
    assert sorted(seen) == list(range(images))
    assert len({len(share) for share in per_rank}) == 1
    assert all(len(keys) >= 1 for share in per_rank for keys in share)
    sizes = [shares[0].global_size(i) for i in range(len(shares[0]))]
    assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1
    for i in range(len(shares[0])):
        assert sum(len(share[i]) for share in per_rank) == shares[0].global_size(i)


def test_global_training_batches_do_not_depend_on_the_number_of_ranks():
    alone = list(TrainingBatches(50, 12, seed=3))
    shares = [list(TrainingBatches(50, 12, seed=3, rank=r, ranks=2)) for r in range(2)]
    for i, batch in enumerate(alone):
        assert batch == [*shares[0][i], *shares[1][i]]


def test_training_batches_depend_on_seed_and_epoch():
    batches = TrainingBatches(50, 12, seed=0)
    first = list(batches)
    assert list(batches) == first
    batches.epoch = 1
    second = list(batches)
    images = [[index for batch in epoch for _, index in batch] for epoch in (first, second)]
    assert images[0] != images[1] and sorted(images[0]) == sorted(images[1])
    assert {epoch for batch in second for epoch, _ in batch} == {1}
    assert list(TrainingBatches(50, 12, seed=1)) != first


def test_training_batches_refuse_too_few_images():
    with pytest.raises(UserError, match="devices=4"):
        TrainingBatches(3, 8, seed=0, ranks=4)
    assert len(TrainingBatches(7, 1, seed=0)) == 7


def epoch_of_images(workers: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    config = config_of("recipe=cifar_cct", "dataset.limit=24", f"seed={seed}")
    source = load_source("digits", None, 24)
    images = build_training_images(config, source.train)
    batches = TrainingBatches(24, 10, seed)
    batches.epoch = epoch
    return torch.cat([x for x, _ in data_loader(images, batches, workers, pin_memory=False)])


def test_augmented_images_do_not_depend_on_workers_or_global_generators():
    alone = epoch_of_images(workers=0)
    torch.rand(3)
    np.random.rand(3)
    assert torch.equal(alone, epoch_of_images(workers=0))
    assert torch.equal(alone, epoch_of_images(workers=2))
    assert not torch.equal(alone, epoch_of_images(workers=0, seed=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_global_generators_unchanged(workers: int):
    def draw() -> list[Any]:
        return [random.random(), np.random.normal(), torch.rand(4).tolist()]

    load_source("digits", None, 24)  # scikit-learn draws when it is imported
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = [draw(), draw()]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = draw()
    epoch_of_images(workers)
    assert [before, draw()] == expected


# Fails while a traceback holds a loader's iterator, as can happen in ranks.
HOLDING = """
from reproduction.data.loaders import EvaluationImages, data_loader, evaluation_batches

def hold_workers():
    images = EvaluationImages([(0, 0)] * 9, lambda image: image)
    held = iter(data_loader(images, evaluation_batches(9, 2), workers=1, pin_memory=False))
    next(held)
    raise RuntimeError("held")

hold_workers()
"""


@pytest.mark.slow
def test_process_exits_while_a_traceback_holds_its_workers():
    command = [sys.executable, "-c", HOLDING]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1 and result.stderr.endswith("RuntimeError: held\n")


def test_dead_worker_ends_a_run_that_can_resume(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    args = [*SMALL, "augmentation=[mixup,cutmix,htm,vtm]", "dataset.workers=1"]
    assert command("train", "name=undisturbed", *args).status == 0

    def kill_in(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Kills the newest worker at the second call of `name`."""
        original, calls = getattr(owner, name), iter(range(99))

        def killing(*args: Any) -> Any:
            if next(calls) == 1:
                last = max(multiprocessing.active_children(), key=lambda child: child.pid or 0)
                os.kill(last.pid or 0, signal.SIGKILL)
                time.sleep(1)  # until torch notices
            return original(*args)

        patch.setattr(owner, name, killing)

    for owner, name in ((Trainer, "train_step"), (evaluate, "_count")):
        with monkeypatch.context() as patch:
            kill_in(patch, owner, name)
            start = time.monotonic()
            result = command("train", "name=mine", "resume=auto", *args)
        assert result.status == 1 and time.monotonic() - start < 30
        assert len(result.lines) == 1
        assert "is killed by signal: Killed: memory may have run out" in result.lines[-1]
        assert "try a lower dataset.workers" in result.lines[-1]
        run = RunFolder(tmp_path / "outputs/mine")
        assert run.read_summary()["status"] == "failed"
    assert command("train", "name=mine", "resume=auto", *args).status == 0
    assert_same_result(RunFolder(tmp_path / "outputs/undisturbed"), run)


def test_augmented_images_do_not_depend_on_their_batch():
    config = config_of("recipe=cifar_cct", "seed=3")
    source = load_source("digits", None, None)
    images = build_training_images(config, source.train)
    batch = images.__getitems__([(2, 7), (2, 5), (4, 7)])
    for (epoch, index), (image, target) in zip([(2, 7), (2, 5), (4, 7)], batch, strict=True):
        with seeded(Purpose.AUGMENT, 3, epoch, index):
            expected = images.transform(source.train[index][0])
        assert torch.equal(image, expected) and target == source.train.targets[index]
        assert torch.equal(images[(epoch, index)][0], expected)


@pytest.mark.parametrize(
    ("overrides", "pretrained", "warned"),
    [
        (["dataset=cifar10"], None, False),
        (["dataset=cifar10", "dataset.mean=[0.485,0.456,0.406]"], None, True),
        (
            ["dataset=cifar10", "dataset.mean=[0.5,0.5,0.5]", "dataset.std=[0.5,0.5,0.5]"],
            ([0.5] * 3, [0.5] * 3),
            False,
        ),
        (["dataset.mean=[0.1,0.1,0.1]"], ([0.5] * 3, [0.5] * 3), True),
    ],
)
def test_statistics_warning_for_unexpected_mean_and_std(overrides, pretrained, warned):
    line = statistics_warning(config_of(*overrides).dataset, pretrained)
    assert (line is not None) == warned
    if line is not None:
        assert "\n" not in line and "dataset.mean" in line


def test_statistics_warning_accepts_any_statistics_of_an_image_folder(tmp_path):
    root = write_images(tmp_path, ["a", "b"], train=1, held_out=1)
    config = config_of("dataset=image_folder", f"dataset.root={root}", "dataset.mean=[0.1,0.2,0.3]")
    assert statistics_warning(config.dataset, None) is None
    assert statistics_warning(config.dataset, ([0.5] * 3, [0.5] * 3)) is not None


def test_configured_statistics_of_digits_equal_the_pixels():
    source = load_source("digits", None, None)
    config = config_of()
    pixels = np.stack([np.asarray(source.train[i][0]) for i in range(len(source.train))]) / 255
    assert pixels.mean() == pytest.approx(config.dataset.mean[0], abs=0.005)
    assert pixels.std() == pytest.approx(config.dataset.std[0], abs=0.005)


def test_run_measures_mean_and_deviation_once_and_keeps_them(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = write_images(tmp_path / "images", ["dark", "light"], train=4, held_out=1, size=48)
    folder = ["dataset=image_folder", f"dataset.root={root}", "dataset.workers=0"]
    auto = [*folder, "dataset.mean=auto", "model.image_size=24", "recipe.batch_size=2"]
    small = ["model.embed_dim=16", "dataset.validation=0.25", "recipe.epochs=1", "device=cpu"]
    result = command("train", "name=mine", *auto, *small)
    assert result.status == 0, result.err
    run = RunFolder(tmp_path / "outputs" / "mine")
    kept = run.read_config()["dataset"]
    assert (kept["mean"], kept["std"]) == ("auto", "auto")
    mean, std = kept["statistics"]
    assert f"dataset: mean = {mean}, std = {std}, of the training images" in result.out
    config = config_of(*auto, *small)
    source, crop = build_source(config.dataset), build_evaluation_transform(config)
    images = source.train
    seen = np.stack([np.asarray(crop(images[i][0])) for i in range(len(images))]) / 255
    assert len(seen) == 6  # not those for validation
    for found, expected in ((mean, seen.mean((0, 2, 3))), (std, seen.std((0, 2, 3)))):
        assert found == [round(x, 4) for x in expected.tolist()]

    def again(*args: Any) -> None:
        raise AssertionError("is measured again")

    monkeypatch.setattr("reproduction.training.train.measure_statistics", again)
    resumed = _with_statistics(
        replace(config, name="mine"), source, World(0, 1, torch.device("cpu"))
    )
    assert resumed.dataset.normalization == (mean, std)
    assert run_hash(config) == hash_of(run.read_config())
    assert command("eval", "run=outputs/mine", *folder).status == 0
    assert (
        json.loads((run.path / "evaluation-last.json").read_text())["top1"]
        == (run.read_summary()["top1_last"])
    )
    pixels = torch.tensor(seen[0]).float()
    normal = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(load_run(run.path).transform(images[0][0]), normal, atol=1e-5)


def test_measured_statistics_are_those_of_all_ranks():
    config, images = config_of(), load_source("digits", None, 100).train
    each: list[torch.Tensor] = []
    for rank in range(3):
        loader = build_evaluation_loader(config, images, rank, 3, False)
        measure_statistics(loader, lambda sums: each.append(sums) or sums)
    whole = measure_statistics(build_evaluation_loader(config, images, 0, 1, False), torch.clone)
    assert measure_statistics([], lambda sums: sum(each, sums)) == whole
    with pytest.raises(UserError, match=r"^dataset\.mean=auto: a channel has no deviation"):
        measure_statistics([[torch.ones(2, 3, 8, 8), torch.zeros(2)]], torch.clone)


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_evaluation_loaders_give_each_image_to_one_rank_once(ranks):
    source = load_source("digits", None, None)
    config = config_of(f"recipe.batch_size={7 * ranks}")
    loaders = [
        build_evaluation_loader(config, source.held_out, r, ranks, False) for r in range(ranks)
    ]
    seen = [index for loader in loaders for batch in loader.batch_sampler for index in batch]
    assert sorted(seen) == list(range(360))
    assert sum(len(targets) for loader in loaders for _, targets in loader) == 360
