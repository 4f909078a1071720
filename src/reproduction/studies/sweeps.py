"""The table and the plot of any runs: what differs between them, and what came of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction.reporting.figures import BLUE, figure
from reproduction.studies.runs import REPORT, newest, read_runs, stack_of, state_text
from reproduction.studies.tables import (
    NOTHING,
    TESTED,
    accuracies,
    form,
    p_text,
    spreads,
    statistics,
    tested,
)
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

MIXING = "mixing"  # the title of the column with the augmentations
LONGEST = 40  # characters of a value
MOST_FOLLOWING, MOST_ERRORS = 8, 5  # that a note names
TICKS = 12  # of a plot


class RunsTable:
    """Runs grouped over seeds: `numbers` has a row for each configuration.

    `varied` maps the title of each column to its dotted key, `following` lists the keys whose
    values follow from those columns.
    """

    def __init__(self, runs: pd.DataFrame):
        usable = runs[runs.status != "unusable"]
        self.runs, self.unusable = usable, runs[runs.status == "unusable"]
        if usable.empty:
            raise UserError("there are no runs in these folders")
        settings = {run.key: run.settings for run in usable.itertuples()}
        values, self.varied, self.following = _varying(settings)
        status = usable.groupby("key").apply(_states, include_groups=False)
        numbers = values.join(statistics(usable)).assign(status=status, key=values.index, base=None)
        order = sorted(numbers.index, key=lambda key: [_rank(x) for x in values.loc[key]])
        self.numbers = numbers.loc[order].reset_index(drop=True)
        self.numbers["n"] = self.numbers.n.fillna(0).astype(int)

    def against(self, choice: str) -> None:
        """Tests each row against the row that has `choice` (TITLE=VALUE) and is otherwise equal."""
        title, _, value = choice.partition("=")
        if title not in self.varied:
            allowed = ", ".join(f"{name}=..." for name in self.varied) or "none, nothing differs"
            raise UserError(f"against={choice}: must be one of {allowed}")
        texts = self._texts()
        if value not in (values := list(dict.fromkeys(texts[title]))):
            raise UserError(f"against={choice}: {title} must be one of {', '.join(values)}")
        others = [name for name in self.varied if name != title]
        bases = texts[texts[title] == value]
        for place, row in texts.iterrows():
            fits = [
                all(base[name] in (row[name], NOTHING) for name in others)
                for _, base in bases.iterrows()
            ]
            found = bases.index[fits]
            if len(found) == 1:
                self.numbers.at[place, "base"] = self.numbers.key[found[0]]
        self.numbers = tested(self.numbers, accuracies(self.runs))

    def _texts(self) -> pd.DataFrame:
        """Returns the varied settings as text."""
        return self.numbers[[*self.varied]].map(value_text)

    def shown(self) -> pd.DataFrame:
        """Returns the columns for people as text."""
        table = self.numbers
        columns: dict[str, Any] = dict(self._texts().items())
        columns["n"] = table.n.map(str)
        columns["top-1 last"] = spreads(table, "top1_last")
        for title, name in self._measured().items():
            columns[title] = spreads(table, name)
        if table.mixed_share_mean.any():
            shares = spreads(table, "mixed_share", 100)
            columns["mixed samples"] = [x if x == NOTHING else f"{x} %" for x in shares]
        if "difference" in table:
            columns["difference"] = [form(x, "+.2f") for x in table.difference]
            columns["p"] = [p_text(x) for x in table.test_p]
            columns["p (Holm)"] = [p_text(x) for x in table.test_p_holm]
        return pd.DataFrame(columns | {"status": table.status})

    def _measured(self) -> dict[str, str]:
        """Titles and names of the other accuracies: best, or those by a validation split."""
        is_split = self.numbers.val_top1_last_mean.notna()
        names = {} if is_split.all() else {"best": "top1_best"}
        if is_split.any():
            names |= {"validation": "val_top1_last", "selected": "top1_selected"}
        return names

    def text(self) -> str:
        """Returns the table as Markdown, and its notes."""
        shown = self.shown()
        numbers = [name for name in shown if name not in (*self.varied, "status")]
        align = ["right" if name in numbers else "left" for name in shown]
        lines = [shown.to_markdown(index=False, disable_numparse=True, colalign=align), ""]
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """Returns what the table leaves out: keys that follow, errors, folders without a run."""
        done, number_of = len(newest(self.runs)), len(self.runs)
        notes = [
            f"{self._common()}{number_of} run{'s' * (number_of != 1)}, {done} finished; top-1 in "
            "percent, mean +/- standard deviation over n seeds"
        ]
        if "best" in self._measured():
            notes[0] += "; best: of the best epoch on the held-out images, which is optimistic"
        if "selected" in self._measured():
            notes[0] += (
                "; validation: of the last epoch on the validation split, to choose by; last and "
                "selected, the epoch that is best by validation: on the test images"
            )
        if self.following:
            names = ", ".join(self.following[:MOST_FOLLOWING])
            more = len(self.following) - MOST_FOLLOWING
            notes.append(f"differs as well: {names}" + (f" and {more} more" if more > 0 else ""))
        if "test_note" in self.numbers and (why := self.numbers.test_note.dropna().unique()).size:
            notes.append(f"not tested: {'; '.join(why)}")
        failed = self.runs[self.runs.error.notna()]
        notes += [f"{run.folder}: {run.error}" for run in failed[:MOST_ERRORS].itertuples()]
        if len(failed) > MOST_ERRORS:
            notes.append(f"and {len(failed) - MOST_ERRORS} more that are not finished")
        if len(self.unusable):
            folders = ", ".join(self.unusable.folder[:MOST_ERRORS])
            notes.append(f"no runs: {len(self.unusable)} folders ({folders})")
        finished = self.runs[self.runs.status == "finished"]
        if finished.log.isna().any():
            notes.append("without mixed samples: python scripts/runs.py --upgrade adds them")
        return notes

    def _common(self) -> str:
        """Names model, data and augmentations, as far as all runs have the same."""
        first = next(self.runs.itertuples()).settings
        stack = {stack_of(run.settings) for run in self.runs.itertuples()}
        parts = [
            first.get(key) for key in ("model.name", "dataset.name") if key not in self._keys()
        ]
        parts += [*stack] if len(stack) == 1 else []
        return f"{', '.join(map(str, parts))}: " if parts else ""

    def _keys(self) -> list[str]:
        return [*self.varied.values(), *self.following]

    def csv(self) -> str:
        """Returns the unrounded numbers; lists are joined by `;`."""
        return as_csv(self.numbers.drop(columns=["base"]))

    def draw(self, path: Path) -> bool:
        """Draws the accuracy over one or two varied keys with numbers; returns whether it could."""
        titles = [name for name in self.varied if self._is_scale(name)]
        done = self.numbers[self.numbers.n > 0]
        if done.empty or not 1 <= len(self.varied) <= 2 or len(titles) < len(self.varied):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(titles) == 1:
            _draw_line(path, done, titles[0], accuracies(self.runs))
        else:
            _draw_map(path, done, titles)
        return True

    def _is_scale(self, title: str) -> bool:
        return all(isinstance(x, int | float | str) for x in self.numbers[title].dropna())


def _varying(
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[pd.DataFrame, dict[str, str], list[str]]:
    """Returns the fewest columns that tell the configurations apart, their keys, and the others.

    The augmentations and names of models and data sets come first; a key whose values follow from
    the columns before it is left out, as one model's depth is beside its name.
    """
    by_key = {MIXING: {key: stack_of(values) for key, values in settings.items()}}
    names = dict.fromkeys(name for values in settings.values() for name in values)
    for name in sorted(names, key=_preference):
        by_key[name] = {key: _plain(values.get(name)) for key, values in settings.items()}
    differing = {name: x for name, x in by_key.items() if len(set(map(repr, x.values()))) > 1}
    chosen: dict[str, dict[str, Any]] = {}
    groups: dict[str, tuple[str, ...]] = dict.fromkeys(settings, ())
    for name, values in differing.items():
        finer = {key: (*groups[key], repr(values[key])) for key in settings}
        if len(set(finer.values())) > len(set(groups.values())):
            groups, chosen[name] = finer, values
    hidden = [name for name in differing if name not in chosen and not _is_part(name, chosen)]
    titles = _titles([*chosen])
    frame = pd.DataFrame({titles[name]: values for name, values in chosen.items()}, dtype=object)
    return frame.reindex(list(settings)), {titles[name]: name for name in chosen}, hidden


def _preference(key: str) -> int:
    order = ("model.name", "dataset.name", "augmentation.", "recipe.", "dataset.", "model.")
    return next((i for i, start in enumerate(order) if key.startswith(start)), len(order))


def _is_part(key: str, chosen: Mapping[str, Any]) -> bool:
    """Whether a key belongs to a column that names a whole: an augmentation, model or data set."""
    group = key.partition(".")[0]
    return (group == "augmentation" and MIXING in chosen) or f"{group}.name" in chosen


def _titles(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last part of each key, or the last two where it would be used twice."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: short if last.count(short) == 1 and short != "name" else ".".join(key.split(".")[-2:])
        for key, short in zip(keys, last, strict=True)
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else value_text(value)


def value_text(value: Any) -> str:
    """Formats a setting as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return NOTHING
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _rank(value: Any) -> tuple[int, float, str]:
    """Sorts numbers before texts, and missing values first."""
    known = isinstance(value, int | float) and not pd.isna(value)
    return (1, float(value), "") if known else (0 if pd.isna(value) else 2, 0.0, str(value))


def _states(runs: pd.DataFrame) -> str:
    """Returns `finished`, or how many runs are finished and the state of the others."""
    if (runs.status == "finished").all():
        return "finished"
    done = (runs.status == "finished").sum()
    others = [f"seed {x.seed} {state_text(x)}" for x in runs.itertuples() if x.status != "finished"]
    return "; ".join([*([f"{done} finished"] if done else []), *others])


def as_csv(table: pd.DataFrame) -> str:
    """Returns unrounded numbers; lists are joined by `;`."""
    joined = table.map(lambda x: ";".join(map(str, x)) if isinstance(x, list) else x)
    return joined.to_csv(index=False, lineterminator="\n")


def _draw_line(path: Path, table: pd.DataFrame, title: str, accuracy: pd.DataFrame) -> None:
    """Draws means with deviations, evenly spaced, and each seed as a dash."""
    places = range(len(table))
    with figure(path, figsize=(5.4, 3.6)) as axes:
        mean, std = table[f"{TESTED}_mean"], table[f"{TESTED}_std"].fillna(0)
        axes.errorbar(places, mean, yerr=std, fmt="o-", color=BLUE, capsize=3, linewidth=1.5)
        for place, key in zip(places, table.key, strict=True):
            seeds = accuracy[key].dropna()
            axes.plot([place] * len(seeds), seeds, "_", color=BLUE, markersize=12, alpha=0.5)
        axes.set_xticks(places, table[title].map(value_text))
        axes.set_xlabel(title)
        axes.set_ylabel("top-1 after the last epoch [%]")


def _draw_map(path: Path, table: pd.DataFrame, titles: Sequence[str]) -> None:
    """Draws the means as a heat map with their values."""
    down, across = titles
    means = table.pivot(index=down, columns=across, values=f"{TESTED}_mean").astype(float)
    means = means.reindex(index=sorted(means.index, key=_rank), columns=sorted(means, key=_rank))
    height, width = means.shape
    with figure(path, figsize=(1.8 + 0.9 * width, 1.2 + 0.5 * height)) as axes:
        image = axes.imshow(means.to_numpy(), cmap="viridis", aspect="auto")
        middle = float(np.nanmean([np.nanmin(means), np.nanmax(means)]))
        for (i, j), mean in np.ndenumerate(means.to_numpy()):
            color = "black" if mean > middle else "white"
            axes.text(j, i, form(mean, ".2f"), ha="center", va="center", color=color)
        axes.set_yticks(range(height), map(value_text, means.index))
        axes.set_xticks(range(width), map(value_text, means.columns))
        axes.set_ylabel(down)
        axes.set_xlabel(across)
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(image, label="last top-1 [%]")


def write_sweep(folders: Sequence[Path], outputs: Path) -> tuple[RunsTable, list[Path]]:
    """Writes the table and the plot of a sweep to the folder of reports; returns them."""
    table = RunsTable(read_runs(*folders))
    name = "-".join(title.replace(".", "_") for title in table.varied) or "runs"
    path = outputs / REPORT / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, table.csv())
    picture = path.with_suffix(".png")
    return table, [path, *([picture] if table.draw(picture) else [])]
