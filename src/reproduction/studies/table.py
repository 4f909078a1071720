"""Tables of runs: a frame of runs, a frame of rows, and their merge with paired tests over seeds.

A study, a sweep and a folder of runs are the same: rows with a `key`, the identity that the runs of
all seeds share, and a `base`, the key of the row that each is compared with.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from reproduction.config import Config
from reproduction.runs import RunFolder, nested, saved
from reproduction.runs import key as key_of
from reproduction.runs import settings as settings_of
from reproduction.start import Point
from reproduction.studies.study import FULL, Study, points
from reproduction.system import UserError, first_line, in_one_line, write_text

OUTCOMES = {  # of a run: title, unit, unit of differences, form
    "top1_last": ("top-1", "%", "points", ".2f"),
    "loss_last": ("held-out loss", "nats", "nats", ".3f"),
    "top5_last": ("top-5", "%", "points", ".2f"),
}
MEASURES = (  # means of them are in every table
    *("top1_median10", "top1_best", "top1_best10", "val_top1_last", "top1_selected"),
    *("mixed_share", "mixed_tokens", "seconds"),
)
FACTS = ("hardware", "threads", "git_revision")
RUNS = (
    *("folder", "path", "key", "seed", "status", "error", "written", "settings", "stack"),
    *("epochs", "planned", *OUTCOMES, *MEASURES, *FACTS),
)
ROWS = (
    *("row", "column", "label", "key", "base", "against", "role"),
    *("printed_top1", "printed_top5", "printed_difference"),
)
TESTS = ("pairs", "difference", "low", "high", "below", "p")
SHOWN = {  # beside the tested outcome: title, column, form
    "median [%]": ("top1_median10", ".2f"),
    "best [%]": ("top1_best", ".2f"),
    "best of 10 [%]": ("top1_best10", ".2f"),
    "validation [%]": ("val_top1_last", ".2f"),
    "selected [%]": ("top1_selected", ".2f"),
    "last - paper [points]": ("minus_paper", "+.2f"),
    "hours": ("hours", ".1f"),
    "tokens": ("mixed_tokens", ".1f"),
}
COMMON = ("model.name", "dataset.name", "mixing")  # are told where they do not differ
REPORT = "report"  # the folder of tables beside the runs
NO_RUNS = (REPORT, "smoke", "data", "benchmark", "check-gpu", "evaluations")
LEAST_PAIRS = 3  # for a test: two give an interval of 13 standard errors each way
NOTHING = "-"
MOST_SHOWN = 5  # runs that are not counted


def read_runs(*places: Path) -> pd.DataFrame:
    """Returns a row for each run folder among `places` or directly below them.

    Only finished runs have outcomes and measures; a folder without a run is `unusable`.
    """
    return pd.DataFrame([_run(x) for place in places for x in _folders(place)], columns=[*RUNS])


def _folders(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        raise UserError(f"{place}: there is no such folder of runs")
    below = sorted(x for x in place.iterdir() if x.is_dir())
    others = (x for x in below if x.name not in NO_RUNS and not x.name.startswith("."))
    yield from [place] if (place / "config.yaml").exists() else others


def _run(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": in_one_line(path.name), "path": path}
    folder = RunFolder(path)
    try:
        config, summary = folder.read_config(), folder.read_summary()
        written = folder.summary_path.stat().st_mtime if summary else 0.0
        status = folder.status()
        return row | {"written": written} | _facts(config, {**summary, "status": status})
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, UserError) else first_line(error)
    return row | {"status": "unusable", "error": in_one_line(reason.replace(f"{path}/", ""))}


def _facts(config: Config, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is known of a run from its configuration and its summary."""
    settings = settings_of(config)
    for name, numbers in summary.get("htm", {}).items():
        if settings.get(full := f"augmentation.htm.{name}") == "auto":
            settings[full] = f"auto ({', '.join(dict.fromkeys(f'{x:g}' for x in numbers))})"
    row: dict[str, Any] = {key: summary.get(key) for key in ("status", "error", "epochs", *FACTS)}
    if row["status"] == "finished":
        row |= {"error": None, **_outcomes(summary, summary.get("log") or [{}])}
    stack = "+".join(config.augmentation.stack) or "none"
    row |= {"key": key_of(config, seed=False), "seed": settings.pop("seed")}
    return row | {"settings": settings, "stack": stack, "planned": config.recipe.epochs}


def _outcomes(summary: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = [x["top1"] for x in log if x.get("epoch", 0) > summary["epochs"] - 10 and "top1" in x]
    own: dict[str, Any] = {"loss_last": log[-1].get("eval_loss")}
    own["top1_best10"] = max(last, default=None)
    known = own | {key: summary[key] for key in MEASURES if summary.get(key) is not None}
    row = {key: float(value) for key, value in known.items() if value is not None}
    return row | {key: float(summary[key]) for key in ("top1_last", "top5_last")}


def read_store(*files: Path) -> pd.DataFrame:
    """Returns the published runs of files of results/ as `read_runs` does."""
    rows = []
    for path in files:
        for place, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                raw = nested({key: from_json(x) for key, x in line["config"].items()})
                summary = {**line, "status": "finished", "seconds": 3600 * line["hours"]}
                rows.append({"folder": line["name"], "written": 0.0} | _facts(saved(raw), summary))
            except (UserError, LookupError, TypeError, ValueError) as error:
                raise UserError(f"{path}:{place}: no result: {first_line(error)}") from error
    return pd.DataFrame(rows, columns=[*RUNS])


def as_json(value: Any) -> Any:
    """Returns plain values, with infinities as text, as in results/."""
    infinities = {"Infinity": "inf", "-Infinity": "-inf"}
    return json.loads(json.dumps(value), parse_constant=infinities.__getitem__)


def from_json(value: Any) -> Any:
    """Undoes `as_json`."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    return float(value) if value in ("inf", "-inf") else value


def newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the finished run with the newest summary of each key and seed."""
    finished = runs[runs.status == "finished"].sort_values(["written", "folder"])
    return finished.drop_duplicates(["key", "seed"], keep="last").sort_values(["key", "seed"])


def table(
    rows: pd.DataFrame, runs: pd.DataFrame, outcome: str = "top1_last", is_tested: bool = True
) -> pd.DataFrame:
    """Adds to each row the statistics of the runs with its `key`, and those of TESTS.

    A row is compared with its `base` over common seeds. Holm's correction is over all rows that
    have no `role`: `untested` is shown without p, `primary` is not corrected.
    """
    done = newest(runs)
    groups, seeds = done.groupby("key"), done.pivot(index="seed", columns="key", values=outcome)
    values = groups[outcome]
    stats = pd.DataFrame({"n": groups.size(), "mean": values.mean(), "std": values.std()})
    for name in MEASURES:
        stats[name] = groups[name].mean()
    stats["hours"] = stats.seconds * stats.n / 3600
    stats["stack"], stats["seeds"] = groups["stack"].first(), groups.seed.agg(list)
    out = rows.merge(stats, "left", left_on="key", right_index=True)
    out["n"] = out.n.fillna(0).astype(int)
    tests = [paired(seeds, x.key, x.base) for x in out.itertuples()]
    out = out.join(pd.DataFrame(tests, out.index, [*TESTS]))
    out.loc[(out.role == "untested") | (not is_tested), "p"] = None
    out["p_holm"] = holm(out.p[out.role == ""])
    return out.assign(outcome=outcome)


def paired(seeds: pd.DataFrame, ours: str, base: str | None) -> dict[str, Any]:
    """Compares two columns over their common seeds: difference, interval, two-sided paired t-test.

    `below` is the number of pairs in which ours is less. A test needs three pairs that differ.
    """
    if not isinstance(base, str) or base == ours:
        return {"pairs": 0}
    both = seeds.reindex(columns=[ours, base]).dropna().astype(float)
    gap = both[ours] - both[base]
    found = {"pairs": len(gap), "difference": gap.mean(), "below": (gap < 0).sum()}
    if len(gap) >= LEAST_PAIRS and gap.max() - gap.min() > 1e-9:
        from scipy.stats import ttest_rel  # takes seconds to import

        test = ttest_rel(both[ours], both[base])
        found |= {"p": test.pvalue} | dict(
            zip(("low", "high"), test.confidence_interval(), strict=True)
        )
    return found


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's (1979) adjusted p-values of a family of tests."""
    ranked = p.dropna().astype(float).sort_values(kind="stable")
    return (ranked * np.arange(len(ranked), 0, -1)).clip(upper=1).cummax()


def shown(numbers: pd.DataFrame, heads: Sequence[str], is_first: bool = True) -> pd.DataFrame:
    """Returns a table as text with its units, without columns that have nothing to show."""
    title, unit, gap_unit, spec = OUTCOMES[numbers.outcome.iloc[0]]
    rows = [*numbers.itertuples()]

    def column(text: Any) -> pd.Series:
        return pd.Series([text(x) for x in rows], numbers.index, dtype=object)

    def number(name: str, spec: str) -> pd.Series:
        return column(lambda x: form(getattr(x, name, None), spec))

    columns = {head: numbers[head].map(value_text) for head in heads}
    columns["n"] = numbers.n.map(str)
    columns[f"{title} [{unit}]"] = column(
        lambda x: form(x.mean, spec) + ("" if pd.isna(x.std) else f" +/- {x.std:{spec}}")
    )
    columns["paper [%]"] = number(f"printed_{title.replace('-', '')}", ".2f")
    if is_first:
        columns |= {name: number(*more) for name, more in SHOWN.items()}
    columns["mixed [%]"] = column(_mixed)
    columns["compared with"] = number("against", "")
    columns["pairs"] = column(lambda x: str(x.pairs or NOTHING))
    columns[f"difference [{gap_unit}]"] = number("difference", f"+{spec}")
    columns["95 % interval"] = column(
        lambda x: NOTHING if pd.isna(x.low) else f"{x.low:+{spec}} to {x.high:+{spec}}"
    )
    if is_first:
        columns["paper's [points]"] = number("printed_difference", "+.2f")
    if unit == "nats":
        columns["lower in"] = column(
            lambda x: f"{x.below:.0f} of {x.pairs}" if x.pairs else NOTHING
        )
    columns["p"] = column(lambda x: p_text(x.p))
    columns["p (Holm)"] = column(lambda x: x.role if is_first and x.role else p_text(x.p_holm))
    columns["status"] = number("status", "")
    texts = pd.DataFrame(columns)
    empty = [
        x for x in texts if {*texts[x]} <= {NOTHING, ""} and x not in ("n", f"{title} [{unit}]")
    ]
    means = number("mean", spec)
    return texts.drop(
        columns=[*empty, *(x for x in SHOWN if x in texts and texts[x].equals(means))]
    )


def _mixed(row: Any) -> str:
    """Formats the share of mixed samples, and says so if none was, or no token was replaced."""
    if "htm" not in str(row.stack).split("+") or pd.isna(row.mixed_share):
        return NOTHING
    is_idle = 0 in (row.mixed_share, row.mixed_tokens)
    return f"{100 * row.mixed_share:.1f}" + " (mixed nothing)" * is_idle


def form(value: Any, spec: str) -> str:
    return NOTHING if pd.isna(value) or value == "" else format(value, spec)


def p_text(p: Any) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return NOTHING if pd.isna(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def value_text(value: Any) -> str:
    """Formats a setting as on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if pd.isna(value):
        return NOTHING
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def markdown(texts: pd.DataFrame) -> str:
    """Returns a table with escaped texts; columns with letters in them are on the left."""
    align = ["left" if texts[x].str.contains("[a-z]{4}").any() else "right" for x in texts]
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    return escaped.to_markdown(index=False, disable_numparse=True, colalign=align)


class Table(NamedTuple):
    """The `numbers` of a table, its `sections` as text by title; `heads` name a row."""

    name: str
    title: str
    numbers: pd.DataFrame
    sections: dict[str, pd.DataFrame]
    notes: list[str]
    heads: list[str]

    def lines(self, level: int = 2) -> Iterator[str]:
        """Yields Markdown."""
        for title, texts in self.sections.items():
            yield from [f"{'#' * level} {title}\n"] if title else []
            yield f"{markdown(texts)}\n"
        yield from (f"- {note}" for note in self.notes)

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        joined = self.numbers.map(lambda x: ";".join(map(str, x)) if isinstance(x, list) else x)
        return joined.to_csv(index=False, lineterminator="\n")

    def write(self, outputs: Path) -> list[Path]:
        """Writes .md and .csv to the report beside the runs."""
        folder, text = report_folder(outputs), "\n".join([f"# {self.title}\n", *self.lines()])
        files = {folder / f"{self.name}.md": f"{text}\n", folder / f"{self.name}.csv": self.csv()}
        for path, content in files.items():
            write_text(path, content)
        return [*files]


def report_folder(outputs: Path) -> Path:
    """Creates the folder of reports."""
    (outputs / REPORT).mkdir(parents=True, exist_ok=True)
    return outputs / REPORT


def study_table(
    name: str, study: Study, runs: pd.DataFrame, scale: str = FULL, more: Sequence[str] = ()
) -> Table:
    """Returns the table of a study: the tested outcome by column, then the other outcomes."""
    first = study.first_seed
    rows = rows_of(study, [*points(name, study, first, scale, more)])
    runs = runs[runs.key.isin(rows.key) & runs.seed.between(first, first + study.seeds - 1)]
    notes, counted = [*study.notes], runs
    if study.looks and scale == FULL:
        counted, note = at_look(study, {*rows.key.dropna()}, runs)
        notes.insert(0, note)
    frames = {x: table(rows, counted, x, x == study.tested) for x in (study.tested, *OUTCOMES)}
    main = frames.pop(study.tested)
    if scale == FULL and not more:
        main["minus_paper"] = main["mean"] - main.printed_top1
    sections = {x: shown(main[main.column == x], ["row"]) for x in main.column.unique()}
    for outcome, frame in frames.items():
        if (has_run := frame["mean"].notna()).any():
            title = OUTCOMES[outcome][0].capitalize()
            sections[title] = shown(frame[has_run], ["row"], is_first=False)
    numbers = pd.concat([main, *frames.values()]).assign(scale=scale)
    return Table(name, study.title, numbers, sections, [*notes, *notes_of(runs)], ["row"])


def rows_of(study: Study, cells: Sequence[Point]) -> pd.DataFrame:
    """Returns the rows of a study, from the points of one seed, with what is printed and quoted."""
    named = study.cells()
    keys, rows = dict(zip(named, (point.key for point in cells), strict=True)), []
    for (cell, (row, _)), point in zip(named.items(), cells, strict=True):
        base = study.rows.get(row.against or "")
        text = row.row if cell in study.rows and row.row else cell
        rows.append(
            {"row": text, "column": row.column, "label": point.label, "key": point.key}
            | {"role": row.role, "base": row.against and keys.get(row.against)}
            | {"against": base and (base.row or row.against)}
            | {f"printed_{name}": value for name, value in row.printed.items()}
        )
        if base and {"top1"} <= {*row.printed} & {*base.printed}:
            rows[-1]["printed_difference"] = row.printed["top1"] - base.printed["top1"]
    for name, columns in study.quoted.items():
        for column, printed in columns.items():
            values = {f"printed_{key}": value for key, value in printed.items()}
            rows.append({"row": name, "column": column, "role": "", **values})
    return pd.DataFrame(rows, columns=[*ROWS])


def at_look(study: Study, keys: set[str], runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns the runs of the latest look, and a note on it.

    A seed is whole if each row has a finished run of it.
    """
    rows = newest(runs).groupby("seed").size()
    whole = [*rows.index[rows == len(keys)]]
    counted = max((n for n in study.looks if n <= len(whole)), default=0)
    plan = " and ".join(f"{n} seeds (at {100 * x:g} %)" for n, x in study.looks.items())
    state = f"this is the look at {counted}" if counted else "none has been reached"
    note = f"Looks are at {plan}, and only whole seeds count: {len(whole)} are whole, {state}."
    return runs[runs.seed.isin(whole[:counted])], note


def notes_of(runs: pd.DataFrame) -> Iterator[str]:
    """Yields which runs are not counted, and how many are, with their hours and git revisions."""
    done = newest(runs)
    others = [f"{x.folder}: {state_text(x)}" for x in runs.drop(done.index).itertuples()]
    yield from (f"not counted: {text}" for text in others[:MOST_SHOWN])
    if len(others) > MOST_SHOWN:
        yield f"and {len(others) - MOST_SHOWN} more that are not counted"
    revisions = ", ".join(sorted({x[:10] for x in done.git_revision.dropna()}))
    hours = done.seconds.sum() / 3600
    yield f"{len(done)} finished runs, {hours:.2f} hours in total, git {revisions or 'unknown'}"


def state_text(run: Any) -> str:
    """Returns the status of a run, with its progress and error if it is not finished."""
    if run.status == "finished" or pd.isna(run.epochs) or not run.epochs:
        text = str(run.status)
    else:
        text = f"{run.status} after epoch {run.epochs:.0f} of {run.planned:.0f}"
    return text if pd.isna(run.error) else f"{text}: {in_one_line(str(run.error))}"


def runs_table(runs: pd.DataFrame, against: str | None = None) -> Table:
    """Groups runs over their seeds, with a column for each setting in which they differ.

    `against` (KEY=VALUE, the whole key or its title): each row is compared with the row with this
    value that is otherwise equal. Raises UserError if it does not fit, or if there are no runs.
    """
    usable = runs[runs.status != "unusable"]
    if usable.empty:
        raise UserError("there are no runs in these folders")
    settings = {run.key: {"mixing": run.stack} | run.settings for run in usable.itertuples()}
    values = pd.DataFrame.from_dict(settings, orient="index", dtype=object)
    heads, following = _varying(values.map(value_text))
    titles = _titles(heads)
    rows = values[heads].rename(columns=titles)
    order = sorted(rows.index, key=lambda key: [rank(x) for x in rows.loc[key]])
    rows = rows.reindex(order)
    bases = {} if against is None else _bases(rows.map(value_text), against, titles)
    states = {key: _states(group) for key, group in usable.groupby("key")}
    rows = rows.assign(key=order, role="", base=[bases.get(key) for key in order])
    rows["against"] = [against if bases.get(key, key) != key else None for key in order]
    rows["status"] = [states[key] for key in order]
    numbers = table(rows.reset_index(drop=True), usable)
    common = {*COMMON} - {*titles}
    notes = [", ".join(str(values[x].iloc[0]) for x in COMMON if x in common), *notes_of(runs)]
    if following:
        notes.append(f"differs as well: {', '.join(following)}")
    name = "-".join(title.replace(".", "_") for title in titles.values()) or "runs"
    sections = {"": shown(numbers, [*titles.values()])}
    return Table(name, "Runs", numbers, sections, notes, [*titles.values()])


def _states(runs: pd.DataFrame) -> str:
    """Returns `finished`, or how many seeds are, and the state of the others."""
    done = newest(runs)
    others = [x for x in runs.itertuples() if x.seed not in [*done.seed]]
    parts = [f"seed {x.seed} {state_text(x)}" for x in others]
    parts = [f"{len(done)} finished"] * (len(done) > 0) + parts
    return "; ".join(parts) if others else "finished"


def _varying(texts: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Returns the settings in which the runs differ, and those of the recipe that go with another.

    Left out is what comes with a named model, data set or augmentation.
    """
    starts = ("mixing", "model.name", "dataset.name", "augmentation.", "recipe.", "dataset.", "")
    places = {x: [x.startswith(y) for y in starts].index(True) for x in texts}
    differing = [x for x in sorted(texts, key=places.__getitem__) if texts[x].nunique() > 1]
    heads, following, seen = list[str](), list[str](), list[list[int]]()
    for name in differing:
        group = name.partition(".")[0]
        owner = "mixing" if group == "augmentation" else f"{group}.name"
        is_owned = owner in differing and owner != name
        if is_owned and texts.groupby(owner)[name].nunique().max() == 1:
            continue
        classes = [*texts[name].factorize()[0]]
        if name.startswith("recipe.") and classes in seen:
            following.append(name)
            continue
        seen += [classes] if name.startswith("recipe.") else []
        heads.append(name)
    return heads, following


def _titles(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last part of each key, or the last two where it would not be clear."""
    last = [key.rpartition(".")[2] for key in keys]
    taken = ("name", "n", "status", *ROWS, *TESTS, *MEASURES, "mean", "std", "validation")
    return {
        key: ".".join(key.split(".")[-2:])
        if last.count(short) > 1 or short in taken or ".options." in key
        else short
        for key, short in zip(keys, last, strict=True)
    }


def _bases(texts: pd.DataFrame, choice: str, titles: Mapping[str, str]) -> dict[str, str]:
    """Returns the key of the row that each row is compared with, if there is one."""
    title, _, value = choice.partition("=")
    title = titles.get(title, title)  # of a key as in train.py
    if title not in texts:
        allowed = ", ".join(f"{name}=..." for name in texts) or "none, nothing differs"
        raise UserError(f"against={choice}: must be one of {allowed}")
    texts[title] = texts[title].str.replace(r"^auto \(.*", "auto", regex=True)
    if value not in (values := [*texts[title].unique()]):
        raise UserError(f"against={choice}: {title} must be one of {', '.join(values)}")
    bases, found = texts[texts[title] == value].drop(columns=title), {}
    for key, row in texts.drop(columns=title).iterrows():
        fits = bases.index[((bases == row) | (bases == NOTHING)).all(axis=1)]
        if len(fits) == 1:
            found[key] = fits[0]
    return found


def rank(value: Any) -> tuple[int, float, str]:
    """Sorts settings: numbers before texts, and missing values first."""
    if isinstance(value, list | str):
        return 2, 0.0, str(value)
    return (0, 0.0, "") if pd.isna(value) else (1, float(value), "")


def write_sweep(folders: Sequence[Path], outputs: Path) -> tuple[str, list[Path]]:
    """Writes the numbers and the plot of a sweep to the folder of reports; returns it as text."""
    from reproduction.studies.plots import draw_runs  # imports matplotlib

    runs = read_runs(*folders)
    table = runs_table(runs)
    files = table.write(outputs)
    if draw_runs(table, runs, picture := files[0].with_suffix(".png")):
        files.append(picture)
    return "\n".join(table.lines()), files


def listing(points: Sequence[Point], with_folders: bool = True) -> str:
    """Returns a line for each run of a plan, and how many have which status."""
    rows, counts = [], Counter[str]()
    for point in points:
        path, run = point.folder.path, dict[str, Any](status="not started")
        if (path / "config.yaml").exists():
            run = _run(path)
        run = {"epochs": 0, "planned": point.config.recipe.epochs, "error": None} | run
        counts[run["status"]] += 1
        rows.append(
            {"row": point.label, "seed": str(point.config.seed)}
            | {"status": state_text(pd.Series(run)), "top-1 [%]": form(run.get("top1_last"), ".2f")}
            | {"hours": form(run.get("seconds", math.nan) / 3600, ".3g")}
            | ({"folder": str(path)} if with_folders else {})
        )
    total = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return f"{markdown(pd.DataFrame(rows))}\n\n{len(rows)} run{'s' * (len(rows) != 1)}: {total}"
