"""Random draws of the trainer differ between steps, ranks and seeds, and are reproducible."""

from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from reproduction.data.sources import build_source
from reproduction.runs.compose import compose
from reproduction.start.resolve import resolve
from reproduction.training.distributed import World
from reproduction.training.train import build_epochs
from tests.reproduction.conftest import SMALL, small_trainer
from tokenmixup.manifold import ManifoldMix, ManifoldMixup, draw_manifold_mix

CPU = torch.device("cpu")
STEPS = 6
IMAGES = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)


class Drawn(NamedTuple):
    """The inputs of the model in one step, and the numbers that the model would draw."""

    images: Tensor
    targets: Tensor
    dropout: Tensor
    manifold: ManifoldMix


def drawn(stack: list[str], *, seed: int = 0, rank: int = 0, steps: int = STEPS) -> list[Drawn]:
    erasing = "recipe.transforms.erasing_prob=1"
    small = ["model.embed_dim=16", "recipe.warmup_epochs=0", f"seed={seed}", erasing]
    trainer = small_trainer(stack, *small)
    trainer.world = World(rank, 2, CPU)
    seen: list[Drawn] = []

    def spy(images: Tensor, targets: Tensor) -> Any:
        seen.append(
            Drawn(images, targets, torch.rand(4), draw_manifold_mix(ManifoldMixup(), images))
        )
        return trainer.module(images, targets)

    trainer.parallel = spy
    for _ in range(steps):
        torch.rand(5)  # anything may draw between two steps
        trainer.train_step(IMAGES, torch.arange(8), 8)
        trainer.step += 1
    return seen


def boxes(images: Tensor, erased: Tensor) -> Tensor:
    """Returns the mask of erased pixels, `b h w`."""
    return (images != erased).any(dim=1)


@pytest.mark.parametrize("stack", [["mixup"], ["cutmix"]], ids=str)
def test_mixing_erasing_and_dropout_depend_on_step_rank_and_seed(stack: list[str]):
    draws = [*drawn(stack), *drawn(stack, rank=1), *drawn(stack, seed=1)]
    for one, other in combinations(draws, 2):
        assert not torch.equal(one.images, other.images)
        assert not torch.equal(one.targets, other.targets)
        assert not torch.equal(one.dropout, other.dropout)
        assert one.manifold.keep_ratio != other.manifold.keep_ratio


def test_erased_boxes_and_noise_depend_on_step_rank_and_seed():
    """Without mixing, inputs differ only by erasing."""
    draws = [*drawn([]), *drawn([], rank=1), *drawn([], seed=1)]
    trainer = small_trainer([], "model.embed_dim=16")
    plain = trainer.inputs.normalize(IMAGES)
    masks = [boxes(plain, one.images) for one in draws]
    for (one, mask), (other, its) in combinations(zip(draws, masks, strict=True), 2):
        assert not torch.equal(mask, its)
        both = (mask & its)[:, None].expand_as(plain)
        assert both.any() and (one.images != other.images)[both].all()


def test_draws_are_reproducible():
    for one, other in zip(drawn(["mixup", "cutmix"]), drawn(["mixup", "cutmix"]), strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.dropout, other.dropout)
        assert one.manifold.layer == other.manifold.layer


def test_draws_cover_their_whole_range():
    """Both kinds of mixing, every layer of manifold mixup, and the full range of ratios occur."""
    draws = drawn(["mixup", "cutmix"], steps=60)
    assert {one.manifold.layer for one in draws} == {0, 1, 2}
    ratios = [one.manifold.keep_ratio for one in draws]
    assert min(ratios) < 0.25 and max(ratios) > 0.75
    own = [float(one.targets[0].amax()) for one in draws]
    assert min(own) < 0.6 and max(own) > 0.8
    mixed = drawn(["mixup"], steps=1)[0].images, drawn(["cutmix"], steps=1)[0].images
    assert not torch.equal(*mixed)


def test_dropout_does_not_depend_on_mixing():
    """Each purpose has its own random stream."""
    for one, other in zip(drawn(["mixup"]), drawn([]), strict=True):
        assert torch.equal(one.dropout, other.dropout)


def test_initial_weights_and_image_order_depend_on_the_seed(tmp_path: Path):
    built = []
    for seed in (0, 1, 0):
        args = [*SMALL, f"seed={seed}", "name=mine", f"output_root={tmp_path}"]
        config = resolve(compose("train", args))
        epochs, _ = build_epochs(config, World(0, 1, CPU), build_source(config.dataset))
        built.append(epochs)
    first, other, again = [next(x.trainer.module.model.parameters()) for x in built]
    assert torch.equal(first, again) and not torch.equal(first, other)
    orders = [[index for batch in x.batches for _, index in batch] for x in built]
    assert orders[0] == orders[2] != orders[1]
