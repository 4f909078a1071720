"""The epochs of a run, on one rank: `fit` trains, evaluates and saves to the end.

The step is in step.py, what ends a run in stop.py.
"""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from reproduction.data import loaders
from reproduction.data.halves import check_share
from reproduction.folder import RunFolder
from reproduction.models.names import State
from reproduction.system import Pulse, UserError, first_line, progress, say, warn
from reproduction.training import metrics
from reproduction.training.checkpoint import Clock, check_classes, digest, save_plain
from reproduction.training.evaluate import evaluate
from reproduction.training.loggers import Logs
from reproduction.training.step import Trainer
from reproduction.training.stop import Stop


@dataclass
class RunState:
    """What a run has reached beside its trainer; its checkpoints hold each of these."""

    epoch: int = 0  # completed
    sums: list[metrics.Sums] = field(default_factory=list)  # the last epoch may have begun only
    log: list[metrics.Line] = field(default_factory=list)  # results of evaluated epochs
    best: State | None = None  # weights of the best epoch, on the first rank
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    skipped: int = 0  # updates, by float16's scaler
    unreadable: dict[int, str] = field(default_factory=dict)  # training images: index and reason
    metrics_size: int = 0  # bytes of metrics.jsonl


@dataclass
class Run:
    """The parts of a run on this rank."""

    trainer: Trainer
    folder: RunFolder
    batches: loaders.TrainingBatches
    train_loader: loaders.Loader
    eval_loader: loaders.Loader
    test_loader: loaders.Loader | None  # if epochs are evaluated on a validation split
    logs: Logs
    stop: Stop
    clock: Clock
    collected: metrics.BatchMetrics
    pulse: Pulse
    upcoming: Iterator[list[Tensor]] | None = None  # batches that workers load already
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


def fit(run: Run, state: RunState) -> dict[str, Any]:
    """Trains to the end and returns the results for summary.json.

    Raises Stopped after the step in which a signal has come to any rank.
    """
    while state.epoch < run.total_epochs:
        pace = metrics.Pace(run.trainer.step, run.total_steps)
        train_epoch(run, state, pace)
        evaluate_epoch(run, state)
        end_epoch(run, state, pace)
    return _results(run, state)


def train_epoch(run: Run, state: RunState, pace: metrics.Pace) -> None:
    """Trains the steps of an epoch that are left: a resumed run may begin within it."""
    trainer, batches = run.trainer, run.batches
    number = state.epoch + 1
    done = trainer.step - len(batches) * state.epoch
    left = run.total_steps - trainer.step
    trainer.begin_epoch(state.epoch)
    if len(state.sums) == state.epoch:  # else resumed within the epoch
        state.sums.append([0.0] * 4)
    loaded = islice(run.upcoming or load(run, state.epoch, done), left)
    run.collected.restart_clock()
    task, total = f"epoch {number}/{run.total_epochs}", min(len(batches), done + left)
    for images, classes in progress(run.stop.while_waiting(loaded), task, total, done):
        size = batches.global_size(trainer.step % len(batches))
        micro_batches = trainer.train_step(images, classes, size)
        head = {"step": trainer.step, "epoch": number, "lr": trainer.lr}
        run.collected.add(head, size, [part.metrics for part in micro_batches])

        # All ranks do the same: a signal to one of them ends all, by Stopped.
        is_late, is_silent = run.stop.agreed(
            run.is_main and run.clock.is_late(), run.is_main and run.pulse.is_due()
        )
        if is_late or is_silent or trainer.step % trainer.recipe.log_every == 0:
            line = write(run, state)
            if is_silent and run.is_main:
                run.pulse.tell(f"{task}  {metrics.describe_step(line, pace)}")
        if is_late:
            save(run, state)
    write(run, state)


def load(run: Run, epoch: int, first: int = 0) -> Iterator[list[Tensor]]:
    """Lets the workers load the batches of an epoch: images `b 3 h w`, uint8, and classes `b`."""
    run.batches.start_at(epoch, first)
    return iter(run.train_loader)


def evaluate_epoch(run: Run, state: RunState) -> None:
    """Evaluates the epoch that was trained, if it is one to evaluate."""
    recipe, number = run.trainer.recipe, state.epoch + 1
    is_last = number == run.total_epochs
    # Training's workers load on meanwhile, but not while the first evaluation starts its own.
    run.upcoming = load(run, number) if run.has_evaluated and not is_last else None
    if not (is_last or number % recipe.evaluate_every == 0):
        return
    result = evaluate_on(run, state, run.eval_loader, run.trainer.evaluated)
    if run.test_loader is not None:  # of a validation split: val_top1, val_top5, val_loss
        result = {f"val_{key.removeprefix('eval_')}": x for key, x in result.items()}
    state.log.append({"epoch": number, **result})
    run.has_evaluated = True


def end_epoch(run: Run, state: RunState, pace: metrics.Pace) -> None:
    """Counts the epoch, and records it: results, best weights, summary, and perhaps a checkpoint.

    Only now is it completed: an evaluation that is interrupted is repeated.
    """
    trainer, stop, clock = run.trainer, run.stop, run.clock
    state.epoch += 1
    number, total = state.epoch, run.total_epochs
    if run.is_main:
        if state.log and state.log[-1]["epoch"] == number:
            _log(run, state.log[-1])
            if metrics.best(state.log)["epoch"] == number:
                _keep_best(run, state)
        run.folder.write_summary(**progress_entries(run, state))
        left, mixes = pace.left(trainer.step), trainer.module.htm is not None
        say(metrics.describe(state.sums[-1], number, total, mixes, state.log, left))
    is_due = clock.is_late() or clock.is_due(number) or number == total
    (is_due_anywhere,) = stop.agreed(run.is_main and is_due)
    if is_due_anywhere:
        save(run, state)


def _keep_best(run: Run, state: RunState) -> None:
    weights = run.trainer.evaluated.state_dict()
    state.best = {name: x.to("cpu", copy=True) for name, x in weights.items()}
    save_plain(run.folder.best_path, state.best, run.trainer.classes)


def write(run: Run, state: RunState) -> metrics.Line:
    """Fetches and writes the metrics of batches; PlainError if one of them ends the run.

    Returns the last line, if there are batches.
    """
    lines, seconds = run.collected.fetch()
    state.train_seconds += seconds
    line: metrics.Line = {}
    for line in metrics.checked(lines, run.trainer.uses_scaler):
        if line["skipped"]:
            state.skipped += 1
        else:
            state.sums[-1] = metrics.added(state.sums[-1], line)
        if not run.trainer.uses_scaler:
            del line["skipped"]
        _log(run, line)
    _note_unreadable(run, state)
    return line


def _note_unreadable(run: Run, state: RunState) -> None:
    """Warns once of each image in whose place all ranks have trained on another."""
    for of_rank in run.trainer.world.gather(run.train_loader.unreadable):
        for index in sorted(of_rank.keys() - state.unreadable.keys()):
            state.unreadable[index] = of_rank[index]
            if run.is_main:
                warn(f"warning: {of_rank[index]}; the next image takes its place")
    check_share(state.unreadable, run.train_loader.half)


def _log(run: Run, line: metrics.Line) -> None:
    if run.is_main:
        run.folder.append_metrics(line)
        run.logs.log(line)


def save(run: Run, state: RunState) -> None:
    """Writes a checkpoint with all that a resumed run needs, or must have in common with this."""
    trainer, folder = run.trainer, run.folder
    if trainer.world.is_main:
        state.metrics_size = folder.flush_metrics()  # which is on the disk before the state is
        content = {
            **trainer.state(),
            **vars(state),
            "classes": trainer.classes,
            "config": asdict(trainer.config),
            "summary": folder.read_summary(),
        }
        on_host = tree_map_only(Tensor, lambda x: x.detach().to("cpu"), content)
        run.clock.save(folder, on_host)
    trainer.world.barrier()
    run.collected.restart_clock()


def restore(trainer: Trainer, path: Path, content: dict[str, Any]) -> RunState:
    """Resumes from the content of a checkpoint; UserError if it does not fit the run."""
    place = f"checkpoint={path}"
    try:
        check_classes(place, content["classes"], trainer.classes)
        trainer.restore(place, content)
        content = {"unreadable": {}, **content}  # earlier revisions had none
        return RunState(**{x.name: content[x.name] for x in fields(RunState)})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{place}: does not fit the run: {first_line(error)}") from error


def evaluate_on(
    run: Run, state: RunState, loader: loaders.Loader, model: nn.Module
) -> dict[str, float]:
    """Evaluates a plain model on the images of a loader."""
    began, inputs, world = time.perf_counter(), run.trainer.inputs, run.trainer.world
    world.share_buffers(model)  # the first rank saves these weights
    waited = run.stop.while_waiting(loader)
    batches = progress(waited, "evaluation", length_hint(loader))
    result, _ = evaluate(model, inputs.normalize, batches, world, run.trainer.recipe.precision)
    state.eval_seconds += time.perf_counter() - began
    return result


def _results(run: Run, state: RunState) -> dict[str, Any]:
    """The entries of summary.json about the whole run, and its results on the test set."""
    trainer, tests = run.trainer, list[metrics.Line]()
    if run.test_loader is not None:  # not seen yet: for the last epoch and the best
        model = trainer.evaluated
        tests = [evaluate_on(run, state, run.test_loader, model)] * 2
        if metrics.best(state.log)["epoch"] != state.epoch:
            model = copy.deepcopy(model)
            model.load_state_dict(trainer.world.share(cast(State, state.best)))
            tests[1] = evaluate_on(run, state, run.test_loader, model)
    images = run.batches.images(trainer.step)
    return {
        **metrics.accuracies(state.log, tests),
        "steps": trainer.step,
        "images": images,
        "seconds": round(state.train_seconds + state.eval_seconds, 1),
        "images_per_second": round(images / state.train_seconds, 1),
        **({"skipped_steps": state.skipped} if trainer.uses_scaler else {}),
        **({"unreadable_images": len(state.unreadable)} if state.unreadable else {}),
        "weights_sha256": digest(trainer.evaluated.state_dict()),
        **progress_entries(run, state),
    }


def progress_entries(run: Run, state: RunState) -> dict[str, Any]:
    """The entries of summary.json about the completed epochs."""
    steps = min(state.epoch * len(run.batches), run.trainer.step)
    mixing = metrics.mixing(state.sums[: state.epoch], run.batches.images(steps))
    return {"epochs": state.epoch, **mixing, "log": state.log}
