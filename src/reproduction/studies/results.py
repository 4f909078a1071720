"""Results that others can check: a file for each run in results/, and the page made of them.

`publish` writes the file, and a folder with weights, configuration, metrics and a model card.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import StatisticsError, fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from reproduction.commands.jobs import PUBLISHED as WEIGHTS
from reproduction.config import STACK
from reproduction.models.weights import read_file
from reproduction.reporting.cells import FULL, read_cells
from reproduction.reporting.collect import METRICS
from reproduction.reporting.columns import spread_text
from reproduction.reporting.statistics import compare, holm, p_text, spread
from reproduction.reporting.tables import LEVEL
from reproduction.runs.folder import RunFolder, hash_of, identity
from reproduction.runs.parse import parse_saved
from reproduction.studies.own import OwnStudy, plan_own, read_study
from reproduction.studies.plan import PlannedRun, Settings, point_configs
from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_json
from reproduction.system.storage import write_text
from reproduction.training.checkpoint import export
from reproduction.training.loop import MEDIAN_EPOCHS

RESULTS = Path(__file__).resolve().parents[3] / "results"
LEAST_ROUNDS = 3  # below them no test
Result = Mapping[str, Any]
Runs = dict[str, dict[int, Result]]  # stack -> seed -> run


def publish(run: Path, results: Path, folder: Path) -> Path:
    """Writes `results`/<run>.json and `folder`, which must not exist; returns the former.

    UserError for a run that is not finished.
    """
    run = run.resolve()
    source = RunFolder(run)
    saved = source.read_config()
    if not source.is_finished():
        raise UserError(f"run={run.name}: is not finished, publish what it ends with")
    if folder.exists():
        raise UserError(f"{folder}: exists already, move it away or name another folder")
    config, kept = parse_saved(saved, needs_data=False), _of_no_machine(saved)
    result = _result(source, saved, kept)
    state = read_file(f"checkpoint={source.last_path}", source.last_path)
    if state.get("step") != source.read_summary()["steps"]:
        raise UserError(f"checkpoint={source.last_path}: is not what the run has ended with")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".publishing-") as temporary:
        whole = Path(temporary, folder.name)
        export(config.model, [source.last_path], whole / WEIGHTS)
        (whole / WEIGHTS).chmod(0o644)
        result["weights_sha256"] = hashlib.sha256((whole / WEIGHTS).read_bytes()).hexdigest()
        write_text(whole / "config.yaml", yaml.safe_dump(kept, sort_keys=False))
        write_text(whole / "metrics.jsonl", source.metrics_path.read_text())
        write_text(whole / "summary.json", source.summary_path.read_text())
        write_text(whole / "README.md", _card(result))
        path = results / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result, indent=1) + "\n")
        whole.rename(folder)
    return path


def _of_no_machine(saved: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration without what belongs to a machine or a person."""
    root, weights = saved["dataset"]["root"], saved["model"]["weights"]
    is_elsewhere = root is not None and Path(root).is_absolute()
    return {
        **saved,
        **{"output_root": "outputs", "device": "auto", "resume": "never", "logger": {}},
        "dataset": {**saved["dataset"], "root": None if is_elsewhere else root},
        "model": {**saved["model"], "weights": weights and Path(weights).name},
    }


def write_study_report(path: Path, settings: Settings, planned: Sequence[PlannedRun]) -> Path:
    """Writes the section of a study from its finished run folders, and returns the file."""
    study = read_study(path)
    by_stack: Runs = {stack: {} for stack in study.stacks}
    lines = [f"# {path.stem}"]
    for run in planned:
        try:
            if run.folder.is_finished():
                saved = run.folder.read_config()
                by_stack[run.labels[0]][run.config.seed] = _result(run.folder, saved, saved)
        except UserError as error:
            lines.append(f"\n**WARNING. A run is left out. {error}**")
    if settings.scale != FULL:
        warning = f"{settings.scale.upper()} SCALE: not the study, but a trial of it"
        lines.append(f"\n**WARNING. {warning}.**")
    lines += _study(path, study, by_stack, len(planned), is_page=False)
    report = settings.root / "report" / f"{path.stem}.md"
    report.parent.mkdir(parents=True, exist_ok=True)
    write_text(report, "\n".join(lines) + "\n")
    return report


def _result(source: RunFolder, saved: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """What results/ keeps of a run, without its weights' digest.

    `saved` is its configuration, `kept` what is told of it. UserError where something is missing.
    """
    (steps, epochs), summary = source.read_metrics(), source.read_summary()
    try:
        mixed = [line["mixed_samples"] for line in steps if not line.get("skipped")]
        return {
            "name": source.path.name,
            "hash": hash_of(saved),
            **{key: summary[key] for key in ("seed", *METRICS, "epochs", "hardware", "devices")},
            "hours": round(summary["seconds"] / 3600, 3),
            "mixed_share": round(fmean(mixed) / saved["recipe"]["batch_size"], 4),
            **{key: summary[key] for key in ("git_revision", "versions", "parameters", "macs")},
            "config": _plain(identity(kept)),
            "log": epochs,
        }
    except (KeyError, TypeError, StatisticsError) as error:
        raise UserError(f"{source.path}: holds no whole result: {first_line(error)}") from error


def _card(result: Result) -> str:
    config = result["config"]
    named = [x for x in STACK if any(key.startswith(f"augmentation.{x}.") for key in config)]
    stack = ", ".join(named) or "none"
    data = f"{config['dataset.name']} at {config['model.image_size']} pixels"
    best = f"best {result['top1_best']:.2f} %, seed {result['seed']}"
    return f"""---
license: mit
library_name: pytorch
tags: [image-classification, tokenmixup]
---
# {result["name"]}

{config["model.name"]} on {data}, augmentation: {stack}.
Top-1 {result["top1_last"]:.2f} % after the last of {result["epochs"]} epochs ({best}).

`{WEIGHTS}` holds the plain model after the last epoch, `config.yaml` the resolved configuration,
`metrics.jsonl` every batch. The weights' sha256: {result["weights_sha256"]}.
From a checkout of revision {result["git_revision"]}:

```sh
python eval.py checkpoint=path/to/this/folder
```

The method: TokenMixup (Choi, Choi and Kim, NeurIPS 2022).
"""


def read_results(results: Path = RESULTS) -> list[Result]:
    """All that are there, by name; UserError for a file that holds none."""
    found = []
    needed = {"name", "seed", "config", "hours", "mixed_share", "epochs", "log", *METRICS}
    for path in sorted(results.glob("*.json")):
        try:
            result = parse_json(path.read_text())
            missing = needed - result.keys()
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: holds no result: {first_line(error)}") from error
        if missing:
            raise UserError(f"{path}: holds no result, it lacks {', '.join(sorted(missing))}")
        found.append(result)
    return found


def results_page(results: Path = RESULTS) -> str:
    """docs/results.md."""
    runs = read_results(results)
    studies = {path: read_study(path) for path in sorted(results.glob("*.yaml"))}
    lines = [
        "# What has been reproduced\n",
        "Written by `python scripts/write_docs.py` from the files in `results/`, one for each run:",
        "configuration, seed, hardware, hours, accuracies, mixed share, sha256 of the weights.",
        "`make publish RUN=outputs/NAME` writes such a file, and a folder with the weights that",
        "`python eval.py checkpoint=FOLDER` evaluates. Weights are not kept in this repository: a",
        "file is checked by training its configuration again, which gives the same weights bit for",
        "bit on a CPU, with the same versions and threads.\n",
        *_paper(runs, studies),
    ]
    for path, study in studies.items():
        planned = plan_own(path, Settings())
        lines += _study(path, study, _sorted_out(path, study, planned, runs), len(planned))
    return "\n".join(lines) + "\n"


def _paper(runs: Sequence[Result], studies: Mapping[Path, OwnStudy]) -> Iterator[str]:
    """The cells of the paper's tables."""
    yield "## The paper's tables\n"
    own = tuple(f"{path.stem}-" for path in studies)
    others = [run for run in runs if not run["name"].startswith(own)]
    yield "| table | row | data | paper | ours | n | hours | command |"
    yield "|---|---|---|---:|---:|---:|---:|---|"
    for cell in read_cells():
        configs = point_configs(f"table{cell.table}", Settings())
        planned = identity_of(configs[cell.experiment])
        found = list({run["seed"]: run for run in others if _is(run, planned)}.values())
        ours, n, hours = "not run", "", ""
        if found:
            ours, n = _mean(found, "top1_last"), str(len(found))
            hours = f"{sum(run['hours'] for run in found):.1f}"
        command = f"`python train.py experiment={cell.experiment}`"
        row = (str(cell.table), cell.row, cell.column, f"{cell.top1:.2f}", ours, n, hours, command)
        yield "| " + " | ".join(row) + " |"
    yield "\nOurs: mean +/- standard deviation over n seeds after the last epoch, in percent."


def identity_of(config: Any) -> dict[str, Any]:
    """What tells a configuration from others, as a result's file holds it."""
    return _plain(identity(asdict(config)))


def _plain(value: Any) -> Any:
    """As JSON has it, which knows no infinity."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if value in (math.inf, -math.inf) else value


def _is(run: Result, planned: Mapping[str, Any]) -> bool:
    """Whether a run is of that configuration; keys that came later do not count."""
    own = {k: v for k, v in run["config"].items() if k not in ("seed", "dataset.root", "devices")}
    return all(key in planned and planned[key] == value for key, value in own.items())


def _sorted_out(
    path: Path, study: OwnStudy, planned: Sequence[PlannedRun], runs: Sequence[Result]
) -> Runs:
    """The published runs of a study, by their names without the hash, and what they computed."""
    by_stack: Runs = {stack: {} for stack in study.stacks}
    for plan in planned:
        stack, seed = plan.labels[0], plan.config.seed
        for run in runs:
            is_named = run["name"].rpartition("-")[0] == f"{path.stem}-{stack}-s{seed}"
            if is_named and _is(run, identity_of(plan.config)):
                by_stack[stack][seed] = run
    return by_stack


def _study(
    path: Path, study: OwnStudy, by_stack: Runs, planned: int, is_page: bool = True
) -> Iterator[str]:
    """A study of one's own: its stacks, its contrasts, how many rounds there are."""
    rounds = len(set.intersection(*(set(found) for found in by_stack.values())))
    seeds = planned // len(by_stack)
    yield f"\n## {study.title}\n"
    yield f"{study.about.strip()}\n"
    yield f"Fixed before the first run by `results/{path.name}`:"
    yield f"`make study FILE=results/{path.name}` trains it. {study.pilot.strip()}\n"
    done = sum(len(found) for found in by_stack.values())
    yield f"{done} of {planned} runs are there, {rounds} of {seeds} rounds are whole.\n"
    yield "| stack | n | last | best of the last 10 | best | mixed share | hours | files |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for stack, found in by_stack.items():
        cells = [stack, str(len(found))]
        if runs := list(found.values()):
            link = "[{seed}](../results/{name}.json)" if is_page else "{name}"
            cells += [
                _mean(runs, "top1_last"),
                spread_text(spread([_best_of_ten(run) for run in runs])),
                _mean(runs, "top1_best"),
                f"{100 * fmean(run['mixed_share'] for run in runs):.0f} %",
                f"{sum(run['hours'] for run in runs):.1f}",
                ", ".join(link.format(**run) for run in runs),
            ]
        yield "| " + " | ".join(cells + [""] * (8 - len(cells))) + " |"
    yield ""
    yield from _contrasts(study, by_stack, rounds)
    if study.quoted is not None:
        yield f"\nQuoted, not trained here: {study.quoted.source.strip()}.\n"
        yield f"| | {' | '.join(study.quoted.columns)} |"
        yield f"|---|{'---:|' * len(study.quoted.columns)}"
        for row, printed in study.quoted.rows.items():
            yield f"| {row} | {' | '.join(f'{value:.2f}' for value in printed)} |"


def _best_of_ten(run: Result) -> float:
    """The best of the epochs among the last ten that were evaluated."""
    since = run["epochs"] - MEDIAN_EPOCHS
    return max(line["top1"] for line in run["log"] if line["epoch"] > since)


def _contrasts(
    study: OwnStudy, by_stack: Mapping[str, Mapping[int, Result]], rounds: int
) -> Iterator[str]:
    if rounds < LEAST_ROUNDS:
        yield f"Fewer than {LEAST_ROUNDS} whole rounds: no difference is tested yet."
        return
    tests = []
    for contrast in study.contrasts:
        ours, base = (
            {seed: run["top1_last"] for seed, run in by_stack[name].items()}
            for name in (contrast.of, contrast.against)
        )
        tests.append(compare(ours, base))
    adjusted = holm([1.0 if test.p is None else test.p for test in tests])
    yield "| contrast | n | difference | p | p by Holm | |"
    yield "|---|---:|---:|---:|---:|---|"
    for contrast, test, p in zip(study.contrasts, tests, adjusted, strict=True):
        told = "significant at 5 %" if p < LEVEL else "not significant"
        raw = test.reason if test.p is None else p_text(test.p)
        yield (
            f"| {contrast.of} - {contrast.against} | {len(test.seeds)} | {test.difference:+.2f} | "
            f"{raw} | {p_text(p)} | {told} |"
        )
    yield "\nPaired over seeds, two-sided t-tests, accuracy after the last epoch, in percent."
    yield (
        f"What this cannot tell: that two stacks are equal, since of {rounds} pairs only a "
        "difference large beside its spread is found; and anything of models, data, lengths of "
        "training or settings other than these, the paper's included."
    )


def _mean(runs: Sequence[Result], key: str) -> str:
    return spread_text(spread([run[key] for run in runs]))
