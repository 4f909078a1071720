"""Compares the recipes of Tables 1 and 2 with the published ones, setting by setting."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from reproduction.config import Config
from reproduction.runs.identity import settings_of
from reproduction.system.errors import UserError

RECIPES = Path(__file__).with_name("recipes.yaml")
LEFT_OUT = (  # besides where and how a run is made, which `settings_of` leaves out
    *("model.name", "model.family", "model.weights", "model.htm_layer", "model.vtm_layer"),
    *("dataset.name", "dataset.broken_images", "recipe.log_every", "recipe.evaluate_every"),
)
NOT_STATED = "not stated"


class Setting(NamedTuple):
    """A setting of an experiment, its published value or NOT_STATED, and why it differs."""

    experiment: str
    key: str
    published: Any
    ours: Any
    why: str

    @property
    def is_equal(self) -> bool:
        return self.published in (self.ours, NOT_STATED)


def read_recipes() -> dict[str, Any]:
    return yaml.safe_load(RECIPES.read_text())


def compare_recipes(recipes: Mapping[str, Any], configs: Mapping[str, Config]) -> list[Setting]:
    """Compares all settings of the experiments in `configs` with the published `recipes`.

    Raises UserError for a setting that `recipes` does not name.
    """
    settings = []
    for experiment, config in configs.items():
        published: dict[str, Any] = {}
        for entry in recipes["published"]:
            published |= entry["values"] if applies(entry, experiment) else {}
        reasons = [entry for entry in recipes["reasons"] if applies(entry, experiment)]
        for key, ours in _settings(config):
            if key not in published and key not in recipes["ours_alone"]:
                raise UserError(
                    f"{experiment}: {RECIPES.name} does not name {key}={ours}: add it under "
                    "published or ours_alone"
                )
            why = "; ".join(entry["why"] for entry in reasons if entry["key"] == key)
            settings.append(Setting(experiment, key, published.get(key, NOT_STATED), ours, why))
    return settings


def applies(entry: Mapping[str, Any], experiment: str) -> bool:
    """Whether one of the patterns of an entry matches the experiment."""
    return any(fnmatch(experiment, pattern) for pattern in entry["in"])


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values that determine the result of an experiment."""
    stack = dataclasses.asdict(config.augmentation)
    values = dataclasses.asdict(config) | {
        "augmentation": {name: part for name, part in stack.items() if part is not None}
    }
    for key, value in settings_of(values).items():
        if key not in LEFT_OUT:
            yield key, value


def as_table(settings: Sequence[Setting]) -> str:
    """Returns Markdown: a row for each key and pair of values, with its experiments."""
    rows: dict[tuple[str, ...], list[str]] = {}
    by_key: dict[str, list[str]] = {}
    for x in settings:
        verdict = x.why or ("equal" if x.published == x.ours else "ours only")
        row = (x.key, _text(x.published), _text(x.ours), verdict)
        rows.setdefault(row, []).append(x.experiment)
        by_key.setdefault(x.key, []).append(x.experiment)
    lines = ["| setting | where | published | here | |", "|---|---|---|---|---|"]
    for (key, *cells), experiments in sorted(rows.items()):
        where = ", ".join(_abbreviate(experiments, by_key[key]))
        lines.append(" | ".join([f"| `{key}`", where, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _abbreviate(experiments: Sequence[str], all_with_key: Sequence[str]) -> Iterator[str]:
    """Replaces the experiments of a data set by its name if all that have the key are listed."""
    for dataset in ("cifar10_", "cifar100_", "imagenet1k_"):
        chosen, candidates = (
            [name for name in names if name.partition("/")[2].startswith(dataset)]
            for names in (experiments, all_with_key)
        )
        if len(chosen) == len(candidates) > 0:
            yield dataset.removesuffix("_")
        else:
            yield from chosen


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_text(x) for x in value)}]"
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)
