"""Estimates the hours of studies on this machine: `make cost STUDIES="table1 ..."`.

A training step of each row is timed on random images, at the row's own batch if the device has the
memory for it; on a CPU at 16 images for every row. HTM mixes every sample, its most expensive case.
Hours: all epochs, in which a held-out image costs a third of a training image; images are not
loaded. A CPU trains in float32. Without STUDIES: all of the paper, where a run that studies share
counts in the first of them.
"""

import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from reproduction.config import Config
from reproduction.data.sources import opened
from reproduction.studies.study import FULL, plan, studies
from reproduction.system import Parser, PlainError, hardware_name, one_line_errors, say
from reproduction.training.ranks import resolve_device
from scripts import positive
from scripts.bench import in_turns, training_step

ON_CPU = 16  # images
SIZES = {"cifar10": (50_000, 10_000, 10), "cifar100": (50_000, 10_000, 100)}  # train, held out, ...
SIZES["imagenet1k"] = (1_281_167, 50_000, 1000)  # ... classes


def speed(words: Sequence[str], config: Config, classes: int, device: str) -> dict[str, Any]:
    """Times a training step: the images in it, and images per second."""
    images = config.recipe.batch_size if device == "cuda" else ON_CPU
    words = [*words, "devices=1", *["augmentation.htm.tau=inf"] * bool(config.augmentation.htm)]
    words += ["recipe.precision=float32"] * (device == "cpu")
    while True:
        try:
            step = training_step(words, classes, images)
            ms = in_turns({"step": step}, 3, device)["step"].median()
            return {"timed with": images, "images/s": 1000 * images / ms}
        except (torch.OutOfMemoryError, PlainError):
            if images == 1:
                raise
            images //= 2


@one_line_errors("cost.py")
def main() -> None:
    parser = Parser(prog="cost.py", description=__doc__)
    parser.add_argument("studies", nargs="*", default=["all"], help="such as table1")
    parser.add_argument("--seeds", type=positive, help="seeds per run (default: the study's)")
    args = parser.parse_args()
    device, rows = resolve_device("auto", 1), dict[str, Any]()
    for run in (x for name in args.studies for x in plan(studies(name), args.seeds, FULL, [])):
        config, label = run.config, run.label
        if label not in rows:
            say(f"measuring {label}")
            if config.dataset.name not in SIZES:
                data = opened(config.dataset)
                SIZES[config.dataset.name] = len(data.train), len(data.per_epoch), len(data.classes)
            train, held_out, classes = SIZES[config.dataset.name]
            images = config.recipe.epochs * (train + held_out / 3)
            row: dict[str, Any] = {"runs": 0, "batch": config.recipe.batch_size}
            row |= speed(run.words, config, classes, device)
            rows[label] = row | {"hours": images / row["images/s"] / 3600}
        rows[label]["runs"] += 1
    table = pd.DataFrame.from_dict(rows, orient="index")
    total = table[["hours"]].mul(table.runs, axis=0)
    sums = total.groupby(lambda label: label.partition("/")[0], sort=False).sum()
    say(f"\n{hardware_name(device)}, load average {os.getloadavg()[0]:.1f}\n")
    for title, frame in (("A run", table), ("These runs", sums)):
        say(f"{title}:\n\n{frame.astype(object).to_markdown(floatfmt=',.1f')}\n")


if __name__ == "__main__":
    main()
