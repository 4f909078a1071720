"""From a command line to its runs, errors in one line. With compose.py all that imports Hydra."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NoReturn, TypeVar

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reproduction.commands.launchers import (
    HERE,
    PARALLEL,
    SUBMITIT,
    check_launcher,
    check_resume,
    own_gpus,
)
from reproduction.config import CONF_DIR
from reproduction.runs.compose import (
    Composed,
    compose,
    explained,
    own_hydra,
    read_overrides,
)
from reproduction.system.errors import (
    PlainError,
    RunInterrupted,
    UserError,
    first_line,
    in_one_line,
)
from reproduction.system.ranks import is_first_rank, launched_ranks
from reproduction.system.terminal import say

Settings = TypeVar("Settings")

NOT_AVAILABLE = (  # of Hydra's options
    *("config_name", "config_path", "config_dir", "experimental_rerun"),
    "shell_completion",
)


def run(
    config_name: str,
    resolve: Callable[[Composed], Settings],
    check_all: Callable[[list[Settings], bool], None],
    main: Callable[[Settings], None],
) -> NoReturn:
    """Checks every point of the command line, then runs `main` on each.

    `check_all` is told whether the runs will be on this machine. Ends with status 0, 2 for what
    the user typed wrong, 130 for an interruption, 1 for a failure.
    """
    failures: list[Exception] = []
    try:
        points = _points(config_name, sys.argv[1:])
        if points is None:
            _leave_to_hydra(config_name)
        else:
            composed = [compose(config_name, point) for point in points]
            launcher = composed[0].overrides.get("hydra/launcher", HERE).rpartition("=")[2]
            for point in composed:
                check_resume(launcher, point.raw.get("resume", "auto"))
            settings = [resolve(point) for point in composed]
            check_all(settings, launcher not in SUBMITIT)
            if launcher == HERE:
                failures += _run_here(points, settings, main)
            else:
                failures += _launch(launcher, config_name, resolve, check_all, main)
    except (UserError, PlainError, HydraException, OmegaConfBaseException) as error:
        failures.append(error)
    except OSError as error:  # of a path that was typed: a run's own come as PlainError
        failures.append(UserError(str(error)))
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted")
        sys.exit(130)
    for failure in failures:
        _complain(
            str(failure) if isinstance(failure, PlainError) else in_one_line(explained(failure))
        )
    sys.exit(max((1 if isinstance(f, PlainError) else 2 for f in failures), default=0))


def _leave_to_hydra(config_name: str) -> None:
    """Its help, or what --cfg and --info show."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and one place prints
    start = hydra.main(str(CONF_DIR), config_name, version_base="1.3")
    try:
        with redirect_stderr(StringIO()):  # where it would complain of the package
            start(lambda _: None)()
    except SystemExit as end:
        if end.code:
            raise UserError("--package: must be a key of what --cfg shows") from end
        raise


def _run_here(
    points: list[list[str]], settings: list[Settings], main: Callable[[Settings], None]
) -> list[Exception]:
    """Runs the points one after the other in this process and returns their failures."""
    failures: list[Exception] = []
    for number, (typed, one) in enumerate(zip(points, settings, strict=True)):
        if len(points) > 1:
            say(f"#{number}: {' '.join(typed)}")
        try:
            main(one)
        except (UserError, PlainError) as error:
            failures.append(type(error)(str(error)))  # a copy: the traceback holds the model
    return failures


def _launch(
    launcher: str,
    config_name: str,
    resolve: Callable[[Composed], Settings],
    check_all: Callable[[list[Settings], bool], None],
    main: Callable[[Settings], None],
) -> list[Exception]:
    """Runs the points in the launcher's processes, waits for them and returns their failures."""
    from reproduction.training.distributed import visible_gpus
    from reproduction.training.endings import handling, stop_at_once

    gpus = visible_gpus() if launcher in PARALLEL else []  # SLURM gives each job its own

    def job(_: DictConfig) -> Exception | None:
        ours = HydraConfig.get()
        typed = _typed(ours)
        try:
            say(f"#{ours.job.num}: {' '.join(typed)}")
            composed = compose(config_name, typed)
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = own_gpus(gpus, composed.raw["devices"] or 1)
            one = resolve(composed)
            check_all([one], True)
            main(one)
        except (UserError, PlainError) as error:
            return error
        except Exception as error:
            traceback.print_exc()  # it does not travel
            return PlainError(first_line(error))
        return None

    overrides = get_args_parser().parse_args(sys.argv[1:]).overrides
    with own_hydra(job_name=config_name), handling(stop_at_once):
        starter = GlobalHydra.instance().hydra
        assert starter is not None
        say(f"hydra/launcher={launcher}: waiting for the runs")
        try:
            batches = starter.multirun(config_name, job, overrides)
        except Exception as error:  # the launcher's own: no SLURM, a job that died without a word
            raise PlainError(f"hydra/launcher={launcher}: {first_line(error)}") from error
        except KeyboardInterrupt:
            goes_on = "repeat the command with resume=auto to continue"
            if launcher in SUBMITIT:
                goes_on = "what is submitted goes on"
            raise RunInterrupted(f"interrupted; {goes_on}") from None
    ended = [returned.return_value for batch in batches for returned in batch]
    return [failure for failure in ended if failure is not None]


def _typed(hydra_config: HydraConf) -> list[str]:
    """The overrides of a point, in which nothing is resolved yet."""
    task = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    assert isinstance(task, list)
    return [str(override) for override in task]


def _points(config_name: str, argv: list[str]) -> list[list[str]] | None:
    """The overrides of every point; None where nothing runs."""
    parser = get_args_parser()
    setattr(parser, "error", _refuse_option)  # argparse would print its usage as well
    args = parser.parse_args(argv)
    for option in NOT_AVAILABLE:
        if getattr(args, option, None):
            raise UserError(f"--{option.replace('_', '-')}: not available here; see --help")
    if sum(bool(x) for x in (args.run, args.multirun, args.cfg, args.info)) > 1:
        raise UserError("--multirun: must go without --cfg, --info and --run, of which one goes")
    if args.package and not args.cfg:
        raise UserError("--package: needs --cfg")
    if args.help or args.hydra_help or args.cfg or args.info:
        compose(config_name, args.overrides)
        return None
    if args.multirun and launched_ranks() is not None:
        raise UserError(
            "--multirun: start sweeps as python train.py -m devices=N, without torchrun"
        )
    if args.resolve:
        raise UserError("--resolve: belongs to --cfg job")
    with own_hydra():
        parsed = read_overrides(args.overrides)
        values = {o.key_or_group: str(o.input_line).partition("=")[2] for o in parsed}
        _refuse_hydras_folders(values)
        if "hydra/launcher" in values:
            check_launcher(values["hydra/launcher"], args.multirun)
        if not args.multirun:
            return [args.overrides]
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        points = [list(point) for batch in batches for point in batch]
    if not points:
        raise UserError(f"{' '.join(args.overrides)}: the sweep has no points")
    return points


def _refuse_hydras_folders(keys: Iterable[str]) -> None:
    """Hydra's launcher is the user's; its folders, logs and sweepers are not."""
    for key in keys:
        if key.startswith("hydra") and not key[6:].startswith("launcher"):
            raise UserError(f"{key}: not available here, of Hydra's only the launcher is")


def _refuse_option(message: str) -> NoReturn:
    raise UserError(f"{message}; see --help")


def _complain(line: str) -> None:
    """Prints the line on stderr, once for all ranks."""
    if is_first_rank():
        print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
