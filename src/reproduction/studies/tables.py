"""The one table of results: statistics over seeds, paired tests and printed values.

`study_table` has a row for each row of a study, `runs_table` in sweeps.py one for each
configuration among any runs. Both are frames of unrounded numbers, which `shown` turns into text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from scipy.stats import ttest_rel

from reproduction.studies.latency import Measurement, flat
from reproduction.studies.plan import Point, against_of, papers_row
from reproduction.studies.runs import LAST_TEN, METRICS, MIXING, SELECTED, left, newest, state_text
from reproduction.studies.study import FULL, SWEEPS, TABLES, Settings, Study

TESTED, LEVEL = "top1_last", 0.05  # percent; of significance
LEAST_SEEDS = 2  # common ones, for a test
SAME = 1e-9  # percent: smaller differences count as equal
SPREADS = (*METRICS, *SELECTED, LAST_TEN, *MIXING)
TEST = ("difference", "test_seeds", "test_t", "test_p", "test_p_holm", "test_note")
COUNTED = ("parameters", "macs", "macs_without_attention")
SHORT = 10  # digits of a git revision
NOTHING = "-"


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
    return result | {"test_t": float(test.statistic), "test_p": float(test.pvalue)}


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's (1979) adjusted p-values of a family of tests; missing ones stay missing."""
    ranked = p.dropna().astype(float).sort_values(kind="stable")
    factors = pd.Series(range(len(ranked), 0, -1), ranked.index)
    return (ranked * factors).clip(upper=1).cummax().reindex(p.index)


def mark_of(points: Sequence[Point], settings: Settings) -> str | None:
    """Says briefly why these are not the paper's experiments; None if they are."""
    papers = [point for point in points if point.study in (*TABLES, *SWEEPS)]
    names = {(point.config.dataset.name, point.row.column) for point in papers}
    others = {f"{x} instead of {y}" for x, y in names if x != y.lower().replace("-", "")}
    scale = [] if settings.scale == FULL else [f"{settings.scale} scale"]
    return ", ".join([*scale, *sorted(others)]) or None


def study_table(
    study: Study,
    points: Sequence[Point],
    keys: Mapping[str, str],
    runs: pd.DataFrame,
    mark: str | None = None,
    latency: Measurement | None = None,
) -> pd.DataFrame:
    """Returns the rows of a study by column, the quoted ones first; numbers are unrounded.

    `keys` has the key of every row that is trained or tested against, by label. With a `mark`
    nothing is compared with printed values.
    """
    rows = [_row(study, point, keys, mark, latency) for point in points]
    quoted = [_quoted(study, name, x) for name in study.quoted for x in study.quoted[name].items()]
    columns = dict.fromkeys(row["column"] for row in [*rows, *quoted])
    ordered = [row for name in columns for row in (*quoted, *rows) if row["column"] == name]
    table = pd.DataFrame(ordered).merge(statistics(runs), "left", left_on="key", right_index=True)
    table["n"] = table.n.fillna(0).astype(int)
    table["status"] = [_status(row, left(runs)) for row in table.itertuples()]
    for metric in METRICS if mark is None else ():
        table[f"{metric}_minus_paper"] = table[f"{metric}_mean"] - table[f"paper_{metric[:4]}"]
    return tested(table, accuracies(runs))


def tested(table: pd.DataFrame, accuracy: pd.DataFrame) -> pd.DataFrame:
    """Adds TEST of each row against the key in its column `base`, unless it is the row's own."""
    tests: list[dict[str, Any]] = [
        compare(accuracy, row.key, row.base)
        if row.n and isinstance(row.base, str) and row.base != row.key
        else {}
        for row in table.itertuples()
    ]
    added = pd.DataFrame(tests, index=table.index, columns=[*TEST])
    added["test_p_holm"] = holm(added.test_p)
    return pd.concat([table, added], axis=1)


def _row(
    study: Study,
    point: Point,
    keys: Mapping[str, str],
    mark: str | None,
    latency: Measurement | None,
) -> dict[str, Any]:
    """Returns what is known of a row without its runs."""
    base = against_of(point)
    printed = {} if mark is not None and study.sweep else dict(point.row.printed)
    row: dict[str, Any] = {
        **({"value": _value(point)} if study.sweep else {}),
        **{"row": point.row.row, "column": point.row.column, "label": point.label},
        **{"key": keys[point.label], "base": None if base is None else keys[base]},
        **{"against": base, "paper_top1": printed.get("top1"), "paper_top5": printed.get("top5")},
        "paper_difference": None if base is None or study.sweep else _printed_gap(study, point),
    }
    if size := study.sizes.get(point.row.row):
        row |= dict(zip(COUNTED, size.counted, strict=True))
        row |= {"paper_parameters_m": size.parameters, "paper_macs_g": size.macs}
    if "latency_ms" in printed:
        row |= flat(latency, point.row.row, study)
    return row


def _value(point: Point) -> str | None:
    return None if point.is_shown_only else point.name.partition("=")[2]


def _printed_gap(study: Study, point: Point) -> float | None:
    """Returns the printed accuracy minus that of the row it is tested against."""
    name = point.row.against
    assert name is not None
    base = papers_row(name).printed if "/" in name else study.rows[name].printed
    both = point.row.printed.get("top1"), base.get("top1")
    return None if None in both else both[0] - both[1]  # type: ignore[operator]


def _quoted(study: Study, name: str, cell: tuple[str, Mapping[Any, float]]) -> dict[str, Any]:
    """Returns a row that is quoted from other work, with the size of its model if printed."""
    column, printed = cell
    row: dict[str, Any] = {"row": name, "column": column}
    row |= dict.fromkeys(("label", "key", "base"))
    row |= {f"paper_{key}": value for key, value in printed.items()}
    if size := study.sizes.get(name):
        row |= dict(zip(COUNTED, size.counted, strict=True))
        row |= {"paper_parameters_m": size.parameters, "paper_macs_g": size.macs}
    return row


def _status(row: Any, unfinished: pd.DataFrame) -> str:
    if pd.isna(row.label):
        return "quoted"
    parts = [f"{row.n} finished"] if row.n else []
    others = unfinished[unfinished.key == row.key]
    parts += [f"seed {run.seed} {state_text(run)}" for run in others.itertuples()]
    return "; ".join(parts) or "not run"


def spread(mean: Any, std: Any, factor: float = 1) -> str:
    """Formats as `82.87 +/- 0.12`, as the mean alone of one seed, and `-` without runs."""
    if pd.isna(mean):
        return NOTHING
    return f"{factor * mean:.2f}" + ("" if pd.isna(std) else f" +/- {factor * std:.2f}")


def p_text(p: Any) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return NOTHING if pd.isna(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def form(value: Any, spec: str) -> str:
    """Formats a number; `-` for a missing one."""
    return NOTHING if pd.isna(value) else format(value, spec)


ACCURACIES = {"last": "top1_last", "median": "top1_median10", "best": "top1_best"}


def shown(table: pd.DataFrame, title: str = "row") -> pd.DataFrame:
    """Returns the columns for people as text, without those that have nothing to show.

    Rows that no table of the paper prints also show the best of the last ten epochs and hours.
    """
    columns: dict[str, Any] = {title: table.row, "n": table.n.map(str)}
    columns |= {name: spreads(table, metric) for name, metric in ACCURACIES.items()}
    is_own = title == "row" and table.paper_top1[table.label.notna()].isna().all()
    if is_own:
        columns["best of 10"] = spreads(table, LAST_TEN)
        columns["mixed"] = [spread(x, None, 100).partition(".")[0] for x in table.mixed_share_mean]
        columns["hours"] = [form(x, ".1f") for x in table.seconds_mean * table.n / 3600]
    if "paper_top5" in table and table.paper_top5.notna().any():
        names = {"top-5 last": "top5_last", "top-5 best": "top5_best"}
        columns |= {name: spreads(table, metric) for name, metric in names.items()}
        columns["top-5 paper"] = _numbers(table, "paper_top5", ".2f")
    columns |= {
        "quoted" if is_own else "paper": _numbers(table, "paper_top1", ".2f"),
        "last - paper": _numbers(table, "top1_last_minus_paper", "+.2f"),
        "best - paper": _numbers(table, "top1_best_minus_paper", "+.2f"),
        "difference": _numbers(table, "difference", "+.2f"),
        "paper's": _numbers(table, "paper_difference", "+.2f"),
        "p": table.test_p.map(p_text),
        "p (Holm)": table.test_p_holm.map(p_text),
    }
    if title != "row" and table.mixed_share_mean.any():
        columns["mixed samples"] = spreads(table, "mixed_samples")
        columns["mixed tokens"] = spreads(table, "mixed_tokens")
    if "latency_ms" in table:
        columns["latency (ms)"] = [latency_text(row) for row in table.itertuples()]
        columns["ratio"] = _numbers(table, "latency_ratio", ".1f")
        columns["paper (ms)"] = _numbers(table, "paper_latency_ms", ".0f")
        columns["paper's ratio"] = _numbers(table, "paper_latency_ratio", ".1f")
    core = (title, "n", *ACCURACIES)
    texts = pd.DataFrame(columns)
    return texts[[name for name in texts if name in core or (texts[name] != NOTHING).any()]]


def spreads(table: pd.DataFrame, name: str, factor: float = 1) -> list[str]:
    """Returns the texts of a mean with its deviation."""
    pairs = zip(table[f"{name}_mean"], table[f"{name}_std"], strict=True)
    return [spread(mean, std, factor) for mean, std in pairs]


def _numbers(table: pd.DataFrame, name: str, spec: str) -> list[str]:
    values = table[name] if name in table else [None] * len(table)
    return [form(value, spec) for value in values]


def latency_text(row: Any) -> str:
    """Formats as `60.0 (58.0 to 66.0)`: median and quartiles."""
    if pd.isna(row.latency_ms):
        return NOTHING
    return f"{row.latency_ms:.1f} ({row.latency_low_ms:.1f} to {row.latency_high_ms:.1f})"


def sizes_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Returns our counts beside the printed sizes, a line for each model."""
    rows = table.dropna(subset=["parameters"]).drop_duplicates("row")
    without = [form(x / 1e9, ".2f") for x in rows.macs_without_attention]
    return pd.DataFrame(
        {
            "row": rows.row,
            "parameters (M)": [form(x / 1e6, ".2f") for x in rows.parameters],
            "paper (M)": _numbers(rows, "paper_parameters_m", ""),
            "MACs (G)": [form(x / 1e9, ".2f") for x in rows.macs],
            "without attention": without,
            "paper (G)": _numbers(rows, "paper_macs_g", ""),
        }
    )


def notes_of(
    study: Study, table: pd.DataFrame, keys: Mapping[str, str], runs: pd.DataFrame
) -> list[str]:
    """Returns the notes of a table: its own, significance, shared runs, what is left out."""
    mine = table.dropna(subset=["label"])
    shared = {
        key: [label for label, other in keys.items() if other == key] for key in mine.key.unique()
    }
    texts = [", ".join(labels) for labels in shared.values() if len(labels) > 1]
    notes = [*study.notes, *significance(mine)]
    if texts:
        notes.append(f"Rows of the same configuration share their runs: {'; '.join(texts)}.")
    for run in left(runs[runs.key.isin([*mine.key])]).itertuples():
        why = "" if pd.isna(run.error) else f": {run.error}"
        notes.append(f"Not counted: {run.folder} is {state_text(run)}{why}")
    return [*notes, provenance(mine, runs)]


def significance(table: pd.DataFrame) -> Iterator[str]:
    """Yields a note on the significant differences, if there are comparisons."""
    several = table.column.nunique() > 1
    names = table.row + (" on " + table.column if several else "")
    done = table.test_p.notna()
    texts = [
        f"{name} {gap:+.2f} (p = {p_text(p)})"
        for name, gap, p in zip(
            names[done], table.difference[done], table.test_p[done], strict=True
        )
    ]
    sentences = []
    if texts:
        holds = (table.test_p[done] < LEVEL).tolist()
        yes, no = (
            [x for x, hold in zip(texts, holds, strict=True) if hold is y] for y in (True, False)
        )
        corrected = names[table.test_p_holm < LEVEL]
        count = f"{len(texts)} test{'s' * (len(texts) > 1)}"
        sentences = [
            f"Significant at 5 %: {'; '.join(yes) or 'none'}.",
            f"Not significant: {'; '.join(no) or 'none'}.",
            f"{count}; significant after Holm's correction: {'; '.join(corrected) or 'none'}.",
        ]
    for why, group in names[table.test_note.notna()].groupby(table.test_note):
        sentences.append(f"Not tested ({why}): {'; '.join(group)}.")
    if sentences:
        yield " ".join(sentences)


def provenance(table: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Says how many runs are behind a table, their hours and git revisions."""
    counted = newest(runs[runs.key.isin([*table.key])])
    if counted.empty:
        return "No row has a finished run yet."
    revisions = known(counted.git_revision)
    text = f"{len(counted)} finished runs, {counted.seconds.sum() / 3600:.2f} hours in total, git "
    text += ", ".join(map(short_revision, revisions)) or "revision unknown"
    if len(revisions) > 1:
        text += "; the runs are of more than one revision"
    if any(revision.endswith("-dirty") for revision in revisions):
        text += "; -dirty: the code differs from the revision"
    if counted.log.isna().any():
        text += "; some have no mixing, python scripts/runs.py --upgrade adds it"
    return f"{text}."


def short_revision(revision: str) -> str:
    """Shortens the hash of a git revision, and keeps the suffix `-dirty`."""
    head, mark, dirty = revision.partition("-")
    return head[:SHORT] + mark + dirty
