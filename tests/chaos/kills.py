"""SIGKILL at random moments, for all processes of a run or for one rank."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.chaos.child import Notes
from tests.chaos.runs import Outcome, Place, differences, kill_group, wait_for_step

# phase of a kill -> seconds within which it happens
SPANS = {"loading": 0.02, "step": 0.05, "log line": 0.002, "evaluation": 0.3, "checkpoint": 0.02}
LEAD = 6  # maximum number of new steps before a kill
KILLS_OF_A_RUN = 10
VARIANTS = (
    (),
    ("recipe.ema_decay=0.9",),
    ("recipe.grad_accum_steps=2",),
    ("recipe.precision=bf16",),
    ("recipe.optimizer=sgd", "recipe.schedule_step=epoch"),
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
Kill = dict[str, Any]


@dataclass(frozen=True)
class Moments:
    """Random moments of a run until `deadline`, by time.monotonic()."""

    rng: np.random.Generator
    deadline: float

    def are_over(self) -> bool:
        return time.monotonic() > self.deadline

    def wait(self, process: subprocess.Popen[bytes], notes: Notes, reached: int) -> bool:
        """Waits for a moment after step `reached`; returns False if the run ends first."""
        phase = str(self.rng.choice(list(SPANS)))
        step = reached + int(self.rng.integers(1, LEAD + 1))
        arrived = wait_for_step(process, notes, step, phase)
        time.sleep(self.rng.uniform(0, SPANS[phase]))
        return arrived and process.poll() is None


def kill_runs(place: Place, kills: int, moments: Moments) -> Outcome:
    """Kills all processes of runs, each time after a step that no earlier process reached."""
    done: list[Kill] = []
    failures: list[str] = []
    runs = 0
    while len(done) < kills and not failures and not moments.are_over():
        variant = VARIANTS[runs % len(VARIANTS)]
        args = ("checkpoint.every_minutes=1e-6", "dataset.workers=2", f"seed={runs}", *variant)
        most = min(KILLS_OF_A_RUN, kills - len(done))
        done += _killed(place, f"killed-{runs}", args, most, moments)
        failures += _compared(place, f"killed-{runs}", f"whole-{runs}", args)
        runs += 1
    counts = {"kills": len(done), "asked": kills, "runs": runs}
    return Outcome("SIGKILL of the whole run", counts, failures, _by_phase(done))


def _killed(
    place: Place, name: str, args: Sequence[str], most: int, moments: Moments
) -> Iterator[Kill]:
    """Starts and kills a run up to `most` times, or until it finishes."""
    reached = 0
    for _ in range(most):
        if moments.are_over():
            return
        with place.started(name, *args) as process:
            notes = place.notes(name)
            if not moments.wait(process, notes, reached):
                return
            note = notes.read()
            kill_group(process)
        reached = note.step
        yield {"phase": note.phase, "step": note.step}


def kill_ranks(place: Place, kills: int, moments: Moments) -> Outcome:
    """Kills single ranks of a run that torchrun restarts."""
    args = ("checkpoint.every_minutes=1e-6", "dataset.workers=1", "recipe.epochs=16")
    done: list[Kill] = []
    launcher = (*TORCHRUN, f"--max-restarts={kills}")
    with place.started("ranks", *args, launcher=launcher) as process:
        first, reached = place.notes("ranks"), 0
        while len(done) < kills and not moments.are_over():
            if not moments.wait(process, first, reached):
                break
            rank = int(moments.rng.integers(2))
            note = place.notes("ranks", rank).read()
            os.kill(note.process, signal.SIGKILL)
            reached = first.read().step
            done.append({"phase": note.phase, "step": note.step, "rank": rank})
        status = process.wait(600)
    failures = _compared(place, "ranks", "ranks-whole", args, launcher=TORCHRUN)
    counts = {"kills": len(done), "asked": kills, "of rank 0": sum(not k["rank"] for k in done)}
    failures += [f"torchrun ended with status {status}"] if status else []
    return Outcome("SIGKILL of one of two ranks", counts, failures, _by_phase(done))


def _compared(
    place: Place, name: str, undisturbed: str, args: Sequence[str], launcher: tuple[str, ...] = ()
) -> list[str]:
    """Finishes a run and returns its differences from an undisturbed one."""
    return (
        place.finish(name, *args, launcher=launcher)
        or place.finish(undisturbed, *args, launcher=launcher)
        or differences(place.folder(name), place.folder(undisturbed))
    )


def _by_phase(kills: Sequence[Kill]) -> list[dict[str, Any]]:
    """Counts the kills of each phase."""
    phases = dict.fromkeys((*SPANS, *(kill["phase"] for kill in kills)))
    return [
        {"phase": phase, "kills": sum(kill["phase"] == phase for kill in kills)} for phase in phases
    ]
