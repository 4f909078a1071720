"""The training step: micro-batches, clipping, the scaler, the schedule, the average."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.doors import SMALL, SMALL_VIT, Run, build_trainer, evaluate, step, train
from tests.images import OWN

STILL = ("model.attn_drop=0", "model.drop_path=0", "recipe.label_smoothing=0")
PLAIN = (*STILL, "model.embed_dim=16", "recipe.warmup_epochs=0", "device=cpu")
SGD = (  # Adam's steps take the sign of noise
    *(*PLAIN, "recipe.optimizer=sgd", "recipe.lr=0.1"),
    *("recipe.weight_decay=0", "recipe.clip_grad_norm=null"),
)
MIX_ALL = ("augmentation=[htm]", "augmentation.htm.tau=inf", "augmentation.htm.rho=0")
FOLDER = [word for word in SMALL if "limit" not in word]


def images_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count) % 10


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in trainer.module.named_parameters()}


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("stack", ["", "vtm"])
def test_updates_in_micro_batches_equal_full_batches(stack: str, count: int):
    """7 images, so that sizes differ."""
    words = (*SGD, f"augmentation=[{stack}]")
    full = step(words, *images_of(7))
    cut = step((*words, f"recipe.grad_accum_steps={count}"), *images_of(7))
    sizes = [len(part.output.logits) for part in cut.parts]
    assert len(sizes) == count
    assert sum(sizes) == 7
    assert max(sizes) - min(sizes) <= 1
    mean = sum(size * loss for size, loss in zip(sizes, cut.losses, strict=True)) / 7
    assert mean == pytest.approx(full.losses[0], abs=1e-5)
    for name, gradient in full.gradients.items():
        torch.testing.assert_close(cut.gradients[name], gradient, atol=1e-5, rtol=1e-4)
    ours = parameters(cut.trainer)
    theirs = parameters(full.trainer)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)


def test_pairs_are_matched_within_a_micro_batch():
    for count in (1, 2, 6):
        words = (*PLAIN, *MIX_ALL, f"recipe.grad_accum_steps={count}")
        stats = [part.output.stats for part in step(words, *images_of(6)).parts]
        assert sum(int(of["mixed_samples"]) for of in stats) == 6
        assert all((of["mixed_tokens"] > 0) == (count < 6) for of in stats)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_step_of_sgd_is_the_clipped_gradient(precision: str):
    words = (*SGD, "augmentation=[]", "recipe.clip_grad_norm=0.01")
    trainer = build_trainer((*words, f"recipe.precision={precision}"))
    before = parameters(trainer)
    done = step(trainer, *images_of(6))
    norm = torch.cat([x.flatten() for x in done.gradients.values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=0.02)
    assert done.lr == 0.1
    for name, value in parameters(trainer).items():
        expected = before[name] - 0.1 * done.gradients[name]
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model", [PLAIN, ("model=timm", "model.architecture=resnet10t")], ids=len)
def test_the_scaler_skips_an_update_that_is_not_finite(model: tuple[str, ...]):
    """The loss is finite, the scaled gradient is not; no weight, statistic or average changes."""
    words = (*model, "augmentation=[]", "device=cpu", "recipe.precision=float16")
    trainer = build_trainer((*words, "recipe.ema_decay=0.5"))
    *_, weight, _ = trainer.module.parameters()
    with torch.no_grad():
        weight.mul_(1e4)
    before = deepcopy(trainer.state())
    assert math.isfinite(step(trainer, *images_of(6)).losses[0])
    for name in ("module", "model_ema"):
        torch.testing.assert_close(trainer.state()[name], before[name], atol=0, rtol=0)
    with torch.no_grad():
        weight.mul_(1e-4)
    for _ in range(12):  # the scale halves until the gradient is finite
        done = step(trainer, *images_of(6))
    assert done.gradients
    assert all(x.isfinite().all() for x in done.gradients.values())
    resumed = build_trainer((*words, "recipe.ema_decay=0.5"))
    resumed.restore("", deepcopy(trainer.state()))
    assert resumed.state()["scaler"] == trainer.state()["scaler"] != before["scaler"]


@pytest.mark.parametrize("by", ["epoch", "batch"])
def test_learning_rates_are_warmed_up_follow_the_cosine_and_cool_down(here: Path, by: str):
    """Two epochs of three batches up, the cosine to the end of the fifth, the sixth at the end."""
    words = (
        *("recipe.epochs=6", "recipe.batch_size=10", "+dataset.options.train=30"),
        *("recipe.lr=0.01", "recipe.min_lr=0.0001", "recipe.warmup_lr=0.00001"),
        *("recipe.warmup_epochs=2", "recipe.cooldown_epochs=1", f"recipe.schedule_step={by}"),
    )
    assert train(*OWN, *FOLDER, *words, "name=mine").status == 0
    rates = []
    for number in range(18):
        time = number / 3 if by == "batch" else number // 3
        rate = 1e-4 + (0.01 - 1e-4) * (1 + math.cos(math.pi * min(time, 5) / 5)) / 2
        rates.append(1e-5 + (0.01 - 1e-5) * time / 2 if time < 2 else rate)
    assert [line["lr"] for line in Run("outputs/mine").steps] == pytest.approx(rates, rel=1e-6)


def test_vectors_and_embeddings_do_not_decay():
    words = ("model=vit_tiny_patch16_224", *SMALL_VIT, "augmentation=[htm]", "device=cpu")
    trainer = build_trainer((*words, "augmentation.htm.layer=1", "recipe.weight_decay=0.3"))
    groups = trainer.optimizer.param_groups
    decay = {id(x): group["weight_decay"] for group in groups for x in group["params"]}
    for name, x in trainer.module.named_parameters():
        exempt = x.ndim == 1 or name in ("model.pos_embed", "model.cls_token", "model.reg_token")
        assert decay[id(x)] == (0.0 if exempt else 0.3), name


def test_sgd_has_plain_momentum():
    words = (*SGD, "augmentation=[]", "recipe.min_lr=0.1")
    trainer = build_trainer(words)
    name = "model.head.weight"
    buffer = 0.0
    for _ in range(3):
        before = parameters(trainer)[name]
        buffer = 0.9 * buffer + step(trainer, *images_of(6)).gradients[name]
        after = parameters(trainer)[name]
        torch.testing.assert_close(after, before - 0.1 * buffer, atol=1e-6, rtol=1e-5)


AVERAGED = (
    *(*OWN, *FOLDER, "recipe.lr=0.01"),
    *("+dataset.options.train=57", "recipe.warmup_epochs=0"),
)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with an average."""
    root = tmp_path_factory.mktemp("averaged")
    words = (*AVERAGED, "recipe.ema_decay=0.8", f"output_root={root}", "name=mine")
    assert train(*words).status == 0
    return Run(root / "mine")


def test_the_average_follows_every_update():
    trainer = build_trainer((*PLAIN, "recipe.ema_decay=0.8"))
    for _ in range(3):
        before = deepcopy(trainer.state()["model_ema"])
        step(trainer, *images_of(6))
        now = trainer.state()
        for name, value in now["model_ema"].items():
            new = now["module"][f"model.{name}"]
            expected = 0.8 * before[name] + 0.2 * new
            torch.testing.assert_close(value, expected, atol=1e-7, rtol=1e-5)
            assert not torch.equal(value, new)


def test_the_average_has_the_statistics_of_batch_norm_too():
    words = ("model=timm", "model.architecture=resnet10t", "augmentation=[]", "device=cpu")
    trainer = build_trainer((*words, "recipe.ema_decay=0.8"))
    before = deepcopy(trainer.state()["model_ema"])
    step(trainer, *images_of(6))
    for name, value in trainer.state()["model_ema"].items():
        if value.is_floating_point():
            expected = 0.8 * before[name] + 0.2 * trainer.state()["module"][f"model.{name}"]
            torch.testing.assert_close(value, expected, atol=1e-7, rtol=1e-5)


def test_the_average_is_evaluated_saved_and_exported_and_changes_no_step(here: Path, averaged: Run):
    assert train(*AVERAGED, "name=plain").status == 0
    for ours, theirs in zip(averaged.lines, Run("outputs/plain").lines, strict=True):
        key = "eval_loss" if "eval_loss" in ours else "loss"
        assert (ours[key] == theirs[key]) == (key == "loss")
    best = max(averaged.epochs, key=lambda line: line["top1"])
    for weights, line in (("last", averaged.epochs[-1]), ("best", best)):
        words = (f"run={averaged.path}", f"weights={weights}", OWN[1], "device=cpu")
        assert evaluate(*words).status == 0
        assert averaged.evaluation(weights)["eval_loss"] == line["eval_loss"]
    exported = evaluate(f"run={averaged.path}", "export=last.safetensors")
    assert exported.status == 0, exported.err
    average = averaged.checkpoint()["model_ema"]
    torch.testing.assert_close(load("last.safetensors"), average, atol=0, rtol=0)


def load(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
