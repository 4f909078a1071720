"""The page of the paper's tables with our results: what was run comes first."""

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pandas as pd
import torch
from jinja2 import Environment, FileSystemLoader

from reproduction.models.build import build_module, count_parameters, without_weights
from reproduction.points import compose
from reproduction.reporting.drawing import CAPTIONS
from reproduction.studies.lines import Line
from reproduction.studies.plots import draw_beside, draw_sweep
from reproduction.studies.results import Run
from reproduction.studies.study import Size
from reproduction.studies.study_table import Planned
from reproduction.studies.table import REPORT, Section, Table, shown
from reproduction.studies.text import number
from reproduction.system import write_text

HOW_TO_READ = """\
Mean +/- standard deviation over n seeds of accuracies and of the held-out cross-entropy after the
last epoch, on the test set of CIFAR, the validation set of ImageNet. Median: of the last ten
epochs. Best: of all, or of the last ten, on these same images, which is optimistic. Mixed: the
share of samples that HTM mixes, over training, and the tokens replaced in each in the last epoch.
Difference: from the row that is named, over the seeds that both have (pairs); lower in: pairs whose
loss falls; p: by a two-sided paired t-test, then corrected by Holm for the other tests of the
table. Intervals are not corrected for their number."""


@dataclass(frozen=True)
class Link:
    text: str
    to: str  # relative to the page


@dataclass(frozen=True)
class Block:
    """Lines of a section as they stand on the page: a row of texts, with links to its runs."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    links: list[list[list[Link]]] = field(default_factory=list)  # of each run of each row


@dataclass(frozen=True)
class Picture:
    title: str
    png: str  # in base64


@dataclass(frozen=True, kw_only=True)
class Part:
    """A study on the page."""

    name: str
    table: Table
    finished: int
    plots: list[Picture]
    run: list[Block]
    not_run: list[Block]
    measured: list[Block]
    sizes: list[Block]
    figures: list[Picture]


def write_page(plans: Sequence[Planned], tables: Sequence[Table], outputs: Path) -> Path:
    """Writes the tables with their plots as a page; returns its path."""
    folder = outputs / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part_of(plan, table, folder) for plan, table in zip(plans, tables, strict=True)]
    marks = dict.fromkeys(text for plan in plans for text in plan.about)
    name = "index"
    if len(plans) == 1:
        name = plans[0].file
    files = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    text = files.get_template("page.html.jinja").render(
        parts=parts,
        marks=marks,
        how_to_read=HOW_TO_READ,
    )
    path = folder / f"{name}.html"
    write_text(path, text)
    return path


def part_of(plan: Planned, table: Table, folder: Path) -> Part:
    """Returns a study as it stands on the page."""
    counts = []
    if plan.study.sizes:
        counts = [_plain_block("", sizes(plan.study.sizes))]
    return Part(
        name=Path(plan.name).stem,
        table=table,
        finished=len(table.counted.runs),
        plots=[*_plots(table, folder)],
        run=[_block(x, x.finished, folder) for x in table.sections if x.finished],
        not_run=[_block(x, x.missing, folder) for x in table.tested if x.missing],
        measured=[_plain_block(title, texts) for title, texts in table.extras.items()],
        sizes=counts,
        figures=[*_figures(plan, table)],
    )


def _block(section: Section, lines: Sequence[Line], folder: Path) -> Block:
    texts = shown(lines, section.is_tested)
    links = [[_links(run, folder) for run in line.runs] for line in lines]
    return Block(section.title, [*texts.columns], texts.to_numpy().tolist(), links)


def _plain_block(title: str, texts: pd.DataFrame) -> Block:
    return Block(title, [*texts.columns], texts.to_numpy().tolist())


def _links(run: Run, folder: Path) -> list[Link]:
    """Links to the folder of a run, and to its report and pictures."""
    if run.path is None:
        return []
    place = Path(os.path.relpath(run.path, folder))
    links = [Link(run.name, f"{quote(str(place))}/")]
    for name in ("report.md", *CAPTIONS):
        if (run.path / name).exists():
            text = name.partition(".")[0].replace("_", " ")
            links.append(Link(text, quote(str(place / name))))
    return links


def _plots(table: Table, folder: Path) -> Iterator[Picture]:
    """Draws each section of what is tested beside the paper's values, and the points of a sweep."""
    for section in table.tested:
        if section.finished:
            name = "-".join(x for x in (table.name, section.title) if x)
            path = folder / f"{name}.png"
            is_sweep = draw_sweep(path, section)
            if not is_sweep:
                draw_beside(path, section)
            yield Picture(section.title, as_text(path))


def _figures(plan: Planned, table: Table) -> Iterator[Picture]:
    """Yields the pictures that the first run of a row has drawn."""
    for title, place in plan.study.figures.items():
        row, _, name = place.partition("/")
        lines = [line for section in table.tested for line in section.finished]
        runs = [run for line in lines if line.entry.id.row == row for run in line.runs]
        drawn = [run.path / name for run in runs if run.path and (run.path / name).exists()]
        if drawn:
            yield Picture(title, as_text(drawn[0]))


def as_text(picture: Path) -> str:
    return base64.b64encode(picture.read_bytes()).decode()


def sizes(each: Mapping[str, Size]) -> pd.DataFrame:
    """Counts the parameters of models, built without memory, beside the printed ones."""
    rows = []
    for name, size in each.items():
        config = compose(size.overrides)
        with torch.device("meta"):
            model = without_weights(config.model)
            module = build_module(model, config.augmentation, size.classes)
        ours = f"{count_parameters(module) / 1e6:.2f}"
        printed = number(size.parameters, "g")
        rows.append({"row": name, "parameters [M]": ours, "paper [M]": printed})
    return pd.DataFrame(rows)
