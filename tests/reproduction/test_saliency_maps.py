"""Figure 3: the three saliency maps of a run equal those of the library."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from reproduction.reporting.gallery import entropy, saliency_maps
from tests.conftest import CLASSES, small_vit
from tests.reproduction.conftest import SMALL, Command
from tokenmixup import attach

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "look.py")


def test_entropy_ranges_from_one_token_to_all():
    assert entropy(torch.tensor([[0.0, 3.0, 0.0, 0.0]])) == 0.0
    assert entropy(torch.full((2, 8), 0.5)) == pytest.approx(math.log(8))


def test_saliency_maps_equal_the_saliency_that_htm_uses(build, batch):
    """Compares with each detector's saliency in the mixing of a training pass."""
    images, targets = batch
    maps = saliency_maps(attach(build(), CLASSES, htm={"layer": 1}), images, targets)
    settings = {
        "one_step": {},
        "full_rollout": {"rollout_steps": 2},
        "gradient": {"detector": "gradient"},
    }
    for name, options in settings.items():
        module = attach(build(), CLASSES, htm={"layer": 1, **options})
        used = []
        detect = module.detect
        module.detect = lambda entry, detect=detect, used=used: (
            used.append(detect(entry)) or used[-1]
        )
        module.model.eval()
        module.mixed_pairs(images, targets)
        torch.testing.assert_close(maps[name], used[0])


def test_saliency_maps_refuse_an_impossible_rollout():
    model = small_vit()
    module = attach(model, CLASSES, htm={"layer": 1})
    model.rope_mixed = True  # each block has its own positions
    with pytest.raises(ValueError, match="rotary"):
        saliency_maps(module, torch.zeros(2, 3, 32, 32), torch.eye(CLASSES)[:2])


def test_saliency_maps_do_not_depend_on_the_batch_size(monkeypatch):
    module = attach(small_vit(), CLASSES, htm={"layer": 1})
    images, targets = torch.randn(5, 3, 32, 32), torch.eye(CLASSES)
    expected = saliency_maps(module, images, targets)
    monkeypatch.setattr("reproduction.reporting.gallery.GRADIENTS_AT_ONCE", 2)
    torch.testing.assert_close(saliency_maps(module, images, targets), expected)


def test_saliency_maps_of_the_last_block_have_no_second_rollout():
    images, targets = torch.randn(2, 3, 32, 32), torch.eye(CLASSES)[:2]
    last = len(small_vit().blocks) - 1
    maps = saliency_maps(attach(small_vit(), CLASSES, htm={"layer": last}), images, targets)
    assert list(maps) == ["gradient", "one_step"]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """`draw(*args)` runs look.py; returns status, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT, *args])
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capfd.readouterr()

    return call


def test_script_draws_a_run(command: Command, draw, tmp_path: Path):
    assert command("train", "name=small", *SMALL, "recipe.max_steps=2").status == 0
    picture = tmp_path / "picture.png"
    status, out, err = draw(
        str(tmp_path / "outputs" / "small"), "--saliency", str(picture), "--images", "3"
    )
    assert status == 0, err
    lines = [line.partition(": entropy ") for line in out.splitlines()]
    assert "picture.pdf" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.with_suffix(".pdf").read_bytes()[:4] == b"%PDF"
    entropies = {name: float(nats.removesuffix(" nats")) for name, _, nats in lines if nats}
    assert list(entropies) == ["gradient", "one step", "uniform"]  # HTM is at the last block
    assert all(0 < nats <= entropies["uniform"] for nats in entropies.values())


def test_script_refuses_invalid_arguments_in_one_line(command: Command, draw, tmp_path: Path):
    line = ["train", "name=plain", "augmentation=[]", "recipe.max_steps=1", *SMALL]
    assert command(*line).status == 0
    for args, part in (
        ([str(tmp_path)], "is not a run folder"),
        ([str(tmp_path), "--saliency", "picture.pdf"], "must end in .png"),
        ([str(tmp_path), "--images", "0"], "--images: '0' is not 1 or more"),
        ([str(tmp_path / "outputs" / "plain"), "--saliency"], "was trained without htm"),
    ):
        status, _, err = draw(*args)
        assert status == 2
        assert len(err.splitlines()) == 1 and part in err
