"""The moving average of the weights: its values, and runs that evaluate and save it."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from reproduction.data.inputs import TrainingInputs
from reproduction.models.names import State
from reproduction.runs.folder import RunFolder
from reproduction.training.distributed import World
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import SMALL, Command, config_of, trained_run
from tests.reproduction.test_training import (
    MIXED,
    assert_same_result,
    folder,
    signal_in,
    without_times,
)
from tokenmixup import TokenMixup

AVERAGED = ["recipe.ema_decay=0.8", *MIXED, *SMALL]
ALONE = World(0, 1, torch.device("cpu"))


def average_of(run: RunFolder) -> State:
    return torch.load(run.last_path, weights_only=True)["model_ema"]


def trainer_of(*overrides: str) -> Trainer:
    """Builds a trainer of a small model with batch norm, for images of 8 pixels as they are."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10)
    return Trainer(
        config_of(*overrides),
        ALONE,
        module=TokenMixup(nn.Sequential(*layers), 10, htm=None, vtm=None),
        classes=[*"0123456789"],
        inputs=TrainingInputs(lambda x: x),
        steps_per_epoch=1,
    )


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_average_follows_every_update_from_the_initial_weights(precision: str):
    """Includes batch norm's running statistics; integers are copied."""
    overrides = ["recipe.ema_decay=0.75", "recipe.lr=0.1", f"recipe.precision={precision}"]
    trainer = trainer_of(*overrides)
    model = trainer.module.model
    if precision == "float16":  # a scale at which no gradient overflows
        trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 1024.0})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(3):
        torch.manual_seed(seed)
        trainer.train_step(torch.randn(6, 3, 8, 8), torch.arange(6), 6)
        for name, value in model.state_dict().items():
            mean = 0.75 * expected[name] + 0.25 * value
            expected[name] = mean if value.is_floating_point() else value.clone()
    average = trainer.evaluated.state_dict()
    assert average["1.num_batches_tracked"] == 3
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value, atol=1e-6, rtol=1e-5)
        assert name.endswith("tracked") or not torch.equal(value, model.state_dict()[name])


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with an average."""
    root = tmp_path_factory.mktemp("averaged")
    return trained_run(root, *AVERAGED)


def test_average_changes_evaluation_but_not_training(
    command: Command, tmp_path: Path, averaged: RunFolder
):
    assert command("train", "name=plain", *MIXED, *SMALL).status == 0
    (steps, epochs), (same, others) = (
        averaged.read_metrics(),
        folder(tmp_path, "plain").read_metrics(),
    )
    assert without_times(steps) == without_times(same)
    assert all(a["eval_loss"] != b["eval_loss"] for a, b in zip(epochs, others, strict=True))


def test_run_saves_the_average_that_it_evaluated(command: Command, averaged: RunFolder):
    epochs = averaged.read_metrics()[1]
    best = max(epochs, key=lambda line: line["top1"])
    for which, line in (("last", epochs[-1]), ("best", best)):
        assert command("eval", f"run={averaged.path}", f"weights={which}").status == 0
        evaluation = json.loads((averaged.path / f"evaluation-{which}.json").read_text())
        assert evaluation["eval_loss"] == line["eval_loss"]
    assert command("export", f"run={averaged.path}", "output=last.safetensors").status == 0
    assert_equal(load_file("last.safetensors"), average_of(averaged))


def test_average_resumes_exactly(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaged: RunFolder
):
    with monkeypatch.context() as patch:
        signal_in(patch, 1, signal.SIGTERM)
        assert command("train", "name=mine", *AVERAGED).status == 130
    assert command("train", "name=mine", "resume=auto", *AVERAGED).status == 0
    mine = folder(tmp_path)
    assert_same_result(mine, averaged)
    assert_equal(average_of(mine), average_of(averaged))
    assert_equal(load_file(mine.best_path), load_file(averaged.best_path))


def assert_equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
