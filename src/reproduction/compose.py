"""Overrides become the configuration of a run: composed by Hydra, checked by the schema.

What Hydra refuses is one line that names an override or a file: `hydra_errors`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from traceback import walk_tb
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from reproduction.config import CONF_DIR, LONGEST_NAME, Command, Config, validated
from reproduction.errors import UserError
from reproduction.files import cut
from reproduction.folder import RunFolder
from reproduction.function_keys import Role
from reproduction.identity import changes_result, own_code, run_hash
from reproduction.machine import launched_ranks

PRIMARY = "train"  # configuration, of conf/
# keys that run_name does not write as key=value: its head or its -s<seed> says them
IN_THE_NAME = ("seed", "model", "dataset", "augmentation", "experiment")
OF_THE_COMMAND = Command.__annotations__.keys() - {"row"}  # which no run has
NOT_OF_A_RUN = {"hydra", *Command.__annotations__}
FLAGS = {"main": "--config-path", "command-line": "--config-dir"}  # of Hydra, by its providers
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)
# keys of Hydra that say how a sweep is run, and nothing of one run
OF_SWEEPS = re.compile(r"hydra/launcher|hydra/sweeper|hydra\.(launcher|sweeper|sweep|mode)\b")

# --- errors -------------------------------------------------------------------------------------


@contextmanager
def hydra_errors(*overrides: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line, which names an override or all of them."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        is_of_hydra = frame.f_globals.get("__name__", "").startswith("hydra.")
        is_ours = isinstance(error, UserError | BrokenPipeError)
        if is_ours or not (isinstance(error, HYDRA_ERRORS) or is_of_hydra):
            raise
        text = f"{error}{_near_key(error.__cause__ or error)}"
        if overrides and not any(
            override.lstrip("+~").partition("=")[0] in text for override in overrides
        ):
            text = f"{' '.join(overrides)}: {text}"
        raise UserError(text) from error


def _near_key(cause: BaseException) -> str:
    """Says which key may be meant by one that is not in the configuration."""
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError) or cause.parent_node is None:
        return ""
    group, dot, _ = str(cause.full_key).rpartition(".")
    names = [f"{group}{dot}{name}" for name in cause.parent_node]
    near = get_close_matches(str(cause.full_key), names, n=1)
    return f", perhaps {near[0]}" if near else ""


# --- overrides ----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def read_override(override: str) -> Override:
    """Reads an override by Hydra's grammar; UserError if it cannot be read."""
    with hydra_errors(override):
        return OverridesParser.create().parse_override(override)


def key_of(override: str) -> str:
    """Returns the key or group of an override, without + or ~ before it."""
    return read_override(override).key_or_group


def in_quotes(text: str) -> str:
    return QuotedString(text, Quote.double).with_quotes()


def with_overrides(tree: Any, overrides: Sequence[str]) -> Any:
    """Returns plain nested values with those of overrides in their place; UserError for a sweep."""
    result = OmegaConf.create(tree)
    for override in overrides:
        read = read_override(override)
        if read.is_sweep_override() or read.is_delete():
            raise UserError(f"{override}: must be key=value, with a single value")
        OmegaConf.update(result, read.key_or_group, read.value(), force_add=True)
    return OmegaConf.to_container(result, resolve=True, throw_on_missing=True)


def last_part(key: str) -> str:
    """Returns what names a setting where its group is known: of recipe.lr it is lr."""
    return key.rpartition(".")[2]


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each run of a sweep: every value by every other, the last fastest.

    As in Hydra's own sweeper, a later override of a key replaces an earlier one.
    """
    choices = {}
    with config_loader() as loader, hydra_errors(*overrides):
        for override in OverridesParser.create(loader).parse_overrides([*overrides]):
            key = override.get_key_element()
            choices[key] = [str(override.input_line)]
            if override.is_sweep_override():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    runs = [list(run) for run in product(*choices.values())]
    if not runs:
        raise UserError(f"{' '.join(overrides)}: names no value, so there is no run")
    return runs


# --- composition --------------------------------------------------------------------------------


def share(number: Any, parts: int) -> int:
    """Returns number / parts, rounded down; 0 for what is no integer, which the schema refuses."""
    return number // parts if isinstance(number, int) else 0


OmegaConf.register_new_resolver("share", share, replace=True)


@contextmanager
def config_loader() -> Iterator[ConfigLoader]:
    """Yields Hydra's loader: of train.py while it runs, with its search path; else of conf/."""
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
        return
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def overrides_of(node: Any, part: str = "task") -> list[str]:
    """Returns the overrides of a command for the `task` or for `hydra`, as Hydra holds them."""
    overrides: Any = OmegaConf.to_container(node.overrides[part], resolve=False)  # keeps ${...}
    return [*overrides]


def task_overrides(node: Any) -> list[str]:
    """Returns the overrides of a run, without those that say how a command runs it."""
    return [x for x in overrides_of(node) if key_of(x) not in OF_THE_COMMAND]


@lru_cache(maxsize=1024)
def _composed(primary: str, overrides: tuple[str, ...]) -> DictConfig:
    """Returns what Hydra makes of these overrides; it is not to be changed."""
    with config_loader() as loader:
        return loader.load_configuration(primary, [*overrides], RunMode.RUN, from_shell=False)


def tree_of(overrides: Sequence[str]) -> DictConfig:
    """Returns the tree of these overrides, a copy: Hydra composes runs of several seeds once."""
    task = [x for x in overrides if key_of(x) not in OF_THE_COMMAND]
    seeds = [x for x in task if x.startswith("seed=") and not read_override(x).is_sweep_override()]
    shared = [x for x in task if x not in seeds]
    primary = PRIMARY
    with hydra_errors(*overrides):
        if GlobalHydra.instance().is_initialized():  # by train.py
            running: Any = HydraConfig.get()
            primary = running.job.config_name
            shared = [*overrides_of(running, "hydra"), *shared]
        tree = deepcopy(_composed(primary, tuple(shared)))
        for seed in seeds:
            tree.seed = read_override(seed).value()
        node = tree.hydra
        node.overrides.task = task
        named = node.job.config.override_dirname
        lines = sorted(x for x in task if key_of(x) not in named.exclude_keys)
        node.job.override_dirname = named.item_sep.join(lines).replace("=", named.kv_sep)
    return tree


@contextmanager
def as_job(tree: DictConfig) -> Iterator[Any]:
    """Lets ${hydra:...} and ${now:...} be those of the job of this tree; yields Hydra's node."""
    hydra_config: Any = HydraConfig.instance()
    running = hydra_config.cfg
    if running is not None:
        OmegaConf.copy_cache(running, tree)
    hydra_config.cfg = tree
    try:
        yield tree.hydra
    finally:
        hydra_config.cfg = running


def compose(overrides: Sequence[str]) -> Config:
    """Returns the configuration of these overrides; UserError for anything wrong with one."""
    return config_of(tree_of(overrides), overrides)


def config_of(tree: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a tree, with the ranks that torchrun has started.

    UserError for what is not allowed, missing or unread.
    """
    raw = {}
    with hydra_errors(*overrides):
        for key in tree.keys() - NOT_OF_A_RUN:
            raw[str(key)] = value = tree[key]
            if OmegaConf.is_config(value):
                raw[str(key)] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    stack = raw["augmentation"]
    chosen = stack.pop("chosen", {})  # from the files of the methods in the list
    for name in stack.keys() - chosen.keys() - {"off_epoch"}:
        reason = f"augmentation=[{','.join(chosen)}] does not name it"
        raise UserError(f"augmentation.{name}={stack[name]}: {reason}")
    ranks = launched_ranks()
    if ranks is not None:
        if raw["devices"] not in (1, ranks):  # 1 is the default
            raise UserError(f"devices={raw['devices']}: torchrun has started {ranks} ranks")
        raw["devices"] = ranks
    return validated(Config, raw)


def command_of(tree: DictConfig) -> Command:
    """Returns the other keys of a tree; UserError for what is not allowed."""
    return validated(Command, {key: tree[key] for key in Command.__annotations__})


# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPlan:
    """A run to train: the overrides with which train.py trains it, and its configuration."""

    overrides: tuple[str, ...]
    config: Config
    label: str = ""  # STUDY/ROW, of the first of its rows; the override `row` has it
    tree: DictConfig | None = field(default=None, repr=False, compare=False)
    path: Path = Path()  # of its folder, once it is placed

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    def placed(self, number: int = 0) -> "RunPlan":
        """Returns the run in the directory that Hydra will give to its job of this number."""
        assert self.tree is not None
        with read_write(self.tree), open_dict(self.tree):
            self.tree.hydra.job.id, self.tree.hydra.job.num = str(number), number
        with hydra_errors(*self.overrides), as_job(self.tree) as node:
            if node.mode == RunMode.MULTIRUN:
                return self.at(Path(node.sweep.dir, node.sweep.subdir))
            return self.at(Path(node.run.dir))

    def at(self, path: Path) -> "RunPlan":
        """Returns the run in a directory, which is named from here if it is below."""
        if Path.cwd() in path.parents:
            path = path.relative_to(Path.cwd())
        return replace(self, path=path)


def plan_run(overrides: Sequence[str], label: str = "") -> RunPlan:
    """Returns the run of these overrides; of a row if it has a label."""
    overrides = [*overrides]
    if label:
        overrides.append(f"row={in_quotes(label)}")  # plan_of reads it
    return plan_of(tree_of(overrides))


def plan_of(tree: DictConfig) -> RunPlan:
    """Returns the run of a tree that still has Hydra's node."""
    overrides = task_overrides(tree.hydra)
    with as_job(tree):
        config = config_of(tree, overrides)
    return RunPlan(tuple(overrides), config, str(tree.row or ""), tree)


def run_name(*, _root_: DictConfig) -> str:
    """The resolver of a run's directory: its name, else `<row, experiment or model-dataset-stack>`
    `[-key=value...]-s<seed>-<hash>`.

    Without a row it names the last part of each key, in plain characters, up to LONGEST_NAME. With
    resume=auto it is the name of the folder that ends with its hash, if there is one.
    """
    overrides = task_overrides(_root_.hydra)
    config, label = config_of(_root_, overrides), str(_root_.row or "")
    if config.name is not None:
        return config.name
    tail = f"-s{config.seed}-{run_hash(config)}"
    if config.resume == "auto":  # under the name that other overrides have given it
        for path in sorted(Path(config.output_root).glob(f"*{tail}/config.yaml")):
            return path.parent.name
    if label:
        return cut(label.replace("/", "-"), LONGEST_NAME, tail)
    typed = {key_of(x): x.partition("=")[2] for x in overrides}
    stack = "+".join(config.augmentation.stack) or "plain"
    head = f"{config.model.name}-{config.dataset.name}-{stack}"
    named = [key for key in typed if changes_result(key) and key not in IN_THE_NAME]
    settings = [f"{last_part(key)}={typed[key]}" for key in named]
    name = "-".join([typed.get("experiment", head), *settings]).replace("/", "-").replace(",", "+")
    return cut(re.sub(r"(?a)[^\w.+=-]+", "", name), LONGEST_NAME, tail)


OmegaConf.register_new_resolver("run_name", run_name, replace=True)


def hydra_arguments(path: Path) -> list[str]:
    """Returns what makes another train.py read and do what this command asks of Hydra.

    Its files, as its parser has them, the overrides for Hydra but for those of a sweep, and, of the
    job of a sweep, its directory.
    """
    node: Any = HydraConfig.get()
    line = ["--config-name", node.job.config_name]
    for source in node.runtime.config_sources:
        if source.provider in FLAGS:
            line += [FLAGS[source.provider], source.path]
    of_hydra = overrides_of(node, "hydra")
    line += [override for override in of_hydra if not OF_SWEEPS.match(override.lstrip("+~"))]
    if node.mode == RunMode.MULTIRUN:
        line.append(f"hydra.run.dir={in_quotes(str(path))}")
    return line


def check_asked(config: Config, overrides: Sequence[str], *roles: Role) -> None:
    """Raises UserError for code from elsewhere in these roles that the overrides do not name.

    The configuration of a run from elsewhere must run no code unasked.
    """
    named = {key_of(x): read_override(x).value() for x in overrides}
    for function_key, path in own_code(config):
        if function_key.role in roles and named.get(function_key.key) != path:
            override = function_key.override(path)
            raise UserError(f"{override}: the run needs this code; to run it, add {override}")
