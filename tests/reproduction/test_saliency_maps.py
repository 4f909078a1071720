"""Figure 3: the three saliencies of a run, against the library's own."""

import json
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

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "draw_saliency.py")


def test_entropy_is_zero_for_one_token_and_greatest_for_all():
    assert entropy(torch.tensor([[0.0, 3.0, 0.0, 0.0]])) == 0.0
    assert entropy(torch.full((2, 8), 0.5)) == pytest.approx(math.log(8))


def test_maps_are_what_htm_would_use(build, batch):
    """Each detector's own saliency, as it reaches the mixing of a training pass."""
    images, targets = batch
    found = saliency_maps(attach(build(), CLASSES, htm={"layer": 1}), images, targets)
    settings = {
        "one_step": {},
        "full_rollout": {"rollout_steps": 2},
        "gradient": {"detector": "gradient"},
    }
    for name, options in settings.items():
        module = attach(build(), CLASSES, htm={"layer": 1, **options})
        used = []
        detect = module._detect
        module._detect = lambda entry, detect=detect, used=used: (
            used.append(detect(entry)) or used[-1]
        )
        module.model.eval()
        module.mixed_pairs(images, targets)
        torch.testing.assert_close(found[name], used[0])


def test_a_rollout_that_is_not_possible_is_refused():
    model = small_vit()
    module = attach(model, CLASSES, htm={"layer": 1})
    model.rope_mixed = True  # each block has positions of its own
    with pytest.raises(ValueError, match="rotary"):
        saliency_maps(module, torch.zeros(2, 3, 32, 32), torch.eye(CLASSES)[:2])


def test_maps_do_not_depend_on_how_many_are_taken_at_once(monkeypatch):
    module = attach(small_vit(), CLASSES, htm={"layer": 1})
    images, targets = torch.randn(5, 3, 32, 32), torch.eye(CLASSES)
    whole = saliency_maps(module, images, targets)
    monkeypatch.setattr("reproduction.reporting.gallery.GRADIENTS_AT_ONCE", 2)
    torch.testing.assert_close(saliency_maps(module, images, targets), whole)


def test_before_the_last_block_the_rollout_is_not_told_twice():
    images, targets = torch.randn(2, 3, 32, 32), torch.eye(CLASSES)[:2]
    last = len(small_vit().blocks) - 1
    found = saliency_maps(attach(small_vit(), CLASSES, htm={"layer": last}), images, targets)
    assert list(found) == ["gradient", "one_step"]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """`draw(*args)` as typed: status, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT, *args])
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capfd.readouterr()

    return call


def test_the_script_draws_a_run(command: Command, draw, tmp_path: Path):
    assert command("train", "name=small", *SMALL, "recipe.max_steps=2").status == 0
    picture = tmp_path / "picture.png"
    status, out, err = draw(str(tmp_path / "outputs" / "small"), str(picture), "--images", "3")
    assert status == 0, err
    assert "one step: entropy" in out and "picture.pdf" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.with_suffix(".pdf").read_bytes()[:4] == b"%PDF"
    found = json.loads(picture.with_suffix(".json").read_text())
    assert list(found) == ["gradient", "one_step", "uniform"]  # HTM acts in the last block
    assert all(0 < nats <= found["uniform"] for nats in found.values())


def test_the_script_refuses_in_one_line(command: Command, draw, tmp_path: Path):
    line = ["train", "name=plain", "augmentation=[]", "recipe.max_steps=1", *SMALL]
    assert command(*line).status == 0
    for args, part in (
        ([str(tmp_path)], "is not a run folder"),
        ([str(tmp_path), "picture.pdf"], "must end in .png"),
        ([str(tmp_path), "--images", "0"], "--images: '0' is not 1 or more"),
        ([str(tmp_path / "outputs" / "plain")], "was trained without htm"),
    ):
        status, _, err = draw(*args)
        assert status == 2
        assert len(err.splitlines()) == 1 and part in err
