"""Training steps of plain, HTM, VTM and both.

Every sample is easy (tau = inf) and attention is sharp, so that tokens are really replaced. The
variants train the same weights in turn, each with an optimiser of its own.
"""

from collections.abc import Callable
from typing import Any

import torch

from reproduction.benchmark.memory import peak_bytes
from reproduction.benchmark.scope import Scope
from reproduction.benchmark.timing import AGAIN, Row, calls_on, compared, spread_of, time_in_turns
from reproduction.benchmark.trainers import bare_trainer, oracle_trainer, step_config, step_of
from reproduction.config import Config
from reproduction.models.build import count_macs
from reproduction.training.evaluate import DTYPES
from tokenmixup import Output

PLAIN = "plain"
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    PLAIN + AGAIN: [],
    "HTM": ["htm"],
    "VTM": ["vtm"],
    "HTM and VTM": ["htm", "vtm"],
}
WIDE_KAPPA = {"cct_7_3x1": 80}  # of the paper's CIFAR-100 run with VTM alone
FLOPS_PER_MAC = 6  # of training: 2 in the forward pass, twice that in the backward pass

Step = Callable[[], Output]


def precision_on(device: torch.device) -> str:
    """What is timed: float32 on a CPU, which has no fast lower precision."""
    return "bf16" if device.type == "cuda" else "float32"


def measure_steps(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """A group for each size: times, ratios to plain, images/s, peak memory, what was mixed."""
    rate = matrix_rate(scope.matrix, device)
    return [_group(model, size, scope.pairs, device, rate) for model, size in scope.steps]


def _group(
    model: str, batch_size: int, pairs: int, device: torch.device, rate: float
) -> dict[str, Any]:
    configs = variant_configs(model, precision_on(device), compiled=device.type == "cuda")
    first = bare_trainer(configs[PLAIN], device)
    shared = first.module.model
    steps = {
        name: step_of(bare_trainer(config, device, shared), batch_size)
        for name, config in configs.items()
    }
    rows = compared(steps, pairs, calls_on(device))
    macs = count_macs(shared, configs[PLAIN].model.image_size).total
    for name, row in rows.items():
        row.update(facts_of(steps[name], batch_size, row, device))
        row["share_of_rate"] = FLOPS_PER_MAC * macs * row["images_per_second"] / rate
    return {
        "title": f"training step: {model}, batch of {batch_size}",
        "about": f"{conditions(configs[PLAIN])}; matrix products run at {rate / 1e12:.3g} TFLOP/s",
        "rows": rows,
    }


def measure_oracle(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """Our steps beside the oracle's, which on a GPU runs in float16 as the published code."""
    return [_oracle_group(model, size, scope.pairs, device) for model, size in scope.oracle]


def _oracle_group(model: str, batch_size: int, pairs: int, device: torch.device) -> dict[str, Any]:
    ours = precision_on(device)
    theirs = "float16" if device.type == "cuda" else ours
    steps: dict[str, Step] = {}
    for name in (PLAIN, "HTM and VTM"):
        config = step_config(model, VARIANTS[name], ours)
        steps[name] = step_of(bare_trainer(config, device), batch_size)
        its = step_config(model, VARIANTS[name], theirs)
        steps[f"{name}, oracle"] = step_of(oracle_trainer(its, device), batch_size)
    rows = compared(steps, pairs, calls_on(device))
    for name, row in rows.items():
        row.update(facts_of(steps.get(name, steps[PLAIN]), batch_size, row, device))
    about = f"ours: {conditions(config)}; the oracle: {theirs}, a map of every block"
    return {"title": f"oracle: {model}, batch of {batch_size}", "about": about, "rows": rows}


def variant_configs(model: str, precision: str, compiled: bool = False) -> dict[str, Config]:
    """Variant -> configuration of a run, for the variants that a model is measured with.

    `compiled` adds plain and both with compiled blocks.
    """
    configs = {name: step_config(model, stack, precision) for name, stack in VARIANTS.items()}
    if kappa := WIDE_KAPPA.get(model):
        wide = step_config(model, ["vtm"], precision, f"augmentation.vtm.kappa={kappa}")
        configs[f"VTM, kappa {kappa}"] = wide
    for name in (PLAIN, "HTM and VTM") if compiled else ():
        config = step_config(model, VARIANTS[name], precision, "compile=true")
        configs[f"{name}, compiled"] = config
    return configs


def conditions(config: Config) -> str:
    """Precision, dropout and optimiser, in words."""
    dropout = [f"{name} {value}" for name, value in vars(config.model).items() if "drop" in name]
    return ", ".join([config.recipe.precision, *dropout, config.recipe.optimizer])


def facts_of(step: Step, batch_size: int, row: Row, device: torch.device) -> Row:
    """What else is told of a timed step."""
    stats = step().stats
    return {
        "images_per_second": 1000 * batch_size / row["ms"]["median"],
        "peak_mib": peak_bytes(step, device) / 2**20,
        "mixed_samples": float(stats["mixed_samples"]),
        "mixed_tokens": float(stats["mixed_tokens"]),
    }


def matrix_rate(rows: int, device: torch.device) -> float:
    """FLOP/s of a square product in the precision of the steps: what the machine can do."""
    a = torch.randn(rows, rows, device=device, dtype=DTYPES[precision_on(device)])
    ms = time_in_turns({"product": lambda: a @ a}, 20, calls_on(device))["product"]
    return 2 * rows**3 / (spread_of(ms).median / 1000)
