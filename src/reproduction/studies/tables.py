"""The table of a study, of a sweep and of any runs: which rows it has, and what they are named."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.config import Config
from reproduction.runs import RowId, changes_result, digest, key, settings
from reproduction.start import Point
from reproduction.studies.results import ON_TEST, ON_VALIDATION, OUTCOMES, Counted, Run, counted
from reproduction.studies.study import (
    MIXING,
    PAPERS,
    SHORT,
    Cell,
    Study,
    cells,
    comparisons,
    studies,
)
from reproduction.studies.table import Entry, table
from reproduction.studies.text import NOTHING, REPORT, Section, Table, value_text
from reproduction.system import UserError

STACK = "augmentation.mixing"  # the stack, as a setting
COMMON = ("model.name", "dataset.name", STACK)  # are told where they do not differ
LATENCY = "latency.json"  # of scripts/latency.py, beside the tables
REFERENCE = "attention"  # of the ratios of latencies
numeric: Any = lambda texts: pd.to_numeric(texts, errors="coerce")  # noqa: E731 - others come last


def judged_by(runs: Sequence[Run]) -> str:
    """Returns what runs are judged by unless a study says it: validation, if there is a split."""
    if any(ON_VALIDATION in run.numbers for run in runs):
        return ON_VALIDATION
    return ON_TEST


def says(outcome: str) -> list[str]:
    """Says above a table that it is judged on validation."""
    if OUTCOMES[outcome].half == "test":
        return []
    return [
        "Judged on the validation split; the accuracy on the test set stands beside it, untested."
    ]


# --- a study ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What of a study is planned: the key that the runs of a row share, and the seeds."""

    name: str  # as typed
    study: Study
    keys: dict[RowId, str]
    seeds: list[int]
    more: list[str] = field(default_factory=list)  # words beyond those of the study
    is_smoke: bool = False

    @property
    def runs(self) -> int:
        return len({*self.keys.values()}) * len(self.seeds)

    @property
    def file(self) -> str:
        """The name of its files: the study's, and what distinguishes this from all of it."""
        parts = [Path(self.name).stem]
        rows = list(dict.fromkeys(row.row for row in self.keys))
        number = 1 if self.is_smoke else self.study.seeds
        if rows != [*self.study.rows]:
            parts.append("+".join(rows))
        if self.seeds != [*range(self.study.first_seed, self.study.first_seed + number)]:
            parts.append(f"seeds={len(self.seeds)}")
        if self.more:
            parts.append(digest(sorted(self.more)))
        return "-".join(parts)


def planned(points: Sequence[Point]) -> list[Planned]:
    """Returns the studies that these points are the runs of."""
    typed = dict.fromkeys(row.study for point in points for row in point.rows)
    papers = [name for name in PAPERS if name in typed]
    found = []
    for name in papers or typed:
        (study,) = studies(name).values()
        keys, seeds, words = dict[RowId, str](), set[int](), dict[str, None]()
        for point in points:
            for row in point.rows:
                if row.study == name:
                    keys[row] = point.key
                    seeds.add(point.config.seed)
                    words |= dict.fromkeys(point.words)
        each = [cell for cell in cells(name, study) if cell.id in keys]
        own = {word for cell in each for word in cell.words}
        is_smoke = {*SHORT} <= words.keys()
        if is_smoke:
            own |= {*SHORT, *study.smoke, *MIXING}
        found.append(
            Planned(
                name=name,
                study=study,
                keys={cell.id: keys[cell.id] for cell in each},
                seeds=sorted(seeds),
                more=[word for word in words if word not in own and _is_setting(word)],
                is_smoke=is_smoke,
            )
        )
    return found


def _is_setting(word: str) -> bool:
    name = word.lstrip("+~").partition("=")[0]
    return name != "seed" and changes_result(name)


def study_table(plan: Planned, runs: Sequence[Run], outputs: Path | None = None) -> Table:
    """Returns the table of a study: what is tested, by column, then the other outcomes.

    `outputs` holds the report of the runs, with what else was measured there.
    """
    study, of_rows = plan.study, {*plan.keys.values()}
    chosen = counted([run for run in runs if run.key in of_rows and run.seed in plan.seeds])
    shown, notes = chosen.runs, [*study.notes]
    if study.looks and not (plan.is_smoke or plan.more):
        seeds, note = look(study, len(of_rows), chosen.runs)
        shown = [run for run in chosen.runs if run.seed in seeds]
        notes.insert(0, note)
    entries = entries_of(plan)
    tested = study.tested or judged_by(shown)
    sections = []
    for name in [tested, *(x for x in OUTCOMES if x != tested)]:
        lines = table(entries, shown, name, is_tested=name == tested)
        for column in dict.fromkeys(entry.id.column for entry in entries):
            section = Section(
                title=_title(column, name, is_tested=name == tested),
                lines=[line for line in lines if line.entry.id.column == column],
                is_first=name == tested,
            )
            if section.is_first or section.run:
                sections.append(section)
    return Table(
        name=plan.file,
        title=study.title,
        about=[*about(plan), *says(tested)],
        sections=sections,
        counted=chosen,
        notes=notes,
        extras={} if outputs is None else latencies(study, outputs),
        planned=plan.runs,
    )


def latencies(study: Study, outputs: Path) -> dict[str, pd.DataFrame]:
    """Returns what scripts/latency.py has measured beside what is printed, by its title."""
    path = outputs / REPORT / LATENCY
    if not (study.latencies and path.exists()):
        return {}
    measured = json.loads(path.read_text())
    rows = []
    for name, printed in study.latencies.items():
        low, median, high = measured["ms"][name]
        rows.append(
            {
                "detector": name,
                "added to a step [ms]": f"{median:.1f} ({low:.1f} to {high:.1f})",
                "paper [ms]": f"{printed:g}",
                "ratio": f"{median / measured['ms'][REFERENCE][1]:.1f}",
                "paper's ratio": f"{printed / study.latencies[REFERENCE]:.1f}",
            }
        )
    return {f"Latency: {measured['about']}": pd.DataFrame(rows)}


def about(plan: Planned) -> list[str]:
    """Says what distinguishes the runs from those that the study names."""
    words = [f"`{word}`" for word in plan.more]
    if plan.is_smoke:
        words.insert(0, "smoke scale: four batches of eight digits")
    if not words:
        return []
    return [f"Of all rows: {', '.join(words)}; seeds {', '.join(map(str, plan.seeds))}."]


def _title(column: str, outcome: str, is_tested: bool) -> str:
    title = OUTCOMES[outcome].title.capitalize()
    if is_tested:
        return column
    if column:
        return f"{column}: {title[0].lower()}{title[1:]}"
    return title


def entries_of(plan: Planned) -> list[Entry]:
    """Returns the rows of a study, with what is printed, then those that it quotes."""
    study = plan.study
    each = {cell.id: cell for cell in cells(plan.name, study)}
    pairs = comparisons([*each.values()])
    entries = []
    for row, identity in plan.keys.items():
        cell, base = each[row], pairs.get(row)
        entry = Entry(
            id=row,
            heads={"row": _text(cell)},
            key=identity,
            role=cell.row.role,
            printed=cell.row.printed,
        )
        if base in plan.keys:
            printed = each[base].row.printed
            gap = entry.printed.get("top1", nan) - printed.get("top1", nan)
            text = _text(each[base])
            entry = replace(entry, against=base, against_text=text, printed_difference=gap)
        entries.append(entry)
    for name, columns in study.quoted.items():
        for column, printed in columns.items():
            quoted = RowId(plan.name, name, column=column)
            entries.append(Entry(id=quoted, heads={"row": name}, printed=printed))
    return entries


def _text(cell: Cell) -> str:
    if cell.id.point or not cell.row.row:
        return cell.label.partition("/")[2]
    return cell.row.row


def look(study: Study, rows: int, runs: Sequence[Run]) -> tuple[Sequence[int], str]:
    """Returns the seeds of the latest look, and a note on it.

    A look at n is of the first n seeds of the study, once each of the `rows` has a run of them.
    """
    finished = pd.Series([run.seed for run in runs], dtype=int).value_counts()
    whole = {seed for seed, number in finished.items() if number == rows}
    seen: Sequence[int] = []
    for n in sorted(study.looks):
        seeds = range(study.first_seed, study.first_seed + n)
        if whole.issuperset(seeds):
            seen = seeds
    levels = [f"{n} seeds (at {100 * level:g} %)" for n, level in study.looks.items()]
    state = "none has been reached"
    if seen:
        state = f"this is the look at {len(seen)}, seeds {seen[0]} to {seen[-1]}"
    plan = f"Looks are at the first {' and the first '.join(levels)}, once all their runs are there"
    return seen, f"{plan}: {len(whole)} seeds are whole, {state}."


# --- a sweep, and any runs ----------------------------------------------------------------------


@dataclass(frozen=True)
class Swept:
    """Settings of runs by key, as text, and which of them name a row."""

    texts: pd.DataFrame
    heads: list[str]  # in which runs differ
    following: list[str]  # that differ with them

    @property
    def titles(self) -> dict[str, str]:
        return {name: ".".join(name.split(".")[-2:]) for name in self.heads}

    def id(self, identity: Hashable) -> RowId:
        return RowId(point=tuple((name, self.texts[name][identity]) for name in self.heads))


def swept(each: Mapping[str, tuple[str, dict[str, Any]]]) -> Swept:
    """Returns what differs between settings: key -> stack and settings.

    What comes with a named model or data set, or with the stack, is neither in `heads` nor in
    `following`.
    """
    rows = {identity: {STACK: stack, **values} for identity, (stack, values) in each.items()}
    texts = pd.DataFrame.from_dict(rows, orient="index", dtype=object).map(value_text)
    heads, following = list[str](), list[str]()
    for name in texts.columns[texts.nunique() > 1]:
        group = [head for head in heads if head.split(".")[0] == name.split(".")[0]]
        owners = [head for head in group if texts.groupby(head)[name].nunique().max() == 1]
        if not owners:
            heads.append(name)
        elif not owners[0].endswith((".name", STACK)):
            following.append(name)
    if heads:
        texts = texts.sort_values(heads, key=numeric)
    return Swept(texts, heads, following)


def runs_table(runs: Sequence[Run], against: str | None = None) -> Table:
    """Returns the table of any runs, grouped over their seeds.

    `against` (KEY=VALUE, of KEY the last parts will do): each row is compared with the row with
    this value that is otherwise equal. UserError if there is none, or if there are no runs.
    """
    usable = [run for run in runs if run.status != "unusable"]
    if not usable:
        raise UserError("there are no runs in these folders")
    found = swept({run.key: (run.stack, run.settings) for run in usable})
    return _grouped(found, runs, title="Runs", planned=len(usable), against=against)


def sweep_table(points: Sequence[Point], runs: Sequence[Run]) -> Table:
    """Returns the table of a sweep; rows without a run are among its lines."""
    found = swept({point.key: (_stack(point.config), _settings(point.config)) for point in points})
    made = _grouped(found, runs, title="Runs", planned=len(points))
    shared = [word for word in points[0].words if all(word in point.words for point in points)]
    words = ", ".join(f"`{word}`" for word in shared) or "the defaults"
    keys = ", ".join(f"`{name}`" for name in found.heads) or "seeds"
    seeds = sorted({point.config.seed for point in points})
    text = f"A sweep over {keys}, with {words}; seeds {', '.join(map(str, seeds))}."
    mark = digest(sorted(key(point.config) for point in points))
    return replace(made, name=f"{made.name}-{mark}", about=[text, *made.about])


def _stack(config: Config) -> str:
    return "+".join(config.augmentation.stack) or "none"


def _settings(config: Config) -> dict[str, Any]:
    return {name: value for name, value in settings(config).items() if name != "seed"}


def _grouped(
    found: Swept, runs: Sequence[Run], title: str, planned: int, against: str | None = None
) -> Table:
    chosen = counted(runs)
    outcome = judged_by(chosen.runs)
    bases: dict[Hashable, Hashable] = {}
    if against is not None:
        bases = _bases(found.texts[found.heads], against)
    entries = []
    for identity in found.texts.index:
        base = bases.get(identity)
        entries.append(
            Entry(
                id=found.id(identity),
                heads={found.titles[name]: found.texts[name][identity] for name in found.heads},
                key=str(identity),
                against=None if base is None else found.id(base),
                against_text=against or "",
                state=_states(str(identity), runs, chosen),
            )
        )
    common = [found.texts[name].iloc[0] for name in COMMON if name not in found.heads]
    notes = [", ".join(common)]
    if found.following:
        notes.append(f"differs as well: {', '.join(found.following)}")
    return Table(
        name="-".join(name.rpartition(".")[2] for name in found.heads) or "runs",
        title=title,
        about=says(outcome),
        sections=[Section(title="", lines=table(entries, chosen.runs, outcome))],
        counted=chosen,
        notes=notes,
        planned=planned,
    )


def _states(identity: str, runs: Sequence[Run], chosen: Counted) -> str:
    """Says how many seeds of a row are finished, and the state of the others."""
    done = {run.seed for run in chosen.runs if run.key == identity}
    own = [run for run in runs if run.key == identity and run.seed not in done]
    others = [f"seed {run.seed} {chosen.left_out[run.place]}" for run in own]
    return "; ".join([f"{len(done)} finished", *others])


def _bases(texts: pd.DataFrame, choice: str) -> dict[Hashable, Hashable]:
    """Returns the key of the row that each row is compared with, if there is one."""
    name, _, value = choice.partition("=")
    head = next((x for x in texts if f".{x}".endswith(f".{name}")), None)
    if head is None or value not in [*texts[head]]:
        known = [f"{x}={text}" for x in texts for text in texts[x].unique()]
        raise UserError(f"against={choice}: must be one of {', '.join(known) or 'none'}")
    bases, found = texts[texts[head] == value].drop(columns=head), dict[Hashable, Hashable]()
    for identity, row in texts.drop(columns=head).iterrows():
        fits = bases.index[((bases == row) | (bases == NOTHING)).all(axis=1)]
        if len(fits) == 1:
            found[identity] = fits[0]
    return found
