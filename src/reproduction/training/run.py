"""One run, from its configuration to its summary: checked, built or resumed, and its `fit`.

The epochs are in fit.py, what ends a run in stop.py, its processes in ranks.py.
"""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from reproduction.config import Config
from reproduction.data import loaders
from reproduction.data.halves import Data
from reproduction.data.sources import opened, record
from reproduction.data.workers import Loader
from reproduction.errors import (
    OneLineError,
    PlainError,
    Stopped,
    of_system,
    say,
)
from reproduction.folder import RunFolder, hold
from reproduction.identity import files_of_code, run_hash
from reproduction.machine import git_revision, hardware_name, is_first_rank
from reproduction.models.build import (
    build_module,
    count_parameters,
    load_initial_weights,
    without_weights,
)
from reproduction.models.weights import read_newest
from reproduction.training import metrics
from reproduction.training.checkpoint import Clock, save_plain
from reproduction.training.evaluate import build_metrics
from reproduction.training.fit import (
    RunState,
    TrainingRun,
    fit,
    progress_entries,
    restore,
    save_checkpoint,
    write_metrics,
)
from reproduction.training.loggers import Loggers
from reproduction.training.ranks import World, join_world, on_ranks, resolve_device
from reproduction.training.step import Trainer
from reproduction.training.stop import Stop, handling

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "hydra-core")


def run_training(config: Config, folder: RunFolder, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Trains one run, unless it is finished, and returns its summary, which records its `origin`.

    Raises UserError before the run begins, and PlainError or KeyboardInterrupt after the status is
    recorded in the folder.
    """
    try:
        with hold(folder):
            folder.check(config)  # another process may have just begun it
            if folder.is_finished():
                return folder.read_summary()
            try:
                return on_ranks(partial(train, folder=folder, origin=origin), config)
            except KeyboardInterrupt as error:
                line = _record_end(folder, config, "interrupted", "interrupted")
                raise KeyboardInterrupt(line) from error
            except SystemExit as error:  # of the user's code
                reason = f"its code has called exit({error.code!r})"
                raise PlainError(_record_end(folder, config, "failed", reason)) from error
            except PlainError as error:  # what `ending` has made of any other
                raise PlainError(_record_end(folder, config, "failed", str(error))) from error
    except OSError as error:  # of the lock and the folder, before the run
        raise of_system(error) from error


def _record_end(folder: RunFolder, config: Config, status: str, reason: str) -> str:
    """Records the status of a run that has begun and returns the line to print; never raises."""
    if not folder.config_path.exists():
        return reason
    kept = f"kept as {status}"
    try:
        if is_first_rank():
            folder.write_summary(status=status, error=reason)
    except (OSError, OneLineError):  # such as a full disk; reports recognise the run by its lock
        kept = "kept as it is"
    return f"{reason}; {folder.path} is {kept}, {config.how_to_continue}"


def train(config: Config, folder: RunFolder, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Trains on this rank; the first rank writes the run folder.

    Returns the summary; on other ranks the results alone.
    """
    precision = config.recipe.precision
    device = resolve_device(config.device, config.devices, precision, config.compile)
    if config.compile:
        torch.compiler.reset()  # its limits count over all runs of a process
    with join_world(device) as world:
        run, state = set_up(config, folder, world, origin)
        status = "failed"
        with handling(run.stop.request):
            try:
                results = fit(run, state)
                status = "finished"
            except Stopped:  # on all ranks after the same step
                write_metrics(run, state)  # first: the checkpoint counts their bytes
                if world.is_main:
                    say(f"stopping after step {run.trainer.step}")
                save_checkpoint(run, state)
                raise
            except Exception as error:
                error.add_note(f"after step {run.trainer.step}")
                raise
            finally:
                run.loggers.close(status)
        world.barrier()  # finished is what all ranks have finished
        if world.is_main:
            results = run.folder.write_summary(**results, status=status)
        return results


def set_up(
    config: Config, folder: RunFolder, world: World, origin: Mapping[str, Any]
) -> tuple[TrainingRun, RunState]:
    """Builds a run on its device, or resumes it, and prepares its folder.

    UserError if images, model or checkpoints do not fit the configuration.
    """
    paths = folder.checkpoints()
    newest = read_newest(paths) if paths else None
    data = opened(config.dataset)
    batches = loaders.TrainingBatches(config, len(data.train), world.rank, world.size)
    model = config.model if newest is None else without_weights(config.model)
    torch.manual_seed(config.seed)  # the weights are drawn on the CPU: the same for every device
    module = build_module(model, config.augmentation, len(data.classes))
    initial_weights = load_initial_weights(model, module.model)
    trainer = Trainer(config, world, module, data.classes, len(batches))
    checkpoint = None
    state = RunState()
    if newest is not None:
        checkpoint, content = newest
        state = restore(trainer, checkpoint, content)
    if world.broadcast(trainer.step) != trainer.step:
        raise PlainError("the ranks have read different checkpoints")
    facts: dict[str, Any] = {}
    if world.is_main:
        facts = _facts(trainer, data)
        if newest is None:  # a resumed run keeps what its beginning has recorded
            facts["initial_weights"] = initial_weights
            facts["starts"] = []
        else:
            facts["starts"] = folder.read_summary().get("starts", [])
        facts["starts"] += [_start(trainer)]
        facts |= {"name": folder.path.name, **origin}
        _say_start(trainer, data, facts)
    run = _assembled(trainer, folder, data, batches)
    # The folder last: what is refused above, such as a logger's settings, leaves it as it was.
    if world.is_main:
        folder.begin(config, checkpoint, state.metrics_size)
        if state.best is not None:
            save_plain(folder.best_path, state.best, trainer.classes)
        else:
            folder.best_path.unlink(missing_ok=True)
        folder.write_summary(**facts, **progress_entries(run, state), status="running", error=None)
    return run, state


def _assembled(
    trainer: Trainer, folder: RunFolder, data: Data, batches: loaders.TrainingBatches
) -> TrainingRun:
    """The parts of a run around its trainer; loggers begin."""
    config, world = trainer.config, trainer.world
    pin = world.device.type == "cuda"
    evaluation_loader = partial(
        loaders.build_evaluation_loader, config, rank=world.rank, ranks=world.size, pin=pin
    )
    training_images = loaders.build_training_images(config, data.train)
    test_loader = None
    if data.validation is not None:
        test_loader = evaluation_loader(data.held_out)
    return TrainingRun(
        trainer=trainer,
        folder=folder,
        batches=batches,
        train_loader=Loader(training_images, batches, config.workers, pin),
        epoch_loader=evaluation_loader(data.per_epoch),
        test_loader=test_loader,
        loggers=Loggers(config.logger if world.is_main else {}, config, folder, trainer.step),
        stop=Stop(world.size),
        clock=Clock(config.checkpoint),
        batch_metrics=metrics.BatchMetrics(world),
        own_metrics=build_metrics(config.recipe),
    )


def _say_start(trainer: Trainer, data: Data, facts: Mapping[str, Any]) -> None:
    """Says what is trained."""
    config, world = trainer.config, trainer.world
    verb = f"resuming after step {trainer.step}" if trainer.step else "training"
    images = [
        f"{len(data.train):,} images of {config.dataset.name}",
        f"{len(data.classes):,} classes",
        f"{len(data.held_out):,} held out",
    ]
    if data.validation is not None:
        images.append(f"{len(data.validation):,} for validation")
    mixing = "+".join(config.augmentation.stack) or "no mixing"
    device = world.device.type
    if world.size > 1:
        device = f"{world.size} ranks on {device}"
    say(f"{verb}: {config.model.name} on {', '.join(images)}, {mixing}, {device}")
    if facts.get("initial_weights") is not None:
        say(f"initial weights: {facts['initial_weights']}")


def _start(trainer: Trainer) -> dict[str, Any]:
    """What the summary says of a start of the run: from which step on, with what and where.

    On a CPU the weights are a function of the settings and these.
    """
    versions = {name: version(name) for name in LIBRARIES}
    return {
        "step": trainer.step,
        "began": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "git_revision": git_revision(),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware_name(trainer.world.device.type),
        "threads": torch.get_num_threads(),
    }


def _facts(trainer: Trainer, data: Data) -> dict[str, Any]:
    """The entries of the summary that are known before training."""
    config = trainer.config
    return {
        "data": record(data, config.model.weights),
        "code": files_of_code(config),
        "classes": len(data.classes),
        "parameters": count_parameters(trainer.module),
        "seed": config.seed,
        "devices": config.devices,
        "run_hash": run_hash(config),
    }
