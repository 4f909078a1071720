"""Published results: docs/results.md, and the lines behind it, one for each run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from reproduction.errors import UserError
from reproduction.files import write_text
from reproduction.folder import RunFolder
from reproduction.identity import run_hash
from reproduction.studies.runs import config_of, published_config, read_store
from reproduction.studies.study import Study, part_of, read
from reproduction.studies.tables import HOW_TO_READ, as_markdown, formatted, study_table

COPIED = (  # from summary.json into a line of results/
    "name",
    "seed",
    "seconds",
    "top1_last",
    "top1_median10",
    "top1_best",
    "top5_last",
    "top5_best",
    "epochs",
    "devices",
    "starts",
    "easy_share",
    "easy_samples",
    "mixed_share",
    "mixed_samples",
    "mixed_tokens",
    "parameters",
    "log",
    "weights_sha256",
)
HEAD = """# Results

What was run, a section for each study. [How to read the tables](#how-to-read-the-tables), and the
[pilots](#pilots) that came before them, stand at the end.
"""
READING = f"""## How to read the tables

{HOW_TO_READ}

So few pairs find only a difference that is large compared with its spread: no test shows that two
rows are equal, and nothing follows for other models, data, training lengths or settings, including
the paper's.

`python -m scripts.results` writes this page from `results/*.jsonl`, which hold a
line for each run; `make publish` adds one. To check a line, train its configuration again at its
git revision: on a CPU, with the same versions and threads, the weights are equal bit for bit. Their
sha256 is over their names and bytes, but in lines of git revisions before ff43bbae60 over their
file. cifar10_5k and digits100 lack the threads (digits100: `OMP_NUM_THREADS=1`), and their sha256
may differ for equal weights.
"""


def results_page(results: Path) -> str:
    """Returns docs/results.md: the studies that have run, then those that are registered."""
    sections: list[str] = []
    pilots = ["## Pilots\n\nWhat was tried before a study was fixed. These runs were not kept.\n"]
    registered = []
    for path in sorted(results.glob("*.yaml")):
        study = read(path)
        if path.with_suffix(".jsonl").exists():
            sections += _section(path, study)
            pilots.append(f"**{study.title}.** {study.pilot.strip()}\n")
        else:
            registered.append(f"[{study.title}](../results/{path.name})")
    not_run = f"No row of the paper's tables. Registered: {'; '.join(registered)}."
    return "\n".join([HEAD, *sections, f"## Not run\n\n{not_run}\n", READING, *pilots])


def _section(path: Path, study: Study) -> Iterator[str]:
    """Yields Markdown of a study and its published runs."""
    runs = read_store(path.with_suffix(".jsonl"))
    whole, _ = part_of(str(path), study)
    table = study_table(whole, runs)
    file = f"results/{path.name}"
    finished = f"{len(table.counted.runs)} of {whole.num_runs} runs are finished"
    yield f"## {study.title}\n"
    yield f"{finished}, of [`{file}`](../{file}), which `make study FILE={file}` trains.\n"
    yield table.markdown(level=3)
    yield f"\n{study.about.strip()} Fixed before the first run.\n"
    if study.source:
        yield f"Quoted, not trained here: {study.source.strip()}.\n"
        texts = [
            {"row": row, "column": column, "top-1 [%]": formatted(printed.get("top1"), ".2f")}
            for row, column, printed in study.quotes
        ]
        yield f"{as_markdown(pd.DataFrame(texts))}\n"


def publish(run: Path, file: Path) -> Path:
    """Adds the line of a finished run of a study to its .jsonl, in place of one of the same run."""
    folder = RunFolder(run.resolve())
    _, plans = part_of(str(file), read(file))
    rows = {run_hash(plan.config): plan.config for plan in plans}
    own_hash = run_hash(folder.read_config())
    row = rows.get(own_hash)
    if row is None or not folder.is_finished():
        raise UserError(f"run={run}: must be a finished run of {file}")
    summary = folder.read_summary()
    line = {name: summary[name] for name in COPIED} | {"config": published_config(row)}
    path = file.with_suffix(".jsonl")
    lines = []
    if path.exists():
        lines = path.read_text().splitlines()
    others = [text for text in lines if run_hash(config_of(json.loads(text))) != own_hash]
    write_text(path, "\n".join([*others, json.dumps(line)]) + "\n")
    return path
