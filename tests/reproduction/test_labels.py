"""Labels that follow the attention (TransMix), against the formula written out."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

from reproduction.data.inputs import Mixed
from reproduction.training.labels import AttentionLabels, attended_share
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import Command, small_trainer

LABELS = ("augmentation.cutmix.labels=attention", "model.embed_dim=16")
CLASS_TOKEN = ("model=vit_lite_6_4", "model.depth=2", "model.vtm_layer=1")
STILL = ("model.drop=0", "model.attn_drop=0", "model.drop_path=0")


def test_share_counts_the_tokens_whose_nearest_pixel_lies_in_the_box():
    """A grid of 2 x 2 over 4 x 4 pixels: nearest are those of rows and columns 0 and 2."""
    saliency = torch.tensor([[0.1, 0.2, 0.3, 0.2], [0.0, 0.0, 0.0, 0.5]])
    for box, expected in (
        ((0, 2, 2, 4), [0.2 / 0.8, 0]),
        ((1, 4, 0, 4), [0.5 / 0.8, 1]),
        ((1, 2, 1, 2), [0, 0]),
        ((0, 4, 0, 4), [1, 1]),
    ):
        share = attended_share(saliency, box, torch.Size([4, 4]))
        torch.testing.assert_close(share, torch.tensor(expected)[:, None].float())


@torch.no_grad()
def expected_targets(trainer: Trainer, mixed: Mixed, has_class_token: bool) -> torch.Tensor:
    """TransMix by hand, with the last block's softmax of q k, head by head."""
    model: Any = trainer.module.model
    entered: list[torch.Tensor] = []
    handle = model.blocks[-1].register_forward_pre_hook(lambda m, args: entered.append(args[0]))
    model(mixed.images)
    handle.remove()
    block, targets = model.blocks[-1], []
    top, bottom, left, right = mixed.box or (0, 0, 0, 0)
    for tokens, own, other in zip(entered[0], mixed.classes, mixed.partners, strict=True):
        n, heads = len(tokens), block.attn.num_heads
        q, k, _ = block.attn.qkv(block.norm1(tokens)).reshape(n, 3, heads, -1).unbind(1)
        maps = [F.softmax(q[:, h] @ k[:, h].T / q.shape[-1] ** 0.5, dim=1) for h in range(heads)]
        rows = torch.stack(maps).mean(0)  # n n
        received = rows[0, 1:] if has_class_token else rows.mean(0)
        side = round(len(received) ** 0.5)
        pitch = mixed.images.shape[-1] // side
        grid = received.reshape(side, side)
        pasted = sum(
            grid[i, j].item()
            for i in range(side)
            for j in range(side)
            if top <= i * pitch < bottom and left <= j * pitch < right
        )
        share = pasted / float(received.sum())
        onehot = torch.eye(10)
        targets.append((1 - share) * onehot[own] + share * onehot[other])
    return torch.stack(targets)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("more", [(), CLASS_TOKEN], ids=["pooled", "class token"])
def test_targets_of_a_step_equal_the_formula(more: tuple[str, ...], count: int):
    overrides = [*more, *LABELS, *STILL, "recipe.label_smoothing=0", "recipe.warmup_epochs=0"]
    trainer = small_trainer(["cutmix"], *overrides, f"recipe.grad_accum_steps={count}")
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    differ = 0
    for trainer.step in range(3):
        mixed = trainer.inputs(images, torch.arange(6), 0, trainer.step, 0)
        expected = expected_targets(trainer, mixed, bool(more))
        parts = trainer.train_step(images, torch.arange(6), 6)
        found = torch.cat([part.output.targets for part in parts])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        losses = torch.stack([part.loss for part in parts])
        logits = torch.cat([part.output.logits for part in parts])
        torch.testing.assert_close(losses.mean(), F.cross_entropy(logits, expected).detach())
        differ += not torch.allclose(found, mixed.targets(10, 0), atol=1e-3)
    assert differ >= 2  # from labels by the area


def test_positions_that_blocks_get_count():
    """EVA's blocks get rotary positions; a copy of the map is kept by its unfused attention."""
    settings: dict[str, Any] = {"img_size": 56, "num_classes": 4, "depth": 1, "global_pool": "avg"}
    model: Any = timm.create_model("eva02_tiny_patch14_224", **settings).train()
    attn = model.blocks[0].attn
    attn.qkv.weight.data *= 20  # else the map is about uniform
    attn.fused_attn = False
    maps: list[torch.Tensor] = []
    labels, images = AttentionLabels(model), torch.randn(2, 3, 56, 56)
    attn.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0].detach()))
    model(images)
    mixed = Mixed(images, torch.arange(2), torch.arange(2), 0.5, (0, 28, 0, 28))
    share = attended_share(maps[0].mean(dim=(1, 2))[:, 1:], (0, 28, 0, 28), images.shape[-2:])
    torch.testing.assert_close(labels(mixed).weight, 1 - share)


def test_batches_without_a_box_keep_their_weight():
    trainer = small_trainer(["mixup", "cutmix"], *LABELS)
    labels = trainer.attention_labels
    assert isinstance(labels, AttentionLabels)
    images = torch.zeros(2, 3, 32, 32)
    mixed = Mixed(images, torch.tensor([0, 1]), torch.tensor([1, 0]), 0.25)
    trainer.module(images, mixed.targets(10, 0.1))
    assert labels(mixed) is mixed and labels.entered is None


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("augmentation=[cutmix,htm]", "htm mixes labels before the last block"),
        ("augmentation=[cutmix,manifold_mixup]", "manifold_mixup mixes labels before"),
        ("model=resnet18", "resnet18 has no blocks with attention"),
        ("model=swin_tiny_patch4_window7_224", "blocks of SwinTransformer do not attend to all"),
        ("compile=true", "compile=true hides the last block"),
    ],
)
def test_attention_labels_are_refused_where_they_cannot_be(
    command: Command, override: str, reason: str
):
    stack = () if override.startswith("augmentation=") else ("augmentation=[cutmix]",)
    result = command("train", *stack, "augmentation.cutmix.labels=attention", override)
    assert result.status == 2 and len(result.lines) == 1
    assert f"augmentation.cutmix.labels=attention: {reason}" in result.lines[0]


def test_a_run_with_attention_labels_and_vtm_trains(command: Command):
    small = ["dataset.limit=20", "recipe.epochs=1", "recipe.batch_size=10", *LABELS]
    result = command("train", "augmentation=[mixup,cutmix,vtm]", *small, "dataset.workers=0")
    assert result.status == 0, result.err
