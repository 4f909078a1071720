"""Loggers of metrics beside metrics.jsonl."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reproduction.config import Config
from reproduction.errors import UserError, first_line, say, warn
from reproduction.folder import RunFolder

SETTINGS: dict[str, Any] = {
    # The console, the machine and the code are not recorded.
    "console": "off",
    "silent": True,
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    # A network that does not answer does not hold up a run for long.
    "init_timeout": 30.0,
    "finish_timeout": 30.0,
    "finish_timeout_raises": True,
}


class WandbLog:
    """One wandb run per job; summary.json keeps its id, so that a resumed run continues it.

    `logger.wandb` is passed to `wandb.init`; keys of its `config` stand beside the run's settings.
    """

    def __init__(self, given: dict[str, Any], config: Config, folder: RunFolder, step: int):
        import wandb

        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        given = {key: value for key, value in given.items() if value is not None}
        init = {
            "id": folder.read_summary().get("wandb_id"),
            "resume": "allow",
            "name": folder.path.name,
            "project": os.environ.get("WANDB_PROJECT", "tokenmixup"),
            "dir": str(folder.path),
            **given,
            "config": dataclasses.asdict(config) | given.get("config", {}),
        }
        init["settings"] = wandb.Settings(**SETTINGS | init.get("settings", {}))
        wandb.teardown()  # a run before in this process may have had other settings
        wandb.setup(settings=init["settings"])  # the login uses these
        self.run: Any = wandb.init(**init)
        if not self.run.disabled:
            folder.write_summary(wandb_id=self.run.id)  # in a sweep the agent chooses it
        self.run.define_metric("*", step_metric="step")
        for name in ("top1", "top5", "eval_loss", "val_*", *config.recipe.metrics):
            self.run.define_metric(name, step_metric="epoch")
        if self.run.url:
            say(f"wandb: {self.run.url}")

    def log(self, line: dict[str, Any]) -> None:
        self.run.log({key: value for key, value in line.items() if value is not None})

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "finished"))


class TensorBoardLog:
    """Event files in the run's folder; an epoch's metrics are at its last step.

    A resumed run writes a new file; TensorBoard hides the steps of older files from its first step
    on.
    """

    def __init__(self, given: dict[str, Any], config: Config, folder: RunFolder, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.step = step
        path = str(folder.path / "tensorboard")
        self.writer: Any = SummaryWriter(path, purge_step=step + 1, **given)

    def log(self, line: dict[str, Any]) -> None:
        self.step = line.get("step", self.step)
        for name, value in line.items():
            if value is not None and name not in ("step", "epoch"):
                self.writer.add_scalar(name, value, self.step)

    def close(self, status: str) -> None:
        self.writer.close()


LOGGERS: dict[str, type[WandbLog | TensorBoardLog]] = {
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
}


class Loggers:
    """The configured loggers of a run that continues after `step`.

    The error of one, such as a full disk or the death of wandb's process, does not end the
    training: it is left out from then on, and metrics.jsonl has all lines. UserError with the
    reason if one cannot begin.
    """

    def __init__(self, chosen: Mapping[Any, Any], config: Config, folder: RunFolder, step: int):
        self.active = dict[str, WandbLog | TensorBoardLog]()
        for name, logger in LOGGERS.items():
            if chosen.get(name) is None:
                continue
            try:
                self.active[name] = logger(chosen[name], config, folder, step)
            except Exception as error:
                reason = " ".join(str(error).split()) or first_line(error)
                raise UserError(f"logger.{name}: {reason}") from error

    def log(self, line: dict[str, Any]) -> None:
        for name, logger in [*self.active.items()]:  # a copy: one that fails is left out
            with self._left_out_if_it_fails(name):
                logger.log(line)

    def close(self, status: str) -> None:
        for name, logger in [*self.active.items()]:
            with self._left_out_if_it_fails(name):
                logger.close(status)

    @contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            del self.active[name]
            reason = first_line(error)
            warn(f"warning: {name} failed ({reason}); all lines are in metrics.jsonl")
