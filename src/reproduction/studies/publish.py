"""Published runs: a line each in results/<study>.jsonl, and docs/results.md, written from them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from reproduction.config import ROOT
from reproduction.models.weights import extract_weights, read_file
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import hash_of, settings_of
from reproduction.studies.columns import COLUMNS, METRICS, NOTHING
from reproduction.studies.plan import points_of
from reproduction.studies.results import own_runs, results_of
from reproduction.studies.runs import as_json, newest, read_store
from reproduction.studies.study import (
    TABLES,
    Settings,
    Study,
    papers_studies,
    read_study,
    rows_at_scale,
)
from reproduction.studies.table import Table, as_markdown
from reproduction.system.errors import UserError, first_line
from reproduction.system.storage import write_text

RESULTS = ROOT / "results"
OTHERS = "others"  # the file of runs that belong to no study
INTRODUCTION = """# Results

`python scripts/write_docs.py` writes this page from `results/*.jsonl`, which hold a line for each
run: configuration, seed, hardware, threads, hours, accuracies by epoch, mixed share, sha256 of the
weights. `make publish RUN=outputs/NAME` adds such a line. Weights are not kept in this repository.
To check a line, train its configuration again at its git revision: on a CPU, with the same versions
and number of threads, the weights are equal bit for bit. The sha256 of the lines that are here is
that of a file, which `make publish` wrote at their revision; at revisions from now on it is over
the names and bytes of the weights. The lines of cifar10_5k and digits100 lack the threads
(digits100: `OMP_NUM_THREADS=1`), and their sha256 may differ for equal weights, as the order of the
metadata was random.

Last, median, best: accuracy after the last epoch, the median of the last ten and the best, in
percent, mean +/- standard deviation over n seeds. Best of 10: the best of the last ten epochs.
Mixed: the share of samples that HTM mixes, averaged over training. Difference and p: of the last
epoch, over the seeds that both rows have (pairs), two-sided paired t-tests. Loss: cross-entropy on
the held-out images after the last epoch, in nats; lower in: pairs whose loss falls. Intervals are
not corrected for their number. So few pairs find only a difference that is large compared with its
spread: no test shows that two rows are equal, and nothing follows for other models, data, training
lengths or settings, including the paper's. Runs of pilots, the short runs over tau in training.md
and the 16 epochs in performance.md were not kept: their numbers stand where they are told.
"""


def publish(run: Path, results: Path) -> Path:
    """Adds the line of a run to a file in `results`, in place of an older one; returns the file.

    Raises UserError for a run that is not finished.
    """
    run = run.resolve()
    source = RunFolder(run)
    saved, summary = source.read_config(), source.read_summary()
    if not source.is_finished():
        raise UserError(f"run={run.name}: is not finished, only finished runs can be published")
    if "selected_epoch" in summary:
        raise UserError(
            f"run={run.name}: has a validation split, only runs without can be published"
        )
    result = _result(source, saved, _portable(saved))
    origin = f"checkpoint={source.last_path}"
    content = read_file(origin, source.last_path)
    if content.get("step") != summary["steps"]:
        raise UserError(f"{origin}: is not from the last step of the run")
    result["weights_sha256"] = digest(extract_weights(origin, content).state)
    path = results / f"{_study_of(result['key'], result['seed'], results)}.jsonl"
    _add_line(path, result)
    return path


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the sha256 over the names of weights and their bytes, equal for equal weights."""
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        total.update(name.encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _portable(saved: dict[str, Any]) -> dict[str, Any]:
    """Removes paths and settings of one machine or user from a saved configuration."""
    root, weights = saved["dataset"]["root"], saved["model"]["weights"]
    is_absolute = root is not None and Path(root).is_absolute()
    return {
        **saved,
        **{"output_root": "outputs", "device": "auto", "resume": "never", "logger": {}},
        "dataset": {**saved["dataset"], "root": None if is_absolute else root},
        "model": {**saved["model"], "weights": weights and Path(weights).name},
    }


def _result(source: RunFolder, saved: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of the store, without the digest of the weights; `shown` is published.

    Raises UserError if something is missing.
    """
    summary = source.read_summary()
    try:
        return {
            "name": source.path.name,
            "hash": hash_of(saved),
            "key": hash_of(saved | {"seed": 0}),  # of the study's row; `shown` lacks some paths
            **{key: summary[key] for key in ("seed", *METRICS, "epochs", "hardware", "devices")},
            "threads": summary.get("threads"),
            "hours": round(summary["seconds"] / 3600, 3),
            **{key: summary[key] for key in ("mixed_share", "mixed_samples", "mixed_tokens")},
            **{key: summary[key] for key in ("git_revision", "versions", "parameters", "macs")},
            "config": as_json(settings_of(shown)),
            "log": summary["log"],
        }
    except (KeyError, TypeError) as error:
        raise UserError(f"{source.path}: lacks {first_line(error)}") from error


def _study_of(key: str, seed: int, results: Path) -> str:
    """Returns the name of the first study that trains this run, yours before the paper's."""
    for name, study in (_studies(results) | dict(papers_studies())).items():
        points = points_of({name: study}, Settings()) if study.has(seed) else ()
        if any(point.key == key for point in points):
            return name
    return OTHERS


def _studies(results: Path) -> dict[str, Study]:
    return {path.stem: read_study(path) for path in sorted(results.glob("*.yaml"))}


def _add_line(path: Path, result: Mapping[str, Any]) -> None:
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["name"] != result["name"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join([*kept, json.dumps(result)]) + "\n")


def results_page(results: Path = RESULTS) -> str:
    """Returns docs/results.md: the paper's rows, then each study of your own."""
    runs, studies = read_store(results), _studies(results)
    papers, _ = results_of({name: papers_studies()[name] for name in TABLES}, Settings(), runs)
    lines = [
        INTRODUCTION,
        "## The paper's tables\n",
        as_markdown(_papers_rows(papers)),
    ]
    for name, study in studies.items():
        (table,), _ = results_of({name: study}, Settings(), runs)
        lines += _section(table, study, runs)
    return "\n".join(lines) + "\n"


def _papers_rows(tables: list[Table]) -> pd.DataFrame:
    """Returns the trained rows of the tables with their command."""
    rows = pd.concat([table.numbers.assign(table=table.name[-1]) for table in tables])
    rows = rows[rows.label.notna()]
    columns = {column.title: column.text for column in COLUMNS}
    texts = {
        title: [columns[title](row) for row in rows.itertuples()]
        for title in ("paper", "last", "n", "hours")
    }
    texts["last"] = ["not run" if text == NOTHING else text for text in texts["last"]]
    command = "`python train.py experiment=" + rows.label + "`"
    return pd.DataFrame(
        {"table": rows.table, "row": rows.row, "data": rows.column, **texts, "command": command}
    )


def _section(table: Table, study: Study, runs: pd.DataFrame) -> Iterator[str]:
    """Yields the section of a study of your own."""
    file = f"results/{table.name}.yaml"
    done = len(newest(own_runs(study, runs[runs.key.isin(table.numbers.key)])))
    planned = len(rows_at_scale(study)) * (study.seeds or 1)
    yield f"\n## {study.title}\n"
    yield f"{study.about.strip()}\n"
    yield f"Fixed before the first run by `{file}`;"
    yield f"`make study FILE={file}` trains it. {study.pilot.strip()}\n"
    yield f"{done} of {planned} runs are finished.\n"
    yield from table.lines(level=3)
    yield from [f"\nQuoted, not trained here: {study.source.strip()}."] if study.source else []
