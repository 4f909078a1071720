"""train.py as an application of Hydra: its words, and its task, which trains one run."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from reproduction.compose import command_of, point_of, typed_words
from reproduction.errors import Stopped, UserError, one_line_errors, say
from reproduction.help import hydra_errors
from reproduction.jobs import objective, train_here
from reproduction.machine import launched_ranks
from reproduction.sweep import Sweep


@contextmanager
def application() -> Iterator[None]:
    """Around Hydra's main: tells its errors in one line."""
    with one_line_errors():
        if {"-m", "--multirun"} & {*sys.argv} and launched_ranks() is not None:
            raise UserError("-m: start a sweep as train.py -m devices=N, without torchrun")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors
        with hydra_errors(*sys.argv[1:]):
            yield


def train(tree: DictConfig) -> float | None:
    """Trains the run of a tree, alone or as a job of any launcher; what a sweeper chooses by."""
    node: Any = HydraConfig.get()
    if node.mode == RunMode.MULTIRUN:
        return train_job(tree, node)
    with one_line_errors():  # Hydra would print "Error executing job with overrides" first
        command = command_of(tree)
        for name, value in (("jobs", command.jobs), ("task", command.task)):
            if value is not None:
                raise UserError(f"{name}={value}: needs -m")
        if command.dry_run:
            say(Sweep([point_of(tree, typed_words(node))]).listing())
            return None
        return train_job(tree, node)


def train_job(tree: DictConfig, node: Any) -> float | None:
    """Checks and trains a run."""
    point = point_of(tree, typed_words(node))
    Sweep([point]).check()
    try:
        train_here(point)
    except KeyboardInterrupt as interrupt:
        stop = interrupt.__cause__
        if isinstance(stop, Stopped):
            handler = signal.getsignal(stop.signum)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.raise_signal(stop.signum)  # the launcher's may queue the job again
        raise
    return objective(point, command_of(tree).objective)
