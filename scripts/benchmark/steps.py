"""Benchmarks of training steps: plain, HTM, VTM, both, TransMix, compiled ones and the oracle.

Every sample is easy (tau = inf) and attention is sharp, so that tokens are really replaced. The
variants train in turn, each with its own optimiser.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from reproduction.config import Config
from reproduction.models.build import attention_kernel, count_macs
from reproduction.system.errors import PlainError
from reproduction.training.evaluate import DTYPES, autocast
from reproduction.training.loop import Trainer
from scripts.benchmark.measure import AGAIN, Group, Row, Scope, calls_on, compare, peak_mib
from scripts.benchmark.timing import Work, spread_of, time_calls, time_in_turns
from scripts.benchmark.trainers import (
    CCT,
    Step,
    oracle_trainer,
    precision_on,
    sharp_trainer,
    step_config,
    step_of,
)

PLAIN, BOTH = "plain", "HTM and VTM"
ATTENTION_LABELS = "augmentation.cutmix.labels=attention"
# variant -> stack, further overrides
VARIANTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    PLAIN: ([], ()),
    PLAIN + AGAIN: ([], ()),
    "HTM": (["htm"], ()),
    "VTM": (["vtm"], ()),
    BOTH: (["htm", "vtm"], ()),
    "CutMix": (["cutmix"], ()),
    "TransMix": (["cutmix"], (ATTENTION_LABELS,)),
}
COMPILED = (PLAIN, "HTM", "VTM", BOTH)
WIDE_KAPPA = {CCT: 80}  # of the paper's CIFAR-100 run with VTM alone
FLOPS_PER_MAC = 6  # of training: 2 in the forward pass, twice that in the backward pass
# precision -> tolerated relative difference of the losses of equal steps, computed otherwise
TOLERANCES = {"float32": 1e-3, "bf16": 4e-2, "float16": 1e-2}
COMPARED = 4  # steps: a CUDA graph is replayed from the third on


def variant_configs(model: str, precision: str, compiling: str = "false") -> dict[str, Config]:
    """Variant -> configuration; those that are compiled, and plain eager, unless `false`."""
    if compiling != "false":
        compiled = (f"compile={compiling}",)
        return {
            **{
                name: step_config(model, VARIANTS[name][0], precision, *compiled)
                for name in COMPILED
            },
            f"{PLAIN}, eager": step_config(model, [], precision),
        }
    configs = {
        name: step_config(model, x, precision, *more) for name, (x, more) in VARIANTS.items()
    }
    if kappa := WIDE_KAPPA.get(model):
        wide = step_config(model, ["vtm"], precision, f"augmentation.vtm.kappa={kappa}")
        configs[f"VTM, kappa {kappa}"] = wide
    return configs


def measure_steps(scope: Scope, device: torch.device) -> list[Group]:
    """A group for each size and way of compiling."""
    rate = matrix_rate(scope.matrix, device)
    groups = []
    for model, batch_size in scope.steps:
        for compiling in scope.compiling:
            configs = variant_configs(model, precision_on(device), compiling)
            trainers = variant_trainers(configs, device)
            title = f"training step: {model}, batch of {batch_size}"
            title += "" if compiling == "false" else f", compile={compiling}"
            group = _group(title, trainers, batch_size, scope.pairs)
            group["about"] += f"; matrix products run at {rate / 1e12:.3g} TFLOP/s"
            plain = trainers[PLAIN]
            macs = count_macs(plain.module.model, plain.config.model.image_size).total
            for row in group["rows"].values():
                row["share_of_rate"] = FLOPS_PER_MAC * macs * row["images_per_second"] / rate
            groups.append(group)
    return groups


def measure_batches(scope: Scope, device: torch.device) -> list[Group]:
    """Plain, HTM and both at growing batch sizes."""
    groups = []
    for model, batch_size in scope.batches:
        configs = variant_configs(model, precision_on(device))
        trainers = variant_trainers({name: configs[name] for name in (PLAIN, "HTM", BOTH)}, device)
        title = f"batch size: {model}, batch of {batch_size}"
        groups.append(_group(title, trainers, batch_size, scope.few))
    return groups


def measure_oracle(scope: Scope, device: torch.device) -> list[Group]:
    """Our steps and the oracle's, which on a GPU runs in float16 like the published code."""
    ours = precision_on(device)
    theirs = "float16" if device.type == "cuda" else ours
    groups = []
    for model, batch_size in scope.oracle:
        trainers: dict[str, Trainer] = {}
        for name in (PLAIN, BOTH):
            stack = VARIANTS[name][0]
            trainers[name] = sharp_trainer(step_config(model, stack, ours), device)
            config = step_config(model, stack, theirs)
            trainers[f"{name}, oracle"] = oracle_trainer(config, device)
        title = f"oracle: {model}, batch of {batch_size}"
        group = _group(title, trainers, batch_size, scope.pairs)
        group["about"] = f"ours: {group['about']}; the oracle: {theirs}, a map of every block"
        groups.append(group)
    return groups


def _group(title: str, trainers: Mapping[str, Trainer], batch_size: int, rounds: int) -> Group:
    """Rows of all trainers; none, but the reason, if one does not fit or differs from eager."""
    about, rows = conditions(trainers[PLAIN]), dict[str, Row]()
    try:
        rows = step_rows(trainers, batch_size, rounds)
    except PlainError as error:
        about += f"; not timed: {error}"
    return {"title": title, "about": about, "rows": rows}


def variant_trainers(configs: Mapping[str, Config], device: torch.device) -> dict[str, Trainer]:
    """Trainers of one model; TransMix, which watches its model, and compiled ones have an own."""
    trainers: dict[str, Trainer] = {}
    for name, config in configs.items():
        own = not trainers or bool(config.compile) or config.augmentation.cutmix is not None
        shared = None if own else trainers[PLAIN].module.model
        trainers[name] = sharp_trainer(config, device, shared)
    return trainers


def step_rows(trainers: Mapping[str, Trainer], batch_size: int, rounds: int) -> dict[str, Row]:
    """Times steps of all trainers; compiled ones must first give the losses of eager ones."""
    steps = {name: step_of(trainer, batch_size) for name, trainer in trainers.items()}
    for name, trainer in trainers.items():
        check_against_eager(trainer, steps[name], batch_size)
    device = trainers[PLAIN].world.device
    rows = compare(steps, rounds, calls_on(device))
    for name, row in rows.items():
        key = name if name in steps else PLAIN
        stats = steps[key]()[0].output.stats
        row.update({name: float(stats[name]) for name in ("mixed_samples", "mixed_tokens")})
        row["images_per_second"] = 1000 * batch_size / row["ms"]["median"]
        row["peak_mib"] = peak_mib(steps[key], device)
        row.update(shares(trainers[key], steps[key], calls_on(device)))
    return rows


def check_against_eager(trainer: Trainer, step: Step, batch_size: int) -> float:
    """Returns the largest relative difference of a compiled trainer's first losses to eager ones.

    PlainError if it is too large. An eager trainer is not compared.
    """
    if not trainer.config.compile:
        return 0.0
    eager = sharp_trainer(replace(trainer.config, compile=False), trainer.world.device)
    expected = step_of(eager, batch_size)
    losses = [[float(each()[0].loss) for each in (step, expected)] for _ in range(COMPARED)]
    errors = [abs(ours / theirs - 1) for ours, theirs in losses]
    if not all(error <= TOLERANCES[trainer.recipe.precision] for error in errors):
        name, compiling = trainer.config.model.name, trainer.config.compile
        far = ", ".join(f"{error:.1e}" for error in errors)
        raise PlainError(f"{name}, compile={compiling}: losses differ from eager ones by {far}")
    return max(errors)


def conditions(trainer: Trainer) -> str:
    """Precision, dropout, attention and optimiser, in words."""
    config, recipe = trainer.config.model, trainer.recipe
    dropout = [f"{name} {value}" for name, value in vars(config).items() if "drop" in name]
    with autocast(trainer.world.device, recipe.precision):
        kernel = attention_kernel(trainer.module.model, config.image_size)
    return ", ".join([recipe.precision, *dropout, f"attention {kernel}", recipe.optimizer])


def shares(trainer: Trainer, step: Step, calls: int) -> Row:
    """The shares of eager steps in which the host matches pairs and, on a GPU, kernels run."""
    if trainer.config.compile:  # another function would be compiled anew
        return {}
    module, spent, row = trainer.module, list[float](), Row()
    rules = module.rules if module.htm else None
    if rules is not None:
        module.rules = rules._replace(match=partial(_timed, rules.match, spent))
    on_gpu = trainer.world.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA]) if on_gpu else nullcontext() as record:
        seconds = time_calls(step, calls)
    if rules is not None:
        module.rules = rules
    if spent:  # the oracle matches by itself
        row["matching"] = sum(spent) / seconds
    if record is not None:
        events = [event for event in record.events() if event.device_type == DeviceType.CUDA]
        kernels = [(event.time_range.start, event.time_range.end) for event in events]
        row["gpu_busy"] = covered(kernels) / 1e6 / seconds
    return row


def _timed(match: Callable[..., Tensor], spent: list[float], *args: Tensor) -> Tensor:
    """Records the seconds of the wait for the gain matrix, its copy and the solver."""
    start = time.perf_counter()
    donor = match(*args)
    spent.append(time.perf_counter() - start)
    return donor


def covered(intervals: list[tuple[float, float]]) -> float:
    """Total length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def matrix_rate(rows: int, device: torch.device) -> float:
    """FLOP/s of a product of square matrices in the precision of the steps, as a reference."""
    a = torch.randn(rows, rows, device=device, dtype=DTYPES[precision_on(device)])
    works: dict[str, Work] = {"product": lambda: a @ a}
    ms = time_in_turns(works, 20, calls_on(device))["product"]
    return 2 * rows**3 / (spread_of(ms).median / 1000)
