"""One run from its configuration to its summary."""

import platform
import signal
import subprocess
import sys
import threading
import traceback
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from reproduction.config import Config, ViT
from reproduction.data.build import (
    build_evaluation_loader,
    build_mixer,
    build_training_loader,
    statistics_warning,
)
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import Source, load_source
from reproduction.errors import RunFailed, RunInterrupted, UserError
from reproduction.models.build import (
    build_module,
    count_macs,
    count_parameters,
    place,
    pretrained_statistics,
)
from reproduction.ranks import is_first_rank
from reproduction.runs import RunFolder
from reproduction.training.distributed import World, join_world, launch, resolve_device
from reproduction.training.loggers import build_logger
from reproduction.training.loop import Trainer
from tokenmixup import TokenMixup

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "hydra-core")


def run_training(config: Config) -> dict[str, Any]:
    """Trains one run, or finds it finished, and returns its summary.

    Raises UserError before anything is written, RunFailed or RunInterrupted once the folder holds
    that status.
    """
    folder = RunFolder.of(config)
    folder.check(config)
    if folder.read_summary().get("status") == "finished":
        return folder.read_summary()
    resolve_device(config.device, config.devices)
    if config.devices > 1:
        _load(config)  # downloads and complains before ranks start
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        return launch(train, config, config.devices)
    except UserError:
        raise
    except KeyboardInterrupt:
        raise RunInterrupted(_leave(folder, "interrupted", "interrupted")) from None
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RunFailed(_leave(folder, "failed", reason)) from error


def train(config: Config) -> dict[str, Any]:
    """Trains on this rank; the first rank writes the run folder. Returns the summary."""
    with join_world(resolve_device(config.device, config.devices)) as world:
        trainer = build_trainer(config, world)
        result = _fit(trainer)
        world.barrier()
        return result


def build_trainer(config: Config, world: World) -> Trainer:
    """Builds everything first, then opens the run folder."""
    folder = RunFolder.of(config)
    if world.is_main:
        source = _load(config)
    world.barrier()  # the first rank has downloaded
    source = source if world.is_main else _load(config)
    torch.manual_seed(config.seed)
    module = build_module(config.model, config.augmentation, len(source.classes))
    facts = _facts(config, module) if world.is_main else {}
    if world.is_main and world.device.type == "cpu" and config.recipe.precision == "float16":
        print("warning: float16 is slow on a CPU, try recipe.precision=bf16", file=sys.stderr)
    batches = TrainingBatches(
        len(source.train), config.recipe.batch_size, config.seed, world.rank, world.size
    )
    pin = world.device.type == "cuda"
    goes_on = folder.last_path.exists()
    world.barrier()  # every rank has looked before the first one writes
    logger = build_logger(config, folder, world.is_main)
    if world.is_main:
        folder.create(config)
        folder.write_summary(**facts, status="running")
    trainer = Trainer(
        config,
        world,
        folder,
        logger,
        module=place(module, world.device),
        input_mixer=build_mixer(config, len(source.classes)),
        batches=batches,
        train_loader=build_training_loader(config, source, batches, pin),
        eval_loader=build_evaluation_loader(config, source, world.rank, world.size, pin),
    )
    if goes_on:
        trainer.resume()
    elif world.is_main:
        folder.trim_metrics(0)
    return trainer


def _fit(trainer: Trainer) -> dict[str, Any]:
    status = "failed"
    try:
        result = trainer.fit()
        status = "finished"
    finally:
        trainer.logger.close(status)
    if not trainer.world.is_main:
        return result
    return trainer.folder.write_summary(**result, status=status)


def _load(config: Config) -> Source:
    return load_source(config.dataset.name, config.dataset.root, config.dataset.limit)


def _facts(config: Config, module: TokenMixup) -> dict[str, Any]:
    """What the summary tells from the start; warns of statistics that fit nothing."""
    uses_pretrained = isinstance(config.model, ViT) and config.model.pretrained is not None
    known = pretrained_statistics(module.model) if uses_pretrained else None
    if warning := statistics_warning(config.dataset, known):
        print(warning, file=sys.stderr)
    return {
        "name": config.name,
        "parameters": count_parameters(module),
        "macs": count_macs(module.model, config.model.image_size),
        "seed": config.seed,
        "devices": config.devices,
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


def _leave(folder: RunFolder, status: str, reason: str) -> str:
    """Writes how a run ended, if it had begun, and says how to go on."""
    if not folder.config_path.exists():
        return reason
    if is_first_rank():
        folder.write_summary(status=status, error=reason)
    how = "repeat the command with resume=auto to go on"
    return f"{reason}; {folder.path} is kept as {status}, {how}"


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
