"""The report of a scale: its tables and sweeps, pictures, and index.html."""

import base64
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reproduction.studies.pictures import draw_pictures
from reproduction.studies.plan import ALL, studies_of
from reproduction.studies.results import HOW_TO_READ, results_of
from reproduction.studies.runs import read_runs, state_text
from reproduction.studies.status import listing
from reproduction.studies.study import FULL, Settings
from reproduction.studies.table import report_folder
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

TEMPLATE, PAGE = "page.html.jinja", "index.html"


def write_page(settings: Settings) -> Path:
    """Writes the report beside the runs and returns the page.

    Raises UserError if there is no folder of runs, or a run occupies the folder of the report.
    """
    if not settings.root.is_dir():
        raise UserError(f"outputs={settings.root}: there is no such folder of runs")
    runs = read_runs(settings.root)
    folder = report_folder(settings.root)
    tables, keys = results_of(studies_of(ALL), settings, runs)
    files = {table.name: [path.name for path in table.write(folder)] for table in tables}
    pictures = draw_pictures(tables, keys, runs, settings, folder)
    labels = {key: [x for x, other in keys.items() if other == key] for key in keys.values()}
    is_used = runs.key.isin(labels)
    used = runs[is_used].sort_values(["key", "seed", "folder"])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(
        scale=settings.scale,
        about="" if settings.scale == FULL else f" ({settings.chosen.about})",
        marks="; ".join(dict.fromkeys(table.mark for table in tables if table.mark)).upper(),
        how_to_read=HOW_TO_READ,
        tables=tables,
        files=files,
        pictures=pictures,
        images={
            x.name: base64.b64encode((folder / f"{x.name}.png").read_bytes()).decode()
            for x in pictures
            if not x.missing
        },
        html=_html,
        used=listing(used.assign(labels=used.key.map(labels))),
        unused=_unused(runs[~is_used]),
    )
    try:
        write_text(folder / PAGE, page)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return folder / PAGE


def _html(texts: pd.DataFrame) -> Markup:
    """Returns a table whose first column heads the rows; its content is escaped."""
    first, *_ = texts.columns
    html = texts.set_index(first).rename_axis(columns=first).rename_axis(None).to_html(border=0)
    return Markup(html.replace("+/-", "&plusmn;").replace(' style="text-align: right;"', ""))  # noqa: S704


def _unused(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the folders that belong to no row."""
    states = [x.error if x.status == "unusable" else state_text(x) for x in runs.itertuples()]
    return pd.DataFrame({"folder": runs.folder, "status": states})
