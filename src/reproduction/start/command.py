"""From a command line to runs: every point is checked before the first starts, errors are one line.

Hydra composes a point (runs/compose.py) and prints help and --cfg. Its own way to start a run is
not used: it prints tracebacks, stops at the first failing point and checks each when it is reached.
"""

import itertools
import os
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.errors import HydraException

from reproduction.config import CONF_DIR, Config
from reproduction.runs.compose import Composed, compose, isolated_hydra, read_overrides
from reproduction.start import slurm
from reproduction.start.processes import Processes, shares
from reproduction.system.errors import PlainError, RunInterrupted, UserError, first_line
from reproduction.system.ranks import is_first_rank, launched_ranks
from reproduction.system.terminal import Parser, one_line_errors, say, warn

Settings = TypeVar("Settings")
Outcome = UserError | PlainError | None  # the failure of a point

PARALLEL, SLURM = "parallel", "slurm"
REQUIREMENTS = "requirements-cluster.txt"
HOME = r"""(?<=[=,'"])~(?=/)"""  # where a value starts
TEXTS = (  # keys of paths and names, and their values
    r"(name|run|checkpoint|output|output_root|images|predictions|model\.weights|dataset\.root|"
    r"logger\.wandb\.project|logger\.wandb\.entity)=(.*)"
)
SYNTAX = r"""['"\[{$\\]|^\w+\(.*\)$"""  # of Hydra: quotes, lists, references, functions
# 2026_11_26 is for Hydra 20261126
UNREADABLE = r"[^\w/+.%*@?|: -]|^[+-]?[\d.][\d._eE+-]*$|^(?i:true|false)$"


def run(
    config_name: str,
    resolve: Callable[[Composed], Settings],
    check_all: Callable[[list[Settings], bool], None],
    main: Callable[[Settings], None],
    conclude: Callable[[list[Settings]], None] = lambda settings: None,
) -> NoReturn:
    """Checks every point of the command line, then runs `main` on each.

    The second argument of `check_all` is True if the runs execute on this machine. `conclude` gets
    all points of a sweep after its last run. Exits with status 0 for success, 1 for a failure, 2
    for a user error and 130 for an interruption.
    """
    program = Path(sys.argv[0]).name
    with one_line_errors(program):
        arguments = _parse_arguments(sys.argv[1:])
        if arguments.is_for_hydra:
            _leave_to_hydra(config_name, arguments)
            sys.exit(0)
        points = _points(config_name, arguments)
        composed = [compose(config_name, point) for point in points]
        launcher = composed[0].launcher
        settings = [resolve(point) for point in composed]
        _check_launcher(launcher, composed)
        check_all(settings, launcher != SLURM)
        if launcher == SLURM:
            task = slurm.Task(partial(_in_job, config_name, resolve, check_all, main))
            outcomes = slurm.in_jobs(task, points, composed[0].launcher_settings)
        elif launcher == PARALLEL:
            outcomes = _in_processes(points, composed, settings)
        else:
            outcomes = _in_turn(main, points, settings)
        failures = [failure for failure in outcomes if failure is not None]
        if len(points) > 1:
            conclude(settings)
            say(f"{len(points) - len(failures)} of {len(points)} runs are finished")
        for failure in failures if is_first_rank() else ():
            warn(f"{program}: {failure}")
        sys.exit(max((2 if isinstance(x, UserError) else 1 for x in failures), default=0))


def _parse_arguments(argv: list[str]) -> Namespace:
    """Parses the options; `is_for_hydra` tells whether Hydra prints something.

    Raises UserError for unsupported and conflicting ones.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true")
    mode.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    mode.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--package", "-p")
    parser.add_argument("--help", "-h", action="store_true")
    for name in ("--resolve", "--hydra-help", "--version"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_intermixed_args(argv)
    for option in ("package", "resolve"):
        if getattr(args, option) and not args.cfg:
            raise UserError(f"--{option}: needs --cfg")
    shows = (args.cfg, args.info, args.help, args.hydra_help, args.version)
    args.is_for_hydra = any(shows)
    args.options = [word for word in argv if word not in args.overrides]
    args.overrides = [_as_hydra_reads(text) for text in args.overrides]
    return args


def _as_hydra_reads(text: str) -> str:
    """Expands `~` in a path, which shells leave to programs after `key=`, and quotes names.

    Names of run folders have settings, such as `...-tau=1-s0`; others have blanks, umlauts or `#`.
    """
    text = re.sub(HOME, lambda _: os.path.expanduser("~"), text)
    found = re.fullmatch(TEXTS, text)
    if found is None or re.search(SYNTAX, found[2]):
        return text
    names = found[2].split(",")  # of a sweep
    each = (f"'{x}'" if re.search(UNREADABLE, x, re.ASCII) else x for x in names)
    return f"{found[1]}={','.join(each)}"


def _leave_to_hydra(config_name: str, args: Namespace) -> None:
    """Checks the overrides and lets Hydra print its help, or the output of --cfg and --info."""
    compose(config_name, args.overrides)
    sys.argv[1:] = *args.overrides, *args.options
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    start = hydra.main(str(CONF_DIR), config_name, version_base="1.3")
    try:
        with redirect_stderr(StringIO()):  # hides a message on --package
            start(lambda _: None)()
    except HydraException as error:
        raise UserError(error) from error
    except SystemExit as end:
        if end.code:
            raise UserError("--package: must be a key that --cfg shows") from end


def _points(config_name: str, args: Namespace) -> list[list[str]]:
    """Returns the overrides of every point, in the order of Hydra's own sweeps."""
    with isolated_hydra():
        parsed = read_overrides(config_name, args.overrides)
        for override in parsed:
            key = override.key_or_group
            if key.startswith("hydra") and not key[6:].startswith("launcher"):
                raise UserError(f"{key}: not available here; of Hydra only hydra.launcher is")
            if override.is_hydra_override() and override.is_sweep_override():
                raise UserError(f"{override.input_line}: must be one for all points")
            if override.is_hydra_override() and override.is_delete():
                raise UserError(f"{override.input_line}: settings of a launcher cannot be removed")
            if key == "hydra/launcher" and not args.multirun:
                raise UserError(f"{override.input_line}: needs a sweep, add -m")
        if not args.multirun:
            return [args.overrides]
        if launched_ranks() is not None:
            raise UserError(
                "--multirun: start sweeps as python train.py -m devices=N, without torchrun"
            )
        values: dict[str, list[str]] = {}
        for override in parsed:
            key = override.get_key_element()
            if not override.is_sweep_override():
                values[key] = [f"{key}={override.get_value_element_as_str()}"]
            elif override.is_discrete_sweep():
                values[key] = [f"{key}={text}" for text in override.sweep_string_iterator()]
            else:
                raise UserError(f"{override.input_line}: must list its values, as in {key}=a,b")
    points = [list(point) for point in itertools.product(*values.values())]
    if not points:
        raise UserError(f"{' '.join(args.overrides)}: the sweep has no points")
    return points


def _check_launcher(launcher: str, points: Sequence[Composed]) -> None:
    """Raises UserError for a launcher whose package is missing, or that the points do not fit."""
    if launcher == PARALLEL:
        jobs = points[0].launcher_settings["n_jobs"]
        if type(jobs) is not int or jobs < 1:
            raise UserError(f"hydra.launcher.n_jobs={jobs}: must be 1 or more")
    if launcher == SLURM:
        if find_spec("submitit") is None:
            raise UserError("hydra/launcher=slurm: needs submitit, pip install -r " + REQUIREMENTS)
        resume = points[0].raw.get("resume", "auto")
        if resume != "auto":
            raise UserError(
                f"resume={resume}: must be auto for hydra/launcher=slurm, which restarts "
                "interrupted runs"
            )


def _in_turn(
    main: Callable[[Settings], None], points: Sequence[list[str]], settings: Sequence[Settings]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for number, (overrides, one) in enumerate(zip(points, settings, strict=True), 1):
        if len(points) > 1:
            say(f"run {number} of {len(points)}: {' '.join(overrides)}")
        try:
            main(one)
            outcomes.append(None)
        except (UserError, PlainError) as error:  # the sweep goes on
            outcomes.append(type(error)(str(error)))  # the traceback holds the model
    return outcomes


def _in_processes(
    points: Sequence[list[str]], composed: Sequence[Composed], settings: Sequence[Any]
) -> list[Outcome]:
    """Starts this script for each point. The output of runs goes to files, other scripts' here."""
    first = settings[0]
    logs = Path(first.output_root, ".logs") if isinstance(first, Config) else None
    jobs = min(composed[0].launcher_settings["n_jobs"], len(points))
    devices = max(point.raw["devices"] for point in composed)

    def start(number: int) -> Outcome:
        words = [x for x in points[number] if not x.lstrip("+~").startswith("hydra")]
        processes.check()
        say(f"run {number + 1} of {len(points)}: {' '.join(words)}")
        name = getattr(settings[number], "name", "")
        status, line = processes.run(name, Path(sys.argv[0]), words)
        if status == 0:
            return None
        return UserError(line) if status == 2 else PlainError(line)

    if logs is not None:
        say(f"{jobs} runs at a time, logs in {logs}")
    with Processes(shares(jobs, devices), logs) as processes:
        try:
            return processes.map(start, range(len(points)))
        except RunInterrupted:
            hint = "repeat the command with resume=auto to continue"
            raise RunInterrupted(f"interrupted; {hint}") from None


def _in_job(
    config_name: str,
    resolve: Callable[[Composed], Settings],
    check_all: Callable[[list[Settings], bool], None],
    main: Callable[[Settings], None],
    overrides: Sequence[str],
    place: str,
) -> Outcome:
    """Runs a point in a job of the cluster; returns its failure."""
    say(f"{place}: {' '.join(overrides)}")
    try:
        settings = resolve(compose(config_name, [*overrides]))
        check_all([settings], True)
        main(settings)
    except (UserError, PlainError) as error:
        return error
    except Exception as error:
        warn(traceback.format_exc())  # tracebacks are lost in pickling
        return PlainError(first_line(error))
    return None
