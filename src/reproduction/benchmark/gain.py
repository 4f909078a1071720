"""The gain matrix: ours against forms of `b b t` memory, and how it grows.

Letters: b samples, t tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction.benchmark.memory import peak_bytes
from reproduction.benchmark.oracle import gain_by_repetition
from reproduction.benchmark.scope import Scope
from reproduction.benchmark.timing import (
    Work,
    calls_on,
    compared,
    spread_of,
    summary,
    time_in_turns,
)
from tokenmixup import gain_matrix, optimal_assignment

RHO = 0.005
Form = Callable[[Tensor, float], Tensor]


def gain_by_broadcast(saliency: Tensor, rho: float) -> Tensor:
    """Eq. 6 by broadcasting: `b t` -> `b b`, by way of `b b t`."""
    return (saliency[None] - saliency[:, None] - rho).clamp(min=0).sum(dim=2)


FORMS: Mapping[str, Form] = {
    "ours": gain_matrix,
    "by repetition": gain_by_repetition,
    "by broadcast": gain_by_broadcast,
}


def measure_gain(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """The forms beside each other, then the growth with samples and with tokens.

    The forms are timed twice: by a process of their own, with the C library's heap as anyone has
    it, and with the heap that a training run keeps, where memory costs them no page faults.
    """
    b, t = scope.gain
    samples = [(b, t) for b in scope.gain_samples]
    tokens = [(scope.detectors, t) for t in scope.gain_tokens]
    about = "float32; in a process of its own, with the C library's heap as it is"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:
        stock = own.submit(_forms, b, t, scope.pairs, device, about).result()
    kept = _forms(b, t, scope.pairs, device, "float32; freed memory is kept, as in training")
    return [
        stock,
        {**kept, "title": f"{kept['title']}, memory kept"},
        _growth("samples", samples, scope.pairs, device),
        _growth("tokens", tokens, scope.pairs, device),
    ]


def _forms(b: int, t: int, pairs: int, device: torch.device, about: str) -> dict[str, Any]:
    saliency = made_up(b, t, device)
    works: dict[str, Work] = {name: partial(form, saliency, RHO) for name, form in FORMS.items()}
    rows = compared(works, pairs, calls_on(device))
    for name, row in rows.items():
        row["peak_mib"] = peak_bytes(works.get(name, works["ours"]), device) / 2**20
    return {"title": f"gain matrix: {b} samples, {t} tokens", "about": about, "rows": rows}


def _growth(
    axis: str, sizes: Sequence[tuple[int, int]], pairs: int, device: torch.device
) -> dict[str, Any]:
    """Rows by size, and the exponents of a power law through all of them."""
    inputs = {f"{b} x {t}": made_up(b, t, device) for b, t in sizes}
    gains: dict[str, Work] = {key: partial(gain_matrix, s, RHO) for key, s in inputs.items()}
    matrices = {key: gain_matrix(saliency, RHO) for key, saliency in inputs.items()}
    solves: dict[str, Work] = {key: partial(optimal_assignment, m) for key, m in matrices.items()}
    times = time_in_turns(gains, pairs, calls_on(device))
    solving = time_in_turns(solves, pairs)
    rows: dict[str, Any] = {
        key: {
            "ms": summary(times[key]),
            "assignment_ms": spread_of(solving[key]).median,
            "peak_mib": peak_bytes(gains[key], device) / 2**20,
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
    told = ", ".join(f"{name} {value:.2f}" for name, value in exponents.items())
    return {
        "title": f"gain matrix: growth with {axis}",
        "about": f"samples x tokens; fitted exponents: {told}",
        "exponents": exponents,
        "rows": rows,
    }


def made_up(b: int, t: int, device: torch.device) -> Tensor:
    """Random saliency `b t`, each row a distribution."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(b, t, generator=generator).softmax(dim=1).to(device)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """k of y = c x^k, by least squares of the logarithms."""
    return round(float(np.polyfit(np.log(x), np.log(y), 1)[0]), 3)
