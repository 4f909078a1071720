"""Writes the paper's tables beside our results, from run folders alone, to OUTPUTS/report."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.cells import Cell, read_cells
from reproduction.cli import compose, one_line
from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.parse import parse, parse_types
from reproduction.reporting.collect import collect
from reproduction.reporting.page import write_tables
from reproduction.reporting.paper import PaperRow, read_paper
from reproduction.reporting.records import Counts
from reproduction.reporting.tables import FULL, TABLES, build_table


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="of the runs")
    parser.add_argument("--scale", choices=[FULL], default=FULL, help="of the runs to report")
    parser.add_argument("--tables", type=int, nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--data", help="dataset.root of the runs, if not the experiments' own")
    parser.add_argument("--devices", type=int, help="devices of the runs, if not 1")
    return parser


def full_configs(cells: Sequence[Cell], data: str | None, devices: int | None) -> dict[str, Config]:
    """experiment -> configuration; the data need not be here."""
    changes = {"dataset.root": data, "devices": devices}
    overrides = [f"{key}={value}" for key, value in changes.items() if value is not None]
    return {
        cell.experiment: parse_types(
            compose("train", [f"experiment={cell.experiment}", *overrides]).raw
        )
        for cell in cells
    }


def count(papers: Sequence[PaperRow]) -> dict[tuple[int, str], Counts]:
    """Builds each row's model without memory for its weights, in about ten seconds."""
    from reproduction.reporting.model_stats import measure

    sizes: dict[tuple[int, str], Counts] = {}
    for row in papers:
        stats = measure(row, parse(compose("train", row.command_line).raw))
        sizes[row.table, row.row] = Counts(stats.parameters, *stats.macs)
    return sizes


def write(args: argparse.Namespace) -> list[Path]:
    """Returns the files; UserError if there are no runs to read or the report has no place."""
    cells, papers = read_cells(), read_paper()
    configs = full_configs(cells, args.data, args.devices)
    collection = collect(args.outputs, configs)
    sources: dict[str, Any] = {
        "cells": cells,
        "configs": configs,
        "collection": collection,
        "papers": papers,
        "counts": count([row for row in papers if row.table in args.tables]),
    }
    tables = [build_table(number, args.scale, **sources) for number in sorted(set(args.tables))]
    return write_tables(args.outputs, tables, collection)


def main() -> None:
    parser = build_parser()
    try:
        print(*write(parser.parse_args()), sep="\n")
    except UserError as error:
        parser.exit(2, f"report.py: {one_line(error)}\n")


if __name__ == "__main__":
    main()
