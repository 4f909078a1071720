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

from reproduction.compose import RunPlan, last_part, read_override
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
from reproduction.studies.study import Part, Printed, short_names

REPORT = "report"  # the folder of tables beside the runs
MOST_NAMED = 5  # runs that are not counted
NOTHING = "-"
P = ".3f"  # the format of p-values
LEAST_PAIRS = 3  # for a test: with two, the 95 % interval is +-12.7 standard errors
ROUNDING = 1e-9  # in points or nats: differences that differ by less are equal
COMPARED = ["pairs", "difference", "below", "low", "high", "p"]
# Keys that stand for what comes with them: another model has other sizes, another stack other
# settings of its methods.
NAMES = ("model.name", "dataset.name", STACK_KEY)
HOW_TO_READ = """\
Mean and standard deviation over n seeds, after the last epoch, on the test set of CIFAR and the
validation set of ImageNet. n is 0 for a row without a finished run. Difference: from the row that
is named (other outcomes: from the same one), over the seeds that both have (`pairs`, if they are
fewer than n), with its 95 % interval, which is not corrected for the number of intervals. p: of a
two-sided paired t-test, from three pairs on, corrected by Holm for the other tests of the table.
Paper: the printed value. Easy: the share of samples whose difficulty is below tau. Mixed: the share
of samples in which HTM replaced a token. Both are means over training."""

# --- numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a row before there are numbers."""

    row_hash: str  # of its runs
    row: str = ""  # its name in a study
    text: str = ""
    column: str = ""  # the title of the part of the table that has it
    against: str | None = None  # the hash of the row that it is compared with
    compared_with: str = NOTHING
    role: str = ""
    printed: Printed = field(default_factory=dict)
    state: str = NOTHING  # of its runs that are not finished
    values: Mapping[str, Any] = field(default_factory=dict)  # by the keys that tell rows apart


def numbers_of(
    rows: Sequence[Row], keys: Sequence[str], runs: Sequence[Run], outcomes: Sequence[Outcome]
) -> pd.DataFrame:
    """Returns the numbers of rows for each outcome, the main one first."""
    frame = pd.DataFrame([asdict(row) for row in rows]).drop(columns="values")
    for key in keys:
        frame[key] = [row.values.get(key, NOTHING) for row in rows]
    return pd.concat([judged(frame, runs, x, is_main=x == outcomes[0]) for x in outcomes])


def judged(
    rows: pd.DataFrame, runs: Sequence[Run], outcome: Outcome, is_main: bool
) -> pd.DataFrame:
    """Returns the numbers of rows, judged by an outcome of these runs; p of the main one alone.

    A row that is `untested` has no p; one that is `primary` is not corrected for the others.
    """
    columns = ["seed", "row_hash", "value", *MEASURES]
    found = pd.DataFrame([values_of(run, outcome) for run in runs], columns=columns)
    by_seed = found.pivot(index="seed", columns="row_hash", values="value").astype(float)
    by_seed = by_seed.reindex(columns=rows.row_hash.unique())
    numbers = rows.assign(outcome=outcome.measure, half=outcome.split)
    numbers["n"] = rows.row_hash.map(by_seed.count())
    numbers["mean"] = rows.row_hash.map(by_seed.mean())
    numbers["std"] = rows.row_hash.map(by_seed.std())
    numbers["printed"] = [printed.get(outcome.measure, nan) for printed in rows.printed]
    if outcome.split == "validation":  # papers print accuracies on the test set
        numbers["printed"] = nan
    bases = rows.against.dropna()
    compared = [paired(by_seed[rows.row_hash[row]], by_seed[base]) for row, base in bases.items()]
    numbers = numbers.join(pd.DataFrame(compared, index=bases.index, columns=COMPARED))
    is_tested = is_main & (rows.role != "untested")
    numbers["p"] = numbers.p.astype(float).where(is_tested)
    numbers["p_holm"] = holm(numbers.p[rows.role == ""])
    return numbers.join(found.groupby("row_hash")[[*MEASURES]].mean(), on="row_hash")


def values_of(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome of a run, and what it measured."""
    value = run.outcomes.get(outcome, nan)
    return {"seed": run.seed, "row_hash": run.row_hash, "value": value, **run.measures}


def paired(ours: pd.Series, base: pd.Series) -> dict[str, Any]:
    """Compares values by seed. A test needs three pairs whose differences are not all equal."""
    gap = (ours - base).dropna()
    found = {"pairs": len(gap), "difference": gap.mean(), "below": (gap < 0).sum()}
    if len(gap) < LEAST_PAIRS or gap.max() - gap.min() <= ROUNDING:
        return found
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
    interval = "[" + formatted(lines.low, signed) + ", " + formatted(lines.high, signed) + "]"
    below = formatted(lines.below, ".0f") + " of " + formatted(lines.pairs, ".0f")
    texts = pd.DataFrame(index=lines.index)
    texts["n"] = formatted(lines.n, "d")
    texts["mean"] = formatted(lines["mean"], outcome.spec)
    texts["std"] = formatted(lines["std"], outcome.spec)
    texts["paper [%]"] = formatted(lines.printed, ".2f")
    texts["compared with"] = lines.compared_with
    texts["pairs"] = formatted(lines.pairs.where(lines.pairs != lines.n), ".0f")
    texts["difference"] = formatted(lines.difference.astype(float), signed)
    texts["95 % interval"] = interval.where(lines.low.notna(), NOTHING)
    if outcome.measure == LOSS.measure:
        texts["lower loss in [pairs]"] = below.where(lines.pairs > 0, NOTHING)
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
    """Returns a table with escaped texts; the columns before `n` name a row."""
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    num_names = texts.columns.get_loc("n")
    aligned: Any = {"stralign": "right", "colalign": ["left"] * num_names}
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

    def of_outcome(self, outcome: Outcome) -> pd.DataFrame:
        """Returns the lines of an outcome."""
        numbers = self.numbers
        return numbers[(numbers.outcome == outcome.measure) & (numbers.half == outcome.split)]

    def sections(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yields title and rows of each part of the table."""
        for title, lines in self.of_outcome(self.main).groupby("column", sort=False):
            yield str(title), lines

    def main_tables(self, level: int = 2) -> Iterator[str]:
        """Yields Markdown of the main outcome, a table for each part."""
        for title, lines in self.sections():
            if title:
                yield f"{'#' * level} {title}"
            yield as_markdown(texts_of_main(lines, self.heads, self.main))

    def other_texts(self) -> pd.DataFrame:
        """Returns the rows of all other outcomes that have a run as one frame of text."""
        parts = [pd.DataFrame()]
        for outcome in self.others:
            lines = self.of_outcome(outcome)
            lines = lines[lines.n > 0]
            titles = lines[list(self.heads)].rename(columns=self.heads)
            titles.insert(0, "part", lines.column.replace("", NOTHING))
            titles["outcome"] = f"{outcome.title} [{outcome.unit}]"
            texts = texts_of(lines, outcome).drop(columns="compared with")
            parts.append(titles.join(texts))
        return pd.concat(parts).fillna(NOTHING)

    def markdown(self) -> str:
        """Returns Markdown of the main outcome, with notes."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join([*self.about, *self.main_tables(), notes])

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        numbers = self.numbers.drop(columns=["row_hash", "against", "text"])
        return numbers.replace(NOTHING, nan).to_csv(index=False, lineterminator="\n")

    def write_page(self, outputs: Path) -> Path:
        """Writes the page of the table, with plots and links to its runs, and its numbers."""
        path = outputs / REPORT / f"{self.name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"# {self.title}", self.markdown(), *self._plots(path)]
        others = self.other_texts()
        if not others.empty:
            texts += ["## Other outcomes", as_markdown(without_empty(others))]
        links = []
        for run in self.counted.runs:
            report = quote(os.path.relpath(run.path / "report.md", path.parent))
            links.append(f"- [{run.name}]({report})")
        texts += ["## Runs", "\n".join(links)]
        texts += ["## How to read the tables", HOW_TO_READ]
        write_text(path, "\n\n".join(texts) + "\n")
        write_text(path.with_suffix(".csv"), self.csv())
        return path

    def _plots(self, page: Path) -> Iterator[str]:
        for number, (title, lines) in enumerate(self.sections(), start=1):
            path = page.with_name(f"{self.name}-{number}.svg")
            finished = lines[lines.n > 0]
            if not finished.empty:
                draw(path, finished, self.main, self.keys)
                yield f"![{title}]({quote(path.name)})"


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
    return Table(
        name=part.file,
        title=study.title,
        about=part.about,
        main=main,
        others=others,
        numbers=numbers_of(rows, keys, chosen.runs, [main, *others]),
        heads={"text": "row"},
        keys=keys,
        counted=chosen,
        notes=[*study.notes, *notes_of(chosen)],
    )


def rows_of(part: Part) -> list[Row]:
    """Returns the rows of a study."""
    texts = {cell.label: cell.text for cell in part.cells}
    rows = []
    for cell in part.cells:
        row = Row(
            row_hash=part.row_hashes[cell.label],
            row=cell.row,
            text=cell.text,
            column=cell.spec.column,
            role=cell.spec.role,
            printed=cell.spec.printed,
            values={key: as_typed(value) for key, value in cell.values.items()},
        )
        base = part.pairs.get(cell.label)
        if base is not None and part.row_hashes[base] != row.row_hash:  # two rows may be one run
            row = replace(row, against=part.row_hashes[base], compared_with=texts[base])
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
    shared = [x for x in plans[0].overrides if all(x in plan.overrides for plan in plans)]
    overrides = ", ".join(f"`{override}`" for override in shared) or "the defaults"
    keys = ", ".join(f"`{name}`" for name in table.keys) or "seeds"
    seeds = ", ".join(map(str, sorted({plan.config.seed for plan in plans})))
    stem = "-".join(map(last_part, table.keys)) or "seeds"
    name = cut(stem, LONGEST_NAME, f"-{digest(sorted(run_hash(plan.config) for plan in plans))}")
    about = f"A sweep over {keys}, with {overrides}; seeds {seeds}."
    return replace(table, name=name, title=f"Sweep {stem}", about=[about])


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
        notes.append(f"all runs: {', '.join(shared)}")
    if following:
        notes.append(f"differs as well: {', '.join(following)}")
    bases = dict[str, str]()
    if against is not None:
        bases = bases_of(settings[heads + following], against)
    numbers = settings[heads].apply(pd.to_numeric, errors="coerce")
    rows = []
    for key in numbers.sort_values(heads).index:
        state = unfinished(key, runs, chosen)
        row = Row(row_hash=key, state=state, values=dict(settings.loc[key, heads]))
        if key in bases:
            row = replace(row, against=bases[key], compared_with=str(against))
        rows.append(row)
    main = judged_by(chosen.runs)
    return Table(
        name="runs",
        title="Runs",
        about=[],
        main=main,
        others=[],
        numbers=numbers_of(rows, heads, chosen.runs, [main]),
        heads=dict(zip(heads, short_names(heads), strict=True)),
        keys=heads,
        counted=chosen,
        notes=[*notes, *notes_of(chosen)],
    )


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
        elif key not in groups and owners[0] not in NAMES:  # else the name says it already
            following.append(key)
    return heads, following


def bases_of(settings: pd.DataFrame, against: str) -> dict[str, str]:
    """Returns, for rows without this value, the one row with it that differs in nothing else.

    A setting that one of both does not have, as tau without HTM, is no difference.
    """
    name, _, typed = against.partition("=")
    keys = [key for key in settings if f".{key}".endswith(f".{name}")]
    text = as_typed(read_override(f"value={typed}").value())
    having = settings[:0]
    if len(keys) == 1:
        having = settings[settings[keys[0]] == text]
    if len(having) in (0, len(settings)):
        each = [f"{key}={value}" for key in settings for value in settings[key].unique()]
        raise UserError(f"against={against}: must be one of {', '.join(each) or 'none'}")
    bases = {}
    for row in settings.index.difference(having.index):
        ours, theirs = settings.drop(columns=keys).loc[row], having.drop(columns=keys)
        is_equal = (theirs == ours) | (theirs == NOTHING) | (ours == NOTHING)
        fitting = theirs.index[is_equal.all(axis="columns")]
        if len(fitting) == 1:
            bases[row] = fitting[0]
    return bases
