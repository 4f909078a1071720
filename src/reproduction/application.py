"""train.py as an application of Hydra: the check before a run, and the task that trains it."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, read_write

from reproduction.compose import (
    RunPlan,
    command_of,
    config_of,
    hydra_arguments,
    hydra_errors,
    plan_of,
    task_overrides,
)
from reproduction.config import Command
from reproduction.errors import Stopped, UserError, one_line_errors, say
from reproduction.machine import is_first_rank
from reproduction.sweep import Sweep, check_here, check_same


@contextmanager
def application() -> Iterator[None]:
    """Around Hydra's main: prints its errors in one line."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors
    with one_line_errors(), hydra_errors(*sys.argv[1:]):
        yield


class Check(Callback):
    """Checks a run before Hydra makes its folder, or lists it."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with one_line_errors():  # ends the program: Hydra would go on after an error
            command = command_of_one_run(config)
            sweep = Sweep([plan_of(config).placed()])
            if command.dry_run:
                say(sweep.listing())
                sys.exit()
            sweep.check_folders()
            check_here(sweep.plans)
            if not is_first_rank():
                with read_write(config):
                    config.hydra.output_subdir = None  # the first rank writes it


def command_of_one_run(tree: DictConfig) -> Command:
    """Returns the other keys of a run's tree; UserError for what a sweep alone has."""
    command = command_of(tree)
    for name, value in (("jobs", command.jobs), ("task", command.task)):
        if value is not None:
            raise UserError(f"{name}={value}: needs -m, and a sweeper and launcher that have it")
    return command


def train(tree: DictConfig) -> float | None:
    """Trains the run of a tree, alone or as a job of any launcher; what a sweeper chooses by."""
    if HydraConfig.get().mode == RunMode.RUN:
        with one_line_errors():  # Hydra would print "Error executing job with overrides" first
            return train_plan(tree, plan_here(tree))
    command = command_of_one_run(tree)
    if command.dry_run:
        raise UserError("dry_run=true: needs hydra/sweeper=grid or study")
    plan = plan_here(tree)
    check_same(plan)
    return train_plan(tree, plan)


def plan_here(tree: DictConfig) -> RunPlan:
    """Returns the run of the job that Hydra has begun, in its output directory."""
    overrides = task_overrides(HydraConfig.get())
    plan = RunPlan(tuple(overrides), config_of(tree, overrides), str(tree.row or ""))
    return plan.at(Path(HydraConfig.get().runtime.output_dir))


def train_plan(tree: DictConfig, plan: RunPlan) -> float | None:
    """Trains a run, unless it is finished, and writes its report. Returns `objective`.

    Raises OneLineError, which says what has become of it. A signal that has ended it is passed on
    to the launcher.
    """
    from reproduction.reporting.report import write_report  # imports torch
    from reproduction.training.run import run_training
    from reproduction.training.stop import ending

    say(str(plan.path))
    command = shlex.join(["python", "train.py", *hydra_arguments(plan.path), *plan.overrides])
    failure = None
    try:
        origin = {"overrides": plan.overrides, "command": command}
        summary = run_training(plan.config, plan.folder, origin)
        write_report(plan.folder, plan.config, summary)
    except Exception as error:
        failure = ending(error)
    except KeyboardInterrupt as interrupt:
        stop = interrupt.__cause__
        if isinstance(stop, Stopped):
            handler = signal.getsignal(stop.signum)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.raise_signal(stop.signum)  # the launcher's may queue the job again
        raise
    if failure is not None:  # raised out here it has no context, which would keep the model
        raise failure
    return objective(plan, command_of(tree).objective)


def objective(plan: RunPlan, name: str) -> float | None:
    """Returns what a sweeper chooses by, of the last epoch of a run; None without such a number."""
    log = plan.folder.read_summary().get("log") or [{}]
    return log[-1].get(name)
