"""The typed schema. Values and defaults live in conf/; here only those of keys that came later."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from reproduction.fields import (
    Amount,
    AutoAugment,
    Channels,
    Count,
    Flag,
    FolderName,
    Gain,
    Positive,
    Range,
    Rate,
    RunName,
    Scales,
    Share,
    Threshold,
    Whole,
)

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
FORBID = ConfigDict(extra="forbid")


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Model:
    """What every model has."""

    name: FolderName
    image_size: Count
    weights: str | None


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Transformer(Model):
    """A plain sequence of blocks, which HTM and VTM can serve; their default layers."""

    depth: Count
    drop: Rate
    attn_drop: Rate
    drop_path: Rate
    htm_layer: Whole
    vtm_layer: Whole


@dataclass(config=FORBID, frozen=True, kw_only=True)
class CCT(Transformer):
    """A compact transformer (Hassani et al., 2021): CCT with `conv_layers`, CVT with `patch_size`.

    ViT-Lite is CVT with a class token.
    """

    family: Literal["cct"]
    embed_dim: Count
    num_heads: Count
    mlp_ratio: Positive
    conv_layers: Count | None
    patch_size: Count | None
    positional_embedding: Literal["learnable", "sine"]
    pooling: Literal["sequence", "class_token"]

    @property
    def tokens(self) -> int:
        """Spatial tokens: patches, or every conv layer is followed by a pooling of stride 2."""
        if self.patch_size is not None:
            return (self.image_size // self.patch_size) ** 2
        size = self.image_size
        for _ in range(self.conv_layers or 0):
            size = (size + 1) // 2
        return size * size

    @property
    def has_class_token(self) -> bool:
        return self.pooling == "class_token"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class ViT(Transformer):
    """A vision transformer of timm's: `architecture` is its name there."""

    family: Literal["vit"]
    architecture: str
    patch_size: Count
    global_pool: Literal["token", "avg", "map"]
    pretrained: str | None

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def has_class_token(self) -> bool:
        return self.global_pool == "token"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Library(Model):
    """Any other model of timm's or torchvision's: `architecture` is its name there."""

    family: Literal["library"]
    package: Literal["timm", "torchvision"]
    architecture: str
    options: dict[str, Any]
    stem: Literal["imagenet", "cifar"]


AnyModel = CCT | ViT | Library


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Dataset:
    """Images, their statistics and how they are loaded."""

    name: Literal["digits", "cifar10", "cifar100", "imagenet1k", "image_folder"]
    root: str | None
    mean: Channels
    std: Scales
    limit: Count | None
    workers: Whole
    memory_mib: Whole | None = None  # of folders alone; earlier runs say nothing of it


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
    erasing_count: Count
    eval_crop_pct: Annotated[float, Field(strict=True, gt=0, le=1)]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Recipe:
    """Optimiser, schedule, precision and image transforms."""

    epochs: Count
    max_steps: Count | None
    batch_size: Count
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
    log_every: Count
    transforms: Transforms


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
    devices: Count
    compile: Flag = False  # which older runs did not save
    resume: Literal["never", "auto"]
    name: RunName | None
    output_root: Annotated[str, Field(min_length=1)]
    model: Annotated[AnyModel, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    logger: Annotated[NoLogger | Wandb, Field(discriminator="name")]
