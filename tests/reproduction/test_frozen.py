"""Frozen losses of runs, which refactoring must not change.

After an intended change, `python -m tests.reproduction.test_frozen` records them again.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import of_each
from tests.programs import as_recorded, overrides_of, trained

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED_BY = "2.15."
LOSSES = FIXTURES / "frozen_losses.yaml"

# Ten batches of eight digits; weights become sharp enough for tokens to be replaced.
TEN = """
    dataset.limit=40 recipe.batch_size=8 recipe.epochs=2 recipe.log_every=5 recipe.lr=0.01
    recipe.warmup_epochs=0 device=cpu dataset.workers=0 dataset.eval_limit=10
    recipe.drop_last=false
"""
SMALL = "model.embed_dim=32"
BOTH = "augmentation=[htm,vtm] augmentation.htm.tau=2.35 augmentation.htm.rho=0.0002"
# With batches of eight and larger steps, batch norm doubles the CPU's rounding errors each step.
CALM = "recipe.optimizer=sgd recipe.lr=0.0003"
VIT_LITE = "model=vit_lite_7_4 model.depth=3 model.embed_dim=32"
RUNS = {
    "plain": f"{SMALL} augmentation=[]",
    "htm and vtm": f"{SMALL} {BOTH}",
    "all five": f"""
        {SMALL} augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]
        augmentation.htm.tau=2.35 augmentation.htm.rho=0.0002
        augmentation.manifold_mixup.layers=[0,1] recipe.transforms.erasing_prob=0.25
        recipe.grad_accum_steps=2 recipe.ema_decay=0.9 recipe.optimizer=sgd
        recipe.transforms.auto_augment=rand-m9-mstd0.5-inc1 model.attn_drop=0.1
    """,
    "gradient": f"{SMALL} {BOTH} augmentation.htm.detector=gradient",
    "random": f"{SMALL} {BOTH} augmentation.htm.detector=random",
    "rollout": f"{SMALL} {BOTH} augmentation.htm.layer=0 augmentation.htm.rollout_steps=1",
    "without scorenet": f"{SMALL} {BOTH} augmentation.htm.tau=inf",
    "without assignment": f"{SMALL} {BOTH} augmentation.htm.matching=random",
    "without labels": f"{SMALL} {BOTH} augmentation.htm.labels=count",
    "published": f"""
        {VIT_LITE} {BOTH} augmentation.htm.layer=1 augmentation.vtm.layer=2
        augmentation.htm.mask_rule=published augmentation.htm.order=published
        augmentation.vtm.class_token_offset=published
    """,
    "cvt": f"{VIT_LITE} model.pooling=sequence {BOTH}",
    "cct_7_3x1": f"model=cct_7_3x1 model.depth=4 model.embed_dim=32 {BOTH}",
    "timm vit": f"""
        model=vit_tiny_patch16_224 model.image_size=64 {BOTH} augmentation.htm.layer=1
        augmentation.vtm.layer=2 recipe.lr=0.001
    """,
    "library": f"""
        model=timm model.architecture=resnet18 model.image_size=32 augmentation=[mixup,cutmix]
        {CALM}
    """,
    "bf16": f"{SMALL} {BOTH} recipe.precision=bf16",
    "two ranks": f"{SMALL} {BOTH} devices=2",
    "uneven micro-batches": f"{SMALL} {BOTH} dataset.limit=38 recipe.grad_accum_steps=3",
    "warm-up": f"""
        {SMALL} augmentation=[] recipe.epochs=3 recipe.warmup_epochs=1
        recipe.schedule_step=batch recipe.ema_decay=0.8
    """,
    "mean attention": f"""
        {VIT_LITE} {BOTH} augmentation.htm.detector=mean_attention
        augmentation.htm.difficulty=excess augmentation.htm.layer=[1,2] augmentation.vtm.layer=2
    """,
    "manifold mixup": f"""
        {SMALL} augmentation=[manifold_mixup] augmentation.manifold_mixup.layers=[0,1]
    """,
    "large rho": f"{SMALL} {BOTH} augmentation.htm.rho=0.002",
    "rotary": f"""
        model=vit_tiny_patch16_224 model.architecture=eva02_tiny_patch14_224 {BOTH}
        model.patch_size=14 model.image_size=56 recipe.lr=0.001 augmentation.htm.layer=1
        augmentation.vtm.layer=2
    """,
}
QUICK = (
    "htm and vtm",
    "all five",
    "gradient",
    "published",
    "timm vit",
    "library",
    "warm-up",
    "rotary",
)


def lines_of(name: str, folder: Path) -> list[dict[str, float]]:
    """Trains a run; returns the figures of each batch, then the loss after each epoch."""
    run = trained(overrides_of(TEN + RUNS[name]), name="run", root=folder)
    found = []
    for line in run.steps:
        loss = round(line["loss"], 7)
        tokens = round(as_recorded(line)["mixed_tokens"], 4)
        found.append({"loss": loss, "tokens": tokens, "lr": round(line["lr"], 9)})
    for line in run.epochs:
        found.append({"eval_loss": round(line["eval_loss"], 7)})
    return found


@pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED_BY),
    reason=f"recorded by torch {RECORDED_BY}: other versions draw other weights",
)
@pytest.mark.parametrize("name", of_each(RUNS, QUICK))
def test_runs_have_the_recorded_losses(tmp_path: Path, name: str):
    expected = yaml.safe_load(LOSSES.read_text())[name]
    lines = lines_of(name, tmp_path)
    if name == "bf16":  # sums differ between machines
        lines = lines[:1]
        expected = expected[:1]
    bound = {"tokens": 1e-3, "lr": 1e-8}
    for ours, recorded in zip(lines, expected, strict=True):
        for key, value in recorded.items():
            close = bound.get(key, 1e-5)
            if name == "bf16":
                close = 1e-2
            assert ours[key] == pytest.approx(value, abs=close), (key, ours)


def test_recorded_runs_with_htm_replace_tokens():
    recorded = yaml.safe_load(LOSSES.read_text())
    assert set(recorded) == set(RUNS)
    for name, overrides in RUNS.items():
        mixes = "htm" in overrides
        most = max(line.get("tokens", 0) for line in recorded[name])
        assert (most > 0) == mixes, name


def losses() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: lines_of(name, Path(folder, name)) for name in RUNS}


if __name__ == "__main__":
    text = yaml.safe_dump(losses(), sort_keys=False, default_flow_style=None, width=100)
    LOSSES.write_text(text)  # a line for each batch
    print(f"written to {LOSSES}")
