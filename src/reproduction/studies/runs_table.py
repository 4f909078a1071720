"""The table of a sweep and of any runs: a row for each group of runs that differ in their seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from reproduction.compose import Point, last_part
from reproduction.identity import RowId, digest, row_hash, run_hash
from reproduction.studies.lines import Entry, lines_of
from reproduction.studies.results import STACK_KEY, Counted, Run, counted, judged_by, row_settings
from reproduction.studies.table import Section, Table
from reproduction.studies.text import NOTHING, judged_on, value_text
from reproduction.system import UserError

NAMES = ("model.name", "dataset.name", STACK_KEY)  # each stands for all that comes with it
numeric: Any = partial(pd.to_numeric, errors="coerce")  # sorts texts by their numbers


def short_key(name: str) -> str:
    """Returns the last two parts of a dotted key."""
    return ".".join(name.split(".")[-2:])


@dataclass(frozen=True)
class Groups:
    """The settings of groups of runs, as text by row hash, and which of them name a group."""

    texts: pd.DataFrame
    heads: list[str]  # in which groups differ
    following: list[str]  # that differ with them

    @property
    def file(self) -> str:
        """What the files of their table are named after, empty if nothing differs."""
        return "-".join(map(last_part, self.heads))


def grouped(by_row: Mapping[str, Mapping[str, Any]]) -> Groups:
    """Returns the groups of rows of which these are the settings.

    What comes with one of NAMES is neither in `heads` nor in `following`.
    """
    texts = pd.DataFrame.from_dict(by_row, orient="index", dtype=object).map(value_text)
    heads, following = list[str](), list[str]()
    for name in texts.columns[texts.nunique() > 1]:  # a model's name comes before its other keys
        owners = [head for head in heads if _follows(texts, name, head)]
        if not owners:
            heads.append(name)
        elif owners[0] not in NAMES:
            following.append(name)
    if heads:
        texts = texts.sort_values(heads, key=numeric)
    return Groups(texts, heads, following)


def _follows(texts: pd.DataFrame, name: str, head: str) -> bool:
    """Whether two keys are of one group of the schema, and the value of `head` tells the other."""
    if name.partition(".")[0] != head.partition(".")[0]:
        return False
    return bool(texts.groupby(head)[name].nunique().max() == 1)


def runs_table(runs: Sequence[Run], against: str | None = None) -> Table:
    """Returns the table of any runs, grouped over their seeds.

    `against` (KEY=VALUE, of KEY the last parts will do): each row is compared with the row with
    this value that is otherwise equal. UserError if there is none, or if there are no runs.
    """
    usable = [run for run in runs if run.status != "unusable"]
    if not usable:
        raise UserError("there are no runs in these folders")
    groups = grouped({run.row_hash: run.settings for run in usable})
    chosen = counted(runs)
    status_texts = {row: _status_text(row, runs, chosen) for row in groups.texts.index}
    entries = [*_entries(groups.texts[groups.heads], status_texts, against)]
    notes = []
    common = [groups.texts[name].iloc[0] for name in NAMES if name not in groups.heads]
    if common:
        notes.append(", ".join(common))
    if groups.following:
        notes.append(f"differs as well: {', '.join(groups.following)}")
    outcome = judged_by(chosen.runs)
    return Table(
        name=groups.file or "runs",
        title="Runs",
        about=judged_on(outcome),
        sections=[Section(title="", lines=lines_of(entries, chosen.runs, outcome))],
        counted=chosen,
        notes=notes,
        extras={},
    )


def _entries(
    texts: pd.DataFrame, status_texts: Mapping[str, str], against: str | None
) -> Iterator[Entry]:
    """Yields the rows with these values, by row hash, with what they are compared with."""
    rows: dict[str, dict[str, str]] = texts.to_dict("index")
    ids = {key: RowId(swept=tuple(row.items())) for key, row in rows.items()}
    bases = {}
    if against is not None:
        bases = _bases(texts, against)
    for key, row in rows.items():
        heads = {short_key(name): text for name, text in row.items()}
        text = status_texts[key]
        entry = Entry(id=ids[key], heads=heads, row_hash=key, status_text=text)
        if key in bases:
            entry = replace(entry, against=ids[bases[key]], against_text=str(against))
        yield entry


def sweep_table(points: Sequence[Point], runs: Sequence[Run]) -> Table:
    """Returns the table of a sweep, whose files are named after the keys and all of its runs."""
    table = runs_table(runs)
    groups = grouped({row_hash(point.config): row_settings(point.config) for point in points})
    shared = [word for word in points[0].words if all(word in point.words for point in points)]
    words = ", ".join(f"`{word}`" for word in shared) or "the defaults"
    keys = ", ".join(f"`{name}`" for name in groups.heads) or "seeds"
    seeds = ", ".join(map(str, sorted({point.config.seed for point in points})))
    sweep_hash = digest(sorted(run_hash(point.config) for point in points))
    about = f"A sweep over {keys}, with {words}; seeds {seeds}."
    notes = [*table.notes]
    not_begun = len(groups.texts) - len(table.sections[0].lines)
    if not_begun:
        notes.append(f"rows that have not begun: {not_begun}")
    return replace(
        table,
        name=f"{groups.file or 'seeds'}-{sweep_hash}",
        about=[about, *table.about],
        notes=notes,
    )


def _status_text(row_hash: str, runs: Sequence[Run], chosen: Counted) -> str:
    """Says how many seeds of a row are finished, and the status of the others."""
    done = {run.seed for run in chosen.runs if run.row_hash == row_hash}
    others = [run for run in runs if run.row_hash == row_hash and run.seed not in done]
    texts = [f"seed {run.seed} {chosen.left_out[run.path]}" for run in others]
    return "; ".join([f"{len(done)} finished", *texts])


def _bases(texts: pd.DataFrame, choice: str) -> dict[str, str]:
    """Returns the row that each row is compared with, if there is one, both by row hash."""
    name, _, value = choice.partition("=")
    named = [head for head in texts if f".{head}".endswith(f".{name}")]  # by whole last parts
    if not named or value not in texts[named[0]].unique():
        known = [f"{head}={text}" for head in texts for text in texts[head].unique()]
        raise UserError(f"against={choice}: must be one of {', '.join(known) or 'none'}")
    others = texts.drop(columns=named[0])
    bases = others[texts[named[0]] == value]
    found: dict[Any, Any] = {}
    for group, row in others.iterrows():
        has_none = bases == NOTHING  # a base without htm, say, has none of its settings
        fits = bases.index[((bases == row) | has_none).all(axis=1)]
        if len(fits) == 1 and fits[0] != group:
            found[group] = fits[0]
    return found
