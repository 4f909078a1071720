"""The measured effects of the published rules, on saliency with known effects."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from reproduction.reporting.differences import Batch, measure, random_batches
from scripts import measure_differences
from tests.reproduction.conftest import SMALL, Command


def test_measure_of_a_batch_with_known_effects():
    """Two easy samples exchange their only salient token; the third is hard and unchanged."""
    saliency = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1]])
    easy = torch.tensor([False, True, True])
    batch = Batch(saliency, easy, torch.eye(3), [], num_prefix_tokens=1, class_token=True)
    effects = measure([batch], rho=0.0, kappa=1)
    assert effects["easy samples"] == pytest.approx(2 / 3)
    assert effects["order: rows that read another sample's memory"] == 1.0
    assert effects["mask: tokens replaced per sample, paper"] == 1.0
    # each donor's best token is compared with the first easy sample's, which agrees with itself
    assert 0 <= effects["mask: tokens with the same decision"] <= 1
    assert effects["class token: samples whose class token enters VTM"] == pytest.approx(1 / 3)
    assert effects["class token: samples whose last patch is lost"] == 0.0
    assert effects["class token: VTM's tokens that change"] == 1.0


def test_measure_finds_no_effects_where_the_rules_agree():
    """All samples are easy and equal: nothing to gain, nothing to move."""
    saliency = torch.full((4, 6), 1 / 6)
    targets = F.one_hot(torch.arange(4), 4).float()
    batch = Batch(saliency, torch.ones(4, dtype=torch.bool), targets, [], 0, False)
    effects = measure([batch], rho=0.01, kappa=2)
    assert effects["mask: tokens with the same decision"] == 1.0
    assert effects["mask: label mass that moves"] == 0.0
    assert effects["order: rows that read another sample's memory"] == 0.0


def test_a_batch_without_easy_samples_does_not_count_for_the_mask():
    easy, hard = random_batches(2, b=16, t=9, prefix=1)[:2]
    hard = hard._replace(is_easy=torch.zeros(16, dtype=torch.bool))
    key = "mask: tokens with the same decision"
    assert measure([hard, easy], 0.005, 2)[key] == measure([easy], 0.005, 2)[key]


def test_random_batches_are_reproducible():
    one, other = (measure(random_batches(3, b=16, t=9, prefix=1), 0.005, 2) for _ in range(2))
    assert one == other
    assert one != measure(random_batches(4, b=16, t=9, prefix=1), 0.005, 2)


def test_script_measures_a_run_and_refuses_others(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    for name, more in (("small", []), ("plain", ["augmentation=[]"])):
        assert command("train", f"name={name}", "recipe.max_steps=2", *more, *SMALL).status == 0
    monkeypatch.setattr(sys, "argv", ["measure_differences.py", "outputs/small"])
    measure_differences.main()
    head, _, *rows = capfd.readouterr().out.splitlines()
    assert head.endswith("| small |")
    assert any(row.startswith("| mask: tokens with the same decision |") for row in rows)
    for name, part in (("plain", "was trained without htm"), ("nothing", "is not a run folder")):
        monkeypatch.setattr(sys, "argv", ["measure_differences.py", f"outputs/{name}"])
        with pytest.raises(SystemExit) as end:
            measure_differences.main()
        (line,) = capfd.readouterr().err.splitlines()
        assert end.value.code == 2 and part in line
