"""What surrounds the training loop: the run's folder, its checkpoints, and a stop by a signal."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.models.weights import module_state
from reproduction.runs.identity import run_hash
from reproduction.system.errors import Stopped, UserError, first_line
from reproduction.training.checkpoint import check_classes, save_last, save_plain
from reproduction.training.endings import handling
from reproduction.training.loggers import Logs

if TYPE_CHECKING:
    from reproduction.training.loop import Trainer

COUNTS = ("step", "epoch", "images", "metrics_size", "eval_seconds")  # saved attributes


@contextmanager
def around(trainer: "Trainer", logger: Logs) -> Iterator[None]:
    """Prepares the folder for `Trainer.fit` and ends it well.

    If a signal stops it, writes the pending metrics and a checkpoint to resume from; at another
    error of a single process the metrics.
    """
    trainer.logger = logger
    if trainer.world.is_main:
        _rewind_folder(trainer)
    with handling(trainer.agreement.request_stop):
        try:
            yield
        except BaseException as error:
            trainer.progress.close()
            if isinstance(error, Stopped) and trainer.agreement.to_stop:  # not a second Ctrl-C
                trainer._flush()
                trainer._save()
            elif trainer.world.size == 1:  # the sums of several ranks need all of them
                with suppress(Exception):  # the first error counts
                    trainer._flush()
            raise


def _rewind_folder(trainer: "Trainer") -> None:
    """Removes what was written after the checkpoint that the run resumes from."""
    trainer.folder.trim_metrics(trainer.metrics_size)
    trainer.folder.resume_from(trainer.checkpoint)
    if trainer.best is None:
        trainer.folder.best_path.unlink(missing_ok=True)
    else:
        save_best(trainer)


def save_best(trainer: "Trainer") -> None:
    """Writes the weights of the best epoch."""
    assert trainer.best is not None
    save_plain(trainer.folder.best_path, trainer.best, trainer.classes)


def save(trainer: "Trainer") -> None:
    """Writes a checkpoint with the complete training state."""
    if trainer.world.is_main:
        trainer.metrics_size = trainer.folder.sync_metrics()
        save_last(trainer.folder.last_path, _state_of(trainer), trainer.config.checkpoint.keep)
    trainer.agreement.note_saved()
    trainer.world.barrier()


def _state_of(trainer: "Trainer") -> dict[str, Any]:
    average = trainer.average
    return {
        "module": trainer.module.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "model_ema": None if average is None else average.module.state_dict(),
        "best": trainer.best,
        "classes": trainer.classes,
        "num_images": trainer.batches.num_images,
        "run": run_hash(trainer.config),
        "non_finite": trainer.non_finite.state_dict(),
        "train_seconds": trainer.metrics.seconds,
        "history": trainer.history.state_dict(),
        **{name: getattr(trainer, name) for name in COUNTS},
    }


def restore(trainer: "Trainer", checkpoint: Path, state: dict[str, Any]) -> None:
    """Resumes from the state of a checkpoint; UserError if it does not fit the run."""
    check_classes(checkpoint, state["classes"], trainer.classes)
    if state["num_images"] != trainer.batches.num_images:
        raise UserError(
            f"checkpoint={checkpoint}: was trained on {state['num_images']} images, the data "
            f"set has {trainer.batches.num_images}"
        )
    trainer.checkpoint, trainer.best = checkpoint, state["best"]
    module = trainer.module
    module.load_state_dict(module_state(f"checkpoint={checkpoint}", state, module))
    try:
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.scaler.load_state_dict(state["scaler"])
        if trainer.average is not None:
            trainer.average.module.load_state_dict(state["model_ema"])
        trainer.non_finite.load_state_dict(state["non_finite"])
        trainer.history.load_state_dict(state["history"])
        trainer.metrics.seconds = state["train_seconds"]
        for name in COUNTS:
            setattr(trainer, name, state[name])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise UserError(f"checkpoint={checkpoint}: does not fit the run: {reason}") from error
