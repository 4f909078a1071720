"""From the words of a command line to checked runs: expand a sweep, compose by Hydra, check."""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from reproduction.config import CONF_DIR, LONGEST_NAME, SOURCES, Config, Dataset, parse
from reproduction.runs import RowId, RunFolder, changes_result, find, flat, key, mark
from reproduction.system import UserError, launched_ranks
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import allowed_of

GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
TOLD = ("seed", "model", "dataset", "augmentation", "experiment")  # in a name anyway


class Point(NamedTuple):
    """A run: its words for train.py, its configuration with the name of its folder, its rows."""

    words: tuple[str, ...]
    config: Config
    label: str = ""  # names the first of its rows
    rows: tuple[RowId, ...] = ()  # of studies

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
    with _initialized():
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        for word in words:
            with one_line(word):
                (override,) = parser.parse_overrides([word])
                key, values = override.get_key_element(), [word]
                if not override.key_or_group or override.key_or_group.startswith("hydra"):
                    raise UserError(f"{word}: must be key=value, with a key of train.py --help")
                if override.is_sweep_override():
                    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
            # a name that begins with a digit is no number, such as 2026_11_26
            each.append([re.sub(r"^name=(\d[\w.+-]*)$", r"name='\1'", value) for value in values])
    return [list(point) for point in itertools.product(*each)]


@lru_cache(maxsize=1024)
def _tree(words: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Returns the tree of these words, not resolved, and what is chosen of `augmentation`."""
    OmegaConf.register_new_resolver(  # `${share:n,k}`: n / k, rounded down
        "share", lambda n, k: n // k if isinstance(n, int) else 0, replace=True
    )
    with _initialized():
        tree = hydra.compose("train", [*words])
        loader = GlobalHydra.instance().config_loader()
        files = loader.compute_defaults_list("train", [*words], RunMode.RUN).defaults
    paths = [str(x.config_path).partition("/") for x in files]
    return tree, [name for group, _, name in paths if group == "augmentation"]


def compose(words: Sequence[str]) -> Config:
    """Returns the configuration of these words; UserError for anything wrong with one of them."""
    seeds = [word for word in words if re.fullmatch(r"seed=\d{1,9}", word)]  # share a tree
    with one_line(*words):
        tree, chosen = _tree(tuple(word for word in words if word not in seeds))
        tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(seeds))
        raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    for name in {*raw["augmentation"]} - {*chosen, "off_epoch"}:  # of an experiment
        reason = f"augmentation=[{','.join(chosen)}] does not name it"
        raise UserError(f"augmentation.{name}={raw['augmentation'][name]}: {reason}")
    return parse(raw)


def point(words: Sequence[str], label: str = "") -> Point:
    """Returns the run of these words, named after its label, its experiment or its settings.

    With resume=auto its name is that of the folder that holds it, if there is one.
    """
    config = compose(words)
    if (ranks := launched_ranks()) is not None:
        if config.devices not in (1, ranks):
            raise UserError(f"devices={config.devices}: torchrun has started {ranks} ranks")
        config = replace(config, devices=ranks)
    name = config.name
    if name is None and config.resume == "auto" and (folders := find(config)):
        name = folders[0].path.name
    name = name or default_name(config, words, label)
    return Point(tuple(words), replace(config, name=name), label)


def default_name(config: Config, words: Sequence[str], label: str) -> str:
    """Returns `<label, experiment or model-dataset-stack>[-key=value...]-s<seed>-<key>`.

    Without a label, the last part of each key is named, in plain characters, up to LONGEST_NAME.
    """
    typed = {key: text for key, _, text in (word.lstrip("+~").partition("=") for word in words)}
    stack = "+".join(config.augmentation.stack) or "plain"
    head = (label or typed.get("experiment", "")).replace("/", "-")
    name = head or f"{config.model.name}-{config.dataset.name}-{stack}"
    for dotted, text in typed.items() if not label else ():
        if changes_result(dotted) and dotted not in TOLD:
            setting = f"{dotted.rpartition('.')[2]}={text.replace(',', '+')}"
            name += "-" + re.sub(r"(?a)[^\w.+=-]+", "", setting)
    tail = f"-s{config.seed}-{mark(config)}"
    return name.encode()[: LONGEST_NAME - len(tail)].decode(errors="ignore") + tail


def check_named(dataset: Dataset, words: Sequence[str]) -> None:
    """Raises UserError for own data whose function the words do not name: it would run."""
    source = f"dataset.source={dataset.source}"
    if not dataset.source.startswith(f"{SOURCES}:") and source not in words:
        raise UserError(f"{source}: the images come from this code; to run it, add {source}")


@contextmanager
def one_line(*words: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line that names a word, and what is allowed."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many types: HydraException, OmegaConfBaseException, ValueError
        cause = error.__cause__ or error
        typed = {word.lstrip("+~").partition("=")[0]: word for word in words}
        line = re.split(r"\n(?=\s|See )", str(cause))[0]  # without advice that is not for us
        if key := getattr(cause, "full_key", None):  # which may be a part of what was typed
            key = next((x for x in typed if x.startswith(key)), key)
            if isinstance(cause, AttributeError | KeyError):
                whole = [x for x in allowed() if x.endswith(f".{key}")]  # typed without its group
                line = ", perhaps ".join(["the chosen options have no such key", *whole[:1]])
            line = f"{typed.get(key, key)}: {line}"
        elif not any(x in line for x in typed):
            line = f"{' '.join(words)}: {line}"
        if found := re.search(r"'(\w+)/", line):  # 'group/option'
            line += f" allowed: {', '.join(options_of(found[1]))}"
        raise UserError(line) from error


@contextmanager
def _initialized() -> Iterator[None]:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield


# --- help ---------------------------------------------------------------------------------------

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
BOUNDS |= {"minItems": "of"}


def options_of(group: str) -> list[str]:
    """Returns the names of the files of a group."""
    files = (CONF_DIR / group).rglob("*.yaml")
    return sorted(str(x.relative_to(CONF_DIR / group).with_suffix("")) for x in files)


def help_text(words: Sequence[str]) -> str:
    """Says which options the groups have, and what is allowed for each key, with its value."""
    config = compose(words)
    values, texts = dict(flat(asdict(config))), allowed(config.model.family)
    width = max(map(len, texts))
    lines = ["Options of groups (files of conf/, whose comments say what the keys mean)"]
    lines += [f"  {group}: {', '.join(options_of(group))}" for group in GROUPS]
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
            yield prefix + name, " or ".join(map(_type, parts))


def _type(value: dict[str, Any]) -> str:
    """Describes one type of a JSON schema by its own words."""
    choices = value.get("enum") or [value["const"]] if {"enum", "const"} & {*value} else []
    bounds = [f"{BOUNDS[key]} {x}" for key, x in value.items() if key in BOUNDS]
    return ", ".join(map(str, choices)) or " ".join([value["type"], *bounds])
