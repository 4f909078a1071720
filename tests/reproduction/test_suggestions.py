"""Suggested shares of mixed samples and tokens equal those of a run with these tau and rho."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from reproduction.reporting.suggestions import suggestions
from reproduction.runs.folder import RunFolder
from reproduction.runs.parse import parse_saved
from reproduction.system.errors import UserError
from scripts import look
from tests.reproduction.conftest import SMALL, Command

STILL = ["model.drop_path=0", "recipe.lr=1e-20", "recipe.min_lr=0", "recipe.warmup_lr=0"]


def test_suggestions_equal_the_mixing_of_a_training_step(
    command: Command, tmp_path: Path, monkeypatch
):
    """The run neither learns nor drops out, so its epoch and the suggestions use equal weights."""
    args = ["name=mine", *SMALL, *STILL, "dataset.limit=20", "recipe.epochs=1"]
    stack = ["augmentation=[mixup,htm]", "augmentation.htm.layer=[0,1]"]
    assert command("train", *args, *stack, "augmentation.htm.tau=[2.3,inf]").status == 0
    run = RunFolder(tmp_path / "outputs/mine")
    first, second = suggestions(run, parse_saved(run.read_config()), batches=1)
    (step,), _ = run.read_metrics()
    assert (first.layer, second.layer, second.tau) == (0, 1, float("inf"))
    assert second.samples[float("inf")] == 1 == step["mixed_samples/1"] / 20
    for layer in (first, second):
        assert layer.samples.is_monotonic_increasing and layer.tokens.is_monotonic_decreasing
        assert layer.labels.is_monotonic_decreasing
        assert [*layer.samples.index] == sorted({0.5, 1.0, 1.5, 2.0, layer.tau})  # below ln(10)
        assert (layer.tokens.index > layer.rho).sum() >= 2
        assert layer.tokens[0.0] > 0 and layer.labels[0.0] > 0
        assert len(layer.quarters) == 4 and layer.quarters.index.is_monotonic_increasing
        assert layer.quarters.mean() == pytest.approx(layer.labels[layer.rho], abs=1e-6)
        assert np.all(np.diff(layer.difficulty) > 0) and np.all(np.diff(layer.difference) > 0)
    assert first.difficulty[0.05] < step["difficulty/0"] < first.difficulty[0.95]
    monkeypatch.setattr("sys.argv", ["look.py", f"run={run.path}", "--batches=1"])
    with redirect_stdout(io.StringIO()) as out:
        look.main()
    shown = out.getvalue()
    assert "layer 0: tau = 2.3" in shown and "layer 1: tau = inf" in shown
    assert "inf *" in shown and "label given" in shown


def test_suggestions_refuse_a_run_without_htm(command: Command, tmp_path: Path):
    assert command("train", "name=mine", "augmentation=[vtm]", *SMALL).status == 0
    run = RunFolder(tmp_path / "outputs/mine")
    with pytest.raises(UserError, match="without htm"):
        suggestions(run, parse_saved(run.read_config()), batches=1)
