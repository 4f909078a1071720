"""From the words of a command line to checked runs: expand a sweep, compose by Hydra, check."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from reproduction.config import CONF_DIR, HUGE, Config, Dataset, parse
from reproduction.runs import RunFolder, changes_result, default_name, find, flat, key
from reproduction.system import UserError, first_line, in_one_line, warn
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import allowed_of

GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
LISTS = ("augmentation", "logger")  # groups that take a list of options


class Point(NamedTuple):
    """A run: its words for train.py, its configuration with the name of its folder, its row."""

    words: tuple[str, ...]
    config: Config
    label: str = ""

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.config)

    @property
    def key(self) -> str:
        """The identity that the runs of all seeds share."""
        return key(self.config, seed=False)


def take(words: Sequence[str], **least: int) -> tuple[dict[str, int], list[str]]:
    """Takes plain numbers, such as `jobs=2`, out of the words of a command.

    `least` names the keys and their smallest values. Returns the numbers by key and other words.
    """
    numbers, rest = {}, []
    for word in words:
        key, _, text = word.partition("=")
        if key not in least:
            rest.append(word)
        elif not text.isdecimal() or int(text) < least[key]:
            raise UserError(f"{word}: must be an integer >= {least[key]}")
        else:
            numbers[key] = int(text)
    return numbers, rest


def expand(words: Sequence[str]) -> list[list[str]]:
    """Returns the points of a sweep, in Hydra's order: each list of values by every other."""
    each = []
    with one_line(), _initialized():
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        for word in words:
            with one_line(word):
                (override,) = parser.parse_overrides([word])
                key = override.get_key_element()
                if not override.key_or_group or override.key_or_group.startswith("hydra"):
                    raise UserError(f"{word}: must be key=value, with a key of train.py --help")
                if override.is_sweep_override():
                    each.append([f"{key}={value}" for value in override.sweep_string_iterator()])
                else:
                    each.append([word])
    return [list(point) for point in itertools.product(*each)]


@lru_cache(maxsize=1024)
def compose(words: tuple[str, ...]) -> Config:
    """Returns the configuration of these words; UserError for anything wrong with one of them."""
    OmegaConf.register_new_resolver(  # `${share:n,k}`: n / k, rounded down
        "share", lambda n, k: n // k if isinstance(n, int) else 0, replace=True
    )
    with one_line(*words), _initialized():
        tree = hydra.compose("train", [*words])
        loader = GlobalHydra.instance().config_loader()
        files = loader.compute_defaults_list("train", [*words], RunMode.RUN).defaults
        raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    for group in LISTS:
        paths = [str(x.config_path).partition("/") for x in files]
        chosen = [name for at, _, name in paths if at == group]
        for name in {*(raw.get(group) or {})} - {*chosen, "off_epoch"}:
            raise UserError(f"{group}.{name}: {group}=[{','.join(chosen)}] does not name {name}")
    return parse(raw)


def point(words: Sequence[str], label: str = "") -> Point:
    """Returns the run of these words, named after its label, its experiment or its settings.

    With resume=auto its name is that of the folder that holds it, if there is one.
    """
    others = tuple(word for word in words if not re.fullmatch(r"seed=\d{1,9}", word))  # cached
    config = compose(others)
    for word in words:
        if word not in others:
            config = replace(config, seed=int(word.partition("=")[2]))
    name = config.name
    if name is None and config.resume == "auto" and (folders := find(config)):
        name = folders[0].path.name
    if name is None:
        pairs = [(word.lstrip("+~").partition("=")[0], word) for word in words]
        quiet = ("seed", *(group for group in GROUPS if group != "recipe"))
        typed = [word for key, word in pairs if changes_result(key) and key not in quiet]
        experiment = dict(pairs).get("experiment", "").partition("=")[2]
        name = default_name(config, label or experiment, [] if label else typed)
    return Point(tuple(words), replace(config, name=name), label)


def check(points: Sequence[Point]) -> None:
    """Checks all that a run does before its first step; UserError for what cannot run."""
    from reproduction.data.sources import opened, record  # import torch
    from reproduction.training.run import check as check_run

    names = Counter(str(point.folder.path) for point in points)
    path, number = names.most_common(1)[0]
    if number > 1:
        raise UserError(f"name={path}: {number} points share this folder, each needs its own")
    for point in points:
        config, folder = point.config, point.folder
        folder.check(config)
        for other in find(config) if config.resume == "auto" else ():
            if other.path != folder.path:
                warn(f"{folder.path}: {other.path} holds the same run, and is left as it is")
        if folder.read_summary().get("data"):
            folder.check_data(record(opened(config.dataset), config.model.weights))
        if config.recipe.batch_size % config.devices:
            shared = f"must be divisible by devices={config.devices}"
            raise UserError(f"recipe.batch_size={config.recipe.batch_size}: {shared}")
        if not folder.is_finished():
            check_run(config)


def check_named(dataset: Dataset, words: Sequence[str]) -> None:
    """Raises UserError for own data whose function the words do not name: it would run."""
    source = f"dataset.source={dataset.source}"
    if dataset.is_own and source not in words:
        raise UserError(f"{source}: the images come from this code; to run it, add {source}")


@contextmanager
def one_line(*words: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line that names a word, and keys like its key."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many types: HydraException, OmegaConfBaseException, ValueError
        text = str(error)
        if "Could not override" not in text:
            text = str(error.__cause__ or error) or first_line(error)
        for tail in ("Config search path", "See https", "To append to your config use"):
            text = text.partition(tail)[0]
        is_named = any(word.lstrip("+~").partition("=")[0] in text for word in words)
        line = in_one_line(text if is_named else f"{' '.join(words)}: {text}")
        if typed := re.search(r"Could not override '([\w.]+)'", text):
            last = f".{typed[1].rpartition('.')[2]}"
            same = [key for key in allowed() if key.endswith(last)]
            line += f" known: {', '.join(same or get_close_matches(typed[1], allowed()))}"
        raise UserError(line) from error


@contextmanager
def _initialized() -> Iterator[None]:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield


# --- help ---------------------------------------------------------------------------------------

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {"array": "list", "boolean": "true, false", "string": "text", "object": "mapping"}


def help_text(words: Sequence[str]) -> str:
    """Says which options the groups have, and what is allowed for each key, with its value."""
    config = compose(tuple(words))
    values, texts = dict(flat(asdict(config))), allowed(config.model.family)
    width = max(map(len, texts))
    lines = ["Options of groups (files of conf/, whose comments say what the keys mean)"]
    for group in GROUPS:
        files = (CONF_DIR / group).rglob("*.yaml")
        names = sorted(str(x.relative_to(CONF_DIR / group).with_suffix("")) for x in files)
        lines.append(f"  {group}: {', '.join(names)}")
    lines += ["", "Allowed values, in brackets what these words give"]
    for name, text in texts.items():
        lines.append(f"{name:{width}}  {text}" + f" [{values.get(name)}]" * (name in values))
    return "\n".join(lines)


def allowed(family: str = "") -> dict[str, str]:
    """Returns what the schema allows for each key; of the models' keys, those of a family."""
    schema = TypeAdapter(Config).json_schema()
    return dict(_allowed(schema, schema["$defs"], family, ""))


def _allowed(group: Any, groups: Any, family: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted keys of a group of a JSON schema, and what is allowed."""
    for kind in (HTM, VTM, ManifoldMixup):
        if group["title"] == kind.__name__:
            yield from ((prefix + x, option.allowed) for x, option in allowed_of(kind).items())
            return
    for name, value in group["properties"].items():
        parts = value.get("anyOf") or value.get("oneOf") or [value]
        inner = [groups[x["$ref"].rpartition("/")[2]] for x in parts if "$ref" in x]
        for each in inner:
            of = each["properties"].get("family", {}).get("const")
            if not (of and family) or of == family:
                yield from _allowed(each, groups, family, f"{prefix}{name}.")
        if not inner:
            yield prefix + name, value.get("description") or " or ".join(map(_range, parts))


def _range(value: dict[str, Any]) -> str:
    """Describes one type of a JSON schema."""
    if "const" in value or "enum" in value:
        return ", ".join(value.get("enum") or [value["const"]])
    if value["type"] == "array" and "items" in value:
        return f"{value['minItems']} values: {_range(value['items'])}"
    if value["type"] not in ("integer", "number"):
        return TYPES.get(value["type"], "null")
    limits = {word: value[key] for key, word in BOUNDS.items() if key in value}
    texts = [f"{word} {x:.10g}" for word, x in limits.items() if abs(x) < HUGE]
    return f"{value['type']} {' and '.join(texts)}".strip()
