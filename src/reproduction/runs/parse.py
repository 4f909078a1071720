"""Validates plain values into the typed configuration, with one-line errors.

Imports neither torch nor Hydra, so that a mistyped command fails at once.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from reproduction.config import CCT, AnyModel, Augmentation, Config, Dataset, Library, Recipe, ViT
from reproduction.system.errors import UserError, in_one_line

LONGEST_VALUE = 200  # characters of a value in an error line
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")  # types of pydantic errors
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
MOST_TOKENS = 2**14  # one attention map of this size takes 1 GiB


def parse(raw: dict[str, Any], needs_data: bool = True, trains: bool = True) -> Config:
    """Returns the typed configuration. UserError names each bad key, its value and the valid range.

    With `trains=False` the global batch need not be divisible by the world size, as for an
    evaluation. The images may be missing: `needs_data` does not matter any more.
    """
    config = typed(raw)
    if lines := list(problems(config, trains)):
        raise UserError("; ".join(lines))
    return config


def typed(raw: dict[str, Any]) -> Config:
    """Returns the values as the schema types them, each checked by itself."""
    try:
        return TypeAdapter(Config).validate_python(raw)
    except ValidationError as error:
        errors = error.errors()
        unknown = [_key(e) for e in errors if e["type"] in UNKNOWN]
        raise UserError("; ".join(_describe(e, raw, unknown) for e in errors)) from None


def parse_saved(raw: dict[str, Any], needs_data: bool = True, named: bool = False) -> Config:
    """Parses a saved configuration to use its trained weights; drops its initial weights.

    UserError if it needs own data, as their function would run, unless the function is `named` on
    the command line.
    """
    model = raw.get("model")
    if isinstance(model, dict):
        model = {k: None if k in ("weights", "pretrained") else v for k, v in model.items()}
    config = parse({**raw, "model": model}, needs_data, trains=False)
    if needs_data and not named:
        check_named(config.dataset)
    return config


def check_named(dataset: Dataset) -> None:
    """Raises UserError for own data whose function was not named on the command line."""
    if dataset.is_own:
        raise UserError(
            f"dataset.source={dataset.source}: the images come from this code, which runs only if "
            f"the command line names it: add dataset.source={dataset.source}"
        )


def _key(error: Any) -> str:
    """Returns the dotted key of a pydantic error's place, in which a union's tag is no key."""
    return re.sub(r"^model\.(cct|vit|library)\.", "model.", ".".join(map(str, error["loc"])))


def _describe(error: Any, raw: dict[str, Any], unknown: Sequence[str]) -> str:
    """Formats a pydantic error as `key=value: what is allowed`."""
    key, value = _key(error), in_one_line(str(error["input"]), LONGEST_VALUE)
    if error["type"] in UNKNOWN:
        return _unknown_key(key, value, raw, unknown)
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


def _unknown_key(key: str, value: str, tree: dict[str, Any], unknown: Sequence[str]) -> str:
    """Describes an unknown key: the known keys that are most similar, and those beside it.

    `tree` holds the known keys and those in `unknown`.
    """
    names = [x for x in _keys(tree) if not any(f"{x}.".startswith(f"{y}.") for y in unknown)]
    parent, _, last = key.rpartition(".")
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
    return f"{key}={value}: {problem}{hint}; {keys if beside else f'{parent} has no keys'}"


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of all values and mappings."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def problems(config: Config, trains: bool = True) -> Iterator[str]:
    """Yields inconsistencies between fields, one line each: key, value and what is allowed."""
    model, stack, recipe = config.model, config.augmentation, config.recipe
    if isinstance(model, CCT | ViT):
        yield from _stack_problems(model, stack)
    if stack.cutmix is not None and stack.cutmix.labels == "attention":
        yield from _label_problems(config)
    if trains:
        if stack.off_epoch is not None and stack.off_epoch >= recipe.epochs:
            allowed = f"must be below recipe.epochs={recipe.epochs}, or null to mix in all epochs"
            yield f"augmentation.off_epoch={stack.off_epoch}: {allowed}"
        yield from _recipe_problems(recipe, config.devices)
    if config.compile == "cuda-graph":
        yield from _graph_problems(config)
    yield from _model_problems(model)
    scale, ratio = recipe.transforms.scale, recipe.transforms.ratio
    if not scale[0] <= scale[1] <= 1:
        yield f"recipe.transforms.scale={scale}: shares of the area, must rise to 1 at most"
    if ratio[0] > ratio[1]:
        yield f"recipe.transforms.ratio={ratio}: width over height, must rise"
    yield from _dataset_problems(config.dataset)


def _stack_problems(model: CCT | ViT, stack: Augmentation) -> Iterator[str]:
    """What of HTM, VTM and manifold mixup the model has no blocks or tokens for."""
    name, last, htm, vtm = model.name, model.depth - 1, stack.htm, stack.vtm
    blocks = f"{name} has blocks 0..{last}"
    no_class = f"{name} pools no class token"
    if htm is not None and htm.layers[-1] > last:
        yield f"augmentation.htm.layer={htm.layer}: {blocks}, allowed is 0..{last}"
    if vtm is not None and vtm.layers[-1] > last:
        yield f"augmentation.vtm.layer={vtm.layer}: {blocks}, allowed is 1..{last}"
    if stack.manifold_mixup is not None and max(stack.manifold_mixup.layers) > last:
        layers = stack.manifold_mixup.layers
        yield f"augmentation.manifold_mixup.layers={layers}: {blocks}, allowed are only these"
    if htm is not None and htm.pooling == "class_token" and not model.has_class_token:
        allowed = "allowed is auto, attention or average"
        yield f"augmentation.htm.pooling=class_token: {no_class}, {allowed}"
    if htm is not None and (left := last - htm.layers[-1]) >= 0 and htm.rollout_steps > left:
        after = f"{name} has {left} blocks after htm.layer={htm.layers[-1]}"
        yield f"augmentation.htm.rollout_steps={htm.rollout_steps}: {after}, allowed are no more"
    if vtm is not None and max(each.kappa for each in vtm.each.values()) > model.tokens:
        tokens = f"{name} has {model.tokens} tokens, allowed is 1..{model.tokens}"
        yield f"augmentation.vtm.kappa={vtm.kappa}: {tokens}"
    if vtm is not None and vtm.class_token_offset == "published" and not model.has_class_token:
        yield f"augmentation.vtm.class_token_offset=published: {no_class}, allowed is paper"


def _label_problems(config: Config) -> Iterator[str]:
    """Why labels cannot follow the attention in the last block."""
    stack = config.augmentation
    early = [name for name in ("manifold_mixup", "htm") if name in stack.stack]
    reasons = [f"{name} mixes labels before the last block has run" for name in early]
    if isinstance(config.model, Library):
        reasons.append(f"{config.model.name} has no blocks with attention")
    if config.compile:
        reasons.append(f"compile={str(config.compile).lower()} hides the last block")
    for reason in reasons:
        yield f"augmentation.cutmix.labels=attention: {reason}; allowed is area"


def _graph_problems(config: Config) -> Iterator[str]:
    """What differs between the steps of one CUDA graph, or is more than one device's."""
    model, stack = config.model, config.augmentation
    parts = []
    if config.devices > 1:
        parts.append(f"devices={config.devices}")
    if stack.manifold_mixup is not None:
        parts.append("augmentation=[manifold_mixup], which draws a block for each batch")
    if stack.htm is not None and stack.htm.detector == "gradient":
        parts.append("augmentation.htm.detector=gradient, which trains a second pass")
    if isinstance(model, CCT | ViT) and model.checkpoint_blocks:
        parts.append("model.checkpoint_blocks=true, which reads random states")
    for part in parts:
        yield f"compile=cuda-graph: not with {part}; allowed are false and true"


def _recipe_problems(recipe: Recipe, devices: int) -> Iterator[str]:
    if recipe.batch_size % devices:
        allowed = f"the global batch must be divisible by devices={devices}"
        yield f"recipe.batch_size={recipe.batch_size}: {allowed}"
    if recipe.warmup_epochs + recipe.cooldown_epochs > recipe.epochs:
        both = f"warm-up and cooldown ({recipe.cooldown_epochs}) must fit into recipe.epochs"
        yield f"recipe.warmup_epochs={recipe.warmup_epochs}: {both}={recipe.epochs}"
    warmup_lr = recipe.warmup_lr if recipe.warmup_epochs else 0.0
    for key, lr in (("min_lr", recipe.min_lr), ("warmup_lr", warmup_lr)):
        if lr > recipe.lr:
            yield f"recipe.{key}={lr}: must not exceed the peak recipe.lr={recipe.lr}"


def _model_problems(model: AnyModel) -> Iterator[str]:
    if model.weights is not None and not Path(model.weights).is_file():
        yield f"model.weights={model.weights}: there is no such file"
    if isinstance(model, Library):
        nulls = [key for key, value in model.options.items() if value is None]
        for key in nulls:  # timm would silently drop it
            yield f"model.options.{key}=null: no value; ~model.options.{key} leaves it out"
        return
    if model.patch_size is not None and model.image_size % model.patch_size:
        yield f"model.image_size={model.image_size}: must be a multiple of {model.patch_size}"
    if model.tokens > MOST_TOKENS:
        tokens = f"gives {model.name} {model.tokens} tokens, allowed are {MOST_TOKENS}"
        yield f"model.image_size={model.image_size}: {tokens}"
    if isinstance(model, ViT):
        if model.weights is not None and model.pretrained is not None:
            yield f"model.weights={model.weights}: choose a file or model.pretrained, not both"
        return
    if (model.conv_layers is None) == (model.patch_size is None):
        both = f"model.conv_layers={model.conv_layers} model.patch_size={model.patch_size}"
        yield f"{both}: must set exactly one, the other must be null"
    if model.embed_dim % (2 * model.num_heads):
        allowed = f"must be an even multiple of model.num_heads={model.num_heads}"
        yield f"model.embed_dim={model.embed_dim}: {allowed}"


def _dataset_problems(dataset: Dataset) -> Iterator[str]:
    if (seed := dataset.validation_seed) and not dataset.validation:
        yield f"dataset.validation_seed={seed}: dataset.validation=0 splits nothing, allowed is 0"
