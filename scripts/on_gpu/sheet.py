"""The tables of a part: a JSON file that is written after every row, and its Markdown."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from reproduction.system.errors import first_line
from reproduction.system.hardware import hardware_name
from reproduction.system.storage import write_text

Figures = Mapping[str, Any]
HERE = Path(__file__).parent


class Sheet:
    """Title of a table -> name of a row -> figures; `ends` is the time at which the part is over.

    A file of the same card, versions and revision is gone on with: what it holds is not measured
    again, except for what failed. Any other file is replaced.
    """

    def __init__(self, path: Path, device: torch.device, ends: float):
        self.path, self.device, self.ends = path, device, ends
        self.head = head_of(device)
        self.tables: dict[str, dict[str, Figures]] = {}
        if path.exists() and (before := read_sheet(path))["head"] == self.head:
            self.tables = before["tables"]

    @property
    def seconds_left(self) -> float:
        return self.ends - time.time()

    def has(self, title: str, name: str) -> bool:
        figures = self.tables.get(title, {}).get(name)
        return figures is not None and "failed" not in figures and not figures.get("partly")

    def put(self, title: str, name: str, figures: Figures) -> None:
        """Writes a row. `partly` in it says that it is to be measured again."""
        self.tables.setdefault(title, {})[name] = figures
        self.write()

    @contextmanager
    def trying(self, title: str, name: str) -> Iterator[None]:
        """Turns an error into a row that says so, and goes on."""
        try:
            yield
        except Exception as error:
            figures = self.tables.get(title, {}).get(name, {})
            self.put(title, name, {**figures, "failed": first_line(error)[:150]})

    def write(self) -> None:
        content = {"head": self.head, "tables": self.tables}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(content, indent=1) + "\n")


def head_of(device: torch.device) -> dict[str, Any]:
    """The card, its software and the revision of this code."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # a copy of the code outside of git
        found = "unknown"
    return {
        "hardware": hardware_name(device.type),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "revision": found.strip(),
    }


def read_sheet(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def sheet_as_markdown(path: Path, rows: int | None = None) -> str:
    """The tables of a sheet, each with at most so many rows. Lists are only in the JSON file."""
    content = read_sheet(path)
    head = ", ".join(f"{key} {value}" for key, value in content["head"].items() if value)
    parts = [f"{head}."]
    for title, table in content["tables"].items():
        columns = dict.fromkeys(key for figures in table.values() for key in figures)
        shown = [
            key
            for key in columns
            if not any(isinstance(figures.get(key), list) for figures in table.values())
        ]
        lines = [f"**{title}**", "", _line(["", *shown]), "|---|" + "---:|" * len(shown)]
        for name, figures in [*table.items()][:rows]:
            lines.append(_line([name, *(_text(figures.get(key)) for key in shown)]))
        if rows is not None and len(table) > rows:
            lines.append(f"... {len(table) - rows} more rows")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if value and abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
