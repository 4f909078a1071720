"""Writes the paper's tables beside our results, from run folders alone, to their report/."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.cells import Cell, read_cells
from reproduction.cli import compose, one_line
from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.parse import parse
from reproduction.plan import DATASET_OPTIONS, cell_config, cells_of
from reproduction.reporting.collect import collect
from reproduction.reporting.page import write_tables
from reproduction.reporting.paper import PaperRow, read_paper
from reproduction.reporting.records import Counts
from reproduction.reporting.tables import TABLES, build_table
from reproduction.scales import FULL, SCALES


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    parser.add_argument("--scale", choices=SCALES, default=FULL, help="of the runs to report")
    parser.add_argument("--tables", type=int, nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--dataset", choices=DATASET_OPTIONS, help="in place of the tables' own")
    parser.add_argument("--data", help="its folder; without --dataset that of CIFAR and imagenet/")
    parser.add_argument("--devices", type=int, default=1, help="of the runs")
    return parser


def resolved(cells: Sequence[Cell], args: argparse.Namespace) -> dict[str, Config]:
    """experiment -> configuration; the data need not be here."""
    return {
        cell.experiment: cell_config(
            cell, args.scale, args.dataset, args.data, devices=args.devices, outputs=args.outputs
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
    configs = resolved(cells_of(args.scale), args)
    runs = Path(args.outputs) if args.scale == FULL else Path(args.outputs, args.scale)
    collection = collect(runs, configs)
    sources: dict[str, Any] = {
        "cells": cells,
        "configs": configs,
        "collection": collection,
        "papers": papers,
        "counts": count([row for row in papers if row.table in args.tables]),
    }
    tables = [build_table(number, args.scale, **sources) for number in sorted(set(args.tables))]
    return write_tables(runs, tables, collection)


def main() -> None:
    parser = build_parser()
    try:
        print(*write(parser.parse_args()), sep="\n")
    except UserError as error:
        parser.exit(2, f"report.py: {one_line(error)}\n")


if __name__ == "__main__":
    main()
