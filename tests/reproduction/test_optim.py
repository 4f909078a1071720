"""Learning rate schedules, weight decay, and saved, fused and scaled optimisers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.config import Recipe
from reproduction.training.optim import build_optimizer, build_schedule
from tests.conftest import CLASSES, small_vit
from tests.reproduction.conftest import config_of, small_trainer
from tokenmixup import attach

OPTIMIZERS = ["adamw", "sgd"]


def recipe_of(*overrides: str) -> Recipe:
    return config_of(*overrides).recipe


def rates(recipe: Recipe, batches: int = 2) -> list[list[float]]:
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe)
    schedule = build_schedule(optimizer, recipe, batches)
    return [[schedule(e, b) for b in range(batches)] for e in range(recipe.epochs)]


def test_published_schedule_steps_per_epoch_and_cools_down():
    epochs = rates(recipe_of("recipe=cifar_cct"))
    assert all(first == second for first, second in epochs)
    lr = [first for first, _ in epochs]
    assert lr[0] == pytest.approx(1e-6)
    assert lr[5] == pytest.approx(1e-6 + 5 / 10 * (6e-4 - 1e-6))
    cosine = 1e-5 + 0.5 * (6e-4 - 1e-5) * (1 + math.cos(math.pi * 750 / 1500))
    assert lr[750] == pytest.approx(cosine)
    assert lr[1500:] == pytest.approx([1e-5] * 10)


def test_schedule_by_batch_changes_within_an_epoch():
    epochs = rates(recipe_of("recipe.epochs=4", "recipe.warmup_epochs=1"), batches=3)
    flat = [rate for epoch in epochs for rate in epoch]
    assert flat[0] == pytest.approx(1e-5)
    assert flat[0] < flat[1] < flat[2] < flat[3]
    assert flat[3:] == sorted(flat[3:], reverse=True)
    assert len(set(flat[3:])) == len(flat[3:])


def test_a_single_epoch_trains_at_the_peak_without_a_warning(caplog: pytest.LogCaptureFixture):
    recipe = recipe_of("recipe.epochs=1", "recipe.schedule_step=epoch")
    assert rates(recipe) == [[recipe.lr, recipe.lr]]
    assert not caplog.records  # timm would warn of a schedule without effect


def test_vectors_and_embeddings_do_not_decay():
    module = attach(small_vit(), CLASSES, htm={"layer": 1})
    optimizer = build_optimizer(module, recipe_of("recipe.weight_decay=0.3"))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in module.named_parameters():
        exempt = parameter.ndim == 1 or name in ("model.pos_embed", "model.cls_token")
        assert decay[id(parameter)] == (0.0 if exempt else 0.3), name


def test_sgd_uses_plain_momentum():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe_of("recipe=imagenet_vit"))
    assert isinstance(optimizer, torch.optim.SGD)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, False, 0.015)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_with_frozen_parameters_can_be_saved(optimizer: str):
    """Sine positional embeddings are such a parameter."""
    recipe, model = recipe_of(f"recipe.optimizer={optimizer}"), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    saved = build_optimizer(model, recipe).state_dict()
    build_optimizer(model, recipe).load_state_dict(saved)
    assert sum(len(group["params"]) for group in saved["param_groups"]) == 1


def ten_losses(optimizer: str, lr: float, fused: bool) -> list[float]:
    overrides = [f"recipe.optimizer={optimizer}", f"recipe.lr={lr}", "recipe.warmup_epochs=0"]
    trainer = small_trainer(["htm", "vtm"], "model.embed_dim=16", *overrides)
    for group in trainer.optimizer.param_groups:
        assert group["fused"]
        group["fused"] = fused
    images, losses = torch.randn(8, 3, 32, 32), []
    for trainer.step in range(10):
        (part,) = trainer.train_step(images, torch.arange(8), 8)
        losses.append(part.loss.item())
    return losses


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 0.003), ("sgd", 0.1)])
def test_fused_optimiser_equals_the_plain_one(optimizer: str, lr: float):
    fused, plain = (ten_losses(optimizer, lr, fused) for fused in (True, False))
    assert fused == pytest.approx(plain, abs=1e-5)
    assert fused[-1] < fused[0] - 0.01


def convolution(optimizer: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    return module, build_optimizer(module, recipe_of(f"recipe.optimizer={optimizer}"))


def update(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    module(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_resumes_exactly_from_a_file(optimizer: str, tmp_path: Path):
    module, before = convolution(optimizer)
    update(module, before, seed=1)
    torch.save([module.state_dict(), before.state_dict()], tmp_path / "state.pt")
    again, after = convolution(optimizer)
    saved, state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(saved)
    after.load_state_dict(state)
    update(module, before, seed=2)
    update(again, after, seed=2)
    for ours, theirs in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_scaler_skips_a_step_without_asking_the_device(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
):
    module, built = convolution(optimizer)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.full((1, 3, 8, 8), torch.inf)).mean()).backward()

    def fail(*args: Any) -> None:
        raise AssertionError("waits for the device")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", fail)
        scaler.step(built)
        scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert scaler.get_scale() == 2.0**15
    built.zero_grad()
    scaler.scale(module(torch.ones(1, 3, 8, 8)).mean()).backward()
    scaler.step(built)
    scaler.update()
    for name, value in module.state_dict().items():
        assert value.isfinite().all() and not torch.equal(value, before[name])
