"""From plain values to the typed configuration, or to one line that says what is wrong.

Imports neither torch nor Hydra, so that a mistyped command is refused at once.
"""

import re
from typing import Any

from pydantic import TypeAdapter, ValidationError

from reproduction.config.schema import Config
from reproduction.runs.checks import problems
from reproduction.system.errors import UserError, in_one_line

LONGEST = 200  # characters of a value that are shown


def parse(raw: dict[str, Any], needs_data: bool = True, trains: bool = True) -> Config:
    """The typed configuration; UserError names each bad key, its value and what is allowed.

    Without `needs_data` the images may be missing, as for a plan; without `trains` the global batch
    need not divide over the ranks, as for an evaluation.
    """
    config = parse_types(raw)
    if found := list(problems(config, needs_data, trains)):
        raise UserError("; ".join(found))
    return config


def parse_types(raw: dict[str, Any]) -> Config:
    """Types and ranges alone, to compare configurations whose data need not be on this machine."""
    try:
        return TypeAdapter(Config).validate_python(raw)
    except ValidationError as error:
        raise UserError("; ".join(_describe(e, raw) for e in error.errors())) from None


def parse_saved(raw: dict[str, Any]) -> Config:
    """A run's own configuration, to look at its weights: how it came to them does not matter."""
    model = raw.get("model")
    if isinstance(model, dict):
        model = {k: None if k in ("weights", "pretrained") else v for k, v in model.items()}
    return parse({**raw, "model": model}, trains=False)


def _describe(error: Any, raw: dict[str, Any]) -> str:
    """One pydantic error as `key=value: what is allowed`."""
    path: list[str] = []
    parent: Any = raw
    value: Any = raw
    for part in error["loc"]:
        if (
            isinstance(value, dict)
            and part not in value
            and part in ("cct", "vit", "library", "none", "wandb")
        ):
            continue  # the tag of a union, not a key
        path.append(str(part))
        parent, value = value, value[part] if _holds(value, part) else None
    key, value = ".".join(path), in_one_line(str(value), LONGEST)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = ", ".join(str(k) for k in parent if k != path[-1])
        return f"{key}={value}: unknown key; {'.'.join(path[:-1]) or 'known'} has {known}"
    if error["type"] == "missing":
        return f"{key}: no value is set"
    if error["type"] == "union_tag_invalid":
        tag = error["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag}={error['ctx']['tag']}: must be {error['ctx']['expected_tags']}"
    if error["type"] == "value_error" and path[:1] == ["augmentation"]:  # of the library
        return f"augmentation.{error['msg'].removeprefix('Value error, ')}"
    message = re.sub(r"^(Value error, must|\w+ should) ", "", error["msg"])
    message = re.sub(r"be a dictionary or an instance of \w+", "be a mapping of settings", message)
    return f"{key}={value}: must {message}"


def _holds(value: Any, part: Any) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)
