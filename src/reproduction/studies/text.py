"""Tables as text, made of their lines at the very end, and the files that hold them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.studies.results import (
    MEASURES,
    ON_TEST,
    ON_VALIDATION,
    OUTCOMES,
    Counted,
    Outcome,
)
from reproduction.studies.table import Line
from reproduction.system import write_text

REPORT = "report"  # the folder of tables beside the runs
NOTHING = "-"
MOST_NAMED = 5  # runs that are not counted
LIKE_THE_MEAN = ("median [%]", "best [%]", "best of 10 [%]")  # left out where they are the mean


def number(value: float | None, spec: str) -> str:
    """Formats a number; a dash stands for one that is missing."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:{spec}}"


def spread(mean: float, deviation: float, spec: str) -> str:
    """Formats a mean with its deviation, which a single value has not."""
    if math.isnan(mean) or math.isnan(deviation):
        return number(mean, spec)
    return f"{mean:{spec}} +/- {deviation:{spec}}"


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    if p < 0.001:
        return f"{p:.1e}"
    return number(p, ".3f")


def value_text(value: Any) -> str:
    """Formats a setting as on the command line, and a missing one as a dash."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.10g}"
    return short if float(short) == value else repr(value)  # two values never look alike


# --- a line as text -----------------------------------------------------------------------------


def cells(line: Line, is_first: bool) -> dict[str, str]:
    """Returns the cells of a line by the titles of their columns.

    The first table of a study has more columns, which are the same for any outcome.
    """
    outcome = OUTCOMES[line.outcome]
    found = {**line.entry.heads, "n": str(line.n)}
    found |= _judged(line, outcome)
    found |= _compared(line, outcome)
    if is_first:
        found |= _tested(line)
    if outcome.measure == "loss" and line.test is not None:
        found["lower in"] = f"{line.test.below} of {line.test.pairs}"
    if is_first:
        found |= _once(line)
    return found


def _judged(line: Line, outcome: Outcome) -> dict[str, str]:
    found = {f"{outcome.title} [{outcome.unit}]": spread(line.mean, line.std, outcome.spec)}
    if line.outcome == ON_VALIDATION:
        on_test = line.values(ON_TEST)
        found["test top-1 [%]"] = spread(on_test.mean(), on_test.std(), outcome.spec)
    found["paper [%]"] = number(line.entry.printed.get(outcome.measure), ".2f")
    found["mixed [%]"] = mixed(line)
    return found


def mixed(line: Line) -> str:
    """Formats the share of mixed samples, and says so if none was, or no token was replaced."""
    share = line.mean_of("mixed_share")
    if not line.runs or "htm" not in line.runs[0].stack.split("+"):
        return NOTHING
    text = number(100 * share, ".1f")
    if share == 0:
        return f"{text} (mixed nothing)"
    if line.mean_of("mixed_tokens") == 0:
        return f"{text} (replaced no token)"
    return text


def _compared(line: Line, outcome: Outcome) -> dict[str, str]:
    test, spec = line.test, f"+{outcome.spec}"
    if test is None:
        return {}
    interval = NOTHING
    if not math.isnan(test.low):
        interval = f"{test.low:{spec}} to {test.high:{spec}}"
    return {
        "compared with": line.entry.against_text,
        "pairs": str(test.pairs),
        f"difference [{outcome.gap}]": number(test.difference, spec),
        "95 % interval": interval,
    }


def _tested(line: Line) -> dict[str, str]:
    corrected = p_text(line.p_holm)
    if line.entry.role:
        corrected = line.entry.role
    return {"p": p_text(line.p), "p (Holm)": corrected}


def _once(line: Line) -> dict[str, str]:
    return {
        "paper's [points]": number(line.entry.printed_difference, "+.2f"),
        "median [%]": number(line.mean_of("top1_median10"), ".2f"),
        "best [%]": number(line.mean_of("top1_best"), ".2f"),
        "best of 10 [%]": number(line.mean_of("top1_best10"), ".2f"),
        "selected [%]": number(line.mean_of("top1_selected"), ".2f"),
        "tokens": number(line.mean_of("mixed_tokens"), ".1f"),
        "hours": number(line.n * line.mean_of("seconds") / 3600, ".1f"),
        "status": line.entry.state or NOTHING,
    }


def says(outcome: str) -> list[str]:
    """Says above a table that it is judged on validation."""
    if OUTCOMES[outcome].half == "test":
        return []
    text = "Judged on the validation split"
    if outcome == ON_VALIDATION:
        text += "; the accuracy on the test set stands beside it, untested"
    return [f"{text}."]


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some lines of a table, judged by one outcome."""

    title: str
    lines: list[Line]
    is_first: bool = True

    @property
    def run(self) -> list[Line]:
        return [line for line in self.lines if not math.isnan(line.mean)]

    @property
    def not_run(self) -> list[Line]:
        return [line for line in self.lines if math.isnan(line.mean)]


def shown(lines: Sequence[Line], is_first: bool = True) -> pd.DataFrame:
    """Returns lines as text, without columns that have nothing to show."""
    texts = pd.DataFrame([cells(line, is_first) for line in lines]).fillna(NOTHING)
    order = list[str]()
    for line in sorted(lines, key=lambda line: line.test is None):  # these have most columns
        order += [title for title in cells(line, is_first) if title not in order]
    means = [number(line.mean, OUTCOMES[line.outcome].spec) for line in lines]
    heads = lines[0].entry.heads
    kept = []
    for title in order:
        column = [*texts[title]]
        is_empty = all(text == NOTHING for text in column) and title not in heads
        if not is_empty and not (title in LIKE_THE_MEAN and column == means):
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
    def firsts(self) -> list[Section]:
        """The sections of what is tested, which have all rows between them."""
        return [section for section in self.sections if section.is_first]

    def lines(self, level: int = 2, is_short: bool = False) -> Iterator[str]:
        """Yields Markdown: what was run, and a line that counts what was not.

        A short table has only what is tested.
        """
        for text in self.about:
            yield f"{text}\n"
        for section in self.firsts if is_short else self.sections:
            if section.run and section.title:
                yield f"{'#' * level} {section.title}\n"
            if section.run:
                yield f"{markdown(shown(section.run, section.is_first))}\n"
        for title, texts in self.extras.items():
            yield f"{'#' * level} {title}\n\n{markdown(texts)}\n"
        for note in self.all_notes():
            yield f"- {note}"

    def all_notes(self) -> list[str]:
        notes = [*self.notes]
        missing = [line for section in self.firsts for line in section.not_run]
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
        **dict(entry.id.point),
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
    yield (
        f"{len(counted.runs)} finished runs, {seconds / 3600:.2f} hours in total, "
        f"git {', '.join(revisions) or 'unknown'}"
    )
