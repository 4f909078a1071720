"""What surrounds the loop: the folder, checkpoints, a stop by a signal, the test set at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.utils._pytree import tree_map_only

from reproduction.models.names import State
from reproduction.models.weights import module_state
from reproduction.runs.identity import run_hash
from reproduction.system.errors import Stopped, UserError, first_line
from reproduction.training.checkpoint import check_classes, save_last, save_plain
from reproduction.training.endings import handling
from reproduction.training.history import Tests
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
                save(trainer)
            elif trainer.world.size == 1:  # the sums of several ranks need all of them
                with suppress(Exception):  # the first error counts
                    trainer._flush()
            raise


def _rewind_folder(trainer: "Trainer") -> None:
    """Removes what was written after the checkpoint that the run resumes from."""
    trainer.folder.trim_metrics(trainer.metrics_size)
    trainer.folder.resume_from(trainer.checkpoint)
    history = trainer.history
    trainer.folder.write_summary(epochs=trainer.epoch, **history.mixing, log=history.epochs)
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
        folder, keep = trainer.folder, trainer.config.checkpoint.keep
        trainer.metrics_size = folder.metrics_size()
        folder.sync_metrics()
        state = tree_map_only(Tensor, lambda x: x.detach().to("cpu"), _state_of(trainer))
        trainer.saver.write(partial(save_last, folder.last_path, state, keep))
    trainer.agreement.note_saved()
    trainer.world.barrier()


def test(trainer: "Trainer") -> Tests | None:
    """Evaluates the last and the best epoch on the test set, if the epochs were not."""
    if trainer.test_loader is None:
        return None
    start, model = time.perf_counter(), trainer.evaluated
    last = selected = trainer._evaluate(trainer.test_loader)
    if trainer.history.best_epoch != trainer.epoch:
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        model.load_state_dict(trainer.world.share(cast(State, trainer.best)))
        try:
            selected = trainer._evaluate(trainer.test_loader)
        finally:
            model.load_state_dict(weights)  # a stop saves the last epoch's
    trainer.eval_seconds += time.perf_counter() - start
    return Tests(last, selected)


def _state_of(trainer: "Trainer") -> dict[str, Any]:
    average = trainer.average
    return {
        "module": trainer.module.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "model_ema": None if average is None else average.module.state_dict(),
        "classes": trainer.classes,
        "num_images": trainer.batches.num_images,
        "run": run_hash(trainer.config),
        "best": trainer.best,
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
