"""The typed schema. Values and defaults live in conf/; here only those of keys that came later."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from reproduction.fields import (
    FORBID,
    Amount,
    AutoAugment,
    Channels,
    Count,
    Crop,
    Few,
    Flag,
    Gain,
    Images,
    Positive,
    Processes,
    Range,
    Ranks,
    Rate,
    RunName,
    Scales,
    Share,
    Threshold,
    Whole,
)
from reproduction.model_config import AnyModel

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Dataset:
    """Images, their statistics and how they are loaded."""

    name: Literal["digits", "cifar10", "cifar100", "imagenet1k", "image_folder"]
    root: str | None
    mean: Channels
    std: Scales
    limit: Count | None
    workers: Processes
    memory_mib: Whole | None = None  # of folders alone; earlier runs say nothing of it
    broken_images: Literal["refuse", "skip"] = "refuse"

    @property
    def skips(self) -> bool:
        return self.broken_images == "skip"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class InputMix:
    """Input mixup or CutMix; the share of batches is split evenly when both are chosen."""

    alpha: Positive
    prob: Share


@dataclass(config=FORBID, frozen=True, kw_only=True)
class ManifoldMixup:
    alpha: Positive
    layers: Annotated[list[Whole], Field(min_length=1)]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class HTM:
    layer: Whole
    tau: Threshold
    rho: Gain
    score_loss_weight: Amount
    pooling: Literal["auto", "attention", "average", "class_token"]
    stop_gradient: Flag
    detector: Literal["attention", "gradient", "random"]
    rollout_steps: Whole
    ablate: Literal["none", "scorenet", "assignment", "tokens", "labels"]
    mask_rule: Literal["paper", "published"]
    order: Literal["in_place", "published"]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class VTM:
    layer: Count
    kappa: Count
    class_token_offset: Literal["paper", "published"]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Augmentation:
    """The stack: what is None is not in it."""

    mixup: InputMix | None = None
    cutmix: InputMix | None = None
    manifold_mixup: ManifoldMixup | None = None
    htm: HTM | None = None
    vtm: VTM | None = None

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
    grad_accum_steps: Count = 1
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
    ema_decay: Rate | None = None
    label_smoothing: Rate
    precision: Literal["float32", "bf16", "float16"]
    non_finite: Literal["fail", "skip"] = "fail"
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
    restarts: Whole = 0
    compile: Flag = False  # which older runs did not save
    resume: Literal["never", "auto"]
    name: RunName | None
    output_root: Annotated[str, Field(min_length=1)]
    model: Annotated[AnyModel, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    checkpoint: Checkpoint = Checkpoint()  # which older runs did not save
    logger: Annotated[NoLogger | Wandb, Field(discriminator="name")]
