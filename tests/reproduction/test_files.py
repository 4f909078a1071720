"""The files of a run: in which order they reach the disk, and who writes beside whom."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from reproduction import system
from tests.doors import ROOT, SMALL, Run, started, train

ONE = (*SMALL, "name=mine", "resume=auto")


def test_files_are_flushed_before_they_are_moved_and_folders_after(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """And the lines of metrics.jsonl before the checkpoint that records their size."""
    log = here / "log"
    monkeypatch.setenv("FSYNC_LOG", str(log))
    with started(*ONE, launcher=(str(ROOT / "tests" / "recorder.py"),)) as process:
        assert process.wait(300) == 0
    events = [line.split() for line in log.read_text().splitlines()]
    mine = here / "outputs" / "mine"
    moved = [Path(event[2]) for event in events if event[0] == "move"]
    assert {mine / "config.yaml", mine / "summary.json", mine / "report.md"} <= {*moved}
    checkpoints = mine / "checkpoints"
    assert moved.count(checkpoints / "last.pt") == 2
    for number, (kind, path, *rest) in enumerate(events):
        if kind == "move":
            before = events[number - 1]
            after = events[number + 1]
            assert before[:2] == ["flush", path], events
            assert after[:2] == ["flush", str(Path(rest[0]).parent)], events
        assert kind != "gone"
    sizes = [int(event[2]) for event in events if event[1] == str(mine / "metrics.jsonl")]
    run = Run(mine)
    assert [run.checkpoint(age)["metrics_size"] for age in (1, 0)] == sizes[-2:]
    last = max(i for i, event in enumerate(events) if event[-1] == str(checkpoints / "last.pt"))
    lines = max(i for i, event in enumerate(events) if event[1] == str(mine / "metrics.jsonl"))
    assert lines < last


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(here: Path):
    assert train(*ONE, "recipe.max_steps=1").status == 0
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    host = socket.gethostname().replace(".", "-")
    gone = process.pid
    left = [
        "checkpoints/.last.pt.tmp",  # of an earlier revision
        "checkpoints/.last.pt.elsewhere-1.tmp",
        ".summary.json.elsewhere-1.tmp",
        f".report.md.{host}-{gone}.tmp",
    ]
    used = [f".evaluation-last.json.{host}-{os.getpid()}.tmp", ".accuracy.png.elsewhere-1.tmp"]
    for name in (*left, *used):
        Path("outputs/mine", name).touch()
    assert train(*ONE, "recipe.max_steps=1").status == 0
    assert {x.name for x in Path("outputs/mine").rglob("*.tmp")} == {*used}


@pytest.mark.slow
def test_two_programs_write_the_same_file_beside_each_other(here: Path):
    assert train(*ONE).status == 0
    for _ in range(3):
        with ExitStack() as stack:
            pair = [
                stack.enter_context(started("run=outputs/mine", program="eval.py"))
                for _ in range(2)
            ]
            results = [(x.wait(300), x.communicate()[1]) for x in pair]
        assert results == [(0, "")] * 2
    assert Run("outputs/mine").evaluation()["images"] == 60


def test_a_run_without_a_terminal_tells_how_far_it_is(here: Path, monkeypatch: pytest.MonkeyPatch):
    assert "step" not in train(*ONE).out
    monkeypatch.setattr(system, "PULSE", 0.0)
    out = train(*ONE, "output_root=told").out
    run = Run("told/mine")
    for line in run.steps:
        parts = (
            f"  step {line['step']}/6  loss {line['loss']:.3f}  mixed {line['mixed_samples']:.3g} "
        )
        assert f"epoch {line['epoch']}/2{parts}" in out
    assert out.count(" left") >= 6
    assert len(run.steps) == 6


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
import reproduction
reproduction.load_run("outputs/mine")
ours = [x for x in warnings.filters if x not in before and "PIL" in str(x)]
assert not ours, ours
multiprocessing.get_context("fork").Process(target=child, daemon=True).start()
while not os.path.exists("ready"):
    time.sleep(0.01)
"""


def test_an_import_has_no_effects_on_a_process(here: Path):
    """Its children are ended as Python ends them, and its warnings are shown."""
    assert train(*ONE, "recipe.max_steps=1").status == 0
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
    assert Path("ended").exists()


def test_the_revision_is_that_of_the_code_and_of_no_project_around_it(here: Path):
    """Such as one whose virtual environment holds the installed package."""
    code = Path(system.__file__).read_text()
    package = here / "project" / ".venv" / "reproduction"
    package.mkdir(parents=True)
    (package / "system.py").write_text(code)
    (package / "__init__.py").touch()
    ask = "from reproduction.system import git_revision; print(git_revision())"
    revisions = []
    for files in (".gitignore", ".venv"):
        Path("project/.gitignore").touch()
        words = ["-c", "user.name=x", "-c", "user.email=x", "-C", "project"]
        for command in (["init", "-q"], ["add", files], ["commit", "-qm", "x"]):
            subprocess.run(["git", *words, *command], check=True)
        environment = os.environ | {"PYTHONPATH": str(package.parent)}
        output = subprocess.check_output([sys.executable, "-c", ask], env=environment, text=True)
        revisions.append(output.strip())
    assert revisions[0] == "None" and len(revisions[1]) == 40, revisions
