"""From the words of a command line to checked points: compose by Hydra, name, check."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from os.path import expanduser
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from reproduction.config import CONF_DIR, LONGEST_NAME, SOURCES, Config, Dataset, parse
from reproduction.folder import RunFolder, find
from reproduction.help import OF_COMMAND
from reproduction.identity import RowId, changes_result, key, mark
from reproduction.system import UserError, launched_ranks
from reproduction.words import hydra_errors, in_quotes, is_number, key_of, merged, readable

TOLD = ("seed", "model", "dataset", "augmentation", "experiment")  # in a name anyway
PRIMARY = "train"  # configuration, of conf/
NO_SETTINGS = ("jobs", "task", "dry_run", "row")  # words that say how points are run


@dataclass(frozen=True)
class Point:
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

    @property
    def typed(self) -> list[str]:
        """The words with which train.py names the run as it is named here."""
        row = [f"row={in_quotes(self.label)}"] if self.label else []
        return [*self.words, *row]


def expand(words: Sequence[str]) -> list[list[str]]:
    """Returns the points of a sweep, in Hydra's order: each list of values by every other."""
    words = [readable(word) for word in words]
    typed = {}
    with _config_loader() as loader, hydra_errors(*words):
        overrides = OverridesParser.create(loader).parse_overrides(words)
        for override in overrides:
            word = str(override.input_line)
            if override.is_hydra_override():
                raise UserError(f"{word}: must be a key of train.py --help")
            if not override.is_sweep_override():
                typed[override.get_key_element()] = word
            elif override.is_discrete_sweep() and not [*override.sweep_string_iterator()]:
                raise UserError(f"{word}: names no value, so there is no run")
        (points,) = BasicSweeper.split_arguments(overrides, None)
    return [[typed.get(word.partition("=")[0], word) for word in point] for point in points]


# --- composition --------------------------------------------------------------------------------


def register_resolvers() -> None:
    """Registers the functions that conf/ calls."""
    OmegaConf.register_new_resolver("share", share, replace=True)
    OmegaConf.register_new_resolver("home", expanduser, replace=True)


def share(number: Any, parts: int) -> int:
    """Returns number / parts, rounded down."""
    return number // parts if isinstance(number, int) else 0


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


def _primary() -> tuple[str, tuple[str, ...]]:
    """Returns the name of the primary configuration and the words for Hydra, of train.py's."""
    if not (GlobalHydra.instance().is_initialized() and HydraConfig.initialized()):
        return PRIMARY, ()
    own: Any = HydraConfig.get()
    return own.job.config_name, tuple(typed_words(own, "hydra"))


@lru_cache(maxsize=1024)
def _tree(primary: str, words: tuple[str, ...]) -> DictConfig:
    """Returns the tree of these words, not resolved. Not to be changed."""
    register_resolvers()
    with _config_loader() as loader:
        tree = loader.load_configuration(primary, [*words], RunMode.RUN, from_shell=False)
    with open_dict(tree):
        del tree["hydra"]
    return tree


def composed(words: Sequence[str]) -> DictConfig:
    """Returns the tree of these words; those that differ by their seed alone are composed once."""
    primary, own = _primary()
    seeds = [word for word in words if key_of(word) == "seed" and is_number(word)]
    others = [word for word in words if word not in seeds]
    with hydra_errors(*words):
        tree: Any = OmegaConf.merge(_tree(primary, (*own, *others)), merged({}, seeds))
    return tree


def compose(words: Sequence[str]) -> Config:
    """Returns the configuration of these words; UserError for anything wrong with one of them."""
    words = [readable(word) for word in words]
    return config_of(composed(words), words)


def config_of(tree: DictConfig, words: Sequence[str] = ()) -> Config:
    """Returns the configuration of a tree; UserError for what is not allowed, missing or unread."""
    with hydra_errors(*words):
        raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    stack = raw["augmentation"]
    chosen = stack.pop("chosen", {})  # set by the files that the list names
    for name in {*stack} - {*chosen, "off_epoch"}:  # of an experiment
        reason = f"augmentation=[{','.join(chosen)}] does not name it"
        raise UserError(f"augmentation.{name}={stack[name]}: {reason}")
    return parse({name: value for name, value in raw.items() if name not in OF_COMMAND})


# --- points -------------------------------------------------------------------------------------


def same_files() -> list[str]:
    """Returns the arguments with which another train.py reads the files that this one reads."""
    if not HydraConfig.initialized():
        return []
    own: Any = HydraConfig.get()
    sources = [x.path for x in own.runtime.config_sources if x.provider == "command-line"]
    of_hydra = typed_words(own, "hydra")
    searched = [word for word in of_hydra if key_of(word) == "hydra.searchpath"]
    flags = [flag for path in sources for flag in ("--config-dir", path)]
    if own.job.config_name != PRIMARY:
        flags += ["--config-name", own.job.config_name]
    return [*flags, *searched]


def point(words: Sequence[str], label: str = "") -> Point:
    """Returns the run of these words, of a row if it has a label."""
    words = [readable(word) for word in words]
    if label:
        words.append(f"row={in_quotes(label)}")
    return point_of(composed(words), words)


def point_of(tree: DictConfig, words: Sequence[str]) -> Point:
    """Returns the run of a tree, named after its row, its experiment or its settings.

    With resume=auto its name is that of the folder that holds it, if there is one.
    """
    words = [word for word in words if key_of(word) not in NO_SETTINGS]
    config, label = config_of(tree, words), str(tree.row or "")
    ranks = launched_ranks()
    if ranks is not None:
        if config.devices not in (1, ranks):
            raise UserError(f"devices={config.devices}: torchrun has started {ranks} ranks")
        config = replace(config, devices=ranks)
    name = config.name
    if name is None and config.resume == "auto":
        folders = find(config)
        name = folders[0].path.name if folders else None
    if name is None:
        name = default_name(config, words, label)
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
