"""One run from its configuration to its summary."""

import math
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from reproduction.config import Config, ViT
from reproduction.data.build import (
    build_broken_images,
    build_evaluation_loader,
    build_source,
    build_training_inputs,
    build_training_loader,
    statistics_warning,
)
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import Source
from reproduction.models.build import (
    attention_kernel,
    build_module,
    count_macs,
    count_parameters,
    place,
    pretrained_statistics,
    without_weights,
)
from reproduction.runs.folder import RunFolder, run_hash
from reproduction.runs.locking import hold
from reproduction.system.errors import PlainError, RunInterrupted, Stopped, UserError
from reproduction.system.hardware import hardware_name, join_hardware
from reproduction.system.ranks import is_a_rank, restarts
from reproduction.system.terminal import warn
from reproduction.training.checkpoint import load_last
from reproduction.training.distributed import (
    World,
    allow_tf32,
    join_world,
    launch,
    resolve_device,
)
from reproduction.training.endings import (
    explaining_data,
    explaining_disk,
    handling,
    leave,
    leave_failed,
    pass_on,
    stop_at_once,
)
from reproduction.training.evaluate import autocast
from reproduction.training.loggers import Logs, build_logs
from reproduction.training.loop import Trainer

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "hydra-core")


def run_training(config: Config) -> dict[str, Any]:
    """Trains one run, or finds it finished, and returns its summary.

    Raises UserError before anything is written, PlainError or RunInterrupted once the folder holds
    that status. RunLocked if another process is training it.
    """
    folder = RunFolder.of(config)
    folder.check(config)
    if folder.is_finished():
        return folder.read_summary()
    try:
        with hold(folder):
            if folder.config_path.exists():
                folder.check(config)  # by another process, just now
            if folder.is_finished():
                return folder.read_summary()
            with handling(stop_at_once), _leaving_its_end(folder):
                if is_a_rank(config.devices):
                    return train(config)
                return launch(train, config, config.devices, config.restarts)
    except RunInterrupted as interrupted:
        if isinstance(interrupted.__cause__, Stopped):
            pass_on(interrupted.__cause__.signum)
        raise
    except OSError as error:  # of the lock: nothing has happened
        raise UserError(f"{error.filename or folder.path}: {error.strerror}") from error


@contextmanager
def _leaving_its_end(folder: RunFolder) -> Iterator[None]:
    """Writes into the folder how the run has ended, unless well."""
    try:
        yield
    except UserError:
        raise
    except KeyboardInterrupt as interrupt:
        raise RunInterrupted(leave(folder, "interrupted", "interrupted")) from interrupt
    except Exception as error:
        raise PlainError(leave_failed(folder, error)) from error


def train(config: Config) -> dict[str, Any]:
    """Trains on this rank; the first rank writes the run folder. Returns the summary."""
    device = resolve_device(config.device, config.devices)
    allow_tf32(config.recipe.tf32)
    with join_world(device) as world, explaining_disk(RunFolder.of(config)), explaining_data():
        source = build_source(config.dataset)  # the first rank has downloaded before it joined
        trainer = build_trainer(config, world, source)
        if world.is_main:
            _tell_restart(trainer.step)
            _warn_of_mistakes(config, trainer)
        facts = _facts(config, trainer) if world.is_main else {}
        logger = _open_logger(config, trainer)
        status = "failed"
        try:
            if world.is_main:
                trainer.folder.create(config)
                trainer.folder.write_summary(**facts, status="running", error=None)
            result = trainer.fit(logger)
            status = "finished"
        finally:
            logger.close(status)
        world.barrier()
        return trainer.folder.write_summary(**result, status=status) if world.is_main else result


def build_trainer(config: Config, world: World, source: Source) -> Trainer:
    """Builds everything and goes back to the last checkpoint; writes nothing."""
    folder = RunFolder.of(config)
    newest = load_last(folder, run_hash(config))
    model = config.model if newest is None else without_weights(config.model)
    torch.manual_seed(config.seed)
    module = build_module(model, config.augmentation, len(source.classes))
    batches = TrainingBatches(
        len(source.train), config.recipe.batch_size, config.seed, world.rank, world.size
    )
    broken = build_broken_images(config, source)
    pin = world.device.type == "cuda"
    trainer = Trainer(
        config,
        world,
        folder,
        module=place(module, world.device),
        classes=source.classes,
        inputs=build_training_inputs(config, len(source.classes), world.device),
        batches=batches,
        train_loader=build_training_loader(config, source, batches, pin, broken),
        eval_loader=build_evaluation_loader(config, source, world.rank, world.size, pin, broken),
        broken=broken,
    )
    if newest is not None:
        trainer.restore(*newest)
    if world.share(trainer.step) != trainer.step:
        raise RuntimeError(f"rank {world.rank} has read another checkpoint than the first rank")
    return trainer


def _tell_restart(step: int) -> None:
    """Says so where a rank has died, and where the others and its successor go on."""
    done, allowed = restarts()
    if done > 0:
        warn(f"restart {done} of {allowed}: all ranks go on after step {step}")


def _open_logger(config: Config, trainer: Trainer) -> Logs:
    """Opens the loggers on the first rank; if that fails, all ranks raise its UserError."""
    logger = Logs()
    error = None
    if trainer.world.is_main:
        try:
            logger = build_logs(config, trainer.folder, trainer.step)
        except UserError as refusal:
            error = refusal
    error = trainer.world.share(error)
    if error is not None:
        raise error
    return logger


def _warn_of_mistakes(config: Config, trainer: Trainer) -> None:
    """Warns of settings that are allowed but probably not meant."""
    module = trainer.module
    if config.recipe.precision == "float16" and trainer.world.device.type == "cpu":
        warn("warning: float16 is slow on a CPU, try recipe.precision=float32")
    guessing = math.log(len(trainer.classes))
    for htm in [] if module.htm is None else module.htm.each.values():
        if guessing <= cast(float, htm.tau) < math.inf:
            scores = f"guessing scores {guessing:.2f} nats, so that all samples are easy at first"
            warn(f"warning: augmentation.htm.tau={htm.tau}: {scores}")
    uses_pretrained = isinstance(config.model, ViT) and config.model.pretrained is not None
    known = pretrained_statistics(module.model) if uses_pretrained else None
    if warning := statistics_warning(config.dataset, known):
        warn(warning)


def _facts(config: Config, trainer: Trainer) -> dict[str, Any]:
    """What the summary tells from the start."""
    model, device = trainer.module.model, trainer.world.device
    with autocast(device, config.recipe.precision):
        kernel = attention_kernel(model, config.model.image_size)
    earlier = trainer.folder.read_summary().get("hardware") if trainer.step > 0 else None
    return {
        "name": config.name,
        "parameters": count_parameters(trainer.module),
        "macs": count_macs(model, config.model.image_size).total,
        "attention": kernel,
        "seed": config.seed,
        "devices": config.devices,
        "hardware": join_hardware(earlier, hardware_name(device.type)),
        "versions": {"python": platform.python_version()} | {x: version(x) for x in LIBRARIES},
        "git_revision": git_revision(),
    }


def git_revision() -> str | None:
    """The commit of this code, with `-dirty` if files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
