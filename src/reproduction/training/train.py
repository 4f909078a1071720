"""Trains one run, from its configuration to its summary."""

import math
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from reproduction.config import Config, Library
from reproduction.data.inputs import build_training_inputs
from reproduction.data.loaders import (
    Loader,
    TrainingBatches,
    build_evaluation_loader,
    build_training_loader,
)
from reproduction.data.sources import Data, Half, opened, record
from reproduction.models.build import (
    build_module,
    count_macs,
    count_parameters,
    load_initial_weights,
    place,
    without_weights,
)
from reproduction.runs.folder import RunFolder
from reproduction.runs.locking import hold
from reproduction.system.errors import PlainError, RunInterrupted, Stopped, UserError
from reproduction.system.hardware import hardware_name, join_hardware
from reproduction.system.ranks import restarts
from reproduction.system.terminal import say, warn
from reproduction.training.checkpoint import load_last
from reproduction.training.distributed import (
    World,
    allow_tf32,
    join_world,
    on_ranks,
    resolve_device,
)
from reproduction.training.endings import (
    explaining_data,
    explaining_disk,
    forward_signal,
    handling,
    record_end,
    record_failure,
    stop_at_once,
)
from reproduction.training.epochs import Epochs
from reproduction.training.loggers import Logs, build_logs
from reproduction.training.loop import Trainer

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "hydra-core")


def run_training(config: Config) -> dict[str, Any]:
    """Trains one run, unless it is finished, and returns its summary.

    Raises UserError before the run begins, and PlainError or RunInterrupted after the status is
    recorded in the folder. Raises RunLocked if another process is training the run.
    """
    folder = RunFolder.of(config)
    folder.check(config)
    if folder.is_finished():
        return folder.read_summary()
    try:
        with hold(folder):
            if folder.config_path.exists():
                folder.check(config)  # another process has just created it
            if folder.is_finished():
                return folder.read_summary()
            with handling(stop_at_once), _recording_end(config):
                return on_ranks(train, config.devices)(config)
    except RunInterrupted as interrupted:
        if isinstance(interrupted.__cause__, Stopped):
            forward_signal(interrupted.__cause__.signum)
        raise
    except OSError as error:  # of the lock: nothing is written yet
        raise UserError(f"{error.filename or folder.path}: {error.strerror}") from error


@contextmanager
def _recording_end(config: Config) -> Iterator[None]:
    """Records in the folder that the run failed or was interrupted."""
    try:
        yield
    except UserError:
        raise
    except KeyboardInterrupt as interrupt:
        raise RunInterrupted(record_end(config, "interrupted", "interrupted")) from interrupt
    except Exception as error:
        raise PlainError(record_failure(config, error)) from error


def train(config: Config) -> dict[str, Any]:
    """Trains on this rank; the first rank writes the run folder. Returns the summary."""
    device = resolve_device(config.device, config.devices, config.recipe.precision)
    allow_tf32(config.recipe.tf32)
    if config.compile:
        torch.compiler.reset()  # its limits count over all runs of a process
    with join_world(device) as world, explaining_disk(RunFolder.of(config)), explaining_data():
        source = opened(config.dataset)  # downloaded by the first rank in preflight
        epochs, initial_weights = build_epochs(config, world, source)
        trainer, folder = epochs.trainer, epochs.folder
        facts: dict[str, Any] = {}
        if world.is_main:
            _report_start(trainer, source, initial_weights)
            _warn_about_settings(config, trainer)
            facts = _collect_facts(trainer, folder, source, initial_weights)
        logger = _open_logger(trainer, folder)
        status = "failed"
        try:
            if world.is_main:
                folder.create(config)
                folder.write_summary(**facts, status="running", error=None)
            with epochs.around(logger):
                result = epochs.fit()
            status = "finished"
        finally:
            logger.close(status)
        world.barrier()
        return folder.write_summary(**result, status=status) if world.is_main else result


def build_epochs(config: Config, world: World, source: Data) -> tuple[Epochs, str | None]:
    """Builds the epochs of a run and restores its last checkpoint, if any; writes nothing.

    Also returns what was read from `model.weights`.
    """
    folder = RunFolder.of(config)
    newest = load_last(folder)
    model = config.model if newest is None else without_weights(config.model)
    torch.manual_seed(config.seed)
    module = build_module(model, config.augmentation, len(source.classes))
    initial_weights = load_initial_weights(model, module.model)
    batches = TrainingBatches(
        len(source.train), config.recipe.batch_size, config.seed, world.rank, world.size
    )
    pin = world.device.type == "cuda"
    trainer = Trainer(
        config,
        world,
        module=place(module, world.device),
        classes=source.classes,
        inputs=build_training_inputs(config, world.device),
        steps_per_epoch=len(batches),
    )

    def evaluation_loader(images: Half) -> Loader:
        return build_evaluation_loader(config, images, world.rank, world.size, pin)

    epochs = Epochs(
        trainer,
        folder,
        batches=batches,
        train_loader=build_training_loader(config, source.train, batches, pin),
        eval_loader=evaluation_loader(source.per_epoch),
        test_loader=None if source.validation is None else evaluation_loader(source.held_out),
    )
    if newest is not None:
        epochs.restore(*newest)
    if world.share(trainer.step) != trainer.step:
        raise RuntimeError(f"rank {world.rank} and the first rank have read different checkpoints")
    return epochs, initial_weights


def _open_logger(trainer: Trainer, folder: RunFolder) -> Logs:
    """Opens the loggers on the first rank; if this fails, all ranks raise its UserError."""
    logger = Logs()
    error = None
    if trainer.world.is_main:
        try:
            logger = build_logs(trainer.config, folder, trainer.step)
        except UserError as user_error:
            error = user_error
    error = trainer.world.share(error)
    if error is not None:
        raise error
    return logger


def _report_start(trainer: Trainer, source: Data, initial_weights: str | None) -> None:
    """Reports what is trained, and after a restart of the ranks from which step they resume."""
    config = trainer.config
    done, allowed = restarts()
    if done > 0:
        warn(f"restart {done} of {allowed}: all ranks resume after step {trainer.step}")
    verb = f"resuming after step {trainer.step}" if trainer.step else "training"
    mixing = "+".join(config.augmentation.stack) or "no mixing"
    train, held_out, classes = len(source.train), len(source.held_out), len(source.classes)
    data = f"{train:,} images of {config.dataset.name}, {classes:,} classes, {held_out:,} held out"
    if source.validation is not None:
        data += f", {len(source.validation):,} for validation"
    device, ranks = trainer.world.device.type, trainer.world.size
    place = device if ranks == 1 else f"{ranks} ranks on {device}"
    say(f"{verb}: {config.model.name} on {data}, {mixing}, {place}")
    for remark in source.remarks:
        warn(f"warning: {remark}")
    if initial_weights is not None:
        say(f"initial weights: {initial_weights}")
    for name, numbers in _htm_numbers(config, trainer).items():
        say(f"htm: {name} = {', '.join(f'{float(x):.4g}' for x in numbers)}")


def _htm_numbers(config: Config, trainer: Trainer) -> dict[str, list[float | str]]:
    """HTM's tau, in nats, and rho at each layer, with numbers for `auto`; infinity as text."""
    htm = trainer.module.htm
    if htm is None or isinstance(config.model, Library):
        return {}
    each, tokens = htm.each.values(), config.model.tokens
    rows = {"tau": [x.tau for x in each], "rho": [x.rho_for(tokens) for x in each]}
    if not trainer.module.adapter.attends_to_all and any(x.rho == "auto" for x in each):
        del rows["rho"]  # by the tokens of a stage, which the configuration does not say
    return {name: [x if x < math.inf else "inf" for x in row] for name, row in rows.items()}


def _warn_about_settings(config: Config, trainer: Trainer) -> None:
    """Warns about settings that are allowed but probably mistakes."""
    module = trainer.module
    guessing = math.log(len(trainer.classes))
    for htm in [] if module.htm is None else module.htm.each.values():
        if guessing <= cast(float, htm.tau) < math.inf:
            reason = f"guessing scores {guessing:.2f} nats, so that all samples are easy at first"
            warn(f"warning: augmentation.htm.tau={htm.tau}: {reason}")


def _collect_facts(
    trainer: Trainer, folder: RunFolder, source: Data, initial_weights: str | None
) -> dict[str, Any]:
    """The entries of the summary that are known before training."""
    config, model, device = trainer.config, trainer.module.model, trainer.world.device
    earlier = folder.read_summary() if trainer.step > 0 else {}
    numbers = _htm_numbers(config, trainer)
    return {
        "name": config.name,
        "data": record(source, config.model.weights),
        **({"htm": numbers} if numbers else {}),
        "parameters": count_parameters(trainer.module),
        "macs": count_macs(model, config.model.image_size).total,
        "seed": config.seed,
        "devices": config.devices,
        "initial_weights": initial_weights or earlier.get("initial_weights"),
        "hardware": join_hardware(earlier.get("hardware"), hardware_name(device.type)),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {x: version(x) for x in LIBRARIES},
        "git_revision": git_revision(),
    }


def git_revision() -> str | None:
    """The commit of this code, with `-dirty` if files have changed; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
