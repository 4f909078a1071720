"""A checkpoint evaluated by itself: accuracy, also by class, and what it predicts for each image.

Letters: n images, c classes, k the most probable classes.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from reproduction.config import Config
from reproduction.data.halves import Data
from reproduction.data.inputs import build_normalize
from reproduction.data.loaders import build_evaluation_loader
from reproduction.data.sources import opened, unlabelled
from reproduction.errors import UserError, progress
from reproduction.files import write_text
from reproduction.identity import settings_of_evaluation
from reproduction.models.build import build_trained, place
from reproduction.models.weights import Weights
from reproduction.training.checkpoint import check_classes, read_plain
from reproduction.training.evaluate import TOP, Predicted, Scorer, Scores, build_metrics, predict
from reproduction.training.ranks import World, join_world, on_ranks, resolve_device


class Evaluated(NamedTuple):
    """What the evaluation of a checkpoint has found."""

    scores: Scores | None  # None: the images have no classes
    facts: dict[str, Any]  # the scores, and what they are of
    predictions: "Predictions"


class Predictions(NamedTuple):
    """Predictions in the order of the data set: `images` are paths, or positions in it."""

    images: list[str]
    classes: list[str]
    targets: np.ndarray | None  # n, None: the images have no classes
    best: np.ndarray  # n k, the most probable class first
    probabilities: np.ndarray  # n k


def evaluate_checkpoint(
    config: Config, checkpoints: list[Path], images: Path | None = None
) -> Evaluated:
    """Evaluates the first readable checkpoint, on one rank or many.

    On the held-out images, or on `images`, a folder without classes. Raises UserError if the
    checkpoint does not fit the model, PlainError if a rank dies or memory runs out.
    """
    return on_ranks(partial(_evaluate, checkpoints=checkpoints, images=images), config)


def _evaluate(config: Config, checkpoints: list[Path], images: Path | None) -> Evaluated:
    """Evaluates on this rank."""
    precision = config.recipe.precision
    with join_world(resolve_device(config.device, config.devices, precision)) as world:
        weights, loaded = read_plain(checkpoints)
        data = data_for(weights, config, images)
        model = build_trained(config.model, weights, len(data.classes))
        place(model, world.device)
        normalize = build_normalize(config.dataset.mean, config.dataset.std, world.device)
        pin = world.device.type == "cuda"
        loader = build_evaluation_loader(config, data.held_out, world.rank, world.size, pin)
        batches = progress(loader, "evaluation", len(loader))
        scorer = Scorer(build_metrics(config.recipe), world) if images is None else None
        found = gathered(predict(model, normalize, batches, world, precision, scorer), world, data)
        facts = {
            "images": len(data.held_out),
            "dataset": config.dataset.name,
            "root": config.dataset.root,
            "settings": settings_of_evaluation(config),
            **loaded,
        }
        if scorer is None:
            return Evaluated(None, facts, found)
        scores = scorer.scores()
        targets = np.array(data.held_out.targets)
        return Evaluated(scores, {**scores.held_out, **facts}, found._replace(targets=targets))


def data_for(weights: Weights, config: Config, images: Path | None) -> Data:
    """Opens the held-out images, or a folder without classes; UserError if weights do not fit."""
    if images is None:
        data = opened(replace(config.dataset, limit=None, validation=0.0))
        if weights.classes is not None:
            check_classes(weights.origin, weights.classes, data.classes)
        return data
    if weights.classes is None:
        raise UserError(f"{weights.origin}: names no classes, which images={images} cannot either")
    return unlabelled(images, weights.classes)


def gathered(batches: list[Predicted], world: World, data: Data) -> Predictions:
    """Returns the predictions of all ranks, each of which has those of its batches."""
    on_host = tree_map_only(Tensor, Tensor.cpu, batches)
    of_all = [batch for of_rank in world.gather(on_host) for batch in of_rank]
    order = np.concatenate([batch.places for batch in of_all]).argsort()
    return Predictions(
        images=[data.held_out.name(index) for index in range(len(data.held_out))],
        classes=data.classes,
        targets=None,
        best=torch.cat([batch.best for batch in of_all]).numpy()[order],
        probabilities=torch.cat([batch.probabilities for batch in of_all]).numpy()[order],
    )


def write_predictions(path: Path, found: Predictions) -> None:
    """Writes a line for each image: its class, the predicted one, and the best with probability.

    Images without classes have no column of them.
    """
    names = np.array(found.classes, dtype=object)
    columns: dict[str, Any] = {"image": found.images}
    if found.targets is not None:
        columns["class"] = names[found.targets]
    for index in range(found.best.shape[1]):
        suffix = "" if index == 0 else f"_{index + 1}"
        columns[f"predicted{suffix}"] = names[found.best[:, index]]
        columns[f"probability{suffix}"] = found.probabilities[:, index]
    write_text(path, pd.DataFrame(columns).to_csv(index=False, float_format="%.6g"))


def write_classes(path: Path, found: Predictions) -> None:
    """Writes the images and the accuracy of each class, of images with classes."""
    assert found.targets is not None
    hits = found.best == found.targets[:, None]  # n k
    columns: dict[str, Any] = {
        "class": pd.Categorical.from_codes(found.targets, found.classes),
        "images": 1,
        "top1": 100 * hits[:, 0],
        "top5": 100 * hits.any(axis=1),
    }
    by_class = pd.DataFrame(columns).groupby("class", observed=False)
    table = by_class.agg({"images": "sum", "top1": "mean", "top5": "mean"})
    if len(found.classes) <= TOP:
        del table["top5"]
    write_text(path, table.to_csv(float_format="%.2f"))
