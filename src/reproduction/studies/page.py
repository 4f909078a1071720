"""The page of a table, in the report beside the runs: plots, figures, and its numbers as .csv."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from reproduction.files import write_text
from reproduction.studies.plots import draw_beside, draw_sweep
from reproduction.studies.study import Study
from reproduction.studies.table import REPORT, Table, as_markdown, frame_of

HOW_TO_READ = """\
Mean +/- standard deviation over n seeds of accuracies and of the held-out cross-entropy after the
last epoch, on the test set of CIFAR, the validation set of ImageNet. Median: of the last ten
epochs. Best: of all, or of the last ten, on these same images, which is optimistic. Selected: on
the test set, of the epoch with the best validation accuracy. Mixed: the share of samples that HTM
mixes, over training, and the tokens replaced in each in the last epoch. Hours: of all n runs.
Difference: from the row that is named, over the seeds that both have (pairs); the paper's: of the
printed values; lower in: pairs whose loss falls; p: by a two-sided paired t-test, then corrected by
Holm for the other tests of the table. Intervals are not corrected for their number."""


def write_page(table: Table, outputs: Path) -> Path:
    """Writes the page of a table, and returns its path."""
    path = outputs / REPORT / f"{table.name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"# {table.title}", table.markdown(), *_plots(table, path.parent)]
    if table.study is not None:
        texts += _of_study(table, table.study, path.parent)
    write_text(path, "\n\n".join(texts) + "\n")
    write_text(path.with_suffix(".csv"), table.csv())
    return path


def _plots(table: Table, folder: Path) -> Iterator[str]:
    """Draws each main section: the values of a sweep, or a study beside the paper's values."""
    for number, section in enumerate(table.main_sections, start=1):
        if not section.finished:
            continue
        path = folder / f"{table.name}-{number}.svg"
        is_sweep = draw_sweep(path, section)
        if table.study is not None and not is_sweep:
            draw_beside(path, section)
        if table.study is not None or is_sweep:
            yield f"![{section.title}]({quote(path.name)})"


def _of_study(table: Table, study: Study, folder: Path) -> Iterator[str]:
    """Yields the figures of a study, its runs, rows without one, and how to read the tables."""
    lines = [line for section in table.main_sections for line in section.finished]
    for title, place in study.figures.items():
        row, _, name = place.partition("/")
        runs = [run for line in lines if line.row.name == row for run in line.runs]
        drawn = [run.path / name for run in runs if (run.path / name).exists()]
        if drawn:
            yield f"## {title}\n\n![{title}]({_link(drawn[0], folder)})"
    for line in lines:
        links = [f"[{run.name}]({_link(run.path / 'report.md', folder)})" for run in line.runs]
        yield f"- {line.row.heads['row']}: {', '.join(links)}"
    for section in table.main_sections:
        if section.missing:
            title = f"## Rows without a run: {section.title}".removesuffix(": ")
            yield f"{title}\n\n{as_markdown(frame_of(section.missing))}"
    yield f"## How to read the tables\n\n{HOW_TO_READ}"


def _link(path: Path, folder: Path) -> str:
    return quote(os.path.relpath(path, folder))
