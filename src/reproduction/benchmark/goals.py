"""What a fast TokenMixup has to show, beside what was measured. Imports no torch."""

from itertools import chain
from typing import Any, NamedTuple

from reproduction.benchmark.records import Report

CCT_2, CCT_7 = "training step: cct_2_3x2, batch of 128", "training step: cct_7_3x1, batch of 16"
VIT_ON_GPU = "training step: vit_base_patch16_224, batch of 128"
GAIN = "gain matrix: 504 samples, 196 tokens"
GAIN_KEPT = f"{GAIN}, memory kept"


class Goal(NamedTuple):
    """`sign` is <= or >=; the figure stands under `column` of a row, or is a group's exponent."""

    what: str
    sign: str
    bound: float
    title: str
    row: str
    column: str = "ratio"


GOALS = (
    Goal("HTM / plain, CCT-2/3x2", "<=", 1.05, CCT_2, "HTM"),
    Goal("VTM / plain, CCT-2/3x2", "<=", 1.04, CCT_2, "VTM"),
    Goal("HTM / plain, CCT-7/3x1", "<=", 1.05, CCT_7, "HTM"),
    Goal("VTM / plain, CCT-7/3x1", "<=", 1.04, CCT_7, "VTM"),
    Goal("HTM / plain, ViT-B/16 on a GPU", "<=", 1.05, VIT_ON_GPU, "HTM"),
    Goal("gradient / attention", ">=", 30, "detectors: cct_7_3x1, batch of 128", "gradient"),
    Goal("gain matrix: repeated / ours", ">=", 10, GAIN, "by repetition"),
    Goal("gain matrix: broadcast / ours", ">=", 3, GAIN, "by broadcast"),
    Goal("the same, freed memory kept: repeated / ours", ">=", 10, GAIN_KEPT, "by repetition"),
    Goal("the same, freed memory kept: broadcast / ours", ">=", 3, GAIN_KEPT, "by broadcast"),
    Goal("memory grows with b to the", "<=", 2, "gain matrix: growth with samples", "", "memory"),
    Goal("memory grows with t to the", "<=", 1, "gain matrix: growth with tokens", "", "memory"),
    Goal(
        "plain step: oracle / ours, CCT-7/3x1",
        ">=",
        1.1,
        "oracle: cct_7_3x1, batch of 16",
        "plain, oracle",
    ),
    Goal("train.py --help [ms]", "<=", 2000, "start-up", "python train.py --help", "ms"),
    Goal("a refusal [ms]", "<=", 3000, "start-up", "python train.py recipe.epochs=0", "ms"),
)


class Figure(NamedTuple):
    """A measured value, and where it was timed the 95 % confidence interval of this median."""

    value: float
    interval: tuple[float, float] | None = None


def figure_of(goal: Goal, report: Report) -> Figure | None:
    """None if it is not measured."""
    for group in chain.from_iterable(report["sections"].values()):
        if group["title"] == goal.title:
            if not goal.row:
                return Figure(group["exponents"][goal.column])
            found: Any = group["rows"][goal.row][goal.column]
            return Figure(found["median"], tuple(found["interval"]))
    return None


def verdict(goal: Goal, figure: Figure) -> str:
    """Whether the value meets the goal, and whether that is beyond its interval."""
    is_met = figure.value <= goal.bound if goal.sign == "<=" else figure.value >= goal.bound
    word = "met" if is_met else "missed"
    low, high = figure.interval or (figure.value,) * 2
    return f"{word}, within noise" if low <= goal.bound <= high and low < high else word
