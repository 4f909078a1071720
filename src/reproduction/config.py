"""The typed schema of a run, and its errors in one line. Values live in conf/.

HTM, VTM and manifold mixup are the library's classes, which check themselves.
"""

import os
import re
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from reproduction.system import UserError, in_one_line, local_ranks, usable_cores
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import LARGEST, built

ROOT = Path(__file__).resolve().parents[2]
CONF_DIR, TRAIN = ROOT / "conf", ROOT / "train.py"
SOURCES = "reproduction.data.sources"  # the module that opens the data sets
STACK = ("mixup", "cutmix", "manifold_mixup", "htm", "vtm")  # in order of application
FORBID = ConfigDict(extra="forbid")  # shared by all settings classes
LONGEST_NAME = 200  # bytes; most file systems allow 255
MOST_WORKERS = 16  # of dataset.workers=auto


def folder_name(value: str) -> str:
    is_plain = value.isprintable() and value.strip() == value and not set(value) & set("/\\")
    if not is_plain or value.startswith(".") or not 1 <= len(value.encode()) <= LONGEST_NAME:
        rule = f"a plain folder name of 1 to {LONGEST_NAME} bytes without slashes or leading dot"
        raise ValueError(f"must be {rule}")
    return value


Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
# Bounds: far above any sensible value, but low enough to fail before memory runs out.
Size = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Blocks = Annotated[int, Field(strict=True, ge=1, le=512)]
Workers = Annotated[int, Field(strict=True, ge=0, le=1024)] | Literal["auto"]
Amount = Annotated[float, Field(strict=True, ge=0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Compile = Flag | Literal["cuda-graph"]
Channels = Annotated[list[Amount], Field(min_length=3, max_length=3)]
Deviations = Annotated[list[Positive], Field(min_length=3, max_length=3)]
Range = Annotated[list[Share], Field(min_length=2, max_length=2)]
FolderName = Annotated[str, AfterValidator(folder_name)]
PathName = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Model:
    """Settings shared by all models."""

    name: FolderName
    image_size: Size
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
    embed_dim: Size
    num_heads: Size
    mlp_ratio: Positive
    conv_layers: Blocks | None
    patch_size: Size | None
    positional_embedding: Literal["learnable", "sine"]
    pooling: Literal["sequence", "class_token"]

    def __post_init__(self) -> None:
        if (self.conv_layers is None) == (self.patch_size is None):
            both = f"model.conv_layers={self.conv_layers} model.patch_size={self.patch_size}"
            raise ValueError(f"{both}: must set exactly one, the other must be null")


@dataclass(config=FORBID, frozen=True, kw_only=True)
class ViT(Transformer):
    """A vision transformer from timm; `architecture` is its timm name.

    `pos_drop_rate` drops out after the position embedding, `mlp_drop_rate` twice in each MLP.
    """

    family: Literal["vit"]
    architecture: str
    patch_size: Size
    global_pool: Literal["token", "avg", "map"]
    pretrained: str | None
    pos_drop_rate: Rate
    mlp_drop_rate: Rate | None


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
    std: Deviations
    limit: Count | None
    eval_limit: Count | None = None
    workers: Workers = "auto"
    validation: Rate = 0.0
    validation_seed: Whole = 0
    source: str  # package.module:function
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(config=FORBID, frozen=True, kw_only=True)
class InputMix:
    """Input mixup or CutMix. With both, a fair coin picks one of them for each batch."""

    alpha: Positive
    prob: Fraction


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Augmentation:
    """The augmentation stack; None disables a component.

    `off_epoch` is the first epoch without mixing, counted from 0, as in timm's training script.
    """

    off_epoch: Count | None = None
    mixup: InputMix | None = None
    cutmix: InputMix | None = None
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
    """Settings of timm's image transforms. Scale [1, 1] keeps a square image uncropped."""

    scale: Range
    interpolation: Literal["random", "bilinear", "bicubic"]
    hflip: Fraction
    color_jitter: Amount
    auto_augment: str | None
    erasing_prob: Fraction
    erasing_mode: Literal["const", "rand", "pixel"]
    eval_crop_pct: Share


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Recipe:
    """Optimiser, schedule, precision and image transforms."""

    epochs: Count
    max_steps: Count | None
    batch_size: Size
    grad_accum_steps: Count
    optimizer: Literal["adamw", "sgd"]
    lr: Positive
    min_lr: Amount
    warmup_lr: Amount
    warmup_epochs: Whole
    cooldown_epochs: Whole
    schedule_step: Literal["epoch", "batch"]
    weight_decay: Amount
    clip_grad_norm: Positive | None
    ema_decay: Rate | None
    label_smoothing: Rate
    precision: Literal["float32", "bf16", "float16"]
    log_every: Count
    evaluate_every: Count
    transforms: Transforms


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Checkpoint:
    """How often to save besides the end of the run.

    Without `every_epochs`, the end of an epoch is saved if that takes at most 5 % of the time.
    """

    every_epochs: Count | None = None
    every_minutes: Positive | None = 10.0


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Config:
    """The complete configuration of a run."""

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Size
    compile: Compile = False
    resume: Literal["never", "auto"] = "never"
    name: FolderName | None = None
    output_root: PathName = "outputs"
    model: Annotated[AnyModel, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    checkpoint: Checkpoint = Checkpoint()  # unused by eval.py
    # what receives the lines of metrics.jsonl too, with settings of its own
    logger: dict[Literal["wandb", "tensorboard"], dict[str, Any] | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        stack, model = self.augmentation, self.model
        if self.compile == "cuda-graph":
            is_gradient = stack.htm is not None and stack.htm.detector == "gradient"
            changes = stack.manifold_mixup is not None or getattr(model, "checkpoint_blocks", False)
            if self.devices > 1 or is_gradient or changes:
                needs = "needs devices=1, no manifold_mixup, no htm.detector=gradient and no"
                raise ValueError(f"compile=cuda-graph: {needs} model.checkpoint_blocks")

    @property
    def workers(self) -> int:
        """Loading processes of each rank: for `auto` the cores here, divided among the ranks."""
        if isinstance(self.dataset.workers, int):
            return self.dataset.workers
        return max(1, min(MOST_WORKERS, usable_cores() // local_ranks(self.devices)))


def check_new(config: Config) -> None:
    """Raises UserError for values that the schema reads of saved runs, and that no new one has."""
    recipe = config.recipe
    for name, values in (("mean", config.dataset.mean), ("std", config.dataset.std)):
        if max(values) > 1:
            shares = [round(value / 255, 4) for value in values]
            rule = f"must be of pixels in 0..1, perhaps {shares}"
            raise UserError(f"dataset.{name}={values}: {rule}")
    if recipe.warmup_epochs > recipe.epochs:
        rule = f"must be at most recipe.epochs={recipe.epochs}, or the rate never arrives"
        raise UserError(f"recipe.warmup_epochs={recipe.warmup_epochs}: {rule}")


# parts of the place of an error that are no keys: tags and members of unions
UNIONS = re.compile(r"cct|vit|library|int|bool|.*\W.*")


def parse(raw: Any) -> Config:
    """Returns plain values as the schema types them; UserError names each bad key."""
    try:
        return TypeAdapter(Config).validate_python(raw)
    except ValidationError as error:
        raise UserError("; ".join(line_of(x) for x in error.errors())) from None


def line_of(error: Any) -> str:
    """Says of one error of pydantic: `key=value: what is allowed`."""
    key = ".".join(str(x) for x in error["loc"] if not UNIONS.fullmatch(str(x)))
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{key}: no value is set"
    if error["type"] == "value_error" and not text.startswith("must"):  # names its key
        return f"augmentation.{text}" if key.startswith("augmentation.") else text
    if error["type"] == "unexpected_keyword_argument":
        text = "unknown key"
    return f"{key}={in_one_line(str(error['input']), 200)}: {text}"
