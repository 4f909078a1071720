"""A table as Markdown, LaTeX (booktabs), CSV and JSON."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reproduction.reporting.tables import Table

LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after \\ it would begin an option
    "]": "{]}",
    "*": "{*}",
    "`": r"\textasciigrave{}",
}
MARKDOWN = {
    **{sign: f"\\{sign}" for sign in "\\|*_`[]~"},
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
}


def as_markdown(table: Table) -> str:
    """A page: title, warning, a table for each data set, notes."""
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
    """A table* for a preamble with booktabs and graphicx; the columns that fit, and the notes."""
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
    """A line for each record, with the scale and its warning in each; lists joined by `;`."""
    file = io.StringIO()
    rows = [{key: _csv(value) for key, value in row.items()} for row in _rows(table)]
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_json(table: Table) -> str:
    """title, scale, warning (or null), records with unrounded numbers, notes."""
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


def _csv(value: Any) -> Any:
    return ";".join(str(part) for part in value) if isinstance(value, list) else value


def _latex(text: str) -> str:
    escaped = "".join(LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return re.sub(r"(?<![\w.)])-(?=\d)", "$-$", escaped).replace("+/-", r"$\pm$")


def _markdown(text: str) -> str:
    return "".join(MARKDOWN.get(sign, sign) for sign in " ".join(text.split()))
