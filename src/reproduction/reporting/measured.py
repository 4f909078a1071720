"""A line of a table: what the finished runs of one configuration have reached."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from reproduction.reporting.collect import METRICS, CellRuns, Collection, Result
from reproduction.reporting.statistics import Comparison, Spread, compare, flat_spread, spread

TESTED = "top1_last"


@dataclass(frozen=True, kw_only=True)
class Measured(ABC):
    """What the finished runs of one configuration have reached, and how far the others are.

    Accuracies are in percent; `experiment` is None for what the paper only quotes.
    """

    row: str
    column: str
    status: str
    experiment: str | None = None
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # of each of METRICS, once run
    comparison: Comparison | None = None
    seeds: tuple[int, ...] = ()
    results: tuple[Result, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a sentence calls it."""
        return self.row

    @property
    def seconds(self) -> Spread | None:
        """Of a run."""
        known = [result.seconds for result in self.results if result.seconds is not None]
        return spread(known) if known else None

    @abstractmethod
    def flat(self) -> dict[str, Any]:
        """Plain values for a file, without the scale: numbers are unrounded, None unknown."""

    def accuracies(self) -> dict[str, float | None]:
        """For a file: mean and deviation of each metric."""
        pairs = (flat_spread(key, self.spreads.get(key)).items() for key in METRICS)
        return dict(chain.from_iterable(pairs))

    def test(self, reference: str) -> dict[str, Any]:
        """For a file: the comparison with what `reference` names."""
        found = self.comparison or Comparison(())
        return {
            f"difference_to_{reference}": found.difference,
            "test_seeds": list(found.seeds),
            "test_t": found.t,
            "test_p": found.p,
            "test_note": found.reason,
        }

    def origin(self) -> dict[str, Any]:
        """For a file: which runs, for how long, on what."""
        seconds = self.seconds
        return {
            "seconds_mean": seconds and seconds.mean,
            "devices": known(r.devices for r in self.results),
            "hardware": known(r.hardware for r in self.results),
            "git_revisions": known(r.revision for r in self.results),
            "runs": list(self.runs),
        }


def measured(name: str, reference: str | None, collection: Collection) -> dict[str, Any]:
    """What Measured holds of the configuration `name`, tested against that of `reference`."""
    runs = collection.cells.get(name)
    found = [] if runs is None else [run for run in runs.finished.values() if run.result]
    results = tuple(run.result for run in found if run.result is not None)
    return {
        "status": _status(runs),
        "experiment": name,
        "spreads": {key: spread([r.accuracy[key] for r in results]) for key in METRICS if results},
        "comparison": _against(name, reference, collection) if reference and results else None,
        "seeds": tuple(run.seed for run in found),
        "results": results,
        "runs": tuple(run.folder for run in found),
    }


def _status(runs: CellRuns | None) -> str:
    if runs is None:
        return "no configuration at this scale"
    parts = [f"{len(runs.finished)} finished"] if runs.finished else []
    parts += [f"seed {run.seed} {run.status}" for run in runs.others]
    return "; ".join(parts) or "not run"


def _against(name: str, reference: str, collection: Collection) -> Comparison:
    pair = (collection.cells.get(each, CellRuns()) for each in (name, reference))
    ours, theirs = (
        {seed: run.result.accuracy[TESTED] for seed, run in runs.finished.items() if run.result}
        for runs in pair
    )
    return compare(ours, theirs)


def known(values: Iterable[Any]) -> list[Any]:
    """What differs among the values, None left out, in order of appearance."""
    return list(dict.fromkeys(value for value in values if value is not None))
