"""Every value of the recipes of Tables 1 and 2 beside the published one, and why they differ."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from reproduction.config import Config
from reproduction.runs.folder import flatten
from reproduction.system.errors import UserError

RECIPES = Path(__file__).with_name("recipes.yaml")
LEFT_OUT = (  # where and how a run is made, not what it computes
    *("name", "device", "restarts", "resume", "output_root", "checkpoint.*", "logger.*"),
    *("model.name", "model.family", "model.weights", "model.htm_layer", "model.vtm_layer"),
    "model.checkpoint_blocks",
    *("dataset.name", "dataset.root", "dataset.workers", "dataset.memory_mib"),
    *("dataset.broken_images", "recipe.log_every", "recipe.evaluate_every"),
)
NOT_TOLD = "not told"


class Setting(NamedTuple):
    """A setting of one experiment; `published` is NOT_TOLD where nothing is known, `why` empty."""

    experiment: str
    key: str
    published: Any
    ours: Any
    why: str

    @property
    def is_equal(self) -> bool:
        return self.published in (self.ours, NOT_TOLD)


def read_recipes() -> dict[str, Any]:
    """What recipes.yaml holds."""
    return yaml.safe_load(RECIPES.read_text())


def compare_recipes(told: Mapping[str, Any], configs: Mapping[str, Config]) -> list[Setting]:
    """Every setting of every experiment, by what `told` knows of the published ones.

    `configs`: of each experiment of Tables 1 and 2, as composed. UserError for a setting that
    `told` does not name.
    """
    settings = []
    for experiment, config in configs.items():
        published: dict[str, Any] = {}
        for entry in told["published"]:
            published |= entry["values"] if meant(entry, experiment) else {}
        reasons = [entry for entry in told["reasons"] if meant(entry, experiment)]
        for key, ours in _settings(config):
            if key not in published and key not in told["ours_alone"]:
                raise UserError(
                    f"{experiment}: nothing is told of {key}={ours}, name it in {RECIPES.name}: "
                    "under published, or in ours_alone"
                )
            why = "; ".join(entry["why"] for entry in reasons if entry["key"] == key)
            settings.append(Setting(experiment, key, published.get(key, NOT_TOLD), ours, why))
    return settings


def meant(entry: Mapping[str, Any], experiment: str) -> bool:
    """Whether a pattern of an entry is that of an experiment."""
    return any(fnmatch(experiment, pattern) for pattern in entry["in"])


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of what an experiment computes."""
    stack = dataclasses.asdict(config.augmentation)
    values = dataclasses.asdict(config) | {
        "augmentation": {name: part for name, part in stack.items() if part is not None}
    }
    for key, value in flatten(values):
        if not any(fnmatch(key, pattern) for pattern in LEFT_OUT):
            yield key, value


def as_table(settings: Sequence[Setting]) -> str:
    """Markdown: a row for each key and pair of values, with the experiments that have it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    having: dict[str, list[str]] = {}
    for x in settings:
        verdict = x.why or ("equal" if x.published == x.ours else "ours alone")
        row = (x.key, _text(x.published), _text(x.ours), verdict)
        rows.setdefault(row, []).append(x.experiment)
        having.setdefault(x.key, []).append(x.experiment)
    lines = ["| setting | where | published | here | |", "|---|---|---|---|---|"]
    for (key, *cells), experiments in sorted(rows.items()):
        where = ", ".join(_where(experiments, having[key]))
        lines.append(" | ".join([f"| `{key}`", where, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _where(experiments: Sequence[str], having: Sequence[str]) -> Iterator[str]:
    """Names of data sets that all their experiments stand for, and of single experiments."""
    for dataset in ("cifar10_", "cifar100_", "imagenet1k_"):
        chosen, all_of_it = (
            [name for name in names if name.partition("/")[2].startswith(dataset)]
            for names in (experiments, having)
        )
        if len(chosen) == len(all_of_it) > 0:
            yield dataset.removesuffix("_")
        else:
            yield from chosen


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_text(x) for x in value)}]"
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)
