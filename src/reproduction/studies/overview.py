"""The report of a scale: its tables, sweeps and figures, from run folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from reproduction.config import Config
from reproduction.reporting.cells import read_cells
from reproduction.reporting.collect import collect, report_folder
from reproduction.reporting.latency import read_latency
from reproduction.reporting.model_stats import Counts, PaperRow, measure, read_paper
from reproduction.reporting.pictures import draw_pictures
from reproduction.reporting.records import Sources, Sweep
from reproduction.reporting.render import write_page
from reproduction.reporting.tables import TABLES, Table, build_sweep, build_table
from reproduction.runs.compose import config_of
from reproduction.studies.plan import SWEEPS, Settings, point_configs, sweep_label
from reproduction.system.errors import UserError

Sizes = dict[tuple[int, str], Counts]  # by table and row


def write_overview(settings: Settings) -> list[Path]:
    """Writes the report beside the runs and returns its files.

    Raises UserError if there is no folder of runs, or a run occupies the folder of the report.
    """
    if not settings.root.is_dir():  # composing takes a second
        raise UserError(f"outputs={settings.root}: there is no such folder of runs")
    configs = point_configs("all", settings)
    folder = report_folder(settings.root)
    sources = read_sources(settings.root, settings.scale, configs, count(read_paper()))
    tables = build_tables(sources)
    pictures = draw_pictures(sources, tables, folder)
    return write_page(folder, tables, pictures, sources.collection)


def read_sources(
    outputs: Path, scale: str, configs: Mapping[str, Config], counts: Sizes
) -> Sources:
    return Sources(
        outputs=outputs,
        scale=scale,
        cells=read_cells(),
        configs=configs,
        collection=collect(outputs, configs),
        papers=read_paper(),
        counts=counts,
        latency=read_latency(outputs),
    )


def build_tables(sources: Sources) -> list[Table]:
    """Builds the tables with a cell at the scale, and the sweeps."""
    trained = {cell.table for cell in sources.cells if cell.experiment in sources.configs}
    tables = [build_table(number, sources) for number in TABLES if number in trained]
    return tables + [build_sweep(sweep, sources) for sweep in sweeps_of(sources.configs)]


def sweeps_of(configs: Mapping[str, Config]) -> list[Sweep]:
    """Returns the sweeps, with their values at this scale."""
    sweeps = []
    for name, (experiment, key, _) in SWEEPS.items():
        start = sweep_label(key, "")
        values = {x.removeprefix(start): x for x in configs if x.startswith(start)}
        if values:
            sweeps.append(Sweep(name=name, experiment=experiment, key=key, values=values))
    return sweeps


def count(papers: Sequence[PaperRow]) -> Sizes:
    """Counts parameters and MACs of each row's model on the meta device, in about ten seconds."""
    return {(x.table, x.row): measure(x, config_of(x.command_line)).counts for x in papers}
