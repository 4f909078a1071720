"""Training runs of the published code, followed with the published switches.

60 AdamW steps on scikit-learn's digits, in float64 with one thread. Learning amplifies differences:
a rule that replaces one other token in one step moves all later losses.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from tests.reproduction.recorded import Recorded
from tests.reproduction.test_published import published_module
from tokenmixup import TokenMixup, gain_matrix, training_loss

slow = pytest.mark.slow
NAMES = ("htm_then_vtm", "vtm_then_htm", "htm", "vtm", "plain")  # the first is quick
MISTAKES: dict[str, dict[str, dict[str, Any]]] = {
    "mask": {"htm": {"mask_rule": "paper"}},
    "order": {"htm": {"order": "in_place"}},
    "weight": {"htm": {"score_loss_weight": 0.002}},
    "kappa": {"vtm": {"kappa": 4}},
    "gain": {},
}


def digits() -> tuple[Tensor, Tensor]:
    """Returns all digits at 32 x 32 pixels in three channels, and their smoothed targets."""
    data = load_digits()
    images = torch.from_numpy(data.images).div(16).repeat_interleave(4, 1).repeat_interleave(4, 2)
    targets = F.one_hot(torch.from_numpy(data.target), 10).double()
    return images[:, None].repeat(1, 3, 1, 1), 0.9 * targets + 0.01


def training(recorded: Recorded, module: TokenMixup) -> Iterator[bool]:
    """Trains on the recorded batches; whether losses and mixed samples of a step are recorded."""
    images, targets = digits()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-4, weight_decay=0.05)
    module.train()
    for step, batch in enumerate(recorded.tensor("batch").long()):
        output = module(images[batch], targets[batch])
        found = {
            "loss": training_loss(output, 0.0).item(),
            "score_loss": 0.0 if output.score_loss is None else output.score_loss.item(),
            "mixed_samples": int(output.stats["easy_samples"]),  # the published code counts these,
        }
        yield all(abs(x - recorded.arrays[key][step]) <= 1e-6 for key, x in found.items())
        optimizer.zero_grad()
        training_loss(output).backward()
        optimizer.step()


@pytest.mark.parametrize("name", [*NAMES[:1], *(pytest.param(x, marks=slow) for x in NAMES[1:])])
def test_training_follows_the_published_code(name: str):
    recorded = Recorded(f"trajectory_{name}")
    module = published_module(recorded).double()
    assert [*training(recorded, module)] == [True] * 60
    with torch.no_grad():
        logits = module.eval()(digits()[0][:64])
    assert (logits - recorded.tensor("eval_logits")).abs().max() <= 1e-5
    assert (recorded.arrays["mixed_samples"] > 0).all() == ("htm" in name)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        *(("htm_then_vtm", mistake) for mistake in ("mask", "order", "gain")),
        *(pytest.param("htm_then_vtm", mistake, marks=slow) for mistake in ("weight", "kappa")),
        *(pytest.param("htm", mistake, marks=slow) for mistake in ("mask", "weight", "gain")),
        *(pytest.param("vtm_then_htm", mistake, marks=slow) for mistake in ("gain", "kappa")),
    ],
)
def test_training_with_a_mistake_departs(name: str, mistake: str):
    """Ends at the first step that is not the recorded one."""
    recorded = Recorded(f"trajectory_{name}")
    module = published_module(recorded, **MISTAKES[mistake]).double()
    if mistake == "gain":  # off by rho
        module.rules = module.rules._replace(score=lambda saliency, _: gain_matrix(saliency, 0))
    assert not all(training(recorded, module))
