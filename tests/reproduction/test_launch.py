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

from reproduction.data.stand_ins import make_stand_ins
from reproduction.runs.folder import RunFolder
from reproduction.runs.locking import hold, is_held
from reproduction.start.processes import Share
from reproduction.studies import launch, study
from reproduction.studies import plan as planning
from reproduction.studies.plan import PlannedRun, plan
from reproduction.studies.status import states
from reproduction.studies.study import Settings
from reproduction.system.errors import RunLocked, UserError
from reproduction.training.loop import Trainer
from reproduction.training.train import run_training
from scripts.reproduce import reproduce
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_training import assert_same_result

pytestmark = pytest.mark.all_digits
TABLE3 = ["table3/gradient", "table3/attention", "table3/random"]


@pytest.fixture(scope="module")
def narrow() -> Iterator[None]:
    """Smoke scale with narrow models and two epochs of two batches, as composing takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        narrow = ["model.embed_dim=16", "model.depth=4", "model.image_size=20", "device=cpu"]
        narrow += ["recipe.epochs=2", "recipe.max_steps=null", "recipe.batch_size=100"]
        smoke = study.scales()["smoke"]
        scaled = {**study.scales(), "smoke": replace(smoke, columns={"CIFAR-100": narrow})}
        patch.setattr(study, "scales", lambda: scaled)
        planning._composed.cache_clear()
        yield
    planning._composed.cache_clear()


@pytest.fixture
def small(narrow: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Narrow models, in an empty folder."""
    monkeypatch.chdir(tmp_path)


def call(*args: str) -> int:
    return reproduce([*args, "--scale", "smoke"])


def table3() -> list[PlannedRun]:
    return plan("table3", Settings(scale="smoke"), 1)


def fail_on(monkeypatch: pytest.MonkeyPatch, times: int, error: BaseException, at: int) -> list:
    """Raises `error` up to `times` at step `at` of the random detector's run; returns all steps."""
    original, steps, failures = Trainer.train_step, [], []

    def step(self: Trainer, *args: Any) -> Any:
        htm = self.config.augmentation.htm
        assert htm is not None
        if htm.detector == "random" and self.step == at and len(failures) < times:
            failures.append(self.step)
            raise error
        steps.append((htm.detector, self.step))
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", step)
    return steps


def test_reproduce_trains_each_run_of_a_table_once(small, monkeypatch, capsys):
    steps = fail_on(monkeypatch, 0, ValueError(), 0)
    assert call("table3") == 0
    runs = table3()
    assert [run.labels for run in runs] == [(label,) for label in TABLE3]
    assert all(run.is_done() for run in runs)
    assert len(steps) == 12  # 3 runs of 2 epochs of 2 batches
    out = capsys.readouterr().out
    assert out.startswith("run 1 of 3: starting ")
    assert out.rstrip().endswith("\n3 runs: 3 finished")
    assert call("table3") == 0
    assert capsys.readouterr().out.startswith("| rows ")
    assert len(steps) == 12
    runs[1].folder.report_path.unlink()
    assert not runs[1].is_done()
    assert call("table3") == 0  # writes the report again, without training
    assert runs[1].is_done() and len(steps) == 12
    assert call("table4") == 0  # two runs are table 3's, and one is shared: all samples are mixed
    assert len(steps) == 12 + 2 * 4


def test_interrupted_run_resumes_from_its_last_epoch(small, monkeypatch):
    uninterrupted = replace(table3()[2].config, output_root="other", name="random")
    make_stand_ins("cifar100", Path("outputs/smoke/data/cifar100"))
    run_training(uninterrupted)
    steps = fail_on(monkeypatch, 1, KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt, match="repeat the command to continue"):
        call("table3")
    table = states(table3())
    assert table.status.tolist() == ["finished", "finished", "interrupted"]
    assert table.epochs[2] == 1 and table.log[2][0]["top1"] is not None
    steps.clear()
    assert call("table3") == 0
    assert steps == [("random", 2), ("random", 3)]
    assert_same_result(table3()[2].folder, RunFolder("other/random"))


def test_failed_run_is_listed_with_its_error_and_a_second_start_trains_it(
    small, monkeypatch, capsys
):
    steps = fail_on(monkeypatch, 1, ZeroDivisionError("what\never"), 3)
    assert call("table3") == 1
    result = capsys.readouterr()
    last = result.err.splitlines()[-1]
    assert last.startswith("reproduce.py: table3-random-s0-") and " failed: " in last
    assert "ZeroDivisionError: what ever" in last
    assert "failed: ZeroDivisionError: what ever" in result.out
    assert result.out.count("run 3 of 3: ") == 1 and "\n3 runs: 2 finished, 1 failed" in result.out
    steps.clear()
    assert call("table3") == 0
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


def test_hold_removes_a_folder_without_a_run(tmp_path: Path):
    folder = RunFolder(tmp_path / "outputs" / "mine")
    with hold(folder):
        assert folder.path.is_dir()
    assert not folder.path.exists()
    folder.path.mkdir()
    (folder.path / "notes.txt").write_text("the user's")
    with hold(folder):
        pass
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]


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
    run = table3()[0]
    return replace(run, config=replace(run.config, output_root=str(tmp_path / "outputs")))


def test_damaged_folder_fails_only_its_own_run(small, capsys):
    damaged, *_ = runs = table3()
    damaged.folder.create(damaged.config)
    damaged.folder.summary_path.write_text("x")
    assert call("table3", "--status") == 0
    assert "unusable: summary.json: not readable" in capsys.readouterr().out
    assert call("table3") == 1
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
    runs, logs = table3(), tmp_path / "logs"
    failed = launch.train_all_apart(runs, [Share({})] * 2, logs)
    assert failed == dict.fromkeys((run.name for run in runs), "resume=auto")
    assert {path.stem for path in logs.iterdir()} == {*failed}
    stand_in_for_train(monkeypatch, tmp_path, "pass")
    errors = launch.train_all_apart(runs[:1])
    assert errors == {runs[0].name: "train.py ended with status 0"}


@pytest.mark.parametrize("option", ["--dry-run", "--status"])
def test_dry_run_and_status_write_nothing(small, tmp_path, capsys, option):
    assert call("table3", option) == 0
    assert sorted(tmp_path.rglob("*")) == []
    out = capsys.readouterr().out
    assert out.count(" not started ") == 3 and out.endswith("\n3 runs: 3 not started\n")
    assert ("outputs/smoke/table3-random-s0-" in out) == (option == "--dry-run")


def test_dry_run_shows_measured_hours(small, capsys):
    run = table3()[0]
    run.folder.create(run.config)
    done = {"status": "finished", "top1_last": 12.5, "epochs": 2, "seconds": 7308}
    more = {"top1_median10": 12.5, "top1_best": 12.5, "top5_last": 50, "top5_best": 50}
    run.folder.write_summary(**done, **more)
    assert call("table3", "--seeds", "2", "--dry-run") == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "table3/" in line]
    hours = [(row[1].strip(), row[2].strip(), row[6].strip()) for row in rows]
    expected = {("table3/gradient", "0"): "2.03", ("table3/gradient", "1"): "~2.03"}
    assert {(label, seed): text for label, seed, text in hours if text} == expected
    assert len(hours) == 6


def test_own_study_ends_with_its_table(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        launch, "train_all_apart", lambda runs: launch.train_all(runs, launch.train_here)
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        "title: Mine\noverrides: [model.embed_dim=16, dataset.limit=60, recipe.batch_size=20, "
        "recipe.epochs=1, device=cpu]\nrows:\n  none: ['augmentation=[]']\n"
        "  htm: {overrides: ['augmentation=[htm]'], against: none}\nseeds: 2\n"
    )
    assert reproduce([str(file)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("report: outputs/report/mine.md")
    text = (tmp_path / "outputs/report/mine.md").read_text()
    assert text.startswith("# Mine\n") and re.search(r"\| htm +\| +2 \|", text)
    assert "p (Holm)" in text or "Not tested" in text
    assert (tmp_path / "outputs/report/mine.csv").exists()


def test_a_task_becomes_train_py_for_its_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    words = ["table3", "--scale", "digits", "--seeds", "1"]
    assert reproduce([*words, "--task", "2", "--no-gpu"]) == 0
    ((_, train, *overrides),) = started
    assert train == str(launch.TRAIN) and overrides[-1] == "device=cpu"
    assert [x for x in overrides if x.startswith("experiment=")] == ["experiment=table3/random"]
    done = plan("table3", Settings(scale="digits"), 1)[2]
    done.folder.create(done.config)
    done.folder.write_summary(status="finished", top1_last=1.0)
    done.folder.report_path.touch()
    with pytest.raises(SystemExit, match="0"):
        reproduce([*words, "--task", "2"])
    assert len(started) == 1
    for number in ("3", "-1"):
        with pytest.raises(UserError, match=f"task={number}: the plan has 3 runs, 0 to 2"):
            reproduce([*words, "--task", number])
    with pytest.raises(UserError, match="no-gpu: goes with --task only"):
        reproduce([*words, "--no-gpu"])
