"""What is allowed, by the files of conf/ and the schema; and what is said of what is not."""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import TypeAdapter

from reproduction.config import CONF_DIR, Command, Config, HTMByName
from reproduction.errors import OneLineError, UserError, as_typed, nearest
from reproduction.identity import flat
from tokenmixup import VTM, ManifoldMixup
from tokenmixup.settings import allowed_of

GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
FREE = re.compile(r"logger\.|.*(options|metrics)\.")  # begins a key of a group that may have any
SEARCHED = re.compile(r"path=file://(.+)")  # in what Hydra says of its search
BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minItems": "of",
}


def options_of(group: str, places: Sequence[str]) -> list[str]:
    """Returns the names of the files of a group, in conf/ and in other places of the search."""
    names = set()
    for folder in [CONF_DIR / group, *(Path(place, group) for place in places)]:
        names |= {str(x.relative_to(folder).with_suffix("")) for x in folder.rglob("*.yaml")}
    return sorted(names)


def help_text(tree: DictConfig) -> str:
    """Says what is allowed for each key, with its value in a tree, in which some may be missing."""
    values = {}
    raw: Any = OmegaConf.to_container(tree, resolve=False)
    for key, _ in flat(raw):
        try:
            values[key] = as_typed(OmegaConf.select(tree, key, default=MISSING))
        except OmegaConfBaseException:  # stands for a value that is missing
            values[key] = MISSING
    texts = allowed(tree.model.family)
    width = max(map(len, texts))
    lines = []
    for name, types in texts.items():
        line = f"{name:{width}}  {' or '.join(types)}"
        if name in values:
            line += f" [{values[name]}]"
        lines.append(line)
    return "\n".join(lines)


@lru_cache
def allowed(family: str = "") -> dict[str, list[str]]:
    """Returns the types that the schema allows for each key; of the models' keys, of a family."""
    found: dict[str, list[str]] = {}
    for kind in (Command, Config):
        schema = TypeAdapter(kind).json_schema()
        found |= _allowed(schema, schema.get("$defs"), family, "")
    return found


def _allowed(group: Any, groups: Any, family: str, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the dotted keys of a group of a JSON schema, and the types that it allows."""
    for kind in (HTMByName, VTM, ManifoldMixup):
        if group["title"] == kind.__name__:
            yield from ((prefix + x, [option.allowed]) for x, option in allowed_of(kind).items())
            return
    for name, value in group["properties"].items():
        parts = value.get("anyOf") or value.get("oneOf") or [value]
        inner = [groups[x["$ref"].rpartition("/")[2]] for x in parts if "$ref" in x]
        for each in inner:
            of = each["properties"].get("family", {}).get("const", family)
            if family in ("", of):
                yield from _allowed(each, groups, family, f"{prefix}{name}.")
        if not inner:
            yield prefix + name, [*map(_type, parts)]


def _type(value: dict[str, Any]) -> str:
    """Describes one type of a JSON schema by its own words."""
    if "const" in value:
        return str(value["const"])
    if "enum" in value:
        return ", ".join(value["enum"])
    if "allowed" in value:
        return str(value["allowed"])
    bounds = [f"{BOUNDS[name]} {x}" for name, x in value.items() if name in BOUNDS]
    return " ".join([value["type"], *bounds])


# --- errors -------------------------------------------------------------------------------------


@contextmanager
def hydra_errors(*words: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line that names a word, and what is allowed."""
    try:
        yield
    except OneLineError:
        raise
    except Exception as error:
        if not _is_hydras(error):
            raise
        raise UserError(_told(error, words)) from error


def _is_hydras(error: Exception) -> bool:
    """Whether an error is about the configuration: of its libraries' types, or of their code."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("hydra", "omegaconf")


def _told(error: Exception, words: Sequence[str]) -> str:
    """Says what was typed wrong, by Hydra's or OmegaConf's message and the key that it names."""
    cause = error.__cause__ or error
    message = re.split(r"\n(?=\s|See )", str(cause))[0]  # without advice that is not for us
    if isinstance(cause, MissingConfigException):
        return _no_such_file(cause, message)
    typed = {word.lstrip("+~").partition("=")[0]: word for word in words}
    named = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue | InterpolationToMissingValueError):
        missing = message.rpartition("Missing mandatory value: ")[2]
        if "." not in missing:
            missing = named
        return f"{missing}: must be set; --help lists what is allowed"
    if named:
        key = next((key for key in typed if key.startswith(named)), named)
        if isinstance(cause, AttributeError | KeyError):
            message = _no_such(key)
        return f"{typed.get(key, key)}: {message}"
    is_of_a_file = message.startswith("In '")
    if words and not is_of_a_file and not any(key in message for key in typed):
        return f"{' '.join(words)}: {message}"
    return message


def _no_such_file(error: MissingConfigException, message: str) -> str:
    """Says of an option that a group does not have which ones there are."""
    group, slash, option = str(error.missing_cfg_file).partition("/")
    if not slash:  # the file of --config-name
        return message
    if group == "hydra":
        group, _, option = option.partition("/")
        if group not in ("launcher", "sweeper"):
            return message
        return f"hydra/{group}={option}: is not installed; docs/studies.md names its package"
    options = options_of(group, SEARCHED.findall(str(error)))
    near = nearest(option, options)
    return f"{message.rstrip('.')}{near}; allowed: {', '.join(options)}"


def _no_such(key: str) -> str:
    """Says of a key that the chosen options do not have which one may be meant."""
    known = allowed()
    line = "the chosen options have no such key"
    if FREE.match(key):
        return f"{line}; one that is not yet set takes a + before it"
    without_group = [name for name in known if name.endswith(f".{key}")]
    if without_group:
        return f"{line}, perhaps {without_group[0]}"
    if any(f"{name}.".startswith(f"{key}.") for name in known):
        return f"{line}, which another option of {key.partition('.')[0]} has"
    return f"{line}{nearest(key, [*known, *GROUPS])}; --help lists them all"
