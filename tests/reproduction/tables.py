"""Helpers that write run folders and build the report's tables from them."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from reproduction.config import Config
from reproduction.reporting.collect import Collection
from reproduction.reporting.model_stats import Counts, read_paper
from reproduction.reporting.records import Sources
from reproduction.reporting.tables import TABLES, Table
from reproduction.studies.overview import build_tables, read_sources

Configs = Mapping[str, Config]
COUNTS = {
    (row.table, row.row): Counts(3_760_000, 1_180_000_000, 950_000_000) for row in read_paper()
}


def write_run(outputs: Path, config: Config, seed: int = 0, name: str = "", **changes: Any) -> Path:
    """Writes a finished run with top-1 80 + seed and best top-1 half a point above.

    `changes` are applied to its summary.
    """
    raw = dataclasses.asdict(dataclasses.replace(config, seed=seed))
    folder = outputs / (name or f"run{len(list(outputs.iterdir()))}")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    last = changes.pop("top1", 80.0 + seed)
    summary = {
        "status": "finished",
        "seed": seed,
        **{"top1_last": last, "top1_best": last + 0.5, "top1_median10": last - 0.25},
        **{"top5_last": 95.0, "top5_best": 96.0},
        **{"epochs": config.recipe.epochs, "steps": 1000, "seconds": 7200.0, "devices": 1},
        **{"parameters": 3_760_000, "macs": 1_180_000_000, "git_revision": "ab" * 20},
        **changes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def set_time(folder: Path, seconds: int) -> None:
    """Sets the modification time of the summary."""
    os.utime(folder / "summary.json", (seconds, seconds))


def shortened(configs: Configs) -> dict[str, Config]:
    """Returns the same cells trained for one epoch."""
    return {
        name: dataclasses.replace(
            config, recipe=dataclasses.replace(config.recipe, epochs=1, warmup_epochs=0)
        )
        for name, config in configs.items()
    }


def sources_of(outputs: Path, configs: Configs, scale: str = "full") -> Sources:
    """Reads the sources of the report of `outputs`."""
    return read_sources(outputs, scale, configs, COUNTS)


def all_tables(outputs: Path, configs: Configs, scale: str = "full") -> list[Table]:
    """Builds all tables of the report of `outputs`."""
    return build_tables(sources_of(outputs, configs, scale))


def tables_of(
    outputs: Path, configs: Configs, scale: str = "full"
) -> tuple[dict[int, Table], Collection]:
    """Builds Tables 1 to 5, by number, and the collection of runs."""
    sources = sources_of(outputs, configs, scale)
    return dict(zip(TABLES, build_tables(sources), strict=False)), sources.collection


def sweep_of(outputs: Path, configs: Configs, name: str) -> Table:
    """Builds the table of one sweep."""
    (table,) = (x for x in all_tables(outputs, configs) if x.name == name)
    return table


def write_metrics(path: Path, epochs: Sequence[Sequence[tuple[float, float, float]]]) -> Path:
    """Writes metrics; `epochs` hold (mixed samples, mixed tokens, difficulty) of each batch."""
    lines: list[dict[str, float]] = []
    step = 0
    for number, batches in enumerate(epochs, start=1):
        for samples, tokens, difficulty in batches:
            step += 1
            row = {"mixed_samples": samples, "mixed_tokens": tokens, "difficulty": difficulty}
            lines.append({"step": step, "epoch": number, "loss": 1.0, **row})
        lines.append({"epoch": number, "top1": 50.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rising(epochs: int, batch_size: int = 128) -> list[list[tuple[float, float, float]]]:
    """Returns epochs shaped like Figure 4: few samples, an abrupt rise after 5 %, convergence."""
    batches = []
    for epoch in range(epochs):
        after = epoch / epochs - 0.05
        share = 0.05 if after < 0 else 0.5 + 0.25 * (1 - math.exp(-8 * after))
        batches.append([(round(share * batch_size), 60.0, 4.5 - 3 * share)] * 2)
    return batches
