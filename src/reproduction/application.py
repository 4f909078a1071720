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

from reproduction.help import help_text
from reproduction.launch import (
    Sweep,
    check_choice,
    end,
    launch_of,
    objective,
    run_all,
)
from reproduction.start import config_of, point_of, register_resolvers, typed_words
from reproduction.system import (
    OneLineError,
    PlainError,
    Stopped,
    UserError,
    launched_ranks,
    one_line_errors,
    say,
)
from reproduction.words import hydra_errors, readable

OURS = {  # keys of Hydra that would move what a run writes
    "hydra.run.dir": "output_root and name choose the folder of a run",
    "hydra.job.chdir": "paths are relative to the folder in which train.py is started",
}


@contextmanager
def application() -> Iterator[None]:
    """Around Hydra's main: makes the words readable before it, and tells its errors in one line."""
    with one_line_errors(program()):
        flags, words = arguments(sys.argv[1:])
        sys.argv[1:] = [*flags, *words]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors
        register_resolvers()
        OmegaConf.register_new_resolver("allowed", help_of, replace=True)
        with hydra_errors(*words):
            yield


def program() -> str:
    return Path(sys.argv[0]).name


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
        key = word.partition("=")[0]
        if key in OURS:
            raise UserError(f"{word}: {OURS[key]}")
    return [x for x in typed if x not in options.overrides], words


def help_of(*, _root_: DictConfig) -> str:
    """Returns the text of --help: what is allowed, with the values of this tree."""
    tree = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    return help_text(config_of(tree)).replace("$", "$$")  # for Hydra's template


# --- the task -----------------------------------------------------------------------------------


def train(tree: DictConfig) -> float | None:
    """Trains the run of a tree: the only one, or a job of a sweep that another launcher runs."""
    own: Any = HydraConfig.get()
    if own.mode == RunMode.MULTIRUN:
        return train_job(tree, own)
    with one_line_errors(program()):  # before Hydra prints them
        return train_alone(tree, own)


def train_alone(tree: DictConfig, own: Any) -> float | None:
    launch, point = launch_of(tree), point_of(tree, typed_words(own))
    launch.refuse("jobs", "task", reason="needs -m")
    if launch.dry_run:
        from reproduction.studies.conclude import listing  # imports pandas

        say(listing([point]))
        return None
    (error,) = run_all([point])
    if error is not None:
        raise error
    return objective(point, launch.objective)


def train_job(tree: DictConfig, own: Any) -> float | None:
    """Trains a point for any launcher but ours, and notes for the end of the sweep how it ended."""
    launch = launch_of(tree)
    reason = f"is for hydra/launcher=checked, not {own.launcher._target_}"
    launch.refuse("jobs", "task", "dry_run", reason=reason)
    point, sweep = point_of(tree, typed_words(own)), Sweep(Path(own.sweep.dir))
    sweep.note(own.job.num, point)
    error: OneLineError | None
    try:
        check_choice([point], own.sweeper._target_)
        (error,) = run_all([point])
    except UserError as refused:
        error = refused
    except KeyboardInterrupt as interrupt:
        error = PlainError(interrupt)
        pass_on(interrupt)
    if error is not None:
        sweep.note(own.job.num, point, error)
        raise error
    return objective(point, launch.objective)


def pass_on(interrupt: KeyboardInterrupt) -> None:
    """Hands the signal that has stopped a run to whoever handles it outside: submitit requeues."""
    if isinstance(interrupt.__cause__, Stopped):
        signal.raise_signal(interrupt.__cause__.signum)


# --- the end of a sweep -------------------------------------------------------------------------


class Table(Callback):
    """Ends a sweep: tells its errors and prints its table, whatever launcher and sweeper ran."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            with one_line_errors(program()):
                sweep = Sweep(Path(config.hydra.sweep.dir))
                points, errors = sweep.take()
                status = end(program(), errors)
                if points and config.task is None:
                    from reproduction.studies.conclude import conclude  # imports pandas

                    conclude(points)
                if sweep.path.exists():
                    say(f"logs and results of Hydra's plugins: {sweep.path}")
        except Exception:  # of which Hydra would make a warning
            traceback.print_exc()
            sys.exit(1)
        if status:
            sys.exit(status)
