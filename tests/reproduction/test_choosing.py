"""The numbers of docs/choosing.md: floors against a minimiser, shares against the mixing itself."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest

from reproduction.data.build import drawn_weights
from reproduction.reporting.choosing import floor, mixed
from scripts import choosing as script
from tests.reproduction.conftest import SMALL, Command, config_of, small_trainer
from tests.reproduction.test_trained_pictures import trained
from tokenmixup import difficulty, mix_horizontal


@pytest.mark.parametrize(
    ("keep", "smoothing", "classes", "nats"),
    [(1, 0.1, 10, 0.5003), (0.5, 0.1, 10, 1.0828), (0.5, 0.1, 100, 1.3952), (0.7, 0, 2, 0.6109)],
)
def test_floor_is_the_least_cross_entropy(keep: float, smoothing: float, classes: int, nats: float):
    targets = torch.full((1, classes), smoothing / classes)
    targets[0, 0] += keep * (1 - smoothing)
    targets[0, 1] += (1 - keep) * (1 - smoothing)
    logits = torch.zeros(1, classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = difficulty(logits, targets)[0]
        value.backward()
        return value

    optimizer.step(loss)
    (found,) = floor(np.array([keep]), smoothing, classes)
    assert found == pytest.approx(nats, abs=1e-4)
    assert found - 1e-6 <= loss().item() < found + 1e-4


def test_drawn_weights_are_those_of_the_recipe():
    weights = drawn_weights(config_of("augmentation=[mixup]"), range(500))
    assert kstest([*weights.values()], beta(0.8, 0.8).cdf).pvalue > 0.01
    for stack in ("augmentation=[htm]", "devices=2"):
        assert not drawn_weights(config_of(stack), range(3))


def test_drawn_weights_are_those_of_the_run():
    trainer = small_trainer(["mixup", "cutmix"], "recipe.label_smoothing=0", "seed=5")
    images, classes = torch.zeros(6, 3, 32, 32, dtype=torch.uint8), torch.arange(6)
    weights = drawn_weights(trainer.config, range(4))
    for step in range(4):
        trainer.step = step
        (part,) = trainer.train_step(images, classes, 6)
        assert part.output.targets[0, 0] == pytest.approx(weights[step])
    assert len({*weights.values()}) == 4


def test_without_rho_each_mixture_is_made_twice():
    """Saliency sums to 1, so gains are equal in both directions."""
    torch.manual_seed(0)
    saliency, tokens = torch.rand(6, 9).softmax(dim=1), torch.rand(6, 9, 2)
    mix = mix_horizontal(tokens, torch.eye(6), saliency, torch.zeros(6), tau=1.0, rho=0.0)
    assert torch.equal(mix.donor[mix.donor], torch.arange(6)) and mix.mask.any(dim=1).all()
    assert torch.equal(mix.tokens, mix.tokens[mix.donor])
    torch.testing.assert_close(mix.targets, mix.targets[mix.donor])
    torch.testing.assert_close(mix.keep_ratio + mix.keep_ratio[mix.donor], torch.ones(6, 1))


def test_shares_are_those_of_the_mixing():
    run = trained("augmentation=[htm]", "augmentation.htm.tau=inf", "augmentation.htm.rho=0")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 32, 32, generator=generator)
    targets = torch.eye(10)[[0, 1, 2, 3, 4, 5]] * 0.9 + 0.01
    mix = run.module.mixed_pairs(images, targets)
    seen = mixed(run.module, images, targets)
    assert mix is not None and seen.difficulty.shape == (1, 6)
    torch.testing.assert_close(seen.tokens, mix.mask.float().mean(dim=1))
    torch.testing.assert_close(seen.label, 1 - mix.keep_ratio[:, 0])
    logits = run.module(images, targets).logits.detach()
    two = logits[torch.arange(6)[:, None], torch.stack([torch.arange(6), mix.donor], dim=1)]
    torch.testing.assert_close(seen.model, two.softmax(dim=1)[:, 1])


@pytest.mark.slow
def test_choosing_prints_its_numbers_and_draws(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layers = ["augmentation=[htm]", "augmentation.htm.layer=[0,1]", "augmentation.htm.tau=0"]
    assert command("train", "name=mine", *SMALL, *layers, "recipe.epochs=1").status == 0
    monkeypatch.setattr(script, "DRAWS", 50)
    monkeypatch.setattr("sys.argv", ["choosing.py", "outputs/mine", "picture.png"])
    with redirect_stdout(io.StringIO()) as shown:
        script.main()
    out = shown.getvalue()
    assert "table1/cifar10_htm: floor 0.5003 nats, 1.0828 at weight 0.5; " in out
    assert "0.0% of 50 batches cannot mix at tau = 2" in out
    assert "htm.layer=0: " in out and "htm.layer=1: " in out and "of 60 images" in out
    assert (tmp_path / "picture.png").stat().st_size > 10_000
