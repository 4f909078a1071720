"""Tables: values as text, lines by their columns, sections, notes, and the files that hold them.

Text is made here alone, of values.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import pandas as pd

from reproduction.errors import as_typed
from reproduction.studies.runs import MEASURES, ON_TEST, ON_VALIDATION, Counted, Outcome
from reproduction.studies.statistics import Line
from reproduction.studies.study import Study

REPORT = "report"  # the folder of tables beside the runs
MOST_NAMED = 5  # runs that are not counted
LIKE_THE_MEAN = ("median [%]", "best [%]", "best of 10 [%]")  # left out where they are the mean

# --- values as text -----------------------------------------------------------------------------

NOTHING = "-"


def formatted(value: float | None, spec: str) -> str:
    """Formats a number; a dash stands for one that is missing."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:{spec}}"


def spread(values: pd.Series, spec: str) -> str:
    """Formats a mean with its deviation, which a single value has not."""
    mean = formatted(values.mean(), spec)
    if len(values) < 2:
        return mean
    return f"{mean} +/- {values.std():{spec}}"


def hours(seconds: float, decimals: int) -> str:
    """Formats seconds as hours; those that would be 0.0 with one significant digit."""
    text = formatted(seconds / 3600, f".{decimals}f")
    if seconds > 0 and float(text) == 0:
        return f"{seconds / 3600:.1g}"
    return text


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    if p < 0.001:
        return f"{p:.1e}"
    return formatted(p, ".3f")


class Missing(Enum):
    """What a row has in place of the value of a setting. Null is a value."""

    ABSENT = "not set"
    DOES_NOT_APPLY = NOTHING  # such as tau without HTM


def order_of(value: Any) -> tuple[bool, float, str]:
    """By what values are sorted: numbers by size, then the others by their text."""
    if isinstance(value, int | float):
        return False, float(value), ""
    return True, 0.0, value_text(value)


def value_text(value: Any) -> str:
    """Formats a setting as on the command line."""
    if isinstance(value, Missing):
        return value.value
    return as_typed(value)


# --- columns ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table, after those that name a row; all lines of a section have the same."""

    title: str  # {title}, {unit} and {gap} are the outcome's
    text: Callable[[Line], str]
    is_shown: Callable[[Line], bool] = lambda line: True


def is_main(line: Line) -> bool:
    """Whether the table is about this outcome: only then are tests shown, and what has none."""
    return line.is_main


def is_loss(line: Line) -> bool:
    return line.outcome.measure == "loss"


def share(line: Line, name: str) -> str:
    """Formats the share of easy or mixed samples; only HTM has some."""
    if not line.runs or "augmentation.htm.tau" not in line.runs[0].settings:
        return NOTHING
    return formatted(100 * line.mean_of(f"{name}_share"), ".1f")


def difference(line: Line) -> str:
    return formatted(line.comparison.difference, f"+{line.outcome.spec}")


def interval(line: Line) -> str:
    if math.isnan(line.comparison.low):
        return line.comparison.untestable or NOTHING
    ends = (line.comparison.low, line.comparison.high)
    return " to ".join(f"{end:+{line.outcome.spec}}" for end in ends)


def p_of(line: Line, p: float) -> str:
    return line.comparison.untestable or p_text(p)


def lower_in(line: Line) -> str:
    if line.row.against is None:
        return NOTHING
    return f"{line.comparison.below} of {line.comparison.pairs}"


def mean_of(measure: str, spec: str) -> Callable[[Line], str]:
    return lambda line: formatted(line.mean_of(measure), spec)


COLUMNS = [
    Column("n", lambda line: str(line.n)),
    Column("{title} [{unit}]", lambda line: spread(line.judged, line.outcome.spec)),
    Column(
        "test top-1 [%]",
        lambda line: spread(line.values(ON_TEST), ON_TEST.spec),
        lambda line: line.outcome == ON_VALIDATION,
    ),
    Column("paper [%]", lambda line: formatted(line.printed, ".2f")),
    Column("easy [%]", lambda line: share(line, "easy")),
    Column("mixed [%]", lambda line: share(line, "mixed")),
    Column("compared with", lambda line: line.row.against_text or NOTHING),
    Column("pairs", lambda line: formatted(line.comparison.pairs, ".0f")),
    Column("difference [{gap}]", difference),
    Column(
        "paper's difference [points]",
        lambda line: formatted(line.comparison.printed_difference, "+.2f"),
        is_main,
    ),
    Column("95 % interval", interval),
    Column("p", lambda line: p_of(line, line.comparison.p), is_main),
    # "untested" or "primary" stands in place of the corrected p
    Column("p (Holm)", lambda line: line.row.role or p_of(line, line.comparison.p_holm), is_main),
    Column("lower in", lower_in, is_loss),
    Column("median [%]", mean_of("top1_median10", ".2f"), is_main),
    Column("best [%]", mean_of("top1_best", ".2f"), is_main),
    Column("best of 10 [%]", mean_of("top1_best10", ".2f"), is_main),
    Column("selected [%]", mean_of("top1_selected", ".2f"), is_main),
    Column("tokens of easy", mean_of("easy_tokens", ".1f"), is_main),
    Column("tokens of mixed", mean_of("mixed_tokens", ".1f"), is_main),
    Column("hours", lambda line: hours(line.measured("seconds").sum(), 1), is_main),
    Column("status", lambda line: line.row.status_text or NOTHING, is_main),
]
TITLES = {column.title for column in COLUMNS}


def texts_of(line: Line) -> dict[str, str]:
    """Returns the text of each column by its title; those that name a row come first."""
    found = {title: value_text(value) for title, value in line.row.heads.items()}
    for column in COLUMNS:
        if column.is_shown(line):
            found[column.title.format(**vars(line.outcome))] = column.text(line)
    return found


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some lines of a table, judged by one outcome."""

    title: str
    lines: list[Line]

    @property
    def finished(self) -> list[Line]:
        return [line for line in self.lines if not line.judged.empty]

    @property
    def missing(self) -> list[Line]:
        """Rows without a finished run, and those that are quoted."""
        return [line for line in self.lines if line.judged.empty]


def frame_of(lines: Sequence[Line]) -> pd.DataFrame:
    """Returns lines as text, without columns that have nothing to show."""
    texts = pd.DataFrame([texts_of(line) for line in lines])
    empty = texts.columns[(texts == NOTHING).all()].difference([*lines[0].row.heads])
    means = [formatted(line.mean, line.outcome.spec) for line in lines]
    repeated = [x for x in LIKE_THE_MEAN if x in texts and texts[x].tolist() == means]
    return texts.drop(columns=[*empty, *repeated])


def as_markdown(texts: pd.DataFrame) -> str:
    """Returns a table with escaped texts."""
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    aligned: Any = {"stralign": "right", "colalign": ("left",)}
    return escaped.to_markdown(index=False, disable_numparse=True, **aligned)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a study, of a sweep or of any runs."""

    name: str  # of its files
    title: str
    about: list[str]  # what it is of, above it
    sections: list[Section]
    counted: Counted
    notes: list[str]
    extras: dict[str, pd.DataFrame]  # more tables, by their titles
    study: Study | None = None  # of the runs, if one names them

    @property
    def main_sections(self) -> list[Section]:
        """The sections of the main outcome, one for each column; together they have all rows."""
        return [section for section in self.sections if section.lines[0].is_main]

    def markdown(self, level: int = 2, is_short: bool = False) -> str:
        """Returns Markdown of the finished rows, with notes on the others.

        If short, the sections are those of the main outcome alone.
        """
        heading = "#" * level
        sections = self.sections
        if is_short:
            sections = self.main_sections
        parts = [f"{text}\n" for text in self.about]
        for section in sections:
            if section.finished and section.title:
                parts.append(f"{heading} {section.title}\n")
            if section.finished:
                parts.append(f"{as_markdown(frame_of(section.finished))}\n")
        for title, texts in self.extras.items():
            parts.append(f"{heading} {title}\n\n{as_markdown(texts)}\n")
        parts += [f"- {note}" for note in self.all_notes()]
        return "\n".join(parts)

    def all_notes(self) -> list[str]:
        notes = [*self.notes]
        missing = [line for section in self.main_sections for line in section.missing]
        not_run = [line for line in missing if line.row.row_hash]  # the others are quoted
        if not_run:
            notes.append(f"rows without a finished run: {len(not_run)}")
        return [*notes, *notes_of(self.counted)]

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        lines = [numbers_of(line) for section in self.sections for line in section.lines]
        return pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")


def numbers_of(line: Line) -> dict[str, Any]:
    """Returns a line by the columns of a .csv file."""
    row = line.row
    return {
        "study": row.study,
        "row": row.name,
        **{key: value_text(value) for key, value in row.values.items()},
        "column": row.column,
        "outcome": line.outcome.measure,
        "half": line.outcome.split,
        "n": line.n,
        "mean": line.mean,
        "std": line.std,
        "printed": line.printed,
        "compared_with": row.against_text,
        **asdict(line.comparison),
        "role": row.role,
        "state": row.status_text,
        **{name: line.mean_of(name) for name in MEASURES},
    }


def notes_of(counted: Counted) -> Iterator[str]:
    """Yields which runs are not counted, and how many are, with their hours and git revisions."""
    left_out = [*counted.left_out.items()]
    for path, reason in left_out[:MOST_NAMED]:
        yield f"not counted: {path.name}: {reason}"
    if len(left_out) > MOST_NAMED:
        yield f"and {len(left_out) - MOST_NAMED} more that are not counted"
    codes = dict.fromkeys((run.row_hash, run.code) for run in counted.runs)
    by_row = Counter(row for row, _ in codes)
    several = [code for row, code in codes if by_row[row] > 1]
    if several:
        yield f"runs of one row are of several versions of code: {'; '.join(several)}"
    revisions = sorted({revision for run in counted.runs for revision in run.revisions})
    seconds = math.fsum(run.measures.get("seconds", 0.0) for run in counted.runs)
    runs = "1 finished run"
    if len(counted.runs) != 1:
        runs = f"{len(counted.runs)} finished runs"
    yield f"{runs}, {hours(seconds, 2)} hours in total, git {', '.join(revisions) or 'unknown'}"


def judged_on(outcome: Outcome) -> list[str]:
    """Says above a table that it is judged on validation."""
    if outcome.split == "test":
        return []
    text = "Judged on the validation split"
    if outcome == ON_VALIDATION:
        text += "; the accuracy on the test set stands beside it, untested"
    return [f"{text}."]
