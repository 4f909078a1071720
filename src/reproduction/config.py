"""The typed schema. Values live in conf/; HTM, VTM and manifold mixup use the library's classes."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import LARGEST, built

ROOT = Path(__file__).resolve().parents[2]
CONF_DIR, TRAIN = ROOT / "conf", ROOT / "train.py"
SOURCES = "reproduction.data.sources"  # the module that opens the data sets
STACK = ("mixup", "cutmix", "manifold_mixup", "htm", "vtm")  # in order of application
FORBID = ConfigDict(extra="forbid")  # shared by all settings classes
LONGEST_NAME = 200  # bytes; most file systems allow 255
AUTO_AUGMENT = (
    r"(rand(-(n[0-9]{1,2}|(m|w|p|inc|mstd|mmax)[0-9.]{1,5}))+|original|originalr|v0|v0r|3a)"
)
HUGE = 10**9  # bound for counts that cost neither memory nor time


def folder_name(value: str) -> str:
    if not value.isprintable() or value.strip() != value or set(value) & set("/\\"):
        raise ValueError("must be a plain folder name without slashes")
    if value.startswith(".") or not 1 <= len(value.encode()) <= LONGEST_NAME:
        raise ValueError(f"must have 1 to {LONGEST_NAME} bytes and no leading dot")
    return value


def function_name(value: str) -> str:
    module, _, name = value.partition(":")
    if name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return value
    raise ValueError("must be package.module:function")


def number_as_text(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


def compile_mode(value: Any) -> Any:
    if type(value) is bool or value == "cuda-graph":
        return value
    raise ValueError("must be false, true or cuda-graph")


def auto_augment_policy(value: str) -> str:
    if re.fullmatch(AUTO_AUGMENT, value):
        return value
    raise ValueError("must be one of timm's policies, such as rand-m9-mstd0.5-inc1, or null")


Whole = Annotated[int, Field(strict=True, ge=0, le=HUGE)]
Count = Annotated[int, Field(strict=True, ge=1, le=HUGE)]
# Bounds: far above any sensible value, but low enough to fail before memory runs out.
Pixels = Annotated[int, Field(strict=True, ge=1, le=4096)]
Blocks = Annotated[int, Field(strict=True, ge=1, le=512)]
Width = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Images = Annotated[int, Field(strict=True, ge=1, le=10**6)]  # per batch
ProcessCount = Annotated[int, Field(strict=True, ge=0, le=1024)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=1024)]
Few = Annotated[int, Field(strict=True, ge=1, le=16)]
Amount = Annotated[float, Field(strict=True, ge=0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(strict=True, gt=0, le=64, allow_inf_nan=False)]
Crop = Annotated[float, Field(strict=True, ge=0.25, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Compile = Annotated[Flag | Literal["cuda-graph"], BeforeValidator(compile_mode)]
Mean = Annotated[float, Field(strict=True, ge=-1000, le=1000)]  # for pixel values in 0..1
Deviation = Annotated[float, Field(strict=True, ge=1e-6, le=1000)]
Channels = Annotated[list[Mean], Field(min_length=3, max_length=3)]
Scales = Annotated[list[Deviation], Field(min_length=3, max_length=3)]
Range = Annotated[list[Positive], Field(min_length=2, max_length=2)]
FolderName = Annotated[str, AfterValidator(folder_name)]
PathName = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
RunName = Annotated[str, BeforeValidator(number_as_text), AfterValidator(folder_name)]
FunctionName = Annotated[str, AfterValidator(function_name)]
AutoAugment = Annotated[str, AfterValidator(auto_augment_policy)]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Model:
    """Settings shared by all models."""

    name: FolderName
    image_size: Pixels
    weights: PathName | None


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Transformer(Model):
    """A plain sequence of blocks that supports HTM and VTM, with their default layers."""

    depth: Blocks
    attn_drop: Rate
    drop_path: Rate
    checkpoint_blocks: Flag = False
    htm_layer: Whole
    vtm_layer: Whole


@dataclass(config=FORBID, frozen=True, kw_only=True)
class CCT(Transformer):
    """A compact transformer (Hassani et al., 2021).

    CCT sets `conv_layers`, CVT sets `patch_size`, and ViT-Lite is CVT with a class token.
    """

    family: Literal["cct"]
    embed_dim: Width
    num_heads: Width
    mlp_ratio: Ratio
    conv_layers: Few | None
    patch_size: Pixels | None
    positional_embedding: Literal["learnable", "sine"]
    pooling: Literal["sequence", "class_token"]
    drop: Rate

    @property
    def tokens(self) -> int:
        """The number of spatial tokens. Each conv layer is followed by pooling with stride 2."""
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
    """A vision transformer from timm; `architecture` is its timm name.

    Dropout follows timm: `pos_drop_rate` applies after the position embedding, `proj_drop_rate`
    after the attention output projection and twice in each MLP. `mlp_drop_rate` overrides
    `proj_drop_rate` in the MLPs if set.
    """

    family: Literal["vit"]
    architecture: str
    patch_size: Pixels
    global_pool: Literal["token", "avg", "map"]
    pretrained: str | None
    pos_drop_rate: Rate
    proj_drop_rate: Rate
    mlp_drop_rate: Rate | None

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def has_class_token(self) -> bool:
        return self.global_pool == "token"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Library(Model):
    """Any other model from timm or torchvision; `architecture` is its name in that package."""

    family: Literal["library"]
    package: Literal["timm", "torchvision"]
    architecture: str
    options: dict[str, Any] = Field(default_factory=dict)
    stem: Literal["imagenet", "cifar"]


AnyModel = CCT | ViT | Library


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Dataset:
    """A data set, its normalisation statistics and loading options.

    The function `source` opens it; its arguments are `options`, and `root` unless this is null.
    """

    name: FolderName
    root: PathName | None = None
    mean: Channels
    std: Scales
    limit: Count | None
    eval_limit: Count | None = None
    workers: ProcessCount = 0
    memory_mib: Whole | None = None
    validation: Rate = 0.0
    validation_seed: Whole = 0
    source: FunctionName
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether a function of yours opens it."""
        return not self.source.startswith(f"{SOURCES}:")


@dataclass(config=FORBID, frozen=True, kw_only=True)
class InputMix:
    """Input mixup or CutMix. With both, a fair coin picks one of them for each batch."""

    alpha: Positive
    prob: Fraction


@dataclass(config=FORBID, frozen=True, kw_only=True)
class CutMix(InputMix):
    """`labels=attention` weighs the classes by attention, as TransMix does, else by area."""

    labels: Literal["area", "attention"] = "area"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Augmentation:
    """The augmentation stack; None disables a component.

    `off_epoch` is the first epoch without mixing, counted from 0, as in timm's training script.
    """

    off_epoch: Count | None = None
    mixup: InputMix | None = None
    cutmix: CutMix | None = None
    manifold_mixup: Annotated[
        ManifoldMixup | None, BeforeValidator(partial(built, ManifoldMixup))
    ] = None
    htm: Annotated[HTM | None, BeforeValidator(partial(built, HTM))] = None
    vtm: Annotated[VTM | None, BeforeValidator(partial(built, VTM))] = None

    @property
    def stack(self) -> list[str]:
        return [name for name in STACK if getattr(self, name) is not None]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Transforms:
    """Settings of timm's image transforms. Scale and ratio [1, 1] keep a square image uncropped."""

    scale: Range
    ratio: Range
    interpolation: Literal["random", "bilinear", "bicubic"]
    hflip: Fraction
    color_jitter: Amount
    auto_augment: AutoAugment | None
    erasing_prob: Fraction
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
    tf32: Flag
    log_every: Count
    evaluate_every: Count
    transforms: Transforms


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Checkpoint:
    """How often to save besides the end of the run, and how many checkpoints to keep.

    Without `every_epochs`, the end of an epoch is saved if that takes at most 5 % of the time.
    """

    every_epochs: Count | None = None
    every_minutes: Positive | None = 10.0
    keep: Count = 2


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Wandb:
    mode: Literal["online", "offline", "disabled"] | None
    project: str | None
    entity: str | None


@dataclass(config=FORBID, frozen=True, kw_only=True)
class TensorBoard:
    flush_seconds: Positive


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Loggers:
    """Loggers that receive the lines of metrics.jsonl in addition to the file."""

    wandb: Wandb | None = None
    tensorboard: TensorBoard | None = None


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Config:
    """The complete configuration of a run."""

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Ranks
    compile: Compile = False
    resume: Literal["never", "auto"] = "never"
    name: RunName | None = None
    output_root: PathName = "outputs"
    model: Annotated[AnyModel, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    checkpoint: Checkpoint = Checkpoint()  # unused by eval.py
    logger: Loggers = Loggers()

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image becomes the model's input in evaluation, for timm's `create_transform`."""
        return {
            "image_size": self.model.image_size,
            "crop_pct": self.recipe.transforms.eval_crop_pct,
            "interpolation": "bicubic",
            "mean": self.dataset.mean,
            "std": self.dataset.std,
        }
