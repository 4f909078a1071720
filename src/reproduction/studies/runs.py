"""Runs as tables see them, read from their folders or from published lines, and their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from reproduction.config import Config, validated
from reproduction.errors import OneLineError, in_one_line, message_of
from reproduction.folder import RunFolder
from reproduction.identity import digest, row_hash, settings

STACK_KEY = "augmentation.mixing"  # the names of the stack, as if they were a setting
FEW_CLASSES = 5  # of which all are among the best five
MEASURES = (  # of a run, beside its outcomes; tables have their means
    "top1_last",
    "top1_median10",
    "top1_best",
    "top1_selected",
    "easy_share",
    "easy_tokens",
    "mixed_share",
    "mixed_tokens",
    "seconds",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A number of the last epoch by which rows are judged."""

    measure: str
    split: Literal["test", "validation"]  # on the test set, or on the validation split
    title: str
    unit: str = "%"
    gap: str = "points"  # the unit of a difference
    spec: str = ".2f"

    @property
    def name(self) -> str:
        return f"{self.measure} on {self.split}"


def on_both(measure: str, title: str, **how: str) -> tuple[Outcome, Outcome]:
    """Returns the outcomes of a measure, on the test set and on the validation split."""
    on_test = Outcome(measure=measure, split="test", title=title, **how)
    return on_test, replace(on_test, split="validation", title=f"validation {title}")


def of_metric(name: str) -> tuple[Outcome, Outcome]:
    """Returns the outcomes of a metric of one's own."""
    return on_both(name, name, unit="1", gap="1", spec=".4f")


ON_TEST, ON_VALIDATION = on_both("top1", "top-1")
TOP5, TOP5_ON_VALIDATION = on_both("top5", "top-5")
LOSS, LOSS_ON_VALIDATION = on_both("loss", "loss", unit="nats", gap="nats", spec=".3f")
OUTCOMES = (ON_TEST, LOSS, TOP5, ON_VALIDATION, LOSS_ON_VALIDATION, TOP5_ON_VALIDATION)


def outcome_of(name: str) -> Outcome:
    """Returns the outcome that a study names, of ours or of a metric of one's own."""
    metric, _, _ = name.partition(" on ")
    for outcome in (*OUTCOMES, *of_metric(metric)):
        if outcome.name == name and metric.isidentifier():
            return outcome
    ours = ", ".join(outcome.name for outcome in OUTCOMES)
    raise ValueError(f"must be one of {ours}, or NAME on test of a metric")


# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run. One whose folder cannot be read is `unusable`, without settings."""

    path: Path  # of its folder; a published run has no more than its name
    status: str
    status_text: str  # also says how far it is, and why it is not further
    began: str = ""  # time of its latest start
    row_hash: str = ""  # the identity that the runs of all seeds share
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # by `row_settings`
    record: dict[str, str] = field(default_factory=dict)  # of its images and weights
    code: str = ""  # from elsewhere: its keys and files, with their sha256
    revisions: tuple[str, ...] = ()  # of git, of its starts
    outcomes: dict[Outcome, float] = field(default_factory=dict)  # those it has, if finished
    measures: dict[str, float] = field(default_factory=dict)  # likewise

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def data_hash(self) -> str:
        """The hash of the settings of its data: runs that share it should have one record."""
        names = [x for x in self.settings if x.startswith("dataset.") or x == "model.weights"]
        return digest({name: self.settings[name] for name in names})


def row_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that the runs of all seeds share, by dotted key, the stack first."""
    shared = {STACK_KEY: "+".join(config.augmentation.stack) or "none", **settings(config)}
    del shared["seed"]
    return shared


def read_runs(*places: Path) -> list[Run]:
    """Returns the runs whose folders are among `places` or directly below them."""
    runs = []
    for place in places:
        for path in sorted([place, *(x for x in place.iterdir() if x.name != ".hydra")]):
            folder = RunFolder(path)
            if folder.is_run():
                runs.append(read_run(folder))
    return runs


def read_run(folder: RunFolder) -> Run:
    """Returns the run of a folder, `unusable` if it cannot be read."""
    try:
        summary = {**folder.read_summary(), "status": folder.status()}
        return _run(folder.path, folder.read_config(), summary)
    except (OneLineError, OSError, LookupError, TypeError, ValueError) as error:
        return Run(
            path=folder.path, status="unusable", status_text=f"unusable: {message_of(error)}"
        )


def _run(path: Path, config: Config, summary: Mapping[str, Any]) -> Run:
    starts = summary.get("starts", [])
    revisions = [start["git_revision"] for start in starts]
    run = Run(
        path=path,
        status=summary["status"],
        status_text=_status_text(config, summary),
        began=max([start.get("began", "") for start in starts], default=""),
        row_hash=row_hash(config),
        seed=config.seed,
        settings=row_settings(config),
        record=summary.get("data") or {},
        code=", ".join(f"{key} {file}" for key, file in (summary.get("code") or {}).items()),
        revisions=tuple(x[:10] + x[40:] for x in revisions if x),  # COMMIT or COMMIT-dirty
    )
    if run.status != "finished":
        return run
    return replace(run, outcomes=_outcomes(summary, config), measures=_measures(summary, config))


def _status_text(config: Config, summary: Mapping[str, Any]) -> str:
    text: str = summary["status"]
    if text == "finished":
        return text
    if summary.get("epochs"):
        text += f" after epoch {summary['epochs']} of {config.recipe.epochs}"
    error = summary.get("error")
    if error and error != summary["status"]:  # that of an interrupted run is "interrupted"
        text += f": {in_one_line(error)}"
    return text


def _outcomes(summary: Mapping[str, Any], config: Config) -> dict[Outcome, float]:
    """Returns the outcomes that a finished run has."""
    log = summary.get("log") or [{}]
    last = log[-1]
    found = {
        ON_TEST: summary["top1_last"],
        LOSS: last.get("eval_loss"),  # none beside a validation split
        ON_VALIDATION: summary.get("val_top1_last"),
        LOSS_ON_VALIDATION: last.get("val_loss"),
    }
    if summary.get("classes", FEW_CLASSES + 1) > FEW_CLASSES:
        found[TOP5] = summary["top5_last"]
        found[TOP5_ON_VALIDATION] = last.get("val_top5")
    for name in config.recipe.metrics:
        on_test, on_validation = of_metric(name)
        found[on_test] = summary.get(f"{name}_last")
        found[on_validation] = last.get(f"val_{name}")
    return {outcome: float(value) for outcome, value in found.items() if value is not None}


def _measures(summary: Mapping[str, Any], config: Config) -> dict[str, float]:
    """Returns the measures that a finished run has."""
    found = {name: summary.get(name) for name in MEASURES}
    if config.augmentation.htm is None:
        found |= {"easy_share": None, "mixed_share": None}
    return {name: float(value) for name, value in found.items() if value is not None}


# --- published lines: JSON has no infinity, so they write `inf` ---------------------------------


def read_store(path: Path) -> list[Run]:
    """Returns the published runs of a file of results/."""
    runs = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        runs.append(_run(Path(line["name"]), config_of(line), {**line, "status": "finished"}))
    return runs


def config_of(line: Mapping[str, Any]) -> Config:
    """Returns the configuration of a published line."""
    raw = json.loads(json.dumps(line["config"]).replace('"inf"', "Infinity"))
    return validated(Config, raw)


def published_config(config: Config) -> dict[str, Any]:
    """Returns the configuration of a run, as `config_of` reads it."""
    return json.loads(json.dumps(asdict(config)), parse_constant=lambda infinity: "inf")


# --- the runs that count ------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """The runs that a table has, and why it does not have the others."""

    runs: list[Run]
    left_out: dict[Path, str]


def counted(runs: Sequence[Run]) -> Counted:
    """Chooses the finished run that began last of each row and seed.

    Of runs on the same data set those count whose record is that of the newest: results on images
    that have changed are not merged.
    """
    chosen: dict[tuple[str, int], Run] = {}
    records: dict[str, dict[str, str]] = {}  # of each data set, as its newest runs have it
    reasons: dict[Path, str] = {}
    for run in sorted(runs, key=lambda run: (run.began, run.name), reverse=True):
        newer = chosen.get((run.row_hash, run.seed))
        record = {**run.record, **records.get(run.data_hash, {})}
        changed = [name for name in run.record if run.record[name] != record[name]]
        if run.status != "finished":
            reasons[run.path] = run.status_text
        elif newer is not None:
            reasons[run.path] = f"{newer.name} has the same settings and is newer"
        elif changed:
            reasons[run.path] = f"the newest run on this data set has other {', '.join(changed)}"
        else:
            chosen[run.row_hash, run.seed] = run
            records[run.data_hash] = record
    kept = sorted(chosen.values(), key=lambda run: run.name)
    left_out = {run.path: reasons[run.path] for run in runs if run.path in reasons}
    return Counted(kept, left_out)


def judged_by(runs: Sequence[Run]) -> Outcome:
    """Returns what runs are judged by unless a study says it: validation, if all have a split."""
    if runs and all(ON_VALIDATION in run.outcomes for run in runs):
        return ON_VALIDATION
    return ON_TEST
