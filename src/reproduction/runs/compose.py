"""From overrides to the plain values of one run. Knows Hydra, as cli.py does; imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from reproduction.config import CONF_DIR, STACK
from reproduction.runs.folder import flatten
from reproduction.runs.parse import unservable
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.hardware import usable_cores
from reproduction.system.ranks import launched_ranks, local_ranks

SHOWN = 200  # characters of an argument that cannot be read
MERGING = "Error merging override"  # of Hydra's messages
MOST_WORKERS = 16
LISTS = ("augmentation", "logger")  # groups of which several options can be named


@dataclass(frozen=True)
class Composed:
    """One point of a command line: plain values and what was chosen to get them."""

    raw: dict[str, Any]
    overrides: dict[str, str]  # key or group -> as typed
    experiment: str | None


def compose(config_name: str, overrides: list[str]) -> Composed:
    """Composes one point; UserError for settings of an augmentation outside the stack."""
    register_resolvers()
    with own_hydra():
        parsed = read_overrides(overrides)
        _refuse_sweeps(parsed)
        _refuse_unknown_options(parsed)
        config, chosen = _composed(config_name, parsed)
    values = _resolved(config, chosen, overrides)
    values["devices"] = _devices(values.get("devices"))
    _share_out_cores(values)
    values["augmentation"] = _stack(values.get("augmentation"), chosen)
    experiments = _names("experiment", chosen)
    return Composed(
        raw=values,
        overrides={o.key_or_group: str(o.input_line) for o in parsed},
        experiment=experiments[-1] if experiments else None,
    )


def read_overrides(overrides: list[str]) -> list[Override]:
    """What was typed, as Hydra reads it; UserError for what it cannot read."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[Override] = []
    for typed in overrides:
        try:
            parsed += parser.parse_overrides([typed])
        except OverrideParseException as error:
            raise UserError(f"{in_one_line(typed, SHOWN)}: {_unreadable(error)}") from error
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
            reason = first_line(error)
            raise UserError(f"{in_one_line(typed, SHOWN)}: cannot be read: {reason}") from error
    for override in parsed:
        if not override.key_or_group:
            raise UserError(f"{override.input_line}: must name a key, as in key=value")
    return parsed


def _unreadable(error: OverrideParseException) -> str:
    """What Hydra has against a function; of the rest it speaks in terms of its grammar."""
    if error.__cause__ is not None:
        return f"cannot be read as key=value: {' '.join(str(error.__cause__).split())}"
    return "cannot be read as key=value, quote what is no plain word or number: key='...'"


def options_of(group: str) -> list[str]:
    """The files of a group of the configuration."""
    folder = CONF_DIR / group
    return sorted(str(x.relative_to(folder).with_suffix("")) for x in folder.rglob("*.yaml"))


def _chooses_files(override: Override) -> bool:
    """An option of a group, whose values come from files; Hydra's own settings go with them."""
    key = override.key_or_group
    is_group = bool(options_of(key)) and not isinstance(override.value(), dict)
    return key.startswith("hydra") or is_group


def _refuse_sweeps(parsed: list[Override]) -> None:
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line}: several values need --multirun (-m), a list needs "
                "brackets: key=[a,b]"
            )


def _refuse_unknown_options(parsed: list[Override]) -> None:
    """Hydra would merge a list of any group, follow paths out of it, and loop on an empty name."""
    for override in parsed:
        group, chosen = override.key_or_group, override.value()
        known = [] if group.startswith("hydra") or override.is_delete() else options_of(group)
        if not known or isinstance(chosen, dict) or (chosen is None and group == "experiment"):
            continue
        options = chosen if isinstance(chosen, list) and group in LISTS else [chosen]
        for option in options:
            if str(option) not in known:
                typed = f"{group}={option}" if isinstance(option, str) else override.input_line
                raise UserError(f"{typed}: there is no such option, allowed: {', '.join(known)}")
        if len(set(options)) < len(options):
            raise UserError(f"{override.input_line}: names an option twice, allowed is once")


def _composed(config_name: str, parsed: list[Override]) -> tuple[DictConfig, list[str]]:
    """The configuration, and the files that it was made from as group/option."""
    choices = [override for override in parsed if _chooses_files(override)]
    values = [override for override in parsed if override not in choices]
    try:
        files = tuple(str(override.input_line) for override in choices)
        config, chosen = _of_files(CONF_DIR, config_name, files)
        config = deepcopy(config)
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config, chosen
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # Hydra checks little of odd overrides, so that anything may come
        typed = " ".join(str(override.input_line) for override in parsed)
        raise UserError(f"{typed}: cannot be applied: {first_line(error)}") from error


@lru_cache(maxsize=256)
def _of_files(
    conf_dir: Path, config_name: str, choices: tuple[str, ...]
) -> tuple[DictConfig, list[str]]:
    """What the files of these options say, and which they are; read once for all points.

    Hydra lays single values over it as its last step, so that points of a sweep differ there. These
    are the steps of `hydra.compose`, which does not tell the files; asking it apart reads all anew.
    """
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    parsed, files = loader._parse_overrides_and_create_caching_repo(config_name, [*choices])
    found = create_defaults_list(files, config_name, parsed, prepend_hydra=True, skip_missing=False)
    config = loader._compose_config_from_defaults_list(found.defaults, files)
    OmegaConf.set_struct(config, True)
    ConfigLoaderImpl._apply_overrides_to_config(found.config_overrides, config)
    with open_dict(config):
        del config["hydra"]
    return config, [default.config_path or "" for default in found.defaults]


def _resolved(config: DictConfig, chosen: list[str], overrides: list[str]) -> dict[str, Any]:
    """Plain values; UserError for an interpolation that leads nowhere."""
    try:
        _refuse_unservable(config, chosen)
        raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        typed = [text for text in overrides if "${" in text or "???" in text]
        key = " ".join(typed) or getattr(error, "full_key", None)
        raise UserError(
            f"{key}: cannot be resolved, must lead to a value: {first_line(error)}"
        ) from error
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def explained(error: Exception) -> str:
    """What Hydra has refused, by key, value and what is allowed; other errors as they are."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.partition("/")
        if group == "hydra":
            group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: there is no such option, allowed: {', '.join(options_of(group))}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        parent, _, key = cause.full_key.rpartition(".")
        if parent == "augmentation" and key in STACK:
            return f"{cause.full_key}: the stack does not name {key}, add it to augmentation=[...]"
        if parent == "logger" and key in options_of("logger"):
            return f"{cause.full_key}: logger does not name {key}, add it to logger=[...]"
        node = cause.parent_node
        tree: Any = OmegaConf.to_container(node) if isinstance(node, DictConfig) else {}
        meant = [name for name, _ in flatten(tree) if name.rpartition(".")[2] == key]
        hint = f", perhaps {' or '.join(meant)}" if meant and not parent else ""
        known = ", ".join(str(k) for k in tree if k != "hydra") or "none"
        return (
            f"{cause.full_key}: unknown key{hint}; keys of {parent or 'the configuration'}: {known}"
        )
    if cause is not None and str(error).startswith(MERGING):
        typed = str(error).removeprefix(MERGING).strip()
        return f"{typed}: must be of the kind that stands there: {first_line(cause)}"
    return str(error)


@contextmanager
def explaining(place: str) -> Iterator[None]:
    """Says of what is refused where it stands."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, UserError, ValueError) as error:
        raise UserError(f"{place}: {explained(error)}") from error


@contextmanager
def own_hydra(job_name: str = "app") -> Iterator[None]:
    """Hydra for composing alone, also inside a job, where Hydra's own one is in use."""
    in_use = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), job_name, version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = in_use


def _refuse_unservable(config: DictConfig, chosen: list[str]) -> None:
    """Says so before `${model.htm_layer}` is looked up in a model that has no layers to mix at."""
    if OmegaConf.select(config, "model.family") == "library":
        name = OmegaConf.select(config, "model.name")
        if problem := unservable(str(name), _names("augmentation", chosen)):
            raise UserError(problem)


def _names(group: str, chosen: list[str]) -> list[str]:
    return [path.partition("/")[2] for path in chosen if path.startswith(f"{group}/")]


def _stack(settings: Any, chosen: list[str]) -> dict[str, Any]:
    """Settings of the chosen augmentations; refuses those of one that the stack does not name."""
    settings = settings or {}
    stack = _names("augmentation", chosen)
    for name in set(stack) - set(settings):
        raise UserError(f"augmentation.{name}: the stack names it, so its settings must stay")
    for name in STACK:
        if settings.get(name, {}) is None:
            raise UserError(
                f"augmentation.{name}=None: must not be null, leave it out of augmentation=[...]"
            )
        if name in settings and name not in stack:
            raise UserError(
                f"augmentation.{name}={settings[name]}: the stack augmentation=[{','.join(stack)}] "
                f"does not name {name}"
            )
    return settings


def _devices(devices: Any) -> Any:
    """Under torchrun the number of its ranks, which `devices` may repeat but not contradict."""
    ranks = launched_ranks()
    if ranks is None:
        return devices
    if devices not in (1, ranks):
        raise UserError(f"devices={devices}: torchrun has started {ranks} ranks, leave devices out")
    return ranks


def _share_out_cores(values: dict[str, Any]) -> None:
    """`dataset.workers=auto`: the cores of a rank, at most MOST_WORKERS."""
    dataset, devices = values.get("dataset"), values["devices"]
    if isinstance(dataset, dict) and dataset.get("workers") == "auto":
        ranks = local_ranks() or (devices if isinstance(devices, int) else 1)
        dataset["workers"] = max(1, min(MOST_WORKERS, usable_cores() // max(1, ranks)))


def register_resolvers() -> None:
    """`${share:n,k}`: a k-th of n, rounded down."""
    OmegaConf.register_new_resolver("share", _share, replace=True)


def _share(n: Any, k: int) -> int:
    return n // k if isinstance(n, int) else 0  # the schema refuses what is no number
