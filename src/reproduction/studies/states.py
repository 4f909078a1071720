"""The progress of planned runs, read from their folders and shown as a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from reproduction.reporting.curves import lines_backwards
from reproduction.runs.folder import RunFolder, run_hash
from reproduction.runs.locking import Status, status_of
from reproduction.studies.cost import FILE, hours_text, read_costs, run_hours, speed_key
from reproduction.studies.plan import PlannedRun, Settings
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.hardware import hardware_name
from reproduction.system.reading import parse_json

COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class State:
    """The progress of a run: evaluated epochs, and the last `top1` in percent.

    `hours` belongs to finished runs, `error` to failed ones.
    """

    status: Status
    epochs: int = 0
    top1: float | None = None
    hours: float | None = None
    error: str | None = None


def read_state(folder: RunFolder) -> State:
    """Reads the state of one run; UserError if its summary or metrics are not readable."""
    summary = folder.read_summary()
    status = status_of(folder, summary)
    try:
        if status == "finished":
            return State(
                status=status,
                epochs=int(summary["epochs"]),
                top1=float(summary["top1_last"]),
                hours=float(summary["seconds"]) / 3600,
            )
        last = _last_epoch(folder)
        top1 = float(last["top1"]) if "top1" in last else None  # unknown with a validation split
        epochs = int(last["epoch"]) if last else 0
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(f"{folder.path}: not readable: {first_line(error)}") from error
    cause = summary.get("error") if status == "failed" else None
    reason = None if cause is None else in_one_line(str(cause))
    return State(status=status, epochs=epochs, top1=top1, error=reason)


def _last_epoch(folder: RunFolder) -> dict[str, Any]:
    """Returns the line of the last complete epoch, or an empty mapping before the first."""
    if not folder.metrics_path.exists():
        return {}
    lines = islice(lines_backwards(folder.metrics_path), 1, None)  # without a truncated line
    return next((parse_json(line) for line in lines if b'top1"' in line), {})


def state_table(runs: Sequence[PlannedRun], settings: Settings, with_folders: bool) -> Table:
    """Returns a row for each run.

    Hours are measured; `~` marks estimates from other seeds of the run, or else from the speed
    measured on this hardware.
    """
    states: list[tuple[PlannedRun, State]] = []
    measured: dict[str, list[float]] = {}
    for run in runs:
        try:
            state = read_state(run.folder)
        except (UserError, OSError) as error:
            state = State(status="failed", error=str(error))
        if state.hours is not None:
            measured.setdefault(_without_seed(run), []).append(state.hours)
        states.append((run, state))
    estimated = _estimated(runs, settings)
    counts = Counter(state.status for _, state in states)
    summary = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    table = Table("run", "seed", "status", "epochs", "top-1", "hours", caption_justify="left")
    table.caption = f"{len(states)} run{'s' * (len(states) != 1)}: {summary}"
    is_unknown = False
    if with_folders:
        table.add_column("folder", overflow="fold")
    for run, state in states:
        others = measured.get(_without_seed(run))
        likely = fmean(others) if others else estimated.get(run.name)
        if state.hours is not None:
            hours = hours_text(state.hours)
        else:
            hours = "" if likely is None else f"~{hours_text(likely)}"
        table.add_row(
            escape("\n".join(run.labels)),
            str(run.config.seed),
            _described(state),
            f"{state.epochs}/{run.config.recipe.epochs}",
            "" if state.top1 is None else f"{state.top1:.2f}",
            hours,
            *([escape(str(run.folder.path))] if with_folders else []),
        )
        is_unknown |= not hours
    if is_unknown and not settings.uses_stand_ins:
        table.caption += "\nfor the missing hours, make cost measures this machine"
    return table


def _estimated(runs: Sequence[PlannedRun], settings: Settings) -> dict[str, float]:
    """Returns hours by run name, for runs whose speed was measured on this hardware."""
    costs = read_costs(Path(settings.outputs, FILE))
    if not costs or not runs:  # naming a GPU would import torch
        return {}
    speeds = costs.get(hardware_name(runs[0].config.device), {})
    return {
        run.name: run_hours(run.config, speed)
        for run in runs
        if (speed := speeds.get(speed_key(run.config))) is not None
    }


def _without_seed(run: PlannedRun) -> str:
    return run_hash(replace(run.config, seed=0))


def _described(state: State) -> str:
    colour = COLOURS.get(state.status)
    text = state.status if colour is None else f"[{colour}]{state.status}[/]"
    return text if state.error is None else f"{text}: {escape(state.error)}"
