"""Part e: the next unfinished seeds of the studies in results/ that name a GPU, whole ones."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reproduction.runs.identity import run_hash
from reproduction.start.processes import shares
from reproduction.studies.launch import prepare, train_all_apart
from reproduction.studies.plan import PlannedRun, plan
from reproduction.studies.publish import RESULTS
from reproduction.studies.runs import read_store
from reproduction.studies.study import Settings
from reproduction.system.errors import RunInterrupted
from scripts.on_gpu.sheet import Sheet

SAVING = 30.0  # seconds for runs to stop after a step and save
TITLE = "seeds"

Seed = tuple[str, list[PlannedRun]]  # name, all runs


def train_seeds(sheet: Sheet, jobs: int) -> None:
    """Trains seed by seed, `jobs` runs at a time, and stops them in time to be resumed."""
    settings = Settings(outputs=str(sheet.path.parent.parent))
    for name, runs in unfinished(RESULTS, settings):
        sheet.put(TITLE, name, progress(runs))
        if sheet.seconds_left < 2 * SAVING:
            return  # too little time to train and save
        stop = (os.getpid(), signal.SIGTERM)  # as the end of a job does
        timer = threading.Timer(sheet.seconds_left - SAVING, os.kill, stop)
        timer.start()
        try:
            with sheet.trying(TITLE, name):
                prepare(runs, settings)
                failed = train_all_apart(runs, shares(jobs, 1), settings.root / ".logs")
                why = {"failed": "; ".join(failed.values())[:300]} if failed else {}
                sheet.put(TITLE, name, progress(runs) | why)
        except RunInterrupted:
            sheet.put(TITLE, name, progress(runs))
            return
        finally:
            timer.cancel()


def progress(runs: list[PlannedRun]) -> dict[str, str]:
    """How many runs are done, and whether some are to be trained."""
    done = sum(run.is_done() for run in runs)
    row = {"runs": f"{done} of {len(runs)} here"}
    return row if done == len(runs) else row | {"partly": "to be trained"}


def unfinished(results: Path, settings: Settings) -> Iterator[Seed]:
    """Yields the runs that are not published, seed by seed, of the studies that name a GPU."""
    store = read_store(results)
    published = {*zip(store.key, store.seed, strict=True)}
    for path in sorted(results.glob("*.yaml")):
        if "GPU" not in path.read_text():
            continue
        seeds: dict[int, list[PlannedRun]] = {}
        for run in plan(str(path), settings):
            seed = run.config.seed
            if (run_hash(replace(run.config, seed=0)), seed) not in published:
                seeds.setdefault(seed, []).append(run)
        for seed, runs in seeds.items():
            if not all(run.is_done() for run in runs):
                yield f"{path.stem}, seed {seed}", runs
