"""Parts b to d: training steps that are eager, compiled or CUDA graphs: values, times, kernels.

On a CPU, where a test tries all of it at tiny size, a captured step runs again instead of a replay.
"""

import gc
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from reproduction.config import Config
from reproduction.training.loop import Trainer
from scripts.benchmark.steps import COMPILING, EAGER, VARIANTS, measure_steps
from scripts.benchmark.timing import Measured, calls_on, time_calls
from scripts.benchmark.trainers import (
    CCT,
    VIT,
    precision_on,
    random_batch,
    sharp_trainer,
    step_config,
    step_of,
)
from scripts.on_gpu.sheet import Sheet

TINY = "cct_2_3x2"
GRAPH = COMPILING[-1]
STEPS, ROUNDS, FEW = 20, 40, 3
READY = 0.7  # of the time of a model, in which its variants are made ready
COMPLETE = "complete"  # row with the number of rounds
LARGEST_KERNELS = 30  # kernels of a profile


class Case(NamedTuple):
    """A configuration whose steps are compared."""

    model: str
    batch: int
    stack: tuple[str, ...]
    precision: str
    tau: float
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}, {'+'.join(self.stack)}, {self.precision}, batch of {self.batch}"

    def config(self, compiling: str) -> Config:
        overrides = (
            *self.overrides,
            f"augmentation.htm.tau={self.tau}",
            f"compile={compiling}",
        )
        return step_config(self.model, [*self.stack], self.precision, *overrides)


METHODS = ("cutmix", "htm", "vtm")
# tau: about the difficulty of guessing, ln(classes), so that the number of easy samples varies
CASES = (
    Case(TINY, 32, METHODS, "float32", 2.31, ("model.attn_drop=0.1", "recipe.clip_grad_norm=1")),
    Case(CCT, 128, METHODS, "bf16", 4.62),
    Case(CCT, 32, METHODS, "float16", 4.62),
    Case(VIT, 16, METHODS, "bf16", 6.92),
)


def compare_values(sheet: Sheet) -> None:
    """Part b: the first steps of equal trainers, with new images and a new rate in each.

    Another eager trainer shows the noise. Graphs come before what is compiled alone.
    """
    on_gpu = sheet.device.type == "cuda"
    steps = STEPS if on_gpu else 3
    title, eager = f"values: {steps} steps beside eager ones", dict[Case, TrainedSteps]()
    ways = [EAGER, *COMPILING[:0:-1]] if on_gpu else [EAGER, GRAPH]
    for how, case in product(ways, CASES if on_gpu else [CASES[0]._replace(batch=4)]):
        name = f"{case.name}, compile={how}"
        if sheet.has(title, name):
            continue
        with sheet.trying(title, name):
            if case not in eager:
                eager[case] = trained(case, EAGER, steps, sheet.device)
            other = trained(case, how, steps, sheet.device)
            sheet.put(title, name, differences(eager[case], other))
        free()


class TrainedSteps(NamedTuple):
    """Losses and mixed samples of steps, weights before and after them, seconds of the first."""

    losses: list[float]
    mixed: list[float]
    before: Tensor
    after: Tensor
    seconds: float


def trained(case: Case, how: str, steps: int, device: torch.device) -> TrainedSteps:
    """Trains a new model on images that are others in each step, by the rates of whole epochs."""
    trainer = sharp_trainer(case.config(how), device)
    before, start, seconds = weights_of(trainer), time.perf_counter(), 0.0
    losses, mixed = list[float](), list[float]()
    for step in range(steps):
        images, classes = random_batch(trainer, case.batch, seed=step)
        trainer.schedule(step, 0)
        (part,) = trainer.train_step(images, classes, case.batch)
        trainer.step += 1
        losses.append(float(part.loss))
        mixed.append(float(part.output.stats["mixed_samples"]))
        seconds = seconds or time.perf_counter() - start
    return TrainedSteps(losses, mixed, before, weights_of(trainer), seconds)


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in trainer.module.parameters()])


def differences(eager: TrainedSteps, other: TrainedSteps) -> Measured:
    """The largest relative difference of losses to eager ones; and of weights at the end.

    That of weights is a norm, relative to how far eager steps move them.
    """
    errors = [abs(x / y - 1) for x, y in zip(other.losses, eager.losses, strict=True)]
    moved = float((eager.after - eager.before).norm())
    return {
        "losses": max(errors) if all(map(math.isfinite, errors)) else math.inf,
        "in step": max(range(len(errors)), key=errors.__getitem__) + 1,
        "first step": errors[0],
        "mixed": f"{min(other.mixed):.0f} to {max(other.mixed):.0f}",
        "mixed alike": sum(x == y for x, y in zip(other.mixed, eager.mixed, strict=True)),
        "weights": float((other.after - eager.after).norm()) / moved,
        "seconds to the first": other.seconds,
        "errors": errors,
    }


def measure_times(sheet: Sheet) -> None:
    """Part c: steps in turns; first some rounds of eager ones, then of eager ones and graphs."""
    on_gpu = sheet.device.type == "cuda"
    sizes = ((CCT, 128), (VIT, 128)) if on_gpu else ((TINY, 4),)
    ways = ((EAGER,), (EAGER, GRAPH))[not on_gpu :]
    for place, (model, batch) in enumerate(sizes):
        title = f"steps: {model}, batch of {batch}, {precision_on(sheet.device)}"
        ends = time.time() + sheet.seconds_left / (len(sizes) - place)
        for compiling in ways if not sheet.has(title, COMPLETE) else ():
            rounds = ROUNDS if on_gpu and GRAPH in compiling else FEW
            with sheet.trying(title, COMPLETE):
                time_steps(sheet, title, model, batch, compiling, rounds, ends)
            free()


def time_steps(
    sheet: Sheet,
    title: str,
    model: str,
    batch: int,
    compiling: Sequence[str],
    rounds: int,
    ends: float,
) -> None:
    """Writes the rows of a model after each round, until so many are done or the time ends."""
    ready = time.time() + READY * (ends - time.time())
    with closing(measure_steps(model, batch, sheet.device, compiling, ready)) as groups:
        for done, group in enumerate(groups, 1):
            is_last = done == rounds or time.time() > ends
            rows = {name: flat(row) for name, row in group["rows"].items()}
            rows |= {name: {"failed": why[:150]} for name, why in group["left_out"].items()}
            sheet.tables[title] = {**rows}
            state = {} if is_last else {"partly": "more rounds were to come"}
            sheet.put(title, COMPLETE, {"rounds": done, **state})
            if is_last:
                return


def flat(row: Measured) -> Measured:
    """The figures of a row of the benchmark, each with its quartiles in the file."""
    figures: Measured = {"ms": row["ms"]["median"]}
    if "ratio" in row:
        low, high = row["ratio"]["interval"]
        figures |= {"to plain": row["ratio"]["median"], "95 %": f"{low:.3f} to {high:.3f}"}
    names = {"images_per_second": "images/s", "peak_mib": "peak MiB", "mixed_tokens": "tokens"}
    figures |= {names[key]: row[key] for key in names if key in row}
    return figures | {"quartiles [ms]": [row["ms"]["low"], row["ms"]["high"]]}


def measure_kernels(sheet: Sheet) -> None:
    """Part d: the largest kernels of steps in a graph: both, plain and HTM; then of eager ones."""
    on_gpu = sheet.device.type == "cuda"
    sizes = ((CCT, 128), (VIT, 128)) if on_gpu else ((TINY, 4),)
    ways = [(variant, GRAPH) for variant in ("HTM and VTM", "plain", "HTM")]
    ways += [("HTM and VTM", EAGER), ("plain", EAGER)]
    for (model, batch), (variant, how) in product(sizes, ways if on_gpu else ways[:1]):
        title = f"kernels: {model}, batch of {batch}, {variant}, compile={how}"
        if sheet.has(title, "all"):
            continue
        with sheet.trying(title, "all"):
            overrides = [precision_on(sheet.device), f"compile={how}"]
            config = step_config(model, VARIANTS[variant], *overrides)
            for name, figures in kernels_of(config, sheet.device, batch).items():
                sheet.put(title, name, figures)
        free()


def kernels_of(
    config: Config, device: torch.device, batch: int, steps: int = 5
) -> dict[str, Measured]:
    """Launches and microseconds a step of all kernels and of the largest ones.

    On a CPU of operators, in which those that they call are counted again.
    """
    step = step_of(sharp_trainer(config, device), batch)
    step_ms = 1000 * min(time_calls(step, calls_on(device)) for _ in range(3)) / calls_on(device)
    on_gpu = device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as record:
        time_calls(step, steps)
    events = [
        event
        for event in record.events()
        if (event.device_type == DeviceType.CUDA) == on_gpu and not event.is_user_annotation
    ]
    spent: dict[str, list[float]] = {}
    for event in events:
        spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    total = sum(map(sum, spent.values()))
    rows: dict[str, Measured] = {
        "all": figures_of(spent.values(), total, steps) | {"step [ms]": step_ms}
    }
    for name in sorted(spent, key=lambda name: -sum(spent[name]))[:LARGEST_KERNELS]:
        rows[short(name, rows)] = figures_of([spent[name]], total, steps)
    return rows


def figures_of(spent: Iterable[list[float]], total: float, steps: int) -> dict[str, Any]:
    times = [us for each in spent for us in each]
    share = sum(times) / total if total else 0.0
    return {"launches": len(times) / steps, "us": sum(times) / steps, "share": share}


def short(name: str, known: Iterable[str], longest: int = 60) -> str:
    """The beginning of a kernel's name, numbered if others begin alike."""
    text = name.removeprefix("void ")[:longest]
    count = sum(each.partition(" #")[0] == text for each in known)
    return f"{text} #{count + 1}" if count else text


def free() -> None:
    """Frees the memory of earlier trainers and their graphs."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
