"""Loggers of metrics."""

import dataclasses
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from reproduction.config import Config, TensorBoard, Wandb
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError, first_line
from reproduction.system.terminal import say, warn

Mode = Literal["online", "offline", "disabled"]

PROJECT = "tokenmixup"
MODES: dict[str, Mode] = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}
INIT_SECONDS = 30.0  # timeout to reach the service
FINISH_SECONDS = 30.0  # timeout to upload the remaining data
REFUSED = re.compile(r"returned error 4\d\d")  # the service rejects credentials or permissions
# Disables what wandb records by default: the console, the machine, the code, the command line.
PRIVATE: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbLog:
    """One wandb run per job; summary.json keeps its id, so that a resumed run continues it.

    If the service cannot be reached, warns and records the run offline.
    """

    name = "wandb"

    def __init__(self, config: Config, logger: Wandb, folder: RunFolder):
        self.run_id = folder.read_summary().get("wandb_id") or uuid4().hex[:8]
        self.folder = folder
        self.run = self._open(config, logger)
        self.local_path = Path(self.run.dir).parent
        folder.write_summary(wandb_id=self.run.id)  # a sweep agent decides itself
        self.run.define_metric("step")
        self.run.define_metric("epoch")
        for name in ("top1", "top5", "eval_loss", "val_*"):
            self.run.define_metric(name, step_metric="epoch")
        by_step = "loss lr mixed_* difficulty* gain_* images_* skipped"
        for name in by_step.split():
            self.run.define_metric(name, step_metric="step")

    def _open(self, config: Config, logger: Wandb) -> Any:
        """Opens the run as configured, or offline; UserError if the service refuses it."""
        import wandb

        try:
            run = self._init(config, logger, logger.mode)
        except Exception as error:
            _teardown()
            unreachable = isinstance(error, wandb.errors.CommError) and not (
                isinstance(error, wandb.errors.AuthenticationError) or REFUSED.search(str(error))
            )
            if logger.mode != "online" or not unreachable:
                reason = " ".join(str(error).split()) or first_line(error)
                raise UserError(
                    f"logger.wandb.mode={logger.mode}: {reason} (or choose offline or disabled)"
                ) from error
            reason = str(error).strip().splitlines()[-1]
            _warn(f"wandb cannot be reached, the run is recorded offline ({reason})")
            run = self._init(config, logger, "offline")
        if run.url:
            say(f"wandb: {run.url}")
        return run

    def _init(self, config: Config, logger: Wandb, mode: Mode | None) -> Any:
        import wandb

        settings = _settings()
        wandb.setup(settings=settings)  # the login uses these
        return wandb.init(
            id=self.run_id,
            resume="allow",
            name=config.name,
            project=logger.project,
            entity=logger.entity,
            mode=mode,
            dir=str(self.folder.path),
            config=dataclasses.asdict(config),
            settings=settings,
        )

    def log(self, line: dict[str, Any]) -> None:
        self.run.log({key: value for key, value in line.items() if value is not None})

    def close(self, status: str) -> None:
        """Ends the run; prints how to upload it if that is still to be done."""
        try:
            self.run.finish(exit_code=0 if status == "finished" else 1)
            if self.run.url is None:
                say(f"wandb: recorded offline, to upload it: wandb sync {self.local_path}")
        except TimeoutError:
            _warn(
                f"wandb upload timed out after {FINISH_SECONDS:.0f} s, to upload the rest: "
                f"wandb sync --include-online {self.local_path}"
            )
        finally:
            _teardown()


def _settings() -> Any:
    import wandb

    return wandb.Settings(
        silent=True,
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        **PRIVATE,
    )


def from_environment(logger: Wandb) -> Wandb:
    """Fills keys that are null from wandb's own variables and settings files, then the defaults."""
    import wandb

    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    _teardown()  # it would remember the variables of an earlier run
    try:
        own = wandb.setup(settings=_settings()).settings
    except (ValueError, RuntimeError) as error:  # such as WANDB_MODE=sometimes, or no home folder
        raise UserError(f"logger=wandb: its environment is invalid: {error}") from error
    return Wandb(
        mode=logger.mode or MODES.get(own.mode, "online"),
        project=logger.project or own.project or PROJECT,
        entity=logger.entity,  # wandb itself reads its variable
    )


class TensorBoardLog:
    """Event files in the run's folder; an epoch's metrics are at its last step.

    A resumed run writes a new file; TensorBoard hides the steps of older files from its first step
    on.
    """

    name = "tensorboard"

    def __init__(self, settings: TensorBoard, folder: RunFolder, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.step = step
        path = str(folder.path / "tensorboard")
        self.writer: Any = SummaryWriter(
            path, purge_step=step + 1, flush_secs=settings.flush_seconds
        )

    def log(self, line: dict[str, Any]) -> None:
        self.step = line.get("step", self.step)
        for name, value in line.items():
            if value is not None and name not in ("step", "epoch"):
                self.writer.add_scalar(name, value, self.step)

    def close(self, status: str) -> None:
        self.writer.close()


class Logs:
    """Any number of loggers.

    Their errors, such as a full disk or the death of wandb's process, do not end the training: a
    warning counts them, and metrics.jsonl has all lines.
    """

    def __init__(self) -> None:
        self.loggers: list[WandbLog | TensorBoardLog] = []
        self.errors: dict[str, list[str]] = {}

    def log(self, line: dict[str, Any]) -> None:
        for logger in self.loggers:
            self._try(logger.name, logger.log, line)

    def close(self, status: str) -> None:
        for logger in self.loggers:
            self._try(logger.name, logger.close, status)
        for name, errors in self.errors.items():
            first, count = errors[0], len(errors)
            _warn(f"{name} failed {count} times ({first}), all lines are in metrics.jsonl")

    def _try(self, name: str, call: Callable[[Any], None], value: Any) -> None:
        try:
            call(value)
        except Exception as error:
            self.errors.setdefault(name, []).append(first_line(error))


def build_logs(config: Config, folder: RunFolder, step: int) -> Logs:
    """Opens the configured loggers for a run that continues after `step`."""
    wandb, tensorboard = config.logger.wandb, config.logger.tensorboard
    logs = Logs()
    try:
        if wandb is not None and (wandb := from_environment(wandb)).mode != "disabled":
            logs.loggers.append(WandbLog(config, wandb, folder))
        if tensorboard is not None:
            logs.loggers.append(TensorBoardLog(tensorboard, folder, step))
    except BaseException:
        logs.close("failed")
        raise
    return logs


def _teardown() -> None:
    """Ends wandb's process, which may be dead: at exit this would print many lines."""
    import wandb

    with suppress(Exception):
        wandb.teardown()


def _warn(text: str) -> None:
    warn(f"warning: {text}")
