"""The figures of a run's epochs: means over the batches of the current one, all evaluations."""

from statistics import median
from typing import TYPE_CHECKING, Any

from reproduction.system.progress import clock_time

if TYPE_CHECKING:
    from reproduction.training.loop import Trainer

MEDIAN_EPOCHS = 10
TOTALS = ("batches", "loss", "mixed", "tokens")  # summed over the epoch so far, and over all
STATE = ("epochs", "totals", "all_totals", "mixing")


class History:
    """Collects lines of metrics; `epochs` are those of the evaluated epochs."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []
        self.mixing: dict[str, float | None] = {}  # see `end_epoch`, of the last complete epoch
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
        lines = [line for line in lines if not line["skipped"]]
        for totals in (self.totals, self.all_totals):
            totals["batches"] += len(lines)
            totals["loss"] += sum(line["loss"] for line in lines)
            totals["mixed"] += sum(line["mixed_samples"] for line in lines)
            totals["tokens"] += sum(x["mixed_samples"] * x["mixed_tokens"] for x in lines)

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

    def is_best(self, epoch: int) -> bool:
        """Whether this, the last epoch, was evaluated and beats all earlier ones."""
        top1 = [line["top1"] for line in self.epochs]
        return self.is_evaluated(epoch) and all(top1[-1] > other for other in top1[:-1])

    def describe(self, trainer: "Trainer") -> str:
        """Returns the line of the completed epoch."""
        epoch, epochs = trainer.epoch, trainer.epochs
        batches, loss, mixed, tokens = (self.totals[name] for name in TOTALS)
        text = f"epoch {epoch:>{len(str(epochs))}}/{epochs}  loss {loss / max(batches, 1):.3f}"
        if trainer.module.htm is not None:
            text += f"  mixed {mixed / max(batches, 1):.1f} samples per batch"
            text += f" ({tokens / max(mixed, 1):.1f} tokens each)"
        if self.is_evaluated(epoch):
            text += f"  top-1 {self.epochs[-1]['top1']:.2f} %"
        left = trainer.seconds / epoch * (epochs - epoch)
        more = f", {clock_time(left)} left" if epoch < epochs else ""
        return f"{text}  [{trainer.seconds:.0f} s{more}]"

    def result(self, trainer: "Trainer") -> dict[str, Any]:
        """Returns the results for summary.json."""
        top1 = [line["top1"] for line in self.epochs]
        top5 = [line["top5"] for line in self.epochs]
        since = trainer.epoch - MEDIAN_EPOCHS
        last = [line["top1"] for line in self.epochs if line["epoch"] > since]
        counts, skipped = trainer.non_finite.counts, trainer.non_finite.skipped
        return {
            "top1_last": top1[-1],
            "top1_best": max(top1),
            "top1_median10": median(last),
            "top5_last": top5[-1],
            "top5_best": max(top5),
            "epochs": trainer.epoch,
            "steps": trainer.step,
            "images": trainer.images,
            "broken_images": self.epochs[-1].get("broken_images", 0),
            "seconds": round(trainer.seconds, 1),
            "images_per_second": round(trainer.images / trainer.metrics.seconds, 1),
            **({"skipped_steps": skipped} if counts else {}),
            **self.mixing,
            "log": self.epochs,
        }
