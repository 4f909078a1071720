"""Finished runs that were never trained: copies of one with other settings and results."""

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tests.programs import Run


def write(
    model: Run,
    name: str,
    settings: Mapping[str, Any],
    seed: int = 0,
    age: int | None = None,
    **summary: Any,
) -> Path:
    """Copies a finished run, without its pictures, with other settings and entries of its summary.

    Of several runs the one of the largest `age` is the newest.
    """
    folder = Path("outputs", name)
    shutil.copytree(model.path, folder, ignore=shutil.ignore_patterns("checkpoints", "*.png"))
    config = model.config | {"seed": seed}
    for key, value in settings.items():
        *groups, last = key.split(".")
        part = config
        for group in groups:
            part = part[group]
        part[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    top1 = summary.get("top1_last", 80.0)
    (line,) = model.summary["log"]
    log = [line | {"top1": top1, "eval_loss": summary.pop("loss", 1.0)}]
    best = {"top1_best": top1 + 0.5, "top1_median10": top1}
    written = model.summary | {"log": log, "seed": seed} | best | summary
    del written["run_hash"]  # as of a revision that recorded none
    if age is not None:
        began = datetime.fromtimestamp(1_000_000 + age, UTC).isoformat()
        written["starts"] = [start | {"began": began} for start in written["starts"]]
    (folder / "summary.json").write_text(json.dumps(written))
    return folder
