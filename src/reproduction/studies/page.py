"""Pages: the paper's tables with our results as HTML, docs/results.md, and the lines behind it."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import torch
from jinja2 import Template

from reproduction.config import ROOT
from reproduction.models.build import build_module, count_parameters, without_weights
from reproduction.runs import RunFolder, flat, key
from reproduction.runs import settings as settings_of
from reproduction.start import compose
from reproduction.studies.plots import AXES, draw_line
from reproduction.studies.study import FULL, Size, Study, plan, read, studies
from reproduction.studies.table import REPORT, Table, newest, read_runs, read_store, study_table
from reproduction.system import UserError, write_text

RESULTS = ROOT / "results"
COPIED = (  # from summary.json into a line of results/
    *("seed", "top1_last", "top1_median10", "top1_best", "top5_last", "top5_best", "epochs"),
    *("hardware", "devices", "threads", "mixed_share", "mixed_samples", "mixed_tokens"),
    *("git_revision", "versions", "parameters", "log", "weights_sha256"),
)
HOW_TO_READ = """\
Mean +/- standard deviation over n seeds of accuracies and of the held-out cross-entropy after the
last epoch, on the test set of CIFAR, the validation set of ImageNet. Median: of the last ten
epochs. Best: of all, or of the last ten, on these same images, which is optimistic. Mixed: the
share of samples that HTM mixes, over training, and the tokens replaced in each in the last epoch.
Difference: from the row that is named, over the seeds that both have (pairs); lower in: pairs whose
loss falls; p: by a two-sided paired t-test, then corrected by Holm for the other tests of the
table. Intervals are not corrected for their number."""
INTRODUCTION = f"""# Results

`python -m scripts.report --results results` writes this page from `results/*.jsonl`, which hold a
line for each run; `make publish` adds one. To check a line, train its configuration again at its
git revision: on a CPU, with the same versions and threads, the weights are equal bit for bit. The
sha256 of the lines that are here is that of a file, of new ones that of the weights' names and
bytes. cifar10_5k and digits100 lack the threads (digits100: `OMP_NUM_THREADS=1`), and their sha256
may differ for equal weights.

{HOW_TO_READ}

So few pairs find only a difference that is large compared with its spread: no test shows that two
rows are equal, and nothing follows for other models, data, training lengths or settings, including
the paper's. Runs of pilots were not kept.
"""


def write_page(outputs: Path, scale: str = FULL, more: Sequence[str] = ()) -> Path:
    """Writes the paper's tables, sweeps and figures with our results of all seeds, as a page."""
    runs, folder = read_runs(outputs), outputs / REPORT
    tables, figures = [], dict[str, str | None]()
    for name, study in studies("all").items():
        tables.append(table := study_table(name, replace(study, seeds=10**6), runs, scale, more))
        table.write(outputs)
        if study.sizes:
            table.sections["Parameters"] = sizes(study.sizes)
        if name.startswith("sweep"):
            figures[f"{name[6:]}: {study.title}"] = _draw_sweep(table, study, runs, folder)
        for title, figure in study.figures.items():
            row, _, picture = figure.partition("/")
            keys = table.numbers.key[table.numbers.label == f"{name}/{row}"]
            drawn = [path / picture for path in newest(runs[runs.key.isin(keys)]).path]
            figures[title] = next((_as_text(path) for path in drawn if path.exists()), None)
    template = Template(Path(__file__).with_name("page.html.jinja").read_text(), autoescape=True)
    mark = f"{scale} scale" if scale != FULL else " ".join(more)
    about = {"scale": scale, "mark": mark, "how_to_read": HOW_TO_READ}
    write_text(folder / "index.html", template.render(tables=tables, figures=figures, **about))
    return folder / "index.html"


def _draw_sweep(table: Table, study: Study, runs: pd.DataFrame, folder: Path) -> str | None:
    """Draws the points of a sweep beside its other rows; returns the picture, if there are runs."""
    seeds = newest(runs).pivot(index="seed", columns="key", values="top1_last")
    rows = table.numbers[table.numbers.key.isin(seeds.columns)].drop_duplicates("label")
    values, is_band = seeds[rows.key].set_axis(rows.row, axis=1), rows.row.isin([*study.rows])
    points = values.loc[:, ~is_band.to_numpy()].rename(columns=lambda x: x.partition("=")[2])
    if points.empty:
        return None
    path, bands = folder / f"{table.name}.png", values.loc[:, is_band.to_numpy()]
    draw_line(path, points, table.name[6:], AXES["top1_last"], bands)
    return _as_text(path)


def _as_text(picture: Path) -> str:
    return base64.b64encode(picture.read_bytes()).decode()


def sizes(each: Mapping[str, Size]) -> pd.DataFrame:
    """Counts the parameters of models, built without memory, beside the printed ones."""
    rows = []
    for name, size in each.items():
        config = compose(size.overrides)
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
    for path in sorted(x for x in results.iterdir() if x.suffix == ".yaml"):
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


def publish(run: Path, path: Path) -> None:
    """Adds the line of a finished run to a file of results/, in place of an older one."""
    folder, file = RunFolder(run.resolve()), path.with_suffix(".yaml")
    planned = {key(x.config): x.config for x in plan(studies(str(file)), None, FULL, [])}
    row, summary = planned.get(key(folder.read_config())), folder.read_summary()
    missing = [x for x in COPIED if x not in summary]
    if row is None or not folder.is_finished() or "selected_epoch" in summary or missing:
        lacks = f"; summary.json lacks {', '.join(missing)}" if missing else ""
        raise UserError(f"run={run}: must be a finished run of {file}, without validation{lacks}")
    settings = {x: y for x, y in flat(asdict(row)) if x in settings_of(row)}  # paths as spelled
    plain = json.loads(json.dumps(settings), parse_constant={"Infinity": "inf"}.__getitem__)
    line = {"name": folder.path.name} | {x: summary[x] for x in COPIED}
    line |= {"hours": round(summary["seconds"] / 3600, 3), "config": plain}
    lines = path.read_text().splitlines() if path.exists() else []
    others = [x for x in lines if json.loads(x)["name"] != line["name"]]
    write_text(path, "\n".join([*others, json.dumps(line)]) + "\n")
