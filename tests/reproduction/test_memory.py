"""Small image folders are held in memory; of larger ones workers share the names."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from reproduction.config import Config
from reproduction.data import images
from reproduction.data.build import build_evaluation_loader, build_training_loader
from reproduction.data.images import ArrayImages, FileImages, cache_in_memory
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import Source
from reproduction.runs.identity import run_hash
from reproduction.system.errors import UserError
from tests.reproduction.conftest import config_of, load_source, write_images

TWO_FIT = 400  # width in pixels of images of which two fit into 1 MiB


def write_all_kinds(root: Path) -> Path:
    """Writes images of several sizes, modes and formats."""
    rng = np.random.default_rng(0)
    shapes = {"L": (20, 30), "RGB": (32, 40, 3), "RGBA": (25, 24, 4), "LA": (40, 21, 2)}
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for mode, shape in shapes.items():
                image = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
                image.save(folder / f"{mode}.png")
            image.convert("RGB").save(folder / "photo.jpg")
            image.convert("RGB").quantize(8).save(folder / "palette.png", transparency=3)
    return root


def folder_config(root: Path, *overrides: str) -> Config:
    base = ["dataset=image_folder", f"dataset.root={root}", "recipe=cifar_cct", "model=cct_7_3x1"]
    return config_of(*base, *overrides)


def loaded(config: Config, source: Source, meanwhile: Callable[[], object]) -> list[torch.Tensor]:
    """Loads two training epochs and the held-out images; first calls `meanwhile`."""
    batches = TrainingBatches(len(source.train), 5, config.seed)
    loader = build_training_loader(config, source, batches, False)
    evaluation = build_evaluation_loader(config, source.held_out, 0, 1, False)
    meanwhile()
    tensors = []
    for epoch in range(2):
        batches.start_at(epoch, 0)
        tensors += [tensor for batch in loader for tensor in batch]
    return tensors + [tensor for batch in evaluation for tensor in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_in_memory_equal_those_of_files(tmp_path: Path, workers: int):
    root = write_all_kinds(tmp_path / "images")
    config = folder_config(root, f"dataset.workers={workers}")
    source = load_source("image_folder", str(root), None)
    without = dataclasses.replace(config.dataset, memory_mib=0)
    from_files = loaded(dataclasses.replace(config, dataset=without), source, lambda: None)
    from_memory = loaded(config, source, lambda: root.rename(tmp_path / "gone"))
    assert len(from_files) == 2 * (2 * 3 + 1)
    for ours, expected in zip(from_memory, from_files, strict=True):
        assert torch.equal(ours, expected)


def test_cache_in_memory_keeps_folders_that_fit_and_stops_reading_headers_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths: list[str] = []
    opened = images._open_image
    monkeypatch.setattr(images, "_open_image", lambda path: paths.append(path) or opened(path))
    root = write_images(tmp_path / "images", ["cat"], train=5, held_out=2, size=TWO_FIT)
    source = load_source("image_folder", str(root), None)
    assert cache_in_memory(source.train, 1, threads=1) is source.train
    assert len(paths) == 3
    assert isinstance(cache_in_memory(source.held_out, 1, threads=1), ArrayImages)


def test_cache_in_memory_decodes_only_images_in_use(tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=3, held_out=1)
    unused = root / "train" / "dog" / "2.png"
    unused.write_bytes(b"broken")
    few = cache_in_memory(load_source("image_folder", str(root), 4).train, 1, threads=2)
    assert isinstance(few, ArrayImages) and few.targets == [0, 1, 0, 1]
    with pytest.raises(RuntimeError, match=f"{unused}: no readable image"):
        cache_in_memory(load_source("image_folder", str(root), None).train, 1, threads=2)


def test_transforms_cannot_change_held_images(tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat"], train=1, held_out=1)
    images = cache_in_memory(load_source("image_folder", str(root), None).train, 1, threads=1)
    before = np.array(images[0][0])
    images[0][0].paste((1, 2, 3), (0, 0, 9, 9))
    assert np.array_equal(images[0][0], before)


def test_memory_option_needs_a_folder_and_keeps_the_identity(tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=1, held_out=1)
    assert run_hash(folder_config(root, "dataset.memory_mib=0")) == run_hash(folder_config(root))
    with pytest.raises(UserError, match=r"dataset\.memory_mib=5: digits is always held in memory"):
        config_of("dataset.memory_mib=5")


def test_workers_do_not_copy_the_names_of_files():
    """Of a list a worker copied 180 bytes a file, as it counts references to what it reads."""
    files = [
        (f"images/train/class_{i // 50:03d}/a photo \udcff {i:06d}.jpg", 7) for i in range(10**5)
    ]
    images = FileImages(files)
    assert [images.name(i) for i in (0, 99_999)] == [files[i][0] for i in (0, 99_999)]
    assert [*images.take([5, 2]).samples()] == [files[5], files[2]]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        before = _own_bytes()
        for index in range(len(images)):
            images.name(index), images.targets[index]
        os.write(writer, str(_own_bytes() - before).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(reader, 20)) < 60 * len(files)


def _own_bytes() -> int:
    """Returns what this process does not share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith("Private_Dirty"))
