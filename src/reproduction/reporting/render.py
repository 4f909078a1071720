"""The files of the report: tables as Markdown, LaTeX (booktabs), CSV and JSON, and index.html."""

import base64
import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from reproduction.reporting.collect import Collection
from reproduction.reporting.columns import NOTHING, short_revision
from reproduction.reporting.pictures import Picture
from reproduction.reporting.tables import Table
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

TEMPLATE, PAGE = "page.html.jinja", "index.html"

LATEX: dict[str, Any] = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after \\ it would start an option
    "]": "{]}",
    "*": "{*}",
    "`": r"\textasciigrave{}",
}
MARKDOWN: dict[str, Any] = {sign: f"\\{sign}" for sign in "\\|*_`[]~"}  # after HTML escaping


def as_markdown(table: Table) -> str:
    """Returns title, warning, a table for each data set, and notes."""
    lines = [f"# {_markdown(table.title)}", ""]
    if table.banner:
        lines += [f"> **WARNING. {_markdown(table.banner)}**", ""]
    rules = ["---:" if column.is_number else "---" for column in table.columns]
    for section, records in table.sections():
        titles = [_markdown(column.title) for column in table.columns]
        cells = [[_markdown(c.text(record)) for c in table.columns] for record in records]
        lines += [f"## {_markdown(section)}", ""]
        lines += [f"| {' | '.join(row)} |" for row in (titles, rules, *cells)] + [""]
    lines += [f"- {_markdown(note)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def as_latex(table: Table) -> str:
    """Returns a table* with the printed columns and the notes; needs booktabs and graphicx."""
    columns = [column for column in table.columns if column.is_printed]
    heading = r" & ".join(_latex(column.title) for column in columns)
    warning = rf" \textbf{{WARNING. {_latex(table.banner)}}}" if table.banner else ""
    lines = [
        "% \\usepackage{booktabs,graphicx} \\usepackage[T1]{fontenc}",
        rf"% {' '.join(table.title.split())}",
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{_latex(table.title)}.{warning}}}",
        rf"\label{{tab:tokenmixup-{table.name}-{table.scale}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join('r' if c.is_number else 'l' for c in columns)}}}",
        r"\toprule",
        rf"{heading} \\",
    ]
    for section, records in table.sections():
        lines += [r"\midrule", rf"\multicolumn{{{len(columns)}}}{{l}}{{{_latex(section)}}} \\"]
        for record in records:
            lines.append(rf"{' & '.join(_latex(c.text(record)) for c in columns)} \\")
    lines += [r"\bottomrule", r"\end{tabular}}", r"\par\medskip\footnotesize\raggedright"]
    lines += [rf"{_latex(note)}\par" for note in table.notes]
    return "\n".join([*lines, r"\end{table*}"]) + "\n"


def as_csv(table: Table) -> str:
    """Returns a line for each record, with scale and warning; lists are joined by `;`."""
    file = io.StringIO()
    rows = list(_rows(table))
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        for key, value in row.items():
            row[key] = ";".join(map(str, value)) if isinstance(value, list) else value
        writer.writerow(row)
    return file.getvalue()


def as_json(table: Table) -> str:
    """Returns title, scale, warning (or null), records with unrounded numbers, and notes."""
    content = {
        "name": table.name,
        "title": table.title,
        "scale": table.scale,
        "warning": table.banner,
        "records": list(_rows(table)),
        "notes": list(table.notes),
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


FORMATS: Mapping[str, Callable[[Table], str]] = {
    "md": as_markdown,
    "tex": as_latex,
    "csv": as_csv,
    "json": as_json,
}


def _rows(table: Table) -> Iterator[dict[str, Any]]:
    for record in table.records:
        yield {"scale": table.scale, "warning": table.banner, **record.flat()}


def _latex(text: str) -> str:
    escaped = " ".join(text.split()).translate(str.maketrans(LATEX))
    return re.sub(r"(?<![\w.)])-(?=\d)", "$-$", escaped).replace("+/-", r"$\pm$")


def _markdown(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).translate(str.maketrans(MARKDOWN))


def write_page(
    folder: Path, tables: Sequence[Table], pictures: Sequence[Picture], collection: Collection
) -> list[Path]:
    """Writes tables of one scale in all formats and the page; returns all files of the report.

    `folder` already has the pictures, which the page embeds. Raises UserError if it cannot be
    written to.
    """
    (scale,) = {table.scale for table in tables}
    names = [picture.name for picture in pictures if not picture.missing]
    texts = {f"{x.name}.{kind}": form(x) for x in tables for kind, form in FORMATS.items()}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: NOTHING if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short_revision"] = short_revision
    try:
        page = environment.get_template(TEMPLATE).render(
            scale=scale,
            tables=tables,
            pictures=pictures,
            images={name: _image(folder / f"{name}.png") for name in names},
            collection=collection,
            formats=list(FORMATS),
        )
        for name, text in (texts | {PAGE: page}).items():
            write_text(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    drawn = [f"{name}{suffix}" for name in names for suffix in (".png", ".pdf")]
    return [folder / name for name in (*texts, *drawn, PAGE)]


def _image(path: Path) -> dict[str, Any]:
    """Returns a .png in base64 with its size in pixels."""
    with Image.open(path) as image:
        width, height = image.size
    content = base64.b64encode(path.read_bytes()).decode()
    return {"base64": content, "width": width, "height": height}
