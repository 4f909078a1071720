"""Published results: docs/results.md, and the lines behind it, one for each run."""

import json
from pathlib import Path

import pandas as pd

from reproduction.errors import UserError
from reproduction.files import write_text
from reproduction.folder import RunFolder
from reproduction.identity import run_hash
from reproduction.studies.runs import config_of, published_config, read_store
from reproduction.studies.study import part_of, read
from reproduction.studies.tables import HOW_TO_READ, Table, as_markdown, study_table, without_empty

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
VERDICT = """\
# Results

- **Run:** 199 trainings of a small model (CCT-2/3x2) in four studies, on 1,000 and 5,000 images of
  CIFAR-10 and on 100 handwritten digits. No row of the paper's tables was trained.
- **HTM:** on 1,000 images, alone, it lowers the held-out loss in 10 of 10 pairs, by 0.123 nats, at
  the same accuracy. Beside mixup and CutMix, which help more, it costs 0.74 points (p 0.012).
- **VTM** shows no difference in accuracy in any study. A tau of 2.0, CIFAR-100's, is too large for
  ten classes: rows that have it say so, and show what a misfit costs.
"""
HOW = f"""\
## How to read the tables

{HOW_TO_READ}

The last table has no tests, as its differences were not among what is compared, nor were those that
are `untested`; they are from the rows that the first tables name. So few pairs find only a
difference that is large compared with its spread: no test shows that two rows are equal, and
nothing follows for other models, data, training lengths or settings, including the paper's. All
seeds of a study learn the same images: they differ in initial weights, order and augmentation, so
deviations and intervals say nothing of the choice of images.

## How to check a line

`python -m scripts.results` writes this page from `results/*.jsonl`, which hold a
line for each run, with its configuration, its versions and its git revision, an earlier one. To
check a line, train its configuration again at that revision: on a CPU, with the same versions and
threads, the weights are equal bit for bit. Their sha256 is over their names and bytes, in lines of
revisions before ff43bbae60 over their file. cifar10_5k and digits100 lack the threads (digits100:
`OMP_NUM_THREADS=1`).

`python results/cifar10_jpeg.py` writes the images of cifar10_1k and cifar10_5k, and
`python results/digits_fit.py` those of digits_fit. Another JPEG library than that of the runs can
give other pixels; then the split is the same, but no weights are equal bit for bit.
`results/openmixup_cifar100.yaml` is a study that nobody has run.
"""


def results_page(results: Path) -> str:
    """Returns docs/results.md: verdict, tables of the studies that have run, and how."""
    tables = []
    others = []
    how = ["## How the runs were made\n"]
    for path in sorted(results.glob("*.jsonl")):
        file = path.with_suffix(".yaml")
        study = read(file)
        part, _ = part_of(str(file), study)
        table = study_table(part, read_store(path))
        tables += [f"## {study.title}\n", *_main_tables(table)]
        others.append(_other_texts(table, path.stem))
        link = f"[`results/{file.name}`](../results/{file.name})"
        command = f"`make study FILE=results/{file.name}`"
        how.append(f"### {path.stem}\n\n{link}, which {command} trains. {study.about.strip()}\n")
        how.append("\n".join(f"- {note}" for note in table.notes) + "\n")
    further = as_markdown(without_empty(pd.concat(others).fillna("-")))
    tables.append(f"## Loss, top-5 and top-1 of the same runs\n\n{further}\n")
    return "\n".join([VERDICT, *tables, *how, HOW])


def _main_tables(table: Table) -> list[str]:
    return [f"{text}\n" for text in table.main_tables(level=3)]


def _other_texts(table: Table, name: str) -> pd.DataFrame:
    """Returns the other outcomes of a study, with its name in front."""
    texts = table.other_texts()
    texts.insert(0, "study", name)
    return texts


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
    others.append(json.dumps(line))
    write_text(path, "\n".join(others) + "\n")
    return path
