"""The figures of a run's epochs, a list with a dictionary for each: what they amount to.

An epoch has the sums over its batches so far, and once evaluated, the results of that.
"""

from statistics import median
from typing import Any, NamedTuple

from reproduction.system.progress import clock_time

Epoch = dict[str, Any]
MEDIAN_EPOCHS = 10
SUMS = ("batches", "loss", "mixed", "tokens")  # over the batches of an epoch
MIXING = ("mixed_samples", "mixed_tokens", "mixed_share")


class Tests(NamedTuple):
    """Results on the test set after training with a validation split."""

    last: dict[str, float]  # of the last epoch
    selected: dict[str, float]  # of the best by validation


def renamed(result: dict[str, float]) -> dict[str, float]:
    """Names the results of a validation split: val_top1, val_top5, val_loss."""
    return {f"val_{key.removeprefix('eval_')}": value for key, value in result.items()}


def begun(epoch: int) -> Epoch:
    """Returns the figures of an epoch, counted from 1, before its first batch."""
    return {"epoch": epoch, **dict.fromkeys(SUMS, 0.0)}


def add(epoch: Epoch, lines: list[dict[str, Any]]) -> None:
    """Adds the lines of batches to their epoch; updates that were skipped do not count."""
    for line in lines:  # one by one, so that the sums do not depend on when a run was resumed
        if not line["skipped"]:
            mixed = line["mixed_samples"]
            for name, value in zip(
                SUMS, (1, line["loss"], mixed, mixed * line["mixed_tokens"]), strict=True
            ):
                epoch[name] += value


def mixing(epochs: list[Epoch], batch_size: float) -> dict[str, float | None]:
    """Returns mixed samples per batch and tokens in each of the last epoch, and the share of all.

    `epochs`: complete ones; `batch_size`: the mean over all their batches.
    """
    if not epochs:
        return dict.fromkeys(MIXING)
    batches, _, mixed, tokens = (epochs[-1][name] for name in SUMS)
    share = sum(x["mixed"] for x in epochs) / max(sum(x["batches"] for x in epochs), 1)
    return {
        "mixed_samples": mixed / max(batches, 1),
        "mixed_tokens": tokens / mixed if mixed else None,
        "mixed_share": round(share / max(batch_size, 1), 4),
    }


def evaluations(epochs: list[Epoch]) -> list[dict[str, Any]]:
    """Returns the results of those that were evaluated, as in metrics.jsonl."""
    return [
        {key: value for key, value in epoch.items() if key not in SUMS}
        for epoch in epochs
        if len(epoch) > len(SUMS) + 1
    ]


def top1_of(epochs: list[Epoch]) -> list[float]:
    """The accuracy of each evaluated epoch, on the validation split if there is one."""
    return [line["val_top1" if "val_top1" in line else "top1"] for line in evaluations(epochs)]


def is_best(top1: list[float]) -> bool:
    """Whether the last epoch's accuracy is above all earlier ones."""
    return all(top1[-1] > other for other in top1[:-1])


def best_epoch(epochs: list[Epoch]) -> int:
    """The first epoch with the highest accuracy."""
    top1 = top1_of(epochs)
    best: int = evaluations(epochs)[top1.index(max(top1))]["epoch"]
    return best


def describe(epochs: list[Epoch], of: int, mixes: bool, seconds: float) -> str:
    """Returns the line of the last epoch, `of` how many, after `seconds` for all of them."""
    last, number = epochs[-1], len(epochs)
    batches, loss, mixed, tokens = (last[name] for name in SUMS)
    text = f"epoch {number:>{len(str(of))}}/{of}  loss {loss / max(batches, 1):.3f}"
    if mixes:
        text += f"  mixed {mixed / max(batches, 1):.1f} samples per batch"
        text += f" ({tokens / max(mixed, 1):.1f} tokens each)"
    if evaluations([last]):
        text += "  validation" if "val_top1" in last else ""
        text += f"  top-1 {top1_of([last])[0]:.2f} %"
    left = f", {clock_time(seconds / number * (of - number))} left" if number < of else ""
    return f"{text}  [{seconds:.0f} s{left}]"


def accuracies(epochs: list[Epoch], tests: Tests | None = None) -> dict[str, Any]:
    """Returns the accuracies of a run for summary.json.

    With a validation split, the test set was evaluated for `tests` alone: accuracies over all
    epochs are null.
    """
    top1 = top1_of(epochs)
    if tests is not None:
        return {
            "top1_last": tests.last["top1"],
            "top5_last": tests.last["top5"],
            "top1_selected": tests.selected["top1"],
            "top5_selected": tests.selected["top5"],
            "selected_epoch": best_epoch(epochs),
            "val_top1_last": top1[-1],
            "val_top1_selected": max(top1),
            **dict.fromkeys(("top1_best", "top1_median10", "top5_best")),
        }
    top5 = [line["top5"] for line in evaluations(epochs)]
    last = [line["top1"] for line in evaluations(epochs[-MEDIAN_EPOCHS:])]
    return {
        "top1_last": top1[-1],
        "top1_best": max(top1),
        "top1_median10": median(last),
        "top5_last": top5[-1],
        "top5_best": max(top5),
    }
