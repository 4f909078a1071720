"""The typed schema. Values live in conf/, those of HTM, VTM and manifold mixup in the library."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from reproduction.config.fields import (
    FORBID,
    Amount,
    AutoAugment,
    Channels,
    Count,
    Crop,
    Few,
    Flag,
    Images,
    Positive,
    Processes,
    Range,
    Ranks,
    Rate,
    RunName,
    Scales,
    Share,
    Whole,
)
from reproduction.config.model import AnyModel
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import built

CONF_DIR = Path(__file__).resolve().parents[3] / "conf"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Dataset:
    """Images, their statistics and how they are loaded."""

    name: Literal["digits", "cifar10", "cifar100", "imagenet1k", "image_folder"]
    root: str | None
    mean: Channels
    std: Scales
    limit: Count | None
    workers: Processes
    memory_mib: Whole | None
    broken_images: Literal["refuse", "skip"]

    @property
    def skips(self) -> bool:
        return self.broken_images == "skip"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class InputMix:
    """Input mixup or CutMix; the share of batches is split evenly when both are chosen."""

    alpha: Positive
    prob: Share


def _by_library(kind: Any) -> BeforeValidator:
    return BeforeValidator(partial(built, kind))


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Augmentation:
    """The stack: what is None is not in it. What acts inside the model is the library's own."""

    mixup: InputMix | None = None
    cutmix: InputMix | None = None
    manifold_mixup: Annotated[ManifoldMixup | None, _by_library(ManifoldMixup)] = None
    htm: Annotated[HTM | None, _by_library(HTM)] = None
    vtm: Annotated[VTM | None, _by_library(VTM)] = None

    @property
    def stack(self) -> list[str]:
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Transforms:
    """timm's image transforms; scale and ratio [1, 1] leave the whole of a square image."""

    scale: Range
    ratio: Range
    interpolation: Literal["random", "bilinear", "bicubic"]
    hflip: Share
    color_jitter: Amount
    auto_augment: AutoAugment | None
    erasing_prob: Share
    erasing_mode: Literal["const", "rand", "pixel"]
    erasing_count: Few
    eval_crop_pct: Crop


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Recipe:
    """Optimiser, schedule, precision and image transforms."""

    epochs: Count
    max_steps: Count | None
    batch_size: Images
    grad_accum_steps: Count
    optimizer: Literal["adamw", "sgd"]
    lr: Positive
    min_lr: Amount
    warmup_lr: Amount
    warmup_epochs: Whole
    cooldown_epochs: Whole
    schedule_step: Literal["epoch", "batch"]
    weight_decay: Amount
    momentum: Rate
    clip_grad_norm: Positive | None
    ema_decay: Rate | None
    label_smoothing: Rate
    precision: Literal["float32", "bf16", "float16"]
    non_finite: Literal["fail", "skip"]
    log_every: Count
    transforms: Transforms


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Checkpoint:
    """When a run is saved besides the ends of its epochs, and how many of its last states stay."""

    every_minutes: Positive | None = 10.0
    every_steps: Count | None = None
    keep: Count = 2


@dataclass(config=FORBID, frozen=True, kw_only=True)
class NoLogger:
    name: Literal["none"]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Wandb:
    name: Literal["wandb"]
    mode: Literal["online", "offline", "disabled"]
    project: str
    entity: str | None


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on."""

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    device: Literal["auto", "cpu", "cuda"]
    devices: Ranks
    restarts: Whole
    compile: Flag
    resume: Literal["never", "auto"]
    name: RunName | None
    output_root: Annotated[str, Field(min_length=1)]
    model: Annotated[AnyModel, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    checkpoint: Checkpoint = Checkpoint()  # eval.py writes none
    logger: Annotated[NoLogger | Wandb, Field(discriminator="name")]
