"""The only module that knows Hydra: from a command line to checked settings, errors in one line."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from reproduction.checks import unservable
from reproduction.config import CONF_DIR
from reproduction.errors import RunFailed, UserError
from reproduction.hardware import usable_cores
from reproduction.ranks import is_first_rank, launched_ranks

Settings = TypeVar("Settings")
AUGMENTATIONS = ("mixup", "cutmix", "manifold_mixup", "htm", "vtm")


@dataclass(frozen=True)
class Composed:
    """One point of a command line: plain values and what was chosen to get them."""

    raw: dict[str, Any]
    overrides: dict[str, str]  # key or group -> as typed
    experiment: str | None


def run(
    config_name: str,
    resolve: Callable[[Composed], Settings],
    check_all: Callable[[list[Settings]], None],
    main: Callable[[Settings], None],
) -> NoReturn:
    """Checks every point of the command line, then runs `main` on each in Hydra's launcher.

    Ends with status 0, 2 for what the user typed wrong, 130 for an interruption, 1 for a failure.
    """

    process, failures = os.getpid(), list[Exception]()

    def job(_: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        try:
            main(resolve(compose(config_name, overrides)))
        except (UserError, RunFailed) as error:
            if os.getpid() != process:  # a worker of Hydra's launcher, which reports it
                raise
            failures.append(error)  # the other points of a sweep go on

    try:
        points = _points(sys.argv[1:])
        if points is not None:
            check_all([resolve(compose(config_name, point)) for point in points])
        _register_resolvers()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and one place prints
        hydra.main(config_path=str(CONF_DIR), config_name=config_name, version_base="1.3")(job)()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        failures.append(error)
    except OSError as error:  # of a path that was typed: a run's own come as RunFailed
        failures.append(UserError(str(error)))
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted")
        sys.exit(130)
    for failure in failures:
        _complain(str(failure) if isinstance(failure, RunFailed) else one_line(failure))
    sys.exit(max((1 if isinstance(f, RunFailed) else 2 for f in failures), default=0))


def compose(config_name: str, overrides: list[str]) -> Composed:
    """Composes one point; UserError for settings of an augmentation outside the stack."""
    _register_resolvers()
    with _own_hydra():
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
def _own_hydra() -> Iterator[None]:
    """Hydra for composing alone, also inside a job, where Hydra's own one is in use."""
    in_use = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
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


def _points(argv: list[str]) -> list[list[str]] | None:
    """The overrides of every point; None where nothing runs or only Hydra knows the points."""
    parser = get_args_parser()
    setattr(parser, "error", _refuse_option)  # argparse would print its usage as well
    args = parser.parse_args(argv)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return None
    for option in ("config_name", "config_path", "config_dir", "package", "experimental_rerun"):
        if getattr(args, option, None) is not None:
            raise UserError(f"--{option.replace('_', '-')}: not available here; see --help")
    if args.multirun and launched_ranks() is not None:
        raise UserError(
            "--multirun: start sweeps as python train.py -m devices=N, without torchrun"
        )
    if args.resolve:
        raise UserError("--resolve: belongs to --cfg job")
    with _own_hydra():
        loader = GlobalHydra.instance().config_loader()
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(args.overrides)
        _refuse_hydras_folders([override.key_or_group for override in parsed])
        if not args.multirun:
            return [args.overrides]
        if any(o.key_or_group == "hydra/sweeper" and o.value() != "basic" for o in parsed):
            return None  # each job is checked when the sweeper draws it
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        points = [list(point) for batch in batches for point in batch]
    if not points:
        raise UserError(f"{' '.join(args.overrides)}: the sweep has no points")
    return points


def _refuse_hydras_folders(keys: list[str]) -> None:
    """Hydra's launcher and sweeper are the user's, its folders and logs are not."""
    for key in keys:
        if key.startswith("hydra") and not key[6:].startswith(("launcher", "sweeper")):
            raise UserError(f"{key}: not available here, of Hydra's only launcher and sweeper are")


def _refuse_option(message: str) -> NoReturn:
    raise UserError(f"{message}; see --help")


def one_line(error: Exception) -> str:
    """What went wrong, in one line that names the key, the value and what is allowed."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.partition("/")
        return f"{group}={option}: there is no such option, allowed: {_options(group)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value: {str(error).splitlines()[0]}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        parent, _, key = cause.full_key.rpartition(".")
        if parent == "augmentation" and key in AUGMENTATIONS:
            return f"{cause.full_key}: the stack does not name {key}, add it to augmentation=[...]"
        keys = cause.parent_node.keys() if isinstance(cause.parent_node, DictConfig) else []
        known = ", ".join(str(k) for k in keys if k != "hydra") or "none"
        return f"{cause.full_key}: unknown key; keys of {parent or 'the configuration'}: {known}"
    return " ".join(str(error).split())


def _options(group: str) -> str:
    folder = CONF_DIR / group
    files = sorted(folder.rglob("*.yaml"))
    return ", ".join(str(file.relative_to(folder).with_suffix("")) for file in files) or "none"


def _register_resolvers() -> None:
    """`${share:n,k}`: a k-th of n, rounded down. `${cores:n}`: n, or the cores if fewer."""
    OmegaConf.register_new_resolver("share", _share, replace=True)
    OmegaConf.register_new_resolver("cores", _cores, replace=True)


def _share(n: Any, k: int) -> int:
    return n // k if isinstance(n, int) else 0  # the schema refuses what is no number


def _cores(most: int) -> int:
    return min(most, usable_cores())


def _complain(line: str) -> None:
    """Prints the line on stderr, once for all ranks."""
    if is_first_rank():
        print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
