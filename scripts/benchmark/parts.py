"""Benchmarks of HTM: its detectors (Table 3), its parts, and the gain matrix.

Letters: b samples, t tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.studies.study import Settings
from reproduction.system.timing import Work, spread_of, time_in_turns
from reproduction.training.evaluate import autocast
from scripts.benchmark.latency import build_step, detector_configs, mix, mixing_batch
from scripts.benchmark.measure import Scope, calls_on, compare, peak_mib, summarize
from scripts.benchmark.steps import precision_on
from tests.oracle import gain_by_repetition
from tokenmixup import Rules, difficulty, gain_matrix, mix_horizontal, optimal_assignment

RHO = 0.005


def measure_detectors(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """The three detectors, each with assignment and mixing, relative to attention."""
    configs, precision = detector_configs(Settings()), precision_on(device)
    works: dict[str, Work] = {
        name: build_step(configs[name], scope.detectors, device, precision)
        for name in ("attention", "gradient", "random")
    }
    return [
        {
            "title": _title("detectors", configs["attention"], scope),
            "about": f"{precision}, gradient in float32; saliency, assignment and mixing",
            "rows": compare(works, scope.pairs, calls_on(device)),
        }
    ]


def measure_parts(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """The parts of HTM with the attention detector, relative to its three stages together."""
    config, precision = detector_configs(Settings())["attention"], precision_on(device)
    works = htm_parts(config, scope.detectors, device, precision)
    about = f"{precision}; all three: saliency, assignment (gain matrix and host), mixing"
    rows = compare(works, scope.pairs, calls_on(device))
    return [{"title": _title("parts of HTM", config, scope), "about": about, "rows": rows}]


def _title(topic: str, config: Config, scope: Scope) -> str:
    return f"{topic}: {config.model.name}, batch of {scope.detectors}"


def htm_parts(
    config: Config, batch_size: int, device: torch.device, precision: str
) -> dict[str, Work]:
    """Part -> its work on the input of the HTM block for a batch of random images."""
    module, images, targets, entry = mixing_batch(config, batch_size, device, precision)
    htm: Any = module.htm
    scorenet: Any = module.scorenet
    block_input = dataclasses.replace(entry)
    with autocast(device, precision):
        saliency = block_input.own_saliency()
    rho = htm.rho_for(saliency.shape[1])
    gain = gain_matrix(saliency, rho)
    donor = optimal_assignment(gain).to(device)
    easy = torch.zeros(batch_size, device=device)
    rules = Rules(match=lambda *_: donor)
    blend = partial(mix_horizontal, tau=1.0, rho=rho, rules=rules)
    exchange = blend(entry.tokens, targets, saliency, easy).exchange

    def autocasting(work: Work) -> None:
        with autocast(device, precision):
            work()

    parts: dict[str, Work] = {
        "all three": lambda: mix(module, images, targets, entry),
        "saliency": lambda: dataclasses.replace(entry).own_saliency(),
        "gain matrix": lambda: gain_matrix(saliency, rho),
        "copy and assignment on the host": lambda: optimal_assignment(gain).to(device),
        "mixing of tokens and labels": lambda: blend(entry.tokens, targets, saliency, easy),
        "mixing of projections": lambda: [exchange(y) for y in block_input.projected],
        "ScoreNet and difficulty": lambda: difficulty(scorenet(entry.tokens), targets),
    }
    return {name: partial(autocasting, work) for name, work in parts.items()}


def gain_by_broadcast(saliency: Tensor, rho: float) -> Tensor:
    """Eq. 6 by broadcasting: `b t` -> `b b`, via a `b b t` tensor."""
    return (saliency[None] - saliency[:, None] - rho).clamp(min=0).sum(dim=2)


FORMS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "ours": gain_matrix,
    "by repetition": gain_by_repetition,
    "by broadcast": gain_by_broadcast,
}


def measure_gain(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """The forms of the gain matrix, then its growth with samples and with tokens.

    The forms are timed twice: in a new process with the C library's default heap, and with the heap
    of a training run, which keeps freed memory and so avoids page faults.
    """
    b, t = scope.gain
    samples = [(b, t) for b in scope.gain_samples]
    tokens = [(scope.detectors, t) for t in scope.gain_tokens]
    about = "float32; in a process of its own, with the C library's heap as it is"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        stock = pool.submit(_forms, b, t, scope.pairs, device, about).result()
    kept = _forms(b, t, scope.pairs, device, "float32; freed memory is kept, as in training")
    return [
        stock,
        {**kept, "title": f"{kept['title']}, memory kept"},
        _growth("samples", samples, scope.pairs, device),
        _growth("tokens", tokens, scope.pairs, device),
    ]


def _forms(b: int, t: int, pairs: int, device: torch.device, about: str) -> dict[str, Any]:
    saliency = random_saliency(b, t, device)
    works: dict[str, Work] = {name: partial(form, saliency, RHO) for name, form in FORMS.items()}
    rows = compare(works, pairs, calls_on(device))
    for name, row in rows.items():
        row["peak_mib"] = peak_mib(works.get(name, works["ours"]), device)
    return {"title": f"gain matrix: {b} samples, {t} tokens", "about": about, "rows": rows}


def _growth(
    axis: str, sizes: Sequence[tuple[int, int]], pairs: int, device: torch.device
) -> dict[str, Any]:
    """A row for each size, and the exponents of power laws fitted to them."""
    inputs = {f"{b} x {t}": random_saliency(b, t, device) for b, t in sizes}
    gains: dict[str, Work] = {key: partial(gain_matrix, s, RHO) for key, s in inputs.items()}
    matrices = {key: gain_matrix(saliency, RHO) for key, saliency in inputs.items()}
    solves: dict[str, Work] = {key: partial(optimal_assignment, m) for key, m in matrices.items()}
    times = time_in_turns(gains, pairs, calls_on(device))
    solving = time_in_turns(solves, pairs)
    rows: dict[str, Any] = {
        key: {
            "ms": summarize(times[key]),
            "assignment_ms": spread_of(solving[key]).median,
            "peak_mib": peak_mib(gains[key], device),
        }
        for key in inputs
    }
    x = [size[axis == "tokens"] for size in sizes]
    columns = {
        "time": [row["ms"]["median"] for row in rows.values()],
        "memory": [row["peak_mib"] for row in rows.values()],
        "time of the assignment": [row["assignment_ms"] for row in rows.values()],
    }
    exponents = {name: exponent(x, y) for name, y in columns.items()}
    fits = ", ".join(f"{name} {value:.2f}" for name, value in exponents.items())
    return {
        "title": f"gain matrix: growth with {axis}",
        "about": f"samples x tokens; fitted exponents: {fits}",
        "exponents": exponents,
        "rows": rows,
    }


def random_saliency(b: int, t: int, device: torch.device) -> Tensor:
    """Random saliency `b t`, each row a distribution."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(b, t, generator=generator).softmax(dim=1).to(device)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Fits k of y = c x^k by least squares of the logarithms."""
    return round(float(np.polyfit(np.log(x), np.log(y), 1)[0]), 3)
