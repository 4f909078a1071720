"""The page of the paper's tables with our results: what was run comes first."""

import base64
import mimetypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pandas as pd
import torch
from jinja2 import Environment

from reproduction.compose import compose
from reproduction.config import LONGEST_NAME
from reproduction.files import cut, write_text
from reproduction.identity import digest
from reproduction.models.build import build_module, count_parameters, without_weights
from reproduction.reporting.drawing import PICTURES
from reproduction.studies.plots import draw_beside, draw_sweep
from reproduction.studies.runs import Run
from reproduction.studies.study import Part, PrintedModel
from reproduction.studies.table import REPORT, Table, formatted, frame_of

TEMPLATE = Path(__file__).with_name("page.html.jinja")
HOW_TO_READ = """\
Mean +/- standard deviation over n seeds of accuracies and of the held-out cross-entropy after the
last epoch, on the test set of CIFAR, the validation set of ImageNet. Median: of the last ten
epochs. Best: of all, or of the last ten, on these same images, which is optimistic. Selected: on
the test set, of the epoch with the best validation accuracy. Mixed: the share of samples that HTM
mixes, over training, and the tokens replaced in each in the last epoch. Hours: of all n runs.
Difference: from the row that is named, over the seeds that both have (pairs); the paper's: of the
printed values; lower in: pairs whose loss falls; p: by a two-sided paired t-test, then corrected by
Holm for the other tests of the table. Intervals are not corrected for their number."""


class Link(NamedTuple):
    text: str
    to: str  # relative to the page


class Picture(NamedTuple):
    title: str
    data: str  # its file as an address


class Chapter(NamedTuple):
    """A study on the page."""

    part: Part
    table: Table
    plots: list[Picture]  # none if no run is finished
    figures: list[Picture]


def write_page(parts: Sequence[Part], tables: Sequence[Table], outputs: Path) -> Path:
    """Writes report/index.html of the paper's whole studies, else a page of its own; its path."""
    folder = outputs / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    chapters = [
        Chapter(part, table, [*_plots(table, folder)], [*_figures(part, table)])
        for part, table in zip(parts, tables, strict=True)
    ]
    if len(parts) == 1:
        name = parts[0].file
    elif all(part.is_whole_of_the_paper for part in parts):
        name = "index"
    else:
        name = f"all-{digest([part.file for part in parts])}"
    path = folder / f"{name}.html"
    page = Environment(autoescape=True).from_string(TEMPLATE.read_text())
    text = page.render(
        chapters=chapters,
        warnings=dict.fromkeys(text for part in parts for text in part.about),
        how_to_read=HOW_TO_READ,
        frame_of=frame_of,
        sizes_of=sizes_of,
        links_of=partial(links_of, folder),
    )
    write_text(path, text)
    return path


def links_of(folder: Path, run: Run) -> list[Link]:
    """Links to the folder of a run, and to its report and pictures."""
    place = Path(os.path.relpath(run.path, folder))
    links = [Link(run.name, f"{quote(str(place))}/")]
    for name in ("report.md", *PICTURES):
        if (run.path / name).exists():
            text = name.partition(".")[0].replace("_", " ")
            links.append(Link(text, quote(str(place / name))))
    return links


def _plots(table: Table, folder: Path) -> Iterator[Picture]:
    """Draws each main section beside the paper's values, or the values of a sweep."""
    for section in table.main_sections:
        if section.finished:
            title = re.sub(r"\W+", "-", section.title)
            name = f"{table.name}-{title}".removesuffix("-")
            path = folder / f"{cut(name, LONGEST_NAME)}.svg"
            is_sweep = draw_sweep(path, section)
            if not is_sweep:
                draw_beside(path, section)
            yield Picture(section.title, as_text(path))


def _figures(part: Part, table: Table) -> Iterator[Picture]:
    """Yields the pictures that the first run of a row has drawn."""
    lines = [line for section in table.main_sections for line in section.finished]
    for title, place in part.study.figures.items():
        row, _, name = place.partition("/")
        runs = [run for line in lines if line.row.name == row for run in line.runs]
        drawn = [run.path / name for run in runs if (run.path / name).exists()]
        if drawn:
            yield Picture(title, as_text(drawn[0]))


def as_text(picture: Path) -> str:
    kind, _ = mimetypes.guess_type(picture)
    return f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"


def sizes_of(models: Mapping[str, PrintedModel]) -> pd.DataFrame:
    """Counts the parameters of models, built without memory, beside the printed ones."""
    rows = []
    for name, model in models.items():
        config = compose(model.overrides)
        with torch.device("meta"):
            plain = without_weights(config.model)
            module = build_module(plain, config.augmentation, model.classes)
        ours = f"{count_parameters(module) / 1e6:.2f}"
        printed = formatted(model.parameters, "g")
        rows.append({"row": name, "parameters [M]": ours, "paper [M]": printed})
    return pd.DataFrame(rows)
