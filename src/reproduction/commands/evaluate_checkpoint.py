"""Evaluation of saved weights, as the training run evaluates."""

import json
from pathlib import Path
from typing import Any

from reproduction.commands.evaluation import Evaluation
from reproduction.data.build import build_broken_images, build_evaluation_loader
from reproduction.data.inputs import build_normalize
from reproduction.data.sources import load_source
from reproduction.models.build import build_model, place, without_start
from reproduction.system.errors import PlainError, RunFailed
from reproduction.system.ranks import is_a_rank, is_first_rank
from reproduction.system.storage import write_text
from reproduction.training.checkpoint import load_plain
from reproduction.training.distributed import join_world, launch, resolve_device
from reproduction.training.endings import explaining_data, explaining_memory
from reproduction.training.evaluate import evaluate


def evaluate_checkpoint(settings: Evaluation) -> tuple[dict[str, Any], Path]:
    """Evaluates on one rank or many; returns the result and the file it is written to.

    UserError for a checkpoint that does not fit, RunFailed if a rank died or memory is too small.
    """
    resolve_device(settings.config.device, settings.config.devices)
    try:
        if is_a_rank(settings.config.devices):
            result = _evaluate(settings)
        else:
            result = launch(_evaluate, settings, settings.config.devices)
    except PlainError as error:
        raise RunFailed(str(error)) from error
    if is_first_rank():
        settings.result.parent.mkdir(parents=True, exist_ok=True)
        write_text(settings.result, json.dumps(result, indent=2) + "\n")
    return result, settings.result


def _evaluate(settings: Evaluation) -> dict[str, Any]:
    config = settings.config
    with join_world(resolve_device(config.device, config.devices)) as world:
        source = load_source(config.dataset.name, config.dataset.root, limit=None)
        model = build_model(without_start(config.model), len(source.classes))
        checkpoint = load_plain(settings.checkpoints, model, source.classes)
        pin = world.device.type == "cuda"
        broken = build_broken_images(config, source)
        normalize = build_normalize(config.dataset.mean, config.dataset.std, world.device)
        loader = build_evaluation_loader(config, source, world.rank, world.size, pin, broken)
        with explaining_memory("evaluation", config.recipe), explaining_data():
            result = evaluate(
                place(model, world.device), normalize, loader, world, config.recipe.precision
            )
        broken.agree(world)
        return {
            **result,
            "images": len(source.held_out) - len(broken.known),
            "dataset": config.dataset.name,
            "checkpoint": str(checkpoint),
        }
