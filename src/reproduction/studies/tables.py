"""Tables of runs: means over seeds and paired differences, as numbers, Markdown and a page.

`study_table` and `runs_table` say what is known of each row, `judged` adds its numbers, a line for
each row and outcome, `texts_of` makes text of them, and a `Table` writes it.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    LOSS,
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
from reproduction.studies.study import Part, Printed, Study, short_names

REPORT = "report"  # the folder of tables beside the runs
MOST_NAMED = 5  # runs that are not counted
NOTHING = "-"
P = ".3f"  # the format of p-values
LEAST_PAIRS = 3  # for a test: with two, the 95 % interval is +-12.7 standard errors
ROUNDING = 1e-9  # in points or nats: differences that differ by less are equal
COMPARED = [
    "pairs",
    "difference",
    "below",
    "low",
    "high",
    "p",
    "untestable",
    "printed_difference",
]
# Keys that stand for what comes with them: another model has other sizes, another stack other
# settings of its methods.
NAMES = ("model.name", "dataset.name", STACK_KEY)
HOW_TO_READ = """\
Mean +/- standard deviation over n seeds, after the last epoch, on the test set of CIFAR and the
validation set of ImageNet. Difference: from the row that is named, over the seeds that both have
(`pairs`, if they are fewer than n), with its 95 % interval, which is not corrected for the number
of intervals. p: of a two-sided paired t-test, corrected by Holm for the other tests of the table.
Paper: the printed value. Easy: the share of samples whose difficulty is below tau. Mixed: the share
of samples in which HTM replaced a token. Both are means over training."""

# --- numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a row before there are numbers."""

    key: str
    row_hash: str = ""  # of its runs; a row that is quoted has none
    study: str = ""
    row: str = ""  # its name in the study
    text: str = ""
    column: str = ""  # the title of the part of the table that has it
    against: str | None = None  # the key of the row that it is compared with
    compared_with: str = NOTHING
    role: str = ""
    printed: Printed = field(default_factory=dict)
    state: str = NOTHING  # of its runs that are not finished
    values: Mapping[str, Any] = field(default_factory=dict)  # by the keys that tell rows apart


def frame_of(rows: Sequence[Row], keys: Sequence[str]) -> pd.DataFrame:
    """Returns a frame of rows, with a column for each of these keys."""
    frame = pd.DataFrame([asdict(row) for row in rows]).set_index("key")
    for key in keys:
        frame[key] = [row.values.get(key, NOTHING) for row in rows]
    return frame.drop(columns="values")


def judged(
    rows: pd.DataFrame, runs: Sequence[Run], outcome: Outcome, is_main: bool
) -> pd.DataFrame:
    """Returns the numbers of rows, judged by an outcome of these runs; p of the main one alone.

    A row that is `untested` has no p; one that is `primary` is not corrected for the others.
    """
    values = by_seed(runs, outcome).reindex(columns=rows.row_hash)
    values.columns = rows.index
    numbers = rows.assign(
        outcome=outcome.measure,
        half=outcome.split,
        n=values.count(),
        mean=values.mean(),
        std=values.std(),
        printed=[printed.get(outcome.measure, nan) for printed in rows.printed],
    )
    if outcome.split == "validation":  # papers print accuracies on the test set
        numbers["printed"] = nan
    bases = rows.against.dropna()
    compared = []
    for key, base in bases.items():
        printed_difference = numbers.printed[key] - numbers.printed[base]
        line = paired(values[key], values[base])
        compared.append(line | {"printed_difference": printed_difference})
    numbers = numbers.join(pd.DataFrame(compared, index=bases.index, columns=COMPARED))
    is_tested = is_main & (rows.role != "untested")
    numbers["p"] = numbers.p.astype(float).where(is_tested)
    numbers["p_holm"] = holm(numbers.p[rows.role == ""])
    return numbers.join(means_of(runs), on="row_hash")


def by_seed(runs: Sequence[Run], outcome: Outcome) -> pd.DataFrame:
    """Returns the values of an outcome, a line for each seed, a column for each row's hash."""
    found = [(run.seed, run.row_hash, run.outcomes.get(outcome, nan)) for run in runs]
    values = pd.DataFrame(found, columns=["seed", "row_hash", "value"])
    return values.pivot(index="seed", columns="row_hash", values="value").astype(float)


def means_of(runs: Sequence[Run]) -> pd.DataFrame:
    """Returns the means of what runs measured, by their rows' hash."""
    columns = ["row_hash", *MEASURES]
    measures = [run.measures | {"row_hash": run.row_hash} for run in runs]
    return pd.DataFrame(measures, columns=columns).groupby("row_hash").mean()


def paired(ours: pd.Series, base: pd.Series) -> dict[str, Any]:
    """Compares values by seed. A test needs three pairs whose differences are not all equal."""
    gap = (ours - base).dropna()
    found = {"pairs": len(gap), "difference": gap.mean(), "below": (gap < 0).sum()}
    if gap.empty:
        return found
    if len(gap) < LEAST_PAIRS:
        return found | {"untestable": f"needs {LEAST_PAIRS} pairs"}
    if gap.max() - gap.min() <= ROUNDING:
        return found | {"untestable": "equal differences"}
    from scipy.stats import ttest_1samp  # takes seconds to import

    test = ttest_1samp(gap, 0)
    low, high = test.confidence_interval()
    return found | {"low": low, "high": high, "p": test.pvalue}


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's adjusted p-values of a family of tests."""
    ranked = p.dropna().sort_values(kind="stable")
    num_left = list(range(len(ranked), 0, -1))
    return (ranked * num_left).clip(upper=1).cummax()


# --- text ---------------------------------------------------------------------------------------


def formatted(values: pd.Series, spec: str) -> pd.Series:
    """Formats numbers; a dash stands for one that is missing."""
    texts = [number(value, spec) for value in values]
    return pd.Series(texts, index=values.index, dtype=object)


def number(value: float, spec: str) -> str:
    """Formats a number: a p-value with three decimals, or two significant digits below 0.001."""
    if pd.isna(value):
        return NOTHING
    if spec == P and value < 0.001:
        return f"{value:.1e}"
    return format(value, spec)


def texts_of(lines: pd.DataFrame, outcome: Outcome) -> pd.DataFrame:
    """Returns lines of one outcome as text: what a row is compared with, and its difference."""
    signed = f"+{outcome.spec}"
    mean = formatted(lines["mean"], outcome.spec)
    deviation = " +/- " + formatted(lines["std"], outcome.spec)
    interval = formatted(lines.low, signed) + " to " + formatted(lines.high, signed)
    below = formatted(lines.below, ".0f") + " of " + formatted(lines.pairs, ".0f") + " pairs"
    texts = pd.DataFrame(index=lines.index)
    texts["n"] = formatted(lines.n, "d")
    texts["mean"] = mean + deviation.where(lines["std"].notna(), "")
    texts["paper [%]"] = formatted(lines.printed, ".2f")
    texts["compared with"] = lines.compared_with
    texts["pairs"] = formatted(lines.pairs.where(lines.pairs != lines.n), ".0f")
    texts["difference"] = formatted(lines.difference.astype(float), signed)
    reason = lines.untestable.astype(object).fillna(NOTHING)
    texts["95 % interval"] = interval.where(lines.low.notna(), reason)
    if outcome.measure == LOSS.measure:
        texts["lower loss in"] = below.where(lines.pairs > 0, NOTHING)
    return texts


def texts_of_main(lines: pd.DataFrame, heads: dict[str, str], outcome: Outcome) -> pd.DataFrame:
    """Returns lines of the main outcome as text, without columns that have nothing to show."""
    names = {
        "mean": f"{outcome.title} [{outcome.unit}]",
        "difference": f"difference [{outcome.gap}]",
    }
    own = texts_of(lines, outcome).rename(columns=names)
    p = formatted(lines.p_holm.fillna(lines.p), P)
    p = p.where(lines.role != "primary", p + " (primary)")
    own["p (Holm)"] = p.where(lines.role != "untested", "untested")
    own["easy [%]"] = formatted(100 * lines.easy_share, ".1f")
    own["mixed [%]"] = formatted(100 * lines.mixed_share, ".1f")
    if outcome.split == "validation":
        own["test top-1 [%]"] = formatted(lines.top1_last, ".2f")
    titles = lines[list(heads)].rename(columns=heads)
    return without_empty(titles.join(own))


def without_empty(texts: pd.DataFrame) -> pd.DataFrame:
    """Leaves out columns that have nothing to show."""
    return texts.loc[:, (texts != NOTHING).any()]


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
    main: Outcome  # what it is about
    others: list[Outcome]
    numbers: pd.DataFrame
    heads: dict[str, str]  # columns that name a row, with their titles
    keys: list[str]  # columns of settings, over which it is drawn
    counted: Counted
    notes: list[str]
    study: Study | None = None  # of the runs, if one names them

    def of_outcome(self, outcome: Outcome) -> pd.DataFrame:
        """Returns the lines of an outcome."""
        numbers = self.numbers
        return numbers[(numbers.outcome == outcome.measure) & (numbers.half == outcome.split)]

    def sections(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yields title and finished rows of each part of the table, of which there may be none."""
        for title, lines in self.of_outcome(self.main).groupby("column", sort=False):
            yield str(title), lines[lines.n > 0]

    def main_tables(self, level: int = 2) -> Iterator[str]:
        """Yields Markdown of the main outcome, a table for each part."""
        for title, lines in self.sections():
            if lines.empty:
                continue
            if title:
                yield f"{'#' * level} {title}"
            yield as_markdown(texts_of_main(lines, self.heads, self.main))

    def other_texts(self) -> pd.DataFrame:
        """Returns the finished rows of all other outcomes as one frame of text."""
        parts = [pd.DataFrame()]
        for outcome in self.others:
            lines = self.of_outcome(outcome)
            lines = lines[lines.n > 0]
            titles = lines[list(self.heads)].rename(columns=self.heads)
            titles.insert(0, "part", lines.column.replace("", NOTHING))
            titles["outcome"] = f"{outcome.title} [{outcome.unit}]"
            parts.append(titles.join(texts_of(lines, outcome)))
        texts = pd.concat(parts).fillna(NOTHING)
        return texts.rename(columns={"mean": "mean +/- deviation"})

    def markdown(self, is_short: bool = False) -> str:
        """Returns Markdown of the finished rows, with notes on the others.

        If short, it has the main outcome alone.
        """
        parts = [*self.about, *self.main_tables()]
        others = self.other_texts()
        if not is_short and not others.empty:
            parts.append("## Other outcomes")
            parts.append(as_markdown(without_empty(others)))
        parts.append("\n".join(f"- {note}" for note in self.all_notes()))
        return "\n\n".join(parts)

    def all_notes(self) -> Iterator[str]:
        """Yields the notes of the study, and on the runs."""
        yield from self.notes
        missing = self.missing()
        num_missing = (missing.row_hash != "").sum()  # others are quoted
        if num_missing:
            yield f"rows without a finished run: {num_missing}"
        yield from notes_of(self.counted)

    def missing(self) -> pd.DataFrame:
        """Returns the rows without a finished run, among them those that are quoted."""
        lines = self.of_outcome(self.main)
        return lines[lines.n == 0]

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        numbers = self.numbers.drop(columns=["row_hash", "against", "text"])
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
        for number, (title, lines) in enumerate(self.sections(), start=1):
            path = page.with_name(f"{self.name}-{number}.svg")
            if not lines.empty:
                draw(path, lines, self.main, self.keys)
                yield f"![{title}]({quote(path.name)})"

    def _of_study(self, study: Study, folder: Path) -> Iterator[str]:
        """Yields the figures of a study, its runs, rows without one, and how to read the tables."""

        def link(path: Path) -> str:
            return quote(os.path.relpath(path, folder))

        lines = self.of_outcome(self.main)
        runs_of = defaultdict(list)
        for run in self.counted.runs:
            runs_of[run.row_hash].append(run)
        for title, place in study.figures.items():
            row, _, name = place.partition("/")
            pictures = [run.path / name for run in runs_of[hash_of(lines, row)]]
            drawn = [path for path in pictures if path.exists()]
            if drawn:
                yield f"## {title}\n\n![{title}]({link(drawn[0])})"
        for key, text in zip(lines.row_hash, lines.text, strict=True):
            links = [f"[{run.name}]({link(run.path / 'report.md')})" for run in runs_of[key]]
            if links:
                yield f"- {text}: {', '.join(links)}"
        missing = self.missing()
        if not missing.empty:
            texts = texts_of_main(missing, self.heads | {"column": "part"}, self.main)
            yield f"## Rows without a run\n\n{as_markdown(texts)}"
        yield f"## How to read the tables\n\n{HOW_TO_READ}"


def hash_of(lines: pd.DataFrame, row: str) -> str:
    """Returns the hash of the first line of a row."""
    return str(lines.row_hash[lines.row == row].iloc[0])


def notes_of(counted: Counted) -> Iterator[str]:
    """Yields which runs are not counted, and how many are, with their hours and git revisions."""
    left_out = list(counted.left_out.items())
    for path, reason in left_out[:MOST_NAMED]:
        yield f"not counted: {path.name}: {reason}"
    if len(left_out) > MOST_NAMED:
        yield f"and {len(left_out) - MOST_NAMED} more that are not counted"
    codes = defaultdict(set)
    for run in counted.runs:
        codes[run.row_hash].add(run.code)
    several = [code for of_row in codes.values() if len(of_row) > 1 for code in sorted(of_row)]
    if several:
        yield f"runs of one row are of several versions of code: {'; '.join(several)}"
    revisions = sorted({revision for run in counted.runs for revision in run.revisions})
    hours = math.fsum(run.measures.get("seconds", 0.0) for run in counted.runs) / 3600
    git = ", ".join(revisions) or "unknown"
    runs = f"{len(counted.runs)} finished runs"
    if len(counted.runs) == 1:
        runs = "1 finished run"
    yield f"{runs}, {hours:.2f} hours in total, git {git}"


def numbers_of(
    rows: Sequence[Row], keys: Sequence[str], runs: Sequence[Run], outcomes: Sequence[Outcome]
) -> pd.DataFrame:
    """Returns the numbers of rows for each outcome, the main one first."""
    frame = frame_of(rows, keys)
    return pd.concat([judged(frame, runs, x, is_main=x == outcomes[0]) for x in outcomes])


def judged_on(main: Outcome) -> list[str]:
    """Says it if a table is not judged on the test set."""
    if main.split == "validation":
        return ["Judged on the validation split."]
    return []


# --- a study ------------------------------------------------------------------------------------


def study_table(part: Part, runs: Sequence[Run]) -> Table:
    """Returns the table of a study: the main outcome by column, then the others."""
    study = part.study
    names = set(part.row_hashes.values())
    chosen = counted([run for run in runs if run.row_hash in names and run.seed in part.seeds])
    rows = rows_of(part)
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    seen = {outcome for run in chosen.runs for outcome in run.outcomes}
    main = study.tested or judged_by(chosen.runs)
    known = dict.fromkeys([*OUTCOMES, *sorted(seen, key=lambda outcome: outcome.name)])
    others = [outcome for outcome in known if outcome in seen and outcome != main]
    notes = list(study.notes)
    if study.quotes:
        notes.append(f"quoted, not trained here: {study.source.strip() or 'the paper'}")
    return Table(
        name=part.file,
        title=study.title,
        about=part.about + judged_on(main),
        main=main,
        others=others,
        numbers=numbers_of(rows, keys, chosen.runs, [main, *others]),
        heads={"text": "row"},
        keys=keys,
        counted=chosen,
        notes=notes,
        study=study,
    )


def rows_of(part: Part) -> list[Row]:
    """Returns the rows of a study, then those that it quotes."""
    rows = []
    for cell in part.cells:
        row = Row(
            key=cell.label,
            row_hash=part.row_hashes[cell.label],
            study=part.name,
            row=cell.row,
            text=part.texts[cell.label],
            column=cell.told.column,
            role=cell.told.role,
            printed=cell.told.printed,
            values={key: as_typed(value) for key, value in cell.values.items()},
        )
        base = part.pairs.get(cell.label)
        if base is not None and part.row_hashes[base] != row.row_hash:  # two rows may be one run
            row = replace(row, against=base, compared_with=part.texts[base])
        rows.append(row)
    for name, column, printed in part.study.quotes:
        row = Row(
            key=f"quoted: {name}: {column}",
            study=part.name,
            row=name,
            text=name,
            column=column,
            printed=printed,
        )
        rows.append(row)
    return rows


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
    shared = [first[name] for name in NAMES if name not in heads]
    notes = []
    if shared:
        notes.append(", ".join(shared))
    if following:
        notes.append(f"differs as well: {', '.join(following)}")
    bases: dict[str, str | None] = {}
    if against is not None:
        bases = bases_of(settings[heads + following], against)
    alone = [row for row, base in bases.items() if base is None]
    if alone:
        reason = f"for each no row, or more than one, has {against} and differs in nothing else"
        notes.append(f"rows that are not compared: {len(alone)}; {reason}")
    rows = []
    for key in by_size(settings, heads):
        row = Row(key=key, row_hash=key, state=unfinished(key, runs, chosen))
        row = replace(row, values=dict(settings.loc[key, heads]))
        if against is not None and bases.get(key) is not None:
            row = replace(row, against=bases[key], compared_with=against)
        rows.append(row)
    main = judged_by(chosen.runs)
    return Table(
        name="runs",
        title="Runs",
        about=judged_on(main),
        main=main,
        others=[],
        numbers=numbers_of(rows, heads, chosen.runs, [main]),
        heads=dict(zip(heads, short_names(heads), strict=True)),
        keys=heads,
        counted=chosen,
        notes=notes,
    )


def by_size(settings: pd.DataFrame, heads: list[str]) -> list[str]:
    """Returns the rows in the order of their values, as numbers."""
    if not heads:
        return list(settings.index)
    numbers = settings[heads].apply(pd.to_numeric, errors="coerce")
    return list(numbers.sort_values(heads).index)


def unfinished(key: str, runs: Sequence[Run], chosen: Counted) -> str:
    """Says what has become of the seeds of a row that have no finished run."""
    done = {run.seed for run in chosen.runs if run.row_hash == key}
    missing = [run for run in runs if run.row_hash == key and run.seed not in done]
    texts = [f"seed {run.seed} {chosen.left_out[run.path]}" for run in missing]
    return "; ".join(texts) or NOTHING


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
    having = settings[:0]
    if len(keys) == 1:
        having = settings[settings[keys[0]] == text]
    if len(having) in (0, len(settings)):
        each = [f"{key}={value}" for key in settings for value in settings[key].unique()]
        raise UserError(f"against={against}: must be one of {', '.join(each) or 'none'}")
    bases: dict[str, str | None] = {}
    for row in settings.index.difference(having.index):
        ours, theirs = settings.drop(columns=keys).loc[row], having.drop(columns=keys)
        is_equal = (theirs == ours) | (theirs == NOTHING) | (ours == NOTHING)
        fitting = theirs.index[is_equal.all(axis="columns")]
        bases[row] = None
        if len(fitting) == 1:
            bases[row] = fitting[0]
    return bases
