"""The epochs of a run, on one rank: `fit` trains, evaluates and saves to the end.

The step is in step.py, what ends a run in stop.py.
"""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from reproduction.data import loaders
from reproduction.data.workers import Batch
from reproduction.errors import PlainError, progress, say
from reproduction.folder import RunFolder
from reproduction.models.names import State
from reproduction.training import metrics
from reproduction.training.checkpoint import Clock, check_classes, save_plain, weights_digest
from reproduction.training.evaluate import Metric, Scorer, Scores, predict
from reproduction.training.loggers import Loggers
from reproduction.training.step import Stats, Trainer
from reproduction.training.stop import Stop
from tokenmixup.assignment import Diverged

ADVICE = "a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"


@dataclass
class RunState:
    """What a run has reached beside its trainer; its checkpoints hold each of these."""

    epoch: int = 0  # completed
    sums: list[metrics.Sums] = field(default_factory=list)  # by epoch, with the one in progress
    log: list[metrics.Line] = field(default_factory=list)  # results of evaluated epochs
    best: State | None = None  # weights of the best epoch, on the first rank
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    skipped: int = 0  # updates, by float16's scaler
    metrics_size: int = 0  # bytes of metrics.jsonl


@dataclass
class TrainingRun:
    """The parts of a run on this rank."""

    trainer: Trainer
    folder: RunFolder
    batches: loaders.TrainingBatches
    train_loader: loaders.Loader
    epoch_loader: loaders.Loader  # the images to evaluate on after an epoch
    test_loader: loaders.Loader | None  # if those are a validation split
    loggers: Loggers
    stop: Stop
    clock: Clock
    batch_metrics: metrics.BatchMetrics
    own_metrics: dict[str, Metric]
    upcoming: Iterator[Batch] | None = None  # the next epoch, which workers load already
    has_evaluated: bool = False

    @property
    def is_main(self) -> bool:
        return self.trainer.world.is_main

    @property
    def total_steps(self) -> int:
        recipe = self.trainer.recipe
        steps = recipe.epochs * len(self.batches)
        return min(steps, recipe.max_steps or steps)

    @property
    def total_epochs(self) -> int:
        return math.ceil(self.total_steps / len(self.batches))


def fit(run: TrainingRun, state: RunState) -> dict[str, Any]:
    """Trains to the end and returns the results for summary.json.

    Raises Stopped after the step in which a signal has come to any rank.
    """
    while state.epoch < run.total_epochs:
        pace = metrics.Pace(run.trainer.step, run.total_steps)
        train_epoch(run, state)
        load_ahead(run, state)
        evaluate_epoch(run, state)
        end_epoch(run, state, pace)
    reason = metrics.unmixed_reason(state.sums)
    if reason and run.trainer.module.htm is not None and run.is_main:
        say(f"htm: no token was replaced in this run: {reason}")
    return _results(run, state)


def train_epoch(run: TrainingRun, state: RunState) -> None:
    """Trains the steps of an epoch that are left: a resumed run may begin within it."""
    trainer, batches = run.trainer, run.batches
    number = state.epoch + 1  # of this epoch, from 1
    done = trainer.step - len(batches) * state.epoch  # batches of this epoch
    left = run.total_steps - trainer.step  # maybe fewer than the epoch has
    total = min(len(batches), done + left)
    trainer.begin_epoch(state.epoch)
    if len(state.sums) == state.epoch:  # else resumed within the epoch
        state.sums.append(metrics.Sums())
    loading, run.upcoming = run.upcoming, None
    if loading is None:
        loading = load(run, state.epoch, done)
    loaded = islice(loading, left)
    run.batch_metrics.restart_clock()
    task = f"epoch {number}/{run.total_epochs}"
    for batch in progress(run.stop.while_waiting(loaded), task, total, done):
        size = batches.global_size(trainer.step)  # `step` is still this batch's
        micro_batches = train_batch(run, state, batch, size)
        head = {"step": trainer.step, "epoch": number, "lr": trainer.lr}
        run.batch_metrics.add(head, size, micro_batches)

        # Raises Stopped on all ranks if a signal has come to any; else all get the same answers.
        saves = run.stop.any_rank(run.is_main and run.clock.is_late())
        if saves or trainer.step % trainer.recipe.log_every == 0:
            write_metrics(run, state)
        if saves:
            save_checkpoint(run, state)
    write_metrics(run, state)


def train_batch(run: TrainingRun, state: RunState, batch: Batch, size: int) -> list[Stats]:
    """Trains a step of `size` images; ends the run if the host meets saliency that is not finite.

    Other ranks wait for the gradients of one that has none, and end with it.
    """
    trainer = run.trainer
    try:
        return trainer.train_step(batch.images, batch.classes, size)
    except Diverged as error:
        if trainer.world.size == 1:
            write_metrics(run, state)  # another step may have been the first
        end_diverged(run, trainer.step + 1, str(error))


def load(run: TrainingRun, epoch: int, first: int = 0) -> Iterator[Batch]:
    """Lets the workers load the batches of an epoch."""
    run.batches.start_at(epoch, first)
    return iter(run.train_loader)


def load_ahead(run: TrainingRun, state: RunState) -> None:
    """Lets training's workers load the next epoch while this one is evaluated.

    But not during the first evaluation, which starts workers of its own.
    """
    next_epoch = state.epoch + 1  # from 0
    if run.has_evaluated and next_epoch < run.total_epochs:
        run.upcoming = load(run, next_epoch)


def evaluate_epoch(run: TrainingRun, state: RunState) -> None:
    """Evaluates the epoch that was trained, if it is one to evaluate."""
    number = state.epoch + 1
    is_last = number == run.total_epochs
    if not is_last and number % run.trainer.recipe.evaluate_every != 0:
        return
    check_finite(run)
    scores = evaluate_on(run, state, run.epoch_loader, run.trainer.evaluated)
    results = scores.held_out if run.test_loader is None else scores.validation
    state.log.append({"epoch": number, **results})
    run.has_evaluated = True


def end_epoch(run: TrainingRun, state: RunState, pace: metrics.Pace) -> None:
    """Counts the epoch, and records it: results, best weights, summary, and perhaps a checkpoint.

    Only now is it completed: an evaluation that is interrupted is repeated.
    """
    state.epoch += 1
    if run.is_main:
        _record_epoch(run, state, pace)
    is_last = state.epoch == run.total_epochs
    is_due = is_last or run.clock.is_late() or run.clock.is_due(state.epoch)
    if run.stop.any_rank(run.is_main and is_due):  # ranks save together
        save_checkpoint(run, state)


def _record_epoch(run: TrainingRun, state: RunState, pace: metrics.Pace) -> None:
    """Writes and says what the completed epoch has reached."""
    number = state.epoch
    if state.log and state.log[-1]["epoch"] == number:
        _write_line(run, state.log[-1])
        if metrics.best(state.log)["epoch"] == number:
            _keep_best(run, state)
    run.folder.write_summary(**progress_entries(run, state))
    before = (number - 1) * len(run.batches)
    images = run.batches.count_images(run.trainer.step) - run.batches.count_images(before)
    line = metrics.describe(
        state.sums[-1],
        state.log,
        images=images,
        number=number,
        total=run.total_epochs,
        has_htm=run.trainer.module.htm is not None,
        seconds_left=pace.left(run.trainer.step),
    )
    say(line)


def _keep_best(run: TrainingRun, state: RunState) -> None:
    weights = run.trainer.evaluated.state_dict()
    state.best = {name: x.to("cpu", copy=True) for name, x in weights.items()}
    save_plain(run.folder.best_path, state.best, run.trainer.classes)


def write_metrics(run: TrainingRun, state: RunState) -> None:
    """Writes the lines of the batches since the last call; one that is not finite ends the run."""
    lines, seconds = run.batch_metrics.fetch()
    state.train_seconds += seconds
    for line in lines:
        reason = metrics.not_finite(line, run.trainer.uses_scaler)
        if reason:
            end_diverged(run, line["step"], reason)
        if not math.isfinite(line["gradient_norm"]):  # float16's scaler has skipped the update
            line["gradient_norm"] = None
            state.skipped += 1
        state.sums[-1] = state.sums[-1].plus(line)
        _write_line(run, line)


def check_finite(run: TrainingRun) -> None:
    """Ends the run if weights, buffers, averages or the optimiser's state are not finite."""
    trainer = run.trainer
    device = trainer.world.device
    tensors = [x for x in tree_leaves(trainer.state()) if isinstance(x, Tensor)]
    floats = [x for x in tensors if x.is_floating_point()]
    # A sum in float64 is finite if all of its terms are, and faster than isfinite() of each.
    sums = [x.sum(dtype=torch.float64).to(device) for x in floats]
    has_diverged = torch.stack(sums).isfinite().all().logical_not().float()
    if trainer.world.sum(has_diverged) > 0:  # buffers are those of a rank
        end_diverged(run, trainer.step, "weights or the state of the optimiser are not finite")


def end_diverged(run: TrainingRun, step: int, reason: str) -> NoReturn:
    """Ends a run that is not finite since a step, by PlainError; its last checkpoint is older."""
    path = run.folder.last_path
    if path.exists():
        advice = f"resuming repeats it; model.weights={path} with {ADVICE} begins a new run there"
    else:
        advice = f"there is no checkpoint; try {ADVICE}"
    raise PlainError(f"step {step}: {reason}; {advice}")


def _write_line(run: TrainingRun, line: metrics.Line) -> None:
    if run.is_main:
        run.folder.append_metrics(line)
        run.loggers.log(line)


def save_checkpoint(run: TrainingRun, state: RunState) -> None:
    """Writes a checkpoint with all that a resumed run needs, or must have in common with this.

    Ends the run instead if that is not finite, so that the last checkpoint is a good one.
    """
    trainer, folder = run.trainer, run.folder
    check_finite(run)
    if trainer.world.is_main:
        state.metrics_size = folder.flush_metrics()  # on the disk before what counts it
        content = {
            **trainer.state(),
            **vars(state),
            "sums": [sums._asdict() for sums in state.sums],
            "classes": trainer.classes,
        }
        on_host = tree_map_only(Tensor, lambda x: x.detach().to("cpu"), content)
        run.clock.save(folder, on_host)
    trainer.world.barrier()
    run.batch_metrics.restart_clock()


def restore(trainer: Trainer, path: Path, content: dict[str, Any]) -> RunState:
    """Resumes from the content of a checkpoint; UserError if it does not fit the run."""
    origin = f"checkpoint={path}"
    check_classes(origin, content["classes"], trainer.classes)
    trainer.restore(origin, content)
    state = RunState(**{x.name: content[x.name] for x in fields(RunState)})
    state.sums = [metrics.Sums(**sums) for sums in content["sums"]]
    return state


def evaluate_on(
    run: TrainingRun, state: RunState, loader: loaders.Loader, model: nn.Module
) -> Scores:
    """Evaluates a plain model on the images of a loader."""
    trainer, world = run.trainer, run.trainer.world
    began = time.perf_counter()
    world.broadcast_buffers(model)  # the first rank saves these weights
    batches = progress(run.stop.while_waiting(loader), "evaluation", len(loader))
    scorer = Scorer(run.own_metrics, world)
    predict(model, trainer.inputs.normalize, batches, world, trainer.recipe.precision, scorer)
    scores = scorer.scores()
    state.eval_seconds += time.perf_counter() - began
    return scores


def _results(run: TrainingRun, state: RunState) -> dict[str, Any]:
    """The entries of summary.json about the whole run, and its results on the test set."""
    trainer = run.trainer
    if run.test_loader is None:
        accuracies = metrics.accuracies(state.log)
        own = {name: state.log[-1][name] for name in run.own_metrics}
    else:
        last, selected = _test(run, state, run.test_loader)
        accuracies = metrics.tested_accuracies(state.log, last, selected)
        own = last.own
    images = run.batches.count_images(trainer.step)
    results = {
        **accuracies,
        **{f"{name}_last": value for name, value in own.items()},
        "steps": trainer.step,
        "images": images,
        "seconds": round(state.train_seconds + state.eval_seconds, 3),
        "images_per_second": round(images / state.train_seconds, 1),
        "weights_sha256": weights_digest(trainer.evaluated.state_dict()),
        **progress_entries(run, state),
    }
    if trainer.uses_scaler:
        results["skipped_steps"] = state.skipped
    return results


def _test(run: TrainingRun, state: RunState, loader: loaders.Loader) -> tuple[Scores, Scores]:
    """Tests the weights of the last epoch and of the best by validation, on images not yet seen."""
    model = run.trainer.evaluated
    last = evaluate_on(run, state, loader, model)
    selected = last
    if metrics.best(state.log)["epoch"] != state.epoch:
        model = copy.deepcopy(model)
        # of the first rank; the others have none, or those of a checkpoint
        model.load_state_dict(cast(State, run.trainer.world.broadcast(state.best)))
        selected = evaluate_on(run, state, loader, model)
    return last, selected


def progress_entries(run: TrainingRun, state: RunState) -> dict[str, Any]:
    """The entries of summary.json about the completed epochs."""
    # `max_steps` may cut the last epoch short
    steps = min(state.epoch * len(run.batches), run.trainer.step)
    mixing = metrics.mixing(state.sums[: state.epoch], run.batches.count_images(steps))
    return {"epochs": state.epoch, **mixing, "log": state.log}
