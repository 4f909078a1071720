"""Every detector, ablation and combination of the paper trains for a few steps on digits."""

import math
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from reproduction.training.distributed import join_world
from reproduction.training.loop import MicroBatch
from reproduction.training.train import build_epochs
from tests.conftest import settled
from tests.reproduction.conftest import SMALL_VIT, config_of, load_source
from tokenmixup import TokenMixup
from tokenmixup.rules import CHOICES

MODELS: dict[str, list[str]] = {
    "cct_2_3x2": ["augmentation.{}.layer=1"],
    "vit_tiny_patch16_224": ["augmentation.{}.layer=2", "model.image_size=64", *SMALL_VIT],
}
STACKS = [  # Table 5, and everything at once
    [],
    ["manifold_mixup"],
    ["htm"],
    ["vtm"],
    ["mixup", "cutmix"],
    ["mixup", "cutmix", "manifold_mixup"],
    ["mixup", "cutmix", "htm"],
    ["mixup", "cutmix", "vtm"],
    ["mixup", "cutmix", "htm", "vtm"],
    ["mixup", "cutmix", "manifold_mixup", "htm", "vtm"],
]
SWITCHES = [  # of Tables 3 and 4, and the published rules; another option belongs here
    "rollout_steps=1",
    *(f"{key}={name}" for key, table in CHOICES.items() for name in [*table][1:]),
]
VARIANTS = [(stack, "") for stack in STACKS] + [(["htm", "vtm"], switch) for switch in SWITCHES]
KINDS = [  # model, precision
    ("cct_2_3x2", "float32"),
    *(
        pytest.param(*kind, marks=pytest.mark.slow)
        for kind in (
            ("cct_2_3x2", "bf16"),
            ("vit_tiny_patch16_224", "float32"),
            ("vit_tiny_patch16_224", "bf16"),
        )
    ),
]


def overrides(model: str, stack: list[str], switch: str) -> list[str]:
    line = [f"model={model}", f"augmentation=[{','.join(stack)}]", "device=cpu"]
    line += ["recipe.batch_size=8", "dataset.limit=40", "dataset.workers=0"]
    for setting in MODELS[model]:
        if "{}" not in setting:
            line.append(setting)
        else:
            line += [setting.format(name) for name in ("htm", "vtm") if name in stack]
    if "manifold_mixup" in stack:
        line.append("augmentation.manifold_mixup.layers=[0,1]")
    if "htm" in stack:
        line += ["augmentation.htm.tau=inf", "augmentation.htm.rho=0"]
    if switch:
        chosen = settled(dict([switch.split("=")]))
        line += [f"augmentation.htm.{option}={value}" for option, value in chosen.items()]
    if switch.startswith("rollout") and model == "cct_2_3x2":
        line.append("augmentation.htm.layer=0")
    return line


def three_steps(line: list[str]) -> tuple[TokenMixup, dict[str, Tensor], list[MicroBatch]]:
    """Returns the trained module, its parameters before, and the steps of a run of digits."""
    config = config_of(*line, "name=run")
    with join_world(torch.device("cpu")) as world:
        source = load_source("digits", None, config.dataset.limit)
        epochs, _ = build_epochs(config, world, source)
        trainer = epochs.trainer
        before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
        trainer.module.train()
        steps: list[MicroBatch] = []
        for images, classes in islice(epochs.train_loader, 3):
            steps += trainer.train_step(images, classes, len(images))
    return trainer.module, before, steps


@cache
def losses_without_switch(model: str, precision: str) -> list[float]:
    line = [*overrides(model, ["htm", "vtm"], ""), f"recipe.precision={precision}"]
    return [step.loss.item() for step in three_steps(line)[2]]


@pytest.mark.parametrize(("model", "precision"), KINDS)
@pytest.mark.parametrize(("stack", "switch"), VARIANTS, ids=str)
def test_every_variant_trains(tmp_path, model: str, stack: list[str], switch: str, precision: str):
    line = [*overrides(model, stack, switch), f"recipe.precision={precision}"]
    module, before, steps = three_steps([*line, f"output_root={tmp_path}"])
    mixes = "htm" in stack
    for loss, output, _ in steps:
        assert math.isfinite(loss.item())
        sums = output.targets.sum(dim=1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        assert int(output.stats["mixed_samples"]) == (len(output.logits) if mixes else 0)
        assert (output.stats["mixed_tokens"] > 0) == mixes
    after: dict[str, Any] = dict(module.named_parameters())
    assert all(p.isfinite().all() for p in after.values())
    moved = [name for name, p in after.items() if not torch.equal(p, before[name])]
    assert len(moved) == len(after)
    without_effect = ["order=published"]  # moves nothing if all samples are easy
    if stack and module.encoder is not None and not module.encoder.reads_class_token:
        without_effect.append("detector=mean_attention")
    if switch and switch not in without_effect:
        losses = [step.loss.item() for step in steps]
        assert losses != losses_without_switch(model, precision), f"{switch} changes nothing"
