"""The training loop: epochs, batches, checkpoints and evaluation. step.py updates the weights."""

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

from torch import Tensor

from reproduction.config import Config
from reproduction.data.build import Loader
from reproduction.data.inputs import TrainingInputs
from reproduction.data.loaders import TrainingBatches
from reproduction.models.build import compile_module
from reproduction.models.names import State
from reproduction.models.weights import module_state
from reproduction.runs.folder import RunFolder, run_hash
from reproduction.system.errors import Stopped, UserError, first_line
from reproduction.system.hardware import give_back_freed_memory
from reproduction.training.checkpoint import check_classes, save_last, save_plain
from reproduction.training.distributed import World
from reproduction.training.endings import (
    Agreement,
    explaining_compiler,
    explaining_memory,
    handling,
)
from reproduction.training.evaluate import evaluate
from reproduction.training.loggers import Logs, ProgressDisplay
from reproduction.training.metrics import BatchMetrics, NonFinite, non_finite_error
from reproduction.training.mixing import MixedShare
from reproduction.training.step import MicroBatch, TrainingStep, build_schedule
from tokenmixup import TokenMixup

MEDIAN_EPOCHS = 10
ACCURACIES = (
    "top1_last",
    "top1_best",
    "top1_median10",
    "top5_last",
    "top5_best",
)  # of the test set
# Attributes of Trainer in a checkpoint; metrics_size is in bytes.
SAVED = (
    *("step", "epoch", "images", "metrics_size", "eval_seconds", "totals", "all_totals"),
    *("history", "mixing"),
)
TOTALS = ("batches", "loss", "mixed", "tokens")  # summed over the epoch so far, and over all


def renamed(result: dict[str, float]) -> dict[str, float]:
    """Names the results of a validation split: val_top1, val_top5, val_loss."""
    return {f"val_{key.removeprefix('eval_')}": value for key, value in result.items()}


class Trainer:
    """Trains `module` epoch by epoch and writes the run folder; every rank has one."""

    def __init__(
        self,
        config: Config,
        world: World,
        folder: RunFolder,
        *,
        module: TokenMixup,
        classes: list[str],
        inputs: TrainingInputs,
        batches: TrainingBatches,
        train_loader: Loader,
        eval_loader: Loader,
    ):
        recipe = config.recipe
        self.config, self.recipe, self.world = config, recipe, world
        self.folder, self.classes = folder, classes
        self.logger = Logs()
        self.module, self.batches = module, batches
        self.train_loader, self.eval_loader = train_loader, eval_loader
        if config.compile:
            compile_module(module, cuda_graphs=config.compile == "reduce-overhead")
        self.update = TrainingStep(module, inputs, recipe, world, config.seed)
        self.update.clones = config.compile == "reduce-overhead"
        self.schedule = build_schedule(self.update.optimizer, recipe, len(batches))
        self.metrics = BatchMetrics(world)
        self.non_finite = NonFinite(self.update.skips, self.update.uses_scaler)
        self.total_steps = recipe.epochs * len(batches)
        if recipe.max_steps is not None:
            self.total_steps = min(self.total_steps, recipe.max_steps)
        self.epochs = math.ceil(self.total_steps / len(batches))
        self.mixed_share = MixedShare(module.htm, self.epochs)
        self.step = self.epoch = self.images = self.metrics_size = 0
        self.eval_seconds = 0.0
        self.totals, self.all_totals = dict.fromkeys(TOTALS, 0.0), dict.fromkeys(TOTALS, 0.0)
        self.history: list[dict[str, Any]] = []  # metrics of the evaluated epochs
        self.mixing: dict[str, float | None] = {}  # see _mixing, of the last complete epoch
        self.best: State | None = None  # weights of the best epoch
        self.checkpoint: Path | None = None  # the one resumed from
        self.initial_weights: str | None = None  # what was read from a file
        self.test_loader: Loader | None = None  # if epochs are evaluated on a validation split
        self.agreement = Agreement(world, config.checkpoint)

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Resumes from the state of a checkpoint; UserError if it does not fit the run."""
        check_classes(checkpoint, state["classes"], self.classes)
        if state["num_images"] != self.batches.num_images:
            raise UserError(
                f"checkpoint={checkpoint}: was trained on {state['num_images']} images, the data "
                f"set has {self.batches.num_images}"
            )
        self.checkpoint, self.best = checkpoint, state["best"]
        self.module.load_state_dict(module_state(f"checkpoint={checkpoint}", state, self.module))
        try:
            self.update.load_state_dict(state)
            for name in SAVED:
                setattr(self, name, state[name])
            self.metrics.seconds = state["train_seconds"]
            self.non_finite.load_state_dict(state["non_finite"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(f"checkpoint={checkpoint}: does not fit the run: {reason}") from error

    def fit(self, logger: Logs) -> dict[str, Any]:
        """Trains to the end and returns the results for summary.json.

        On a signal, finishes the step, saves a checkpoint to resume from, and raises Stopped.
        """
        self.logger = logger
        if self.world.is_main:
            self._rewind_folder()
        with (
            closing(ProgressDisplay(self.total_steps, self.step, self.world.is_main)) as display,
            handling(self.agreement.request_stop),
        ):
            while self.epoch < self.epochs:
                self._begin_epoch()
                try:
                    self._train_epoch(display)
                    self._end_epoch()
                except Stopped:
                    if self.agreement.to_stop:  # not at a second Ctrl-C
                        self._save()
                    raise
                display.line(self._describe())
                for warning in self.mixed_share.warnings():
                    display.line(warning)
                self.totals = dict.fromkeys(TOTALS, 0.0)
                self._save()
                if self.world.is_main and self._is_best():
                    assert self.best is not None
                    save_plain(self.folder.best_path, self.best, self.classes)
                self.agreement.update(self.step)
                if self.agreement.to_stop:
                    raise Stopped(self.agreement.to_stop)
            return self._result() if self.test_loader is None else self._test(self.test_loader)

    def _rewind_folder(self) -> None:
        """Removes what was written after the checkpoint that the run resumes from."""
        self.folder.trim_metrics(self.metrics_size)
        self.folder.resume_from(self.checkpoint)
        if self.best is not None:
            save_plain(self.folder.best_path, self.best, self.classes)
        else:
            self.folder.best_path.unlink(missing_ok=True)

    def _begin_epoch(self) -> None:
        """Prepares the model and the loader for the remaining batches of the epoch."""
        off_epoch = self.config.augmentation.off_epoch
        if off_epoch is not None and self.epoch >= off_epoch:
            self.update.stop_mixing()
        self.module.train()
        self.batches.start_at(self.epoch, self.step - len(self.batches) * self.epoch)
        self.metrics.restart_clock()

    def _train_epoch(self, display: ProgressDisplay) -> None:
        """Trains on the remaining batches of the epoch, until its end or a signal."""
        remaining = islice(self.train_loader, self.total_steps - self.step)
        with self._flushing_on_error():
            for images, classes in self.agreement.waiting_for(remaining):
                batch = self.step % len(self.batches)
                size = self.batches.global_size(batch)
                lr = self.schedule(self.epoch, batch)
                micro_batches = self.train_step(images, classes, size)
                self.step, self.images = self.step + 1, self.images + size
                not_finite = self.update.not_finite
                self.metrics.add(self.step, self.epoch + 1, lr, micro_batches, not_finite)
                self.mixed_share.add(self.epoch + 1, micro_batches)
                display.advance()
                self.agreement.update(self.step)
                if self.agreement.to_stop:
                    break
                if self.agreement.to_save or self.step % self.recipe.log_every == 0:
                    self._flush()
                if self.agreement.to_save:
                    self._save()
                    self.metrics.restart_clock()
            self._flush()
        if self.agreement.to_stop:
            raise Stopped(self.agreement.to_stop)

    @contextmanager
    def _flushing_on_error(self) -> Iterator[None]:
        """Writes pending metrics on an error; not with several ranks, as their sums need all."""
        try:
            yield
        except BaseException:
            if self.world.size == 1:
                with suppress(Exception):  # the first error counts
                    self._flush()
            raise

    def train_step(self, images: Tensor, classes: Tensor, global_size: int) -> list[MicroBatch]:
        """Runs one step on this rank's share of a batch, `b 3 h w` uint8 and `b`; see TrainingStep.

        Raises PlainError if memory runs short, or if a gain is not finite.
        """
        try:
            step = f"step {self.step + 1}"
            with explaining_memory(step, self.recipe), explaining_compiler(self.config):
                return self.update(images, classes, self.step, global_size)
        except FloatingPointError as error:
            raise non_finite_error(self.step + 1, str(error)) from error

    def _flush(self) -> None:
        """Fetches and writes the metrics; PlainError if a non-finite update ends the run."""
        lines = self.metrics.fetch()
        self._write(lines)
        self.non_finite.check(lines)
        lines = [line for line in lines if not line["skipped"]]
        for totals in (self.totals, self.all_totals):
            totals["batches"] += len(lines)
            totals["loss"] += sum(line["loss"] for line in lines)
            totals["mixed"] += sum(line["mixed_samples"] for line in lines)
            totals["tokens"] += sum(x["mixed_samples"] * x["mixed_tokens"] for x in lines)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Writes the lines before the first update that ends the run."""
        if self.world.is_main:
            writable = self.non_finite.writable(lines)
            self.folder.append_metrics(writable)
            for line in writable:
                self.logger.log(line)

    def _end_epoch(self) -> None:
        """Counts the epoch; evaluates every `recipe.evaluate_every` epochs and after the last.

        An epoch whose evaluation is interrupted does not count yet: a resumed run evaluates it.
        """
        self.epoch += 1
        if self.epoch % self.recipe.evaluate_every == 0 or self.epoch == self.epochs:
            start = time.perf_counter()
            try:
                self._evaluate()
            except Stopped:
                self.epoch -= 1
                raise
            self.eval_seconds += time.perf_counter() - start
        self.mixing = self._mixing()
        if self.world.is_main:
            self.folder.write_summary(epochs=self.epoch, **self.mixing, log=self.history)

    def _mixing(self) -> dict[str, float | None]:
        """Returns mixed samples per batch and tokens in each of the epoch, and the share of all."""
        batches, _, mixed, tokens = (self.totals[name] for name in TOTALS)
        share = self.all_totals["mixed"] / max(self.all_totals["batches"], 1)
        return {
            "mixed_samples": mixed / max(batches, 1),
            "mixed_tokens": tokens / mixed if mixed else None,
            "mixed_share": round(share * self.step / max(self.images, 1), 4),
        }

    def _evaluate(self) -> None:
        """Evaluates, writes the epoch's metrics and keeps the best weights."""
        model = self.update.evaluated
        self.world.share_buffers(model)  # the first rank saves these weights
        result = self._evaluate_on(self.eval_loader)
        line = {"epoch": self.epoch, **(result if self.test_loader is None else renamed(result))}
        self.history.append(line)
        if self.world.is_main:
            self.folder.append_metrics([line])
            self.logger.log(line)
            if self._is_best():
                self.best = {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()}

    def _evaluate_on(self, loader: Loader) -> dict[str, float]:
        give_back_freed_memory()  # before the loader forks its workers
        with explaining_memory(f"evaluation after step {self.step}", self.recipe):
            return evaluate(
                self.update.evaluated,
                self.update.inputs.normalize,
                self.agreement.waiting_for(loader),
                self.world,
                self.recipe.precision,
            )

    def _test(self, loader: Loader) -> dict[str, Any]:
        """Evaluates the last and the best epoch on the test set, for the first time.

        Returns the results for summary.json. The model keeps the weights of the best epoch.
        """
        start, result = time.perf_counter(), self._result()
        last = selected = self._evaluate_on(loader)
        if result["selected_epoch"] != self.epoch:
            self.update.evaluated.load_state_dict(self.world.share(cast(State, self.best)))
            selected = self._evaluate_on(loader)
        self.eval_seconds += time.perf_counter() - start
        return {
            **result,
            **{f"{name}_last": last[name] for name in ("top1", "top5")},
            **{f"{name}_selected": selected[name] for name in ("top1", "top5")},
            "broken_images": last.get("broken_images", 0),
            "seconds": round(self.seconds, 1),
        }

    @property
    def _top1(self) -> list[float]:
        """The accuracy after each evaluated epoch, by which the best is chosen."""
        key = "top1" if self.test_loader is None else "val_top1"
        return [line[key] for line in self.history]

    @property
    def _is_evaluated(self) -> bool:
        """Whether the last epoch was evaluated."""
        return bool(self.history) and self.history[-1]["epoch"] == self.epoch

    def _is_best(self) -> bool:
        """Whether the last epoch was evaluated and beats all earlier ones."""
        top1 = self._top1
        return self._is_evaluated and all(top1[-1] > other for other in top1[:-1])

    def _save(self) -> None:
        """Writes a checkpoint with the complete training state."""
        if self.world.is_main:
            self.metrics_size = self.folder.sync_metrics()
            save_last(self.folder.last_path, self._state(), self.config.checkpoint.keep)
        self.agreement.note_saved()
        self.world.barrier()

    @property
    def seconds(self) -> float:
        """Duration of training and evaluation."""
        return self.metrics.seconds + self.eval_seconds

    def _state(self) -> dict[str, Any]:
        return {
            "module": self.module.state_dict(),
            **self.update.state_dict(),
            "best": self.best,
            "classes": self.classes,
            "num_images": self.batches.num_images,
            "run": run_hash(self.config),
            "non_finite": self.non_finite.state_dict(),
            "train_seconds": self.metrics.seconds,
            **{name: getattr(self, name) for name in SAVED},
        }

    def _describe(self) -> str:
        batches, loss, mixed, tokens = (self.totals[name] for name in TOTALS)
        text = f"epoch {self.epoch:>{len(str(self.epochs))}}/{self.epochs}"
        text += f"  loss {loss / max(batches, 1):.3f}"
        if self.module.htm is not None:
            text += f"  mixed {mixed / max(batches, 1):.1f} samples per batch"
            text += f" ({tokens / max(mixed, 1):.1f} tokens each)"
        if self._is_evaluated:
            text += "  top-1" if self.test_loader is None else "  validation top-1"
            text += f" {self._top1[-1]:.2f} %"
        return f"{text}  [{self.seconds:.0f} s]"

    def _accuracies(self) -> dict[str, Any]:
        """Accuracies on the test set; with a validation split those on it, and null for the test's.

        The best and the median over epochs of the test set stay unknown then.
        """
        top1 = self._top1
        if self.test_loader is not None:
            best = top1.index(max(top1))
            return {
                **dict.fromkeys(ACCURACIES),
                "val_top1_last": top1[-1],
                "val_top1_selected": top1[best],
                "selected_epoch": self.history[best]["epoch"],
            }
        top5 = [line["top5"] for line in self.history]
        since = self.epoch - MEDIAN_EPOCHS
        last = [line["top1"] for line in self.history if line["epoch"] > since]
        values = top1[-1], max(top1), median(last), top5[-1], max(top5)
        return dict(zip(ACCURACIES, values, strict=True))

    def _result(self) -> dict[str, Any]:
        return {
            **self._accuracies(),
            "epochs": self.epoch,
            "steps": self.step,
            "images": self.images,
            "broken_images": self.history[-1].get("broken_images", 0),
            "seconds": round(self.seconds, 1),
            "images_per_second": round(self.images / self.metrics.seconds, 1),
            **({"skipped_steps": self.non_finite.skipped} if self.non_finite.counts else {}),
            **self.mixing,
            "log": self.history,
        }
