"""index.html: tables, sweeps, figures, their runs and folders that count for none, in one file."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reproduction.reporting.collect import REPORT, Collection, Run
from reproduction.reporting.columns import NOTHING, short_revision
from reproduction.reporting.pictures import Picture
from reproduction.reporting.render import FORMATS
from reproduction.reporting.tables import Table
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

TEMPLATE, PAGE = "page.html.jinja", "index.html"


def report_folder(outputs: Path) -> Path:
    """Makes the folder of the report; UserError if it is a run's."""
    folder = outputs / REPORT
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is the folder of a run, which the report would write into")
    folder.mkdir(exist_ok=True)
    return folder


def write_page(
    folder: Path, tables: Sequence[Table], pictures: Sequence[Picture], collection: Collection
) -> list[Path]:
    """Writes each table in all formats, and the page, beside the pictures; returns all, it last.

    Raises UserError if `folder` cannot be written.
    """
    files = {
        f"{table.name}.{suffix}": render(table)
        for table in tables
        for suffix, render in FORMATS.items()
    }
    drawn = [f"{p.name}{suffix}" for p in pictures if not p.missing for suffix in (".png", ".pdf")]
    try:
        for name, text in files.items():
            write_text(folder / name, text)
        write_text(folder / PAGE, _page(folder, tables, pictures, collection))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return [folder / name for name in (*files, *drawn, PAGE)]


def _page(
    folder: Path, tables: Sequence[Table], pictures: Sequence[Picture], collection: Collection
) -> str:
    """The page, self-contained; `tables` are of one scale. Its links lead to ../<run>/.

    The pictures are read from `folder`.
    """
    scales = {table.scale for table in tables}
    assert len(scales) == 1, "one page, one scale"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [_picture(folder, picture) for picture in pictures]
    return environment.get_template(TEMPLATE).render(
        scale=scales.pop(),
        banners=list(dict.fromkeys(table.banner for table in tables if table.banner)),
        tables=[_table(table, shown) for table in tables],
        figures=[picture for picture in shown if picture["table"] is None],
        runs=[dict(_run(run, collection)) for run in collection.runs()],
        unused=collection.unused,
        formats=list(FORMATS),
    )


def _picture(folder: Path, picture: Picture) -> dict[str, Any]:
    """With the image as text, and its size in pixels."""
    if picture.missing is not None:
        return {**vars(picture), "image": None}
    content = (folder / f"{picture.name}.png").read_bytes()
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))  # of its IHDR
    image = base64.b64encode(content).decode()
    return {**vars(picture), "image": image, "width": width, "height": height}


def _table(table: Table, pictures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sections = [
        (name, [(r, [(column, column.text(r)) for column in table.columns]) for r in records])
        for name, records in table.sections()
    ]
    trained = [record for record in table.records if record.experiment]
    done = sum(bool(record.runs) for record in trained)
    return {
        "table": table,
        "sections": sections,
        "pictures": [picture for picture in pictures if picture["table"] == table.name],
        "done": done,
        "trained": len(trained),
    }


def _run(run: Run, collection: Collection) -> Iterator[tuple[str, Any]]:
    result = run.result
    yield "name", run.folder
    yield "link", f"../{quote(run.folder)}/"
    yield "cells", ", ".join(collection.experiments(run))
    yield "seed", run.seed
    yield "status", run.status
    yield "error", run.error
    for key in ("top1_last", "top1_median10", "top1_best", "top5_last", "top5_best"):
        yield key, NOTHING if result is None else f"{result.accuracy[key]:.2f}"
    seconds = None if result is None else result.seconds
    yield "time", NOTHING if seconds is None else f"{seconds / 3600:.2f} ({seconds:,.0f})"
    for key in ("devices", "hardware"):
        value = None if result is None else getattr(result, key)
        yield key, NOTHING if value is None else value
    revision = None if result is None else result.revision
    yield "revision", NOTHING if revision is None else short_revision(revision)
