"""What was found, as JSON and as Markdown."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.chaos.runs import Outcome
from reproduction.storage import write_text
from scripts.benchmark.page import put_on_page

MARK = "chaos"


def write_outcomes(
    folder: Path, outcomes: Sequence[Outcome], machine: str, page: str | None
) -> None:
    """Writes chaos.json, chaos.md, and the same between the marks of a page."""
    found = {"machine": machine, "parts": [dataclasses.asdict(outcome) for outcome in outcomes]}
    write_text(folder / "chaos.json", json.dumps(found, indent=2) + "\n")
    text = markdown(outcomes, machine)
    write_text(folder / "chaos.md", text)
    if page is not None:
        put_on_page(Path(page), text, MARK)


def line(outcome: Outcome) -> str:
    """One line for a terminal."""
    return (
        f"{outcome.part}: {_counts(outcome)}; {len(outcome.differences)} differences; "
        f"{outcome.seconds:.0f} s"
    )


def markdown(outcomes: Sequence[Outcome], machine: str) -> str:
    """A table of all parts, and one for each part that has rows."""
    summary = [
        {
            "part": outcome.part,
            "what": _counts(outcome),
            "differences": len(outcome.differences),
            "seconds": round(outcome.seconds),
        }
        for outcome in outcomes
    ]
    parts = [f"{machine}.", _table(summary)]
    parts += [f"{one.part}:\n\n{_table(one.rows)}" for one in outcomes if one.rows]
    return "\n\n".join(parts) + "\n"


def _counts(outcome: Outcome) -> str:
    return ", ".join(f"{name} {count}" for name, count in outcome.counts.items())


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(row.get(key, "")) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
