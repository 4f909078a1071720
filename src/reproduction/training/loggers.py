"""Where metrics go besides metrics.jsonl: nowhere, or to wandb."""

import dataclasses
import shutil
from typing import Any, Protocol
from uuid import uuid4

from reproduction.config import Config, Wandb
from reproduction.errors import UserError
from reproduction.runs import RunFolder


class Logger(Protocol):
    def log(self, line: dict[str, Any]) -> None: ...
    def close(self, status: str) -> None: ...


class NoLog:
    def log(self, line: dict[str, Any]) -> None:
        """Logs nothing."""

    def close(self, status: str) -> None:
        """Has nothing to close."""


class WandbLog:
    """One wandb run per job; summary.json keeps its id, so that a resumed run goes on in it."""

    def __init__(self, config: Config, logger: Wandb, folder: RunFolder):
        import wandb

        run_id = folder.read_summary().get("wandb_id") or uuid4().hex[:8]
        is_new = not folder.path.exists()
        folder.path.mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                id=run_id,
                resume="allow",
                name=config.name,
                project=logger.project,
                entity=logger.entity,
                mode=logger.mode,
                dir=str(folder.path),
                config=dataclasses.asdict(config),
            )
        except wandb.errors.Error as error:  # no credentials, no connection, no permission
            if is_new:
                shutil.rmtree(folder.path)
            reason = " ".join(str(error).split())
            raise UserError(
                f"logger.mode={logger.mode}: {reason} (or choose offline or disabled)"
            ) from error
        folder.write_summary(wandb_id=run_id)
        self.run.define_metric("step")
        self.run.define_metric("epoch")
        for name in ("top1", "top5", "eval_loss"):
            self.run.define_metric(name, step_metric="epoch")
        for name in ("loss", "lr", "mixed_*", "score_loss", "difficulty", "images_per_second"):
            self.run.define_metric(name, step_metric="step")

    def log(self, line: dict[str, Any]) -> None:
        self.run.log({key: value for key, value in line.items() if value is not None})

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


def build_logger(config: Config, folder: RunFolder, is_main: bool) -> Logger:
    """The configured logger on the first rank."""
    if is_main and isinstance(config.logger, Wandb):
        return WandbLog(config, config.logger, folder)
    return NoLog()
