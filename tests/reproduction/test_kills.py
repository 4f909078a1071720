"""Runs that are killed again and again end as undisturbed ones: `make chaos`, KILLS for each."""

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.programs import (
    TORCHRUN,
    Run,
    assert_succeeded,
    children,
    command_of,
    ended,
    eventually,
    overrides_of,
    same,
    started,
    trained,
)

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("KILLS", "2"))
MOST_STEPS = 6  # before a kill
OVERRIDES = overrides_of(f"""
    augmentation=[mixup,cutmix,htm,vtm] augmentation.htm.tau=inf augmentation.htm.rho=0
    recipe.transforms.erasing_prob=0.5 model.embed_dim=16 dataset.limit=60 dataset.eval_limit=60
    recipe.batch_size=20 recipe.epochs={5 * KILLS} recipe.log_every=2 device=cpu
    checkpoint.every_minutes=1e-6 resume=auto name=mine
""")


def has_come(process: subprocess.Popen[str], run: Run, steps: int) -> bool:
    """Whether a run has so many steps, or has ended."""
    return len(run.steps) >= steps or process.poll() is not None


@pytest.mark.parametrize(
    "more",
    [
        ("dataset.workers=2",),
        ("recipe.ema_decay=0.9", "dataset.validation=0.2"),
        ("recipe.grad_accum_steps=3", "recipe.optimizer=sgd", "recipe.schedule_step=epoch"),
        ("recipe.precision=bf16",),
    ],
    ids=["workers", "average", "micro-batches", "bf16"],
)
def test_a_killed_run_ends_as_an_undisturbed_one(here: Path, more: tuple[str, ...]):
    run = Run("outputs/mine")
    rng = np.random.default_rng(0)
    for _ in range(KILLS):
        target = len(run.steps) + int(rng.integers(1, MOST_STEPS))
        with started(OVERRIDES, more) as process:
            eventually(partial(has_come, process, run, target))
            time.sleep(rng.uniform(0, 0.3))  # in a step, a checkpoint, an evaluation
    assert run.steps
    assert run.summary["status"] != "finished"
    trained(OVERRIDES, more, apart=True)
    assert same(run, trained(OVERRIDES, more, root="whole")) == []


def test_a_run_whose_ranks_are_killed_ends_as_an_undisturbed_one(here: Path):
    """Torchrun starts them again, and they resume."""
    run = Run("outputs/mine")
    rng = np.random.default_rng(0)
    more = (f"recipe.epochs={8 * KILLS}", "dataset.workers=0")
    restarting = (TORCHRUN, f"--max-restarts={KILLS}")
    with started(OVERRIDES, more, launcher=restarting) as process:
        for _ in range(KILLS):
            target = len(run.steps) + int(rng.integers(2, MOST_STEPS))
            eventually(partial(has_come, process, run, target))
            ranks = [child for child in children(process.pid) if "train.py" in command_of(child)]
            if len(ranks) == 2:
                os.kill(ranks[int(rng.integers(2))], signal.SIGKILL)
        assert_succeeded(ended(process, 600))
    with started(OVERRIDES, more, "output_root=whole", launcher=TORCHRUN) as process:
        assert_succeeded(ended(process, 600))
    assert same(run, Run("whole/mine")) == []


def test_a_second_ctrl_c_ends_a_run_within_its_step(here: Path):
    """Steps of a large batch take seconds."""
    overrides = ("name=mine", "model=cct_7_3x1", "recipe.batch_size=200", "dataset.limit=400")
    with started(overrides, "device=cpu") as process:
        eventually((here / "outputs/mine/config.yaml").exists)
        time.sleep(2)  # in the first step, which takes longer
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.wait(60) == 130
    assert not Run("outputs/mine").steps
    assert not Run("outputs/mine").checkpoints
