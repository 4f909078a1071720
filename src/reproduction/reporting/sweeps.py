"""A sweep as a table: accuracy, and how much HTM mixes, over the values of one key."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reproduction.cells import Cell
from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.reporting.collect import Collection
from reproduction.reporting.columns import sweep_columns
from reproduction.reporting.curves import Epoch, last_epoch
from reproduction.reporting.measured import Measured, measured
from reproduction.reporting.significance import significance
from reproduction.reporting.statistics import Spread, flat_spread, spread
from reproduction.reporting.tables import Table, banner, mark, origin_notes, read_texts
from reproduction.runs import RunFolder


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of `experiment` with other values of `key`.

    `values` maps each value, as it is written, to the name of its configuration.
    """

    name: str
    experiment: str
    key: str
    values: Mapping[str, str]

    @property
    def word(self) -> str:
        """The key without its group."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class SweepRecord(Measured):
    """One value of the key; without a value the baseline, which has no such key.

    `is_own`: the value of the experiment itself. Mixed samples in a batch, and tokens replaced in
    each, are means over the last epoch.
    """

    key: str
    value: str | None
    is_own: bool = False
    paper: float | None = None  # the accuracy that is printed for these runs
    mixed_samples: Spread | None = None
    mixed_tokens: Spread | None = None
    unread: tuple[str, ...] = ()  # why the mixing of some runs is not known

    @property
    def label(self) -> str:
        return self.row if self.value is None else f"{self.key.rpartition('.')[2]} = {self.value}"

    def flat(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "is_own_value": self.is_own,
            "row": self.row,
            "column": self.column,
            "experiment": self.experiment,
            "status": self.status,
            "n": len(self.seeds),
            "seeds": list(self.seeds),
            **self.accuracies(),
            "paper_top1": self.paper,
            **self.test("own_value"),
            **flat_spread("mixed_samples", self.mixed_samples),
            **flat_spread("mixed_tokens", self.mixed_tokens),
            **self.origin(),
        }


def build_sweep(
    sweep: Sweep,
    scale: str,
    *,
    cells: Sequence[Cell],
    configs: Mapping[str, Config],
    collection: Collection,
    outputs: Path,
) -> Table:
    """The sweep at the `scale` at which `configs` were resolved; `outputs` holds the runs."""
    texts = read_texts()
    by_name = {cell.experiment: cell for cell in cells}
    cell = by_name[sweep.experiment]
    assert cell.baseline is not None
    config = configs[sweep.experiment]
    has_mixing = config.augmentation.htm is not None
    records = [
        _baseline(sweep, by_name[cell.baseline], collection),
        *_records(sweep, cell, collection, outputs if has_mixing else None),
    ]
    mixing = texts["mixing"].format(batch_size=config.recipe.batch_size)
    said = mark(scale, [cell], configs)
    if said is not None:  # the printed accuracies may be of another value of the key
        records = [replace(record, paper=None) for record in records]
    return Table(
        name=sweep.name,
        title=f"Sensitivity to {sweep.word} at {scale} scale: {texts['sweep_titles'][sweep.name]}",
        scale=scale,
        banner=banner(scale, [cell], configs),
        mark=said,
        columns=tuple(sweep_columns(sweep.word, has_mixing)),
        records=tuple(records),
        notes=(
            texts["accuracies"],
            texts["sweep_difference"].format(word=sweep.word, table=cell.table),
            *([mixing] if has_mixing else []),
            *texts["sweep_notes"][sweep.name],
            *(problem for record in records for problem in record.unread),
            *significance(records, f"the {sweep.word} of Table {cell.table}"),
            *origin_notes(records, collection),
        ),
    )


def _baseline(sweep: Sweep, cell: Cell, collection: Collection) -> SweepRecord:
    return SweepRecord(
        row="baseline",
        column=cell.column,
        key=sweep.key,
        value=None,
        paper=cell.top1,
        **measured(cell.experiment, sweep.experiment, collection),
    )


def _records(
    sweep: Sweep, cell: Cell, collection: Collection, outputs: Path | None
) -> Iterator[SweepRecord]:
    """Every value; mixing is read where `outputs` is given."""
    own = collection.keys[sweep.experiment]
    for value, name in sweep.values.items():
        is_own = collection.keys[name] == own
        found = measured(name, None if is_own else sweep.experiment, collection)
        yield SweepRecord(
            row=f"{value} (as in Table {cell.table})" if is_own else value,
            column=cell.column,
            key=sweep.key,
            value=value,
            is_own=is_own,
            paper=cell.top1 if is_own else None,
            **found,
            **({} if outputs is None else _mixing(found["runs"], outputs)),
        )


def _mixing(runs: Sequence[str], outputs: Path) -> dict[str, Any]:
    """Mixed samples and tokens of the runs whose metrics can be read, and why of the others not."""
    epochs: list[Epoch] = []
    unread: list[str] = []
    for run in runs:
        try:
            epochs.append(last_epoch(RunFolder(outputs / run).metrics_path))
        except UserError as error:
            unread.append(f"Mixed samples and tokens are without {run}: {error}")
    tokens = [epoch.mixed_tokens for epoch in epochs if epoch.mixed_tokens is not None]
    return {
        "mixed_samples": spread([epoch.mixed_samples for epoch in epochs]) if epochs else None,
        "mixed_tokens": spread(tokens) if tokens else None,
        "unread": tuple(unread),
    }
