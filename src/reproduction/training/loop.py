"""The training loop and its step, top to bottom: from a batch of images to new weights.

Elsewhere are signals, disk and memory (operations.py, endings.py), ranks (distributed.py) and what
the epochs' figures become (metrics.py, history.py).

Letters: b batch, c classes, h w image.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_map_only

from reproduction.config import Config
from reproduction.data.build import Loader
from reproduction.data.inputs import TrainingInputs
from reproduction.data.loaders import TrainingBatches
from reproduction.data.seeding import Purpose, seed_device
from reproduction.models.build import compile_module
from reproduction.models.names import State
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import Stopped
from reproduction.system.hardware import give_back_freed_memory
from reproduction.system.progress import Progress
from reproduction.training import evaluate as evaluation
from reproduction.training import history, operations
from reproduction.training.distributed import World, data_parallel
from reproduction.training.endings import Agreement, explaining_memory, explaining_step
from reproduction.training.evaluate import autocast
from reproduction.training.history import History, renamed
from reproduction.training.labels import AttentionLabels
from reproduction.training.loggers import Logs
from reproduction.training.metrics import BatchMetrics, NonFinite
from reproduction.training.mixing import MixedShare
from reproduction.training.optim import build_optimizer, build_schedule
from reproduction.training.saving import Saver
from tokenmixup import Output, TokenMixup, training_loss
from tokenmixup.output import Stat


class MicroBatch(NamedTuple):
    """The mean loss of a micro-batch and the model's output for it."""

    loss: Tensor
    output: Output


def metrics_of(part: MicroBatch, not_finite: Tensor) -> dict[str, Stat]:
    """Names the scalars of the log, on the device; HTM's names are those of `Output.sums`."""
    loss, output = part
    n = len(output.logits)
    metrics = {"loss": Stat(loss * n, n), "skipped": Stat(not_finite, is_max=True)}
    if output.score_loss is not None:
        metrics["score_loss"] = Stat(output.score_loss.detach() * n, n)
    return metrics | output.sums


class Trainer:
    """Trains `module` epoch by epoch, together with all other ranks; every rank has one.

    After a step `not_finite`, on the device, is 1 if a loss or gradient was not finite, else 0.
    float16's scaler skips a step whose gradients overflow, on all ranks.
    """

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
        self.config, self.recipe, self.world, self.folder = config, recipe, world, folder
        self.module, self.classes, self.inputs, self.batches = module, classes, inputs, batches
        self.train_loader, self.eval_loader = train_loader, eval_loader
        if config.compile:
            compile_module(module, cuda_graphs=config.compile == "reduce-overhead")
        self.clones = config.compile == "reduce-overhead"  # outputs: CUDA graphs reuse their memory
        self.parameters = [*module.parameters()]
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, decay=recipe.ema_decay)
        self.attention_labels: AttentionLabels | None = None
        cutmix = config.augmentation.cutmix
        if cutmix is not None and cutmix.labels == "attention":
            self.attention_labels = AttentionLabels(module.model)
        self.mixes = True
        self.parallel = data_parallel(module, world)
        self.optimizer = build_optimizer(module, recipe)
        self.schedule = build_schedule(self.optimizer, recipe, len(batches))
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.uses_scaler)
        self.not_finite = torch.zeros((), device=world.device)

        self.total_steps = recipe.epochs * len(batches)
        if recipe.max_steps is not None:
            self.total_steps = min(self.total_steps, recipe.max_steps)
        self.epochs = math.ceil(self.total_steps / len(batches))
        self.step = self.epoch = self.images = 0  # completed
        self.eval_seconds = 0.0
        self.metrics, self.history = BatchMetrics(world), History()
        self.non_finite = NonFinite(self.uses_scaler)
        self.mixed_share = MixedShare(module.htm, self.epochs)
        self.best: State | None = None  # weights of the best epoch
        self.checkpoint: Path | None = None  # the one resumed from
        self.initial_weights: str | None = None  # what was read from a file
        self.test_loader: Loader | None = None  # if epochs are evaluated on a validation split
        self.metrics_size = 0  # bytes of metrics.jsonl at the last checkpoint
        self.agreement = Agreement(world, config.checkpoint)
        self.logger, self.progress = Logs(), Progress(world.is_main)
        self.saver = Saver(config.checkpoint.every_epochs)
        self.upcoming: Iterator[list[Tensor]] | None = None  # batches that workers load already
        self.has_evaluated = False  # the loader of evaluation has its workers

    def fit(self) -> dict[str, Any]:
        """Trains to the end, within `operations.around`; returns the results for summary.json.

        Raises Stopped after the step in which a signal has come.
        """
        while self.epoch < self.epochs:
            self._begin_epoch()
            for images, classes in self._remaining_batches():
                batch = self.step % len(self.batches)
                size, lr = self.batches.global_size(batch), self.schedule(self.epoch, batch)
                with explaining_step(self.step + 1, self.config):
                    micro_batches = self.train_step(images, classes, size)
                self.step, self.images = self.step + 1, self.images + size
                head = {"step": self.step, "epoch": self.epoch + 1, "lr": lr}
                metrics = [metrics_of(part, self.not_finite) for part in micro_batches]
                self.metrics.add(head, size, metrics)
                self.mixed_share.add(self.epoch + 1, micro_batches)
                self._agree()
                if self.agreement.to_save or self.step % self.recipe.log_every == 0:
                    self._flush()
                if self.agreement.to_save:
                    operations.save(self)
                    self.metrics.restart_clock()
            self._flush()
            self._end_epoch()
            self.progress.line(self.history.describe(self))
            for warning in self.mixed_share.warnings():
                self.progress.line(warning)
            self.history.restart()
            self._agree()
            is_due = self.epoch == self.epochs or self.agreement.to_save
            if is_due or self.world.share(self.saver.is_due(self.epoch)):
                operations.save(self)
        return self.history.result(self, operations.test(self))

    def _begin_epoch(self) -> None:
        """Prepares the model and the loader for the remaining batches of the epoch."""
        off_epoch = self.config.augmentation.off_epoch
        if self.mixes and off_epoch is not None and self.epoch >= off_epoch:
            self.mixes = False
            self.inputs.stop_mixing()
            self.module.stop_mixing()
            # The old wrapper would wait for ScoreNet's gradients.
            self.parallel = data_parallel(self.module, self.world)
        self.module.train()
        if self.upcoming is None:
            self._load(self.epoch, self.step - len(self.batches) * self.epoch)
        self.metrics.restart_clock()

    def _load(self, epoch: int, first: int = 0) -> None:
        """Lets the workers load the batches of an epoch."""
        self.batches.start_at(epoch, first)
        self.upcoming = iter(self.train_loader)

    def _remaining_batches(self) -> Iterator[list[Tensor]]:
        """Returns those of the epoch: images `b 3 h w`, uint8, and classes `b`."""
        assert self.upcoming is not None
        batches, self.upcoming = islice(self.upcoming, self.total_steps - self.step), None
        done = self.step - len(self.batches) * self.epoch
        task = f"epoch {self.epoch + 1}/{self.epochs}"
        total = min(len(self.batches), done + self.total_steps - self.step)
        return self.progress.over(self.agreement.waiting_for(batches), task, total, done)

    def train_step(self, images: Tensor, classes: Tensor, global_size: int) -> list[MicroBatch]:
        """Updates the parameters by the mean loss over a global batch of `global_size` images.

        `images` (`b 3 h w`, uint8) and `classes` (`b`) are this rank's share of it. All random
        draws are a function of seed, step and rank. The share is cut into `grad_accum_steps`
        consecutive micro-batches, whose sizes differ by at most one; HTM matches pairs within each.
        Raises FloatingPointError if a gain is not finite.
        """
        # Data and the mixing of images
        device, key = self.world.device, (self.config.seed, self.step, self.world.rank)
        images, classes = (x.to(device, non_blocking=True) for x in (images, classes))
        mixed = self.inputs(images, classes, *key)
        seed_device(device, Purpose.DROPOUT, *key)

        # A step that the scaler skips also restores the buffers and the averaged weights.
        restorable = self._buffers_and_average() if self.uses_scaler else []
        backup = [value.clone() for value in restorable]

        # Forward, with the mixing of tokens, loss and backward
        micro_batches: list[MicroBatch] = []
        labels = len(self.classes), self.recipe.label_smoothing
        no_sync = getattr(self.parallel, "no_sync", nullcontext)  # DistributedDataParallel has it
        for part in mixed.split(count := self.recipe.grad_accum_steps):
            # Only the last backward pass reduces the gradients over the ranks.
            is_last = len(micro_batches) == count - 1
            with nullcontext() if is_last else no_sync():
                with autocast(device, self.recipe.precision):
                    output: Output = self.parallel(part.images, part.targets(*labels))
                    if self.attention_labels is not None:
                        targets = self.attention_labels(part).targets(*labels)
                        output = output._replace(targets=targets)
                if self.clones:
                    output = tree_map_only(Tensor, Tensor.clone, output)
                loss = training_loss(output)
                # DDP averages over the ranks: the world size turns that mean into a sum.
                weight = len(part.images) * self.world.size / global_size
                self.scaler.scale(loss * weight).backward()
            micro_batches.append(MicroBatch(loss.detach(), output))

        # Clip and update
        norm = self._clip_gradients()
        losses = [micro_batch.loss for micro_batch in micro_batches]
        self.not_finite.copy_((~torch.stack([norm, *losses]).isfinite()).any())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

        # Average
        if self.average is not None:
            self.average.update(self.module.model)
        for value, old in zip(restorable, backup, strict=True):
            value.copy_(torch.where(self.not_finite > 0, old, value))
        return micro_batches

    def _clip_gradients(self) -> Tensor:
        """Clips the gradients and returns their norm before clipping.

        With a scaler this is the norm of the scaled gradients: the scaler skips the step if it
        overflows, and querying the scaler would wait for the device.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm, max_norm = get_total_norm(gradients), self.recipe.clip_grad_norm
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            true_norm = get_total_norm(gradients) if self.uses_scaler else norm
            clip_grads_with_norm_(self.parameters, max_norm, true_norm)
        return norm

    def _buffers_and_average(self) -> list[Tensor]:
        average = {} if self.average is None else self.average.module.state_dict()
        return [*self.module.buffers(), *average.values()]

    def _flush(self) -> None:
        """Fetches and writes the metrics; PlainError if a non-finite update ends the run."""
        lines = self.metrics.fetch()
        if self.world.is_main:
            self._log(self.non_finite.writable(lines))
        self.non_finite.check(lines)
        self.history.add(lines)

    def _log(self, lines: list[dict[str, Any]]) -> None:
        self.folder.append_metrics(lines)
        for line in lines:
            self.logger.log(line)

    def _agree(self) -> None:
        """Decides with all ranks whether to stop or to save; raises Stopped."""
        self.agreement.update()
        if self.agreement.to_stop:
            raise Stopped(self.agreement.to_stop)

    def _end_epoch(self) -> None:
        """Counts the epoch; evaluates every `recipe.evaluate_every` epochs and after the last.

        An epoch whose evaluation is interrupted does not count yet: a resumed run evaluates it.
        """
        epoch = self.epoch + 1
        if epoch < self.epochs and self.has_evaluated:
            self._load(epoch)  # while the epoch is evaluated
        if epoch % self.recipe.evaluate_every == 0 or epoch == self.epochs:
            start = time.perf_counter()
            result = self._evaluate(self.eval_loader)
            line = {"epoch": epoch, **(renamed(result) if self.test_loader else result)}
            self.eval_seconds += time.perf_counter() - start
            self.history.epochs.append(line)
            if self.world.is_main:
                self._log([line])
        self.epoch = epoch
        self.history.end_epoch(self.images / max(self.step, 1))
        if self.world.is_main:
            entries = {"epochs": epoch, **self.history.mixing, "log": [*self.history.epochs]}
            self.folder.write_summary(**entries)
        if not self.history.is_evaluated(epoch):
            return
        if self.world.is_main and history.is_best(self.history.top1):
            state = self.evaluated.state_dict()
            self.best = {name: value.to("cpu", copy=True) for name, value in state.items()}
            operations.save_best(self)

    def _evaluate(self, loader: Loader) -> dict[str, float]:
        self.world.share_buffers(self.evaluated)  # the first rank saves these weights
        give_back_freed_memory()  # before the loader forks its workers
        with explaining_memory(f"evaluation after step {self.step}", self.recipe):
            batches = self.agreement.waiting_for(loader)
            self.has_evaluated = True
            return evaluation.evaluate(
                self.evaluated,
                self.inputs.normalize,
                self.progress.over(batches, "evaluation", length_hint(loader)),
                self.world,
                self.recipe.precision,
            )

    @property
    def evaluated(self) -> nn.Module:
        """The plain model to evaluate and save: the averaged one, if weights are averaged."""
        return self.module.model if self.average is None else self.average.module

    @property
    def seconds(self) -> float:
        """Duration of training and evaluation."""
        return self.metrics.seconds + self.eval_seconds
