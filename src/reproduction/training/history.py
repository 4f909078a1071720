"""The figures of a run's epochs: means over the batches of the current one, all evaluations."""

from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from reproduction.system.progress import clock_time

if TYPE_CHECKING:
    from reproduction.training.loop import Trainer

MEDIAN_EPOCHS = 10
TOTALS = ("batches", "loss", "mixed", "tokens")  # summed over the epoch so far, and over all
MIXING = ("mixed_samples", "mixed_tokens", "mixed_share")
STATE = ("epochs", "totals", "all_totals", "mixing")


class Tests(NamedTuple):
    """Results on the test set after training with a validation split."""

    last: dict[str, float]  # of the last epoch
    selected: dict[str, float]  # of the best by validation


def renamed(result: dict[str, float]) -> dict[str, float]:
    """Names the results of a validation split: val_top1, val_top5, val_loss."""
    return {f"val_{key.removeprefix('eval_')}": value for key, value in result.items()}


def is_best(top1: list[float]) -> bool:
    """Whether the last epoch's accuracy is above all earlier ones."""
    return all(top1[-1] > other for other in top1[:-1])


class History:
    """Collects lines of metrics; `epochs` are those of the evaluated epochs."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []
        # see `end_epoch`, of the last complete epoch
        self.mixing: dict[str, float | None] = dict.fromkeys(MIXING)
        self.all_totals = dict.fromkeys(TOTALS, 0.0)
        self.restart()

    def restart(self) -> None:
        """Begins an epoch."""
        self.totals = dict.fromkeys(TOTALS, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Adds the lines of batches, of which skipped ones do not count."""
        for line in lines:  # one by one, so that the sums do not depend on when a run was resumed
            if line["skipped"]:
                continue
            mixed, tokens = line["mixed_samples"], line["mixed_tokens"]
            for totals in (self.totals, self.all_totals):
                totals["batches"] += 1
                totals["loss"] += line["loss"]
                totals["mixed"] += mixed
                totals["tokens"] += mixed * tokens

    def end_epoch(self, batch_size: float) -> None:
        """Notes mixed samples per batch and tokens in each of the epoch, and the share of all.

        `batch_size`: the mean over all batches.
        """
        batches, _, mixed, tokens = (self.totals[name] for name in TOTALS)
        share = self.all_totals["mixed"] / max(self.all_totals["batches"], 1)
        self.mixing = {
            "mixed_samples": mixed / max(batches, 1),
            "mixed_tokens": tokens / mixed if mixed else None,
            "mixed_share": round(share / max(batch_size, 1), 4),
        }

    def is_evaluated(self, epoch: int) -> bool:
        return bool(self.epochs) and self.epochs[-1]["epoch"] == epoch

    @property
    def top1(self) -> list[float]:
        """The accuracy of each evaluated epoch, on the validation split if there is one."""
        return [line["val_top1" if "val_top1" in line else "top1"] for line in self.epochs]

    @property
    def best_epoch(self) -> int:
        """The first epoch with the highest accuracy."""
        best: int = self.epochs[self.top1.index(max(self.top1))]["epoch"]
        return best

    def describe(self, trainer: "Trainer") -> str:
        """Returns the line of the completed epoch."""
        epoch, epochs = trainer.epoch, trainer.epochs
        batches, loss, mixed, tokens = (self.totals[name] for name in TOTALS)
        text = f"epoch {epoch:>{len(str(epochs))}}/{epochs}  loss {loss / max(batches, 1):.3f}"
        if trainer.module.htm is not None:
            text += f"  mixed {mixed / max(batches, 1):.1f} samples per batch"
            text += f" ({tokens / max(mixed, 1):.1f} tokens each)"
        if self.is_evaluated(epoch):
            text += "  validation" if "val_top1" in self.epochs[-1] else ""
            text += f"  top-1 {self.top1[-1]:.2f} %"
        left = trainer.seconds / epoch * (epochs - epoch)
        more = f", {clock_time(left)} left" if epoch < epochs else ""
        return f"{text}  [{trainer.seconds:.0f} s{more}]"

    def _accuracies(self, epoch: int) -> dict[str, Any]:
        top1, top5 = self.top1, [line["top5"] for line in self.epochs]
        since = epoch - MEDIAN_EPOCHS
        last = [line["top1"] for line in self.epochs if line["epoch"] > since]
        return {
            "top1_last": top1[-1],
            "top1_best": max(top1),
            "top1_median10": median(last),
            "top5_last": top5[-1],
            "top5_best": max(top5),
        }

    def _split_accuracies(self, tests: Tests) -> dict[str, Any]:
        """Returns null for accuracies over all epochs, which the test set was not evaluated on."""
        return {
            "top1_last": tests.last["top1"],
            "top5_last": tests.last["top5"],
            "top1_selected": tests.selected["top1"],
            "top5_selected": tests.selected["top5"],
            "selected_epoch": self.best_epoch,
            "val_top1_last": self.top1[-1],
            "val_top1_selected": max(self.top1),
            **dict.fromkeys(("top1_best", "top1_median10", "top5_best")),
        }

    def result(self, trainer: "Trainer", tests: Tests | None = None) -> dict[str, Any]:
        """Returns the results for summary.json."""
        evaluation = self.epochs[-1] if tests is None else tests.last
        return {
            **(self._accuracies(trainer.epoch) if tests is None else self._split_accuracies(tests)),
            "epochs": trainer.epoch,
            "steps": trainer.step,
            "images": trainer.images,
            "broken_images": evaluation.get("broken_images", 0),
            "seconds": round(trainer.seconds, 1),
            "images_per_second": round(trainer.images / trainer.metrics.seconds, 1),
            **({"skipped_steps": trainer.non_finite.skipped} if trainer.uses_scaler else {}),
            **self.mixing,
            "log": self.epochs,
        }
