"""The table and the plot of any runs: what differs between them, and what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.config import CONF_DIR
from reproduction.runs.identity import flatten
from reproduction.studies.columns import COLUMNS, NOTHING, value_text
from reproduction.studies.pictures import draw_runs, rank
from reproduction.studies.runs import newest, read_runs, stack_of
from reproduction.studies.table import Table, report_folder, with_results
from reproduction.system.errors import UserError
from reproduction.system.reading import parse_yaml
from reproduction.system.storage import write_text

MIXING_COLUMN = "mixing"  # the title of the column with the augmentations
MOST_ERRORS = 5  # that are shown
Values = Mapping[str, Mapping[str, Any]]  # of a setting, by the key of each configuration


def runs_table(runs: pd.DataFrame, against: str | None = None) -> Table:
    """Groups runs over their seeds, with a column for each setting in which they differ.

    `against` (KEY=VALUE, the whole key or its title): each row is tested against the row with this
    value that is otherwise equal. Raises UserError if it does not fit, or if there are no runs.
    """
    usable = runs[runs.status != "unusable"]
    if usable.empty:
        raise UserError("there are no runs in these folders")
    settings = {run.key: run.settings for run in usable.itertuples()}
    chosen, following = _varying(settings)
    titles = _titles([*chosen])
    rows = pd.DataFrame({titles[x]: values for x, values in chosen.items()}, dtype=object)
    rows = rows.reindex(sorted(settings, key=lambda key: [rank(x[key]) for x in chosen.values()]))
    base = None if against is None else _bases(rows.map(value_text), against, titles)
    rows = rows.assign(key=rows.index, base=base).reset_index(drop=True)
    numbers = with_results(rows, usable)
    return Table(
        name="-".join(title.replace(".", "_") for title in titles.values()) or "runs",
        title="Runs",
        kind="R",
        heads={title: title for title in titles.values()},
        numbers=numbers,
        notes=[*_notes(runs, numbers, chosen, following)],
    )


def _bases(texts: pd.DataFrame, choice: str, titles: Mapping[str, str]) -> list[str | None]:
    """Returns the key of the row that each row is tested against, if there is one."""
    title, _, value = choice.partition("=")
    title = titles.get(title, title)  # of a key as in train.py
    if title not in texts:
        allowed = ", ".join(f"{name}=..." for name in texts) or "none, nothing differs"
        raise UserError(f"against={choice}: must be one of {allowed}")
    texts[title] = texts[title].str.replace(r"^auto \(.*", "auto", regex=True)
    if value not in (values := list(dict.fromkeys(texts[title]))):
        raise UserError(f"against={choice}: {title} must be one of {', '.join(values)}")
    bases, found = texts[texts[title] == value].drop(columns=title), []
    for _, row in texts.drop(columns=title).iterrows():
        fits = bases.index[((bases == row) | (bases == NOTHING)).all(axis=1)]
        found.append(fits[0] if len(fits) == 1 else None)
    return found


def _varying(settings: Values) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Returns the settings in which the configurations differ, and the names of others.

    Left out are those that come with a named model, data set or augmentation; a key of the recipe
    that changes together with another one is among the others, unless it is the epochs.
    """
    by_name: dict[str, dict[str, Any]] = {
        MIXING_COLUMN: {key: stack_of(values) for key, values in settings.items()}
    }
    names = dict.fromkeys(name for values in settings.values() for name in values)
    for name in sorted(names, key=_preference):
        by_name[name] = {key: _plain(values.get(name)) for key, values in settings.items()}
    differing = {name: x for name, x in by_name.items() if len(set(map(repr, x.values()))) > 1}
    chosen: dict[str, Mapping[str, Any]] = {}
    others, seen = [], set[tuple[int, ...]]()
    for name, values in differing.items():
        if _is_part(name, by_name, differing):
            continue
        texts = [*map(repr, values.values())]
        classes = tuple(texts.index(text) for text in texts)
        if name.startswith("recipe.") and classes in seen:
            others.append(name)
            continue
        seen |= {classes} if name.startswith("recipe.") else set()
        chosen[name] = values
    return chosen, others


def _preference(key: str) -> int:
    order = (
        *("model.name", "dataset.name", "augmentation.", "recipe.epochs", "recipe."),
        *("dataset.", "model."),
    )
    return next((i for i, start in enumerate(order) if key.startswith(start)), len(order))


def _is_part(name: str, values: Values, differing: Mapping[str, Any]) -> bool:
    """Whether a setting comes with a column: with an augmentation, or a model or data set."""
    group, _, rest = name.partition(".")
    if group == "augmentation" and MIXING_COLUMN in differing:
        return len({repr(x) for x in values[name].values() if x is not None}) == 1
    options = values.get(f"{group}.name", {}) if f"{group}.name" in differing else {}
    return (
        rest != "name"
        and bool(options)
        and all(
            values[name][key] == _plain(_of_option(group, option).get(rest))
            for key, option in options.items()
        )
    )


@cache
def _of_option(group: str, option: str) -> dict[str, Any]:
    """Returns the values of a model or data set in conf/, empty for one without a file."""
    path = CONF_DIR / group / f"{option}.yaml"
    return dict(flatten(parse_yaml(path.read_text()))) if path.exists() else {}


def _titles(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last part of each key, or the last two where it would be used twice."""
    last = [key.rpartition(".")[2] for key in keys]
    # what such a title says on its own, as dataset.validation's
    taken = ("name", *(column.title for column in COLUMNS))

    def title(key: str) -> str:
        short = key.rpartition(".")[2]
        is_clear = last.count(short) == 1 and short not in taken
        if is_clear and ".options." not in key:  # of own data, with any name
            return short
        return ".".join(key.split(".")[-2:])

    return {key: title(key) for key in keys}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else value_text(value)


def _notes(
    runs: pd.DataFrame, numbers: pd.DataFrame, chosen: Values, following: Sequence[str]
) -> Iterator[str]:
    """Yields what is common to all runs, what was measured, errors and folders without a run."""
    usable = runs[runs.status != "unusable"]
    first, stacks = usable.settings.iloc[0], {*map(stack_of, usable.settings)}
    parts = [first.get(x) for x in ("model.name", "dataset.name") if x not in chosen]
    common = ", ".join(map(str, [*parts, *(stacks if len(stacks) == 1 else ())]))
    number = f"{len(usable)} run{'s' * (len(usable) != 1)}, {len(newest(usable))} finished"
    yield (
        f"{common}{': ' * bool(common)}{number}; top-1 in percent, mean +/- standard deviation "
        "over n seeds; mixed: samples in percent, and tokens replaced in each in the last epoch"
    )
    splits = numbers.val_top1_last_mean.notna()
    if not splits.all():
        yield "best: of the best epoch on the held-out images, which is optimistic"
    if splits.any():
        yield (
            "validation: of the last epoch on the validation split, to choose by; last and "
            "selected, the epoch that is best by validation: on the test images"
        )
    if not numbers.base.isna().all():
        yield "difference, p: of last, by a two-sided paired t-test over common seeds"
    if (why := numbers.test_note.dropna().unique()).size:
        yield f"not tested: {'; '.join(why)}"
    failed = usable[usable.error.notna()]
    yield from (f"{run.folder}: {run.error}" for run in failed[:MOST_ERRORS].itertuples())
    if len(failed) > MOST_ERRORS:
        yield f"and {len(failed) - MOST_ERRORS} more that are not finished"
    if len(unusable := runs[runs.status == "unusable"]):
        yield f"no runs: {len(unusable)} folders ({', '.join(unusable.folder[:MOST_ERRORS])})"
    if following:
        yield f"differs as well: {', '.join(following)}"


def write_sweep(folders: Sequence[Path], outputs: Path) -> tuple[str, list[Path]]:
    """Writes the table and the plot of a sweep to the folder of reports; returns it as text."""
    runs = read_runs(*folders)
    table = runs_table(runs)
    path = report_folder(outputs) / f"{table.name}.csv"
    write_text(path, table.csv())
    picture = path.with_suffix(".png")
    drawn = [picture] if draw_runs(table, runs, picture) else []
    return "\n".join(table.lines()), [path, *drawn]
