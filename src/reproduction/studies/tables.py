"""Tables of runs: means over seeds and paired differences, as numbers, Markdown and a page.

A table is a frame of numbers, a line for each row and outcome. Text is made of it last. A frame of
rows, by a key of each, has what is known before there are numbers: `row_hash` of its runs (none of
a row that is quoted), the key of the row that it is compared with, and what is printed of it.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from reproduction.compose import RunPlan, last_part, override_of, shared_overrides
from reproduction.config import LONGEST_NAME
from reproduction.errors import UserError, as_typed
from reproduction.files import cut, write_text
from reproduction.identity import digest, row_hash, run_hash
from reproduction.studies.plots import draw
from reproduction.studies.runs import (
    MEASURES,
    OUTCOMES,
    STACK_KEY,
    Counted,
    Outcome,
    Run,
    counted,
    judged_by,
    row_settings,
)
from reproduction.studies.study import Part, Study, short_names

REPORT = "report"  # the folder of tables beside the runs
MOST_NAMED = 5  # runs that are not counted
NOTHING = "-"
LEAST_PAIRS = 3  # for a test: with two, the 95 % interval is +-12.7 standard errors
ROUNDING = 1e-9  # in points or nats: differences that differ by less are equal
COMPARED = ["pairs", "difference", "below", "low", "high", "p", "untestable"]
# Keys that stand for what comes with them: another model has other sizes, another stack other
# settings of its methods.
NAMES = ("model.name", "dataset.name", STACK_KEY)
HOW_TO_READ = """\
Mean +/- standard deviation over n seeds of accuracies and of the held-out cross-entropy after the
last epoch, on the test set of CIFAR, the validation set of ImageNet. Median: of the last ten
epochs. Best: of all, or of the last ten, on these same images, which is optimistic. Selected: on
the test set, of the epoch with the best validation accuracy. Mixed: the share of samples that HTM
mixes, over training, and the tokens replaced in each in the last epoch. Hours: of all n runs.
Difference: from the row that is named, over the seeds that both have (pairs); the paper's: of the
printed values; lower in: pairs whose loss falls; p: by a two-sided paired t-test, then corrected by
Holm for the other tests of the table. Intervals are not corrected for their number."""

# --- numbers ------------------------------------------------------------------------------------


def judged(
    rows: pd.DataFrame, runs: Sequence[Run], outcome: Outcome, is_main: bool
) -> pd.DataFrame:
    """Returns the numbers of rows, judged by an outcome of these runs; p of the main one alone.

    A row that is `untested` has no p; one that is `primary` is not corrected for the others.
    """
    found = [(run.seed, run.row_hash, run.outcomes.get(outcome, nan)) for run in runs]
    values = pd.DataFrame(found, columns=["seed", "row_hash", "value"])
    values = values.pivot(index="seed", columns="row_hash", values="value").astype(float)
    values = values.reindex(columns=rows.row_hash).set_axis(rows.index, axis="columns")
    measures = [{"row_hash": run.row_hash, **run.measures} for run in runs]
    means = pd.DataFrame(measures, columns=["row_hash", *MEASURES]).groupby("row_hash").mean()
    numbers = rows.drop(columns="printed").assign(
        outcome=outcome.measure,
        half=outcome.split,
        n=values.count(),
        mean=values.mean(),
        std=values.std(),
        printed=[x.get(outcome.measure, nan) for x in rows.printed],
    )
    if outcome.split == "validation":  # papers print accuracies on the test set
        numbers["printed"] = nan
    bases = rows.against.dropna()
    compared = {key: paired(values[key], values[base]) for key, base in bases.items()}
    numbers = numbers.join(pd.DataFrame.from_dict(compared, orient="index", columns=COMPARED))
    base_printed = numbers.printed.reindex(bases).set_axis(bases.index)
    numbers["printed_difference"] = numbers.printed - base_printed
    numbers["p"] = numbers.p.astype(float).mask((rows.role == "untested") | (not is_main))
    numbers["p_holm"] = holm(numbers.p[rows.role == ""])
    return numbers.join(means, on="row_hash")


def paired(ours: pd.Series, base: pd.Series) -> list[Any]:
    """Compares values by seed. A test needs three pairs whose differences are not all equal."""
    gap = (ours - base).dropna()
    found = [len(gap), gap.mean(), (gap < 0).sum()]
    if 0 < len(gap) < LEAST_PAIRS:
        return [*found, nan, nan, nan, f"needs {LEAST_PAIRS} pairs"]
    if gap.max() - gap.min() <= ROUNDING:
        return [*found, nan, nan, nan, "equal differences"]
    if gap.empty:
        return [*found, nan, nan, nan, ""]
    from scipy.stats import ttest_1samp  # takes seconds to import

    test = ttest_1samp(gap, 0)
    return [*found, *test.confidence_interval(), test.pvalue, ""]


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's adjusted p-values of a family of tests."""
    ranked = p.dropna().sort_values(kind="stable")
    return (ranked * [*range(len(ranked), 0, -1)]).clip(upper=1).cummax()


# --- text ---------------------------------------------------------------------------------------


def formatted(value: float | None, spec: str) -> str:
    """Formats a number; a dash stands for one that is missing."""
    return NOTHING if value is None or math.isnan(value) else f"{value:{spec}}"


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return f"{p:.1e}" if p < 0.001 else formatted(p, ".3f")


def hours(seconds: float, decimals: int) -> str:
    """Formats seconds as hours; those that would be 0.0 with one significant digit."""
    text = formatted(seconds / 3600, f".{decimals}f")
    return f"{seconds / 3600:.1g}" if seconds > 0 and float(text) == 0 else text


def texts_of(
    lines: pd.DataFrame, heads: dict[str, str], outcome: Outcome, is_main: bool
) -> pd.DataFrame:
    """Returns lines of one outcome as text, without columns that have nothing to show."""

    def of(name: str, spec: str, factor: float = 1) -> list[str]:
        return [formatted(factor * x, spec) for x in lines[name]]

    def pair(first: str, word: str, second: str, spec: str) -> list[str]:
        both = zip(of(first, spec), of(second, spec), strict=True)
        return [x if y == NOTHING else f"{x} {word} {y}" for x, y in both]

    def tested(texts: list[str]) -> list[str]:
        return [x or y for x, y in zip(lines.untestable.fillna(""), texts, strict=True)]

    means = of("mean", outcome.spec)
    columns = {title: [*lines[name]] for name, title in heads.items()}
    columns["n"] = of("n", "d")
    columns[f"{outcome.title} [{outcome.unit}]"] = pair("mean", "+/-", "std", outcome.spec)
    if is_main and outcome.split == "validation":
        columns["test top-1 [%]"] = of("top1_last", ".2f")
    columns["paper [%]"] = of("printed", ".2f")
    columns["easy [%]"] = of("easy_share", ".1f", 100)
    columns["mixed [%]"] = of("mixed_share", ".1f", 100)
    columns["compared with"] = [*lines.against_text]
    columns["pairs"] = of("pairs", ".0f")
    columns[f"difference [{outcome.gap}]"] = of("difference", f"+{outcome.spec}")
    if is_main:
        columns["paper's difference [points]"] = of("printed_difference", "+.2f")
    columns["95 % interval"] = tested(pair("low", "to", "high", f"+{outcome.spec}"))
    if is_main:
        columns["p"] = tested([p_text(p) for p in lines.p])
        corrected = tested([p_text(p) for p in lines.p_holm])
        columns["p (Holm)"] = [x or y for x, y in zip(lines.role, corrected, strict=True)]
    if outcome.measure == "loss":
        columns["lower in"] = pair("below", "of", "pairs", ".0f")
    if is_main:
        best = {
            "median [%]": of("top1_median10", ".2f"),
            "best [%]": of("top1_best", ".2f"),
            "best of 10 [%]": of("top1_best10", ".2f"),
        }
        columns |= {title: texts for title, texts in best.items() if texts != means}
        columns["selected [%]"] = of("top1_selected", ".2f")
        columns["tokens of easy"] = of("easy_tokens", ".1f")
        columns["tokens of mixed"] = of("mixed_tokens", ".1f")
        columns["hours"] = [hours(x, 1) for x in lines.seconds * lines.n]
        columns["status"] = [*lines.state]
    texts = pd.DataFrame(columns)
    empty = texts.columns[(texts == NOTHING).all()].difference([*heads.values()])
    return texts.drop(columns=empty)


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
    outcomes: list[Outcome]  # the first is what it is about
    numbers: pd.DataFrame
    heads: dict[str, str]  # columns that name a row, with their titles
    keys: list[str]  # columns of settings, over which it is drawn
    counted: Counted
    notes: list[str]
    study: Study | None = None  # of the runs, if one names them

    @property
    def main(self) -> Outcome:
        return self.outcomes[0]

    def sections(self, outcome: Outcome) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yields title and lines of each column of a table; together they have all rows."""
        numbers = self.numbers
        own = numbers[(numbers.outcome == outcome.measure) & (numbers.half == outcome.split)]
        for column, lines in own.groupby("column", sort=False):
            others = outcome.title if column else outcome.title.capitalize()
            parts = [column] if outcome == self.main else [column, others]
            yield ": ".join(filter(None, parts)), lines

    def as_markdown(self, lines: pd.DataFrame, outcome: Outcome) -> str:
        return as_markdown(texts_of(lines, self.heads, outcome, outcome == self.main))

    def markdown(self, level: int = 2, is_short: bool = False) -> str:
        """Returns Markdown of the finished rows, with notes on the others.

        If short, the sections are those of the main outcome alone.
        """
        parts = [f"{text}\n" for text in self.about]
        for outcome in self.outcomes[:1] if is_short else self.outcomes:
            for title, lines in self.sections(outcome):
                finished = lines[lines.n > 0]
                if title and not finished.empty:
                    parts.append(f"{'#' * level} {title}\n")
                if not finished.empty:
                    parts.append(f"{self.as_markdown(finished, outcome)}\n")
        notes = [*self.notes]
        main = pd.concat([lines for _, lines in self.sections(self.main)])
        missing = ((main.n == 0) & (main.row_hash != "")).sum()  # others are quoted
        if missing:
            notes.append(f"rows without a finished run: {missing}")
        return "\n".join([*parts, *(f"- {note}" for note in [*notes, *notes_of(self.counted)])])

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        inner = ["row_hash", "against", "text"]
        numbers = self.numbers.drop(columns=inner).rename(columns={"against_text": "compared_with"})
        return numbers.replace(NOTHING, nan).to_csv(index=False, lineterminator="\n")

    def write_page(self, outputs: Path) -> Path:
        """Writes the page of the table, with plots and figures, and its numbers; returns it."""
        path = outputs / REPORT / f"{self.name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"# {self.title}", self.markdown()]
        if self.study is not None or self.keys:
            texts += self._plots(path)
        if self.study is not None:
            texts += self._of_study(self.study, path.parent)
        write_text(path, "\n\n".join(texts) + "\n")
        write_text(path.with_suffix(".csv"), self.csv())
        return path

    def _plots(self, page: Path) -> Iterator[str]:
        for number, (title, lines) in enumerate(self.sections(self.main), start=1):
            path = page.with_name(f"{self.name}-{number}.svg")
            if lines.n.any():
                draw(path, lines[lines.n > 0], self.main, self.keys)
                yield f"![{title}]({quote(path.name)})"

    def _of_study(self, study: Study, folder: Path) -> Iterator[str]:
        """Yields the figures of a study, its runs, rows without one, and how to read the tables."""

        def link(path: Path) -> str:
            return quote(os.path.relpath(path, folder))

        runs = self.counted.runs
        hashes = dict(zip(self.numbers.row, self.numbers.row_hash, strict=True))
        for title, place in study.figures.items():
            row, _, name = place.partition("/")
            own = [run.path / name for run in runs if run.row_hash == hashes[row]]
            drawn = [path for path in own if path.exists()]
            if drawn:
                yield f"## {title}\n\n![{title}]({link(drawn[0])})"
        for title, lines in self.sections(self.main):
            for key, text in zip(lines.row_hash, lines.text, strict=True):
                of_row = [run for run in runs if run.row_hash == key]
                links = [f"[{run.name}]({link(run.path / 'report.md')})" for run in of_row]
                if links:
                    yield f"- {text}: {', '.join(links)}"
            if (lines.n == 0).any():
                head = f"## Rows without a run: {title}".removesuffix(": ")
                yield f"{head}\n\n{self.as_markdown(lines[lines.n == 0], self.main)}"
        yield f"## How to read the tables\n\n{HOW_TO_READ}"


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
    runs = "1 finished run" if len(counted.runs) == 1 else f"{len(counted.runs)} finished runs"
    yield f"{runs}, {hours(seconds, 2)} hours in total, git {', '.join(revisions) or 'unknown'}"


def table_of(
    rows: list[dict[str, Any]], runs: Sequence[Run], outcomes: list[Outcome], **known: Any
) -> Table:
    """Returns the table of rows, by their `key`; outcomes after the first that no run has go."""
    blank: dict[str, Any] = {
        "study": "",
        "row": "",
        "text": "",
        "column": "",
        "row_hash": "",
        "against": None,
    }
    blank |= {"against_text": NOTHING, "role": "", "printed": {}, "state": NOTHING}
    frame = pd.DataFrame([blank | row for row in rows]).set_index("key")
    swept = [key for key in frame if key not in blank]
    frame[swept] = frame[swept].fillna(NOTHING)
    main, *others = outcomes
    seen = [x for x in others if any(x in run.outcomes for run in runs)]
    numbers = [judged(frame, runs, outcome, outcome == main) for outcome in (main, *seen)]
    if main.split == "validation":
        known["about"] = [*known["about"], "Judged on the validation split."]
    return Table(outcomes=[main, *seen], numbers=pd.concat(numbers), keys=swept, **known)


# --- a study ------------------------------------------------------------------------------------


def study_table(part: Part, runs: Sequence[Run]) -> Table:
    """Returns the table of a study: the main outcome by column, then the others."""
    study = part.study
    hashes, texts = part.row_hashes, part.texts
    names = {*hashes.values()}
    chosen = counted([run for run in runs if run.row_hash in names and run.seed in part.seeds])
    shown = chosen.runs
    notes = [*study.notes]
    if study.looks and not part.changes:  # which other runs have
        seeds, note = look(study, len(names), chosen.runs)
        shown = [run for run in chosen.runs if run.seed in seeds]
        notes.insert(0, note)
    rows = []
    for cell in part.cells:
        row = {
            "key": cell.label,
            "study": part.name,
            "row": cell.row,
            "text": texts[cell.label],
            "column": cell.told.column,
            "row_hash": hashes[cell.label],
            "role": cell.told.role,
            "printed": cell.told.printed,
            **{key: as_typed(value) for key, value in cell.values.items()},
        }
        base = part.pairs.get(cell.label)
        if base is not None and hashes[base] != hashes[cell.label]:  # two rows may be one run
            row |= {"against": base, "against_text": texts[base]}
        rows.append(row)
    for name, column, printed in study.quotes:
        row = {"key": f"quoted: {name}: {column}", "study": part.name, "row": name, "text": name}
        rows.append(row | {"column": column, "printed": printed})
    main = study.tested or judged_by(shown)
    outcomes = dict.fromkeys([main, *OUTCOMES, *(x for run in shown for x in run.outcomes)])
    return table_of(
        rows,
        shown,
        [*outcomes],
        name=part.file,
        title=study.title,
        about=part.about,
        heads={"text": "row"},
        counted=chosen,
        notes=notes,
        study=study,
    )


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


def runs_table(runs: Sequence[Run], against: str | None = None) -> Table:
    """Returns the table of any runs, grouped over their seeds.

    `against` (KEY=VALUE, of KEY the last parts will do): each row is compared with the row that
    has this value and is otherwise equal. UserError if no run is usable.
    """
    usable = [run for run in runs if run.status != "unusable"]
    if not usable:
        lines = [f"{run.path}: {run.status_text}" for run in runs]
        raise UserError("; ".join(lines) or "there are no runs in these folders")
    return _by_settings({run.row_hash: run.settings for run in usable}, runs, against)


def sweep_table(plans: Sequence[RunPlan], runs: Sequence[Run]) -> Table:
    """Returns the table of a sweep, whose files are named after the keys and all of its runs."""
    table = _by_settings({row_hash(x.config): row_settings(x.config) for x in plans}, runs)
    overrides = ", ".join(f"`{override}`" for override in shared_overrides(plans)) or "the defaults"
    keys = ", ".join(f"`{name}`" for name in table.keys) or "seeds"
    seeds = ", ".join(map(str, sorted({plan.config.seed for plan in plans})))
    stem = "-".join(map(last_part, table.keys)) or "seeds"
    tail = f"-{digest(sorted(run_hash(plan.config) for plan in plans))}"
    about = f"A sweep over {keys}, with {overrides}; seeds {seeds}."
    return replace(table, name=cut(stem, LONGEST_NAME, tail), about=[about, *table.about])


def _by_settings(
    by_row: dict[str, dict[str, Any]], runs: Sequence[Run], against: str | None = None
) -> Table:
    """Returns the table of rows of settings, by hash; its columns are those that differ."""
    texts = {key: {x: as_typed(y) for x, y in row.items()} for key, row in by_row.items()}
    settings = pd.DataFrame.from_dict(texts, orient="index").fillna(NOTHING)
    heads, following = differing(settings)
    chosen = counted(runs)
    first = settings.iloc[0]
    notes = [", ".join(first[name] for name in NAMES if name not in heads)]
    if following:
        notes.append(f"differs as well: {', '.join(following)}")
    bases: dict[str, str | None] = {}
    if against is not None:
        bases = bases_of(settings[[*heads, *following]], against)
        alone = [*bases.values()].count(None)
        reason = f"for each no row, or more than one, has {against} and differs in nothing else"
        notes += [f"rows that are not compared: {alone}; {reason}"] * bool(alone)
    order = settings[heads].apply(pd.to_numeric, errors="coerce").sort_values(heads).index
    rows = []
    for key in order if heads else settings.index:
        done = {run.seed for run in chosen.runs if run.row_hash == key}
        open_runs = [run for run in runs if run.row_hash == key and run.seed not in done]
        states = [f"seed {run.seed} {chosen.left_out[run.path]}" for run in open_runs]
        row = {"key": key, "row_hash": key, **settings.loc[key, heads]}
        row["state"] = "; ".join([f"{len(done)} finished", *states])
        if bases.get(key) is not None:
            row |= {"against": bases[key], "against_text": against}
        rows.append(row)
    return table_of(
        rows,
        chosen.runs,
        [judged_by(chosen.runs)],
        name="runs",
        title="Runs",
        about=[],
        heads=dict(zip(heads, short_names(heads), strict=True)),
        counted=chosen,
        notes=[note for note in notes if note],
    )


def differing(settings: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Returns the keys that tell each row from every other one, and those that follow them.

    What comes with the name of a model, a data set or a stack is in neither.
    """
    groups = {key.rpartition(".")[0] for key in settings}  # which are null in some rows
    heads, following = list[str](), list[str]()
    for key in settings.columns[settings.nunique() > 1]:
        group = key.partition(".")[0]
        near = [head for head in heads if head.partition(".")[0] == group]
        owners = [x for x in near if settings.groupby(x)[key].nunique().max() == 1]
        applies = settings[key][settings[key] != NOTHING]
        is_chosen = key.startswith("augmentation.") and applies.nunique() > 1  # beside the stack
        if key not in groups and (is_chosen or not owners):
            heads.append(key)
        elif key not in groups and owners[0] not in NAMES:  # else the name tells it already
            following.append(key)
    return heads, following


def bases_of(settings: pd.DataFrame, against: str) -> dict[str, str | None]:
    """Returns, for each row without this value, the row with it that differs in nothing else.

    A setting that one of both does not have, as tau without HTM, is no difference. None for a row
    that has no such base, or more than one.
    """
    name, _, typed = against.partition("=")
    keys = [key for key in settings if f".{key}".endswith(f".{name}")]
    text = as_typed(override_of(f"value={typed}").value)
    having = settings[settings[keys[0]] == text] if len(keys) == 1 else settings[:0]
    if len(having) in (0, len(settings)):
        each = [f"{key}={value}" for key in settings for value in settings[key].unique()]
        raise UserError(f"against={against}: must be one of {', '.join(each) or 'none'}")
    bases: dict[str, str | None] = {}
    for row in settings.index.difference(having.index):
        ours, theirs = settings.drop(columns=keys).loc[row], having.drop(columns=keys)
        is_equal = (theirs == ours) | (theirs == NOTHING) | (ours == NOTHING)
        fitting = theirs.index[is_equal.all(axis="columns")]
        bases[row] = fitting[0] if len(fitting) == 1 else None
    return bases
