"""From the folders under outputs/ to the results of each cell; never stops at a broken folder."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.errors import UserError, first_line
from reproduction.identity import identity
from reproduction.reporting.folder import Run, read_run, short

REPORT = "report"
OURS = (REPORT, "data")  # these folders under outputs/ are ours, unless they hold a run
MOST_KEYS = 3  # that the note on a run of another configuration names


@dataclass(frozen=True)
class Unused:
    """A folder that counts for no cell, and why, in one line."""

    folder: str
    reason: str


@dataclass(frozen=True)
class CellRuns:
    """The runs of one configuration: finished ones by seed, and those that are not."""

    finished: Mapping[int, Run] = dataclasses.field(default_factory=dict)
    others: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Collection:
    """experiment -> its runs (cells of one configuration share theirs), and what is left over."""

    cells: Mapping[str, CellRuns]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # one per configuration
    unused: tuple[Unused, ...] = ()

    def experiments(self, run: Run) -> list[str]:
        """The cells that `run` counts for."""
        found = self.cells.items()
        return [name for name, cell in found if run in (*cell.finished.values(), *cell.others)]

    def runs(self) -> list[Run]:
        """Every run of a cell once, in the order of the cells, then of seeds."""
        found = {
            run.folder: run
            for cell in self.cells.values()
            for run in sorted((*cell.finished.values(), *cell.others), key=_by_seed)
        }
        return list(found.values())


def collect(outputs: Path, configs: Mapping[str, Config]) -> Collection:
    """The runs under `outputs` that have the configuration of a cell, but for the seed.

    `configs` maps an experiment to its resolved configuration. Raises UserError if there is no
    folder `outputs`.
    """
    runs, unused = _read_all(outputs)
    wanted = {name: shared_identity(dataclasses.asdict(c)) for name, c in configs.items()}
    keys = {name: key_of(found) for name, found in wanted.items()}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = key_of(run.identity)
        if key in keys.values():
            groups.setdefault(key, []).append(run)
        else:
            unused.append(Unused(run.folder, _nearest(run, wanted)))
    chosen = {}
    for key, group in groups.items():
        chosen[key], left_over = _choose(group)
        unused += left_over
    cells = {name: chosen.get(key, CellRuns()) for name, key in keys.items()}
    return Collection(cells, keys, tuple(sorted(unused, key=lambda entry: entry.folder)))


def shared_identity(config: dict[str, Any]) -> dict[str, Any]:
    """What the runs of one cell have in common: a run's identity without its seed."""
    return {key: value for key, value in identity(config).items() if key != "seed"}


def key_of(shared: Mapping[str, Any]) -> str:
    """One text per configuration."""
    return json.dumps(shared, sort_keys=True, default=repr)


def _read_all(outputs: Path) -> tuple[list[Run], list[Unused]]:
    try:
        names = sorted(entry.name for entry in outputs.iterdir() if entry.is_dir())
    except OSError as error:
        raise UserError(f"outputs={outputs}: no folder of runs: {first_line(error)}") from error
    runs: list[Run] = []
    unused: list[Unused] = []
    for name in names:
        folder = outputs / name
        if name.startswith(".") or (name in OURS and not (folder / "config.yaml").exists()):
            continue
        try:
            if not name.isprintable():
                raise UserError("its name cannot be printed")
            runs.append(read_run(folder))
        except UserError as error:
            unused.append(Unused(short(name), str(error)))
    return runs, unused


def _choose(group: list[Run]) -> tuple[CellRuns, list[Unused]]:
    """One run per seed: the finished one, of several the one whose summary is newest."""
    finished: dict[int, Run] = {}
    others: list[Run] = []
    unused: list[Unused] = []
    newest_first = sorted(group, key=lambda run: (-run.written, run.folder))
    for run in sorted(newest_first, key=lambda run: run.result is None):
        taken = finished.get(run.seed)
        if taken is not None:
            reason = f"seed {run.seed} again ({run.status}): {taken.folder} is counted"
            newer = ", the newer of the finished ones" if run.result is not None else ""
            unused.append(Unused(run.folder, reason + newer))
        elif run.result is not None:
            finished[run.seed] = run
        else:
            others.append(run)
    return CellRuns(dict(sorted(finished.items())), tuple(sorted(others, key=_by_seed))), unused


def _by_seed(run: Run) -> tuple[int, str]:
    return run.seed, run.folder


def _nearest(run: Run, wanted: Mapping[str, Mapping[str, Any]]) -> str:
    """How the run differs from the cell that it is closest to."""
    gaps = ((_differing(run.identity, theirs), name) for name, theirs in wanted.items())
    keys, name = min(gaps, key=lambda gap: len(gap[0]), default=([], None))
    reason = f"{run.status}, not the configuration of a cell at this scale"
    if name is None or len(keys) > MOST_KEYS:
        return reason
    pairs = (f"{key}={run.identity.get(key)} (there {wanted[name].get(key)})" for key in keys)
    return short(f"{reason}: differs from {name} in {', '.join(pairs)}")


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    keys: Iterable[str] = {*ours, *theirs}
    missing = object()
    return sorted(key for key in keys if ours.get(key, missing) != theirs.get(key, missing))
