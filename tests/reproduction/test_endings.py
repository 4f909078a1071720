"""An error is the error: what decides how a run ends, and where each reason is told."""

import gc
import signal
from pathlib import Path

import pytest

from reproduction.errors import Interrupted, PlainError, UserError
from reproduction.sweep import Sweep
from reproduction.training.stop import handling, stop_at_once
from tests.conftest import slow
from tests.images import OWN, disturbed
from tests.programs import (
    SMALL,
    TORCHRUN,
    Run,
    assert_refused,
    ended,
    evaluate,
    files_end_at,
    planted,
    started,
    train,
    trained,
)
from tokenmixup import TokenMixup

ONE = (SMALL, "recipe.epochs=1", "name=mine")


def test_weights_that_are_not_finite_have_no_accuracy(here: Path):
    """A rate that is far too large, of a single step whose loss and gradient are finite."""
    result = train(ONE, "recipe.max_steps=1", "recipe.lr=1e38", "recipe.weight_decay=1e6")
    assert_refused(result, "step 1: weights or the state of the optimiser", status=1)
    assert "top-1" not in result.out
    assert not Run("outputs/mine").checkpoints


@pytest.mark.parametrize("place", ["step", "loader", "evaluation"])
def test_a_bug_keeps_its_traceback(here: Path, place: str):
    def bug() -> object:
        raise FloatingPointError("not of the method")

    with planted(place, bug):
        result = train(ONE)
    assert result.status == 1
    assert "Traceback" in result.err
    assert "in bug" in result.err
    assert "FloatingPointError: not of the method" in result.lines[-1]


ENDS = [PlainError("a line"), MemoryError(), KeyError("a bug")]
ALL = ("augmentation=[mixup,cutmix,htm,vtm]", "recipe.ema_decay=0.9")


@pytest.mark.parametrize("error", [ENDS[2], *map(slow, ENDS[:2])], ids=repr)
def test_the_model_of_a_failed_run_is_freed_at_once(here: Path, error: Exception):
    """Not by Python's collector, which knows nothing of the memory of a GPU."""
    living = []

    def bug() -> object:
        living.append(sum(type(x) is TokenMixup for x in gc.get_objects()))
        raise type(error)(*error.args)

    gc.collect()  # what other tests have left
    gc.disable()
    try:
        with planted("step", bug):
            assert train("-m", "seed=0,1", SMALL, ALL).status == 1
    finally:
        gc.enable()
    assert living == [living[0]] * 2  # its own beside those that fixtures hold


def test_a_signal_that_is_ignored_stays_ignored():
    """As SIGHUP by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handling(stop_at_once):
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def test_a_sweep_ends_with_the_highest_status_of_its_runs():
    errors = [PlainError("failed"), Interrupted("stopped"), UserError("refused")]
    with pytest.raises(SystemExit, match="130"):
        Sweep([], is_whole=False).conclude(errors)


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_the_reason_of_another_rank_is_named(here: Path, by_torchrun: bool):
    """Of a program that prints on the first rank only, which knows that the other one is gone."""
    small = ("model.embed_dim=16", "recipe.max_steps=1", "device=cpu")
    trained(OWN, small)
    overrides = ("run=outputs/mine", OWN, "device=cpu")
    launcher: tuple[str, ...] = ()
    if by_torchrun:
        launcher = TORCHRUN
    else:
        overrides += ("devices=2",)
    with (
        disturbed("fail", at=3, half="held_out", rank=1),
        started(overrides, program="eval.py", launcher=launcher) as process,
    ):
        result = ended(process)
    assert result.status != 0
    (line,) = [line for line in result.lines if "rank 1: " in line]
    assert "ZeroDivisionError: what" in line


def test_a_full_disk_is_a_failure_that_names_the_file(here: Path):
    """Also where torch.save has made another error of the system's: it does at some sizes."""
    whole = trained(ONE, root="whole").path / "checkpoints"
    smallest = (whole / "best.safetensors").stat().st_size
    largest = (whole / "last.pt").stat().st_size
    for part in (1, 4, 7):
        with files_end_at(smallest + part * (largest - smallest) // 8):
            result = train(ONE, f"output_root=part{part}")
        assert_refused(result, f"part{part}/mine/checkpoints/last.pt: File too large", status=1)
    with files_end_at(100):
        result = evaluate("run=whole/mine", "device=cpu")
        assert_refused(result, "whole/mine/evaluation-last.json: File too large", status=1)
        assert "top-1" in result.out
    with files_end_at(3000):
        result = evaluate("run=whole/mine", "device=cpu", "predictions=p.csv")
        assert_refused(result, "p.csv: File too large", status=1)
    assert Run("whole/mine").evaluation()["images"] == 60
