"""Tells once, after a tenth of the epochs and three at least, that tau mixes nearly everything."""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from tokenmixup import HTM, Output

MOST = 0.95  # share of mixed samples above which the line is printed; a small one still rises
EARLIEST = 3  # epoch: before, the difficulty is still about that of guessing
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class MixedShare:
    """Collects the difficulties of one epoch on the device, without a wait before its end."""

    def __init__(self, htm: HTM | None, epochs: int):
        self.htm, self.epoch = htm, max(EARLIEST, math.ceil(epochs / 10))
        # by layer, of each micro-batch: difficulty and easy flag, 2 b
        self.seen: dict[int, list[Tensor]] = {}

    def add(self, epoch: int, outputs: Iterable[Output]) -> None:
        """Collects the outputs for a batch of an epoch, counted from 1."""
        for output in outputs if epoch == self.epoch else ():
            for mix in output.layers:
                values = torch.stack([mix.difficulty.detach(), mix.is_easy.float()])
                self.seen.setdefault(mix.layer, []).append(values)

    def warnings(self) -> Iterator[str]:
        """Yields a line for each layer that mixes nearly every sample, then forgets.

        For a finite tau: inf says so itself.
        """
        for layer, seen in self.seen.items():
            assert self.htm is not None
            difficulty, is_easy = torch.cat(seen, dim=1).cpu().numpy()
            difficulty = difficulty[np.isfinite(difficulty)]  # of skipped updates
            tau, share = round(self.htm.each[layer].tau, 4), is_easy.mean()
            if tau == math.inf or share <= MOST or not len(difficulty):
                continue
            nats = ", ".join(f"{x:.2f}" for x in np.quantile(difficulty, QUANTILES))
            yield (
                f"warning: augmentation.htm.tau={tau}: epoch {self.epoch} mixed {share:.0%} of the "
                f"samples at layer {layer}; their difficulty in nats is {nats} (quantiles 5, 25, "
                f"50, 75, 95 %); a smaller tau leaves hard ones as they are"
            )
        self.seen = {}
