"""A run says once, after its first epochs, that tau mixes nearly every sample."""

import re
from pathlib import Path

import pytest
import torch

from reproduction.training.mixing import MixedShare
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_synchronisation import counted, trainer_on
from tests.reproduction.test_training import folder
from tokenmixup import HTM, Output
from tokenmixup.output import LayerMix

pytestmark = pytest.mark.usefixtures("unevaluated")


def output(difficulty: torch.Tensor, taus: dict[int, float]) -> Output:
    nothing = torch.zeros(len(difficulty), 1)
    layers = tuple(
        LayerMix(layer, nothing, difficulty, difficulty < tau, nothing, nothing)
        for layer, tau in taus.items()
    )
    return Output(nothing, nothing, layers=layers)


def warnings(taus: dict[int, float], epochs: int = 30) -> list[str]:
    """Of a run whose difficulties are 0.00, 0.01, ..., 2.99 in the third epoch, 9 otherwise."""
    htm = HTM(layer=[*taus], tau=[*taus.values()])
    share = MixedShare(htm, epochs)
    lines = []
    for epoch in range(1, 6):
        nats = torch.arange(300) / 100 if epoch == 3 else torch.full((300,), 9.0)
        for part in nats.split(70):  # the last is smaller
            share.add(epoch, [output(half, taus) for half in part.tensor_split(2)])
        lines += share.warnings()
    return lines


def test_the_line_holds_the_quantiles_of_the_difficulties():
    (line,) = warnings({2: 2.95})
    assert line == (
        "warning: augmentation.htm.tau=2.95: epoch 3 mixed 98% of the samples at layer 2; their "
        "difficulty in nats is 0.15, 0.75, 1.50, 2.24, 2.84 (quantiles 5, 25, 50, 75, 95 %); "
        "a smaller tau leaves hard ones as they are"
    )


@pytest.mark.parametrize(
    ("taus", "told"),
    [
        ({1: 0.0}, []),
        ({1: 0.01}, []),  # the share still rises
        ({1: torch.inf}, []),  # said on purpose
        ({1: 2.8}, []),
        ({1: 2.9, 3: 1.0}, ["97% of the samples at layer 1"]),
        ({1: 2.9, 3: 2.95}, ["97% of the samples at layer 1", "98% of the samples at layer 3"]),
    ],
    ids=str,
)
def test_layers_that_mix_most_samples_are_named(taus: dict[int, float], told: list[str]):
    lines = warnings(taus)
    assert len(lines) == len(told)
    assert all(text in line for text, line in zip(told, lines, strict=True))


def test_difficulties_of_skipped_updates_do_not_count():
    share, taus = MixedShare(HTM(layer=1, tau=9.0), 1), {1: 9.0}
    nats = torch.tensor([*[1.0, 2.0, 3.0] * 10, torch.nan])
    share.add(3, [output(nats, taus)])
    (line,) = share.warnings()
    assert "97%" in line and "is 1.00, 1.00, 2.00, 3.00, 3.00 " in line
    share.add(3, [output(torch.full((4,), torch.nan), taus)])
    assert [*share.warnings()] == []


def test_a_run_says_it_once(command: Command, tmp_path: Path):
    args = "name=mine", "augmentation.htm.tau=4", *SMALL, "recipe.epochs=3"
    result = command("train", *args)
    assert result.status == 0, result.err
    (line,) = re.findall("warning: .* leaves hard ones", result.out + result.err)
    assert "augmentation.htm.tau=4.0: epoch 3 mixed 100% of the samples" in line
    median = float(re.findall(r"nats is (?:\S+, ){2}(\S+),", line)[0])
    steps, _ = folder(tmp_path).read_metrics()
    assert median == pytest.approx(steps[-2]["difficulty"], abs=0.3)


def test_a_run_of_two_epochs_says_nothing():
    """Its difficulties are still about those of guessing."""
    share = MixedShare(HTM(layer=1, tau=9.9), 2)
    for epoch in (1, 2):
        share.add(epoch, [output(torch.full((4,), 9.0), {1: 9.9})])
        assert [*share.warnings()] == []


def test_collecting_difficulties_adds_no_wait():
    trainer = trainer_on("meta", ["htm"])
    share = MixedShare(trainer.module.htm, 9)
    images, classes = torch.zeros(6, 3, 32, 32, device="meta"), torch.arange(6, device="meta")
    with counted() as counts:
        parts = trainer.train_step(images, classes, 6)
        before = counts.copy()
        share.add(share.epoch, [part.output for part in parts])
    assert counts == before and [*share.seen] == [1]
