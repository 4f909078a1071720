"""A table of results: rows with the statistics of their runs over seeds and paired tests.

A row is a configuration, of a study in results.py or of any folder of runs in sweeps.py. What is
shown of it is in columns.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.studies.columns import COLUMNS, COMPARED, MEASURES, NOTHING, TESTED, value_text
from reproduction.studies.runs import REPORT, left, newest, stack_of, state_text
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

LEAST_SEEDS = 3  # common ones, for a test: two give an interval of 13 standard errors each way
SAME = 1e-9  # smaller differences count as equal
CONFIDENCE = 0.95  # of the interval test_low to test_high around the difference
TEST = (
    *("difference", "test_seeds", "test_low", "test_high", "test_t", "test_p", "test_p_holm"),
    "test_note",
)
GAP = {"difference": "difference", "low": "test_low", "high": "test_high", "below": "below"}
ALWAYS = ("n", "last")  # are shown even if they are empty
LEFT = ("status", "row", "data", "command", "rows", "folder")  # columns of texts


def with_results(rows: pd.DataFrame, runs: pd.DataFrame, tested: str = TESTED) -> pd.DataFrame:
    """Adds to each row the statistics of the runs with its `key`, TEST and its `status`.

    Each outcome of COMPARED is compared with that of the row's `base`, the key of another row,
    unless that is its own. TEST is of the outcome `tested`. By its `role`, if it has one, a row is
    `untested`, or `primary` and not among the tests that Holm's correction is over.
    """
    suffixes = ("", " of runs")  # a setting may be called as what is measured, such as devices
    table = rows.merge(statistics(runs), "left", left_on="key", right_index=True, suffixes=suffixes)
    table["n"] = table.n.fillna(0).astype(int)
    table["role"] = table.get("role", pd.Series("", table.index)).fillna("")
    values = {name: by_seed(runs, name) for name in COMPARED}
    tests = [_tests(row, values, tested) for row in table.itertuples()]
    gaps = [f"{name}_{part}" for name in COMPARED for part in GAP]
    added = pd.DataFrame(tests, index=table.index, columns=[*TEST, *gaps])
    added["pairs"] = [len(x) if isinstance(x, list) else 0 for x in added.test_seeds]
    added.loc[table.role == "untested", ["test_t", "test_p", "test_note"]] = None
    added["test_p_holm"] = holm(added.test_p[table.role == ""]).reindex(table.index)
    unfinished = left(runs)
    status = [_status(row, unfinished[unfinished.key == row.key]) for row in table.itertuples()]
    return pd.concat([table, added], axis=1).assign(status=status, tested=tested)


def _tests(row: Any, values: Mapping[str, pd.DataFrame], tested: str) -> dict[str, Any]:
    """Returns the paired differences of a row from its base, and TEST."""
    if not row.n or not isinstance(row.base, str) or row.base == row.key:
        return {}
    found = {name: compare(values[name], row.key, row.base) for name in COMPARED}
    gaps = {f"{name}_{part}": found[name].get(key) for name in found for part, key in GAP.items()}
    return found[tested] | gaps


def statistics(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns n, seeds, mean and sample deviation of MEASURES, and provenance, by `key`.

    Of several finished runs with the same key and seed the newest counts. One seed has no
    deviation.
    """
    groups = newest(runs).groupby("key")
    columns: dict[str, Any] = {"n": groups.size(), "seeds": groups.seed.agg(list)}
    columns["stack"] = groups.settings.agg(lambda settings: stack_of(settings.iloc[0]))
    for name in MEASURES:
        columns |= {f"{name}_mean": groups[name].mean(), f"{name}_std": groups[name].std()}
    for name in ("devices", "hardware", "git_revision"):
        columns[name] = groups[name].agg(known)
    return pd.DataFrame(columns | {"runs": groups.folder.agg(list)})


def known(values: Iterable[Any]) -> list[Any]:
    """Returns the distinct values in order of appearance, without missing ones."""
    return list(dict.fromkeys(value for value in values if not pd.isna(value)))


def by_seed(runs: pd.DataFrame, name: str = TESTED) -> pd.DataFrame:
    """Returns a measure of finished runs by seed (rows) and key (columns)."""
    return newest(runs).pivot(index="seed", columns="key", values=name)


def compare(values: pd.DataFrame, ours: str, base: str) -> dict[str, Any]:
    """Returns TEST of a two-sided paired t-test over common seeds, or why there is none.

    `below` is the number of pairs in which ours is less.
    """
    pairs = values.reindex(columns=[ours, base]).dropna()
    gaps = pairs[ours] - pairs[base]
    result: dict[str, Any] = {"test_seeds": [*gaps.index], "below": None}
    result["difference"] = None
    if len(gaps):
        result |= {"difference": gaps.mean(), "below": int((gaps < 0).sum())}
    if len(gaps) < LEAST_SEEDS:
        return result | {"test_note": f"needs {LEAST_SEEDS} common seeds, has {len(gaps)}"}
    if gaps.max() - gaps.min() < SAME:
        is_zero = abs(gaps.mean()) < SAME
        return result | {
            "test_note": "values are identical" if is_zero else "all differences are equal"
        }
    from scipy.stats import ttest_rel  # takes seconds to import

    test = ttest_rel(pairs[ours], pairs[base])
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    result |= {"test_low": low, "test_high": high}
    return result | {"test_t": float(test.statistic), "test_p": float(test.pvalue)}


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's (1979) adjusted p-values of a family of tests; missing ones stay missing."""
    ranked = p.dropna().astype(float).sort_values(kind="stable")
    factors = pd.Series(range(len(ranked), 0, -1), ranked.index)
    return (ranked * factors).clip(upper=1).cummax().reindex(p.index)


def _status(row: Any, unfinished: pd.DataFrame) -> str:
    """Returns `finished`, or how many runs are finished and the state of the others."""
    if pd.isna(row.key):
        return "quoted"
    others = [f"seed {run.seed} {state_text(run)}" for run in unfinished.itertuples()]
    if not others:
        return "finished" if row.n else "not run"
    return "; ".join([*([f"{row.n} finished"] if row.n else []), *others])


def shown(numbers: pd.DataFrame, heads: Mapping[str, str], kind: str) -> pd.DataFrame:
    """Returns the columns of a kind as text, without those that have nothing to show."""
    texts = {title: numbers[name].map(value_text) for title, name in heads.items()}
    rows = list(numbers.itertuples())
    for column in COLUMNS:
        if {*kind} & {*column.tables}:
            values = pd.Series([column.text(row) for row in rows], numbers.index)
            if column.title in ALWAYS or not {*values} <= {NOTHING}:
                texts[column.title] = values
    return pd.DataFrame(texts)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers with what is shown of them.

    `kind` has letters of `Column.tables`. `heads` maps the titles of the columns that name a row to
    those of `numbers`. `mark` says why the runs are not the paper's. `more` is shown below.
    """

    name: str
    title: str
    kind: str
    heads: Mapping[str, str]
    numbers: pd.DataFrame
    notes: Sequence[str]
    mark: str | None = None
    more: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    def shown(self) -> pd.DataFrame:
        """Returns the columns for people as text, without those that have nothing to show."""
        return shown(self.numbers, self.heads, self.kind)

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
        """Returns the sections as LaTeX tables for booktabs, with their names as comments."""
        return "\n".join(
            f"% {', '.join(filter(None, (self.mark, name)))}\n"
            + texts.to_latex(index=False, escape=True)
            for name, texts in self.sections()
        )

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


def report_folder(outputs: Path) -> Path:
    """Creates the folder of reports; UserError if it is a run folder."""
    folder = outputs / REPORT
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is the folder of a run, the report needs this name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
