"""What HTM adds to a training step: by detector (Table 3), and part by part."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from reproduction.benchmark.scope import Scope
from reproduction.benchmark.steps import precision_on
from reproduction.benchmark.timing import Work, calls_on, compared
from reproduction.config import Config
from reproduction.latency import build_step, detector_configs, mix, mixing_batch
from reproduction.plan import Settings
from reproduction.training.evaluate import autocast
from tokenmixup import difficulty, gain_matrix, mix_horizontal, optimal_assignment
from tokenmixup.horizontal import take_from_donors

WHOLE = "all three"


def measure_detectors(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """The three detectors with all that follows, relative to attention."""
    configs, precision = detector_configs(Settings()), precision_on(device)
    works: dict[str, Work] = {
        name: build_step(configs[name], scope.detectors, device, precision)
        for name in ("attention", "gradient", "random")
    }
    return [
        {
            "title": _title("detectors", configs["attention"], scope),
            "about": f"{precision}, gradient in float32; saliency, assignment and mixing",
            "rows": compared(works, scope.pairs, calls_on(device)),
        }
    ]


def measure_parts(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """The parts of HTM by attention, as shares of the three that follow one another."""
    config, precision = detector_configs(Settings())["attention"], precision_on(device)
    works = htm_parts(config, scope.detectors, device, precision)
    about = f"{precision}; all three: saliency, assignment (gain matrix and host), mixing"
    rows = compared(works, scope.pairs, calls_on(device))
    return [{"title": _title("parts of HTM", config, scope), "about": about, "rows": rows}]


def _title(what: str, config: Config, scope: Scope) -> str:
    return f"{what}: {config.model.name}, batch of {scope.detectors}"


def htm_parts(
    config: Config, batch_size: int, device: torch.device, precision: str
) -> dict[str, Work]:
    """Part -> its work on what enters the HTM block for a batch of random images."""
    module, images, targets, entry = mixing_batch(config, batch_size, device, precision)
    htm: Any = module.htm
    scorenet: Any = module.scorenet
    known = dataclasses.replace(entry)
    with autocast(device, precision):
        saliency = known.own_saliency()
    gain = gain_matrix(saliency, htm.rho)
    donor = optimal_assignment(gain).to(device)
    is_easy = torch.ones(batch_size, dtype=torch.bool, device=device)
    blend = partial(mix_horizontal, rho=htm.rho, pair=lambda *_: donor)
    moved = blend(entry.tokens, targets, saliency, is_easy).moved

    def autocasting(work: Callable[[], object]) -> Work:
        def wrapped() -> None:
            with autocast(device, precision):
                work()

        return wrapped

    parts: dict[str, Work] = {
        WHOLE: lambda: mix(module, images, targets, entry),
        "saliency": lambda: dataclasses.replace(entry).own_saliency(),
        "gain matrix": lambda: gain_matrix(saliency, htm.rho),
        "copy and assignment on the host": lambda: optimal_assignment(gain).to(device),
        "mixing of tokens and labels": lambda: blend(entry.tokens, targets, saliency, is_easy),
        "mixing of projections": lambda: [
            take_from_donors(y, moved, in_place=True) for y in known.projected
        ],
        "ScoreNet and difficulty": lambda: difficulty(scorenet(entry.tokens), targets),
    }
    return {name: autocasting(work) for name, work in parts.items()}
