"""The one table of results: statistics over seeds and paired tests, as text and as CSV.

A frame has a row for each configuration: of a study in results.py, of any runs in sweeps.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import ttest_rel

from reproduction.studies.runs import LAST_TEN, METRICS, MIXING, REPORT, SELECTED, newest
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

TESTED = "top1_last"  # percent
LEAST_SEEDS = 3  # common ones, for a test: two give an interval of 13 standard errors each way
SAME = 1e-9  # percent: smaller differences count as equal
SPREADS = (*METRICS, *SELECTED, LAST_TEN, *MIXING)
TEST = (
    *("difference", "test_seeds", "test_low", "test_high", "test_t", "test_p", "test_p_holm"),
    "test_note",
)
CONFIDENCE = 0.95  # of the interval test_low to test_high around the difference
NOTHING = "-"
EMPTY = {NOTHING, "0.0", "0.00", "0.00 +/- 0.00"}  # a column of these is left out
LONGEST = 80  # characters of a value


def statistics(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns n, seeds, mean and sample deviation of SPREADS, and provenance, by `key`.

    Of several finished runs with the same key and seed the newest counts. One seed has no
    deviation.
    """
    groups = newest(runs).groupby("key")
    columns: dict[str, Any] = {"n": groups.size(), "seeds": groups.seed.agg(list)}
    for name in SPREADS:
        columns |= {f"{name}_mean": groups[name].mean(), f"{name}_std": groups[name].std()}
    columns["seconds_mean"] = groups.seconds.mean()
    for name in ("devices", "hardware", "git_revision"):
        columns[name] = groups[name].agg(known)
    return pd.DataFrame(columns | {"runs": groups.folder.agg(list)})


def known(values: Iterable[Any]) -> list[Any]:
    """Returns the distinct values in order of appearance, without missing ones."""
    return list(dict.fromkeys(value for value in values if not pd.isna(value)))


def with_results(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Adds the statistics of each row's `key`, and TEST against its `base`, unless it is its own.

    Holm's correction is over all tests of the table.
    """
    results = statistics(runs)
    same = {name: f"{name} of runs" for name in {*rows} & {*results}}  # as devices, if varied
    table = rows.merge(results.rename(columns=same), "left", left_on="key", right_index=True)
    table["n"] = table.n.fillna(0).astype(int)
    accuracy = accuracies(runs)
    tests: list[dict[str, Any]] = [
        compare(accuracy, row.key, row.base)
        if row.n and isinstance(row.base, str) and row.base != row.key
        else {}
        for row in table.itertuples()
    ]
    added = pd.DataFrame(tests, index=table.index, columns=[*TEST])
    added["test_p_holm"] = holm(added.test_p)
    return pd.concat([table, added], axis=1)


def accuracies(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the tested accuracy by seed (rows) and key (columns)."""
    return newest(runs).pivot(index="seed", columns="key", values=TESTED)


def compare(accuracy: pd.DataFrame, ours: str, base: str) -> dict[str, Any]:
    """Returns TEST of a two-sided paired t-test over common seeds, or why there is none."""
    pairs = accuracy.reindex(columns=[ours, base]).dropna()
    gaps = pairs[ours] - pairs[base]
    result = {"difference": gaps.mean() if len(gaps) else None, "test_seeds": [*gaps.index]}
    if len(gaps) < LEAST_SEEDS:
        return result | {"test_note": f"needs {LEAST_SEEDS} common seeds, has {len(gaps)}"}
    if gaps.max() - gaps.min() < SAME:
        is_zero = abs(gaps.mean()) < SAME
        return result | {
            "test_note": "values are identical" if is_zero else "all differences are equal"
        }
    test = ttest_rel(pairs[ours], pairs[base])
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    result |= {"test_low": low, "test_high": high}
    return result | {"test_t": float(test.statistic), "test_p": float(test.pvalue)}


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's (1979) adjusted p-values of a family of tests; missing ones stay missing."""
    ranked = p.dropna().astype(float).sort_values(kind="stable")
    factors = pd.Series(range(len(ranked), 0, -1), ranked.index)
    return (ranked * factors).clip(upper=1).cummax().reindex(p.index)


def spread(row: Any, name: str) -> str:
    """Formats as `82.87 +/- 0.12`, as the mean alone of one seed, and `-` without runs."""
    mean, std = getattr(row, f"{name}_mean"), getattr(row, f"{name}_std")
    if pd.isna(mean):
        return NOTHING
    return f"{mean:.2f}" + ("" if pd.isna(std) else f" +/- {std:.2f}")


def number(row: Any, name: str, spec: str) -> str:
    """Formats a number; `-` for one that is missing, or that the table does not have."""
    return form(getattr(row, name, None), spec)


def form(value: Any, spec: str) -> str:
    return NOTHING if pd.isna(value) else format(value, spec)


def p_text(p: Any) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return NOTHING if pd.isna(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def _interval(row: Any) -> str:
    """Formats as `-0.31 to +1.20`."""
    low, high = (number(row, f"test_{x}", "+.2f") for x in ("low", "high"))
    return low if low == NOTHING else f"{low} to {high}"


def _latency(row: Any) -> str:
    """Formats as `60.0 (58.0 to 66.0)`: median and quartiles."""
    median, low, high = (number(row, f"latency_{x}ms", ".1f") for x in ("", "low_", "high_"))
    return median if median == NOTHING else f"{median} ({low} to {high})"


SHOWN: Mapping[str, Callable[[Any], str]] = {  # by title, from a row
    "n": lambda row: "" if row.status == "quoted" else str(row.n),
    "last": partial(spread, name=TESTED),
    "median": partial(spread, name="top1_median10"),
    "best": partial(spread, name="top1_best"),
    "validation": partial(spread, name="val_top1_last"),
    "selected": partial(spread, name="top1_selected"),
    "best of 10": partial(spread, name=LAST_TEN),
    "mixed": lambda row: form(100 * row.mixed_share_mean, ".1f"),
    "hours": lambda row: form(row.seconds_mean * row.n / 3600, ".1f"),
    "top-5 last": partial(spread, name="top5_last"),
    "top-5 best": partial(spread, name="top5_best"),
    "top-5 paper": partial(number, name="paper_top5", spec=".2f"),
    "paper": partial(number, name="paper_top1", spec=".2f"),
    "quoted": partial(number, name="paper_top1", spec=".2f"),
    "last - paper": partial(number, name="top1_last_minus_paper", spec="+.2f"),
    "best - paper": partial(number, name="top1_best_minus_paper", spec="+.2f"),
    "difference": partial(number, name="difference", spec="+.2f"),
    "95 % interval": _interval,
    "paper's": partial(number, name="paper_difference", spec="+.2f"),
    "p": lambda row: p_text(row.test_p),
    "p (Holm)": lambda row: p_text(row.test_p_holm),
    "mixed samples": partial(spread, name="mixed_samples"),
    "mixed tokens": partial(spread, name="mixed_tokens"),
    "latency (ms)": _latency,
    "ratio": partial(number, name="latency_ratio", spec=".1f"),
    "paper (ms)": partial(number, name="paper_latency_ms", spec=".0f"),
    "paper's ratio": partial(number, name="paper_latency_ratio", spec=".1f"),
    "status": lambda row: row.status,
}
ALWAYS = ("n", "last", "median", "best")
LEFT = ("status", "row", "data", "command", "rows", "folder")  # columns of texts


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers with what is shown of them.

    `heads` maps the titles of the columns that name a row to those of `numbers`, `shows` are the
    titles in SHOWN. `mark` says why the runs are not the paper's. `more` is shown below.
    """

    name: str
    title: str
    heads: Mapping[str, str]
    shows: Sequence[str]
    numbers: pd.DataFrame
    notes: Sequence[str]
    mark: str | None = None
    more: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    def shown(self) -> pd.DataFrame:
        """Returns the columns for people as text, without those that have nothing to show."""
        heads = {title: self.numbers[name].map(value_text) for title, name in self.heads.items()}
        rows = list(self.numbers.itertuples())
        texts = pd.DataFrame(heads | {x: [SHOWN[x](row) for row in rows] for x in self.shows})
        kept = (*self.heads, *ALWAYS)
        return texts[[x for x in texts if x in kept or not {*texts[x]} <= EMPTY]]

    def sections(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yields the shown rows by their `column`, if they have one, then `more`, with titles."""
        texts = self.shown()
        column = self.numbers.get("column", pd.Series("", texts.index))
        for name in dict.fromkeys(column):
            yield name, texts[column == name]
        yield from self.more.items()

    def lines(self, level: int = 2) -> Iterator[str]:
        """Yields the sections, below headings of a level, and the notes as Markdown."""
        for name, texts in self.sections():
            yield from [f"{'#' * level} {name}\n"] if name else []
            yield as_markdown(texts, [*self.heads, *LEFT]) + "\n"
        yield from (f"- {note}" for note in self.notes)

    def latex(self) -> str:
        """Returns the sections as LaTeX tables, for booktabs, with their names as comments."""
        parts = [] if self.mark is None else [f"% {self.mark.upper()}: not the paper's\n"]
        for name, texts in self.sections():
            align = ["l" if title in (*self.heads, *LEFT) else "r" for title in texts]
            table = texts.to_latex(index=False, escape=True, column_format="".join(align))
            parts.append((f"% {name}\n" if name else "") + table)
        return "\n".join(parts).replace("+/-", r"$\pm$")

    def write(self, folder: Path) -> list[Path]:
        """Writes it as .md, .tex and .csv; UserError if the folder cannot be written to."""
        head = [f"# {self.title}\n"]
        if self.mark:
            head.append(f"> **WARNING. {self.mark.upper()}: not the paper's experiments.**\n")
        texts = {
            "md": "\n".join([*head, *self.lines()]) + "\n",
            "tex": self.latex(),
            "csv": self.csv(),
        }
        paths = [folder / f"{self.name}.{suffix}" for suffix in texts]
        try:
            for path, text in zip(paths, texts.values(), strict=True):
                write_text(path, text)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error}") from error
        return paths

    def csv(self) -> str:
        """Returns a line for each row with unrounded numbers; lists are joined by `;`."""
        joined = self.numbers.drop(columns=["base"]).map(
            lambda x: ";".join(map(str, x)) if isinstance(x, list) else x
        )
        return joined.to_csv(index=False, lineterminator="\n")


def as_markdown(texts: pd.DataFrame, left: Iterable[str] = LEFT) -> str:
    """Returns a table with escaped texts, those of the columns in `left` on the left."""
    align = ["left" if name in left else "right" for name in texts]
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    return escaped.to_markdown(index=False, disable_numparse=True, colalign=align)


def value_text(value: Any) -> str:
    """Formats a setting as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def rank(value: Any) -> tuple[int, float, str]:
    """Sorts settings: numbers before texts, and missing values first."""
    known = isinstance(value, int | float) and not pd.isna(value)
    return (1, float(value), "") if known else (0 if pd.isna(value) else 2, 0.0, str(value))


def report_folder(outputs: Path) -> Path:
    """Creates the folder of reports; UserError if it is a run folder."""
    folder = outputs / REPORT
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is the folder of a run, the report needs this name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
