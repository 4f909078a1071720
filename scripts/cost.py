"""Estimates the hours of studies on this machine: `make cost STUDIES="table1 ..."`.

A training step of each row is timed on random images, at the row's own batch if the device has the
memory for it; on a CPU at 16 images for every row. HTM mixes every sample, its most expensive case.
Hours: all epochs and evaluations, in which an image costs a third of a training image; images are
not loaded. A CPU trains in float32. Without STUDIES: all of the paper, where a run that studies
share counts in the first of them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from reproduction.compose import Point
from reproduction.config import Config, Dataset, Fixed
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import opened
from reproduction.errors import Parser, PlainError, one_line_errors, say
from reproduction.studies.study import FULL, planned
from reproduction.training.ranks import resolve_device
from scripts import positive
from scripts.bench import in_turns, machine, training_step

ON_CPU = 16  # images


def images_of(dataset: Dataset) -> Fixed:
    """Returns what is known of a data set, and looks into any other."""
    if dataset.fixed is not None:
        train = dataset.limit or dataset.fixed.train
        held_out = dataset.eval_limit or dataset.fixed.held_out
        return dataset.fixed._replace(train=train, held_out=held_out)
    data = opened(replace(dataset, validation=0.0))
    return Fixed(len(data.train), len(data.held_out), len(data.classes))


def work_of(config: Config, images: Fixed) -> float:
    """Returns what a run does, in training images: three that are evaluated count as one."""
    evaluations = math.ceil(config.recipe.epochs / config.recipe.evaluate_every)
    for_validation = round(images.train * config.dataset.validation)
    evaluated = evaluations * images.held_out
    if for_validation:  # and held-out images are tested with the last weights and the best
        evaluated = evaluations * for_validation + 2 * images.held_out
    batches = TrainingBatches(config, images.train - for_validation, rank=0, ranks=1)
    return config.recipe.epochs * batches.epoch_images + evaluated / 3


def speed(words: Sequence[str], config: Config, classes: int, device: str) -> dict[str, Any]:
    """Times a training step: the images in it, and images per second."""
    words = [*words, "devices=1"]
    if config.augmentation.htm is not None:
        words.append("augmentation.htm.tau=inf")
    images = config.recipe.batch_size
    if device == "cpu":
        words.append("recipe.precision=float32")
        images = ON_CPU
    while True:
        try:
            step = training_step(words, classes, images)
            ms = in_turns({"step": step}, 3, device)["step"].median()
            return {"timed with": images, "images/s": 1000 * images / ms}
        except (torch.OutOfMemoryError, PlainError):
            if images == 1:
                raise
            images //= 2


def cost(point: Point, device: str) -> dict[str, Any]:
    """Returns the row of a run, but for how many there are of it."""
    config = point.config
    images = images_of(config.dataset)
    row = {"batch": config.recipe.batch_size}
    row |= speed(point.words, config, images.classes, device)
    return row | {"hours": work_of(config, images) / row["images/s"] / 3600}


def in_words(hours: float) -> str:
    """Says hours, which may be years."""
    for unit, size in (("years", 24 * 365.25), ("days", 24.0)):
        if hours >= 2 * size:
            return f"{hours:,.1f} hours, {hours / size:,.1f} {unit}"
    return f"{hours:,.1f} hours"


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("studies", nargs="*", default=["all"], help="such as table1")
    parser.add_argument("--seeds", type=positive, help="seeds per run (default: the study's)")
    args = parser.parse_args()
    device = resolve_device("auto", 1)
    points = []
    for name in args.studies:
        points += planned(name, args.seeds, FULL, [])[0]
    counts = Counter(each.label for each in points)
    rows = dict[str, Any]()
    for each in points:
        label = each.label
        if label not in rows:
            say(f"measuring {label}")
            rows[label] = {"runs": counts[label], **cost(each, device)}
    table = pd.DataFrame.from_dict(rows, orient="index")
    hours = table.hours * table.runs
    say(f"\n{machine(device)}\n\n{table.astype(object).to_markdown(floatfmt=',.1f')}\n")
    for study, of_rows in hours.groupby(lambda label: label.partition("/")[0], sort=False):
        say(f"{study}: {len(of_rows)} rows, {in_words(of_rows.sum())} with all runs")


if __name__ == "__main__":
    main()
