"""The comparison and the reports of `make chaos`. Its kills: test_distributed.py."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reproduction.runs.folder import RunFolder
from reproduction.training.checkpoint import save_last
from tests.chaos.__main__ import main, summary_line, write_outcomes
from tests.chaos.child import PHASE_OF, PHASES, Note, notes_of
from tests.chaos.runs import Outcome, differences, last_state
from tests.chaos.settings import _agree, loading_errors, write_images
from tests.reproduction.conftest import SMALL, trained_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("chaos")
    return trained_run(root, *SMALL)


def change_lines(run: RunFolder, change: Callable[[list[str]], list[str]]) -> None:
    lines = run.metrics_path.read_text().splitlines()
    run.metrics_path.write_text("\n".join(change(lines)) + "\n")


def flip_last_bit(run: RunFolder) -> None:
    state = last_state(run)
    state["module"]["model.head.bias"].view(torch.int32)[0] ^= 1
    save_last(run.last_path, state)


HARMS: dict[str, tuple[Callable[[RunFolder], object], str]] = {
    "a bit": (flip_last_bit, "checkpoint: module.model.head.bias"),
    "best": (lambda run: run.best_path.write_bytes(b"other"), "best.safetensors"),
    "twice": (lambda run: change_lines(run, lambda x: [*x, x[-1]]), "3 lines of epochs for 2"),
    "loss": (
        lambda run: change_lines(run, lambda x: [x[0].replace('"loss": 2', '"loss": 3'), *x[1:]]),
        "line of batches",
    ),
    "result": (lambda run: run.write_summary(top1_last=0.0), "summary"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_differences_finds_every_harm(tmp_path: Path, undisturbed: RunFolder, harm: str):
    mine = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "mine"))
    apply, message = HARMS[harm]
    apply(mine)
    first, *_ = differences(mine, undisturbed)
    assert message in first


def test_differences_ignores_speed(tmp_path: Path, undisturbed: RunFolder):
    mine = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "mine"))
    mine.write_summary(seconds=1e6, images_per_second=0.1)
    speed = re.compile(r'(?<="images_per_second": )[0-9.]+')
    change_lines(mine, lambda lines: [speed.sub(lambda x: "1" * len(x[0]), y) for y in lines])
    assert differences(mine, undisturbed) == []


def test_loading_errors_finds_unloaded_images(tmp_path: Path):
    root = write_images(tmp_path / "images", 11)
    (tmp_path / "x.pt").touch()
    args = (f"checkpoint={tmp_path / 'x.pt'}", "device=cpu", "dataset=image_folder")
    args += (f"dataset.root={root}", f"output_root={tmp_path}")
    assert list(loading_errors(11, 2, args)) == []
    assert list(loading_errors(12, 2, args)) == ["12 images, 2 ranks: not each of them once"]


def test_notes_persist_between_writers(tmp_path: Path):
    notes = notes_of(tmp_path / "run.notes", rank=1)
    assert notes.read() == Note(0, 0, "start-up")
    notes.write(7, phase="checkpoint")
    notes.write(phase="loading")
    step, _, phase = notes_of(tmp_path / "run.notes", rank=1).read()
    assert (step, phase) == (7, "loading")


def test_outcomes_are_printed_and_written(tmp_path: Path):
    outcome = Outcome("kills", {"kills": 3}, ["what differs"], [{"phase": "step", "kills": 3}], 2.0)
    assert summary_line(outcome) == "kills: kills 3; 1 differences; 2 s"
    write_outcomes(tmp_path, [outcome], "a machine")
    assert json.loads((tmp_path / "chaos.json").read_text())["parts"][0]["counts"] == {"kills": 3}
    text = (tmp_path / "chaos.md").read_text()
    assert "| kills | kills 3 | 1 | 2 |" in text


def test_main_puts_the_tables_on_a_page(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n<!-- chaos: begin -->\nold\n<!-- chaos: end -->\nend\n")
    args = ["--parts", "lock", "--outputs", str(tmp_path), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["chaos", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert capsys.readouterr().out.startswith("lock: starts ")
    tables = (tmp_path / "chaos" / "chaos.md").read_text()
    begin, finish = "<!-- chaos: begin -->\n", "<!-- chaos: end -->\n"
    assert page.read_text() == f"# Title\n{begin}{tables}{finish}end\n"


def test_the_functions_of_the_phases_exist():
    assert set(PHASE_OF.values()) <= set(PHASES)
    assert all(callable(getattr(*place)) for place in PHASE_OF)


@pytest.mark.parametrize(
    ("row", "agrees"),
    [
        ({"top1": 1.0, "loss": 2.301726}, True),
        ({"top1": 1.0, "loss": 2.3019}, False),
        ({"top1": 2.0, "loss": 2.301724}, False),
        ({"error": "failed"}, False),
    ],
)
def test_evaluations_agree_in_counts_and_up_to_rounding_in_loss(row, agrees: bool):
    assert _agree(row, {"top1": 1.0, "loss": 2.301724}) is agrees
