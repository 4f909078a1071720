"""Turns a command line into runs and reports errors in one line.

Only this module and compose.py import Hydra.
"""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import MethodType
from typing import NoReturn, TypeVar

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from reproduction.config import CONF_DIR
from reproduction.runs.compose import (
    Composed,
    compose,
    describe_error,
    isolated_hydra,
    read_overrides,
)
from reproduction.system.errors import PlainError, UserError, in_one_line
from reproduction.system.ranks import is_first_rank, launched_ranks
from reproduction.system.terminal import Parser, say

Settings = TypeVar("Settings")

HOME = r"""(?<=[=,'"])~(?=/)"""  # where a value starts
FOLDERS = r"(run|checkpoint|model\.weights)=([^'\"\[{$]*=[^'\"\[{$]*)"  # names have settings
NUMBER = r"(name)=(\d[\d._eE+-]*)"  # such as 2026_11_26, for Hydra 20261126
UNSUPPORTED_OPTIONS = (  # of Hydra
    *("config_name", "config_path", "config_dir", "experimental_rerun"),
    "shell_completion",
)


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
    failures: list[Exception] = []
    try:
        arguments = _parse_arguments(sys.argv[1:])
        points = _points(config_name, arguments)
        if points is None:
            _print_hydra_output(config_name)
        else:
            composed = [compose(config_name, point) for point in points]
            settings = [resolve(point) for point in composed]
            check_all(settings, True)
            for point_settings in _in_turn(points, settings):
                try:
                    main(point_settings)
                except (UserError, PlainError) as error:  # the sweep goes on
                    failures.append(type(error)(str(error)))  # the traceback holds the model
            if len(points) > 1:
                conclude(settings)
                finished = len(points) - len(failures)
                say(f"{finished} of {len(points)} runs are finished")
    except (UserError, PlainError, HydraException, OmegaConfBaseException) as error:
        failures.append(error)
    except OSError as error:  # from a path on the command line; runs raise PlainError instead
        failures.append(UserError(str(error)))
    except KeyboardInterrupt as interrupt:
        _print_error(str(interrupt) or "interrupted")
        sys.exit(130)
    for failure in failures:
        is_plain = isinstance(failure, PlainError)
        _print_error(str(failure) if is_plain else in_one_line(describe_error(failure)))
    sys.exit(max((1 if isinstance(f, PlainError) else 2 for f in failures), default=0))


def _print_hydra_output(config_name: str) -> None:
    """Prints Hydra's help, or the output of --cfg and --info."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    start = hydra.main(str(CONF_DIR), config_name, version_base="1.3")
    output = StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(StringIO()):  # hides a message on --package
            start(lambda _: None)()
    except SystemExit as end:
        if end.code:
            raise UserError("--package: must be a key that --cfg shows") from end
        raise
    finally:
        if output.getvalue():
            say(output.getvalue().removesuffix("\n"))


def _in_turn(points: list[list[str]], settings: list[Settings]) -> Iterator[Settings]:
    """Yields the settings of each point and says which of several comes next."""
    for number, (overrides, point_settings) in enumerate(zip(points, settings, strict=True), 1):
        if len(points) > 1:
            say(f"run {number} of {len(points)}: {' '.join(overrides)}")
        yield point_settings


def _points(config_name: str, args: Namespace) -> list[list[str]] | None:
    """Returns the overrides of every point, or None for help, --cfg and --info."""
    if args.help or args.hydra_help or args.cfg or args.info:
        compose(config_name, args.overrides)
        return None
    if args.multirun and launched_ranks() is not None:
        raise UserError(
            "--multirun: start sweeps as python train.py -m devices=N, without torchrun"
        )
    if args.resolve:
        raise UserError("--resolve: needs --cfg job")
    with isolated_hydra():
        parsed = read_overrides(config_name, args.overrides)
        for key in (override.key_or_group for override in parsed):
            if key.startswith("hydra"):
                raise UserError(f"{key}: not available here")
        if not args.multirun:
            return [args.overrides]
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        points = [list(point) for batch in batches for point in batch]
    if not points:
        raise UserError(f"{' '.join(args.overrides)}: the sweep has no points")
    return points


def _parse_arguments(argv: list[str]) -> Namespace:
    """Parses Hydra's options, and ~ in paths, which shells leave to programs after `key=`.

    Raises UserError for unsupported and conflicting options.
    """
    parser = get_args_parser()
    # argparse would also print its usage
    setattr(parser, "error", MethodType(Parser.error, parser))
    args = parser.parse_args(argv)
    args.overrides = [_as_hydra_reads(text) for text in args.overrides]
    for option in UNSUPPORTED_OPTIONS:
        if getattr(args, option, None):
            raise UserError(f"--{option.replace('_', '-')}: not available here; see --help")
    if sum(bool(x) for x in (args.run, args.multirun, args.cfg, args.info)) > 1:
        raise UserError("--multirun, --cfg, --info, --run: only one of them is allowed")
    if args.package and not args.cfg:
        raise UserError("--package: needs --cfg")
    return args


def _as_hydra_reads(text: str) -> str:
    """Expands `~` in an override and quotes names of run folders, such as `...-tau=1-s0`."""
    text = re.sub(HOME, lambda _: str(Path.home()), text)
    found = re.fullmatch(FOLDERS, text) or re.fullmatch(NUMBER, text)
    if found is None:
        return text
    each = found[2].replace(",", "','")  # of several names
    return f"{found[1]}='{each}'"


def _print_error(line: str) -> None:
    """Prints the line to stderr, on the first rank only."""
    if is_first_rank():
        print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
