"""The table of a study: its rows with their results, printed and quoted values, and notes."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import pandas as pd

from reproduction.studies.columns import METRICS, difference, p_text
from reproduction.studies.plan import Point, keys_of, points_of
from reproduction.studies.runs import left, newest, read_runs, state_text
from reproduction.studies.study import FULL, SWEEPS, TABLES, Settings, Study, papers_row
from reproduction.studies.table import Table, known, shown, with_results

LEVEL = 0.05  # of significance, unless a study has looks
COUNTED = ("parameters", "macs", "macs_without_attention")
REVISION_DIGITS = 10  # digits of a git revision
HOW_TO_READ = (
    "Accuracies are top-1 in percent on the held-out images (the test set of CIFAR, the validation "
    "set of ImageNet): mean +/- sample standard deviation over n seeds, the mean alone for n = 1. "
    "Last: after the last epoch. Median: of the last 10 epochs. Best: of the best epoch on these "
    "same held-out images, which is optimistic.",
    "The published code selects the best epoch, so best - paper compares like with like; last - "
    "paper uses no selection on the held-out images. Runs that are not the paper's experiments are "
    "not compared with it.",
    "Difference and p: last epoch, against our own baseline over their common seeds, by a "
    "two-sided paired t-test; p (Holm) is corrected for all tests of the table. Paper's: the "
    "difference of the printed accuracies.",
    "Parameters and MACs are our counts of the row's model beside the printed ones, including "
    "ScoreNet with HTM, and with the number of classes that fits the printed count. MACs: one "
    "image in evaluation, half the FLOPs of torch's FlopCounterMode; most printed counts leave out "
    "the matmuls of attention. Rows without n are quoted by the paper from other work.",
)
SWEPT = (
    "Difference and p: against the runs with the {word} of Table {table}. The baseline is the same "
    "recipe without the method.",
    "Mixed samples of a batch, and tokens replaced in each: means of the last epoch.",
)


def mark_of(points: Sequence[Point], settings: Settings) -> str | None:
    """Says why these are not the paper's experiments; None if they are."""
    papers = [point for point in points if point.study in (*TABLES, *SWEEPS)]
    names = {(point.config.dataset.name, point.row.column) for point in papers}
    others = {f"{x} instead of {y}" for x, y in names if x != y.lower().replace("-", "")}
    scale = [] if settings.scale == FULL else [f"{settings.scale} scale"]
    return ", ".join([*scale, *sorted(others)]) or None


def results_of(
    studies: Mapping[str, Study], settings: Settings, runs: pd.DataFrame | None = None
) -> tuple[list[Table], dict[str, str]]:
    """Returns the tables of studies, and the keys of all rows by label.

    `runs` defaults to those in the folder of the scale.
    """
    points = points_of(studies, settings)
    keys = keys_of(points, settings)
    runs = read_runs(settings.root) if runs is None else runs
    own = {name: [point for point in points if point.study == name] for name in studies}
    tables = [_table(x, studies[x], own[x], keys, runs, settings) for x in studies if own[x]]
    return tables, keys


def _table(
    name: str,
    study: Study,
    points: Sequence[Point],
    keys: Mapping[str, str],
    runs: pd.DataFrame,
    settings: Settings,
) -> Table:
    mark = mark_of(points, settings)
    runs, level, looks = own_runs(study, runs), LEVEL, list[str]()
    if study.looks and settings.scale == FULL:
        runs, level, note = _at_look(study, {point.key for point in points}, runs)
        looks = [note]
    numbers = study_rows(study, points, keys, runs, mark)
    notes = [*looks, *notes_of(study, numbers, keys, runs, level)]
    kind, title, heads = "O", study.title, {"row": "row"}
    if name in TABLES:
        kind, title = "P", f"Table {name[-1]}: {title}"
        kind += "" if numbers.paper_top5.isna().all() else "5"
    elif (sweep := study.sweep) is not None:
        kind, title = "S", f"Sensitivity to {sweep.word}: {title}"
        heads = {sweep.word: "row"}
        notes[:0] = [x.format(word=sweep.word, table=sweep.own[len("table")]) for x in SWEPT]
    more = {}
    if study.sizes:
        sized = numbers.dropna(subset=["parameters"]).drop_duplicates("row")
        more["Parameters and MACs"] = shown(sized, heads, "M")
    if kind == "O" and (is_run := numbers.n > 0).any():
        more["Held-out loss and top-5"] = shown(numbers[is_run], heads, "L")
    return Table(
        name=name,
        title=title,
        kind=kind,
        heads=heads,
        numbers=numbers.assign(scale=settings.scale, warning=mark),
        notes=notes,
        mark=mark,
        more=more,
    )


def own_runs(study: Study, runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs whose seeds belong to the study."""
    return runs[runs.seed.isin([seed for seed in known(runs.seed) if study.has(seed)])]


def _at_look(study: Study, keys: Set[str], runs: pd.DataFrame) -> tuple[pd.DataFrame, float, str]:
    """Returns the runs of the latest look, its level of significance, and a note on it.

    `keys` are those of all rows: a seed is whole if each of them has a finished run.
    """
    rows = newest(runs[runs.key.isin(keys)]).groupby("seed").size()
    whole = [*rows.index[rows == len(keys)]]
    counted = max((n for n in study.looks if n <= len(whole)), default=0)
    plan = " and ".join(f"{n} seeds (at {100 * x:g} %)" for n, x in study.looks.items())
    state = f"this is the look at {counted}" if counted else "none has been reached"
    note = f"Looks are at {plan}, and only whole seeds count: {len(whole)} are whole, {state}."
    return runs[runs.seed.isin(whole[:counted])], study.looks.get(counted, LEVEL), note


def study_rows(
    study: Study,
    points: Sequence[Point],
    keys: Mapping[str, str],
    runs: pd.DataFrame,
    mark: str | None,
) -> pd.DataFrame:
    """Returns the rows of a study with their results, the quoted ones first, by column.

    `keys` has the key of every row that is trained or tested against, by label. With a `mark`
    nothing is compared with printed values.
    """
    quoted = [
        _printed(study, name, column, values)
        for name, columns in study.quoted.items()
        for column, values in columns.items()
    ]
    rows = [*quoted, *(_row(study, point, keys, mark) for point in points)]
    columns = dict.fromkeys(point.row.column for point in points) | dict.fromkeys(
        row["column"] for row in quoted
    )
    ordered = [row for name in columns for row in rows if row["column"] == name]
    table = with_results(pd.DataFrame(ordered), runs, study.tested)
    for metric in METRICS if mark is None else ():
        table[f"{metric}_minus_paper"] = table[f"{metric}_mean"] - table[f"paper_{metric[:4]}"]
    return table


def _row(
    study: Study,
    point: Point,
    keys: Mapping[str, str],
    mark: str | None,
) -> dict[str, Any]:
    """Returns what is known of a row without its runs."""
    printed = {} if mark is not None and study.sweep else point.row.printed
    row = _printed(study, point.row.row, point.row.column, printed)
    row |= {"label": point.label, "key": keys[point.label], "against": point.against}
    if study.sweep is not None:
        row["value"] = None if point.is_shown_only else point.name.partition("=")[2]
    if point.against is not None:
        row["base"], row["role"] = keys[point.against], point.row.role
        table, _, name = point.against.partition("/")
        base = papers_row(point.against) if table in TABLES else study.rows[name]
        both = point.row.printed.get("top1"), base.printed.get("top1")
        if None not in both and study.sweep is None:
            row["paper_difference"] = both[0] - both[1]  # type: ignore[operator]
    return row


def _printed(study: Study, name: str, column: str, values: Mapping[Any, float]) -> dict[str, Any]:
    """Returns what is printed of a row, with the size of its model."""
    row: dict[str, Any] = {"row": name, "column": column}
    row |= dict.fromkeys(("label", "key", "base", "against", "paper_difference"))
    row |= {f"paper_{key}": values.get(key) for key in ("top1", "top5")}
    if size := study.sizes.get(name):
        row |= dict(zip(COUNTED, size.counted, strict=True))
        row |= {"paper_parameters_m": size.parameters, "paper_macs_g": size.macs}
    return row


def notes_of(
    study: Study, table: pd.DataFrame, keys: Mapping[str, str], runs: pd.DataFrame, level: float
) -> list[str]:
    """Returns the notes of a table: its own, significance, shared runs, what is left out."""
    mine = table.dropna(subset=["label"])
    notes = [*study.notes, *significance(mine, level)]
    shared = [[x for x, other in keys.items() if other == key] for key in mine.key.unique()]
    if texts := [", ".join(labels) for labels in shared if len(labels) > 1]:
        notes.append(f"Rows of the same configuration share their runs: {'; '.join(texts)}.")
    for run in left(runs[runs.key.isin(mine.key)]).itertuples():
        why = "" if pd.isna(run.error) else f": {run.error}"
        notes.append(f"Not counted: {run.folder} is {state_text(run)}{why}")
    return [*notes, provenance(mine, runs)]


def significance(table: pd.DataFrame, level: float) -> Iterator[str]:
    """Yields a note on the differences and their significance, if there are comparisons."""
    names = table.row + (" on " + table.column if table.column.nunique() > 1 else "")

    def listed(rows: pd.DataFrame) -> str:
        texts = [
            f"{names[x.Index]} {difference(x, x.tested)} (p = {p_text(x.test_p)})"
            for x in rows.itertuples()
        ]
        return "; ".join(texts) or "none"

    tests, sentences = table[table.test_p.notna()], []
    primary, tests = tests[tests.role == "primary"], tests[tests.role != "primary"]
    if len(primary):
        sentences = [f"Primary: {listed(primary)}."]
    if len(tests):
        holds = tests.test_p < level
        corrected = "; ".join(names[table.test_p_holm < level]) or "none"
        sentences += [
            f"Significant at {100 * level:g} %: {listed(tests[holds])}.",
            f"Not significant: {listed(tests[~holds])}.",
            f"{len(tests)} test{'s' * (len(tests) > 1)}; significant after Holm's correction: "
            f"{corrected}.",
        ]
    for why, group in names[table.test_note.notna()].groupby(table.test_note):
        sentences.append(f"Not tested ({why}): {'; '.join(group)}.")
    if sentences:
        yield " ".join(sentences)


def provenance(table: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Says how many runs are behind a table, their hours and git revisions."""
    counted = newest(runs[runs.key.isin(table.key)])
    if counted.empty:
        return "No row has a finished run yet."
    revisions = known(counted.git_revision)
    text = f"{len(counted)} finished runs, {counted.seconds.sum() / 3600:.2f} hours in total, git "
    text += ", ".join(map(short_revision, revisions)) or "revision unknown"
    if len(revisions) > 1:
        text += "; the runs are of more than one revision"
    if any(revision.endswith("-dirty") for revision in revisions):
        text += "; -dirty: the code differs from the revision"
    return f"{text}."


def short_revision(revision: str) -> str:
    """Shortens the hash of a git revision, and keeps the suffix `-dirty`."""
    head, mark, dirty = revision.partition("-")
    return head[:REVISION_DIGITS] + mark + dirty
