"""Part a: the assignment's kernel against scipy's solver, in values and in time."""

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scripts.benchmark.timing import time_calls
from scripts.on_gpu.matrices import Matrix, deficit, matrices
from scripts.on_gpu.sheet import Sheet
from tokenmixup.assignment import optimal_donors

VALUES, TIMES = "assignment: matrices", "assignment: times"
SIZES = (64, 128, 252, 504)  # samples
EASY_SHARES = (0.05, 0.5, 1.0)  # of easy samples; 19 kinds of matrices for each: 228
TIMED = ("trained, class token, late", "trained, pooled, late")
EXACT = 2**-28  # the bound of the kernel: a deficit relative to easy samples x the largest gain
CALLS, ROUNDS = 30, 9  # in a graph; of it
Donors = Callable[[Tensor, Tensor], Tensor]


def measure_assignment(sheet: Sheet) -> None:
    """Times first, of trained saliency, since an endless search ends the part; then all kinds."""
    if sheet.device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from tokenmixup.device_assignment import device_donors

    sizes = SIZES if sheet.device.type == "cuda" else (8,)
    for b in sizes:
        for share in EASY_SHARES[1:]:
            chosen = [each for each in matrices(b, share) if each.kind in TIMED]
            for matrix in chosen:
                name = f"{round(share * b)} of {b} easy, {matrix.kind}"
                if not sheet.has(TIMES, name):
                    sheet.put(TIMES, name, {"partly": "trying"})
                    with sheet.trying(TIMES, name):
                        sheet.put(TIMES, name, times(matrix, device_donors, sheet.device))
    for b in sizes:
        if not sheet.has(VALUES, f"{b} samples"):
            with sheet.trying(VALUES, f"{b} samples"):
                compare_donors(sheet, b, device_donors)


def times(matrix: Matrix, donors: Donors, device: torch.device) -> dict[str, Any]:
    """Medians of the kernel, in a graph on a GPU, and of scipy on the host without its copies."""
    gain, is_easy = matrix.gain.to(device), matrix.is_easy.to(device)
    missing = deficit(matrix, donors(gain, is_easy))
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                donors(gain, is_easy)
        ours = [time_calls(graph.replay) / CALLS for _ in range(ROUNDS)]
    else:
        ours = [time_calls(lambda: donors(gain, is_easy))]
    theirs = [time_calls(lambda: optimal_donors(matrix.gain, matrix.is_easy)) for _ in range(5)]
    return {
        "kernel [us]": 1e6 * statistics.median(ours),
        "scipy [us]": 1e6 * statistics.median(theirs),
        "scipy / kernel": statistics.median(theirs) / statistics.median(ours),
        "relative deficit": missing,
    }


def compare_donors(sheet: Sheet, b: int, donors: Donors) -> None:
    """A row for all kinds and shares of a size, and for gains that are not finite.

    It names the matrix that is tried, so that one whose search does not end is known.
    """
    count, worst, wrong, title, name = 0, 0.0, list[str](), VALUES, f"{b} samples"
    for share in EASY_SHARES:
        for matrix in matrices(b, share, seed=1):
            what = f"{matrix.kind}, {round(share * b)} easy"
            figures = {
                "matrices": count,
                "largest relative deficit": worst,
                "not exact": len(wrong),
            }
            sheet.put(title, name, {**figures, "partly": f"trying {what}"})
            gain, is_easy = matrix.gain.to(sheet.device), matrix.is_easy.to(sheet.device)
            donor = donors(gain, is_easy)
            count += 1
            try:
                missing = deficit(matrix, donor)
            except ValueError as error:
                wrong.append(f"{what}: {error}")
                continue
            worst = max(worst, missing)
            if missing > EXACT * b or not torch.equal(donor, donors(gain, is_easy)):
                wrong.append(what)
    is_easy = torch.arange(b, device=sheet.device) < b // 2
    for bad in (float("nan"), float("inf"), -float("inf")):
        gain = torch.rand(b, b, device=sheet.device, dtype=torch.float64)
        gain[0, 1] = bad
        expected = torch.arange(b, device=sheet.device).where(~is_easy, -1)
        if not torch.equal(donors(gain, is_easy), expected):
            wrong.append(f"a gain of {bad}")
    figures = {"matrices": count, "largest relative deficit": worst, "not exact": len(wrong)}
    sheet.put(title, name, {**figures, "which": ", ".join(wrong) or "none"})
