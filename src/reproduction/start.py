"""From the words of a command line to checked runs: expand a sweep, compose by Hydra, check."""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from reproduction.config import CONF_DIR, LONGEST_NAME, SOURCES, Config, Dataset, parse
from reproduction.help import allowed, options_of
from reproduction.runs import RowId, RunFolder, changes_result, find, key, mark
from reproduction.system import UserError, launched_ranks
from reproduction.words import merged, readable

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
        for word in map(readable, words):
            (override,) = parser.parse_overrides([word])
            if override.is_hydra_override():
                raise UserError(f"{word}: must be a key of train.py --help")
            values = [word]
            if override.is_sweep_override():
                key = override.get_key_element()
                with one_line(word):
                    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not values:
                raise UserError(f"{word}: names no value, so there is no run")
            each.append(values)
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
    words = [readable(word) for word in words]
    seeds = [word for word in words if word.startswith("seed=")]
    with one_line(*words):
        tree, chosen = _tree(tuple(word for word in words if word not in seeds))
        raw = merged(tree, seeds)
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
