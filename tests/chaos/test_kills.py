"""Runs that are disturbed end as undisturbed ones; KILLS is the number of kills of each run."""

import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.runs import PATIENCE, Run, differences, last_state

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("KILLS", "2"))
MOST_STEPS = 6  # before a kill
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("recipe.ema_decay=0.9",),
        ("recipe.grad_accum_steps=2",),
        ("recipe.precision=bf16",),
        ("recipe.optimizer=sgd", "recipe.schedule_step=epoch"),
    ],
    ids=["plain", "average", "micro-batches", "bf16", "sgd"],
)
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path, args: tuple[str, ...]):
    args, rng = ("dataset.workers=2", *args), np.random.default_rng(0)
    killed = Run(tmp_path, "killed", args)
    for _ in range(KILLS):
        step = killed.last()[1] + int(rng.integers(1, MOST_STEPS))
        with killed.started() as process:
            if not killed.reaches(process, step):
                break
            time.sleep(rng.uniform(0, 0.3))  # in a step, a checkpoint, an evaluation
    assert killed.last()[1] > 0
    whole = Run(tmp_path, "whole", args)
    assert differences(killed.finish(), whole.finish()) == []


def test_a_run_whose_ranks_are_killed_ends_as_an_undisturbed_one(tmp_path: Path):
    args, rng = ("dataset.workers=1", "recipe.epochs=16"), np.random.default_rng(0)
    killed = Run(tmp_path, "killed", args, (*TORCHRUN, f"--max-restarts={KILLS}"))
    with killed.started() as process:
        for _ in range(KILLS):
            if not killed.reaches(process, killed.last()[1] + int(rng.integers(2, MOST_STEPS))):
                break
            time.sleep(rng.uniform(0, 0.3))
            os.kill(killed.last(rank=int(rng.integers(2)))[0], signal.SIGKILL)
        assert process.wait(PATIENCE) == 0, killed.errors()
    whole = Run(tmp_path, "whole", args, TORCHRUN)
    assert differences(killed.folder, whole.finish()) == []


def test_a_full_disk_leaves_a_run_that_can_be_resumed(tmp_path: Path):
    """Files end at 64 KiB: checkpoints are larger, metrics and messages are not."""
    run = Run(tmp_path, "full")
    with run.started() as process:
        assert run.reaches(process, 20)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        assert process.wait(PATIENCE) == 1
    assert len(run.errors().splitlines()) == 1
    assert last_state(run.folder)["step"] >= 19
    assert differences(run.finish(), Run(tmp_path, "whole").finish()) == []


def test_workers_and_a_logger_change_no_result(tmp_path: Path):
    args = ("dataset.workers=3", "logger=wandb", "logger.wandb.mode=offline")
    one, other = Run(tmp_path, "one", ("dataset.workers=0",)), Run(tmp_path, "other", args)
    assert differences(one.finish(), other.finish()) == []
