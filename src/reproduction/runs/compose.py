"""Composes overrides into the plain values of one run. Imports Hydra, but not torch."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from reproduction.config import CONF_DIR, Config
from reproduction.runs.parse import parse
from reproduction.runs.ranges import ranges
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.hardware import CORES, usable_cores
from reproduction.system.ranks import launched_ranks, local_ranks

SHOWN = 200  # characters of an unparsable argument in an error line
MOST_WORKERS = 16
LISTS = ("augmentation", "logger")  # groups that accept a list of options
Files = tuple[DictConfig, dict[str, str], dict[str, list[str]]]


@dataclass(frozen=True)
class Composed:
    """One point of a command line: plain values and the overrides they come from."""

    raw: dict[str, Any]
    overrides: dict[str, str]  # key or group -> as typed
    experiment: str | None
    launcher: str = "basic"  # of hydra/launcher
    launcher_settings: dict[str, Any] = field(default_factory=dict)


def compose(config_name: str, overrides: list[str]) -> Composed:
    """Composes one point. Raises UserError for any invalid override."""
    # `${share:n,k}`: n / k, rounded down; the schema reports values of other types
    OmegaConf.register_new_resolver(
        "share", lambda n, k: n // k if isinstance(n, int) else 0, replace=True
    )
    OmegaConf.register_new_resolver("ranges", ranges, replace=True)
    with isolated_hydra():
        parsed = read_overrides(config_name, overrides)
        _check_options(parsed)
        config, options, chosen = _compose_files(
            CONF_DIR, config_name, tuple(str(o.input_line) for o in parsed if _is_choice(o))
        )
    config = deepcopy(config)
    for override in parsed:
        if not _is_choice(override):
            _apply(override, config)
    values = _resolve_values(config, chosen["augmentation"], overrides)
    launcher = values.pop("hydra")["launcher"]
    values["devices"] = _resolve_devices(values.get("devices"))
    _resolve_workers(values)
    _check_lists(values, chosen)
    typed = {o.key_or_group: str(o.input_line) for o in parsed}
    dataset = values.get("dataset")
    if isinstance(dataset, dict) and dataset.get("mean") == "auto" and "dataset.std" not in typed:
        dataset["std"] = "auto"  # both are measured
    return Composed(values, typed, options["experiment"], options["hydra/launcher"], launcher)


def config_of(overrides: Sequence[str]) -> Config:
    """Returns the configuration of these overrides of train.py. The images may be missing."""
    return parse(compose("train", list(overrides)).raw, needs_data=False)


def read_overrides(config_name: str, overrides: list[str]) -> list[Override]:
    """Parses the overrides with Hydra. Raises UserError for one that cannot be parsed."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except (OverrideParseException, ValueError, RecursionError) as error:
            problem = _parse_problem(text, error)
            if config_name != "train" and os.path.exists(text):
                key = "run" if os.path.isdir(text) else "checkpoint"
                problem = (
                    f"must be key=value; did you mean {shlex.quote(f'{key}={in_one_line(text)}')}?"
                )
            raise UserError(f"{in_one_line(text, SHOWN)}: {problem}") from error
    for override in parsed:
        if not override.key_or_group:
            raise UserError(f"{override.input_line}: must name a key, as in key=value")
    return parsed


def _parse_problem(text: str, error: Exception) -> str:
    if not isinstance(error, OverrideParseException):  # a number of 5,000 digits, 1,000 brackets
        return f"cannot be read: {first_line(error)}"
    if error.__cause__ is not None:  # of an invalid function; other reasons name grammar rules
        return f"cannot be read as key=value: {' '.join(str(error.__cause__).split())}"
    key, equals, value = text.partition("=")
    if not equals:
        return "must be key=value"
    if value.startswith(("[", "{")):
        return "cannot be read, a bracket or quote may be missing"
    quoted = QuotedString(value, Quote.double).with_quotes()
    return f"cannot be read; as a text: {shlex.quote(f'{key}={quoted}')}"


def group_options(group: str) -> list[str]:
    """Lists the options of a config group."""
    folder = CONF_DIR / group
    return sorted(str(x.relative_to(folder).with_suffix("")) for x in folder.rglob("*.yaml"))


def _check_options(parsed: list[Override]) -> None:
    """Raises UserError for several values, and for unknown or repeated options.

    Hydra itself accepts lists for any group and paths that leave it, and loops on an empty name.
    """
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line}: several values need --multirun (-m), a list needs "
                "brackets: key=[a,b]"
            )
        group, value = override.key_or_group, override.value()
        known = [] if override.is_delete() else group_options(group)
        if not known or isinstance(value, dict) or (value is None and group == "experiment"):
            continue
        options = value if isinstance(value, list) and group in LISTS else [value]
        for option in options:
            if str(option) not in known:
                typed = f"{group}={option}" if isinstance(option, str) else override.input_line
                raise UserError(f"{typed}: there is no such option, allowed: {', '.join(known)}")
        if len(set(options)) < len(options):
            raise UserError(f"{override.input_line}: names an option more than once")


def _is_choice(override: Override) -> bool:
    """Whether the override selects config files, an option of a group."""
    return bool(group_options(override.key_or_group)) and not isinstance(override.value(), dict)


@lru_cache(maxsize=256)
def _compose_files(conf_dir: Path, config_name: str, choices: tuple[str, ...]) -> Files:
    """Composes the config files of these options; cached, as points of a sweep share them.

    Returns the config, the options by group, and those of the groups that take a list.
    """
    try:
        config = hydra.compose(config_name, [*choices], return_hydra_config=True)
    except HydraException as error:
        raise UserError(error) from error
    except Exception as error:  # Hydra validates little, so any error is possible
        raise UserError(f"{' '.join(choices)}: cannot be applied: {first_line(error)}") from error
    options = dict(config.hydra.runtime.choices)
    with open_dict(config):
        config.hydra = {"launcher": config.hydra.launcher}
    loader = GlobalHydra.instance().config_loader()
    files = loader.compute_defaults_list(config_name, [*choices], RunMode.RUN).defaults
    groups = [(file.config_path or "").partition("/") for file in files]
    chosen = {key: [name for group, _, name in groups if group == key] for key in LISTS}
    return config, options, chosen


def _apply(override: Override, config: DictConfig) -> None:
    """Applies the override of a value; new keys are left to the schema, but those of a launcher."""
    key, value, typed = override.key_or_group, override.value(), override.input_line
    parent, _, last = key.rpartition(".")
    if override.package is not None:
        raise UserError(f"{typed}: {key} is no group of options")
    try:
        if override.is_delete() or override.is_add():
            current = OmegaConf.select(config, key, throw_on_missing=False)
            if override.is_add() and current is not None and not isinstance(value, dict | list):
                raise UserError(f"{typed}: exists already, leave the + out")
            if override.is_delete() and (current is None or value not in (None, current)):
                raise UserError(f"{typed}: there is no such setting")
        place = OmegaConf.select(config, parent) if parent else config
        if override.is_delete():
            with open_dict(config):
                del place[last]
        elif override.is_hydra_override() and not override.is_add() and last not in place:
            raise UserError(f"{typed}: unknown key; keys of {parent}: {', '.join(place)}")
        else:
            OmegaConf.update(config, key, value, force_add=True)
    except UserError:
        raise
    except Exception as error:  # as above
        raise UserError(f"{typed}: cannot be applied: {first_line(error)}") from error


def _resolve_values(config: DictConfig, stack: list[str], overrides: list[str]) -> dict[str, Any]:
    """Returns plain values. Raises UserError for an interpolation that cannot be resolved."""
    try:
        _check_model_supports_stack(config, stack)
        raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        typed = [text for text in overrides if "${" in text or "???" in text]
        key = " ".join(typed) or getattr(error, "full_key", None)
        raise UserError(
            f"{key}: cannot be resolved, must lead to a value: {first_line(error)}"
        ) from error
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """Prefixes config errors raised inside the block with `place`."""
    try:
        yield
    except (UserError, ValueError) as error:
        raise UserError(f"{place}: {error}") from error


@contextmanager
def isolated_hydra() -> Iterator[None]:
    """Initialises Hydra for composing."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield


def _check_model_supports_stack(config: DictConfig, stack: list[str]) -> None:
    """Runs before resolving, as `${model.htm_layer}` does not exist in unsupported models."""
    of_library = OmegaConf.select(config, "model.family") == "library"
    if of_library and {"htm", "vtm", "manifold_mixup"} & {*stack}:
        name = OmegaConf.select(config, "model.name")
        raise UserError(
            f"augmentation=[{','.join(stack)}]: {name} is of model.family=library, but htm, vtm "
            "and manifold_mixup need cct or vit; allowed are augmentation=[mixup,cutmix], [mixup], "
            "[cutmix] and []"
        )


def _check_lists(values: dict[str, Any], chosen: dict[str, list[str]]) -> None:
    """Raises UserError unless a group that takes a list has the settings of exactly its options.

    An experiment may have settings of what the user has left out.
    """
    for group, names in chosen.items():
        settings = values.get(group) or {}
        for name in group_options(group):
            key, line = f"{group}.{name}", f"{group}=[{','.join(names)}]"
            if name in names and name in settings and settings[name] is None:
                raise UserError(f"{key}=null: must not be null, leave it out of {line}")
            if name in names and name not in settings and name != "none":
                raise UserError(f"{key}: is in {line}, its settings cannot be removed")
            if name not in names and name in settings:
                raise UserError(f"{key}={settings[name]}: {line} does not name {name}")


def _resolve_devices(devices: Any) -> Any:
    """Returns the world size under torchrun. Raises UserError if `devices` contradicts it."""
    ranks = launched_ranks()
    if ranks is None:
        return devices
    if devices not in (1, ranks):
        raise UserError(
            f"devices={devices}: torchrun has started {ranks} ranks, allowed is {ranks}"
        )
    return ranks


def _resolve_workers(values: dict[str, Any]) -> None:
    """Replaces `dataset.workers=auto` with the cores per rank, at most MOST_WORKERS."""
    dataset, devices = values.get("dataset"), values["devices"]
    if isinstance(dataset, dict) and dataset.get("workers") == "auto":
        ranks = local_ranks() or (devices if isinstance(devices, int) else 1)
        cores = int(os.environ.get(CORES, usable_cores()))
        dataset["workers"] = max(1, min(MOST_WORKERS, cores // max(1, ranks)))
