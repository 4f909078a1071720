"""Training runs of the published code, followed with the published switches.

60 AdamW steps on scikit-learn's digits, in float64 with one thread. Learning amplifies differences:
a rule that replaces one other token in one step moves all later losses.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from tests.reproduction.recorded import Recorded
from tests.reproduction.test_published import published_module
from tokenmixup import Output, TokenMixup, training_loss
from tokenmixup.assignment import gain_matrix
from tokenmixup.rules import MASK_RULES

slow = pytest.mark.slow
NAMES = (
    *(pytest.param(name, marks=slow) for name in ("plain", "htm", "vtm")),
    *("htm_then_vtm", "vtm_then_htm"),
)
CLOSE = 1e-6  # of a loss, in nats


class Step(NamedTuple):
    """How far a step is from the recorded one."""

    loss: float
    score_loss: float
    mixed_samples: int

    @property
    def is_recorded(self) -> bool:
        return self.loss <= CLOSE and self.score_loss <= CLOSE and self.mixed_samples == 0


def digits() -> tuple[Tensor, Tensor]:
    """Returns all digits at 32 x 32 pixels in three channels, and their smoothed targets."""
    data = load_digits()
    images = torch.from_numpy(data.images).div(16).repeat_interleave(4, 1).repeat_interleave(4, 2)
    targets = F.one_hot(torch.from_numpy(data.target), 10).double()
    return images[:, None].repeat(1, 3, 1, 1), 0.9 * targets + 0.01


def training(recorded: Recorded, module: TokenMixup) -> Iterator[Step]:
    """Trains on the recorded batches."""
    images, targets = digits()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-4, weight_decay=0.05)
    module.train()
    for step, batch in enumerate(recorded.tensor("batch").long()):
        output = module(images[batch], targets[batch])
        assert isinstance(output, Output)
        loss = training_loss(output, 0.0).item()
        score_loss = 0.0 if output.score_loss is None else output.score_loss.item()
        yield Step(
            abs(loss - recorded.arrays["loss"][step]),
            abs(score_loss - recorded.arrays["score_loss"][step]),
            abs(int(output.stats["mixed_samples"]) - recorded.arrays["mixed_samples"][step]),
        )
        optimizer.zero_grad()
        training_loss(output).backward()
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_training_follows_the_published_code(name: str):
    recorded = Recorded(f"trajectory_{name}")
    module = published_module(recorded).double()
    steps = [*training(recorded, module)]
    assert len(steps) == 60
    assert all(step.is_recorded for step in steps), [max(x) for x in zip(*steps, strict=True)]
    with torch.no_grad():
        logits = module.eval()(digits()[0][:64])
    assert (logits - recorded.tensor("eval_logits")).abs().max() <= 1e-5
    assert (recorded.arrays["mixed_samples"] > 0).all() == ("htm" in name)


MISTAKES: dict[str, dict[str, dict[str, Any]]] = {
    "mask": {"htm": {"mask_rule": "paper"}},
    "order": {"htm": {"order": "in_place"}},
    "weight": {"htm": {"score_loss_weight": 0.002}},
    "kappa": {"vtm": {"kappa": 4}},
    "gain": {},
}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        *(("htm_then_vtm", mistake) for mistake in ("mask", "order", "gain")),
        *(pytest.param("htm_then_vtm", mistake, marks=slow) for mistake in ("weight", "kappa")),
        *(pytest.param("htm", mistake, marks=slow) for mistake in ("mask", "weight", "gain")),
        *(
            pytest.param("vtm_then_htm", mistake, marks=slow)
            for mistake in ("mask", "weight", "gain", "kappa")
        ),
        pytest.param("vtm", "kappa", marks=slow),
    ],
)
def test_training_with_a_mistake_departs(monkeypatch: pytest.MonkeyPatch, name: str, mistake: str):
    """Ends at the first step that is not the recorded one."""
    if mistake == "gain":  # off by rho
        off = MASK_RULES["published"]._replace(score=lambda saliency, _: gain_matrix(saliency, 0))
        monkeypatch.setitem(MASK_RULES, "published", off)
    recorded = Recorded(f"trajectory_{name}")
    module = published_module(recorded, **MISTAKES[mistake]).double()
    assert not all(step.is_recorded for step in training(recorded, module))
