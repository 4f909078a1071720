"""Words become the configuration of a run: read by Hydra, composed by it, checked by the schema.

A word is one override as typed, such as key=value. It means what was typed: with -m as without,
and in a study as on a command line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from os.path import expanduser
from typing import Any

import hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.core.utils import env_override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from reproduction.config import (
    CONF_DIR,
    LONGEST_NAME,
    Command,
    Config,
    validated,
)
from reproduction.door import Role
from reproduction.errors import UserError
from reproduction.files import cut
from reproduction.folder import RunFolder, find
from reproduction.help import FREE, allowed, hydra_errors
from reproduction.identity import changes_result, name_hash, own_code, run_hash
from reproduction.machine import launched_ranks
from reproduction.reading import FileConfigSource

PRIMARY = "train"  # configuration, of conf/
OF_A_POINT = re.compile(r"seed=\d+|row='[^$]*'")  # words that change nothing but their key
# keys that default_name does not write as key=value: its head or its -s<seed> says them
IN_THE_NAME = ("seed", "model", "dataset", "augmentation", "experiment")
OF_THE_COMMAND = Command.__annotations__.keys() - {"row"}  # which a point says nothing of
# keys of Hydra that say how a sweep is run, and nothing of the job of one point
OF_SWEEPS = re.compile(r"hydra/launcher|hydra/sweeper|hydra\.(launcher|sweeper|sweep|mode)\b")

# --- words --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A word in the form that Hydra can read, and what it reads there."""

    text: str
    override: Override

    @property
    def key(self) -> str:
        """The key or group, without + or ~ before it."""
        return self.override.key_or_group

    @property
    def group(self) -> str:
        """The first part of its key."""
        return self.key.partition(".")[0]

    @property
    def value(self) -> Any:
        return self.override.value()

    @property
    def typed(self) -> str:
        """Its value as it was typed."""
        return self.text.partition("=")[2]

    @property
    def value_text(self) -> str:
        """Its value as a text: without quotes, but a number as it was typed."""
        if isinstance(self.value, str):
            return self.value
        return self.typed


@lru_cache(maxsize=4096)
def word_of(typed: str) -> Word:
    """Reads a word by Hydra's grammar; UserError if it cannot be read.

    This has no tilde, no apostrophe and no letter outside of ASCII: a value with one gets quotes.
    So does a number if the key takes a text: name=2026_11 is not 202611. And so does one with an
    underscore, for a key that the schema does not know.
    """
    key, equals, value = typed.partition("=")
    key, value = key.strip(), value.strip()
    forms = [key]
    if equals:
        forms = [f"{key}={value}"]
        is_list = value.startswith(("[", "{")) or "," in value
        if not is_list:
            forms.append(f"{key}={in_quotes(value)}")
    mistakes = []
    for form in forms:
        try:
            word = Word(form, OverridesParser.create().parse_override(form))
        except HydraException as error:
            mistakes.append(error)
            continue
        values = word.value.list if isinstance(word.value, ChoiceSweep) else [word.value]
        has_number = any(isinstance(x, int | float) for x in values)
        if word.key and not (has_number and means_a_text(word.key, value)):
            return word
    reason: object = "must be key=value, with a key of train.py --help, texts in quotes"
    if mistakes:
        reason = mistakes[0]
    raise UserError(f"{typed}: {reason}")


def means_a_text(key: str, value: str) -> bool:
    """Whether what looks like a number is none: by the schema, else by its underscore."""
    if key in allowed():
        return "string" in allowed()[key]
    return FREE.match(key) is not None and "_" in value


def readable(words: Sequence[str]) -> list[str]:
    """Returns words in the form that Hydra can read."""
    return [word_of(word).text for word in words]


def in_quotes(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def with_words(tree: Any, words: Sequence[str]) -> Any:
    """Returns plain nested values with those of words in their place; UserError for a sweep."""
    result = OmegaConf.create(tree)
    for word in words:
        read = word_of(word)
        if read.override.is_sweep_override() or read.override.is_delete():
            raise UserError(f"{word}: must be key=value, with a single value")
        OmegaConf.update(result, read.key, read.value, force_add=True)
    return OmegaConf.to_container(result, resolve=True, throw_on_missing=True)


def shared_words(points: Sequence["Point"]) -> list[str]:
    """Returns the words that all points have."""
    return [word for word in points[0].words if all(word in point.words for point in points)]


def last_part(key: str) -> str:
    """Returns what names a setting where its group is known: of recipe.lr it is lr."""
    return key.rpartition(".")[2]


def expand(words: Sequence[str]) -> list[list[str]]:
    """Returns the words of each point of a sweep: every value by every other, last word fastest.

    All words are kept, as in a run; a list of values is dropped where a later value replaces it.
    """
    words = readable(words)
    choices: dict[int, list[str]] = {}  # by the place of a word
    sweeps: dict[str, int] = {}  # key -> place of its list of values
    with config_loader() as loader, hydra_errors(*words):
        for place, override in enumerate(OverridesParser.create(loader).parse_overrides(words)):
            word = str(override.input_line)
            key = override.get_key_element()
            if override.is_hydra_override():
                raise UserError(f"{word}: must be a key of train.py --help")
            if key in sweeps and not isinstance(override.value(), dict):  # which would be merged
                del choices[sweeps.pop(key)]
            choices[place] = [word]
            if override.is_sweep_override():
                choices[place] = [f"{key}={value}" for value in override.sweep_string_iterator()]
                sweeps[key] = place
            if not choices[place]:
                raise UserError(f"{word}: names no value, so there is no run")
    return [[*point] for point in product(*choices.values())]


# --- composition --------------------------------------------------------------------------------


def share(number: Any, parts: int) -> int:
    """Returns number / parts, rounded down; 0 for what is no integer, which the schema refuses."""
    return number // parts if isinstance(number, int) else 0


OmegaConf.register_new_resolver("share", share, replace=True)
OmegaConf.register_new_resolver("expanduser", expanduser, replace=True)
SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource


@contextmanager
def config_loader() -> Iterator[ConfigLoader]:
    """Yields Hydra's loader: of train.py while it runs, with its search path; else of conf/."""
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
        return
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def typed_words(node: Any, part: str = "task") -> list[str]:
    """Returns the words of a command for the `task` or for `hydra`, as Hydra holds them."""
    words: Any = OmegaConf.to_container(node.overrides[part], resolve=False)  # keeps ${...}
    return [*words]


@lru_cache(maxsize=1024)
def _composed(primary: str, words: tuple[str, ...]) -> tuple[DictConfig, DictConfig]:
    """Returns what Hydra makes of these words, and its own node apart. Neither is to be changed."""
    with config_loader() as loader:
        tree = loader.load_configuration(primary, [*words], RunMode.RUN, from_shell=False)
    node = tree.hydra
    with open_dict(tree):
        del tree["hydra"]
    return tree, node


def composed(words: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Returns the tree of these words and Hydra's node, but for their seed and row.

    Those that differ in these alone are composed once.
    """
    others = [word for word in words if not OF_A_POINT.fullmatch(word)]
    with hydra_errors(*words):
        if not GlobalHydra.instance().is_initialized():
            return _composed(PRIMARY, tuple(others))
        running: Any = HydraConfig.get()  # of train.py
        words_of_hydra = typed_words(running, "hydra")
        tree, node = _composed(running.job.config_name, (*words_of_hydra, *others))
    for name in ("launcher", "sweeper"):
        chosen = OmegaConf.to_container(node[name])
        if chosen != OmegaConf.to_container(running[name]):
            reason = f"a point of the sweep chooses {chosen}, which the command must"
            raise UserError(f"hydra/{name}={running[name]._target_}: {reason}")
    return tree, node


def tree_of(words: Sequence[str]) -> DictConfig:
    """Returns the tree of these words, a copy."""
    tree, _ = composed(words)
    of_point = [word for word in words if OF_A_POINT.fullmatch(word)]
    merged: Any = OmegaConf.merge(tree, with_words({}, of_point))
    return merged


def compose(words: Sequence[str]) -> Config:
    """Returns the configuration of these words; UserError for anything wrong with one of them."""
    words = readable(words)
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


@dataclass(frozen=True)
class Point:
    """A run to train: the words that train.py needs to train it under the same name, and more."""

    words: tuple[str, ...]
    config: Config  # with the name of its folder
    label: str = ""  # STUDY/ROW, of the first of its rows; the word `row` has it
    environment: Mapping[str, str] = field(default_factory=dict)  # hydra.job.env_set

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.config)

    @property
    def words_of_job(self) -> list[str]:
        """The words of its job. They name its folder and its run: another one is refused there."""
        path = self.folder.path
        return [*self.words, f"name={in_quotes(path.name)}", f"planned={run_hash(self.config)}"]

    def job(self, master: DictConfig, number: int) -> DictConfig:
        """Returns its tree as a job of a sweep, whose tree is `master`, for Hydra's `run_job`."""
        tree = tree_of(self.words)
        OmegaConf.copy_cache(from_config=master, to_config=tree)
        with open_dict(tree):
            _, tree.hydra = composed(self.words)
            tree.hydra.mode = RunMode.MULTIRUN
            tree.hydra.job.num = number
            tree.hydra.job.id = str(number)
            tree.hydra.overrides.task = [*self.words]
        return tree


def planned_point(words: Sequence[str], label: str = "") -> Point:
    """Returns the run of these words, which are readable; of a row if it has a label."""
    words = [*words]
    if label:
        words.append(f"row={in_quotes(label)}")  # point_of reads it
    _, node = composed(words)
    with hydra_errors(*words):  # apart from the tree, as where Hydra reads it
        alone = OmegaConf.create({"hydra": node})
        environment: Any = OmegaConf.to_container(alone.hydra.job.env_set, resolve=True)
    with env_override(environment):
        planned = point_of(tree_of(words), words)
    return replace(planned, environment=environment)


def point_of(tree: DictConfig, words: Sequence[str]) -> Point:
    """Returns the run of a tree, named after its row, its experiment or its settings.

    With resume=auto its name is that of the folder that holds it, if there is one.
    """
    words = [word for word in words if word_of(word).key not in OF_THE_COMMAND]
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
    typed = {}
    for word in map(word_of, words):
        typed[word.key] = word
    stack = "+".join(config.augmentation.stack) or "plain"
    head = label or f"{config.model.name}-{config.dataset.name}-{stack}"
    if not label and "experiment" in typed:
        head = typed["experiment"].value_text.strip("[]")
    name = head.replace("/", "-")
    if not label:
        for key, word in typed.items():
            if changes_result(key) and key not in IN_THE_NAME:
                setting = f"{last_part(key)}={word.value_text.replace(',', '+')}"
                name += "-" + re.sub(r"(?a)[^\w.+=-]+", "", setting)
    tail = f"-s{config.seed}-{name_hash(config)}"
    return cut(name, LONGEST_NAME, tail)


def hydra_arguments() -> list[str]:
    """Returns what makes another train.py read and do what the command has told Hydra.

    Its files, as its parser has them, and the words for Hydra but for those of a sweep.
    """
    node: Any = HydraConfig.get()
    line = []
    for source in node.runtime.config_sources:
        if source.provider == "command-line":
            line += ["--config-dir", source.path]
        if source.provider == "main" and source.path != str(CONF_DIR):
            line += ["--config-path", source.path]
    if node.job.config_name != PRIMARY:
        line += ["--config-name", node.job.config_name]
    of_hydra = typed_words(node, "hydra")
    return line + [word for word in of_hydra if not OF_SWEEPS.match(word_of(word).key)]


def check_asked(config: Config, words: Sequence[str], *roles: Role) -> None:
    """Raises UserError for code from elsewhere in these roles that the words do not name.

    The configuration of a run from elsewhere must run no code unasked.
    """
    named = {word.key: word.value_text for word in map(word_of, words)}
    for door, path in own_code(config):
        if door.role in roles and named.get(door.typed_key) != path:
            word = door.word(path)
            raise UserError(f"{word}: the run needs this code; to run it, add {word}")
