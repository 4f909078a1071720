"""The report of a scale: its tables and sweeps in several formats, pictures, and index.html."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from reproduction.studies.pictures import Sources, draw_pictures
from reproduction.studies.plan import ALL, studies_of
from reproduction.studies.results import (
    FORMATS,
    HOW_TO_READ,
    Result,
    report_folder,
    results_of,
    warning,
    write_result,
)
from reproduction.studies.runs import closest, read_runs, state_text
from reproduction.studies.study import Settings
from reproduction.studies.tables import short_revision
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

TEMPLATE, PAGE = "page.html.jinja", "index.html"
RUN_COLUMNS = {
    "top1_last": "last",
    "top1_median10": "median",
    "top1_best": "best",
    "top5_last": "top-5",
}


def write_page(settings: Settings) -> Path:
    """Writes the report beside the runs and returns the page.

    Raises UserError if there is no folder of runs, or a run occupies the folder of the report.
    """
    if not settings.root.is_dir():  # composing takes a second
        raise UserError(f"outputs={settings.root}: there is no such folder of runs")
    runs = read_runs(settings.root)
    folder = report_folder(settings.root)
    results, keys, runs = results_of(studies_of(ALL), settings, runs)
    for result in results:
        write_result(result, folder)
    pictures = draw_pictures(results, Sources(settings, runs, keys), folder)
    drawn = [picture.name for picture in pictures if not picture.missing]
    used = runs[runs.key.isin([*keys.values()])]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(
        scale=settings.scale,
        warning=_warning(results, settings),
        how_to_read=HOW_TO_READ,
        results=results,
        pictures=pictures,
        images={name: _image(folder / f"{name}.png") for name in drawn},
        formats=list(FORMATS),
        table=_table,
        used=_shown_runs(used, keys),
        unused=_unused(runs[~runs.key.isin([*keys.values()])], used, keys),
    )
    try:
        write_text(folder / PAGE, page)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return folder / PAGE


def _warning(results: Sequence[Result], settings: Settings) -> str | None:
    marks = dict.fromkeys(result.mark for result in results if result.mark)
    return warning("; ".join(marks) or None, settings)


def _table(texts: pd.DataFrame) -> Markup:
    """Returns a table whose first column heads the rows; its content is escaped."""
    first, *_ = texts.columns
    html = texts.set_index(first).rename_axis(columns=first).rename_axis(None).to_html(border=0)
    return Markup(html.replace("+/-", "&plusmn;").replace(' style="text-align: right;"', ""))  # noqa: S704


def _shown_runs(runs: pd.DataFrame, keys: Mapping[str, str]) -> pd.DataFrame:
    """Returns a line for each run that belongs to a row."""
    labels: dict[str, list[str]] = {}
    for label, key in keys.items():
        labels.setdefault(key, []).append(label)
    rows = [
        {
            "run": run.folder,
            "status": state_text(run) + ("" if pd.isna(run.error) else f": {run.error}"),
            "seed": str(run.seed),
            **{title: _percent(getattr(run, name)) for name, title in RUN_COLUMNS.items()},
            "hours": "" if pd.isna(run.seconds) else f"{run.seconds / 3600:.2f}",
            "devices": "" if pd.isna(run.devices) else str(run.devices),
            "hardware": "" if pd.isna(run.hardware) else run.hardware,
            "git": "" if pd.isna(run.git_revision) else short_revision(run.git_revision),
            "rows": ", ".join(labels[run.key]),
        }
        for run in runs.sort_values(["key", "seed", "folder"]).itertuples()
    ]
    return pd.DataFrame(rows)


def _percent(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:.2f}"


def _unused(runs: pd.DataFrame, used: pd.DataFrame, keys: Mapping[str, str]) -> pd.DataFrame:
    """Returns the folders that belong to no row, with the reason."""
    known = {run.key: run.settings for run in used.itertuples()}
    labels = {key: label for label, key in reversed(list(keys.items()))}
    settings = {labels[key]: values for key, values in known.items()}
    rows = [
        {
            "folder": run.folder,
            "reason": run.error if run.status == "unusable" else closest(run, settings),
        }
        for run in runs.itertuples()
    ]
    return pd.DataFrame(rows)


def _image(path: Path) -> dict[str, Any]:
    """Returns a .png in base64 with its size in pixels."""
    with Image.open(path) as image:
        width, height = image.size
    content = base64.b64encode(path.read_bytes()).decode()
    return {"base64": content, "width": width, "height": height}
