"""The typed schema of the configuration and its checks. Values and defaults live in conf/.

Imports neither torch nor Hydra, so that a mistyped command is refused at once.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from reproduction.data.folders import missing_data
from reproduction.errors import UserError

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
AUTO_AUGMENT = r"(rand(-(m|n|w|p|inc|mstd|mmax)[0-9.]+)+|original|originalr|v0|v0r|3a)"


def _rho(value: float) -> float:
    if 0 <= value <= 1 or value == math.inf:
        return value
    raise ValueError("must lie in 0..1, or be inf")


def _folder_name(value: str) -> str:
    if value in ("", ".", "..") or set(value) & set("/\\\0") or value.startswith("."):
        raise ValueError("must be a plain folder name without slashes or a leading dot")
    return value


def _auto_augment(value: str) -> str:
    if re.fullmatch(AUTO_AUGMENT, value):
        return value
    raise ValueError("must be one of timm's policies, such as rand-m9-mstd0.5-inc1, or null")


Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Threshold = Annotated[float, Field(strict=True, ge=0)]  # inf is legal
Gain = Annotated[float, Field(strict=True), AfterValidator(_rho)]
Flag = Annotated[bool, Field(strict=True)]
Channels = Annotated[
    list[Annotated[float, Field(strict=True, allow_inf_nan=False)]],
    Field(min_length=3, max_length=3),
]
Scales = Annotated[list[Positive], Field(min_length=3, max_length=3)]
Range = Annotated[list[Positive], Field(min_length=2, max_length=2)]

FORBID = ConfigDict(extra="forbid")


@dataclass(config=FORBID, frozen=True, kw_only=True)
class CCT:
    """A compact convolutional transformer (Hassani et al., 2021)."""

    name: str
    family: Literal["cct"]
    image_size: Count
    embed_dim: Count
    depth: Count
    num_heads: Count
    mlp_ratio: Positive
    conv_layers: Count
    positional_embedding: Literal["learnable", "sine"]
    drop: Rate
    attn_drop: Rate
    drop_path: Rate
    htm_layer: Whole
    vtm_layer: Whole

    @property
    def tokens(self) -> int:
        """Spatial tokens: every conv layer is followed by a pooling of stride 2."""
        size = self.image_size
        for _ in range(self.conv_layers):
            size = (size + 1) // 2
        return size * size

    @property
    def has_class_token(self) -> bool:
        return False


@dataclass(config=FORBID, frozen=True, kw_only=True)
class ViT:
    """A vision transformer of timm's: `architecture` is its name there."""

    name: str
    family: Literal["vit"]
    architecture: str
    image_size: Count
    patch_size: Count
    depth: Count
    global_pool: Literal["token", "avg"]
    pretrained: str | None
    weights: str | None
    drop: Rate
    attn_drop: Rate
    drop_path: Rate
    htm_layer: Whole
    vtm_layer: Whole

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def has_class_token(self) -> bool:
        return self.global_pool == "token"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Dataset:
    """Images, their statistics and how they are loaded."""

    name: Literal["digits", "cifar10", "cifar100", "imagenet1k", "image_folder"]
    root: str | None
    mean: Channels
    std: Scales
    limit: Count | None
    workers: Whole


@dataclass(config=FORBID, frozen=True, kw_only=True)
class InputMix:
    """Input mixup or CutMix; the share of batches is split evenly when both are chosen."""

    alpha: Positive
    prob: Share


@dataclass(config=FORBID, frozen=True, kw_only=True)
class HTM:
    layer: Whole
    tau: Threshold
    rho: Gain
    score_loss_weight: Amount
    pooling: Literal["auto", "attention", "average", "class_token"]
    stop_gradient: Flag


@dataclass(config=FORBID, frozen=True, kw_only=True)
class VTM:
    layer: Count
    kappa: Count


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Augmentation:
    """The stack: what is None is not in it."""

    mixup: InputMix | None = None
    cutmix: InputMix | None = None
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
    auto_augment: Annotated[str, AfterValidator(_auto_augment)] | None
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
    resume: Literal["never", "auto"]
    name: Annotated[str, AfterValidator(_folder_name)] | None
    output_root: Annotated[str, Field(min_length=1)]
    model: Annotated[CCT | ViT, Field(discriminator="family")]
    dataset: Dataset
    augmentation: Augmentation
    recipe: Recipe
    logger: Annotated[NoLogger | Wandb, Field(discriminator="name")]


def parse(raw: dict[str, Any]) -> Config:
    """The typed configuration; UserError names each bad key, its value and what is allowed."""
    try:
        config = TypeAdapter(Config).validate_python(raw)
    except ValidationError as error:
        raise UserError("; ".join(_describe(e, raw) for e in error.errors())) from None
    problems = list(_problems(config))
    if problems:
        raise UserError("; ".join(problems))
    return config


def _describe(error: Any, raw: dict[str, Any]) -> str:
    """One pydantic error as `key=value: what is allowed`."""
    path: list[str] = []
    parent: Any = raw
    value: Any = raw
    for part in error["loc"]:
        if (
            isinstance(value, dict)
            and part not in value
            and part in ("cct", "vit", "none", "wandb")
        ):
            continue  # the tag of a union, not a key
        path.append(str(part))
        parent, value = value, value[part] if _holds(value, part) else None
    key = ".".join(path)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = ", ".join(str(k) for k in parent if k != path[-1])
        return f"{key}={value}: unknown key; {'.'.join(path[:-1]) or 'known'} has {known}"
    if error["type"] == "missing":
        return f"{key}: no value is set"
    if error["type"] == "union_tag_invalid":
        tag = error["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag}={error['ctx']['tag']}: must be {error['ctx']['expected_tags']}"
    message = re.sub(r"^(Value error, must|\w+ should) ", "", error["msg"])
    return f"{key}={value}: must {message}"


def _holds(value: Any, part: Any) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _problems(config: Config) -> Iterator[str]:
    """What no single field can know, one line each."""
    yield from _mixing_problems(config.model, config.augmentation)
    yield from _recipe_problems(config.recipe, config.devices)
    yield from _model_problems(config.model)
    if problem := missing_data(config.dataset.name, config.dataset.root):
        yield problem


def _mixing_problems(model: CCT | ViT, stack: Augmentation) -> Iterator[str]:
    for key, settings in (("htm", stack.htm), ("vtm", stack.vtm)):
        if settings is not None and settings.layer >= model.depth:
            first = 1 if key == "vtm" else 0
            yield (
                f"augmentation.{key}.layer={settings.layer}: {model.name} has blocks "
                f"0..{model.depth - 1}, allowed is {first}..{model.depth - 1}"
            )
    if stack.vtm is not None and stack.vtm.kappa > model.tokens:
        yield (
            f"augmentation.vtm.kappa={stack.vtm.kappa}: {model.name} has {model.tokens} tokens, "
            f"allowed is 1..{model.tokens}"
        )
    if stack.htm is not None and stack.htm.pooling == "class_token" and not model.has_class_token:
        yield (
            f"augmentation.htm.pooling=class_token: {model.name} pools no class token, "
            "allowed is auto, attention or average"
        )


def _recipe_problems(recipe: Recipe, devices: int) -> Iterator[str]:
    if recipe.batch_size % devices:
        yield (
            f"recipe.batch_size={recipe.batch_size}: the global batch must divide over "
            f"devices={devices}"
        )
    if recipe.warmup_epochs + recipe.cooldown_epochs > recipe.epochs:
        yield (
            f"recipe.warmup_epochs={recipe.warmup_epochs}: warm-up and cooldown "
            f"({recipe.cooldown_epochs}) must fit into recipe.epochs={recipe.epochs}"
        )


def _model_problems(model: CCT | ViT) -> Iterator[str]:
    if isinstance(model, CCT):
        if model.embed_dim % (2 * model.num_heads):
            yield (
                f"model.embed_dim={model.embed_dim}: must be an even multiple of "
                f"model.num_heads={model.num_heads}"
            )
        return
    if model.image_size % model.patch_size:
        yield f"model.image_size={model.image_size}: must be a multiple of {model.patch_size}"
    if model.weights is not None and model.pretrained is not None:
        yield f"model.weights={model.weights}: choose either a file or model.pretrained, not both"
    if model.weights is not None and not Path(model.weights).is_file():
        yield f"model.weights={model.weights}: there is no such file"
