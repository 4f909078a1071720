"""Tables: sections of lines, with the notes below them, and the files that hold them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.studies.lines import Line
from reproduction.studies.results import MEASURES, Counted
from reproduction.studies.text import NOTHING, columns_of, formatted
from reproduction.system import write_text

REPORT = "report"  # the folder of tables beside the runs
MOST_NAMED = 5  # runs that are not counted
LIKE_THE_MEAN = ("median [%]", "best [%]", "best of 10 [%]")  # left out where they are the mean


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
    texts = pd.DataFrame([columns_of(line) for line in lines])
    empty = texts.columns[(texts == NOTHING).all()].difference([*lines[0].entry.heads])
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
        not_run = [line for line in missing if line.entry.row_hash]  # the others are quoted
        if not_run:
            notes.append(f"rows without a finished run: {len(not_run)}")
        return [*notes, *notes_of(self.counted)]

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        lines = [numbers_of(line) for section in self.sections for line in section.lines]
        return pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")

    def write(self, outputs: Path) -> Path:
        """Writes .md, whose path it returns, and .csv to the report beside the runs."""
        path = outputs / REPORT / f"{self.name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"# {self.title}\n\n{self.markdown()}\n")
        write_text(path.with_suffix(".csv"), self.csv())
        return path


def numbers_of(line: Line) -> dict[str, Any]:
    """Returns a line by the columns of a .csv file."""
    entry = line.entry
    return {
        "study": entry.id.study,
        "row": entry.id.row,
        **dict(entry.id.swept),
        "column": entry.id.column,
        "outcome": line.outcome.measure,
        "half": line.outcome.split,
        "n": line.n,
        "mean": line.mean,
        "std": line.std,
        "printed": line.printed,
        "compared_with": entry.against_text,
        **asdict(line.comparison),
        "role": entry.role,
        "state": entry.status_text,
        **{name: line.mean_of(name) for name in MEASURES},
    }


def notes_of(counted: Counted) -> Iterator[str]:
    """Yields which runs are not counted, and how many are, with their hours and git revisions."""
    left_out = [*counted.left_out.items()]
    for path, reason in left_out[:MOST_NAMED]:
        yield f"not counted: {path.name}: {reason}"
    if len(left_out) > MOST_NAMED:
        yield f"and {len(left_out) - MOST_NAMED} more that are not counted"
    revisions = sorted({revision for run in counted.runs for revision in run.revisions})
    seconds = math.fsum(run.numbers.get("seconds", 0.0) for run in counted.runs)
    runs = "1 finished run"
    if len(counted.runs) != 1:
        runs = f"{len(counted.runs)} finished runs"
    yield f"{runs}, {seconds / 3600:.2f} hours in total, git {', '.join(revisions) or 'unknown'}"
