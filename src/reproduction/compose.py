"""From overrides to the plain values of one run. Knows Hydra, as cli.py does; imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from reproduction.checks import unservable
from reproduction.config import CONF_DIR
from reproduction.errors import UserError
from reproduction.hardware import usable_cores
from reproduction.ranks import launched_ranks

AUGMENTATIONS = ("mixup", "cutmix", "manifold_mixup", "htm", "vtm")


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
        try:
            config = hydra.compose(config_name, overrides=overrides)
        except (ValueError, TypeError) as error:  # Hydra's own checks of odd overrides
            raise UserError(f"{' '.join(overrides)}: {error}") from error
        defaults = (
            GlobalHydra.instance()
            .config_loader()
            .compute_defaults_list(
                config_name=config_name, overrides=overrides, run_mode=RunMode.RUN
            )
        )
    chosen = [default.config_path or "" for default in defaults.defaults]
    _refuse_unservable(config, chosen)
    raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(raw, dict)
    values: dict[str, Any] = {str(key): value for key, value in raw.items()}
    values["devices"] = _devices(values.get("devices"))
    values["augmentation"] = _stack(values.get("augmentation"), chosen)
    parsed = OverridesParser.create().parse_overrides(overrides)
    experiments = _names("experiment", chosen)
    return Composed(
        raw=values,
        overrides={o.key_or_group: str(o.input_line) for o in parsed},
        experiment=experiments[-1] if experiments else None,
    )


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
    for name in AUGMENTATIONS:
        if settings.get(name, {}) is None:
            raise UserError(f"augmentation.{name}=None: leave it out of augmentation=[...] instead")
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


def register_resolvers() -> None:
    """`${share:n,k}`: a k-th of n, rounded down. `${cores:n}`: n, or the cores if fewer."""
    OmegaConf.register_new_resolver("share", _share, replace=True)
    OmegaConf.register_new_resolver("cores", _cores, replace=True)


def _share(n: Any, k: int) -> int:
    return n // k if isinstance(n, int) else 0  # the schema refuses what is no number


def _cores(most: int) -> int:
    return min(most, usable_cores())
