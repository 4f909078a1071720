"""Processes that want one run folder at the same time."""

import os
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import locking
from reproduction.chaos.runs import Outcome
from reproduction.errors import RunLocked
from reproduction.locking import hold, is_held
from reproduction.runs import RunFolder

PATIENCES = (0.5, 0.0)  # of the processes, in turn: to come one after the other, or be refused


def contend(root: Path, processes: int, rounds: int) -> Outcome:
    """All start in the same moment, again and again; at most one may be in the folder."""
    root.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")
    barrier, told = context.Barrier(processes), context.SimpleQueue()
    workers = [
        context.Process(target=_want, args=(root, number, rounds, barrier, told))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    rows: list[dict[str, int]] = []
    while len(rows) < processes and any(worker.is_alive() for worker in workers):
        if told.empty():
            time.sleep(0.05)
        else:
            rows.append(told.get())
    for worker in workers:
        worker.join()
    while not told.empty():
        rows.append(told.get())
    statuses = [worker.exitcode for worker in workers]
    total = {key: sum(row[key] for row in rows) for key in ("held", "refused", "together")}
    found = [f"{total['together']} times two at once"] if total["together"] else []
    found += [f"{processes - len(rows)} processes told nothing"] if len(rows) < processes else []
    found += [f"processes ended with status {statuses}"] if any(statuses) else []
    return Outcome("lock", {"starts": processes * rounds, **total}, found)


def _want(root: Path, number: int, rounds: int, barrier: Barrier, told: Any) -> None:
    """Holds the folder for a moment; every second time a run begins there, else nothing is left."""
    rng = np.random.default_rng(number)
    locking.PATIENCE = PATIENCES[number % len(PATIENCES)]
    counts = {"held": 0, "refused": 0, "together": 0}
    for turn in range(rounds):
        folder = RunFolder(root / f"run-{turn % 3}")
        barrier.wait(60)
        is_held(folder)
        try:
            with hold(folder):
                counts["held"] += 1
                counts["together"] += _meets_another(root, rng.uniform(0, 0.003))
                folder.config_path.unlink(missing_ok=True)
                if turn % 2:
                    folder.config_path.touch()
        except RunLocked:
            counts["refused"] += 1
    told.put(counts)


def _meets_another(root: Path, seconds: float) -> bool:
    """Whether another process is in the folder within these seconds."""
    inside = root / "inside"
    try:
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    time.sleep(seconds)
    inside.unlink(missing_ok=True)
    return False
