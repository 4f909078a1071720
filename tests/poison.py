"""Steps that are not finite: an infinite loss, or gradients of nan, of a chosen micro-batch."""

from unittest import mock

import torch
from torch import Tensor

from tests.programs import PLACES
from tokenmixup import Output, training_loss

KINDS = ("loss", "gradient")


class Poison:
    """Takes the place of `training_loss` for micro-batches of which `count` make a step.

    What it does is in memory on the device, where a graph of the step reads it too. The gradients
    of an infinite loss are finite, and so is the loss whose gradients are nan.
    """

    def __init__(self, count: int, device: torch.device):
        self.calls = 0
        self.terms = torch.zeros(count, device=device)
        self.factors = torch.ones(count, device=device)

    def __call__(self, output: Output) -> Tensor:
        term, factor = [values[self.calls % len(values)] for values in (self.terms, self.factors)]
        self.calls += 1
        loss = training_loss(output)
        loss.register_hook(lambda gradient: gradient * factor)
        return loss + term

    def put(self, kind: str, part: int) -> None:
        if kind == "loss":
            self.terms[part] = torch.inf
        else:
            self.factors[part] = torch.nan

    def remove(self) -> None:
        self.terms.zero_()
        self.factors.fill_(1)


def poison_next(kind: str) -> None:
    """Lets the next micro-batch of this process not be finite."""
    poison = Poison(1, torch.device("cpu"))
    poison.put(kind, 0)

    def once(output: Output) -> Tensor:
        patch.stop()
        return poison(output)

    patch = mock.patch(PLACES["loss"], once)
    patch.start()
