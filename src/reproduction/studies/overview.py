"""The report of a scale: its tables, sweeps and figures, from run folders alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.reporting.cells import read_cells
from reproduction.reporting.collect import Collection, collect
from reproduction.reporting.latency import read_latency
from reproduction.reporting.model_stats import Counts, PaperRow, measure, read_paper
from reproduction.reporting.page import report_folder, write_page
from reproduction.reporting.pictures import Sources, draw_pictures
from reproduction.reporting.records import Sweep
from reproduction.reporting.tables import TABLES, build_sweep, build_table
from reproduction.runs.compose import compose
from reproduction.runs.parse import parse
from reproduction.studies.plan import SWEEPS, Settings, point_configs
from reproduction.system.errors import UserError

Sizes = dict[tuple[int, str], Counts]  # of a table's row


def write_overview(settings: Settings) -> list[Path]:
    """Writes the report beside the runs and returns its files.

    UserError if there are no runs to read or the report has no place.
    """
    if not settings.root.is_dir():  # before a second of composing
        raise UserError(f"outputs={settings.root}: there is no such folder of runs")
    configs = point_configs("all", settings)
    collection = collect(settings.root, configs)
    folder = report_folder(settings.root)
    sources = read_sources(settings.root, settings.scale, configs, collection, count(read_paper()))
    pictures = draw_pictures(sources, folder)
    return write_page(folder, sources.tables, pictures, sources.collection)


def read_sources(
    outputs: Path,
    scale: str,
    configs: Mapping[str, Config],
    collection: Collection,
    sizes: Sizes,
) -> Sources:
    """What the report is made from; `configs` are those of all cells and values of sweeps.

    Tables of which the scale has no cell are left out.
    """
    cells, latency = read_cells(), read_latency(outputs)
    common: dict[str, Any] = {"cells": cells, "configs": configs, "collection": collection}
    papers = read_paper()
    tables = [
        build_table(number, scale, papers=papers, counts=sizes, latency=latency, **common)
        for number in TABLES
        if any(cell.table == number and cell.experiment in configs for cell in cells)
    ]
    tables += [build_sweep(x, scale, outputs=outputs, **common) for x in sweeps_of(configs)]
    return Sources(outputs=outputs, scale=scale, tables=tables, latency=latency, **common)


def sweeps_of(configs: Mapping[str, Config]) -> list[Sweep]:
    """All of them, with the values that they have at this scale."""
    sweeps = []
    for name, (experiment, key, _) in SWEEPS.items():
        start = f"{key.rpartition('.')[2]}="
        values = {x.removeprefix(start): x for x in configs if x.startswith(start)}
        if values:
            sweeps.append(Sweep(name=name, experiment=experiment, key=key, values=values))
    return sweeps


def count(papers: Sequence[PaperRow]) -> Sizes:
    """Builds each row's model without memory for its weights, in about ten seconds."""
    return {
        (row.table, row.row): measure(row, parse(compose("train", row.command_line).raw)).counts
        for row in papers
    }
