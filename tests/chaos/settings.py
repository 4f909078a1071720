"""Settings that must not change a result: loader workers, a logger, evaluation ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from reproduction.config import CONF_DIR
from reproduction.data.build import build_evaluation_loader
from reproduction.data.sources import build_source
from reproduction.runs.compose import compose
from reproduction.start.resolve import resolve_evaluation
from tests.chaos.runs import Outcome, Place, differences

SAME = {
    "workers-1": ("dataset.workers=1",),
    "workers-3": ("dataset.workers=3",),
    "wandb": ("logger=wandb", "logger.wandb.mode=offline"),
    "wandb-workers-2": ("logger=wandb", "logger.wandb.mode=offline", "dataset.workers=2"),
}
IMAGES = (11, 10_007)  # primes
EVAL = CONF_DIR.parent / "eval.py"
MODEL = ("model.embed_dim=16", "device=cpu", "dataset=image_folder")


def vary_settings(place: Place) -> Outcome:
    """Trains one run with each setting of SAME and compares it with the default run."""
    failures: list[str] = []
    for name, args in {"workers-0": (), **SAME}.items():
        failures += place.finish(name, "recipe.epochs=4", *args) or differences(
            place.folder(name), place.folder("workers-0")
        )
    return Outcome("0, 1, 3 workers; with and without wandb", {"runs": 1 + len(SAME)}, failures)


def evaluate_in_shares(place: Place) -> Outcome:
    """Evaluates a run of digits on noise images, no two of which are equal."""
    failures = place.finish("evaluated", "recipe.epochs=2")
    checkpoint = place.folder("evaluated").best_path
    rows = []
    for images in IMAGES:
        root = write_images(place.root / f"images-{images}", images)
        args = (f"checkpoint={checkpoint}", *MODEL, f"dataset.root={root}")
        counted = {
            ranks: _counted(place.root / f"evaluated-{images}-{ranks}", ranks, args)
            for ranks in (1, 2, 3)
        }
        rows += [{"images": images, "ranks": ranks, **row} for ranks, row in counted.items()]
        for ranks, row in counted.items():
            if not _agree(row, counted[1]):
                failures.append(f"{images} images, {ranks} ranks: {row} for {counted[1]}")
            failures += loading_errors(images, ranks, args)
    return Outcome("evaluation by 1, 2, 3 ranks", {"evaluations": len(rows)}, failures, rows)


def write_images(root: Path, held_out: int) -> Path:
    """Writes noise of 8 x 8 pixels in ten classes named like those of the digits."""
    rng = np.random.default_rng(0)
    for split, number in (("train", 10), ("val", held_out)):
        for label in range(10):
            (root / split / str(label)).mkdir(parents=True)
        for i in range(number):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / str(i % 10) / f"{i}.png")
    return root


def _counted(output: Path, ranks: int, args: tuple[str, ...]) -> dict[str, Any]:
    """Returns eval.py's numbers of images right by top-1 and top-5; it writes to `output`."""
    command = [sys.executable, str(EVAL), *args, f"devices={ranks}", f"output_root={output}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        return {"error": process.stderr[-300:]}
    (path,) = output.glob("evaluations/*.json")
    result = json.loads(path.read_text())
    right = {key: result[key] * result["images"] / 100 for key in ("top1", "top5")}
    counts = {key: round(count, 6) for key, count in right.items()}
    return counts | {"loss": round(result["eval_loss"], 7)}


def _agree(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether counts are equal and losses nearly so, as the order of a sum changes its rounding."""
    if "error" in row or "error" in other:
        return False
    return row == other | {"loss": row["loss"]} and isclose(
        row["loss"], other["loss"], rel_tol=1e-5
    )


def loading_errors(images: int, ranks: int, args: tuple[str, ...]) -> Iterator[str]:
    """Yields an error unless the ranks' loaders load every image exactly once."""
    config = resolve_evaluation(compose("eval", [*args, f"devices={ranks}"])).config
    source = build_source(config.dataset)
    loaders = [
        build_evaluation_loader(config, source.held_out, rank, ranks, pin=False)
        for rank in range(ranks)
    ]
    batches = [batch for loader in loaders for batch in cast(Any, loader).batch_sampler]
    loaded = [index for batch in batches for index in batch]
    if sorted(loaded) != list(range(images)):
        yield f"{images} images, {ranks} ranks: not each of them once"
