"""The typed schema of a run, and its errors in one line.

Values live in conf/. Defaults here are for saved configurations, which may lack a key. HTM, VTM and
manifold mixup are the library's classes, which check themselves.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from reproduction.errors import UserError, as_typed, in_one_line
from reproduction.function_keys import FunctionKey
from reproduction.machine import local_ranks, usable_cores
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import RULES, built

ROOT = Path(__file__).resolve().parents[2]
CONF_DIR, TRAIN = ROOT / "conf", ROOT / "train.py"
SOURCES = "reproduction.data.sources"  # the module that opens the data sets
LONGEST_NAME = 200  # most file systems allow 255 bytes
MOST_WORKERS = 16  # of dataset.workers=auto
# What lines and files of results have already: metrics of one's own have other names.
MEASURED = (
    "top1",
    "top5",
    "loss",
    "eval_loss",
    "epoch",
    "step",
    "images",
    "dataset",
    "root",
    "settings",
    "checkpoint",
)
Schema = TypeVar("Schema")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def schema(cls: type[Schema]) -> type[Schema]:
    """Makes a class of settings: each one is checked, and there are no others."""
    checked: Any = dataclass(config=ConfigDict(extra="forbid"), frozen=True, kw_only=True)
    return checked(cls)


Whole = Annotated[StrictInt, Field(ge=0)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**32)]
Count = Annotated[StrictInt, Field(ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Amount = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Rate = Annotated[Number, Field(ge=0, lt=1)]  # below 1
Part = Annotated[Number, Field(gt=0, le=1)]  # above 0
Compile = StrictBool | Literal["cuda-graph"]
# of pixels in 0..1
Channels = Annotated[list[Fraction], Field(min_length=3, max_length=3)]
Deviations = Annotated[list[Part], Field(min_length=3, max_length=3)]
Range = Annotated[list[Part], Field(min_length=2, max_length=2)]
# without control characters, slashes or a leading dot
FolderName = Annotated[str, Field(max_length=LONGEST_NAME, pattern=r"^[^./\p{C}][^/\p{C}]*$")]
# `data/x/` is `data/x`; relative ones stay so: a project may be moved
PathName = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(os.path.expanduser),
    AfterValidator(os.path.normpath),
]


class Fixed(NamedTuple):
    """A data set of the same images everywhere: how many there are, and of how many classes."""

    train: int
    held_out: int
    classes: int
    place: str = ""  # in dataset.root, of what is downloaded


# Keys that choose a function. What each one is called with, and returns: docs/extending.md.
DATA_SETS = {
    "digits": Fixed(1_437, 360, 10),
    "cifar10": Fixed(50_000, 10_000, 10, place="cifar-10-batches-py"),
    "cifar100": Fixed(50_000, 10_000, 100, place="cifar-100-python"),
    "image_folder": None,
    "imagenet1k": Fixed(1_281_167, 50_000, 1000),
}
DATA = FunctionKey("dataset.source", "images", {name: f"{SOURCES}:{name}" for name in DATA_SETS})
FIXED = {DATA.path(name): fixed for name, fixed in DATA_SETS.items()}
MODEL = FunctionKey("model.source", "model")
HTM_RULES = {
    name: FunctionKey(f"augmentation.htm.{name}", "tokens", ours) for name, ours in RULES.items()
}
OPTIMIZER = FunctionKey(
    "recipe.optimizer",
    "step",
    {
        "adamw": "reproduction.training.optimizers:adamw",
        "sgd": "reproduction.training.optimizers:sgd",
    },
)
LOSS = FunctionKey(
    "recipe.loss", "step", {"cross_entropy": "reproduction.training.step:cross_entropy"}
)
METRIC = FunctionKey("recipe.metrics.*", "evaluation")
MIXING = FunctionKey("augmentation.own.*.source", "inputs")


def metric_name(value: str) -> str:
    if not value.isidentifier() or value in MEASURED or value.startswith("val_"):
        others = ", ".join(MEASURED)
        raise ValueError(f"must be a name of letters and digits, not val_..., and none of {others}")
    return value


@schema
class Model:
    """Settings shared by all models, with the default layers of HTM and VTM."""

    name: FolderName
    image_size: Count
    weights: PathName | None
    checkpoint_blocks: StrictBool = False
    htm_layer: Whole | None = None
    vtm_layer: Whole | None = None


@schema
class Transformer(Model):
    """A plain sequence of blocks that supports HTM and VTM."""

    depth: Count
    attn_drop: Rate
    drop_path: Rate


@schema
class CCT(Transformer):
    """A compact transformer (Hassani et al., 2021).

    CCT sets `conv_layers`, CVT sets `patch_size`, and ViT-Lite is CVT with a class token.
    """

    family: Literal["cct"]
    embed_dim: Count
    num_heads: Count
    mlp_ratio: Positive
    conv_layers: Count | None
    patch_size: Count | None
    positional_embedding: Literal["learnable", "sine"]
    pooling: Literal["sequence", "class_token"]

    def __post_init__(self) -> None:
        if (self.conv_layers is None) == (self.patch_size is None):
            both = f"model.conv_layers={self.conv_layers} model.patch_size={self.patch_size}"
            raise ValueError(f"{both}: must set exactly one, the other must be null")


@schema
class ViT(Transformer):
    """A vision transformer from timm; `architecture` is its timm name.

    `pos_drop_rate` drops out after the position embedding, `mlp_drop_rate` twice in each MLP.
    """

    family: Literal["vit"]
    architecture: str
    patch_size: Count
    global_pool: Literal["token", "avg", "map"]
    pretrained: str | None
    pos_drop_rate: Rate
    mlp_drop_rate: Rate | None


@schema
class Library(Model):
    """Any other model from timm or torchvision; `architecture` is its name in that package."""

    family: Literal["library"]
    package: Literal["timm", "torchvision"]
    architecture: str
    options: dict[str, Any] = Field(default_factory=dict)
    stem: Literal["imagenet", "cifar"]


@schema
class Own(Model):
    """A model of one's own.

    Its factory `source` gets `num_classes` and `options`.
    """

    family: Literal["custom"]
    source: Annotated[str, MODEL]
    options: dict[str, Any] = Field(default_factory=dict)


AnyModel = CCT | ViT | Library | Own


@schema
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
    workers: Whole | Literal["auto"] = "auto"
    validation: Rate = 0.0
    validation_seed: Seed = 0
    source: Annotated[str, DATA, AfterValidator(DATA.path)]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def fixed(self) -> Fixed | None:
        """What is known of its images, if they are the same everywhere."""
        return FIXED.get(self.source)


@schema
class InputMix:
    """Input mixup or CutMix. With both, a fair coin picks one of them for each batch."""

    alpha: Positive
    prob: Fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class HTMByName(HTM):
    """The library's settings, with paths in place of functions, and options of their factories."""

    detector: str
    matching: str
    mask_rule: str
    labels: str
    detector_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    matching_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    mask_rule_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    labels_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def checked(self, name: str, value: Any) -> Any:
        """Returns the value of an option. Raises ValueError that says what is allowed."""
        if name in HTM_RULES:
            return HTM_RULES[name].checked(value)
        if name.removesuffix("_options") in HTM_RULES:
            return TypeAdapter(dict[str, Any]).validate_python(value)
        return super().checked(name, value)


@schema
class OwnMix:
    """An input mixing of one's own: the factory `source`, with its `options`."""

    source: Annotated[str, MIXING]
    options: dict[str, Any] = Field(default_factory=dict)


@schema
class Augmentation:
    """The augmentation stack, in order of application; None disables a component.

    `off_epoch` is the first epoch without mixing, counted from 0, as in timm's training script.
    """

    off_epoch: Count | None = None
    own: dict[FolderName, OwnMix] = Field(default_factory=dict, max_length=1)
    mixup: InputMix | None = None
    cutmix: InputMix | None = None
    manifold_mixup: Annotated[
        ManifoldMixup | None, BeforeValidator(partial(built, ManifoldMixup))
    ] = None
    htm: Annotated[HTMByName | None, BeforeValidator(partial(built, HTMByName))] = None
    vtm: Annotated[VTM | None, BeforeValidator(partial(built, VTM))] = None

    @property
    def stack(self) -> list[str]:
        names = [x.name for x in dataclasses.fields(self) if x.name not in ("off_epoch", "own")]
        return [*self.own, *(name for name in names if getattr(self, name) is not None)]

    def __post_init__(self) -> None:
        others = [name for name in self.stack if name in ("mixup", "cutmix")]
        if self.own and others:
            rule = f"stands alone as an input mixing, without {' and '.join(others)}"
            raise ValueError(f"augmentation.own.{next(iter(self.own))}: {rule}")


@schema
class Transforms:
    """Settings of timm's image transforms. Scale [1, 1] keeps a square image uncropped."""

    scale: Range
    interpolation: Literal["random", "bilinear", "bicubic"]
    hflip: Fraction
    color_jitter: Amount
    auto_augment: str | None
    erasing_prob: Fraction
    erasing_mode: Literal["const", "rand", "pixel"]
    eval_crop_pct: Part


@schema
class Recipe:
    """Optimiser, schedule, precision and image transforms."""

    epochs: Count
    max_steps: Count | None
    batch_size: Count
    drop_last: StrictBool
    grad_accum_steps: Count
    optimizer: Annotated[str, OPTIMIZER]
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    loss: Annotated[str, LOSS] = "cross_entropy"
    loss_options: dict[str, Any] = Field(default_factory=dict)
    # of one's own, by the names that lines and tables give them; their options likewise
    metrics: dict[
        Annotated[str, AfterValidator(metric_name)],
        Annotated[str, METRIC],
    ] = Field(default_factory=dict)
    metrics_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
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

    def __post_init__(self) -> None:
        for name in self.metrics_options.keys() - self.metrics.keys():
            reason = f"+recipe.metrics.{name}=package.module:factory is missing"
            raise ValueError(f"recipe.metrics_options.{name}: {reason}")
        warmup, cooldown = self.warmup_epochs, self.cooldown_epochs
        epochs = f"no epoch of recipe.epochs={self.epochs} is left after {warmup} of warm-up"
        rate = f"must be at most recipe.lr={self.lr}"
        for name, is_wrong, rule in (
            ("warmup_epochs", warmup > self.epochs, f"must be at most recipe.epochs={self.epochs}"),
            ("cooldown_epochs", cooldown and warmup + cooldown >= self.epochs, epochs),
            ("min_lr", self.min_lr > self.lr, rate),
            ("warmup_lr", warmup and self.warmup_lr > self.lr, rate),
        ):
            if is_wrong:
                raise ValueError(f"recipe.{name}={getattr(self, name)}: {rule}")


@schema
class Checkpoint:
    """How often to save besides the end of the run; conf/train.yaml says what null means."""

    every_epochs: Count | None = None
    every_minutes: Positive | None = 10.0


@schema
class Config:
    """The complete configuration of a run."""

    seed: Seed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Count
    compile: Compile = False
    resume: Literal["never", "auto"] = "never"
    name: FolderName | None = None
    output_root: PathName = "outputs"
    model: Annotated[AnyModel, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    checkpoint: Checkpoint = Checkpoint()
    # what receives the lines of metrics.jsonl too, with settings of its own
    logger: dict[Literal["wandb", "tensorboard"], dict[str, Any] | None] = Field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        cannot_be_captured = (
            self.devices > 1
            or self.augmentation.manifold_mixup is not None
            or self.model.checkpoint_blocks
        )
        if self.compile == "cuda-graph" and cannot_be_captured:
            needs = "needs devices=1, no manifold_mixup and no model.checkpoint_blocks"
            raise ValueError(f"compile=cuda-graph: {needs}")

    @property
    def workers(self) -> int:
        """Loading processes of each rank: for `auto` the cores here, divided among the ranks."""
        if isinstance(self.dataset.workers, int):
            return self.dataset.workers
        return max(1, min(MOST_WORKERS, usable_cores() // local_ranks(self.devices)))

    @property
    def how_to_continue(self) -> str:
        """How the user continues after a stop."""
        if self.resume == "auto":
            return "repeat the command to continue"
        return "repeat the command with resume=auto to continue"


@schema
class StudyOptions:
    """The options of the sweeper of studies: conf/hydra/sweeper/study.yaml."""

    study: str
    seeds: Count | None
    scale: Literal["full", "smoke"]


@schema
class Command:
    """The other keys of train.py: how runs are started and named, and what a sweeper optimises."""

    jobs: Count | None
    task: Whole | None
    dry_run: bool
    row: str | None
    objective: Literal["val_top1", "val_top5", "val_loss"]


def validated(cls: type[Schema], raw: Any) -> Schema:
    """Returns plain values as a class of settings types them; UserError names each bad key."""
    try:
        return TypeAdapter(cls).validate_python(raw)
    except ValidationError as error:
        raise UserError("; ".join(_message(mistake, raw) for mistake in error.errors())) from None


def _keys(place: Sequence[str | int], raw: Any) -> Iterator[str]:
    """Yields the keys of `raw` in the place of an error, which also names types and steps."""
    for part in place:
        is_index = isinstance(raw, list) and isinstance(part, int)
        if is_index or (isinstance(raw, Mapping) and part in raw):
            yield str(part)
            raw = raw[part]


def _message(mistake: Any, raw: Any) -> str:
    """Says of one of pydantic's errors in `raw`: `key=value: what is allowed`.

    A message of ours that does not begin with `must` names its keys itself.
    """
    text = mistake["msg"].removeprefix("Value error, ")
    keys = [*_keys(mistake["loc"], raw)]
    if mistake["type"] == "missing":
        return f"{'.'.join([*keys, mistake['loc'][-1]])}: no value is set"
    if mistake["type"] == "value_error" and not text.startswith("must"):
        is_of_the_library = "augmentation" in keys and not text.startswith("augmentation.")
        return f"augmentation.{text}" if is_of_the_library else text  # which knows no group
    return f"{'.'.join(keys)}={in_one_line(as_typed(mistake['input']), 200)}: {text}"
