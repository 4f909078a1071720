"""A checkpoint evaluated by itself: accuracy, what it predicts for each image, and tables of it.

Letters: n images, c classes, k the most probable classes.
"""

import json
from dataclasses import replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from reproduction.config import Config
from reproduction.data.halves import Data, in_memory
from reproduction.data.inputs import build_normalize
from reproduction.data.loaders import build_evaluation_loader
from reproduction.data.sources import opened, unlabelled
from reproduction.identity import evaluated
from reproduction.models.build import build_model, place, without_weights
from reproduction.models.weights import matching_state
from reproduction.system import is_first_rank, local_ranks, progress, warn, write_text
from reproduction.training.checkpoint import check_classes, read_plain
from reproduction.training.evaluate import Batch, evaluate
from reproduction.training.ranks import World, join_world, on_ranks, resolve_device


class Predictions(NamedTuple):
    """Predictions in the order of the data set: `images` are paths, or positions in it."""

    images: list[str]
    classes: list[str]
    targets: np.ndarray  # n
    best: np.ndarray  # n k, the most probable class first
    probabilities: np.ndarray  # n k


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
    scores, found = on_ranks(partial(_evaluate, checkpoints=checkpoints, images=images), config)
    if predictions is not None and is_first_rank():
        write_predictions(predictions, found, labelled=images is None)
    if images is None and is_first_rank():
        result.parent.mkdir(parents=True, exist_ok=True)
        write_text(result, json.dumps(scores, indent=2) + "\n")
        if predictions is not None:
            write_tables(result, found)
    return scores


def _evaluate(
    config: Config, checkpoints: list[Path], images: Path | None
) -> tuple[dict[str, Any], Predictions]:
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
        data = in_memory(data, ("held_out",), local_ranks(config.devices))
        model = build_model(without_weights(config.model), len(data.classes))
        model.load_state_dict(matching_state(weights, model))
        normalize = build_normalize(config.dataset.mean, config.dataset.std, world.device)
        pin = world.device.type == "cuda"
        loader = build_evaluation_loader(config, data.held_out, world.rank, world.size, pin)
        batches = progress(loader, "evaluation", length_hint(loader))
        model = place(model, world.device)
        scores, predicted = evaluate(model, normalize, batches, world, precision)
        found = gathered(predicted, world, data)
        facts = {
            "dataset": config.dataset.name,
            "root": config.dataset.root,
            "settings": evaluated(config),
        }
        return {**scores, "images": len(data.held_out), **facts, **loaded}, found


def gathered(batches: list[Batch], world: World, source: Data) -> Predictions:
    """Returns the predictions of all ranks, each of which has those of its batches."""
    own = [torch.cat(parts).cpu().numpy() for parts in zip(*batches, strict=True)]
    number, by_rank = len(source.held_out), world.gather(own)
    # rank r has evaluated the images r, r + size, ..., see `build_evaluation_loader`
    order = np.argsort(
        np.concatenate([np.arange(r, number, world.size) for r in range(world.size)])
    )
    columns = zip(*(part for part in by_rank if part), strict=True)
    targets, best, probabilities = (np.concatenate(parts)[order] for parts in columns)
    names = [source.held_out.name(index) for index in range(number)]
    return Predictions(names, source.classes, targets, best, probabilities)


def write_predictions(path: Path, found: Predictions, labelled: bool = True) -> None:
    """Writes a line for each image: its class, the predicted one, and the best with probability.

    Images that are not `labelled` have no column of their class.
    """
    names, columns = np.array(found.classes, dtype=object), dict[str, Any](image=found.images)
    if labelled:
        columns["class"] = names[found.targets]
    for rank, (best, values) in enumerate(zip(found.best.T, found.probabilities.T, strict=True)):
        suffix = f"_{rank + 1}" if rank else ""
        columns |= {f"predicted{suffix}": names[best], f"probability{suffix}": values}
    _write_csv(path, pd.DataFrame(columns), index=False, float_format="%.6g")


def write_tables(result: Path, found: Predictions) -> None:
    """Writes accuracy per class and confusion matrix beside `result`, a JSON file."""
    names, targets = found.classes, found.targets
    counts = np.zeros((len(names),) * 2, dtype=np.int64)  # by class and prediction
    np.add.at(counts, (targets, found.best[:, 0]), 1)
    hits = np.bincount(targets[(found.best == targets[:, None]).any(axis=1)], minlength=len(names))
    totals = counts.sum(axis=1)
    shares = [100 * x / np.where(totals > 0, totals, np.nan) for x in (counts.diagonal(), hits)]
    rows = {"images": totals, "top1": shares[0], "top5": shares[1]}
    accuracies, confusion = pd.DataFrame(rows, names), pd.DataFrame(counts, names, names)
    _write_csv(table_path(result, "classes"), accuracies, index_label="class", float_format="%.2f")
    _write_csv(table_path(result, "confusion"), confusion, index_label="class")


def table_path(result: Path, name: str) -> Path:
    """Returns the path of a table beside `result`, as evaluation-last-classes.csv."""
    return result.with_name(f"{result.stem}-{name}.csv")


def _write_csv(path: Path, table: pd.DataFrame, **how: Any) -> None:
    """Writes a table; bytes of a file name that are no text are written as escapes."""
    text: str = table.to_csv(**how)
    write_text(path, text.encode(errors="backslashreplace").decode())
