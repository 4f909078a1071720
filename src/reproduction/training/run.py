"""One run, from its configuration to its summary: build, `fit`, evaluate, save.

The step is in step.py, what ends a run in stop.py, its processes in ranks.py.
"""

import copy
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from reproduction.config import Augmentation, Config
from reproduction.data import loaders
from reproduction.data.images import NO_IMAGE
from reproduction.data.seeding import preserved_generators
from reproduction.data.sources import Data, opened, record
from reproduction.models import build as models
from reproduction.models.names import State
from reproduction.runs import RunFolder, hold
from reproduction.system import (
    PlainError,
    RankFailed,
    Stopped,
    UserError,
    first_line,
    hardware_name,
    is_first_rank,
    progress,
    say,
    warn,
)
from reproduction.training import figures
from reproduction.training.checkpoint import Clock, check_classes, digest, load_last, save_plain
from reproduction.training.evaluate import evaluate
from reproduction.training.labels import AttentionLabels
from reproduction.training.loggers import Logs
from reproduction.training.ranks import World, join_world, on_ranks, resolve_device
from reproduction.training.step import Trainer
from reproduction.training.stop import Stop, handling
from tokenmixup import TokenMixup

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "hydra-core")


def run_training(config: Config) -> dict[str, Any]:
    """Trains one run, unless it is finished, and returns its summary.

    Raises UserError before the run begins, and PlainError or KeyboardInterrupt after the status is
    recorded in the folder.
    """
    folder = RunFolder.of(config)
    try:
        with hold(folder):
            if folder.config_path.exists():
                folder.check(config)  # another process may have just created it
            if folder.is_finished():
                return folder.read_summary()
            try:
                return on_ranks(train, config)  # stop.ending makes a PlainError of any error
            except KeyboardInterrupt as error:
                line = _kept(folder, config, "interrupted", "interrupted")
                raise KeyboardInterrupt(line) from error
            except PlainError as error:
                if not (is_first_rank() or isinstance(error, RankFailed)):
                    warn(f"rank {os.environ['RANK']}: {error}")  # the first rank does not know it
                raise PlainError(_kept(folder, config, "failed", str(error))) from error
    except OSError as error:  # of the lock and the folder, before the run
        raise UserError(f"{error.filename or folder.path}: {error.strerror}") from error


def _kept(folder: RunFolder, config: Config, status: str, reason: str) -> str:
    """Records the status of a run that has begun and returns the line to print; never raises."""
    if not folder.config_path.exists():
        return reason
    try:
        if is_first_rank():
            folder.write_summary(status=status, error=reason)
    except (OSError, UserError):  # such as a full disk; reports recognise the run by its lock
        status = "it is"
    how = "" if config.resume == "auto" else " with resume=auto"
    return f"{reason}; {folder.path} is kept as {status}, repeat the command{how} to continue"


def build(
    config: Config, world: World, is_new: bool = True
) -> tuple[Data, loaders.TrainingBatches, TokenMixup, str | None]:
    """Opens the images and builds the model; UserError if they do not fit the configuration.

    Also returns what was read from `model.weights`, from which a new run starts, as from timm's
    weights. On the meta device, for a check, the file is read, but the model takes no memory.
    """
    data, size = opened(config.dataset), config.recipe.batch_size
    batches = loaders.TrainingBatches(len(data.train), size, config.seed, world.rank, world.size)
    is_meta = world.device.type == "meta"
    model = config.model if is_new else models.without_weights(config.model)
    torch.manual_seed(config.seed)
    with torch.device("meta" if is_meta else "cpu"):
        module = models.build_module(model, config.augmentation, len(data.classes))
    return data, batches, module, models.load_initial_weights(model, module.model)


def check(config: Config) -> None:
    """Raises UserError if the run cannot start here; writes nothing but downloaded data."""
    data, batches, module, _ = build(config, World(0, config.devices, torch.device("meta")))
    check_model(config, module)
    try:
        loaders.build_training_images(config, data.train)[(0, 0)]
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error) if NO_IMAGE in str(error) else first_line(error)
        raise UserError(f"the first training image: {reason}") from error
    count = config.recipe.grad_accum_steps
    fewest = batches.global_size(len(batches) - 1) // config.devices
    if fewest < count:
        reason = f"some batches leave {fewest} images to a rank, allowed is 1..{fewest}"
        raise UserError(f"recipe.grad_accum_steps={count}: {reason}")


def check_model(config: Config, module: TokenMixup) -> None:
    """Raises UserError for what a pass of the model on the meta device refuses."""
    models.tokens_of(config.model, module)
    cutmix = config.augmentation.cutmix
    if cutmix is not None and cutmix.labels == "attention":
        AttentionLabels(module.model)


@dataclass
class RunState:
    """What a run has reached beside its trainer; its checkpoints hold each of these."""

    epoch: int = 0  # completed
    sums: list[figures.Sums] = field(default_factory=list)  # the last epoch may have begun only
    log: list[figures.Line] = field(default_factory=list)  # results of evaluated epochs
    best: State | None = None  # weights of the best epoch, on the first rank
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    skipped: int = 0  # updates, by float16's scaler
    metrics_size: int = 0  # bytes of metrics.jsonl


class Run(NamedTuple):
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
    collected: figures.BatchFigures


def train(config: Config) -> dict[str, Any]:
    """Trains on this rank; the first rank writes the run folder. Returns the summary."""
    device = resolve_device(config.device, config.devices, config.recipe.precision)
    if config.compile:
        torch.compiler.reset()  # its limits count over all runs of a process
    with join_world(device) as world:
        run, state = start(config, world)
        status = "failed"
        with handling(run.stop.request):
            try:
                results = fit(run, state)
                status = "finished"
            except Stopped:  # on all ranks after the same step
                if world.is_main:
                    say(f"stopping after step {run.trainer.step} (a second Ctrl-C: at once)")
                write(run, state)
                save(run, state)
                raise
            except Exception as error:
                error.add_note(f"after step {run.trainer.step}")
                raise
            finally:
                run.logs.close(status)
        world.barrier()
        return run.folder.write_summary(**results, status=status) if world.is_main else results


def start(config: Config, world: World) -> tuple[Run, RunState]:
    """Builds a run on its device, or resumes it, and prepares its folder."""
    folder = RunFolder.of(config)
    newest = load_last(folder)
    data, batches, module, initial_weights = build(config, world, is_new=newest is None)
    trainer = Trainer(config, world, module, data.classes, len(batches))
    state = RunState() if newest is None else restore(trainer, *newest)
    if world.share(trainer.step) != trainer.step:
        raise PlainError("the ranks have read different checkpoints")
    if world.is_main:
        facts = _facts(trainer, data, initial_weights)
        _say_start(trainer, data, facts)
    build_loader, pin = loaders.build_evaluation_loader, world.device.type == "cuda"
    loader_of = partial(build_loader, config, rank=world.rank, ranks=world.size, pin=pin)
    run = Run(
        trainer,
        folder,
        batches,
        train_loader=loaders.build_training_loader(config, data.train, batches, pin),
        eval_loader=loader_of(data.per_epoch),
        test_loader=None if data.validation is None else loader_of(data.held_out),
        logs=Logs(config.logger if world.is_main else {}, config, folder, trainer.step),
        stop=Stop(world.size),
        clock=Clock(config.checkpoint),
        collected=figures.BatchFigures(world),
    )
    if world.is_main:
        folder.begin(config, None if newest is None else newest[0], state.metrics_size)
        if state.best is not None:
            save_plain(folder.best_path, state.best, trainer.classes)
        else:
            folder.best_path.unlink(missing_ok=True)
        folder.write_summary(**facts, **_progress(run, state), status="running", error=None)
    return run, state


def fit(run: Run, state: RunState) -> dict[str, Any]:
    """Trains to the end and returns the results for summary.json.

    Raises Stopped after the step in which a signal has come to any rank.
    """
    trainer, batches, recipe = run.trainer, run.batches, run.trainer.recipe
    is_main, stop, clock = trainer.world.is_main, run.stop, run.clock
    total_steps = recipe.epochs * len(batches)
    total_steps = min(total_steps, recipe.max_steps or total_steps)
    total_epochs = math.ceil(total_steps / len(batches))
    upcoming: Iterator[list[Tensor]] | None = None  # batches that workers load already
    has_evaluated = False
    while state.epoch < total_epochs:
        began, first, number = time.monotonic(), trainer.step, state.epoch + 1
        trainer.begin_epoch(state.epoch)
        if len(state.sums) == state.epoch:  # else resumed within the epoch
            state.sums.append([0.0] * 4)
        done = first - len(batches) * state.epoch
        loaded = islice(upcoming or _load(run, state.epoch, done), total_steps - first)
        run.collected.restart_clock()
        total = min(len(batches), done + total_steps - first)
        task = f"epoch {number}/{total_epochs}"
        for images, classes in progress(stop.while_waiting(loaded), task, total, done):
            size = batches.global_size(trainer.step % len(batches))
            micro_batches = trainer.train_step(images, classes, size)
            head = {"step": trainer.step, "epoch": number, "lr": trainer.lr}
            run.collected.add(head, size, [part.metrics for part in micro_batches])
            is_late = stop.agreed(is_main and clock.is_late())  # or Stopped, by a signal
            if is_late or trainer.step % recipe.log_every == 0:
                write(run, state)
            if is_late:
                save(run, state)
        write(run, state)

        # Training's workers load on meanwhile, but not while the first evaluation starts its own.
        upcoming = _load(run, number) if has_evaluated and number < total_epochs else None
        if is_evaluated := number % recipe.evaluate_every == 0 or number == total_epochs:
            result = evaluate_on(run, state, run.eval_loader, trainer.evaluated)
            if run.test_loader is not None:  # of a validation split: val_top1, val_top5, val_loss
                result = {f"val_{key.removeprefix('eval_')}": x for key, x in result.items()}
            state.log.append({"epoch": number, **result})
            has_evaluated = True
        state.epoch = number  # an evaluation that is interrupted is repeated
        if is_main and is_evaluated:
            _log(run, state.log[-1])
            if figures.best(state.log)["epoch"] == number:
                weights = trainer.evaluated.state_dict()
                state.best = {name: x.to("cpu", copy=True) for name, x in weights.items()}
                save_plain(run.folder.best_path, state.best, trainer.classes)
        if is_main:
            run.folder.write_summary(**_progress(run, state))
            pace = (time.monotonic() - began) / max(trainer.step - first, 1)  # seconds a step
            left, mixes = pace * (total_steps - trainer.step), trainer.module.htm is not None
            say(figures.describe(state.sums[-1], number, total_epochs, mixes, state.log, left))
        is_due = clock.is_late() or clock.is_due(number) or number == total_epochs
        if stop.agreed(is_main and is_due):
            save(run, state)
    return _results(run, state)


def _load(run: Run, epoch: int, first: int = 0) -> Iterator[list[Tensor]]:
    """Lets the workers load the batches of an epoch: images `b 3 h w`, uint8, and classes `b`."""
    run.batches.start_at(epoch, first)
    return iter(run.train_loader)


def write(run: Run, state: RunState) -> None:
    """Fetches and writes the figures of batches; PlainError if one of them ends the run."""
    lines, seconds = run.collected.fetch()
    state.train_seconds += seconds
    for line in figures.checked(lines, run.trainer.uses_scaler):
        if line["skipped"]:
            state.skipped += 1
        else:
            state.sums[-1] = figures.added(state.sums[-1], line)
        if not run.trainer.uses_scaler:
            del line["skipped"]
        _log(run, line)


def _log(run: Run, line: figures.Line) -> None:
    if run.trainer.world.is_main:
        run.folder.append_metrics(line)
        run.logs.log(line)


def save(run: Run, state: RunState) -> None:
    """Writes a checkpoint with all that a resumed run needs, or must have in common with this."""
    trainer, folder = run.trainer, run.folder
    if trainer.world.is_main:
        state.metrics_size = folder.metrics_size()
        content = {**trainer.state(), **vars(state), "classes": trainer.classes}
        on_host = tree_map_only(Tensor, lambda x: x.detach().to("cpu"), content)
        run.clock.save(folder, on_host)
    trainer.world.barrier()
    run.collected.restart_clock()


def restore(trainer: Trainer, path: Path, content: dict[str, Any]) -> RunState:
    """Resumes from the content of a checkpoint; UserError if it does not fit the run."""
    place = f"checkpoint={path}"
    check_classes(place, content["classes"], trainer.classes)
    try:
        trainer.restore(place, content)
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
    trainer, tests = run.trainer, list[figures.Line]()
    if run.test_loader is not None:  # not seen yet: for the last epoch and the best
        model = trainer.evaluated
        tests = [evaluate_on(run, state, run.test_loader, model)] * 2
        if figures.best(state.log)["epoch"] != state.epoch:
            model = copy.deepcopy(model)
            model.load_state_dict(trainer.world.share(cast(State, state.best)))
            tests[1] = evaluate_on(run, state, run.test_loader, model)
    images = run.batches.images(trainer.step)
    return {
        **figures.accuracies(state.log, tests),
        "steps": trainer.step,
        "images": images,
        "seconds": round(state.train_seconds + state.eval_seconds, 1),
        "images_per_second": round(images / state.train_seconds, 1),
        **({"skipped_steps": state.skipped} if trainer.uses_scaler else {}),
        "weights_sha256": digest(trainer.evaluated.state_dict()),
        **_progress(run, state),
    }


def _progress(run: Run, state: RunState) -> dict[str, Any]:
    """The entries of summary.json about the completed epochs."""
    steps = min(state.epoch * len(run.batches), run.trainer.step)
    mixing = figures.mixing(state.sums[: state.epoch], run.batches.images(steps))
    return {"epochs": state.epoch, **mixing, "log": state.log}


def _say_start(trainer: Trainer, data: Data, facts: Mapping[str, Any]) -> None:
    """Says what is trained, and which settings are allowed but probably mistakes."""
    config, world, classes = trainer.config, trainer.world, len(data.classes)
    verb = f"resuming after step {trainer.step}" if trainer.step else "training"
    images = f"{len(data.train):,} images of {config.dataset.name}, {classes:,} classes, "
    images += f"{len(data.held_out):,} held out"
    if data.validation is not None:
        images += f", {len(data.validation):,} for validation"
    mixing = "+".join(config.augmentation.stack) or "no mixing"
    place = f"{world.size} ranks on " if world.size > 1 else ""
    say(f"{verb}: {config.model.name} on {images}, {mixing}, {place}{world.device.type}")
    for remark in data.remarks:
        warn(f"warning: {remark}")
    if facts.get("initial_weights") is not None:
        say(f"initial weights: {facts['initial_weights']}")
    for name, row in facts.get("htm", {}).items():
        say(f"htm: {name} = {', '.join(f'{float(x):.4g}' for x in row)}")
    if trainer.module.htm is not None and trainer.module.htm.difficulty == "paper":
        label = torch.full((classes,), config.recipe.label_smoothing / classes).double()
        label[0] += 1 - config.recipe.label_smoothing
        least, guess = float(torch.special.entr(label).sum()), math.log(classes)
        say(f"htm: difficulty: at least {least:.4g} nats, {guess:.4g} of a guess")


def _htm_numbers(trainer: Trainer) -> dict[str, list[float | str]]:
    """HTM's tau, in nats, and rho at each layer, with numbers for `auto`; infinity as text."""
    htm, config = trainer.module.htm, trainer.config
    if htm is None:
        return {}
    stack = Augmentation(htm=config.augmentation.htm)
    with preserved_generators(), torch.device("meta"):
        plain = models.without_weights(config.model)
        module = models.build_module(plain, stack, len(trainer.classes))
        tokens = models.tokens_of(config.model, module)
    each = [*zip(htm.each.values(), tokens, strict=True)]
    rows = {"tau": [x.tau for x, _ in each], "rho": [x.rho_for(t) for x, t in each]}
    return {name: [x if x < math.inf else "inf" for x in row] for name, row in rows.items()}


def _facts(trainer: Trainer, data: Data, initial_weights: str | None) -> dict[str, Any]:
    """The entries of the summary that are known before training."""
    config, numbers = trainer.config, _htm_numbers(trainer)
    return {
        "name": config.name,
        "data": record(data, config.model.weights),
        **({"htm": numbers} if numbers else {}),
        "parameters": models.count_parameters(trainer.module),
        "seed": config.seed,
        "devices": config.devices,
        **({} if trainer.step else {"initial_weights": initial_weights}),
        "hardware": hardware_name(trainer.world.device.type),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {x: version(x) for x in LIBRARIES},
        "git_revision": git_revision(),
    }


def git_revision() -> str | None:
    """The commit of this code, with `-dirty` if files have changed; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError):
        place = Path(__file__).parent
        result = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        return result.stdout.strip() or None
    return None
