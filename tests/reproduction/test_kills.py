"""Runs that are killed again and again end as undisturbed ones: `make chaos`, KILLS for each."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.doors import SMALL, Run, eventually, same, started, train

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("KILLS", "2"))
MOST_STEPS = 6  # before a kill
WORDS = (
    *("augmentation=[mixup,cutmix,htm,vtm]", "augmentation.htm.tau=inf", "augmentation.htm.rho=0"),
    *("recipe.transforms.erasing_prob=0.5", "checkpoint.every_minutes=1e-6", "resume=auto"),
    *(word for word in SMALL if not word.startswith(("checkpoint", "recipe.epochs"))),
    *(f"recipe.epochs={5 * KILLS}", "name=mine"),
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


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
        with started(*WORDS, *more) as process:
            eventually(lambda n=target, p=process: len(run.steps) >= n or p.poll() is not None)
            time.sleep(rng.uniform(0, 0.3))  # in a step, a checkpoint, an evaluation
    assert run.steps
    assert run.summary["status"] != "finished"
    assert train(*WORDS, *more, apart=True).status == 0
    assert train(*WORDS, *more, "output_root=whole").status == 0
    assert same(run, Run("whole/mine")) == []


def test_a_run_whose_ranks_are_killed_ends_as_an_undisturbed_one(here: Path):
    """Torchrun starts them again, and they resume."""
    run = Run("outputs/mine")
    rng = np.random.default_rng(0)
    more = (f"recipe.epochs={8 * KILLS}", "dataset.workers=0")
    restarting = (*TORCHRUN, f"--max-restarts={KILLS}")
    with started(*WORDS, *more, launcher=restarting) as process:
        for _ in range(KILLS):
            target = len(run.steps) + int(rng.integers(2, MOST_STEPS))
            eventually(lambda n=target: len(run.steps) >= n or process.poll() is not None)
            ranks = [x for x in children(process.pid) if "train.py" in command(x)]
            if len(ranks) == 2:
                os.kill(ranks[int(rng.integers(2))], signal.SIGKILL)
        err = process.communicate(timeout=600)[1]
        assert process.returncode == 0, err
    with started(*WORDS, *more, "output_root=whole", launcher=TORCHRUN) as process:
        assert process.wait(600) == 0
    assert same(run, Run("whole/mine")) == []


def children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in path.read_text().split()]


def command(process: int) -> str:
    path = Path(f"/proc/{process}/cmdline")
    return path.read_text() if path.exists() else ""


def test_a_second_ctrl_c_ends_a_run_within_its_step(here: Path):
    """Steps of a large batch take seconds."""
    words = ("name=mine", "model=cct_7_3x1", "recipe.batch_size=200", "dataset.limit=400")
    with started(*words, "device=cpu") as process:
        eventually((here / "outputs/mine/config.yaml").exists)
        time.sleep(2)  # in the first step, which takes longer
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.wait(60) == 130
    assert not Run("outputs/mine").steps
    assert not Run("outputs/mine").checkpoints
