"""The tables of a command: the rows of a study, or of runs by the settings in which they differ."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.compose import Point, last_part, shared_words, word_of
from reproduction.config import LONGEST_NAME
from reproduction.errors import UserError
from reproduction.files import cut
from reproduction.identity import digest, row_hash, run_hash
from reproduction.studies.runs import (
    OUTCOMES,
    STACK_KEY,
    Counted,
    Outcome,
    Run,
    counted,
    judged_by,
    row_settings,
)
from reproduction.studies.statistics import Line, Row, lines_of
from reproduction.studies.study import REFERENCE, Part, Study
from reproduction.studies.table import (
    REPORT,
    TITLES,
    Missing,
    Section,
    Table,
    judged_on,
    order_of,
    value_text,
)

LATENCY = "latency.json"  # of scripts/latency.py, beside the tables

# --- a study ------------------------------------------------------------------------------------


def study_table(part: Part, runs: Sequence[Run], outputs: Path) -> Table:
    """Returns the table of a study: the main outcome by column, then the others.

    `outputs` holds the report of the runs, with what else was measured there.
    """
    study = part.study
    row_hashes = {*part.row_hashes.values()}
    chosen = counted([run for run in runs if run.row_hash in row_hashes and run.seed in part.seeds])
    shown = chosen.runs
    notes = [*study.notes]
    if study.looks and not part.changes:  # which other runs have
        seeds, note = look(study, len(row_hashes), chosen.runs)
        shown = [run for run in chosen.runs if run.seed in seeds]
        notes.insert(0, note)
    rows = rows_of(part)
    main = judged_by(shown)
    if study.tested is not None:
        main = study.tested
    sections = _sections(rows, shown, main, is_main=True)
    of_metrics = [outcome for run in shown for outcome in run.outcomes]
    for outcome in dict.fromkeys([*OUTCOMES, *of_metrics]):
        if outcome != main:
            others = _sections(rows, shown, outcome, is_main=False)
            sections += [section for section in others if section.finished]
    return Table(
        name=part.file,
        title=study.title,
        about=[*part.about, *judged_on(main)],
        sections=sections,
        counted=chosen,
        notes=notes,
        extras=latencies(study, outputs),
        study=study,
    )


def rows_of(part: Part) -> list[Row]:
    """Returns the rows of a study, with what is printed, then those that it quotes."""
    hashes = part.row_hashes
    texts = part.texts
    rows = []
    for cell in part.cells:
        row = Row(
            key=cell.label,
            heads={"row": texts[cell.label]},
            study=part.name,
            name=cell.row,
            values=cell.values,
            column=cell.told.column,
            row_hash=hashes[cell.label],
            role=cell.told.role,
            printed=cell.told.printed,
        )
        base = part.pairs.get(cell.label)
        if base is not None and hashes[base] != row.row_hash:  # two rows may be one run
            row = replace(row, against=base, against_text=texts[base])
        rows.append(row)
    for name, column, printed in part.study.quotes:
        quoted = Row(
            key=f"quoted: {name}: {column}",
            heads={"row": name},
            study=part.name,
            name=name,
            column=column,
            printed=printed,
        )
        rows.append(quoted)
    return rows


def _sections(
    rows: Sequence[Row], runs: Sequence[Run], outcome: Outcome, is_main: bool
) -> list[Section]:
    """Returns the lines of all rows, judged by an outcome, by column."""
    by_column = defaultdict[str, list[Line]](list)
    for line in lines_of(rows, runs, outcome, is_main):
        by_column[line.row.column].append(line)
    sections = []
    for column, lines in by_column.items():
        if is_main:
            title = column
        elif column:
            title = f"{column}: {outcome.title}"
        else:
            title = outcome.title.capitalize()
        sections.append(Section(title=title, lines=lines))
    return sections


def latencies(study: Study, outputs: Path) -> dict[str, pd.DataFrame]:
    """Returns what scripts/latency.py has measured beside what is printed, by its title."""
    path = outputs / REPORT / LATENCY
    if not (study.latencies and path.exists()):
        return {}
    measured = json.loads(path.read_text())
    rows = []
    for name, (low, median, high) in measured["ms"].items():
        if name not in study.latencies:
            continue
        printed = study.latencies[name]
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


def look(study: Study, num_rows: int, runs: Sequence[Run]) -> tuple[Sequence[int], str]:
    """Returns the seeds of the latest look, and a note on it.

    A look at n is of the first n seeds of the study, once each of its rows has a run of them.
    """
    counts = Counter(run.seed for run in runs)
    whole = {seed for seed, count in counts.items() if count == num_rows}
    seen: Sequence[int] = []
    for n in sorted(study.looks):
        seeds = range(study.first_seed, study.first_seed + n)
        if whole.issuperset(seeds):
            seen = seeds
    levels = [f"{n} seeds (at {100 * level:g} %)" for n, level in study.looks.items()]
    rule = f"Looks are at the first {' and the first '.join(levels)}, once all their runs are there"
    reached = "none has been reached"
    if seen:
        reached = f"this is the look at {len(seen)}, seeds {seen[0]} to {seen[-1]}"
    return seen, f"{rule}: {len(whole)} seeds are whole, {reached}."


# --- any runs -----------------------------------------------------------------------------------

# Keys that stand for what comes with them: another model has other sizes, another stack other
# settings of its methods.
NAMES = ("model.name", "dataset.name", STACK_KEY)
METHODS = "augmentation."  # group of what is mixed, which is shown even if it comes with a name
IN_OPTIONS = "options."  # in a key of a group that may have any


@dataclass(frozen=True)
class Settings:
    """The settings of the rows of a table, as values, by the hash that the runs of a row share."""

    by_row: Mapping[str, Mapping[str, Any]]

    @cached_property
    def values(self) -> dict[str, dict[str, Any]]:
        """The value of each setting in each row.

        Not of a group that is null in one row and has settings in another.
        """
        found = dict.fromkeys(key for row in self.by_row.values() for key in row)
        groups = {key.rpartition(".")[0] for key in found}
        values: dict[str, dict[str, Any]] = {}
        for key in found:
            missing = Missing.ABSENT if IN_OPTIONS in key else Missing.DOES_NOT_APPLY
            if key not in groups:
                values[key] = {row: x.get(key, missing) for row, x in self.by_row.items()}
        return values

    def follows(self, key: str, head: str) -> bool:
        """Whether two keys are of one group, and the value of `head` tells that of the other."""
        if key.partition(".")[0] != head.partition(".")[0]:
            return False
        ours, theirs = self.values[key], self.values[head]
        pairs = {(repr(theirs[row]), repr(ours[row])) for row in self.by_row}
        return len(pairs) == len({first for first, _ in pairs})

    @cached_property
    def heads(self) -> tuple[list[str], list[str]]:
        """The keys that tell each row from every other one, and those that follow them.

        What comes with the name of a model or a data set is in neither.
        """
        heads = list[str]()
        following = list[str]()
        for key, values in self.values.items():
            applying = {repr(x) for x in values.values() if x != Missing.DOES_NOT_APPLY}
            if len(applying) < 2:
                continue
            owners = [head for head in heads if self.follows(key, head)]
            if not owners or key.startswith(METHODS):
                heads.append(key)
            elif owners[0] not in NAMES:  # else the name tells it already
                following.append(key)
        for key, values in self.values.items():
            shown = {repr([self.values[head][row] for head in heads]) for row in self.by_row}
            if len(shown) == len(self.by_row):
                break
            if key not in heads and len({repr(x) for x in values.values()}) > 1:
                heads.append(key)
        return heads, following

    def in_order(self, heads: Sequence[str]) -> list[str]:
        """Returns the rows in the order of these values."""
        return sorted(
            self.by_row, key=lambda row: [order_of(self.values[head][row]) for head in heads]
        )

    def named(self, name: str) -> list[str]:
        """Returns the settings whose last parts are this name."""
        return [key for key in self.values if f".{key}".endswith(f".{name}")]

    def title(self, key: str) -> str:
        """Returns the shortest name that no other setting and no other column has."""
        parts = key.split(".")
        for start in reversed(range(len(parts))):
            name = ".".join(parts[start:])
            if self.named(name) == [key] and name not in TITLES:
                return name
        return key

    def bases(self, against: str) -> dict[str, str | None]:
        """Returns, for each row without this value, the row with it that differs in nothing else.

        None for a row that has no such base, or more than one. UserError if no row, or each one,
        has the value, or if the key is not the name of a single setting.
        """
        name, _, typed = against.partition("=")
        known = self.named(name)
        if len(known) > 1:
            raise UserError(f"against={against}: {name} may be {' or '.join(known)}")
        text = value_text(word_of(f"value={typed}").value)
        having = []
        if known:
            having = [row for row, x in self.values[known[0]].items() if value_text(x) == text]
        if len(having) in (0, len(self.by_row)):
            heads, _ = self.heads
            each = [f"{key}={value_text(x)}" for key in heads for x in self.values[key].values()]
            allowed = ", ".join(dict.fromkeys(each)) or "none"
            raise UserError(f"against={against}: must be one of {allowed}")
        bases: dict[str, str | None] = {}
        for row in self.by_row:
            fitting = [base for base in having if self.differ_in(row, base) == {known[0]}]
            if row not in having:
                bases[row] = fitting[0] if len(fitting) == 1 else None
        return bases

    def differ_in(self, row: str, other: str) -> set[str]:
        """Returns the keys in which two rows differ; a name stands for what comes with it."""
        found = {key for key, x in self.values.items() if repr(x[row]) != repr(x[other])}
        for name in found.intersection(NAMES):
            others = found - {name}
            found -= {key for key in others if self.comes_with(key, name, row, other)}
        return found

    def comes_with(self, key: str, name: str, row: str, other: str) -> bool:
        """Whether two rows differ in a key because they differ in a name.

        A setting of a method does if the other row does not have the method.
        """
        if name == STACK_KEY:
            both = (self.values[key][row], self.values[key][other])
            return key.startswith(METHODS) and Missing.DOES_NOT_APPLY in both
        return self.follows(key, name)


def runs_table(runs: Sequence[Run], against: str | None = None) -> Table:
    """Returns the table of any runs, grouped over their seeds.

    `against` (KEY=VALUE, of KEY the last parts will do): each row is compared with the row that
    has this value and is otherwise equal. UserError if no run is usable.
    """
    usable = [run for run in runs if run.status != "unusable"]
    if not usable:
        lines = [f"{run.path}: {run.status_text}" for run in runs]
        raise UserError("; ".join(lines) or "there are no runs in these folders")
    return table_of(Settings({run.row_hash: run.settings for run in usable}), runs, against)


def sweep_table(points: Sequence[Point], runs: Sequence[Run]) -> Table:
    """Returns the table of a sweep, whose files are named after the keys and all of its runs."""
    settings = Settings({row_hash(x.config): row_settings(x.config) for x in points})
    table = table_of(settings, runs)
    heads, _ = settings.heads
    words = ", ".join(f"`{word}`" for word in shared_words(points)) or "the defaults"
    keys = ", ".join(f"`{name}`" for name in heads) or "seeds"
    seeds = ", ".join(map(str, sorted({point.config.seed for point in points})))
    stem = "-".join(map(last_part, heads)) or "seeds"
    tail = f"-{digest(sorted(run_hash(point.config) for point in points))}"
    name = cut(stem, LONGEST_NAME, tail)
    about = f"A sweep over {keys}, with {words}; seeds {seeds}."
    return replace(table, name=name, about=[about, *table.about])


def table_of(settings: Settings, runs: Sequence[Run], against: str | None = None) -> Table:
    """Returns the table of these rows, whose columns are the settings in which they differ."""
    chosen = counted(runs)
    heads, following = settings.heads
    bases: dict[str, str | None] = {}
    notes = []
    common = [name for name in NAMES if name not in heads]
    if common:
        first = next(iter(settings.by_row))
        notes.append(", ".join(value_text(settings.values[name][first]) for name in common))
    if following:
        notes.append(f"differs as well: {', '.join(following)}")
    if against is not None:
        bases = settings.bases(against)
        alone = [*bases.values()].count(None)
        if alone:
            reason = f"for each no row, or more than one, has {against} and differs in nothing else"
            notes.append(f"rows that are not compared: {alone}; {reason}")
    rows = []
    for key in settings.in_order(heads):
        values = {head: settings.values[head][key] for head in heads}
        row = Row(
            key=key,
            heads={settings.title(head): value for head, value in values.items()},
            values=values,
            row_hash=key,
            status_text=status_of(key, runs, chosen),
        )
        if bases.get(key) is not None:
            row = replace(row, against=bases[key], against_text=str(against))
        rows.append(row)
    outcome = judged_by(chosen.runs)
    return Table(
        name="runs",
        title="Runs",
        about=judged_on(outcome),
        sections=[Section(title="", lines=lines_of(rows, chosen.runs, outcome))],
        counted=chosen,
        notes=notes,
        extras={},
    )


def status_of(key: str, runs: Sequence[Run], chosen: Counted) -> str:
    """Says how many seeds of a row are finished, and the status of the others."""
    done = {run.seed for run in chosen.runs if run.row_hash == key}
    others = [run for run in runs if run.row_hash == key and run.seed not in done]
    texts = [f"seed {run.seed} {chosen.left_out[run.path]}" for run in others]
    return "; ".join([f"{len(done)} finished", *texts])
