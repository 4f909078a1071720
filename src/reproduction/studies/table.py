"""Tables of runs: a frame of runs, a frame of rows, and their merge with paired tests over seeds.

A study, a sweep and a folder of runs are the same: rows with a `key`, the identity that the runs of
all seeds share, and a `base`, the key of the row that each is compared with.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from reproduction.config import Config
from reproduction.runs import RunFolder, saved
from reproduction.runs import key as key_of
from reproduction.runs import settings as settings_of
from reproduction.start import Point
from reproduction.studies.study import FULL, Study, points
from reproduction.system import UserError, first_line, in_one_line, write_text

OUTCOMES = {  # of a run
    "top1_last": {"title": "top-1", "unit": "%", "gap": "points", "spec": ".2f"},
    "loss_last": {"title": "held-out loss", "unit": "nats", "gap": "nats", "spec": ".3f"},
    "top5_last": {"title": "top-5", "unit": "%", "gap": "points", "spec": ".2f"},
}
MEASURES = (  # of a run; tables have their means
    *("top1_median10", "top1_best", "top1_best10", "val_top1_last", "top1_selected"),
    *("mixed_share", "mixed_tokens", "seconds"),
)
NUMBERS = (*OUTCOMES, *MEASURES)
RUNS = (
    *("folder", "path", "key", "seed", "status", "state", "written", "settings", "stack"),
    *("git_revision", *NUMBERS),
)
ROWS = (
    *("row", "column", "label", "key", "base", "against", "role"),
    *("printed_top1", "printed_top5", "printed_difference"),
)
TESTS = ("pairs", "difference", "low", "high", "below", "p")
SHOWN = {  # title -> form, of the columns of `table` and what OUTCOMES says
    "n": "{n}",
    "{title} [{unit}]": "{mean:{spec}} +/- {std:{spec}}",
    "paper [%]": "{printed:.2f}",
    "mixed [%]": "{mixed}",
    "compared with": "{against}",
    "pairs": "{pairs:.0f}",
    "difference [{gap}]": "{difference:+{spec}}",
    "95 % interval": "{low:+{spec}} to {high:+{spec}}",
    "p": "{p}",
    "p (Holm)": "{p_holm}",
}
SHOWN_OF_LOSS = {"lower in": "{below:.0f} of {pairs:.0f}"}
SHOWN_ONCE = {  # beside the tested outcome
    "paper's [points]": "{printed_difference:+.2f}",
    "median [%]": "{top1_median10:.2f}",
    "best [%]": "{top1_best:.2f}",
    "best of 10 [%]": "{top1_best10:.2f}",
    "validation [%]": "{val_top1_last:.2f}",
    "selected [%]": "{top1_selected:.2f}",
    "tokens": "{mixed_tokens:.1f}",
    "hours": "{hours:.1f}",
    "status": "{state}",
}
MIXING = "augmentation.mixing"  # the stack, as a setting
COMMON = ("model.name", "dataset.name", MIXING)  # are told where they do not differ
REPORT = "report"  # the folder of tables beside the runs
LEAST_PAIRS = 3  # for a test: two give an interval of 13 standard errors each way
NOTHING = "-"
MOST_SHOWN = 5  # runs that are not counted
numeric: Any = partial(pd.to_numeric, errors="coerce")  # sorts texts by numbers, others come last


# --- runs ---------------------------------------------------------------------------------------


def read_runs(*places: Path) -> pd.DataFrame:
    """Returns a row for each run folder among `places` or directly below them.

    Only finished runs have outcomes and measures. One that cannot be read is `unusable`.
    """
    found = (path for place in places for path in sorted([place, *place.iterdir()]))
    return _frame([_run(RunFolder(x)) for x in found if RunFolder(x).config_path.exists()])


def _run(folder: RunFolder) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": folder.path.name, "path": folder.path}
    try:
        summary = folder.read_summary()
        row["written"] = folder.summary_path.stat().st_mtime if summary else 0.0
        return row | _facts(folder.read_config(), {**summary, "status": folder.status()})
    except (UserError, LookupError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, UserError) else first_line(error)
        return row | {"status": "unusable", "state": f"unusable: {reason}"}


def read_store(path: Path) -> pd.DataFrame:
    """Returns the published runs of a file of results/ as `read_runs` does."""
    rows = []
    for line in map(json.loads, path.read_text().splitlines()):
        settings = json.loads(json.dumps(line["config"]).replace('"inf"', "Infinity"))
        summary = {**line, "status": "finished", "seconds": 3600 * line["hours"]}
        rows.append({"folder": line["name"], "written": 0.0} | _facts(saved(settings), summary))
    return _frame(rows)


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*RUNS]).astype(dict.fromkeys(NUMBERS, float))


def _facts(config: Config, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is known of a run from its configuration and its summary."""
    settings, state = settings_of(config), summary["status"]
    row = {"key": key_of(config, seed=False), "seed": settings.pop("seed"), "settings": settings}
    row |= {"stack": "+".join(config.augmentation.stack) or "none"}
    row |= {"status": state, "git_revision": summary.get("git_revision")}
    if state == "finished":
        log = summary.get("log") or [{}]
        late = [x["top1"] for x in log if "top1" in x and x["epoch"] > summary["epochs"] - 10]
        row |= {key: summary[key] for key in ("top1_last", "top5_last")}
        row |= {key: summary.get(key) for key in MEASURES}
        row |= {"top1_best10": max(late, default=None), "loss_last": log[-1].get("eval_loss")}
        row |= {key: None if row[key] is None else float(row[key]) for key in NUMBERS}
    elif epochs := summary.get("epochs"):
        state += f" after epoch {epochs} of {config.recipe.epochs}"
    if state != "finished" and summary.get("error"):
        state += f": {in_one_line(summary['error'])}"
    return row | {"state": state}


def newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the finished run with the newest summary of each key and seed."""
    finished = runs[runs.status == "finished"].sort_values(["written", "folder"])
    return finished.drop_duplicates(["key", "seed"], keep="last").sort_values(["key", "seed"])


# --- statistics ---------------------------------------------------------------------------------


def table(
    rows: pd.DataFrame, runs: pd.DataFrame, outcome: str = "top1_last", is_tested: bool = True
) -> pd.DataFrame:
    """Adds to each row the statistics of the runs with its `key`, and those of TESTS.

    A row is compared with its `base` over common seeds. Holm's correction is over all rows that
    have no `role`: `untested` is shown without p, `primary` is not corrected.
    """
    groups = (done := newest(runs)).groupby("key")
    seeds, values = done.pivot(index="seed", columns="key", values=outcome), groups[outcome]
    stats = groups[[*MEASURES]].mean().assign(mean=values.mean(), std=values.std(), n=groups.size())
    stats["stack"], stats["hours"] = groups["stack"].first(), stats.seconds * stats.n / 3600
    out = rows.merge(stats, "left", left_on="key", right_index=True).assign(outcome=outcome)
    out["n"] = out.n.fillna(0).astype(int)
    tests = [paired(seeds, x.key, x.base) for x in out.itertuples()]
    out = out.join(pd.DataFrame(tests, out.index, [*TESTS], dtype=float))
    out.loc[(out.role == "untested") | (not is_tested), "p"] = None
    out["p_holm"] = holm(out.p[out.role == ""])
    return out


def paired(seeds: pd.DataFrame, ours: str, base: str | None) -> dict[str, Any]:
    """Compares two columns over their common seeds: difference, interval, two-sided paired t-test.

    `below` is the number of pairs in which ours is less. A test needs three pairs that differ.
    """
    if not isinstance(base, str) or base == ours:
        return {}
    both = seeds.reindex(columns=[ours, base]).dropna()
    gap = both[ours] - both[base]
    found = {"pairs": len(gap), "difference": gap.mean(), "below": (gap < 0).sum()}
    if len(gap) >= LEAST_PAIRS and gap.max() - gap.min() > 1e-9:
        from scipy.stats import ttest_rel  # takes seconds to import

        test = ttest_rel(both[ours], both[base])
        low, high = test.confidence_interval()
        found |= {"p": test.pvalue, "low": low, "high": high}
    return found


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's (1979) adjusted p-values of a family of tests."""
    ranked = p.dropna().sort_values(kind="stable")
    return (ranked * np.arange(len(ranked), 0, -1)).clip(upper=1).cummax()


# --- text ---------------------------------------------------------------------------------------


def shown(numbers: pd.DataFrame, heads: Mapping[str, str], is_first: bool = True) -> pd.DataFrame:
    """Returns a table as text with its units, without columns that have nothing to show.

    `heads`, column -> title, name a row.
    """
    about = OUTCOMES[numbers.outcome.iloc[0]]
    rows = [defaultdict(lambda: math.nan, x) | about for x in numbers.to_dict("records")]
    for row in rows:
        corrected = row["role"] if is_first and row["role"] else p_text(row["p_holm"])
        row |= {"mixed": _mixed(row), "p": p_text(row["p"]), "p_holm": corrected}
        row["printed"] = row[f"printed_{about['title'].replace('-', '')}"]
    columns = {title: [*numbers[head]] for head, title in heads.items()}
    means = [f"{row['mean']:{row['spec']}}" for row in rows]
    forms = SHOWN | (SHOWN_OF_LOSS if about["unit"] == "nats" else {})
    for title, form in (forms | (SHOWN_ONCE if is_first else {})).items():
        column = [_filled(form, row) for row in rows]
        if {*column} != {NOTHING} and not (title in SHOWN_ONCE and column == means):
            columns[title.format(**about)] = column
    return pd.DataFrame(columns)


def _filled(form: str, row: Mapping[str, Any]) -> str:
    """Fills a form; a dash stands for what is missing, and a mean without a deviation alone."""
    text = form.format_map(row).removesuffix(" +/- nan")
    return NOTHING if {"nan", "+nan", "None", ""} & {*text.split(" ")} else text


def _mixed(row: Mapping[str, Any]) -> str:
    """Formats the share of mixed samples, and says so if none was, or no token was replaced."""
    share = row["mixed_share"]
    if "htm" not in str(row["stack"]).split("+") or pd.isna(share):
        return NOTHING
    return f"{100 * share:.1f}" + " (mixed nothing)" * (0 in (share, row["mixed_tokens"]))


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return NOTHING if pd.isna(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def value_text(value: Any) -> str:
    """Formats a setting as on the command line, and a missing one as a dash."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if pd.isna(value):
        return NOTHING
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def markdown(texts: pd.DataFrame) -> str:
    """Returns a table with escaped texts."""
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    aligned: Any = {"stralign": "right", "colalign": ("left",)}
    return escaped.to_markdown(index=False, disable_numparse=True, **aligned)


class Table(NamedTuple):
    """The `numbers` of a table, its `sections` as text by title; `heads` name a row."""

    name: str
    title: str
    numbers: pd.DataFrame
    sections: dict[str, pd.DataFrame]
    notes: list[str]
    heads: dict[str, str]

    def lines(self, level: int = 2) -> Iterator[str]:
        """Yields Markdown."""
        for title, texts in self.sections.items():
            yield from [f"{'#' * level} {title}\n"] if title else []
            yield f"{markdown(texts)}\n"
        yield from (f"- {note}" for note in self.notes)

    def csv(self) -> str:
        """Returns the unrounded numbers, a line for each row and outcome."""
        return self.numbers.to_csv(index=False, lineterminator="\n")

    def write(self, outputs: Path) -> list[Path]:
        """Writes .md and .csv to the report beside the runs."""
        folder, text = outputs / REPORT, "\n".join([f"# {self.title}\n", *self.lines()])
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / f"{self.name}.md": f"{text}\n", folder / f"{self.name}.csv": self.csv()}
        for path, content in files.items():
            write_text(path, content)
        return [*files]


def notes_of(runs: pd.DataFrame) -> Iterator[str]:
    """Yields which runs are not counted, and how many are, with their hours and git revisions."""
    done = newest(runs)
    others = [f"not counted: {x.folder}: {x.state}" for x in runs.drop(done.index).itertuples()]
    yield from others[:MOST_SHOWN]
    if len(others) > MOST_SHOWN:
        yield f"and {len(others) - MOST_SHOWN} more that are not counted"
    revisions = ", ".join(sorted({x[:10] for x in done.git_revision.dropna()}))
    hours = math.fsum(done.seconds) / 3600  # in any order
    yield f"{len(done)} finished runs, {hours:.2f} hours in total, git {revisions or 'unknown'}"


# --- a study ------------------------------------------------------------------------------------


def study_table(
    name: str, study: Study, runs: pd.DataFrame, scale: str = FULL, more: Sequence[str] = ()
) -> Table:
    """Returns the table of a study: the tested outcome by column, then the other outcomes."""
    first, heads = study.first_seed, {"row": "row"}
    rows = rows_of(study, [*points(name, study, first, scale, more)])
    runs = runs[runs.key.isin(rows.key) & runs.seed.between(first, first + study.seeds - 1)]
    notes, counted = [*study.notes], runs
    if study.looks and scale == FULL:
        counted, note = at_look(study, rows.key.nunique(), runs)
        notes.insert(0, note)
    main = table(rows, counted, study.tested)
    sections = {x: shown(part, heads) for x, part in main.groupby("column", sort=False)}
    frames = [main]
    for outcome in [x for x in OUTCOMES if x != study.tested]:
        frames.append(frame := table(rows, counted, outcome, is_tested=False))
        if (has_run := frame["mean"].notna()).any():
            title = OUTCOMES[outcome]["title"].capitalize()
            sections[title] = shown(frame[has_run], heads, is_first=False)
    return Table(name, study.title, pd.concat(frames), sections, [*notes, *notes_of(runs)], heads)


def rows_of(study: Study, cells: Sequence[Point]) -> pd.DataFrame:
    """Returns the rows of a study, from the points of one seed, with what is printed and quoted."""
    named = study.cells()
    keys, rows = dict(zip(named, (point.key for point in cells), strict=True)), []
    for (cell, (row, _)), point in zip(named.items(), cells, strict=True):
        base = study.rows.get(row.against or "")
        rows.append(
            {"row": (cell in study.rows and row.row) or cell, "column": row.column}
            | {"label": point.label, "key": point.key, "role": row.role}
            | {
                "base": row.against and keys.get(row.against),
                "against": base and (base.row or row.against),
            }
            | {f"printed_{name}": value for name, value in row.printed.items()}
        )
        if base and {"top1"} <= {*row.printed} & {*base.printed}:
            rows[-1]["printed_difference"] = row.printed["top1"] - base.printed["top1"]
    for name, columns in study.quoted.items():
        for column, printed in columns.items():
            values = {f"printed_{key}": value for key, value in printed.items()}
            rows.append({"row": name, "column": column, "role": "", **values})
    return pd.DataFrame(rows, columns=[*ROWS])


def at_look(study: Study, rows: int, runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns the runs of the latest look, and a note on it.

    A seed is whole if each of the `rows` has a finished run of it.
    """
    finished = newest(runs).groupby("seed").size()
    whole = [*finished.index[finished == rows]]
    counted = max((n for n in study.looks if n <= len(whole)), default=0)
    plan = " and ".join(f"{n} seeds (at {100 * x:g} %)" for n, x in study.looks.items())
    state = f"this is the look at {counted}" if counted else "none has been reached"
    note = f"Looks are at {plan}, and only whole seeds count: {len(whole)} are whole, {state}."
    return runs[runs.seed.isin(whole[:counted])], note


def listing(points: Sequence[Point]) -> str:
    """Returns a line for each run of a plan, and how many have which status."""
    rows, counts = [], Counter[str]()
    for point in points:
        path, run = point.folder.path, dict.fromkeys(("status", "state"), "not started")
        found = _run(point.folder) if point.folder.config_path.exists() else run
        ours = key_of(point.config, seed=False), point.config.seed
        if (found.get("key"), found.get("seed")) in (ours, (None, None)):  # else another run
            run |= found
        counts[run["status"]] += 1
        row = {"row": point.label, "seed": str(point.config.seed), "status": run["state"]}
        top1 = _filled("{top1_last:.2f}", defaultdict(lambda: math.nan, run))
        rows.append(row | {"top-1 [%]": top1, "folder": str(path)})
    total = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return f"{markdown(pd.DataFrame(rows))}\n\n{len(rows)} run{'s' * (len(rows) != 1)}: {total}"


# --- any runs -----------------------------------------------------------------------------------


def runs_table(runs: pd.DataFrame, against: str | None = None) -> Table:
    """Groups runs over their seeds, with a column for each setting in which they differ.

    `against` (KEY=VALUE, of KEY the last parts will do): each row is compared with the row with
    this value that is otherwise equal. UserError if there is none, or if there are no runs.
    """
    usable = runs[runs.status != "unusable"]
    if usable.empty:
        raise UserError("there are no runs in these folders")
    settings = {run.key: {MIXING: run.stack} | run.settings for run in usable.itertuples()}
    texts = pd.DataFrame.from_dict(settings, orient="index", dtype=object).map(value_text)
    heads, following = _varying(texts)
    rows = texts[heads].sort_values(heads, key=numeric) if heads else texts[[]]
    bases = {} if against is None else _bases(texts[heads], against)
    rows = rows.assign(key=rows.index, role="", base=rows.index.map(bases.get))
    rows["against"] = [against if x.base not in (None, x.key) else None for x in rows.itertuples()]
    states = {key: _states(group) for key, group in usable.groupby("key")}
    numbers = table(rows.assign(state=rows.index.map(states)).reset_index(drop=True), usable)
    notes = [", ".join(texts[x].iloc[0] for x in COMMON if x not in heads), *notes_of(runs)]
    if following:
        notes.append(f"differs as well: {', '.join(following)}")
    titles = {key: ".".join(key.split(".")[-2:]) for key in heads}
    name = "-".join(key.rpartition(".")[2] for key in heads) or "runs"
    return Table(name, "Runs", numbers, {"": shown(numbers, titles)}, notes, titles)


def _states(runs: pd.DataFrame) -> str:
    """Returns how many seeds are finished, and the state of the others."""
    done = newest(runs)
    others = [f"seed {x.seed} {x.state}" for x in runs.itertuples() if x.seed not in [*done.seed]]
    return "; ".join([f"{len(done)} finished", *others])


def _varying(texts: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Returns the settings in which runs differ, and those that follow from one of their group.

    What comes with a named model or data set, or with the stack, is in neither.
    """
    heads, following = list[str](), list[str]()
    for name in texts.columns[texts.nunique() > 1]:
        group = [x for x in heads if x.split(".")[0] == name.split(".")[0]]
        owners = [x for x in group if texts.groupby(x)[name].nunique().max() == 1]
        if not owners:
            heads.append(name)
        elif not owners[0].endswith((".name", MIXING)):
            following.append(name)
    return heads, following


def _bases(texts: pd.DataFrame, choice: str) -> dict[Hashable, str]:
    """Returns the key of the row that each row is compared with, if there is one."""
    key, _, value = choice.partition("=")
    head = next((x for x in texts if f".{x}".endswith(f".{key}")), None)
    if head is None or value not in [*texts[head]]:
        known = [f"{x}={text}" for x in texts for text in texts[x].unique()]
        raise UserError(f"against={choice}: must be one of {', '.join(known) or 'none'}")
    bases, found = texts[texts[head] == value].drop(columns=head), dict[Hashable, str]()
    for name, row in texts.drop(columns=head).iterrows():
        fits = bases.index[((bases == row) | (bases == NOTHING)).all(axis=1)]
        if len(fits) == 1:
            found[name] = fits[0]
    return found
