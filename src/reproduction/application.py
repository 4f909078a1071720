"""train.py as an application of Hydra: its words, its task, and the end of sweeps of others."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from reproduction.compose import Point, command_of, point_of, readable, typed_words, word_of
from reproduction.config import validated
from reproduction.errors import (
    OneLineError,
    PlainError,
    Stopped,
    UserError,
    noted_error,
    one_line_errors,
    say,
)
from reproduction.files import write_json
from reproduction.help import help_text, hydra_errors
from reproduction.identity import run_hash
from reproduction.jobs import objective, train_here
from reproduction.machine import launched_ranks
from reproduction.sweep import Sweep, check_choice

REFUSED = {  # keys of Hydra that would move what a run writes, with the reasons against it
    "hydra.run.dir": "output_root and name choose the folder of a run",
    "hydra.output_subdir": "the folder of a run has its config.yaml",
    "hydra.job.chdir": "paths are relative to the folder in which train.py is started",
}


@contextmanager
def application() -> Iterator[None]:
    """Around Hydra's main: makes the words readable before it, and tells its errors in one line."""
    with one_line_errors():
        flags, words = arguments(sys.argv[1:])
        sys.argv[1:] = [*flags, *words]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors
        OmegaConf.register_new_resolver("allowed", help_of, replace=True)
        with concluding(), hydra_errors(*words):
            yield


def arguments(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the flags of Hydra, and the words as Hydra can read them."""

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; see --hydra-help")

    parser = get_args_parser()
    setattr(parser, "error", refuse)
    options = parser.parse_intermixed_args(typed)
    if options.multirun and launched_ranks() is not None:
        raise UserError("-m: start a sweep as train.py -m devices=N, without torchrun")
    flags = [x for x in typed if x not in options.overrides]  # with their values
    words = readable(options.overrides)
    for word in words:
        key = word_of(word).key
        if key in REFUSED:
            raise UserError(f"{word}: {REFUSED[key]}")
    if options.hydra_help:  # which is composed without our keys
        return flags, []
    return flags, words


def help_of(*, _root_: DictConfig) -> str:
    """Returns the text of --help: what is allowed, with the values of this tree."""
    tree = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    return help_text(tree).replace("$", "$$")  # Hydra's template reads $$ as $


# --- the task -----------------------------------------------------------------------------------


def train(tree: DictConfig) -> float | None:
    """Trains the run of a tree, and returns what a sweeper chooses by.

    In a sweep only launchers like joblib call this: CheckedLauncher trains its points without it.
    """
    node: Any = HydraConfig.get()
    if node.mode == RunMode.MULTIRUN:
        return train_job(tree, node)
    with one_line_errors():  # Hydra would print "Error executing job with overrides" first
        command = command_of(tree)
        point = point_of(tree, typed_words(node))
        command.refuse("jobs", "task", reason="needs -m")
        sweep = Sweep([point])
        if command.dry_run:
            say(sweep.listing())
            return None
        check_planned(point, command.planned)
        sweep.check()
        train_here(point)
        return objective(point, command.objective)


def check_planned(point: Point, planned: str | None) -> None:
    """Raises UserError in a job whose words have become another run than the sweep has planned."""
    found = run_hash(point.config)
    if planned not in (None, found):
        reason = f"the words of this job train another run, {found}"
        raise UserError(f"planned={planned}: {reason}: {' '.join(point.words)}")


def train_job(tree: DictConfig, node: Any) -> float | None:
    """Trains a point for any launcher but ours; what no sweeper of ours planned is noted."""
    command = command_of(tree)
    command.refuse_beside(node.launcher._target_, "jobs", "task", "dry_run")
    point = point_of(tree, typed_words(node))
    notes = Notes(Path(node.sweep.dir))
    if command.planned is None:
        notes.add(node.job.num, point)
    try:
        check_planned(point, command.planned)
        check_choice([point], node.sweeper._target_)
        Sweep([point]).check()
        train_here(point)
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, Stopped):  # the launcher's handler may end all
            signal.raise_signal(interrupt.__cause__.signum)
        ended = PlainError(interrupt)
        notes.add_error(node.job.num, ended)
        raise ended from interrupt
    except OneLineError as error:
        notes.add_error(node.job.num, error)
        raise
    return objective(point, command.objective)


# --- the end of a sweep -------------------------------------------------------------------------


@dataclass(frozen=True)
class Notes:
    """What has become of the points of a sweep whose sweeper is not ours, in its folder.

    Nobody has planned them, and their jobs may run on other machines.
    """

    path: Path

    def add(self, number: int, point: Point) -> None:
        write_json(self.path / f"point-{number:06}.json", asdict(point))

    def add_error(self, number: int, error: OneLineError) -> None:
        """Notes the error of a point that was added."""
        if (self.path / f"point-{number:06}.json").exists():
            write_json(self.path / f"error-{number:06}.json", (str(error), error.status))

    def take(self) -> tuple[list[Point], list[OneLineError]]:
        """Returns the points and the errors, and removes the notes."""
        points = []
        for path in sorted(self.path.glob("point-*.json")):
            points.append(validated(Point, json.loads(path.read_text())))
            path.unlink()
        errors = map(noted_error, sorted(self.path.glob("error-*.json")))
        return points, [*errors]


class Begun(Callback):
    """Makes known, as soon as a sweep begins, Hydra's node and the folders that it may make.

    conf/train.yaml names it to Hydra.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)
        folder = Path(config.hydra.sweep.dir)
        known: Any = HydraConfig.instance().cfg
        with open_dict(known):
            known.new_folders = [str(x) for x in (folder, *folder.parents) if not x.exists()]


@contextmanager
def concluding() -> Iterator[None]:
    """Ends a sweep whose sweeper is not ours in its table, also after a failed run and Ctrl-C.

    Of any sweep it removes the folders that it has made and in which nothing was written.
    """
    HydraConfig.instance().cfg = None  # of an earlier command of this process
    try:
        yield
        conclude_noted(None)
    except (OneLineError, KeyboardInterrupt) as failure:
        conclude_noted(failure)
        raise
    finally:
        remove_new()


def sweep_folder() -> Path | None:
    """Returns the folder of the sweep that runs or has run in this process; None of a run."""
    tree: Any = HydraConfig.instance().cfg
    if tree is None or tree.hydra.mode != RunMode.MULTIRUN:
        return None
    return Path(tree.hydra.sweep.dir)


def conclude_noted(failure: OneLineError | KeyboardInterrupt | None) -> None:
    """Concludes the sweep of the jobs that have noted themselves, if there are any."""
    folder = sweep_folder()
    if folder is None:
        return
    points, errors = Notes(folder).take()
    if not points:
        return
    sweep = Sweep(points)
    if isinstance(failure, KeyboardInterrupt):
        errors.append(sweep.interrupted_by(failure))
    elif failure is not None and str(failure) not in map(str, errors):
        errors.append(failure)
    sweep.conclude(errors)


def remove_new() -> None:
    """Removes the folders that a sweep has made, its own and those around it, if they are empty."""
    folder = sweep_folder()
    if folder is None:
        return
    known: Any = HydraConfig.instance().cfg
    with suppress(OSError):  # a launcher's logs are kept, and folders that hold runs
        for path in known.new_folders:
            os.rmdir(path)
    if folder.exists() and any(folder.iterdir()):
        say(f"logs and results of Hydra's plugins: {folder}")
