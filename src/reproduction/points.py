"""From the words of a command to its points: composed by Hydra, checked by the schema, named."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from os.path import expanduser
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from reproduction.config import (
    CONF_DIR,
    LONGEST_NAME,
    SOURCES,
    Command,
    Config,
    Dataset,
    validated,
)
from reproduction.folder import RunFolder, find
from reproduction.identity import RowId, changes_result, name_hash, row_hash
from reproduction.system import UserError, launched_ranks
from reproduction.words import hydra_errors, in_quotes, key_of, last_part, readable, with_words

PRIMARY = "train"  # configuration, of conf/
SEED = re.compile(r"seed=\d+")  # a word that changes nothing but the seed
# keys that default_name does not write as key=value: its head or its -s<seed> says them
IN_THE_NAME = ("seed", "model", "dataset", "augmentation", "experiment")
OF_ALL_POINTS = Command.__annotations__.keys() - {"row"}  # not for the process of one point


@dataclass(frozen=True)
class Point:
    """A run to train: the words that train.py needs to train it under the same name, and more."""

    words: tuple[str, ...]
    config: Config  # with the name of its folder
    label: str = ""  # STUDY/ROW, of the first of its rows; the word `row` has it
    rows: tuple[RowId, ...] = ()  # of studies that this run is in

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.config)

    @property
    def row_hash(self) -> str:
        return row_hash(self.config)


def expand(words: Sequence[str]) -> list[list[str]]:
    """Returns the words of each point of a sweep: every value by every other, last key fastest.

    Of words with the same key the last counts.
    """
    words = [readable(word) for word in words]
    choices = {}
    with _config_loader() as loader, hydra_errors(*words):
        for override in OverridesParser.create(loader).parse_overrides(words):
            word = str(override.input_line)
            key = override.get_key_element()
            if override.is_hydra_override():
                raise UserError(f"{word}: must be a key of train.py --help")
            choices[key] = [word]
            if override.is_sweep_override():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not choices[key]:
                raise UserError(f"{word}: names no value, so there is no run")
    return [[*point] for point in product(*choices.values())]


# --- composition --------------------------------------------------------------------------------


def share(number: Any, parts: int) -> int:
    """Returns number / parts, rounded down; 0 for what is no integer, which the schema refuses."""
    return number // parts if isinstance(number, int) else 0


OmegaConf.register_new_resolver("share", share, replace=True)
OmegaConf.register_new_resolver("expanduser", expanduser, replace=True)


@contextmanager
def _config_loader() -> Iterator[ConfigLoader]:
    """Yields Hydra's loader: of train.py while it runs, with its search path; else of conf/."""
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
        return
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def typed_words(own: Any, part: str = "task") -> list[str]:
    """Returns the words of a command for the `task` or for `hydra`, as Hydra holds them."""
    words: Any = OmegaConf.to_container(own.overrides[part], resolve=False)  # keeps ${...}
    return [*words]


@lru_cache(maxsize=1024)
def _composed(primary: str, words: tuple[str, ...]) -> DictConfig:
    """Returns what Hydra makes of these words, not resolved. Not to be changed."""
    with _config_loader() as loader:
        tree = loader.load_configuration(primary, [*words], RunMode.RUN, from_shell=False)
    with open_dict(tree):
        del tree["hydra"]
    return tree


def tree_of(words: Sequence[str]) -> DictConfig:
    """Returns the tree of these words; those that differ by their seed alone are composed once."""
    primary = PRIMARY
    of_hydra: list[str] = []
    if GlobalHydra.instance().is_initialized():  # in train.py
        own: Any = HydraConfig.get()
        primary = own.job.config_name
        of_hydra = typed_words(own, "hydra")
    seeds = [word for word in words if SEED.fullmatch(word)]
    others = [word for word in words if word not in seeds]
    with hydra_errors(*words):
        tree = _composed(primary, (*of_hydra, *others))
        merged: Any = OmegaConf.merge(tree, with_words({}, seeds))
    return merged


def compose(words: Sequence[str]) -> Config:
    """Returns the configuration of these words; UserError for anything wrong with one of them."""
    words = [readable(word) for word in words]
    return config_of(tree_of(words), words)


def config_of(tree: DictConfig, words: Sequence[str] = ()) -> Config:
    """Returns the configuration of a tree; UserError for what is not allowed, missing or unread."""
    with hydra_errors(*words):
        raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    stack = raw["augmentation"]
    chosen = stack.pop("chosen", {})  # from the files of the methods in the list
    for name in stack.keys() - chosen.keys() - {"off_epoch"}:
        reason = f"augmentation=[{','.join(chosen)}] does not name it"
        raise UserError(f"augmentation.{name}={stack[name]}: {reason}")
    return validated(Config, {key: raw[key] for key in raw if key not in Command.__annotations__})


def command_of(tree: DictConfig) -> Command:
    """Returns the other keys of a tree; UserError for what is not allowed."""
    return validated(Command, {key: tree[key] for key in Command.__annotations__})


# --- points -------------------------------------------------------------------------------------


def flags_of_files() -> list[str]:
    """Returns the arguments with which another train.py reads the files that this one reads."""
    own: Any = HydraConfig.get()
    flags = []
    for source in own.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
    if own.job.config_name != PRIMARY:
        flags += ["--config-name", own.job.config_name]
    of_hydra = typed_words(own, "hydra")
    return flags + [word for word in of_hydra if key_of(word) == "hydra.searchpath"]


def point(words: Sequence[str], label: str = "") -> Point:
    """Returns the run of these words, of a row if it has a label."""
    words = [readable(word) for word in words]
    if label:
        words.append(f"row={in_quotes(label)}")  # point_of reads it
    return point_of(tree_of(words), words)


def point_of(tree: DictConfig, words: Sequence[str]) -> Point:
    """Returns the run of a tree, named after its row, its experiment or its settings.

    With resume=auto its name is that of the folder that holds it, if there is one.
    """
    words = [word for word in words if key_of(word) not in OF_ALL_POINTS]
    config = config_of(tree, words)
    label = str(tree.row or "")
    ranks = launched_ranks()
    if ranks is not None:
        if config.devices not in (1, ranks):  # 1 is the default
            raise UserError(f"devices={config.devices}: torchrun has started {ranks} ranks")
        config = replace(config, devices=ranks)
    name = config.name
    if name is None and config.resume == "auto":
        name = next((folder.path.name for folder in find(config)), None)
    if name is None:
        name = default_name(config, words, label)
    return Point(tuple(words), replace(config, name=name), label)


def default_name(config: Config, words: Sequence[str], label: str) -> str:
    """Returns `<label, experiment or model-dataset-stack>[-key=value...]-s<seed>-<name_hash>`.

    Without a label, the last part of each key is named, in plain characters, up to LONGEST_NAME.
    """
    texts = {}
    for word in words:
        key, _, text = word.lstrip("+~").partition("=")
        texts[key] = text
    stack = "+".join(config.augmentation.stack) or "plain"
    head = label or texts.get("experiment", "")
    name = head.replace("/", "-") or f"{config.model.name}-{config.dataset.name}-{stack}"
    if not label:
        for key, text in texts.items():
            if changes_result(key) and key not in IN_THE_NAME:
                setting = f"{last_part(key)}={text.replace(',', '+')}"
                name += "-" + re.sub(r"(?a)[^\w.+=-]+", "", setting)
    tail = f"-s{config.seed}-{name_hash(config)}"
    return name.encode()[: LONGEST_NAME - len(tail)].decode(errors="ignore") + tail


def check_named(dataset: Dataset, words: Sequence[str]) -> None:
    """Raises UserError for own data whose function the words do not name.

    Opening the data runs it, and the config of a run from elsewhere must run no code unasked.
    """
    source = f"dataset.source={dataset.source}"
    if not dataset.source.startswith(f"{SOURCES}:") and source not in words:
        raise UserError(f"{source}: the images come from this code; to run it, add {source}")
