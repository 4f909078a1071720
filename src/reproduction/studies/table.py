"""Tables: sections of lines, with the notes below them, and the files that hold them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.studies.lines import Line
from reproduction.studies.results import MEASURES, OUTCOMES, Counted
from reproduction.studies.text import NOTHING, columns_of, number
from reproduction.system import write_text

REPORT = "report"  # the folder of tables beside the runs
MOST_NAMED = 5  # runs that are not counted
LIKE_THE_MEAN = ("median [%]", "best [%]", "best of 10 [%]")  # left out where they are the mean


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some lines of a table, judged by one outcome."""

    title: str
    lines: list[Line]
    is_tested: bool = True

    @property
    def finished(self) -> list[Line]:
        return [line for line in self.lines if not math.isnan(line.mean)]

    @property
    def missing(self) -> list[Line]:
        return [line for line in self.lines if math.isnan(line.mean)]


def shown(lines: Sequence[Line], is_tested: bool = True) -> pd.DataFrame:
    """Returns lines as text, without columns that have nothing to show."""
    texts = pd.DataFrame([columns_of(line, is_tested) for line in lines])
    heads = lines[0].entry.heads
    means = [number(line.mean, OUTCOMES[line.outcome].spec) for line in lines]
    kept = []
    for title in texts:
        column = [*texts[title]]
        is_empty = title not in heads and set(column) == {NOTHING}
        repeats = title in LIKE_THE_MEAN and column == means
        if not is_empty and not repeats:
            kept.append(title)
    return texts[kept]


def markdown(texts: pd.DataFrame) -> str:
    """Returns a table with escaped texts."""
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    aligned: Any = {"stralign": "right", "colalign": ("left",)}
    return escaped.to_markdown(index=False, disable_numparse=True, **aligned)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a study, of a sweep or of any runs."""

    name: str  # of its files
    title: str
    about: list[str] = field(default_factory=list)  # what it is of, above it
    sections: list[Section]
    counted: Counted
    notes: list[str]
    extras: dict[str, pd.DataFrame] = field(default_factory=dict)  # more of it as text, by title
    planned: int  # runs

    @property
    def tested(self) -> list[Section]:
        """The sections of what is tested, which have all rows between them."""
        return [section for section in self.sections if section.is_tested]

    def lines(self, level: int = 2, is_short: bool = False) -> Iterator[str]:
        """Yields Markdown: what was run, and a line that counts what was not.

        A short table has only what is tested.
        """
        for text in self.about:
            yield f"{text}\n"
        for section in self.tested if is_short else self.sections:
            if section.finished and section.title:
                yield f"{'#' * level} {section.title}\n"
            if section.finished:
                yield f"{markdown(shown(section.finished, section.is_tested))}\n"
        for title, texts in self.extras.items():
            yield f"{'#' * level} {title}\n\n{markdown(texts)}\n"
        for note in self.all_notes():
            yield f"- {note}"

    def all_notes(self) -> list[str]:
        notes = [*self.notes]
        missing = [line for section in self.tested for line in section.missing]
        if missing:
            notes.append(f"rows without a finished run: {len(missing)}")
        return [*notes, *notes_of(self.counted)]

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        lines = [plain(line) for section in self.sections for line in section.lines]
        return pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")

    def write(self, outputs: Path) -> list[Path]:
        """Writes .md and .csv to the report beside the runs."""
        folder = outputs / REPORT
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([f"# {self.title}\n", *self.lines()])
        files = {folder / f"{self.name}.md": f"{text}\n", folder / f"{self.name}.csv": self.csv()}
        for path, content in files.items():
            write_text(path, content)
        return [*files]


def plain(line: Line) -> dict[str, Any]:
    """Returns a line as a row of a .csv file."""
    entry, outcome = line.entry, OUTCOMES[line.outcome]
    found: dict[str, Any] = {
        "study": entry.id.study,
        "row": entry.id.row,
        **dict(entry.id.swept),
        "column": entry.id.column,
        "outcome": outcome.measure,
        "half": outcome.half,
        "n": line.n,
        "mean": line.mean,
        "std": line.std,
        "printed": entry.printed.get(outcome.measure, math.nan),
        "printed_difference": entry.printed_difference,
        "compared_with": entry.against_text,
    }
    if line.test is not None:
        found |= asdict(line.test)
    found |= {"p": line.p, "p_holm": line.p_holm, "role": entry.role, "state": entry.state}
    return {**found, **{name: line.mean_of(name) for name in MEASURES}}


def notes_of(counted: Counted) -> Iterator[str]:
    """Yields which runs are not counted, and how many are, with their hours and git revisions."""
    left_out = [*counted.left_out.items()]
    for place, reason in left_out[:MOST_NAMED]:
        yield f"not counted: {place.name}: {reason}"
    if len(left_out) > MOST_NAMED:
        yield f"and {len(left_out) - MOST_NAMED} more that are not counted"
    revisions = sorted({run.git_revision[:10] for run in counted.runs if run.git_revision})
    seconds = math.fsum(run.numbers.get("seconds", 0.0) for run in counted.runs)
    number = len(counted.runs)
    runs = "1 finished run" if number == 1 else f"{number} finished runs"
    yield (f"{runs}, {seconds / 3600:.2f} hours in total, git {', '.join(revisions) or 'unknown'}")
