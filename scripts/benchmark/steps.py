"""Training steps beside each other: plain, HTM, VTM and both; eager, compiled, in CUDA graphs.

Every sample is easy (tau = inf) and attention is sharp, so that tokens are really replaced. The
variants train in turn, each with its own optimiser; the eager ones share their weights.
"""

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from reproduction.system.errors import PlainError, first_line
from reproduction.training.loop import Trainer
from scripts.benchmark.timing import Measured, calls_on, peak_mib, summarize, turns
from scripts.benchmark.trainers import Step, precision_on, sharp_trainer, step_config, step_of

PLAIN = "plain"
VARIANTS = {PLAIN: [], "HTM": ["htm"], "HTM and VTM": ["htm", "vtm"], "VTM": ["vtm"]}  # stacks
EAGER = "false"
COMPILING = (EAGER, "true", "cuda-graph")  # values of `compile`
AGAIN = ", again"  # the plain step a second time, which shows the noise of the ratios
# precision -> tolerated relative difference of the losses of equal steps, computed otherwise
TOLERANCES = {"float32": 1e-3, "bf16": 4e-2, "float16": 1e-2}
COMPARED_STEPS = 4

Group = dict[str, Any]  # title, about, rows, left_out


def measure_steps(
    model: str,
    batch_size: int,
    device: torch.device,
    compiling: Sequence[str],
    until: float = math.inf,
) -> Generator[Group]:
    """Yields the table of a model after every round.

    Compiled steps must first give the losses of eager ones. `left_out` says why a variant is not
    timed: it fails, or the time `until` which variants are made ready is over.
    """
    steps, rows, left_out, about = dict[str, Step](), dict[str, Measured](), dict[str, str](), ""
    for label, trainer in trainers_of(model, device, compiling):
        about = about or conditions(trainer)
        step = step_of(trainer, batch_size)
        try:
            if time.time() > until:
                raise PlainError("no time to make it ready")
            check_against_eager(trainer, step, batch_size)
            stats = step()[0].output.stats
            row = {name: float(stats[name]) for name in ("mixed_samples", "mixed_tokens")}
            rows[label] = row | ({"peak_mib": peak_mib(step)} if device.type == "cuda" else {})
            steps[label] = step
        except Exception as error:  # of a compiler, or a lack of memory
            left_out[label] = first_line(error)
        if label.startswith(PLAIN) and label in steps:
            steps[label + AGAIN], rows[label + AGAIN] = steps[label], rows[label]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for each in turns(steps, calls_on(device)):
        for name, ms in each.items():
            times[name].append(ms)
        timed = ratios(times)
        for figures in timed.values():
            figures["images_per_second"] = 1000 * batch_size / figures["ms"]["median"]
        title = f"training step: {model}, batch of {batch_size}"
        timed = {name: timed[name] | rows[name] for name in steps}
        yield {"title": title, "about": about, "rows": timed, "left_out": left_out}


def trainers_of(
    model: str, device: torch.device, compiling: Sequence[str]
) -> Iterator[tuple[str, Trainer]]:
    """Yields name and trainer of each variant; a compiled one has a model of its own."""
    shared = None
    for how in compiling:
        for variant, stack in VARIANTS.items():
            config = step_config(model, stack, precision_on(device), f"compile={how}")
            trainer = sharp_trainer(config, device, shared if how == EAGER else None)
            if how == EAGER:
                shared = trainer.module.model
            yield variant + ("" if how == EAGER else f", compile={how}"), trainer


def ratios(times: Mapping[str, list[float]]) -> dict[str, Measured]:
    """Returns name -> `ms` and `ratio`, each a summary over the rounds in `times`.

    Ratios are taken within each round: to the mean of both plain steps that are compiled alike,
    which has less noise than one of them, and of the second plain step to the first.
    """
    rows = {}
    for name, ms in times.items():
        rows[name] = {"ms": summarize(ms)}
        variant, compiled, how = name.removesuffix(AGAIN).partition(", compile=")
        plain = PLAIN + compiled + how
        if plain in times:
            alone = np.array(times[plain])
            mean = (alone + times[plain + AGAIN]) / 2
            rows[name]["ratio"] = summarize([*(ms / (alone if variant == PLAIN else mean))])
    return rows


def check_against_eager(trainer: Trainer, step: Step, batch_size: int) -> float:
    """Returns the largest relative difference of a compiled trainer's first losses to eager ones.

    PlainError if it is too large. An eager trainer is not compared.
    """
    if not trainer.config.compile:
        return 0.0
    eager = sharp_trainer(replace(trainer.config, compile=False), trainer.world.device)
    expected = step_of(eager, batch_size)
    losses = [[float(each()[0].loss) for each in (step, expected)] for _ in range(COMPARED_STEPS)]
    errors = [abs(ours / theirs - 1) for ours, theirs in losses]
    if not all(error <= TOLERANCES[trainer.recipe.precision] for error in errors):
        name, compiling = trainer.config.model.name, trainer.config.compile
        far = ", ".join(f"{error:.1e}" for error in errors)
        raise PlainError(f"{name}, compile={compiling}: losses differ from eager ones by {far}")
    return max(errors)


def conditions(trainer: Trainer) -> str:
    """Precision, dropout and optimiser, in words."""
    config, recipe = trainer.config.model, trainer.recipe
    dropout = [f"{name} {value}" for name, value in vars(config).items() if "drop" in name]
    return ", ".join([recipe.precision, *dropout, recipe.optimizer])
