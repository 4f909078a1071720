"""Helpers that write run folders and build the tables of studies from them."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reproduction.config import Config
from reproduction.studies.plan import studies_of
from reproduction.studies.results import results_of
from reproduction.studies.runs import read_runs
from reproduction.studies.study import Settings
from reproduction.studies.table import Table

Configs = Mapping[str, Config]


def write_run(outputs: Path, config: Config, seed: int = 0, name: str = "", **changes: Any) -> Path:
    """Writes a finished run with top-1 80 + seed and best top-1 half a point above.

    `changes` are applied to its summary.
    """
    raw = dataclasses.asdict(dataclasses.replace(config, seed=seed))
    outputs.mkdir(parents=True, exist_ok=True)
    folder = outputs / (name or f"run{len(list(outputs.iterdir()))}")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    last = changes.pop("top1", 80.0 + seed)
    summary = {
        "status": "finished",
        "seed": seed,
        **{"top1_last": last, "top1_best": last + 0.5, "top1_median10": last - 0.25},
        **{"top5_last": 95.0, "top5_best": 96.0, "mixed_share": 0.25, "mixed_samples": 32.0},
        **{"epochs": config.recipe.epochs, "steps": 1000, "seconds": 7200.0, "devices": 1},
        **{"parameters": 3_760_000, "macs": 1_180_000_000, "git_revision": "ab" * 20},
        "log": [{"epoch": config.recipe.epochs, "top1": last}],
        **changes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def set_time(folder: Path, seconds: int) -> None:
    """Sets the modification time of the summary."""
    os.utime(folder / "summary.json", (seconds, seconds))


def result(outputs: Path, name: str, **settings: Any) -> Table:
    """Returns the table of a study from the runs in `outputs`, without the scale's own folder."""
    (table,), _ = results_of(studies_of(name), Settings(**settings), read_runs(outputs))
    return table
