"""Small runs: run folders, resuming, interruptions, precision, sweeps, evaluation."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.runs.folder import RunFolder
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import (
    at_step,
)

STEP_KEYS = {
    "step",
    "epoch",
    "loss",
    "lr",
    "images_per_second",
    "mixed_samples",
    "mixed_tokens",
    "difficulty",
    "gain_max",
    "gain_mean",
}
SUMMARY_KEYS = {
    "top1_last",
    "top1_best",
    "top1_median10",
    "top5_last",
    "top5_best",
    "parameters",
    "macs",
    "seconds",
    "images_per_second",
    "threads",
    "seed",
    "versions",
    "git_revision",
    "status",
}
MIXED = [
    "augmentation=[mixup,cutmix,htm,vtm]",
    "augmentation.htm.tau=2.4",
    "recipe.transforms.erasing_prob=0.5",
]


def folder(tmp_path: Path, name: str = "mine") -> RunFolder:
    return RunFolder(tmp_path / "outputs" / name)


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return torch.load(run.last_path, weights_only=True)["module"]


def assert_same_result(one: RunFolder, other: RunFolder) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    for lines, others in zip(one.read_metrics(), other.read_metrics(), strict=True):
        assert without_times(lines) == without_times(others)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Raises `error` when `step` steps are completed."""

    def fail() -> None:
        raise error

    at_step(monkeypatch, step, fail)


def signal_in(monkeypatch: pytest.MonkeyPatch, step: int, *signals: signal.Signals) -> list[int]:
    """Raises signals in the step that follows `step` completed ones; returns the steps computed."""
    original, computed = Trainer.train_step, []

    def signalled_step(self: Trainer, *args: Any) -> Any:
        if self.step == step:
            for signum in signals:
                signal.raise_signal(signum)
        computed.append(self.step)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", signalled_step)
    return computed


# in 2 epochs of 3 steps: within and at the end of epochs
