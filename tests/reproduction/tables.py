"""Run folders as a finished, failed or running training leaves them, and the tables of them."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reproduction.cells import read_cells
from reproduction.config import Config
from reproduction.reporting.collect import Collection, collect
from reproduction.reporting.paper import read_paper
from reproduction.reporting.records import Counts
from reproduction.reporting.tables import TABLES, Table, build_table

Configs = Mapping[str, Config]
COUNTS = {
    (row.table, row.row): Counts(3_760_000, 1_180_000_000, 950_000_000) for row in read_paper()
}


def write_run(outputs: Path, config: Config, seed: int = 0, name: str = "", **changes: Any) -> Path:
    """A finished run with top-1 80 + seed, best half a point above; `changes` to its summary."""
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
    """Of when the summary was written."""
    os.utime(folder / "summary.json", (seconds, seconds))


def shortened(configs: Configs) -> dict[str, Config]:
    """The same cells trained for one epoch."""
    return {
        name: dataclasses.replace(
            config, recipe=dataclasses.replace(config.recipe, epochs=1, warmup_epochs=0)
        )
        for name, config in configs.items()
    }


def tables_of(
    outputs: Path, configs: Configs, scale: str = "full"
) -> tuple[dict[int, Table], Collection]:
    """Tables 1 to 5 of what is under `outputs`."""
    collection = collect(outputs, configs)
    tables = {
        number: build_table(
            number,
            scale,
            cells=read_cells(),
            configs=configs,
            collection=collection,
            papers=read_paper(),
            counts=COUNTS,
        )
        for number in TABLES
    }
    return tables, collection
