"""Accuracy and loss of the plain model on held-out images, during a run or of a checkpoint."""

import json
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.config import Config
from reproduction.data.inputs import Normalize, build_normalize
from reproduction.data.loaders import build_evaluation_loader
from reproduction.data.sources import opened, unlabelled
from reproduction.models.build import build_model, place, without_weights
from reproduction.models.weights import matching_state
from reproduction.system import PlainError, is_first_rank, progress, warn, write_text
from reproduction.training.checkpoint import check_classes, read_plain
from reproduction.training.predictions import (
    Predictions,
    Recorder,
    best_classes,
    write_predictions,
    write_tables,
)
from reproduction.training.ranks import World, join_world, on_ranks, resolve_device
from tokenmixup.contexts import evaluating

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Mixed precision as configured; float32 disables it."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "float32")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    normalize: Normalize,
    loader: Iterable[list[Tensor]],
    world: World,
    precision: str,
    recorder: Recorder | None = None,
) -> dict[str, float]:
    """Evaluates on this rank's images and sums over the ranks: every image counts exactly once.

    Returns `top1` and `top5` in percent and `eval_loss`, the mean cross-entropy in nats. `loader`
    yields images `b 3 h w` (uint8) and classes `b`. `recorder` keeps the predictions. Raises
    PlainError if the loss is not finite.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for batch in loader:
            images, targets = (x.to(world.device, non_blocking=True) for x in batch)
            with autocast(world.device, precision):
                logits = model(normalize(images)).float()
            totals += _count(logits, targets)  # does not wait for the device
            if recorder is not None:
                recorder.add(logits, targets)
    images, top1, top5, loss = world.sum(totals).tolist()
    if not math.isfinite(loss):
        raise PlainError(f"the held-out loss is {loss}")
    return {
        "top1": 100 * top1 / images,
        "top5": 100 * top5 / images,
        "eval_loss": loss / images,
    }


def _count(logits: Tensor, targets: Tensor) -> Tensor:
    """Images, top-1 hits, top-5 hits and summed cross-entropy of a batch: `4`."""
    hits = best_classes(logits) == targets[:, None]  # b k
    loss = F.cross_entropy(logits, targets, reduction="sum")
    images = loss.new_full((), len(targets))
    return torch.stack([images, hits[:, 0].sum(), hits.sum(), loss]).double()


def evaluate_checkpoint(
    config: Config,
    checkpoints: list[Path],
    result: Path,
    predictions: Path | None = None,
    images: Path | None = None,
) -> dict[str, Any]:
    """Evaluates the first readable checkpoint on one rank or many and writes `result`, a JSON file.

    `predictions` is a .csv file to write too, together with the tables of `write_tables`. Of
    `images`, a folder without classes, it is all that is written. Raises UserError if the
    checkpoint does not fit the model, PlainError if a rank dies or memory runs out.
    """
    resolve_device(config.device, config.devices, config.recipe.precision)
    recorder = None if predictions is None else Recorder()
    on_rank = partial(_evaluate, checkpoints=checkpoints, recorder=recorder, images=images)
    scores, found = on_ranks(on_rank, config)
    if predictions is not None and found is not None and is_first_rank():
        write_predictions(predictions, found, labelled=images is None)
    if images is None and is_first_rank():
        result.parent.mkdir(parents=True, exist_ok=True)
        write_text(result, json.dumps(scores, indent=2) + "\n")
        if found is not None:
            write_tables(result, found)
    return scores


def _evaluate(
    config: Config, checkpoints: list[Path], recorder: Recorder | None, images: Path | None
) -> tuple[dict[str, Any], Predictions | None]:
    """Evaluates on this rank."""
    precision = config.recipe.precision
    with join_world(resolve_device(config.device, config.devices, precision)) as world:
        weights, loaded = read_plain(checkpoints)
        data = (
            opened(replace(config.dataset, limit=None, validation=0.0))
            if images is None
            else unlabelled(images, weights.classes or [])
        )
        if weights.classes is not None:
            check_classes(weights.origin, weights.classes, data.classes)
        for remark in data.remarks if world.is_main else ():
            warn(f"warning: {remark}")
        model = build_model(without_weights(config.model), len(data.classes))
        model.load_state_dict(matching_state(weights, model))
        normalize = build_normalize(config.dataset.mean, config.dataset.std, world.device)
        pin = world.device.type == "cuda"
        loader = build_evaluation_loader(config, data.held_out, world.rank, world.size, pin)
        batches = progress(loader, "evaluation", length_hint(loader))
        model = place(model, world.device)
        scores = evaluate(model, normalize, batches, world, precision, recorder)
        found = None if recorder is None else recorder.gather(world, data)
        facts = {"dataset": config.dataset.name, "root": config.dataset.root}
        return {**scores, "images": len(data.held_out), **facts, **loaded}, found
