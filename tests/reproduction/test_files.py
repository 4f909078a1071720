"""The files of a run: in which order they reach the disk, and who writes beside whom."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from reproduction import errors, machine
from tests.programs import SMALL, Run, assert_succeeded, ended, started, train, trained

ONE = (SMALL, "name=mine", "resume=auto")


class Event(NamedTuple):
    """What a run lets the system do with a file: `flush`, `move`, or `gone` for a last.pt."""

    kind: str
    path: str
    rest: str  # the bytes of one that is flushed, the target of one that is moved


class Noted(NamedTuple):
    events: list[Event]
    run: Run


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Noted:
    """A run, and what it lets the system do with files."""
    fsync = os.fsync
    replace = os.replace
    events = []

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(Event("flush", path, str(os.stat(path).st_size)))

    def noted_replace(path: Any, target: Any) -> None:
        replace(path, target)
        events.append(Event("move", os.path.abspath(path), os.path.abspath(target)))
        if Path(path).name == "last.pt":
            events.append(Event("gone", os.path.abspath(path), ""))

    with (
        mock.patch.object(os, "fsync", noted_fsync),
        mock.patch.object(os, "replace", noted_replace),
    ):
        run = trained(ONE, root=tmp_path_factory.mktemp("noted"))
    return Noted(events, run)


def test_files_are_flushed_before_they_are_moved_and_folders_after(noted: Noted):
    events = noted.events
    for place, event in enumerate(events):
        assert event.kind != "gone"
        if event.kind == "move":
            before = events[place - 1]
            after = events[place + 1]
            assert before[:2] == ("flush", event.path), events
            assert after[:2] == ("flush", str(Path(event.rest).parent)), events


def test_which_files_are_moved_into_their_place(noted: Noted):
    folder = noted.run.path
    moved = [Path(event.rest) for event in noted.events if event.kind == "move"]
    for name in ("config.yaml", "summary.json", "report.md"):
        assert folder / name in moved
    assert moved.count(folder / "checkpoints/last.pt") == 2


def test_lines_are_flushed_before_the_checkpoint_that_records_their_size(noted: Noted):
    lines = str(noted.run.path / "metrics.jsonl")
    last = str(noted.run.path / "checkpoints/last.pt")
    flushed = [place for place, event in enumerate(noted.events) if event.path == lines]
    moved = [place for place, event in enumerate(noted.events) if event.rest == last]
    assert flushed[-1] < moved[-1]
    sizes = [int(noted.events[place].rest) for place in flushed]
    recorded = [noted.run.checkpoint(age)["metrics_size"] for age in (1, 0)]
    assert recorded == sizes[-2:]


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(here: Path):
    assert_succeeded(train(ONE, "recipe.max_steps=1"))
    left = [
        "checkpoints/.last.pt.tmp",  # of an earlier revision
        "checkpoints/.last.pt.elsewhere-1.tmp",
        ".summary.json.elsewhere-1.tmp",
    ]
    used = [".evaluation-last.json.elsewhere-1.tmp", ".accuracy.svg.elsewhere-1.tmp"]
    for name in left + used:
        Path("outputs/mine", name).touch()
    assert_succeeded(train(ONE, "recipe.max_steps=1"))
    names = [path.name for path in Path("outputs/mine").rglob("*.tmp")]
    assert sorted(names) == sorted(used)


@pytest.mark.slow
def test_two_programs_write_the_same_file_beside_each_other(here: Path):
    assert_succeeded(train(ONE))
    evaluation = partial(started, "run=outputs/mine", program="eval.py")
    for _ in range(3):
        with evaluation() as one, evaluation() as other:
            for result in (ended(one), ended(other)):
                assert_succeeded(result)
                assert result.err == ""
    assert Run("outputs/mine").evaluation()["images"] == 60


def test_a_run_without_a_terminal_tells_how_far_it_is(here: Path, monkeypatch: pytest.MonkeyPatch):
    assert "step" not in train(ONE).out
    monkeypatch.setattr(errors, "PULSE", 0.0)
    out = train(ONE, "output_root=told").out
    run = Run("told/mine")
    assert len(run.steps) == 6
    for line in run.steps:
        place = "epoch {epoch}/2  step {step}/6".format(**line)
        figures = "loss {loss:.3f}  easy {easy_samples}, mixed {mixed_samples}, ".format(**line)
        assert f"{place}  {figures}" in out
    assert out.count(" left") >= 6


IMPORT = """
import multiprocessing, os, signal, sys, time, warnings

def child():
    def end(*_):
        open("ended", "w").close()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    open("ready", "w").close()
    time.sleep(60)

before = [*warnings.filters]
handlers = [signal.getsignal(x) for x in signal.valid_signals()]
import reproduction, reproduction.training.run, reproduction.reporting.report
reproduction.load_run("outputs/mine")
assert [signal.getsignal(x) for x in signal.valid_signals()] == handlers
ours = [x for x in warnings.filters if x not in before and "PIL" in str(x)]
assert not ours, ours
multiprocessing.get_context("fork").Process(target=child, daemon=True).start()
while not os.path.exists("ready"):
    time.sleep(0.01)
"""


def test_an_import_has_no_effects_on_a_process(here: Path):
    """Its children are ended as Python ends them, its signals and warnings are its own."""
    assert_succeeded(train(ONE, "recipe.max_steps=1"))
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
    assert Path("ended").exists()


def test_the_revision_is_that_of_the_code_and_of_no_project_around_it(here: Path):
    """Such as one whose virtual environment holds the installed package."""
    code = Path(machine.__file__).read_text()
    package = here / "project" / ".venv" / "reproduction"
    package.mkdir(parents=True)
    (package / "machine.py").write_text(code)
    (package / "__init__.py").touch()
    ask = "from reproduction.machine import git_revision; print(git_revision())"
    revisions = []
    for files in (".gitignore", ".venv"):
        Path("project/.gitignore").touch()
        for command in ("init -q", f"add {files}", "commit -qm x"):
            line = f"git -c user.name=x -c user.email=x -C project {command}"
            subprocess.run(line.split(), check=True)
        environment = os.environ | {"PYTHONPATH": str(package.parent)}
        environment["GIT_DIR"] = str(here / "elsewhere")  # as in a hook of another repository
        output = subprocess.check_output([sys.executable, "-c", ask], env=environment, text=True)
        revisions.append(output.strip())
    before, after = revisions
    assert before == "None"
    assert len(after) == 40
