"""train.py as an application of Hydra: its words, its task, its errors, the table of a sweep."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from reproduction.config import Command
from reproduction.help import help_text
from reproduction.launch import Notes, check_choice, objective, run_all
from reproduction.points import Point, command_of, config_of, point_of, typed_words
from reproduction.system import (
    OneLineError,
    PlainError,
    Stopped,
    UserError,
    launched_ranks,
    one_line_errors,
    program,
    say,
    warn,
)
from reproduction.words import hydra_errors, key_of, readable

REFUSED = {  # keys of Hydra that would move what a run writes, with the reasons against it
    "hydra.run.dir": "output_root and name choose the folder of a run",
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
        with hydra_errors(*words):
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
    words = [readable(word) for word in options.overrides]
    for word in words:
        key = key_of(word)
        if key in REFUSED:
            raise UserError(f"{word}: {REFUSED[key]}")
    return [x for x in typed if x not in options.overrides], words  # flags, with their values


def help_of(*, _root_: DictConfig) -> str:
    """Returns the text of --help: what is allowed, with the values of this tree."""
    tree = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    return help_text(config_of(tree)).replace("$", "$$")  # Hydra's template reads $$ as $


# --- the task -----------------------------------------------------------------------------------


def train(tree: DictConfig) -> float | None:
    """Trains the run of a tree.

    In a sweep only launchers like joblib call this: CheckedLauncher trains its points without it.
    """
    own: Any = HydraConfig.get()
    if own.mode == RunMode.MULTIRUN:
        return train_job(tree, own)
    with one_line_errors():  # Hydra would print "Error executing job with overrides" first
        command = command_of(tree)
        point = point_of(tree, typed_words(own))
        command.refuse("jobs", "task", reason="needs -m")
        if command.dry_run:
            from reproduction.studies.conclude import listing  # imports pandas

            say(listing([point]))
            return None
        return train_point(point, command)


def train_job(tree: DictConfig, own: Any) -> float | None:
    """Trains a point for any launcher but ours; notes it before, and its error for the end."""
    command = command_of(tree)
    reason = f"is for hydra/launcher=checked, not {own.launcher._target_}"
    command.refuse("jobs", "task", "dry_run", reason=reason)
    point = point_of(tree, typed_words(own))
    notes = Notes(Path(own.sweep.dir))
    notes.add(own.job.num, point)
    try:
        check_choice([point], own.sweeper._target_)
        return train_point(point, command)
    except OneLineError as error:
        notes.add_error(own.job.num, error)
        raise
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, Stopped):  # submitit's handler may requeue, and exit
            signal.raise_signal(interrupt.__cause__.signum)
        ended = PlainError(interrupt)
        notes.add_error(own.job.num, ended)
        raise ended from interrupt


def train_point(point: Point, command: Command) -> float | None:
    """Trains a run, and returns what a sweeper chooses by; raises the error of the run."""
    (error,) = run_all([point])
    if error is not None:
        raise error
    return objective(point, command.objective)


# --- the end of a sweep -------------------------------------------------------------------------


class EndOfSweep(Callback):
    """Tells the errors of a sweep and prints its table, after its last run by any launcher.

    With task=N there is no table, as the other runs are trained elsewhere. conf/train.yaml names
    this to Hydra.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            with one_line_errors():
                notes = Notes(Path(config.hydra.sweep.dir))
                points, errors = notes.take()
                for line, _ in errors:
                    warn(f"{program()}: {line}")
                if points and config.task is None:
                    from reproduction.studies.conclude import conclude  # imports pandas

                    conclude(points)
                if notes.path.exists():
                    say(f"logs and results of Hydra's plugins: {notes.path}")
        except Exception:  # Hydra would only warn of it
            traceback.print_exc()
            sys.exit(1)
        if errors:
            sys.exit(max(status for _, status in errors))
