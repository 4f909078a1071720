"""index.html: all tables, their runs and the folders that count for none, in one file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reproduction.errors import UserError
from reproduction.reporting.collect import REPORT, Collection
from reproduction.reporting.columns import NOTHING, short_revision
from reproduction.reporting.folder import Run
from reproduction.reporting.render import FORMATS
from reproduction.reporting.tables import Table
from reproduction.runs import write_text

TEMPLATE = "page.html.jinja"


def write_tables(outputs: Path, tables: Sequence[Table], collection: Collection) -> list[Path]:
    """Writes each table in all formats and the page to `outputs`/report; returns the files.

    Raises UserError if that folder is a run or cannot be written.
    """
    folder = outputs / REPORT
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is the folder of a run, which the report would write into")
    files = {
        f"table{table.number}.{suffix}": render(table)
        for table in tables
        for suffix, render in FORMATS.items()
    }
    files["index.html"] = as_page(tables, collection)
    try:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return [folder / name for name in files]


def as_page(tables: Sequence[Table], collection: Collection) -> str:
    """The page, self-contained; `tables` are of one scale. Its links lead to ../<run>/."""
    scales = {table.scale for table in tables}
    assert len(scales) == 1, "one page, one scale"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        scale=scales.pop(),
        banners=list(dict.fromkeys(table.banner for table in tables if table.banner)),
        tables=[_table(table) for table in tables],
        runs=[dict(_run(run, collection)) for run in collection.runs()],
        unused=collection.unused,
        formats=list(FORMATS),
    )


def _table(table: Table) -> dict[str, Any]:
    sections = [
        (name, [(r, [(column, column.text(r)) for column in table.columns]) for r in records])
        for name, records in table.sections()
    ]
    trained = [record for record in table.records if record.experiment]
    done = sum(bool(record.runs) for record in trained)
    return {"table": table, "sections": sections, "done": done, "trained": len(trained)}


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
    for key, unit in (("parameters", 1e6), ("macs", 1e9)):
        value = None if result is None else getattr(result, key)
        yield key, NOTHING if value is None else f"{value / unit:.3f}"
    revision = None if result is None else result.revision
    yield "revision", NOTHING if revision is None else short_revision(revision)
