"""The result of a study, from its runs: the table, its notes, and its text in several formats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from reproduction.studies import latency
from reproduction.studies.plan import Point, keys_of, points_of
from reproduction.studies.runs import REPORT, read_runs
from reproduction.studies.study import FULL, Settings, Study
from reproduction.studies.sweeps import as_csv
from reproduction.studies.tables import mark_of, notes_of, shown, sizes_shown, study_table
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

HOW_TO_READ = (
    "Accuracies are top-1 in percent on the held-out images (the test set of CIFAR, the validation "
    "set of ImageNet): mean +/- sample standard deviation over n seeds, the mean alone for n = 1. "
    "Last: after the last epoch. Median: of the last 10 epochs. Best: of the best epoch on these "
    "same held-out images, which is optimistic.",
    "The published code selects the best epoch, so best - paper compares like with like; last - "
    "paper uses no selection on the held-out images. Runs that are not the paper's experiments are "
    "not compared with it.",
    "Difference and p: last epoch, against our own baseline over their common seeds, by a "
    "two-sided paired t-test; p (Holm) is corrected for all tests of the table. Paper's: the "
    "difference of the printed accuracies.",
    "Parameters and MACs are our counts of the row's model beside the printed ones, including "
    "ScoreNet with HTM, and with the number of classes that fits the printed count. MACs: one "
    "image in evaluation, half the FLOPs of torch's FlopCounterMode; most printed counts leave out "
    "the matmuls of attention. Rows without n are quoted by the paper from other work.",
)
SWEPT = (
    "Difference and p: against the runs with the {word} of Table {table}. The baseline is the same "
    "recipe without the method.",
    "Mixed samples of a batch, and tokens replaced in each: means of the last epoch.",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A study at a scale; `numbers` is its table, `mark` says why it is not the paper's."""

    name: str
    study: Study
    scale: str
    mark: str | None
    numbers: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        if self.study.sweep is not None:
            return f"Sensitivity to {self.study.sweep.word}: {self.study.title}"
        number = self.name.removeprefix("table")
        return f"Table {number}: {self.study.title}" if number.isdecimal() else self.study.title

    @property
    def progress(self) -> str:
        """Says how many of the rows have a finished run."""
        trained = self.numbers[self.numbers.label.notna()]
        return f"{(trained.n > 0).sum()} of {len(trained)} rows have a finished run"

    def sections(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yields the name of each column of the table with its rows as text."""
        sweep = self.study.sweep
        texts = shown(self.numbers, "row" if sweep is None else sweep.word)
        for name in dict.fromkeys(self.numbers.column):
            rows = texts[self.numbers.column == name]
            is_quoted = self.numbers.label[self.numbers.column == name].isna()
            yield name, rows.assign(n=rows.n.where(~is_quoted, ""))

    def sizes(self) -> pd.DataFrame | None:
        return sizes_shown(self.numbers) if self.study.sizes else None


def result_of(
    name: str,
    study: Study,
    points: Sequence[Point],
    keys: Mapping[str, str],
    runs: pd.DataFrame,
    settings: Settings,
) -> Result:
    mark = mark_of(points, settings)
    measured = latency.read_latency(settings.root)
    numbers = study_table(study, points, keys, runs, mark, measured)
    notes = notes_of(study, numbers, keys, runs)
    if study.sweep is not None:
        table = study.sweep.own.partition("/")[0].removeprefix("table")
        notes[:0] = [text.format(word=study.sweep.word, table=table) for text in SWEPT]
    if "latency_ms" in numbers:
        notes.append(latency.note(measured, settings.scale))
    return Result(
        name=name,
        study=study,
        scale=settings.scale,
        mark=mark,
        numbers=numbers.assign(scale=settings.scale, warning=mark),
        notes=tuple(notes),
    )


def results_of(
    studies: Mapping[str, Study], settings: Settings, runs: pd.DataFrame | None = None
) -> tuple[list[Result], dict[str, str], pd.DataFrame]:
    """Returns the results of studies, the keys of all rows by label, and the runs.

    `runs` defaults to those in the folder of the scale.
    """
    points = points_of(studies, settings)
    keys = keys_of(points, settings)
    runs = read_runs(settings.root) if runs is None else runs
    results = []
    for name, study in studies.items():
        own = [point for point in points if point.study == name]
        if own:
            results.append(result_of(name, study, own, keys, runs, settings))
    return results, keys, runs


def markdown(result: Result) -> str:
    """Returns title, warning, a table for each column, sizes and notes."""
    lines = [f"# {result.title}", ""]
    if result.mark:
        lines += [f"> **WARNING. {result.mark.upper()}: not the paper's experiments.**", ""]
    for name, texts in result.sections():
        lines += [*([f"## {name}", ""] if name else []), as_markdown(texts), ""]
    if (sizes := result.sizes()) is not None:
        lines += ["## Parameters and MACs", "", as_markdown(sizes), ""]
    return "\n".join([*lines, *(f"- {note}" for note in result.notes)]) + "\n"


def as_markdown(texts: pd.DataFrame) -> str:
    """Returns a table: texts on the left, numbers on the right; signs of Markdown are escaped."""
    align = ["left" if name in LEFT else "right" for name in texts]
    escaped = texts.map(lambda text: text.replace("|", r"\|").replace("*", r"\*"))
    return escaped.to_markdown(index=False, disable_numparse=True, colalign=align)


LEFT = ("row", "status", "data", "command", "runs")


def latex(result: Result) -> str:
    """Returns a table with booktabs for each column, and the notes as comments."""
    lines = [f"% {result.title}"]
    lines += [f"% WARNING. {result.mark.upper()}"] if result.mark else []
    for name, texts in result.sections():
        table = texts.replace(r"\+/-", r"$\\pm$", regex=True)
        escaped = table.map(lambda x: x if "$" in x else _latex(x))
        escaped.columns = [_latex(title) for title in escaped]
        caption = _latex(f"{result.title}{f', {name}' if name else ''}")
        label = f"tab:{result.name}-{result.scale}{f'-{name}' if name else ''}"
        style = "l" + "r" * (len(table.columns) - 1)
        lines.append(
            escaped.to_latex(index=False, caption=caption, label=label, column_format=style)
        )
    return "\n".join([*lines, *(f"% {note}" for note in result.notes)]) + "\n"


def _latex(text: str) -> str:
    for sign in "&%$#_{}":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("*", r"\textsuperscript{*}")


def csv(result: Result) -> str:
    """Returns a line for each row with unrounded numbers; lists are joined by `;`."""
    return as_csv(result.numbers.drop(columns=["base"]))


FORMATS = {"md": markdown, "tex": latex, "csv": csv}


def write_result(result: Result, folder: Path) -> list[Path]:
    """Writes a result in all FORMATS; UserError if the folder cannot be written to."""
    paths = []
    try:
        for suffix, function in FORMATS.items():
            paths.append(folder / f"{result.name}.{suffix}")
            write_text(paths[-1], function(result))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return paths


def report_folder(outputs: Path) -> Path:
    """Creates the folder of reports; UserError if it is a run folder."""
    folder = outputs / REPORT
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is the folder of a run, the report needs this name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def warning(mark: str | None, settings: Settings) -> str | None:
    """Returns the warning of a page whose runs are not the paper's experiments."""
    if mark is None:
        return None
    about = "" if settings.scale == FULL else f" ({settings.chosen.about})"
    return (
        f"{mark.upper()}{about}: these runs are not the paper's experiments, and no value here may "
        "be compared with the paper's."
    )
