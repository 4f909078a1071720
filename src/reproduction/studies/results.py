"""Published results: a file for each run in results/, and docs/results.md, written from them.

`publish` writes the file of a run, and a folder with weights, configuration, metrics and a model
card.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import StatisticsError, fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from reproduction.commands.jobs import PUBLISHED as WEIGHTS
from reproduction.config import ROOT, STACK
from reproduction.models.weights import read_file
from reproduction.reporting.cells import FULL, read_cells
from reproduction.reporting.collect import METRICS, report_folder
from reproduction.reporting.columns import spread_text
from reproduction.reporting.statistics import compare, holm, p_text, spread
from reproduction.reporting.tables import LEVEL
from reproduction.runs.folder import RunFolder, hash_of, identity, settings_of
from reproduction.runs.parse import parse_saved
from reproduction.studies.own import OwnStudy, plan_own, read_study
from reproduction.studies.plan import PlannedRun, Settings, point_configs
from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_json
from reproduction.system.storage import write_text
from reproduction.training.checkpoint import export
from reproduction.training.loop import MEDIAN_EPOCHS

RESULTS = ROOT / "results"
LEAST_ROUNDS = 3  # for a test
Result = Mapping[str, Any]
Runs = dict[str, dict[int, Result]]  # by stack and seed


def publish(run: Path, results: Path, folder: Path) -> Path:
    """Writes and returns `results`/<run>.json, and writes `folder`, which must not exist.

    Raises UserError for a run that is not finished.
    """
    run = run.resolve()
    source = RunFolder(run)
    saved = source.read_config()
    if not source.is_finished():
        raise UserError(f"run={run.name}: is not finished, only finished runs can be published")
    if folder.exists():
        raise UserError(f"{folder}: exists already, move it away or name another folder")
    config, portable = parse_saved(saved, needs_data=False), _portable(saved)
    result = _result(source, saved, portable)
    state = read_file(f"checkpoint={source.last_path}", source.last_path)
    if state.get("step") != source.read_summary()["steps"]:
        raise UserError(f"checkpoint={source.last_path}: is not from the last step of the run")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".publishing-") as temporary:
        staged = Path(temporary, folder.name)
        export(config.model, [source.last_path], staged / WEIGHTS, config.preprocessing)
        (staged / WEIGHTS).chmod(0o644)
        result["weights_sha256"] = hashlib.sha256((staged / WEIGHTS).read_bytes()).hexdigest()
        write_text(staged / "config.yaml", yaml.safe_dump(portable, sort_keys=False))
        write_text(staged / "metrics.jsonl", source.metrics_path.read_text())
        write_text(staged / "summary.json", source.summary_path.read_text())
        write_text(staged / "README.md", _card(result))
        path = results / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result, indent=1) + "\n")
        staged.rename(folder)
    return path


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
        scale = settings.scale.upper()
        lines.append(f"\n**WARNING. {scale} SCALE: a trial run, not the study itself.**")
    lines += _study(path, study, by_stack, len(planned), is_page=False)
    report = report_folder(settings.root) / f"{path.stem}.md"
    write_text(report, "\n".join(lines) + "\n")
    return report


def _result(source: RunFolder, saved: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a file in results/, without the digest of the weights.

    `saved` is the configuration of the run, `shown` the one to publish. Raises UserError if
    something is missing.
    """
    (steps, epochs), summary = source.read_metrics(), source.read_summary()
    try:
        mixed = [line["mixed_samples"] for line in steps if not line.get("skipped")]
        batch_size = summary["images"] / summary["steps"]  # at most recipe.batch_size
        return {
            "name": source.path.name,
            "hash": hash_of(saved),
            **{key: summary[key] for key in ("seed", *METRICS, "epochs", "hardware", "devices")},
            "threads": summary.get("threads"),
            "hours": round(summary["seconds"] / 3600, 3),
            "mixed_share": round(fmean(mixed) / batch_size, 4),
            **{key: summary[key] for key in ("git_revision", "versions", "parameters", "macs")},
            "config": _jsonable(settings_of(shown)),
            "log": epochs,
        }
    except (KeyError, TypeError, StatisticsError) as error:
        raise UserError(f"{source.path}: incomplete result: {first_line(error)}") from error


def _card(result: Result) -> str:
    config = result["config"]
    names = [x for x in STACK if any(key.startswith(f"augmentation.{x}.") for key in config)]
    stack = ", ".join(names) or "none"
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
    """Reads all results in the order of their names; UserError for a file that is not one."""
    found = []
    required = {"name", "seed", "config", "hours", "mixed_share", "epochs", "log", *METRICS}
    for path in sorted(results.glob("*.json")):
        try:
            result = parse_json(path.read_text())
            missing = required - result.keys()
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: holds no result: {first_line(error)}") from error
        if missing:
            raise UserError(f"{path}: holds no result, it lacks {', '.join(sorted(missing))}")
        found.append(result)
    return found


def results_page(results: Path = RESULTS) -> str:
    """Returns docs/results.md."""
    runs = read_results(results)
    studies = {path: read_study(path) for path in sorted(results.glob("*.yaml"))}
    lines = [
        "# Results\n",
        "`python scripts/write_docs.py` writes this page from `results/`, which holds a file for",
        "each run: configuration, seed, hardware, threads, hours, accuracies, mixed share, sha256",
        "of the weights. `make publish RUN=outputs/NAME` writes such a file, and a folder with",
        "weights for `python eval.py checkpoint=FOLDER`. Weights are not kept in this repository.",
        "To check a file, train its configuration again at its git revision: on a CPU, with the",
        "same versions and number of threads, the weights are equal bit for bit. The files of",
        "cifar10_5k and digits100 lack the threads (digits100: `OMP_NUM_THREADS=1`), and their",
        "sha256 may differ for equal weights, as the order of the metadata was random. Their mixed",
        "shares were corrected later: the code of their revisions divides by recipe.batch_size,",
        "but an epoch is split into equal batches of at most that size.\n",
        "The mixed share is the share of samples that HTM mixes, averaged over training. A round",
        "is one seed with all stacks of a study.\n",
        *_paper(runs, studies),
    ]
    for path, study in studies.items():
        planned = plan_own(path, Settings())
        by_stack = _published_runs(path, study, planned, runs)
        lines += _study(path, study, by_stack, len(planned))
    return "\n".join(lines) + "\n"


def _paper(runs: Sequence[Result], studies: Mapping[Path, OwnStudy]) -> Iterator[str]:
    yield "## The paper's tables\n"
    own = tuple(f"{path.stem}-" for path in studies)
    others = [run for run in runs if not run["name"].startswith(own)]
    yield "| table | row | data | paper | ours | n | hours | command |"
    yield "|---|---|---|---:|---:|---:|---:|---|"
    configs = point_configs("all", Settings())
    for cell in read_cells():
        planned = stored(configs[cell.experiment])
        matches = list({run["seed"]: run for run in others if _matches(run, planned)}.values())
        ours, n, hours = "not run", "", ""
        if matches:
            ours, n = _mean(matches, "top1_last"), str(len(matches))
            hours = f"{sum(run['hours'] for run in matches):.1f}"
        command = f"`python train.py experiment={cell.experiment}`"
        row = (str(cell.table), cell.row, cell.column, f"{cell.top1:.2f}", ours, n, hours, command)
        yield "| " + " | ".join(row) + " |"
    yield "\nOurs: mean +/- standard deviation over n seeds after the last epoch, in percent."


def stored(config: Any) -> dict[str, Any]:
    """Returns a configuration as stored in the file of a result."""
    return _jsonable(settings_of(asdict(config)))


def _jsonable(value: Any) -> Any:
    """Returns plain values, with infinities as text."""
    infinities = {"Infinity": "inf", "-Infinity": "-inf"}
    return json.loads(json.dumps(value), parse_constant=infinities.__getitem__)


def _matches(run: Result, planned: Mapping[str, Any]) -> bool:
    """Whether a run has the planned configuration, whatever its seed, folder and devices."""
    own, other = identity(run["config"]), identity(planned)
    for key in ("seed", "dataset.root", "devices"):
        own.pop(key, None)
        other.pop(key, None)
    return own == other


def _published_runs(
    path: Path, study: OwnStudy, planned: Sequence[PlannedRun], runs: Sequence[Result]
) -> Runs:
    """Selects the runs of a study by their names without the hash, and their configurations."""
    by_stack: Runs = {stack: {} for stack in study.stacks}
    for plan in planned:
        stack, seed = plan.labels[0], plan.config.seed
        for run in runs:
            has_name = run["name"].rpartition("-")[0] == f"{path.stem}-{stack}-s{seed}"
            if has_name and _matches(run, stored(plan.config)):
                by_stack[stack][seed] = run
    return by_stack


def _study(
    path: Path, study: OwnStudy, by_stack: Runs, planned: int, is_page: bool = True
) -> Iterator[str]:
    """Yields the section of a study: progress, stacks, contrasts and quoted results."""
    rounds = len(set.intersection(*(set(runs) for runs in by_stack.values())))
    seeds = planned // len(by_stack)
    yield f"\n## {study.title}\n"
    yield f"{study.about.strip()}\n"
    file = f"results/{path.name}" if is_page else path
    yield f"Fixed before the first run by `{file}`;"
    yield f"`make study FILE={file}` trains it. {study.pilot.strip()}\n"
    done = sum(len(runs) for runs in by_stack.values())
    yield f"{done} of {planned} runs are finished, {rounds} of {seeds} rounds are complete.\n"
    yield "| stack | n | last | best of the last 10 | best | mixed share | hours | files |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    link = "[{seed}](../results/{name}.json)" if is_page else "{name}"
    for stack, by_seed in by_stack.items():
        cells = [stack, str(len(by_seed)), *[""] * 6]
        if runs := list(by_seed.values()):
            cells[2:] = [
                _mean(runs, "top1_last"),
                spread_text(spread([_best_of_ten(run) for run in runs])),
                _mean(runs, "top1_best"),
                f"{100 * fmean(run['mixed_share'] for run in runs):.0f} %",
                f"{sum(run['hours'] for run in runs):.1f}",
                ", ".join(link.format(**run) for run in runs),
            ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from _contrasts(study, by_stack, rounds)
    if study.quoted is not None:
        yield f"\nQuoted, not trained here: {study.quoted.source.strip()}.\n"
        yield f"| | {' | '.join(study.quoted.columns)} |"
        yield f"|---|{'---:|' * len(study.quoted.columns)}"
        for row, printed in study.quoted.rows.items():
            yield f"| {row} | {' | '.join(f'{value:.2f}' for value in printed)} |"


def _best_of_ten(run: Result) -> float:
    """Returns the best accuracy in the last ten epochs, of those that were evaluated."""
    since = run["epochs"] - MEDIAN_EPOCHS
    return max(line["top1"] for line in run["log"] if line["epoch"] > since)


def _contrasts(study: OwnStudy, by_stack: Runs, rounds: int) -> Iterator[str]:
    """Yields the tests of a study once there are LEAST_ROUNDS complete rounds."""
    if rounds < LEAST_ROUNDS:
        yield f"Fewer than {LEAST_ROUNDS} complete rounds: no difference is tested yet."
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
        verdict = "significant at 5 %" if p < LEVEL else "not significant"
        raw = test.reason if test.p is None else p_text(test.p)
        yield (
            f"| {contrast.of} - {contrast.against} | {len(test.seeds)} | {test.difference:+.2f} | "
            f"{raw} | {p_text(p)} | {verdict} |"
        )
    yield "\nTwo-sided t-tests, paired over seeds, of the accuracy after the last epoch in percent."
    yield (
        f"With {rounds} pairs only a difference that is large compared with its spread is found, "
        "so no test shows that two stacks are equal. Nothing follows for other models, data, "
        "training lengths or settings, including the paper's."
    )


def _mean(runs: Sequence[Result], key: str) -> str:
    return spread_text(spread([run[key] for run in runs]))
