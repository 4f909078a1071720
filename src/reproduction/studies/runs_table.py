"""The table of a sweep and of any runs: a row for each group of runs that differ in their seed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from reproduction.config import Config
from reproduction.identity import RowId, digest, run_hash, settings
from reproduction.points import Point
from reproduction.studies.lines import Entry, lines_of
from reproduction.studies.results import Counted, Run, counted, judged_by
from reproduction.studies.table import Section, Table
from reproduction.studies.text import NOTHING, judged_on, value_text
from reproduction.system import UserError
from reproduction.words import last_part

STACK = "augmentation.mixing"  # the stack, as a setting
COMMON = ("model.name", "dataset.name", STACK)  # are told where they do not differ


def numeric(texts: pd.Series) -> pd.Series:
    """Sorts texts by their numbers; others come last."""
    return pd.to_numeric(texts, errors="coerce")


@dataclass(frozen=True)
class Groups:
    """The settings of groups of runs, as text by their key, and which of them name a group."""

    texts: pd.DataFrame
    heads: list[str]  # in which groups differ
    following: list[str]  # that differ with them

    @property
    def file(self) -> str:
        """What the files of their table are named after, empty if nothing differs."""
        return "-".join(map(last_part, self.heads))

    def id(self, group: Hashable) -> RowId:
        return RowId(swept=tuple((name, self.texts[name][group]) for name in self.heads))

    def named(self, group: Hashable) -> dict[str, str]:
        """Returns what names a group, by the last two parts of its keys."""
        found = {}
        for name in self.heads:
            title = ".".join(name.split(".")[-2:])
            found[title] = self.texts[name][group]
        return found


def grouped(settings_of: Mapping[str, Mapping[str, Any]]) -> Groups:
    """Returns the groups of these settings by key.

    What comes with a named model or data set, or with the stack, is neither in `heads` nor in
    `following`.
    """
    texts = pd.DataFrame.from_dict(settings_of, orient="index", dtype=object).map(value_text)
    heads, following = list[str](), list[str]()
    for name in texts.columns[texts.nunique() > 1]:
        of_its_group = [head for head in heads if head.split(".")[0] == name.split(".")[0]]
        owners = [head for head in of_its_group if _follows(texts, name, head)]
        if not owners:
            heads.append(name)
        elif not owners[0].endswith((".name", STACK)):
            following.append(name)
    if heads:
        texts = texts.sort_values(heads, key=numeric)
    return Groups(texts, heads, following)


def _follows(texts: pd.DataFrame, name: str, head: str) -> bool:
    """Whether the value of `head` says that of `name`."""
    return bool(texts.groupby(head)[name].nunique().max() == 1)


def runs_table(runs: Sequence[Run], against: str | None = None) -> Table:
    """Returns the table of any runs, grouped over their seeds.

    `against` (KEY=VALUE, of KEY the last parts will do): each row is compared with the row with
    this value that is otherwise equal. UserError if there is none, or if there are no runs.
    """
    usable = [run for run in runs if run.status != "unusable"]
    if not usable:
        raise UserError("there are no runs in these folders")
    groups = grouped({run.key: {STACK: run.stack, **run.settings} for run in usable})
    chosen = counted(runs)
    states = {group: _states(group, runs, chosen) for group in groups.texts.index}
    entries = _entries(groups, states, against)
    notes = [", ".join(groups.texts[name].iloc[0] for name in COMMON if name not in groups.heads)]
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
        planned=len(usable),
    )


def _entries(groups: Groups, states: Mapping[str, str], against: str | None) -> list[Entry]:
    """Returns a row for each group, in order, with what it is compared with."""
    bases: dict[Hashable, Hashable] = {}
    if against is not None:
        bases = _bases(groups.texts[groups.heads], against)
    entries = []
    for group, state in states.items():
        entry = Entry(id=groups.id(group), heads=groups.named(group), key=group, state=state)
        if group in bases:
            base = groups.id(bases[group])
            entry = replace(entry, against=base, against_text=str(against))
        entries.append(entry)
    return entries


def sweep_table(points: Sequence[Point], runs: Sequence[Run]) -> Table:
    """Returns the table of a sweep, whose files are named after the keys and all of its runs."""
    begun = runs_table(runs)
    plan = grouped({point.row_hash: _settings(point.config) for point in points})
    shared = [word for word in points[0].words if all(word in point.words for point in points)]
    words = ", ".join(f"`{word}`" for word in shared) or "the defaults"
    keys = ", ".join(f"`{name}`" for name in plan.heads) or "seeds"
    seeds = ", ".join(map(str, sorted({point.config.seed for point in points})))
    mark = digest(sorted(run_hash(point.config) for point in points))
    about = f"A sweep over {keys}, with {words}; seeds {seeds}."
    notes = [*begun.notes]
    not_begun = len(plan.texts) - len(begun.sections[0].lines)
    if not_begun:
        notes.append(f"rows that have not begun: {not_begun}")
    return replace(
        begun,
        name=f"{plan.file or 'seeds'}-{mark}",
        about=[about, *begun.about],
        notes=notes,
        planned=len(points),
    )


def _settings(config: Config) -> dict[str, Any]:
    stack = "+".join(config.augmentation.stack) or "none"
    return {STACK: stack, **settings(config), "seed": None}


def _states(group: str, runs: Sequence[Run], chosen: Counted) -> str:
    """Says how many seeds of a row are finished, and the state of the others."""
    done = {run.seed for run in chosen.runs if run.key == group}
    others = [run for run in runs if run.key == group and run.seed not in done]
    states = [f"seed {run.seed} {chosen.left_out[run.place]}" for run in others]
    return "; ".join([f"{len(done)} finished", *states])


def _bases(texts: pd.DataFrame, choice: str) -> dict[Hashable, Hashable]:
    """Returns the key of the row that each row is compared with, if there is one."""
    name, _, value = choice.partition("=")
    named = [head for head in texts if f".{head}".endswith(f".{name}")]
    if not named or value not in texts[named[0]].unique():
        known = [f"{head}={text}" for head in texts for text in texts[head].unique()]
        raise UserError(f"against={choice}: must be one of {', '.join(known) or 'none'}")
    others = texts.drop(columns=named[0])
    bases = others[texts[named[0]] == value]
    found = {}
    for group, row in others.iterrows():
        # a base without htm, say, has none of its settings
        is_same = (bases == row) | (bases == NOTHING)
        fits = bases.index[is_same.all(axis=1)]
        if len(fits) == 1:
            found[group] = fits[0]
    return found
