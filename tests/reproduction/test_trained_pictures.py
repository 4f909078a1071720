"""Figures of trained models: images, mixed pairs, and the report of a run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.patches import PathPatch

from reproduction.models.build import build_module
from reproduction.reporting import report
from reproduction.reporting import trained as module_of_trained
from reproduction.reporting.figures import figure
from reproduction.reporting.gallery import (
    _draw_pair,
    _frames,
    _over_image,
    _quote,
    _telling,
    draw_pairs,
)
from reproduction.reporting.trained import (
    TrainedRun,
    batch_size,
    some_images,
)
from reproduction.runs.folder import RunFolder
from tests.reproduction.conftest import SMALL, Command, config_of, load_source

MIXING = ("augmentation.htm.tau=inf", "augmentation.htm.rho=0")


def trained(*overrides: str) -> TrainedRun:
    """Returns an untrained run on digits."""
    config = config_of(*SMALL, *overrides)
    source = load_source("digits", None, config.dataset.limit)
    torch.manual_seed(0)
    module = build_module(config.model, config.augmentation, len(source.classes))
    module.model.eval()
    return TrainedRun(config, module, source, torch.device("cpu"))


def test_some_images_are_a_fixed_order_with_smoothed_labels():
    run = trained()
    many, few = some_images(run, 12), some_images(run, 5)
    for part, first in zip(many, few, strict=True):
        assert torch.equal(part[:5], first)
    torch.testing.assert_close(many.targets.sum(dim=1), torch.ones(12))
    torch.testing.assert_close(many.targets.amax(dim=1), torch.full((12,), 0.91))
    assert torch.equal(many.targets.argmax(dim=1), many.classes)
    assert len(some_images(run, 1000).images) == 60  # all training images


def test_large_models_get_fewer_images_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    run = trained()
    assert batch_size(run) == 20  # at most the recipe's batch size
    monkeypatch.setattr(module_of_trained, "LARGEST_FOR_A_CPU", 1.0)
    assert batch_size(run) == 1
    assert batch_size(run._replace(device=torch.device("cuda"))) == 20


def test_draw_pairs_is_reproducible_with_any_class_names(tmp_path: Path):
    run = trained(*MIXING, "augmentation.htm.detector=random")
    names = [f"a_$long$_name_{{of}}_class_{i}" for i in range(10)]
    run = run._replace(source=run.source._replace(classes=names))
    for name in ("one.png", "other.png"):
        draw_pairs(tmp_path / name, run, some_images(run, 20))
        torch.rand(3)
    for suffix in ("png", "pdf"):
        one, other = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "other"))
        assert one == other and len(one) > 10_000
    assert _quote(names[0]) == '"a_$long$_n..."'


def test_pair_shows_the_saliency_that_decides_and_the_donated_patches(tmp_path: Path):
    pictures = np.stack([np.zeros((6, 6, 3)), np.ones((6, 6, 3))])
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 4] = True  # the centre
    donor, keep_ratio = torch.tensor([1, 1]), torch.tensor([0.75, 1.0])
    mix: Any = SimpleNamespace(donor=donor, mask=mask, keep_ratio=keep_ratio)
    saliency = torch.stack([torch.arange(9) / 9, torch.ones(9)])
    with figure(tmp_path / "a.png", 1, 6) as row:
        _draw_pair(row, mix, 0, pictures, ['"6"', '"3"'], saliency)
        shown = [ax.images[0].get_array() for ax in row[:5]]
        outlined = [[x for x in ax.patches if isinstance(x, PathPatch)] for ax in row]
        assert [len(x) for x in outlined] == [0, 1, 1, 1, 1, 0]
        assert (shown[0] == 0).all() and (shown[2] == 1).all()
        assert shown[1][2, 2] == pytest.approx(4 / 9) and (shown[3] == 1).all()
        assert {ax.images[0].get_clim() for ax in (row[1], row[3])} == {(0, 1)}  # one scale
        assert (shown[4][2:4, 2:4] == 1).all() and (shown[4][:2] == 0).all()  # not tinted
        assert row[4].get_title() == "mixed:\n1 of 9 tokens"
        own, donors = row[5].patches
        assert (own.get_y(), own.get_height()) == (0, 0.75)
        assert (donors.get_y(), donors.get_height()) == (0.75, 0.25)
        assert [text.get_text() for text in row[5].texts] == ['75%\n"6"', '25%\n"3"']


def test_pairs_of_different_classes_come_first():
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, :2] = mask[1, :1] = mask[2, :2] = True  # the fourth is not mixed
    mix: Any = SimpleNamespace(mask=mask, donor=torch.tensor([1, 2, 3, 3]))
    assert _telling(mix, torch.tensor([7, 7, 8, 9])) == [2, 1, 0]


def test_each_two_classes_are_shown_once_before_the_rest():
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[0, :4] = mask[1, :3] = mask[2, :2] = mask[3, :1] = True
    mix: Any = SimpleNamespace(mask=mask, donor=torch.tensor([1, 0, 0, 2]))
    assert _telling(mix, torch.tensor([7, 8, 9, 8])) == [0, 2, 3]
    assert _telling(mix, torch.tensor([7, 8, 9, 9])) == [0, 2, 1]


def test_deciding_saliency_is_what_the_mask_compares():
    run = trained(*MIXING)
    sample = some_images(run, 20)
    mix = run.module.mixed_pairs(sample.images, sample.targets)
    gaps = mix.saliency[mix.donor] - mix.saliency
    assert mix.mask.any() and bool((gaps[mix.mask] > 0).all())


def test_draw_pairs_refuses_a_run_without_mixed_images(tmp_path: Path):
    run = trained("augmentation.htm.tau=0")
    with pytest.raises(ValueError, match="none of 20 images"):
        draw_pairs(tmp_path / "pairs.png", run, some_images(run, 20))
    assert not list(tmp_path.iterdir())


def test_frames_outline_replaced_tokens():
    grid = np.zeros((3, 3), dtype=bool)
    grid[0, 1:] = True  # two adjacent tokens: six sides, none between them
    ends = _frames(grid, 6).get_path().vertices.reshape(-1, 2, 2)
    lines = {tuple(map(tuple, line)) for line in ends}
    assert len(lines) == 6
    assert ((1.5, -0.5), (1.5, 1.5)) in lines  # left side
    assert ((3.5, -0.5), (3.5, 1.5)) not in lines
    over = _over_image(grid, 6)
    assert over[:2, 2:].all() and over.sum() == 8


@pytest.mark.draws
def test_report_states_why_figures_are_missing(command: Command, tmp_path: Path):
    line = ["train", "name=mine", "augmentation.htm.tau=0", "recipe.max_steps=2", *SMALL]
    assert command(*line).status == 0
    run = RunFolder(tmp_path / "outputs" / "mine")
    page = run.report_path.read_text()
    assert (
        "\nmixed_pairs.png is not drawn: the trained model mixes none of 20 images at block 1.\n"
        in page
    )
    assert "](saliency.png)" in page and "Top-1 and loss on the held-out images" in page
    assert re.search(
        r"^# mine\n\ncct_2_3x2 \([\d,]+ parameters\), trained on 60 images of digits with "
        r"htm\+vtm, seed 0, on .+: top-1 [\d.]+ % \(best [\d.]+ %\) after 1 epoch in [\w ]+ s\.\n",
        page,
    )
    assert "median" not in page and "broken" not in page
    run.report_path.unlink()
    run.last_path.unlink()
    assert command(*line, "resume=auto").status == 0
    page = run.report_path.read_text()
    assert "No pictures of the trained model: checkpoint=" in page
    assert "](saliency.png)" not in page and "](accuracy.png)" in page


def test_report_describes_its_run_and_counts_what_there_is():
    config = config_of("augmentation=[]", "recipe.evaluate_every=4", "devices=2")
    result = {"top1_last": 90.0, "top1_best": 91.0, "top1_median10": 89.5, "top5_last": 99.0}
    result |= {"parameters": 1234, "macs": 5678, "images_per_second": 9.4, "steps": 70}
    summary = {**result, "epochs": 14, "seconds": 7384, "hardware": "Some CPU", "git_revision": "a"}
    assert report._description(config, summary) == (
        "cct_2_3x2 (1,234 parameters), trained on digits with no mixing, seed 0, on Some CPU in "
        "2 processes: top-1 90.00 % (best 91.00 %) after 14 epochs in 2 h 3 min."
    )
    table = report._table(config, summary)
    assert "| top-1, median of the last 3 evaluated epochs | 89.50 % |" in table  # 8, 12, 14
    assert "| peak learning rate | 0.002 |\n| batch size | 64 |" in table and "htm" not in table
    numbers = {"tau": [1.0, "inf"], "rho": [0.02, 1 / 3]}
    table = report._table(config, {**summary, "htm": numbers})
    assert "| htm.tau | 1, inf |\n| htm.rho | 0.02, 0.3333 |" in table
    assert "median" not in report._table(config, {**summary, "epochs": 3})
    assert [report._duration(x) for x in (4.6, 207, 59.7)] == ["5 s", "3 min 27 s", "1 min 0 s"]
