"""What eval.py evaluates: a run by its own configuration, or a checkpoint by a given one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.cli import Composed
from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.parse import parse
from reproduction.runs import RunFolder

OF_A_RUN = ("run", "weights", "device", "devices", "dataset")
OF_A_FILE = ("checkpoint", "device", "devices", "model", "dataset", "recipe", "output_root")


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint, the configuration it is evaluated by, and where the result goes."""

    config: Config
    checkpoint: Path
    result: Path


def resolve(composed: Composed) -> Evaluation:
    """The checked settings of one evaluation; UserError names what does not belong to it."""
    raw = dict(composed.raw)
    run, weights, checkpoint = raw.pop("run"), raw.pop("weights"), raw.pop("checkpoint")
    if (run is None) == (checkpoint is None):
        raise UserError(
            f"run={run}, checkpoint={checkpoint}: give one of them, a run folder or a file"
        )
    if weights not in ("last", "best"):
        raise UserError(f"weights={weights}: must be last or best")
    _refuse_others(composed, OF_A_RUN if run is not None else OF_A_FILE)
    if checkpoint is not None:
        if not Path(checkpoint).is_file():
            raise UserError(f"checkpoint={checkpoint}: there is no such file")
        config = parse(raw)
        name = f"{Path(checkpoint).stem}-{config.model.name}-{config.dataset.name}.json"
        return Evaluation(config, Path(checkpoint), Path(config.output_root, "evaluations", name))
    folder = RunFolder(run)
    config = parse(_overridden(folder.read_config(), raw, composed))
    path = folder.best_path if weights == "best" else folder.last_path
    if not path.is_file():
        raise UserError(f"run={run}: holds no {path.name} yet, no epoch has been finished")
    return Evaluation(config, path, folder.path / f"evaluation-{weights}.json")


def _refuse_others(composed: Composed, allowed: tuple[str, ...]) -> None:
    for key, text in composed.overrides.items():
        if key.partition(".")[0] not in (*allowed, "hydra"):
            raise UserError(f"{text}: does not belong here, allowed are {', '.join(allowed)}")


def _overridden(saved: dict[str, Any], typed: dict[str, Any], composed: Composed) -> dict[str, Any]:
    """The run's own configuration with the device and the data set that were typed."""
    for key in composed.overrides:
        head, _, leaf = key.partition(".")
        if head in ("device", "devices") or key == "dataset":
            saved[head] = typed[head]
        elif head == "dataset":
            saved["dataset"][leaf] = typed["dataset"][leaf]
    return saved
