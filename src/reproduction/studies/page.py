"""Pages: the paper's tables with our results as HTML, docs/results.md, and the lines behind it."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reproduction.config import ROOT, Config
from reproduction.models.build import build_module, count_parameters, without_weights
from reproduction.runs import RunFolder
from reproduction.runs import key as key_of
from reproduction.runs import settings as settings_of
from reproduction.start import compose
from reproduction.studies.plots import AXES, draw_line
from reproduction.studies.study import FULL, Size, Study, points, read, studies
from reproduction.studies.table import (
    Table,
    as_json,
    newest,
    read_runs,
    read_store,
    report_folder,
    study_table,
)
from reproduction.system import UserError, write_text

RESULTS = ROOT / "results"
COPIED = (  # from summary.json into a line of results/
    *("seed", "top1_last", "top1_median10", "top1_best", "top5_last", "top5_best", "epochs"),
    *("hardware", "devices", "threads", "mixed_share", "mixed_samples", "mixed_tokens"),
    *("git_revision", "versions", "parameters", "log", "weights_sha256"),
)
HOW_TO_READ = (
    "Accuracies are top-1 in percent on the held-out images (the test set of CIFAR, the validation "
    "set of ImageNet): mean +/- sample standard deviation over n seeds. Median: of the last 10 "
    "epochs. Best: of the best epoch on these same images, which is optimistic; the published code "
    "selects it. Mixed: the share of samples that HTM mixes, and the tokens replaced in each.",
    "Difference: of the last epoch, from the row that is named, over the seeds that both have; p "
    "by a two-sided paired t-test, and corrected by Holm for all tests of the table. Paper's: the "
    "difference of the printed accuracies.",
)
INTRODUCTION = """# Results

`python scripts/report.py --results results` writes this page from `results/*.jsonl`, which hold a
line for each run; `python scripts/report.py --publish outputs/NAME` adds one. To check a line,
train its configuration again at its git revision: on a CPU, with the same versions and threads, the
weights are equal bit for bit. The sha256 of the lines that are here is that of a file, of new ones
that of the weights' names and bytes. cifar10_5k and digits100 lack the threads (digits100:
`OMP_NUM_THREADS=1`), and their sha256 may differ for equal weights.

Mean +/- standard deviation over n seeds of accuracies and of the held-out cross-entropy after the
last epoch. Median: of the last ten epochs. Best: of all, or of the last ten. Mixed: the share of
samples that HTM mixes, over training, and the tokens replaced in each in the last epoch.
Difference: from the row that is named, over the seeds that both have (pairs); lower in: pairs whose
loss falls; p: by a two-sided paired t-test, then corrected by Holm for the other tests of the
table. Intervals are not corrected for their number. So few pairs find only a difference that is
large compared with its spread: no test shows that two rows are equal, and nothing follows for other
models, data, training lengths or settings, including the paper's. Runs of pilots were not kept.
"""


def write_page(outputs: Path, scale: str = FULL, more: Sequence[str] = ()) -> Path:
    """Writes the paper's tables, sweeps and figures with our results beside the runs.

    Returns the page. Raises UserError if there is no folder of runs.
    """
    runs, folder = read_runs(outputs), report_folder(outputs)
    mark = f"{scale} scale" if scale != FULL else " ".join(more) or None
    tables, figures = [], dict[str, str | None]()
    for name, study in studies("all").items():
        tables.append(table := study_table(name, study, runs, scale, more))
        table.write(outputs)
        if study.sizes:
            table.sections["Parameters"] = sizes(study.sizes)
        if name.startswith("sweep"):
            figures[f"{name[6:]}: {study.title}"] = _draw_sweep(table, study, runs, folder, mark)
        for figure in study.figures.values():
            keys = table.numbers.key[table.numbers.label == f"{name}/{figure.of}"]
            figures[figure.title] = _picture(newest(runs[runs.key.isin(keys)]), figure.shows)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja").render(
        scale=scale, mark=mark, how_to_read=HOW_TO_READ, tables=tables, figures=figures
    )
    write_text(folder / "index.html", page)
    return folder / "index.html"


def _draw_sweep(
    table: Table, study: Study, runs: pd.DataFrame, folder: Path, mark: str | None
) -> str | None:
    """Draws the points of a sweep beside its other rows; returns the picture, if there are runs."""
    seeds = newest(runs).pivot(index="seed", columns="key", values="top1_last").astype(float)
    rows = table.numbers[table.numbers.key.isin(seeds.columns)].drop_duplicates("label")
    keys = dict(zip(rows.row, rows.key, strict=True))
    points = {x.partition("=")[2]: key for x, key in keys.items() if x not in study.rows}
    bands = {x: key for x, key in keys.items() if x in study.rows}
    if not points:
        return None
    path = folder / f"{table.name}.png"
    draw_line(path, points, seeds, table.name[6:], AXES["top1_last"], bands, mark)
    return base64.b64encode(path.read_bytes()).decode()


def _picture(runs: pd.DataFrame, name: str) -> str | None:
    """Returns a picture of the first of the runs, if it exists."""
    paths = [run / f"{name}.png" for run in runs.path]
    found = next((path for path in paths if path.exists()), None)
    return found and base64.b64encode(found.read_bytes()).decode()


def sizes(each: Mapping[str, Size]) -> pd.DataFrame:
    """Counts the parameters of models, built without memory, beside the printed ones."""
    rows = []
    for name, size in each.items():
        config = compose(tuple(size.overrides))
        with torch.device("meta"):
            model = without_weights(config.model)
            module = build_module(model, config.augmentation, size.classes)
        printed = "-" if size.parameters is None else f"{size.parameters:g}"
        ours = f"{count_parameters(module) / 1e6:.2f}"
        rows.append({"row": name, "parameters [M]": ours, "paper [M]": printed})
    return pd.DataFrame(rows)


def results_page(results: Path = RESULTS) -> str:
    """Returns docs/results.md: the studies that have run, then those that are registered."""
    lines, registered = [INTRODUCTION], []
    for path in sorted(results.glob("*.yaml")):
        study, file = read(path), f"results/{path.name}"
        if not path.with_suffix(".jsonl").exists():
            registered.append(f"[{study.title}](../{file})")
            continue
        runs = read_store(path.with_suffix(".jsonl"))
        table = study_table(path.stem, study, runs)
        done, planned = len(newest(runs)), len(study.cells()) * study.seeds
        lines += [
            f"\n## {study.title}\n\n{study.about.strip()}\n",
            f"Fixed before the first run by [`{file}`](../{file}), which `make study FILE={file}` "
            f"trains. {study.pilot.strip()}\n",
            f"{done} of {planned} runs are finished.\n",
            *table.lines(level=3),
        ]
        if study.source:
            lines.append(f"\nQuoted, not trained here: {study.source.strip()}.")
    lines.append(
        "\n## Not run\n\nNo row of the paper's tables. Registered: " + "; ".join(registered) + "."
    )
    return "\n".join(lines) + "\n"


def publish(run: Path, results: Path = RESULTS) -> Path:
    """Adds the line of a finished run to a file in `results`, in place of an older one.

    Returns the file. Raises UserError for a run that is not finished.
    """
    folder = RunFolder(run.resolve())
    config, summary = folder.read_config(), folder.read_summary()
    if not folder.is_finished() or "selected_epoch" in summary:
        raise UserError(f"run={run}: must be finished, without a validation split")
    settings = settings_of(config)
    for key in ("dataset.root", "model.weights"):
        if Path(settings.get(key) or "").is_absolute():
            settings[key] = None  # of one machine
    try:
        line = {"name": folder.path.name} | {key: summary[key] for key in COPIED}
    except KeyError as error:
        raise UserError(f"run={run}: its summary lacks {error}") from error
    line |= {"hours": round(summary["seconds"] / 3600, 3), "config": as_json(settings)}
    path = results / f"{_study_of(config, results)}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    others = [x for x in lines if json.loads(x)["name"] != line["name"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join([*others, json.dumps(line)]) + "\n")
    return path


def _study_of(config: Config, results: Path) -> str:
    """Returns the name of the study whose row and seed a run is, or `others`."""
    for path in sorted(results.glob("*.yaml")):
        study = read(path)
        seeds = range(study.first_seed, study.first_seed + study.seeds)
        is_open = any("???" in word for _, words in study.cells().values() for word in words)
        if config.seed in seeds and not is_open:  # a pilot is to choose a value
            each = points(path.stem, study, config.seed)
            if key_of(config) in (key_of(point.config) for point in each):
                return path.stem
    return "others"
