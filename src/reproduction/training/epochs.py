"""The epochs of a run: batches train, figures are logged, epochs evaluated and saved, signals stop.

The step is in loop.py. Elsewhere are the errors that end a run (endings.py), ranks
(distributed.py), files (checkpoint.py) and what the figures become (metrics.py, history.py).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils._pytree import tree_map_only

from reproduction.data.loaders import Loader, TrainingBatches
from reproduction.models.names import State
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import Stopped, UserError, first_line
from reproduction.system.hardware import give_back_freed_memory
from reproduction.system.progress import Progress
from reproduction.training import evaluate as evaluation
from reproduction.training import history
from reproduction.training.checkpoint import check_classes, save_last, save_plain
from reproduction.training.endings import (
    Agreement,
    announcing,
    explaining_memory,
    explaining_step,
    handling,
)
from reproduction.training.loggers import Logs
from reproduction.training.loop import Trainer
from reproduction.training.metrics import BatchMetrics, NonFinite
from reproduction.training.saving import Saver


class Epochs:
    """The epochs of a run: trains, evaluates, logs and saves; every rank has one."""

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        *,
        batches: TrainingBatches,
        train_loader: Loader,
        eval_loader: Loader,
        test_loader: Loader | None = None,
    ):
        config, world = trainer.config, trainer.world
        self.trainer, self.folder, self.world, self.batches = trainer, folder, world, batches
        self.train_loader, self.eval_loader = train_loader, eval_loader
        self.test_loader = test_loader  # if epochs are evaluated on a validation split
        steps = config.recipe.epochs * len(batches)
        self.total_steps = min(steps, config.recipe.max_steps or steps)
        self.total_epochs = math.ceil(self.total_steps / len(batches))
        self.epoch = 0  # completed
        self.figures: list[history.Epoch] = []  # the last one may have begun only
        self.eval_seconds = 0.0
        self.metrics, self.non_finite = BatchMetrics(world), NonFinite(trainer.uses_scaler)
        self.best: State | None = None  # weights of the best epoch
        self.resumed: tuple[Path | None, int] = None, 0  # checkpoint, bytes of metrics.jsonl then
        self.agreement, self.saver = Agreement(world), Saver(config.checkpoint)
        self.logger, self.progress = Logs(), Progress(world.is_main)
        self.upcoming: Iterator[list[Tensor]] | None = None  # batches that workers load already
        self.has_evaluated = False  # the loader of evaluation has its workers

    @contextmanager
    def around(self, logger: Logs) -> Iterator[None]:
        """Prepares the folder for `fit` and ends it well.

        If a signal stops it, writes a checkpoint to resume from; at another error of a single
        process the metrics.
        """
        self.logger = logger
        if self.world.is_main:
            self._rewind_folder()
        second = " (a second Ctrl-C: at once, without a checkpoint)"
        line = f"stopping after this step{second if self.world.size == 1 else ''}"
        said = announcing(line) if self.world.is_main else nullcontext()
        with handling(self.agreement.request_stop), said:
            try:
                yield
            except Stopped:
                self.progress.close()
                self._flush()
                self._save()
                raise
            except BaseException:
                self.progress.close()
                if self.world.size == 1:  # the sums of several ranks need all of them
                    with suppress(Exception):  # the first error counts
                        self._flush()
                raise

    def fit(self) -> dict[str, Any]:
        """Trains to the end, within `around`; returns the results for summary.json.

        Raises Stopped after the step in which a signal has come.
        """
        trainer, recipe = self.trainer, self.trainer.recipe
        while self.epoch < self.total_epochs:
            trainer.begin_epoch(self.epoch)
            if len(self.figures) == self.epoch:  # else resumed within the epoch
                self.figures.append(history.begun(self.epoch + 1))
            for images, classes in self._remaining_batches():
                batch = trainer.step % len(self.batches)
                size, lr = self.batches.global_size(batch), trainer.schedule(self.epoch, batch)
                with explaining_step(trainer.step + 1, trainer.config):
                    parts = trainer.train_step(images, classes, size)
                trainer.step += 1
                head = {"step": trainer.step, "epoch": self.epoch + 1, "lr": lr}
                self.metrics.add(head, size, [part.metrics for part in parts])
                to_save = self._agree_to_save()
                if to_save or trainer.step % recipe.log_every == 0:
                    self._flush()
                if to_save:
                    self._save()
                    self.metrics.restart_clock()
            self._flush()
            self._end_epoch()
        return self._results(self.test())

    def _remaining_batches(self) -> Iterator[list[Tensor]]:
        """Returns those of the epoch: images `b 3 h w`, uint8, and classes `b`."""
        step = self.trainer.step
        done = step - len(self.batches) * self.epoch
        if self.upcoming is None:
            self._load(self.epoch, done)
        assert self.upcoming is not None
        batches, self.upcoming = islice(self.upcoming, self.total_steps - step), None
        self.metrics.restart_clock()
        task = f"epoch {self.epoch + 1}/{self.total_epochs}"
        total = min(len(self.batches), done + self.total_steps - step)
        return self.progress.over(self.agreement.waiting_for(batches), task, total, done)

    def _load(self, epoch: int, first: int = 0) -> None:
        """Lets the workers load the batches of an epoch."""
        self.batches.start_at(epoch, first)
        self.upcoming = iter(self.train_loader)

    def _agree_to_save(self) -> bool:
        """Whether all ranks save now, by the first one's clock; raises Stopped after a signal."""
        return self.agreement.to_save(self.world.is_main and self.saver.is_late())

    def _flush(self) -> None:
        """Fetches and writes the metrics; PlainError if a non-finite update ends the run."""
        lines = self.metrics.fetch()
        if self.world.is_main:
            self._log(self.non_finite.writable(lines))
        self.non_finite.check(lines)
        if lines:
            history.add(self.figures[-1], lines)

    def _log(self, lines: list[dict[str, Any]]) -> None:
        self.folder.append_metrics(lines)
        for line in lines:
            self.logger.log(line)

    def _end_epoch(self) -> None:
        """Evaluates every `recipe.evaluate_every` epochs and after the last; counts and saves it.

        An epoch whose evaluation is interrupted does not count yet: a resumed run evaluates it.
        """
        number, last = self.epoch + 1, self.figures[-1]
        if number < self.total_epochs and self.has_evaluated:
            self._load(number)  # while the epoch is evaluated
        every = self.trainer.recipe.evaluate_every
        if is_evaluated := number % every == 0 or number == self.total_epochs:
            start = time.perf_counter()
            result = self.evaluate(self.eval_loader)
            self.eval_seconds += time.perf_counter() - start
            last |= result if self.test_loader is None else history.renamed(result)
        self.epoch = number
        if self.world.is_main:
            if is_evaluated:
                self._log(history.evaluations([last]))
            self.folder.write_summary(**self._progress())
            if is_evaluated and history.is_best(history.top1_of(self.figures)):
                state = self.trainer.evaluated.state_dict()
                self.best = {name: value.to("cpu", copy=True) for name, value in state.items()}
                self._save_best()
        mixes = self.trainer.module.htm is not None
        self.progress.line(history.describe(self.figures, self.total_epochs, mixes, self.seconds))
        is_due = self._agree_to_save() or number == self.total_epochs
        if is_due or self.world.share(self.saver.is_due(number)):
            self._save()

    def evaluate(self, loader: Loader) -> dict[str, float]:
        model = self.trainer.evaluated
        self.world.share_buffers(model)  # the first rank saves these weights
        give_back_freed_memory()  # before the loader forks its workers
        with explaining_memory(f"evaluation after step {self.trainer.step}", self.trainer.recipe):
            batches = self.agreement.waiting_for(loader)
            self.has_evaluated = True
            return evaluation.evaluate(
                model,
                self.trainer.inputs.normalize,
                self.progress.over(batches, "evaluation", length_hint(loader)),
                self.world,
                self.trainer.recipe.precision,
            )

    def test(self) -> history.Tests | None:
        """Evaluates the last and the best epoch on the test set, if the epochs were not."""
        if self.test_loader is None:
            return None
        start, model = time.perf_counter(), self.trainer.evaluated
        last = selected = self.evaluate(self.test_loader)
        if history.best_epoch(self.figures) != self.epoch:
            weights = {name: x.clone() for name, x in model.state_dict().items()}
            model.load_state_dict(self.world.share(cast(State, self.best)))
            try:
                selected = self.evaluate(self.test_loader)
            finally:
                model.load_state_dict(weights)  # a stop saves the last epoch's
        self.eval_seconds += time.perf_counter() - start
        return history.Tests(last, selected)

    def _results(self, tests: history.Tests | None) -> dict[str, Any]:
        images, skipped = self.batches.images(self.trainer.step), self.non_finite.skipped
        return {
            **history.accuracies(self.figures, tests),
            "steps": self.trainer.step,
            "images": images,
            "seconds": round(self.seconds, 1),
            "images_per_second": round(images / self.metrics.seconds, 1),
            **({"skipped_steps": skipped} if self.trainer.uses_scaler else {}),
            **self._progress(),
        }

    def _progress(self) -> dict[str, Any]:
        """The entries of summary.json about the completed epochs."""
        epochs = self.figures[: self.epoch]
        steps = min(self.epoch * len(self.batches), self.total_steps)
        mixing = history.mixing(epochs, self.batches.images(steps) / max(steps, 1))
        return {"epochs": self.epoch, **mixing, "log": history.evaluations(epochs)}

    @property
    def seconds(self) -> float:
        """Duration of training and evaluation."""
        return self.metrics.seconds + self.eval_seconds

    def _save(self) -> None:
        """Writes a checkpoint with the complete state."""
        if self.world.is_main:
            self.folder.sync_metrics()
            state = tree_map_only(Tensor, lambda x: x.detach().to("cpu"), self.state())
            keep = self.trainer.config.checkpoint.keep
            self.saver.write(partial(save_last, self.folder.last_path, state, keep))
        self.world.barrier()

    def _save_best(self) -> None:
        assert self.best is not None
        save_plain(self.folder.best_path, self.best, self.trainer.classes)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, and what it must have in common with this one."""
        return {
            **self.trainer.state(),
            "classes": self.trainer.classes,
            "num_images": self.batches.num_images,
            "epoch": self.epoch,
            "history": {"epochs": self.figures},
            "best": self.best,
            "non_finite": self.non_finite.state_dict(),
            "images": self.batches.images(self.trainer.step),
            "metrics_size": self.folder.metrics_size(),
            "train_seconds": self.metrics.seconds,
            "eval_seconds": self.eval_seconds,
        }

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Resumes from the state of a checkpoint; UserError if it does not fit the run."""
        place = f"checkpoint={checkpoint}"
        check_classes(checkpoint, state["classes"], self.trainer.classes)
        if state["num_images"] != self.batches.num_images:
            raise UserError(
                f"{place}: was trained on {state['num_images']} images, the data set has "
                f"{self.batches.num_images}"
            )
        try:
            self.trainer.restore(place, state)
            self.epoch, self.figures = state["epoch"], state["history"]["epochs"]
            self.best, self.resumed = state["best"], (checkpoint, state["metrics_size"])
            self.non_finite.load_state_dict(state["non_finite"])
            self.metrics.seconds = state["train_seconds"]
            self.eval_seconds = state["eval_seconds"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{place}: does not fit the run: {first_line(error)}") from error

    def _rewind_folder(self) -> None:
        """Removes what was written after the checkpoint that the run resumes from."""
        checkpoint, metrics_size = self.resumed
        self.folder.trim_metrics(metrics_size)
        self.folder.resume_from(checkpoint)
        self.folder.write_summary(**self._progress())
        if self.best is None:
            self.folder.best_path.unlink(missing_ok=True)
        else:
            self._save_best()
