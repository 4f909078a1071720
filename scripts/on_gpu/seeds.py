"""Part e: the next unfinished seeds of the studies in results/ that name a GPU, whole ones."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from reproduction.runs.identity import run_hash
from reproduction.start.processes import shares
from reproduction.studies.launch import prepare, train_all_apart
from reproduction.studies.plan import PlannedRun, plan
from reproduction.studies.publish import RESULTS, publish
from reproduction.studies.runs import read_store
from reproduction.studies.study import Settings
from reproduction.system.errors import RunInterrupted
from scripts.on_gpu.sheet import Sheet

SAVING = 30.0  # seconds for runs to stop after a step and save
TITLE = "seeds"


class Seed(NamedTuple):
    """A seed of a study: its runs that are not published, and what trained others or parts."""

    study: Path
    number: int
    runs: list[PlannedRun]
    hardware: set[str | None]

    def __str__(self) -> str:
        return f"{self.study.stem}, seed {self.number}"

    @property
    def is_whole(self) -> bool:
        return all(run.is_done() for run in self.runs)


def train_seeds(sheet: Sheet, jobs: int) -> None:
    """Trains seed by seed, `jobs` runs at a time, and stops them in time to be resumed.

    A whole seed is published: lines in results/ beside the sheet. One that
    was begun on another card is left to that.
    """
    settings = Settings(outputs=str(sheet.path.parent.parent))
    for seed in unfinished(sheet, settings):
        name = str(seed)
        sheet.put(TITLE, name, progress(seed))
        if sheet.seconds_left < 2 * SAVING:
            return  # too little time to train and save
        if seed.hardware and sheet.head["hardware"] not in seed.hardware:
            cards = {"waits for": " or ".join(sorted(map(str, seed.hardware)))}
            sheet.put(TITLE, name, progress(seed) | cards)
            continue
        stop = (os.getpid(), signal.SIGTERM)  # as the end of a job does
        timer = threading.Timer(sheet.seconds_left - SAVING, os.kill, stop)
        timer.start()
        try:
            with sheet.trying(TITLE, name):
                prepare(seed.runs, settings)
                failed = train_all_apart(seed.runs, shares(jobs, 1), settings.root / ".logs")
                why = {"failed": "; ".join(failed.values())[:300]} if failed else {}
                sheet.put(TITLE, name, progress(seed) | why)
        except RunInterrupted:
            sheet.put(TITLE, name, progress(seed))
            return
        finally:
            timer.cancel()
        if seed.is_whole:
            with sheet.trying(TITLE, name):
                sheet.put(TITLE, name, progress(seed) | publish_seed(seed, settings))


def progress(seed: Seed) -> dict[str, str]:
    """How many runs are done, and whether some are to be trained."""
    done = sum(run.is_done() for run in seed.runs)
    row = {"runs": f"{done} of {len(seed.runs)} here"}
    return row if seed.is_whole else row | {"partly": "to be trained"}


def unfinished(sheet: Sheet, settings: Settings) -> Iterator[Seed]:
    """Yields the seeds that are not published, in results/ or here, of studies that name a GPU."""
    stores = [read_store(folder) for folder in (RESULTS, published(settings))]
    done = {(run.key, run.seed): run.hardware for store in stores for run in store.itertuples()}
    for path in sorted(RESULTS.glob("*.yaml")):
        planned: dict[int, list[PlannedRun]] = {}
        with sheet.trying(TITLE, path.stem):  # a pilot may be left to do
            for run in plan(str(path), settings) if "GPU" in path.read_text() else ():
                planned.setdefault(run.config.seed, []).append(run)
        for number, runs in planned.items():
            keys = [(run_hash(replace(run.config, seed=0)), number) for run in runs]
            left = [run for run, key in zip(runs, keys, strict=True) if key not in done]
            begun = [run.folder.read_summary().get("hardware") for run in left]
            if left:
                hardware = {*map(done.get, keys), *begun} - {None}
                yield Seed(path, number, left, hardware)


def published(settings: Settings) -> Path:
    """The folder of lines as in results/; all that is kept of a machine lies in outputs."""
    return Path(settings.outputs, "on-gpu", "results")


def publish_seed(seed: Seed, settings: Settings) -> dict[str, str]:
    """Adds the lines of a whole seed; its study lies beside them, as in results/."""
    folder = published(settings)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(seed.study, folder)
    for run in seed.runs:
        lines = publish(run.folder.path, folder)
    return {"published in": str(lines)}
