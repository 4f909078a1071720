"""Runs as tables see them, read from their folders or from published lines, and their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.folder import RunFolder
from reproduction.identity import digest, nested, row_hash, saved
from reproduction.identity import settings as settings_of
from reproduction.system import UserError, first_line, in_one_line, reason_of

LAST_EPOCHS = 10  # of the best one of which some protocols report the accuracy
MEASURES = (  # of a run, beside its outcomes; tables have their means
    "top1_median10",
    "top1_best",
    "top1_best10",
    "top1_selected",
    "mixed_share",
    "mixed_tokens",
    "seconds",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What rows are judged by: of the last epoch, on one half of the held-out images."""

    measure: str
    half: str
    title: str
    unit: str = "%"
    gap: str = "points"  # the unit of a difference
    spec: str = ".2f"


NATS: Any = {"unit": "nats", "gap": "nats", "spec": ".3f"}
OUTCOMES = {
    f"{outcome.measure} on {outcome.half}": outcome
    for outcome in (
        Outcome(measure="top1", half="test", title="top-1"),
        Outcome(measure="loss", half="test", title="held-out loss", **NATS),
        Outcome(measure="top5", half="test", title="top-5"),
        Outcome(measure="top1", half="validation", title="validation top-1"),
        Outcome(measure="loss", half="validation", title="validation loss", **NATS),
        Outcome(measure="top5", half="validation", title="validation top-5"),
    )
}
ON_TEST = "top1 on test"
ON_VALIDATION = "top1 on validation"


# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run. One whose folder cannot be read is `unusable`, and has no key."""

    name: str
    path: Path | None = None  # of its folder; a published run has none
    status: str
    state: str  # its status in words
    written: float = 0.0  # time of its summary
    key: str = ""  # the identity that the runs of all seeds share
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # but for the seed
    stack: str = "none"
    data: dict[str, str] = field(default_factory=dict)  # the record of its images and weights
    git_revision: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)  # outcomes and measures, if finished

    @property
    def place(self) -> Path:
        return self.path or Path(self.name)

    @property
    def source(self) -> str:
        """What its settings say of its data: runs with the same should have the same record."""
        names = [x for x in self.settings if x.startswith("dataset.") or x == "model.weights"]
        return digest({name: self.settings[name] for name in names})


def read_runs(*places: Path) -> list[Run]:
    """Returns the runs whose folders are among `places` or directly below them."""
    runs = []
    for place in places:
        for path in sorted([place, *place.iterdir()]):
            folder = RunFolder(path)
            if folder.is_run():
                runs.append(read_run(folder))
    return runs


def read_run(folder: RunFolder) -> Run:
    """Returns the run of a folder, `unusable` if it cannot be read."""
    try:
        summary = {**folder.read_summary(), "status": folder.status()}
        written = 0.0
        if folder.summary_path.exists():
            written = folder.summary_path.stat().st_mtime
        config = folder.read_config()
        return _run(folder.path.name, config, summary, path=folder.path, written=written)
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        reason = first_line(error)
        if isinstance(error, UserError):
            reason = str(error)
        elif isinstance(error, OSError):
            reason = reason_of(error)
        return Run(
            name=folder.path.name,
            path=folder.path,
            status="unusable",
            state=f"unusable: {reason}",
        )


def read_store(path: Path) -> list[Run]:
    """Returns the published runs of a file of results/."""
    runs = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        summary = {**line, "status": "finished", "seconds": 3600 * line["hours"]}
        runs.append(_run(line["name"], config_of(line), summary))
    return runs


def config_of(line: Mapping[str, Any]) -> Config:
    """Returns the configuration of a published line, which spells an infinity as a word."""
    settings = json.loads(json.dumps(line["config"]).replace('"inf"', "Infinity"))
    return saved(nested(settings))


def _run(
    name: str,
    config: Config,
    summary: Mapping[str, Any],
    path: Path | None = None,
    written: float = 0.0,
) -> Run:
    settings = settings_of(config)
    seed = settings.pop("seed")
    numbers = {}
    if summary["status"] == "finished":
        numbers = _numbers(summary)
    return Run(
        name=name,
        path=path,
        status=summary["status"],
        state=_state(config, summary),
        written=written,
        key=row_hash(config),
        seed=seed,
        settings=settings,
        stack="+".join(config.augmentation.stack) or "none",
        data=summary.get("data") or {},
        git_revision=summary.get("git_revision"),
        numbers=numbers,
    )


def _state(config: Config, summary: Mapping[str, Any]) -> str:
    """Says how far a run is, and why it is not further."""
    state: str = summary["status"]
    if state == "finished":
        return state
    if summary.get("epochs"):
        state += f" after epoch {summary['epochs']} of {config.recipe.epochs}"
    if summary.get("error") and summary["error"] != summary["status"]:  # said once
        state += f": {in_one_line(summary['error'])}"
    return state


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the outcomes and measures that a finished run has."""
    log = summary.get("log") or [{}]
    last = log[-1]
    late = [line for line in log if line.get("epoch", 0) > summary["epochs"] - LAST_EPOCHS]
    found = {name: summary.get(name) for name in MEASURES}
    found["top1_best10"] = max((line["top1"] for line in late if "top1" in line), default=None)
    found |= {
        "top1 on test": summary["top1_last"],
        "loss on test": last.get("eval_loss"),
        "top5 on test": summary["top5_last"],
        "top1 on validation": summary.get("val_top1_last"),
        "loss on validation": last.get("val_loss"),
        "top5 on validation": last.get("val_top5"),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


# --- the runs that count ------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """The runs that a table has, and why it does not have the others."""

    runs: list[Run]
    left_out: dict[Path, str]


def counted(runs: Sequence[Run]) -> Counted:
    """Chooses the finished run with the newest summary of each key and seed.

    Of runs on the same data set those count whose record is that of the newest: results on images
    that have changed are not merged.
    """
    chosen: dict[tuple[str, int], Run] = {}
    records: dict[str, dict[str, str]] = {}
    reasons: dict[Path, str] = {}
    for run in sorted(runs, key=lambda run: (run.written, run.name), reverse=True):
        newer = chosen.get((run.key, run.seed))
        record = records.get(run.source, {})
        changed = [x for x in run.data if x in record and run.data[x] != record[x]]
        if run.status != "finished":
            reasons[run.place] = run.state
        elif newer is not None:
            reasons[run.place] = f"{newer.name} has the same settings and is newer"
        elif changed:
            reasons[run.place] = f"the newest run on this data set has other {', '.join(changed)}"
        else:
            chosen[run.key, run.seed] = run
            records[run.source] = {**run.data, **record}  # what newer runs say counts
    kept = sorted(chosen.values(), key=lambda run: (run.key, run.seed))
    left_out = {run.place: reasons[run.place] for run in runs if run.place in reasons}
    return Counted(kept, left_out)


def judged_by(runs: Sequence[Run]) -> str:
    """Returns what runs are judged by unless a study says it: validation, if all have a split."""
    if runs and all(ON_VALIDATION in run.numbers for run in runs):
        return ON_VALIDATION
    return ON_TEST
