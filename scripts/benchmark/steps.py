"""Benchmarks of training steps: plain, HTM, VTM, both, and the oracle.

Every sample is easy (tau = inf) and attention is sharp, so that tokens are really replaced. The
variants train the same weights in turn, each with its own optimiser.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reproduction.config import Config
from reproduction.models.build import attention_kernel, count_macs
from reproduction.runs.compose import config_of
from reproduction.system.timing import spread_of, time_in_turns
from reproduction.training.evaluate import DTYPES, autocast
from reproduction.training.loop import MicroBatch, Trainer
from scripts.benchmark.measure import (
    AGAIN,
    CCT,
    TRAINED_AS,
    Row,
    Scope,
    calls_on,
    compare,
    peak_mib,
)
from scripts.benchmark.speed import FLOPS_PER_MAC, bare_trainer, step_of
from tests.oracle import Oracle

PLAIN = "plain"
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    PLAIN + AGAIN: [],
    "HTM": ["htm"],
    "VTM": ["vtm"],
    "HTM and VTM": ["htm", "vtm"],
}
WIDE_KAPPA = {CCT: 80}  # of the paper's CIFAR-100 run with VTM alone
SHARPNESS = 12  # factor on the qkv weights of a new model, whose attention is nearly uniform

Step = Callable[[], list[MicroBatch]]


def precision_on(device: torch.device) -> str:
    """bf16 on a GPU; float32 on a CPU, which has no fast lower precision."""
    return "bf16" if device.type == "cuda" else "float32"


def measure_steps(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """A group for each size: times, ratios to plain, images/s, peak memory, mixing."""
    rate = matrix_rate(scope.matrix, device)
    return [_group(model, size, scope, device, rate) for model, size in scope.steps]


def _group(
    model: str, batch_size: int, scope: Scope, device: torch.device, rate: float
) -> dict[str, Any]:
    configs = variant_configs(model, precision_on(device), scope.compiled)
    shared = sharp_trainer(configs[PLAIN], device).module.model
    steps = {
        name: step_of(sharp_trainer(config, device, shared), batch_size)
        for name, config in configs.items()
    }
    rows = compare(steps, scope.pairs, calls_on(device))
    macs = count_macs(shared, configs[PLAIN].model.image_size).total
    for name, row in rows.items():
        row.update(describe_step(steps[name], batch_size, row, device))
        row["share_of_rate"] = FLOPS_PER_MAC * macs * row["images_per_second"] / rate
    return {
        "title": f"training step: {model}, batch of {batch_size}",
        "about": f"{conditions(configs[PLAIN], shared, device)}; matrix products run at "
        f"{rate / 1e12:.3g} TFLOP/s",
        "rows": rows,
    }


def measure_oracle(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """Our steps and the oracle's, which on a GPU runs in float16 like the published code."""
    return [_oracle_group(model, size, scope.pairs, device) for model, size in scope.oracle]


def _oracle_group(model: str, batch_size: int, pairs: int, device: torch.device) -> dict[str, Any]:
    ours = precision_on(device)
    theirs = "float16" if device.type == "cuda" else ours
    steps: dict[str, Step] = {}
    for name in (PLAIN, "HTM and VTM"):
        config = step_config(model, VARIANTS[name], ours)
        trainer = sharp_trainer(config, device)
        steps[name] = step_of(trainer, batch_size)
        oracle = oracle_trainer(step_config(model, VARIANTS[name], theirs), device)
        steps[f"{name}, oracle"] = step_of(oracle, batch_size)
    rows = compare(steps, pairs, calls_on(device))
    for name, row in rows.items():
        row.update(describe_step(steps.get(name, steps[PLAIN]), batch_size, row, device))
    setup = conditions(config, trainer.module.model, device)
    about = f"ours: {setup}; the oracle: {theirs}, a map of every block"
    return {"title": f"oracle: {model}, batch of {batch_size}", "about": about, "rows": rows}


def variant_configs(model: str, precision: str, compiled: bool = False) -> dict[str, Config]:
    """Variant -> configuration, for the variants that are measured with a model.

    `compiled` adds plain and both as one graph each.
    """
    configs = {name: step_config(model, stack, precision) for name, stack in VARIANTS.items()}
    if kappa := WIDE_KAPPA.get(model):
        wide = step_config(model, ["vtm"], precision, f"augmentation.vtm.kappa={kappa}")
        configs[f"VTM, kappa {kappa}"] = wide
    for name in (PLAIN, "HTM and VTM") if compiled else ():
        config = step_config(model, VARIANTS[name], precision, "compile=true")
        configs[f"{name}, compiled"] = config
    return configs


def step_config(model: str, stack: list[str], precision: str, *overrides: str) -> Config:
    """The model's own recipe without input mixup; HTM mixes every sample unless overridden."""
    dataset, recipe, _ = TRAINED_AS[model]
    settings = [f"model={model}", f"dataset={dataset}", f"recipe={recipe}"]
    settings += [f"augmentation=[{','.join(stack)}]", f"recipe.precision={precision}"]
    settings += ["augmentation.htm.tau=inf"] if "htm" in stack else []
    settings += overrides  # the last value of a key counts
    return config_of(settings)


def sharp_trainer(
    config: Config,
    device: torch.device,
    shared: nn.Module | None = None,
    sharpness: float = SHARPNESS,
) -> Trainer:
    """A trainer of `shared`, or of a new model with sharp attention, so that saliency differs."""
    classes = TRAINED_AS[config.model.name][2]
    if shared is not None:
        return bare_trainer(config, device, classes, shared)
    trainer = bare_trainer(config, device, classes)
    model: Any = trainer.module.model
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(sharpness)
    return trainer


def oracle_trainer(config: Config, device: torch.device) -> Trainer:
    """A `sharp_trainer` that trains with the oracle, in torch's default memory format."""
    trainer = sharp_trainer(config, device)
    trainer.module.to(memory_format=torch.contiguous_format)
    trainer.parallel = Oracle(trainer.module)
    return trainer


def conditions(config: Config, model: nn.Module, device: torch.device) -> str:
    """Precision, dropout, attention and optimiser, in words."""
    dropout = [f"{name} {value}" for name, value in vars(config.model).items() if "drop" in name]
    with autocast(device, config.recipe.precision):
        kernel = attention_kernel(model, config.model.image_size)
    return ", ".join(
        [config.recipe.precision, *dropout, f"attention {kernel}", config.recipe.optimizer]
    )


def describe_step(step: Step, batch_size: int, row: Row, device: torch.device) -> Row:
    """The other columns of a timed step: throughput, peak memory and mixing."""
    (micro_batch,) = step()
    return {
        "images_per_second": 1000 * batch_size / row["ms"]["median"],
        "peak_mib": peak_mib(step, device),
        "mixed_samples": float(micro_batch.output.stats["mixed_samples"]),
        "mixed_tokens": float(micro_batch.output.stats["mixed_tokens"]),
    }


def matrix_rate(rows: int, device: torch.device) -> float:
    """FLOP/s of a product of square matrices in the precision of the steps, as a reference."""
    a = torch.randn(rows, rows, device=device, dtype=DTYPES[precision_on(device)])
    ms = time_in_turns({"product": lambda: a @ a}, 20, calls_on(device))["product"]
    return 2 * rows**3 / (spread_of(ms).median / 1000)
