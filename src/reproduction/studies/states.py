"""How far planned runs are: read from their folders, shown as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from reproduction.reporting.curves import lines_backwards
from reproduction.runs.folder import RunFolder, run_hash
from reproduction.runs.locking import is_held
from reproduction.studies.cost import FILE, hours_text, read_costs, run_hours, speed_key
from reproduction.studies.plan import PlannedRun, Settings
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.hardware import hardware_name
from reproduction.system.reading import parse_json

Status = Literal["finished", "running", "interrupted", "failed", "not started"]
COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class State:
    """How far a run is: `epochs` that are evaluated, and the `top1` in percent after them.

    `hours` are those of a finished run, `error` is what a failed one died of.
    """

    status: Status
    epochs: int = 0
    top1: float | None = None
    hours: float | None = None
    error: str | None = None


def read_state(folder: RunFolder) -> State:
    """The state of one run; UserError if its summary or its metrics are not readable."""
    summary = folder.read_summary()
    try:
        if folder.is_finished():
            return State(
                status="finished",
                epochs=int(summary["epochs"]),
                top1=float(summary["top1_last"]),
                hours=float(summary["seconds"]) / 3600,
            )
        last = _last_epoch(folder)
        epochs, top1 = (int(last["epoch"]), float(last["top1"])) if last else (0, None)
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(f"{folder.path}: not readable: {first_line(error)}") from error
    if is_held(folder):
        return State(status="running", epochs=epochs, top1=top1)
    if summary.get("status") == "failed":
        told = None if summary.get("error") is None else in_one_line(str(summary["error"]))
        return State(status="failed", epochs=epochs, top1=top1, error=told)
    if not folder.config_path.exists():
        return State(status="not started")
    return State(status="interrupted", epochs=epochs, top1=top1)  # killed ones still say running


def _state(folder: RunFolder) -> State:
    """The same, of a damaged one that it has failed."""
    try:
        return read_state(folder)
    except UserError as error:
        return State(status="failed", error=str(error))


def _last_epoch(folder: RunFolder) -> dict[str, Any]:
    """The line of the last whole epoch; empty before the first."""
    if not folder.metrics_path.exists():
        return {}
    whole = islice(lines_backwards(folder.metrics_path), 1, None)  # what follows is cut off
    return next((parse_json(line) for line in whole if b'"top1"' in line), {})


def state_table(runs: Sequence[PlannedRun], settings: Settings, with_folders: bool) -> Table:
    """A row for each run.

    Hours are measured ones, `~` those of the same run with other seeds, else by the speed that was
    measured on this hardware.
    """
    states = [(run, _state(run.folder)) for run in runs]
    estimated = _estimated(runs, settings)
    measured: dict[str, list[float]] = {}
    for run, state in states:
        if state.hours is not None:
            measured.setdefault(_without_seed(run), []).append(state.hours)
    table = Table("run", "seed", "status", "epochs", "top-1", "hours")
    if with_folders:
        table.add_column("folder", overflow="fold")
    is_known = True
    for run, state in states:
        row = [
            escape("\n".join(run.labels)),
            str(run.config.seed),
            _described(state),
            f"{state.epochs}/{run.config.recipe.epochs}",
            "" if state.top1 is None else f"{state.top1:.2f}",
            _hours(state.hours, measured.get(_without_seed(run), []), estimated.get(run.name)),
        ]
        table.add_row(*row, *([escape(str(run.folder.path))] if with_folders else []))
        is_known = is_known and row[-1] != ""
    if not is_known and not settings.uses_stand_ins:
        table.caption = "make cost measures this machine, for the hours that are not known"
    return table


def _estimated(runs: Sequence[PlannedRun], settings: Settings) -> dict[str, float]:
    """Run name -> hours, of those whose speed was measured on this hardware."""
    costs = read_costs(Path(settings.outputs, FILE))
    if not costs or not runs:  # else torch need not be imported to name a GPU
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


def _hours(own: float | None, of_other_seeds: list[float], estimated: float | None) -> str:
    if own is not None:
        return hours_text(own)
    likely = fmean(of_other_seeds) if of_other_seeds else estimated
    return "" if likely is None else f"~{hours_text(likely)}"
