"""Learning rates over a run, and what decays."""

import math

import pytest
import torch

from reproduction.compose import compose
from reproduction.config import Recipe
from reproduction.parse import parse
from reproduction.training.optim import build_optimizer, build_schedule
from tests.conftest import CLASSES, small_vit
from tokenmixup import attach


def recipe_of(*overrides: str) -> Recipe:
    return parse(compose("train", list(overrides)).raw).recipe


def rates(recipe: Recipe, batches: int = 2) -> list[list[float]]:
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe)
    schedule = build_schedule(optimizer, recipe, batches)
    return [[schedule.set(e, b) for b in range(batches)] for e in range(recipe.epochs)]


def test_the_published_schedule_steps_once_an_epoch_and_cools_down():
    found = rates(recipe_of("recipe=cifar_cct"))
    assert all(first == second for first, second in found)
    lr = [first for first, _ in found]
    assert lr[0] == pytest.approx(1e-6)
    assert lr[5] == pytest.approx(1e-6 + 5 / 10 * (6e-4 - 1e-6))
    cosine = 1e-5 + 0.5 * (6e-4 - 1e-5) * (1 + math.cos(math.pi * 750 / 1500))
    assert lr[750] == pytest.approx(cosine)
    assert lr[1500:] == pytest.approx([1e-5] * 10)


def test_a_schedule_by_batch_moves_within_an_epoch():
    found = rates(recipe_of("recipe.epochs=4", "recipe.warmup_epochs=1"), batches=3)
    flat = [rate for epoch in found for rate in epoch]
    assert flat[0] == pytest.approx(1e-5)
    assert flat[0] < flat[1] < flat[2] < flat[3]
    assert flat[3:] == sorted(flat[3:], reverse=True)
    assert len(set(flat[3:])) == len(flat[3:])


def test_vectors_and_what_the_model_exempts_do_not_decay():
    module = attach(small_vit(), CLASSES, htm={"layer": 1})
    optimizer = build_optimizer(module, recipe_of("recipe.weight_decay=0.3"))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in module.named_parameters():
        exempt = parameter.ndim == 1 or name in ("model.pos_embed", "model.cls_token")
        assert decay[id(parameter)] == (0.0 if exempt else 0.3), name


def test_sgd_is_plain_momentum():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe_of("recipe=imagenet_vit"))
    assert isinstance(optimizer, torch.optim.SGD)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, False, 0.015)
