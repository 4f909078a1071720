"""reproduce.py trains each run once, here or in processes, and resumes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproduction.runs.folder import RunFolder
from reproduction.runs.locking import hold, is_held
from reproduction.studies import launch, study
from reproduction.studies import plan as planning
from reproduction.studies.plan import PlannedRun, plan
from reproduction.studies.status import states
from reproduction.studies.study import Settings
from reproduction.system.errors import RunInterrupted, RunLocked, UserError
from reproduction.training.run import run_training
from reproduction.training.step import Trainer
from scripts.reproduce import reproduce
from tests.doors import Run, same
from tests.reproduction.conftest import SMALL, Command

pytestmark = pytest.mark.all_digits
STUDY = """
title: Three
overrides: [model.embed_dim=16, dataset.limit=60, recipe.batch_size=30, recipe.epochs=2, device=cpu,
  recipe.log_every=1]
rows:
  plain: {overrides: ["augmentation=[]"]}
  htm: {overrides: ["augmentation=[htm]"], against: plain}
  random: {overrides: ["augmentation=[htm]", augmentation.htm.detector=random], against: plain}
scales: {smoke: []}
"""
LABELS = ["three/plain", "three/htm", "three/random"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, but for a study of runs that take a second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.yaml").write_text(STUDY)


def call(*args: str) -> int:
    """Trains the study, by default, in this process."""
    return reproduce(["three.yaml", *args, "--scale", "smoke"])


def three() -> list[PlannedRun]:
    return plan("three.yaml", Settings(scale="smoke"), 1)


def fail_on(monkeypatch: pytest.MonkeyPatch, times: int, error: BaseException, at: int) -> list:
    """Raises `error` up to `times` at step `at` of the random detector's run; returns all steps."""
    original, steps, failures = Trainer.train_step, [], []

    def step(self: Trainer, *args: Any) -> Any:
        htm = self.config.augmentation.htm
        detector = None if htm is None else htm.detector
        if detector == "random" and self.step == at and len(failures) < times:
            failures.append(self.step)
            raise error
        steps.append((detector, self.step))
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", step)
    return steps


def test_reproduce_trains_each_run_of_a_study_once(small, monkeypatch, capsys, tmp_path):
    steps = fail_on(monkeypatch, 0, ValueError(), 0)
    assert call() == 0
    runs = three()
    assert [run.labels for run in runs] == [(label,) for label in LABELS]
    assert all(run.is_done() for run in runs)
    assert len(steps) == 12  # 3 runs of 2 epochs of 2 batches
    out = capsys.readouterr().out
    assert out.startswith("run 1 of 3: starting ")
    assert out.endswith("\n3 runs: 3 finished\nreport: outputs/smoke/report/three.md\n")
    assert call() == 0
    assert capsys.readouterr().out.startswith("| rows ")
    assert len(steps) == 12
    runs[1].folder.report_path.unlink()
    assert not runs[1].is_done()
    assert call() == 0  # writes the report again, without training
    assert runs[1].is_done() and len(steps) == 12
    text = (tmp_path / "outputs/smoke/report/three.md").read_text()
    assert text.startswith("# Three\n") and re.search(r"\| htm +\| +1 \|", text)


@pytest.mark.slow
def test_a_table_of_the_paper_trains_at_smoke_scale(monkeypatch, tmp_path, capsys):
    """On images that it makes."""
    narrow = ["model.embed_dim=16", "model.depth=4", "model.image_size=20", "device=cpu"]
    scales = {
        **study.scales(),
        "smoke": replace(study.scales()["smoke"], columns={"CIFAR-100": narrow}),
    }
    monkeypatch.setattr(study, "scales", lambda: scales)
    monkeypatch.chdir(tmp_path)
    planning._composed.cache_clear()
    assert reproduce(["table3", "--scale", "smoke"]) == 0
    assert "3 runs: 3 finished" in capsys.readouterr().out
    planning._composed.cache_clear()


def test_interrupted_run_resumes_from_its_last_epoch(small, monkeypatch):
    uninterrupted = replace(three()[2].config, output_root="other", name="random")
    run_training(uninterrupted)
    steps = fail_on(monkeypatch, 1, KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt, match="repeat the command to continue"):
        call()
    table = states(three())
    assert table.status.tolist() == ["finished", "finished", "interrupted"]
    assert table.epochs[2] == 1 and table.log[2][0]["top1"] is not None
    steps.clear()
    assert call() == 0
    assert steps == [("random", 2), ("random", 3)]
    assert same(Run(three()[2].folder.path), Run("other/random")) == []


def test_failed_run_is_listed_with_its_error_and_a_second_start_trains_it(
    small, monkeypatch, capsys
):
    steps = fail_on(monkeypatch, 1, ZeroDivisionError("what\never"), 3)
    assert call() == 1
    result = capsys.readouterr()
    last = result.err.splitlines()[-1]
    assert last.startswith("reproduce.py: three-random-s0-") and " failed: " in last
    assert "ZeroDivisionError: what ever" in last
    assert "failed: ZeroDivisionError: what ever" in result.out
    assert result.out.count("run 3 of 3: ") == 1 and "\n3 runs: 2 finished, 1 failed" in result.out
    steps.clear()
    assert call() == 0
    assert steps == [("random", 2), ("random", 3)]


HOLDER = """
import os, sys, time
from reproduction.runs.locking import hold
from reproduction.runs.folder import RunFolder
with hold(RunFolder(sys.argv[1])):
    worker = os.fork()
    if worker:
        print(worker, flush=True)
    time.sleep(60)
"""


class Holder:
    """A process that holds a run's lock and has forked a worker."""

    def __init__(self, folder: RunFolder):
        folder.path.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.worker = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        os.kill(self.worker, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    held = Holder(RunFolder(tmp_path / "outputs" / "mine"))
    yield held
    held.close()


def test_second_process_on_a_run_is_refused_in_one_line(command: Command, tmp_path: Path, holder):
    folder = RunFolder(tmp_path / "outputs" / "mine")
    assert is_held(folder)
    result = command("train", "name=mine", "resume=auto", *SMALL)
    assert result.status == 2
    assert len(result.lines) == 1
    assert f"process {holder.process.pid} on " in result.lines[0]
    assert "is training outputs/mine" in result.lines[0]
    assert not folder.config_path.exists()
    holder.kill()  # its worker survives, but does not hold the lock
    os.kill(holder.worker, 0)
    assert not is_held(folder)
    assert command("train", "name=mine", "resume=auto", *SMALL).status == 0
    assert not is_held(folder)


def test_hold_refuses_file_systems_without_locks(tmp_path: Path, monkeypatch):
    def no_locks(file: Any, kind: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match="cannot be locked"), hold(RunFolder(tmp_path / "mine")):
        pass


def test_train_all_leaves_locked_runs_to_their_process(capsys):
    order: list[str] = []

    def start(run: Any, place: str) -> str | None:
        order.append(run.name)
        if run.name == "b":
            raise RunLocked("b is being trained")
        return "broken" if run.name == "a" else None

    runs: list[Any] = [SimpleNamespace(name=x, is_done=lambda: False) for x in "abc"]
    assert launch.train_all(runs, start) == {"a": "broken"}
    assert order == ["a", "b", "c"]
    assert capsys.readouterr().out == "b is being trained; left to it\n"


def stand_in_for_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> PlannedRun:
    """Replaces train.py by a script; returns a run for it."""
    script = tmp_path / "train.py"
    script.write_text(f"import os, pathlib, signal, sys, time\nhere = {str(tmp_path)!r}\n{code}")
    monkeypatch.setattr(launch, "TRAIN", script)
    run = three()[0]
    return replace(run, config=replace(run.config, output_root=str(tmp_path / "outputs")))


def test_damaged_folder_fails_only_its_own_run(small, capsys):
    damaged, *_ = runs = three()
    damaged.folder.create(damaged.config)
    damaged.folder.summary_path.write_text("x")
    assert call("--status") == 0
    assert "unusable: summary.json: not readable" in capsys.readouterr().out
    assert call() == 1
    assert [run.is_done() for run in runs[1:]] == [True, True]
    assert f"{damaged.name} failed: " in capsys.readouterr().err


@pytest.mark.slow
def test_train_all_apart_runs_train_py(small, capfd):
    settings = Settings(scale="smoke", dataset="digits")
    (run,) = (r for r in plan("table1", settings, 1) if "table1/cifar100_baseline" in r.labels)
    launch.prepare([run], settings)
    assert launch.train_all_apart([run]) == {}
    assert run.is_done()
    assert run.folder.read_config()["name"] == run.name
    assert f"starting {run.name}" in capfd.readouterr().out


def test_processes_train_the_runs_and_say_why_they_failed(small, monkeypatch, tmp_path):
    stand_in_for_train(monkeypatch, tmp_path, "sys.exit(sys.argv[-1])")
    runs, logs = three(), tmp_path / "logs"
    failed = launch.train_all_apart(runs, [{}] * 2, logs)
    assert failed == dict.fromkeys((run.name for run in runs), "resume=auto")
    assert {path.stem for path in logs.iterdir()} == {*failed}
    stand_in_for_train(monkeypatch, tmp_path, "pass")
    errors = launch.train_all_apart(runs[:1])
    assert errors == {runs[0].name: "train.py ended with status 0"}


def test_after_a_signal_no_further_run_is_announced(small, monkeypatch, tmp_path, capfd):
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    stand_in_for_train(monkeypatch, tmp_path, code)
    with pytest.raises(RunInterrupted, match="the same command resumes"):
        launch.train_all_apart(three())
    assert capfd.readouterr().out.count("starting") == 1


@pytest.mark.parametrize("option", ["--dry-run", "--status"])
def test_dry_run_and_status_write_nothing(small, tmp_path, capsys, option):
    assert call(option) == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["three.yaml"]
    out = capsys.readouterr().out
    assert out.count(" not started ") == 3 and out.endswith("\n3 runs: 3 not started\n")
    assert ("outputs/smoke/three-random-s0-" in out) == (option == "--dry-run")


def test_dry_run_shows_measured_hours(small, capsys):
    run = three()[0]
    run.folder.create(run.config)
    done = {"status": "finished", "top1_last": 12.5, "epochs": 2, "seconds": 7308}
    more = {"top1_median10": 12.5, "top1_best": 12.5, "top5_last": 50, "top5_best": 50}
    run.folder.write_summary(**done, **more)
    assert call("--seeds", "2", "--dry-run") == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "three/" in line]
    hours = [(row[1].strip(), row[2].strip(), row[6].strip()) for row in rows]
    expected = {("three/plain", "0"): "2.03", ("three/plain", "1"): "~2.03"}
    assert {(label, seed): text for label, seed, text in hours if text} == expected
    assert len(hours) == 6


def test_a_task_becomes_train_py_for_its_run(small, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    assert call("--task", "2", "--no-gpu") == 0
    ((_, train, *overrides),) = started
    assert train == str(launch.TRAIN) and overrides[-1] == "device=cpu"
    assert "augmentation.htm.detector=random" in overrides
    done = three()[2]
    done.folder.create(done.config)
    done.folder.write_summary(status="finished", top1_last=1.0)
    done.folder.report_path.touch()
    with pytest.raises(SystemExit, match="0"):
        call("--task", "2")
    assert len(started) == 1
    for number in ("3", "-1"):
        with pytest.raises(UserError, match=f"task={number}: must be 0..2, as the plan has 3 runs"):
            call("--task", number)
    with pytest.raises(UserError, match="no-gpu: goes with --task only"):
        call("--no-gpu")
