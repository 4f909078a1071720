"""The runner: skips finished runs, resumes, retries once, one process per run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproduction.data.stand_ins import make_stand_ins
from reproduction.reporting.cells import SCALES
from reproduction.runs.folder import RunFolder
from reproduction.runs.locking import hold, is_held
from reproduction.studies import plan as planning
from reproduction.studies import runner
from reproduction.studies.plan import PlannedRun, Settings, plan
from reproduction.studies.runner import Children
from reproduction.studies.states import read_state
from reproduction.system.errors import RunInterrupted, RunLocked, UserError
from reproduction.training.loop import Trainer
from reproduction.training.train import run_training
from scripts.reproduce import parser, reproduce
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_training import assert_same_result

pytestmark = pytest.mark.all_digits
TABLE3 = ["table3/gradient", "table3/attention", "table3/random"]


@pytest.fixture(scope="module")
def narrow() -> Iterator[None]:
    """Smoke scale with narrow models and two epochs of two batches, as composing takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        narrow = ("model.embed_dim=16", "model.depth=4", "model.image_size=20", "device=cpu")
        narrow += ("recipe.epochs=2", "recipe.max_steps=null", "recipe.batch_size=100")
        smoke = SCALES["smoke"]
        columns = {"CIFAR-100": (*smoke.columns["CIFAR-100"], *narrow)}
        patch.setitem(SCALES, "smoke", replace(smoke, columns=columns))
        planning._cached_config.cache_clear()
        yield
    planning._cached_config.cache_clear()


@pytest.fixture
def small(narrow: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Narrow models, in an empty folder."""
    monkeypatch.chdir(tmp_path)


def call(*args: str) -> int:
    return reproduce(parser().parse_args([*args, "--scale", "smoke"]))


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
    assert capsys.readouterr().out.startswith("┏")
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
    states = [read_state(run.folder) for run in table3()]
    assert [state.status for state in states] == ["finished", "finished", "interrupted"]
    assert states[2].epochs == 1 and states[2].top1 is not None
    steps.clear()
    assert call("table3") == 0
    assert steps == [("random", 2), ("random", 3)]
    assert_same_result(table3()[2].folder, RunFolder("other/random"))


def test_failed_run_is_retried_after_the_others(small, monkeypatch, capsys):
    steps = fail_on(monkeypatch, 1, ZeroDivisionError("what"), 3)
    assert call("table4") == 0
    assert [s for s in steps if s[0] == "random"] == [("random", step) for step in (0, 1, 2, 2, 3)]
    assert steps[-2:] == [("random", 2), ("random", 3)]  # at the end, from its last epoch
    assert "failed twice" not in capsys.readouterr().err


def test_run_that_fails_twice_is_listed_with_its_error(small, monkeypatch, capsys):
    fail_on(monkeypatch, 9, ZeroDivisionError("what\never"), 1)
    assert call("table3") == 1
    result = capsys.readouterr()
    last = result.err.splitlines()[-1]
    assert last.startswith("reproduce.py: table3-random-s0-") and "failed twice" in last
    assert "ZeroDivisionError: what ever" in last
    states = [read_state(run.folder) for run in table3()]
    assert [state.status for state in states] == ["finished", "finished", "failed"]
    assert "failed: ZeroDivisionError: what ever" in result.out
    assert result.out.count("run 3 of 3: ") == 2 and "\n3 runs: 2 finished, 1 failed" in result.out
    assert result.out.count("table3-random") == 2  # starts


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
    assert read_state(folder).status == "running"
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

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with pytest.raises(UserError, match="cannot be locked"), hold(RunFolder(tmp_path / "mine")):
        pass


def fake(name: str) -> Any:
    return SimpleNamespace(name=name, done=False, is_done=lambda: False)


def test_train_all_waits_for_locked_runs_last(capsys):
    order: list[str] = []

    def start(run: Any, place: str) -> str | None:
        order.append(run.name)
        if run.name == "b" and order.count("b") < 4:
            raise RunLocked("b is being trained")
        return "broken" if run.name == "a" else None

    assert runner.train_all([fake(x) for x in "abc"], start, poll=0.001) == {"a": "broken"}
    assert order == ["a", "b", "c", "a", "b", "b", "b"]
    assert capsys.readouterr().out.count("waiting for") == 1


def test_train_all_accepts_a_run_finished_by_another_process():
    looks = iter([False, True])
    run = SimpleNamespace(name="a", is_done=lambda: next(looks))

    def start(run: Any, place: str) -> str | None:
        raise RunLocked("a is being trained")

    assert runner.train_all([run], start, poll=0.001) == {}  # type: ignore[list-item]
    assert next(looks, "exhausted") == "exhausted"


def stand_in_for_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> PlannedRun:
    """Replaces train.py by a script; returns a run for it."""
    script = tmp_path / "train.py"
    script.write_text(f"import os, pathlib, signal, sys, time\nhere = {str(tmp_path)!r}\n{code}")
    monkeypatch.setattr(runner, "TRAIN", script)
    run = table3()[0]
    return replace(run, config=replace(run.config, output_root=str(tmp_path / "outputs")))


def signal_when(path: Path, times: int) -> threading.Thread:
    """Sends SIGTERM to this process whenever `path` appears, and removes it, `times` times."""

    def watch() -> None:
        for _ in range(times):
            while not path.exists():
                time.sleep(0.01)
            path.unlink()
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("times", [1, 2])
def test_signals_reach_the_process_of_a_run(small, monkeypatch, tmp_path, times):
    code = f"""
def end(*_):
    if {times} == 1:
        pathlib.Path(here, "left").touch()
        sys.exit(130)
    pathlib.Path(here, "ready").touch()
signal.signal(signal.SIGTERM, end)
pathlib.Path(here, "ready").touch()
while True:
    time.sleep(0.05)
"""
    run = stand_in_for_train(monkeypatch, tmp_path, code)
    before = signal.getsignal(signal.SIGTERM)
    watcher = signal_when(tmp_path / "ready", times)
    with pytest.raises(RunInterrupted, match="same command"), Children([{}]) as children:
        runner.train_apart(run, "", children)
    watcher.join()
    assert (tmp_path / "left").exists() == (times == 1)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('one\\ntwo', file=sys.stderr); sys.exit(1)", "two"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "train.py was ended by SIGKILL"),
        ("sys.exit(0)", "train.py ended with status 0 and left no finished run"),
    ],
)
def test_train_apart_returns_the_error_of_a_run(small, monkeypatch, tmp_path, code, error):
    run = stand_in_for_train(monkeypatch, tmp_path, code)
    with Children([{}]) as children:
        assert runner.train_apart(run, "", children) == error


def test_signal_reaches_a_run_that_is_being_started(small, monkeypatch, tmp_path):
    run = stand_in_for_train(monkeypatch, tmp_path, "import time; time.sleep(60)")
    start, started = subprocess.Popen, []

    def slow(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    with pytest.raises(RunInterrupted, match="same command"), Children([{}]) as children:
        monkeypatch.setattr(subprocess, "Popen", slow)
        runner.train_apart(run, "", children)
    assert started[0].returncode == -signal.SIGTERM


def test_damaged_folder_fails_only_its_own_run(small, monkeypatch, capsys):
    damaged, *_ = runs = table3()
    damaged.folder.create(damaged.config)
    damaged.folder.summary_path.write_text("x")
    assert call("table3", "--status") == 0
    assert "failed: " in capsys.readouterr().out
    assert call("table3") == 1
    assert [run for run in runs if runner.may_train(run)] == []
    assert f"{damaged.name} failed twice: " in capsys.readouterr().err


def test_train_all_apart_runs_train_py(small, monkeypatch, capfd):
    settings = Settings(scale="smoke", dataset="digits")
    (run,) = (r for r in plan("table1", settings, 1) if "table1/cifar100_baseline" in r.labels)
    runner.prepare([run], settings)
    assert runner.train_all_apart([run]) == {}
    assert run.is_done()
    assert run.folder.read_config()["name"] == run.name
    assert f"starting {run.name}" in capfd.readouterr().out


MEET = """
share = os.environ["SHARE"]
print("with share", share)
pathlib.Path(here, "in-" + share).touch()
while len(list(pathlib.Path(here).glob("in-*"))) < 2:
    time.sleep(0.01)
"""


def test_parallel_runs_have_their_own_shares_and_logs(small, monkeypatch, tmp_path):
    stand_in_for_train(monkeypatch, tmp_path, f"{MEET}sys.exit('failed with ' + share)")
    logs = tmp_path / "logs"
    failed = runner.train_all_apart(table3(), [{"SHARE": "a"}, {"SHARE": "b"}], logs)
    assert {path.name for path in logs.iterdir()} == {f"{run.name}.log" for run in table3()}
    assert set(failed) == {run.name for run in table3()}
    for run in table3():
        lines = (logs / f"{run.name}.log").read_text().splitlines()
        assert len(lines) == 4  # stdout and stderr of two attempts
        assert failed[run.name] == lines[3] == lines[2].replace("with share", "failed with")


def test_signal_reaches_all_processes_and_prevents_new_ones(small, monkeypatch, tmp_path, capsys):
    code = f"""
def end(*_):
    pathlib.Path(here, "left-" + share).touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
{MEET}
pathlib.Path(here, "ready").touch()
while True:
    time.sleep(0.05)
"""
    stand_in_for_train(monkeypatch, tmp_path, code)
    watcher = signal_when(tmp_path / "ready", 1)
    with pytest.raises(RunInterrupted, match="same command"):
        runner.train_all_apart(table3(), [{"SHARE": "a"}, {"SHARE": "b"}])
    watcher.join()
    assert {path.name for path in tmp_path.glob("left-*")} == {"left-a", "left-b"}
    assert capsys.readouterr().out.count("starting") == 2


def test_signal_ends_the_wait_for_locked_runs(small, monkeypatch):
    def locked(run: PlannedRun, place: str) -> str | None:
        raise RunLocked("is being trained")

    monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunInterrupted), Children([{}]):
        runner.train_all(table3(), locked)


def listing(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.mark.parametrize("option", ["--dry-run", "--status"])
def test_dry_run_and_status_write_nothing(small, tmp_path, capsys, option):
    assert call("table3", option) == 0
    assert listing(tmp_path) == []
    out = capsys.readouterr().out
    assert out.count(" not started ") == 4 and "\n3 runs: 3 not started " in out
    assert ("outputs/smoke/table3-random-s0-" in out) == (option == "--dry-run")
    assert "~" not in out


def test_status_names_a_folder_that_is_not_readable_and_goes_on(small, capsys):
    run = table3()[0]
    run.folder.path.parent.mkdir(parents=True)
    run.folder.path.write_text("")  # a file where the folder would be
    assert call("table3", "--status") == 0
    out = capsys.readouterr().out
    assert "Not a directory" in out and "3 runs: 2 not started, 1 failed" in out


def test_dry_run_shows_measured_hours(small, capsys):
    run = table3()[0]
    run.folder.create(run.config)
    done = {"status": "finished", "top1_last": 12.5, "epochs": 2, "seconds": 7308}
    run.folder.write_summary(**done)
    assert call("table3", "--seeds", "2", "--dry-run") == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "table3/" in line]
    hours = [(row[1].strip(), row[2].strip(), row[6].strip()) for row in rows]
    expected = {("table3/gradient", "0"): "2.03", ("table3/gradient", "1"): "~2.03"}
    assert {(label, seed): text for label, seed, text in hours if text} == expected
    assert len(hours) == 6


def test_read_state_of_a_killed_run_ignores_a_torn_line(small):
    run = table3()[0]
    run.folder.create(run.config)
    run.folder.write_summary(status="running", error=None)
    lines = [{"epoch": 1, "top1": 3.0}, {"step": 1, "epoch": 2, "loss": 1.0}]
    run.folder.append_metrics(lines)
    with run.folder.metrics_path.open("a") as file:
        file.write(json.dumps({"epoch": 2, "top1": 4.0})[:-3])
    state = read_state(run.folder)
    assert (state.status, state.epochs, state.top1) == ("interrupted", 1, 3.0)
