"""Validates plain values into the typed configuration, with one-line errors.

Imports neither torch nor Hydra, so that a mistyped command fails at once.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from reproduction.config import (
    CCT,
    AnyModel,
    Augmentation,
    Config,
    Dataset,
    Library,
    Recipe,
    Transforms,
    ViT,
)
from reproduction.data.folders import DATASETS, IMAGE_FOLDERS, missing_data
from reproduction.runs.identity import without_removed
from reproduction.system.errors import UserError, in_one_line
from tokenmixup import HTM, VTM

LONGEST = 200  # characters of a value in an error line
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")  # types of pydantic errors
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
MOST_TOKENS = 2**14  # one attention map of this size takes 1 GiB


def parse(raw: dict[str, Any], needs_data: bool = True, trains: bool = True) -> Config:
    """Returns the typed configuration. UserError names each bad key, its value and the valid range.

    With `needs_data=False` the images may be missing, as for a plan. With `trains=False` the global
    batch need not be divisible by the world size, as for an evaluation.
    """
    try:
        config = TypeAdapter(Config).validate_python(raw)
    except ValidationError as error:
        errors = error.errors()
        unknown = [_key(e) for e in errors if e["type"] in UNKNOWN]
        raise UserError("; ".join(_describe(e, raw, unknown) for e in errors)) from None
    if lines := list(problems(config, needs_data, trains)):
        raise UserError("; ".join(lines))
    return config


def parse_saved(raw: dict[str, Any], needs_data: bool = True, named: bool = False) -> Config:
    """Parses a saved configuration to use its trained weights; drops its initial weights.

    UserError if it needs own data, as their function would run, unless the function is `named` on
    the command line.
    """
    raw = without_removed(raw)
    model = raw.get("model")
    if isinstance(model, dict):
        model = {k: None if k in ("weights", "pretrained") else v for k, v in model.items()}
    config = parse({**raw, "model": model}, needs_data, trains=False)
    if needs_data and not named:
        check_named(config.dataset)
    return config


def check_named(dataset: Dataset) -> None:
    """Raises UserError for own data whose function was not named on the command line."""
    if dataset.source is not None:
        raise UserError(
            f"dataset.source={dataset.source}: the images come from this code, which runs only if "
            f"the command line names it: add dataset.source={dataset.source}"
        )


def _key(error: Any) -> str:
    """Returns the dotted key of a pydantic error's place, in which a union's tag is no key."""
    return re.sub(r"^model\.(cct|vit|library)\.", "model.", ".".join(map(str, error["loc"])))


def _describe(error: Any, raw: dict[str, Any], unknown: Sequence[str]) -> str:
    """Formats a pydantic error as `key=value: what is allowed`."""
    key, value = _key(error), in_one_line(str(error["input"]), LONGEST)
    if error["type"] in UNKNOWN:
        return unknown_key(key, raw, f"={value}", unknown)
    if error["type"] == "missing":
        return f"{key}: no value is set"
    if error["type"] == "union_tag_invalid":
        tag = error["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag}={error['ctx']['tag']}: must be {error['ctx']['expected_tags']}"
    if error["type"] == "value_error" and key.startswith("augmentation."):  # from the library
        return f"augmentation.{error['msg'].removeprefix('Value error, ')}"
    message = re.sub(r"^(Value error, must|\w+ should) ", "", error["msg"])
    message = re.sub(r"have at \w+ (\d+) items? after validation", r"have \1 values", message)
    message = re.sub(r"be a dictionary or an instance of \w+", "be a mapping of settings", message)
    bounds = [f"be {BOUNDS[x]} {y:.10g}" for x, y in error.get("ctx", {}).items() if x in BOUNDS]
    return f"{key}={value}: must {bounds[0] if bounds else message}"


def unknown_key(
    key: str, tree: dict[str, Any], value: str = "", unknown: Sequence[str] = ()
) -> str:
    """Describes an unknown key: the known keys that are most similar, and those beside it.

    `tree` holds the known keys, and may hold those in `unknown`.
    """
    unknown = [key, *unknown]
    names = [x for x in _keys(tree) if not any(f"{x}.".startswith(f"{y}.") for y in unknown)]
    parent, _, last = key.rpartition(".")
    while parent and parent not in names:
        parent = parent.rpartition(".")[0]
    ends = {name: name.rpartition(".")[2] for name in names}
    closest = get_close_matches(last, ends.values(), n=1)
    alike = [name for name, end in ends.items() if end in closest]
    alike.sort(key=lambda name: -SequenceMatcher(None, key, name).ratio())
    hint = f", perhaps {' or '.join(alike)}" if alike else ""
    problem = "unknown key"
    if key.startswith("model.") and isinstance(tree.get("model"), dict):
        problem = f"{tree['model'].get('name')} has no such key"  # another family may have it
    beside = [end for name, end in ends.items() if name.rpartition(".")[0] == parent]
    keys = f"keys of {parent or 'the configuration'}: {', '.join(beside)}"
    return f"{key}{value}: {problem}{hint}; {keys if beside else f'{parent} has no keys'}"


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of all values and mappings."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def problems(config: Config, needs_data: bool = True, trains: bool = True) -> Iterator[str]:
    """Yields inconsistencies between fields, one line each: key, value and what is allowed."""
    stack = config.augmentation
    if isinstance(config.model, CCT | ViT):
        yield from _layer_problems(config.model, stack)
        if stack.htm is not None:
            yield from _htm_problems(config.model, stack.htm)
        if stack.vtm is not None:
            yield from _vtm_problems(config.model, stack.vtm)
    if stack.cutmix is not None and stack.cutmix.labels == "attention":
        yield from _label_problems(config)
    if trains:
        if stack.off_epoch is not None and stack.off_epoch >= config.recipe.epochs:
            yield (
                f"augmentation.off_epoch={stack.off_epoch}: must be below recipe.epochs="
                f"{config.recipe.epochs}, or null to mix in all epochs"
            )
        yield from _recipe_problems(config.recipe, config.devices)
    if config.compile == "cuda-graph":
        yield from _graph_problems(config)
    yield from _model_problems(config.model)
    yield from _transform_problems(config.recipe.transforms)
    yield from _dataset_problems(config.dataset, needs_data)


def _layer_problems(model: CCT | ViT, stack: Augmentation) -> Iterator[str]:
    for key, settings in (("htm", stack.htm), ("vtm", stack.vtm)):
        if settings is not None and settings.layers[-1] >= model.depth:
            first = 1 if key == "vtm" else 0
            yield (
                f"augmentation.{key}.layer={settings.layer}: {model.name} has blocks "
                f"0..{model.depth - 1}, allowed is {first}..{model.depth - 1}"
            )
    if stack.manifold_mixup is not None:
        layers = stack.manifold_mixup.layers
        if max(layers) >= model.depth:
            yield (
                f"augmentation.manifold_mixup.layers={layers}: must be blocks of {model.name}, "
                f"which has 0..{model.depth - 1}"
            )


def _label_problems(config: Config) -> Iterator[str]:
    """Why labels cannot follow the attention in the last block."""
    key, stack = "augmentation.cutmix.labels=attention", config.augmentation
    for name in ("manifold_mixup", "htm"):
        if name in stack.stack:
            reason = "which mixes labels before the last block has run"
            yield f"{key}: not with {name} in the stack, {reason}; allowed is area"
    if stack.mode != "batch":
        reason = f"augmentation.mode={stack.mode} draws more than one box for a batch"
        yield f"{key}: {reason}; allowed is area"
    if isinstance(config.model, Library):
        yield f"{key}: {config.model.name} has no blocks with attention; allowed is area"
    if config.compile:
        value = str(config.compile).lower()
        yield f"{key}: not with compile={value}, which hides the last block; allowed is area"


def _graph_problems(config: Config) -> Iterator[str]:
    """What differs between the steps of one CUDA graph, or is more than one device's."""
    htm = config.augmentation.htm
    parts = {
        f"devices={config.devices}": config.devices > 1,
        "augmentation=[manifold_mixup], which draws a block for each batch": (
            config.augmentation.manifold_mixup is not None
        ),
        "augmentation.htm.detector=gradient, which trains a second pass": (
            htm is not None and htm.detector == "gradient"
        ),
        "model.checkpoint_blocks=true, which reads random states": (
            getattr(config.model, "checkpoint_blocks", False)
        ),
    }
    for part, is_used in parts.items():
        if is_used:
            yield f"compile=cuda-graph: not with {part}; allowed are false and true"


def _htm_problems(model: CCT | ViT, htm: HTM) -> Iterator[str]:
    if htm.pooling == "class_token" and not model.has_class_token:
        yield (
            f"augmentation.htm.pooling=class_token: {model.name} pools no class token, "
            "allowed is auto, attention or average"
        )
    last = htm.layers[-1]
    if last < model.depth <= last + htm.rollout_steps:
        yield (
            f"augmentation.htm.rollout_steps={htm.rollout_steps}: {model.name} has "
            f"{model.depth - 1 - last} blocks after htm.layer={last}, allowed are no more"
        )


def _vtm_problems(model: CCT | ViT, vtm: VTM) -> Iterator[str]:
    if max(each.kappa for each in vtm.each.values()) > model.tokens:
        yield (
            f"augmentation.vtm.kappa={vtm.kappa}: {model.name} has {model.tokens} tokens, "
            f"allowed is 1..{model.tokens}"
        )
    if vtm.class_token_offset == "published" and not model.has_class_token:
        yield (
            f"augmentation.vtm.class_token_offset=published: {model.name} pools no class token, "
            "allowed is paper"
        )


def _recipe_problems(recipe: Recipe, devices: int) -> Iterator[str]:
    if recipe.batch_size % devices:
        yield (
            f"recipe.batch_size={recipe.batch_size}: the global batch must be divisible "
            f"by devices={devices}"
        )
    if recipe.warmup_epochs + recipe.cooldown_epochs > recipe.epochs:
        yield (
            f"recipe.warmup_epochs={recipe.warmup_epochs}: warm-up and cooldown "
            f"({recipe.cooldown_epochs}) must fit into recipe.epochs={recipe.epochs}"
        )
    warmup_lr = recipe.warmup_lr if recipe.warmup_epochs else 0.0
    for key, lr in (("min_lr", recipe.min_lr), ("warmup_lr", warmup_lr)):
        if lr > recipe.lr:
            yield f"recipe.{key}={lr}: must not exceed the peak recipe.lr={recipe.lr}"


def _transform_problems(transforms: Transforms) -> Iterator[str]:
    key = "recipe.transforms"
    if not transforms.scale[0] <= transforms.scale[1] <= 1:
        yield f"{key}.scale={transforms.scale}: shares of the area, must rise to 1 at most"
    if transforms.ratio[0] > transforms.ratio[1]:
        yield f"{key}.ratio={transforms.ratio}: width over height, must rise"


def _dataset_problems(dataset: Dataset, needs_data: bool) -> Iterator[str]:
    if dataset.name not in DATASETS:
        yield f"dataset.name={dataset.name}: must be one of {', '.join(DATASETS)}"
        return
    if dataset.name == "custom" and dataset.source is None:
        yield "dataset.source=null: custom needs package.module:function, which returns its images"
    for key in ("source", "options", "content") if dataset.name != "custom" else ():
        if value := getattr(dataset, key):
            yield f"dataset.{key}={value}: {dataset.name} does not use it; it is for dataset=custom"
    if dataset.validation_seed and not dataset.validation:
        yield (
            f"dataset.validation_seed={dataset.validation_seed}: with dataset.validation=0 there "
            "is no split, allowed is 0"
        )
    if dataset.memory_mib is not None and dataset.name not in IMAGE_FOLDERS:
        yield (
            f"dataset.memory_mib={dataset.memory_mib}: {dataset.name} is always held in memory, "
            "allowed is null"
        )
    if dataset.skips and dataset.name not in IMAGE_FOLDERS:
        yield (
            f"dataset.broken_images=skip: {dataset.name} is not a folder of image files, allowed "
            "is refuse"
        )
    if needs_data and (problem := missing_data(dataset.name, dataset.root)):
        yield problem


def _model_problems(model: AnyModel) -> Iterator[str]:
    if model.weights is not None and not Path(model.weights).is_file():
        yield f"model.weights={model.weights}: there is no such file"
    if isinstance(model, Library):
        for key, value in model.options.items():
            if value is None:  # timm would silently drop it
                yield f"model.options.{key}=null: no value; ~model.options.{key} leaves it out"
        return
    if model.patch_size is not None and model.image_size % model.patch_size:
        yield f"model.image_size={model.image_size}: must be a multiple of {model.patch_size}"
    if model.tokens > MOST_TOKENS:
        yield (
            f"model.image_size={model.image_size}: gives {model.name} {model.tokens} tokens, "
            f"allowed are {MOST_TOKENS}"
        )
    if isinstance(model, CCT):
        yield from _cct_problems(model)
        return
    if model.weights is not None and model.pretrained is not None:
        yield f"model.weights={model.weights}: choose either a file or model.pretrained, not both"


def _cct_problems(model: CCT) -> Iterator[str]:
    if (model.conv_layers is None) == (model.patch_size is None):
        yield (
            f"model.conv_layers={model.conv_layers} model.patch_size={model.patch_size}: must set "
            "exactly one, the other must be null"
        )
    if model.embed_dim % (2 * model.num_heads):
        yield (
            f"model.embed_dim={model.embed_dim}: must be an even multiple of "
            f"model.num_heads={model.num_heads}"
        )
