"""Builds transforms, loaders and inputs from the configuration."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from timm.data import create_transform
from torch import Tensor

from reproduction.config import CONF_DIR, Config, Dataset
from reproduction.data.folders import DATASETS
from reproduction.data.images import (
    CHANNELS,
    LEFT_OUT,
    SKIPPING,
    ImageSource,
    cache_in_memory,
    load_image,
    to_rgb,
)
from reproduction.data.inputs import (
    Erasing,
    TrainingInputs,
    build_input_mixing,
    build_normalize,
)
from reproduction.data.loaders import (
    EvaluationImages,
    TrainingBatches,
    TrainingImages,
    Transform,
    data_loader,
    evaluation_batches,
)
from reproduction.data.sources import Source
from reproduction.system.errors import UserError

Statistics = tuple[list[float], list[float]]
Loader = Iterable[list[Tensor]]  # images, classes


def build_training_images(config: Config, source: ImageSource) -> TrainingImages:
    """Returns the training images with timm's augmentation: `3 s s` uint8."""
    settings, size = config.recipe.transforms, config.model.image_size
    try:
        transform = create_transform(
            (3, size, size),
            is_training=True,
            scale=(settings.scale[0], settings.scale[1]),
            ratio=(settings.ratio[0], settings.ratio[1]),
            interpolation=settings.interpolation,
            hflip=settings.hflip,
            color_jitter=settings.color_jitter,  # ignored by timm if auto-augment is set
            auto_augment=settings.auto_augment,
            mean=tuple(config.dataset.normalization[0]),  # fill colour of auto-augment
            normalize=False,
        )
    except (ValueError, AssertionError, NotImplementedError) as error:  # invalid policy
        policy = settings.auto_augment
        raise UserError(f"recipe.transforms.auto_augment={policy}: timm refuses it") from error
    return TrainingImages(source, transform, config.seed)


def build_evaluation_transform(config: Config) -> Transform:
    """Returns PIL image -> `3 s s` uint8; centre crop of `eval_crop_pct` of the shorter side."""
    settings = config.preprocessing
    return create_transform(
        (3, settings["image_size"], settings["image_size"]),
        is_training=False,
        interpolation=settings["interpolation"],
        crop_pct=settings["crop_pct"],
        normalize=False,
    )


@dataclass(frozen=True)
class InputTransform:
    """PIL image of any mode, or a path -> the model's input in evaluation, `3 s s` float32.

    A list of n of them gives `n 3 s s`. PIL images are turned as their EXIF orientation says if
    `upright`, files always. RuntimeError names a broken file; ValueError for a PIL image of more
    than 8 bits a channel.
    """

    crop: Transform
    mean: list[float]
    std: list[float]
    upright: bool

    def __call__(self, images: Any) -> Tensor:
        if isinstance(images, list | tuple):
            return torch.stack([self(image) for image in images])
        is_path = isinstance(images, str | os.PathLike)
        rgb = load_image(os.fspath(images), True) if is_path else to_rgb(images, self.upright)
        return build_normalize(self.mean, self.std, "cpu")(self.crop(rgb))


def build_input_transform(config: Config) -> InputTransform:
    """Returns the transform of single images; the function of own data has turned them, or not."""
    upright = config.dataset.name != "custom"
    return InputTransform(
        build_evaluation_transform(config), *config.dataset.normalization, upright
    )


def build_training_loader(
    config: Config, source: Source, batches: TrainingBatches, pin: bool
) -> Loader:
    """Returns the loader of this rank's batches. Caches the images first, see `memory_mib`."""
    images = build_training_images(config, _cached(config.dataset, source.train))
    return data_loader(images, batches, config.dataset.workers, pin)


def build_evaluation_loader(
    config: Config, source: ImageSource, rank: int, ranks: int, pin: bool
) -> Loader:
    """Returns the loader of this rank's share of the images of `source`, cached likewise."""
    images = EvaluationImages(_cached(config.dataset, source), build_evaluation_transform(config))
    size = max(1, config.recipe.batch_size // ranks)
    batches = evaluation_batches(len(source), size, rank, ranks)
    return data_loader(images, batches, config.dataset.workers, pin)


def measure_statistics(loader: Loader, over_ranks: Callable[[Tensor], Tensor]) -> Statistics:
    """Returns mean and deviation per channel over all pixels of this and other ranks' images.

    Pixels are in 0..1, the numbers have four digits. Raises UserError for a constant channel.
    """
    sums = torch.zeros(3, CHANNELS, dtype=torch.float64)  # holds integers exactly
    for images, targets in loader:
        pixels = images[targets != LEFT_OUT].transpose(0, 1).flatten(1).double()  # c n
        number = pixels.new_full((CHANNELS,), pixels.shape[1])
        sums += torch.stack([number, pixels.sum(dim=1), pixels.square().sum(dim=1)])
    number, total, squares = over_ranks(sums)
    mean, std = total / number / 255, (squares / number - (total / number).square()).sqrt() / 255
    found = [[round(x, 4) for x in values.tolist()] for values in (mean, std)]
    if 0.0 in found[1]:
        reason = "has no deviation over the training images, set dataset.mean and dataset.std"
        raise UserError(f"dataset.mean=auto: a channel {reason}")
    return found[0], found[1]


def _cached(dataset: Dataset, images: ImageSource) -> ImageSource:
    """Decodes images that fit into `memory_mib`. Raises UserError for a broken file."""
    if not dataset.memory_mib:
        return images
    try:
        return cache_in_memory(images, dataset.memory_mib, max(1, dataset.workers))
    except RuntimeError as error:
        raise UserError(f"{error}; {SKIPPING}") from error


def build_training_inputs(config: Config, device: torch.device) -> TrainingInputs:
    """Returns normalisation, input mixup, CutMix and random erasing of recipe and stack."""
    transforms = config.recipe.transforms
    normalize = build_normalize(*config.dataset.normalization, device)
    erasing = None
    if transforms.erasing_prob > 0:
        erasing = Erasing(
            transforms.erasing_prob, transforms.erasing_mode, transforms.erasing_count, device
        )
    return TrainingInputs(normalize, build_input_mixing(config.augmentation), erasing)


def statistics_warning(dataset: Dataset, pretrained: Statistics | None) -> str | None:
    """Returns a warning if mean and std match neither the data set nor the pretrained weights."""
    if dataset.measures:
        return None
    known = [] if pretrained is None else [pretrained]
    if DATASETS[dataset.name].sizes is not None:  # others have no statistics of their own
        own = yaml.safe_load((CONF_DIR / "dataset" / f"{dataset.name}.yaml").read_text())
        known.append((own["mean"], own["std"]))
    if not known or (dataset.mean, dataset.std) in known:
        return None
    expected = " or ".join(f"{mean} / {std}" for mean, std in known)
    return (
        f"warning: dataset.mean={dataset.mean} dataset.std={dataset.std} match neither "
        f"{dataset.name} nor pretrained weights, expected {expected}"
    )
