"""Figure 3: the three saliencies of a run, against the library's own."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reproduction.reporting.saliency_maps import entropy, saliency_maps
from tests.conftest import CLASSES
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
        torch.testing.assert_close(getattr(found, name), used[0])


def test_the_script_draws_a_run(command: Command, tmp_path: Path):
    short = [*SMALL, "recipe.max_steps=2"]
    assert command("train", "name=small", *short).status == 0
    picture = tmp_path / "picture.png"
    line = [sys.executable, SCRIPT, str(tmp_path / "outputs" / "small"), str(picture)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one step: entropy" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.with_suffix(".pdf").read_bytes()[:4] == b"%PDF"


def test_the_script_refuses_in_one_line(tmp_path: Path):
    for args, part in (
        ([str(tmp_path)], "is no run folder"),
        ([str(tmp_path), "picture.gif"], "is no run folder"),
    ):
        done = subprocess.run(
            [sys.executable, SCRIPT, *args], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1 and part in done.stderr
