"""Launchers: sweep points in processes and on a cluster, shares of the machine, signals."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reproduction.runs.compose import compose
from reproduction.runs.folder import find_runs
from reproduction.start import command as starting
from reproduction.start.command import run
from reproduction.start.processes import Processes, shares
from reproduction.system.errors import RunInterrupted
from reproduction.system.hardware import CORES
from reproduction.training import ranks
from tests.doors import Run, same
from tests.reproduction.conftest import ROOT, SCRIPTS, SMALL, Command, trained_run

pytestmark = pytest.mark.all_digits


def test_missing_submitit_is_named(command: Command, monkeypatch):
    monkeypatch.setattr(starting, "find_spec", lambda name: None)
    result = command("train", "-m", "hydra/launcher=slurm", "resume=auto", "seed=0,1")
    assert result.status == 2
    (line,) = result.lines
    assert "launcher=slurm" in line and "pip install -r requirements-cluster.txt" in line


def test_launcher_settings_are_shown(command: Command):
    result = command("train", "hydra/launcher=slurm", "--cfg", "hydra", "-p", "hydra.launcher")
    assert (result.status, result.err) == (0, "")
    assert "partition: null" in result.out and "array_parallelism: 256" in result.out


PRINTS = """
print(sys.argv[1:])
if any(word.startswith("recipe.lr=1e") for word in sys.argv):
    sys.exit("train.py: step 1: loss is nan")
"""


def test_parallel_sweep_starts_a_process_for_each_point_and_lists_failures_last(
    tmp_path: Path, monkeypatch, capfd
):
    args = ["hydra/launcher=parallel", "hydra.launcher.n_jobs=3", "recipe.lr=0.001,1e30"]
    script = script_of(tmp_path, PRINTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), *args, "-m", "seed=0,1", "dataset.workers=0"])
    with pytest.raises(SystemExit, match="1"):
        run("train", *SCRIPTS["train"][:3])
    result = capfd.readouterr()
    assert result.err.splitlines() == ["train.py: step 1: loss is nan"] * 2
    first, *lines, last = result.out.splitlines()
    assert first == "3 runs at a time, logs in outputs/.logs"
    assert last == "2 of 4 runs are finished"
    words = [line.partition(" of 4: ")[2].split() for line in lines]
    assert sorted(words)[0] == ["recipe.lr=0.001", "seed=0", "dataset.workers=0"]
    logs = [path.read_text().splitlines()[0] for path in Path("outputs/.logs").iterdir()]
    assert sorted(logs) == sorted(map(str, words))


@pytest.mark.slow
def test_parallel_sweep_trains_all_points(tmp_path: Path):
    command = [sys.executable, str(ROOT / "train.py"), "-m", "hydra/launcher=parallel"]
    result = subprocess.run(
        [*command, "recipe.lr=0.001,1e30", *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("train.py: step ") and "is kept as failed" in line
    runs = [x.read_summary() | x.read_config() for x in find_runs(tmp_path / "outputs").values()]
    statuses = {run["recipe"]["lr"]: run["status"] for run in runs}
    assert statuses == {0.001: "finished", 1e30: "failed"}
    assert "1 of 2 runs are finished" in result.stdout and "seed 0 failed" in result.stdout


@pytest.mark.slow
def test_a_job_of_submitit_goes_on_after_sigusr1_as_if_nothing_had_been(tmp_path: Path):
    args = [*SMALL, "recipe.epochs=4", "recipe.log_every=1", "augmentation.htm.tau=3"]
    local = ["-m", "hydra/launcher=slurm", "hydra.launcher.cluster=local", "resume=auto"]
    sweep = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *local, *args],
        cwd=tmp_path,
        env=os.environ | {"SUBMITIT_PREEMPT_SIGNAL": "USR1"},
    )
    metrics: list[Path] = []
    while sum(len(path.read_text().splitlines()) for path in metrics) < 2:
        assert sweep.poll() is None
        time.sleep(0.02)
        metrics = [*tmp_path.glob("outputs/*/metrics.jsonl")]
    process = (metrics[0].parent / ".lock").read_text().split()[1]
    os.kill(int(process), signal.SIGUSR1)
    assert sweep.wait() == 0
    printed = [path.read_text() for path in tmp_path.glob("outputs/.slurm/*/*.out")]
    assert [text.count("Requeued job") for text in printed] == [1]
    undisturbed = trained_run(tmp_path / "whole", *args)
    assert same(Run(metrics[0].parent), Run(undisturbed.path)) == []


COMMANDS = {  # instead of SLURM's, and of the run's Python
    "srun": 'shift; echo $$ > step; exec "$@"',
    "scancel": 'kill "-${1#--signal=}" "$(cat step)"',
    "scontrol": 'echo "$*" >> requeued',
    ".venv/bin/python": """trap 'sleep 0.2; exit 130' TERM
echo $* > run
while :; do sleep 0.05; done""",
}


@pytest.mark.parametrize("event", ["time limit", "preemption"])
def test_the_batch_file_stops_the_run_and_queues_it_again_at_the_time_limit(
    tmp_path: Path, event: str
):
    """Its Python takes a moment to end, like runs that save."""
    page = Path(__file__).parents[2].joinpath("docs/clusters.md").read_text()
    (script,) = re.findall(r"(?s)```bash\n(#!/bin/bash\n.*?)```", page)
    for name, code in COMMANDS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(0o755)
    task = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    environment = os.environ | task | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environment)
    while not (tmp_path / "run").exists():
        assert job.poll() is None
        time.sleep(0.02)
    assert (tmp_path / "run").read_text() == "scripts/reproduce.py table1 --task 3\n"
    if event == "time limit":
        job.send_signal(signal.SIGUSR1)
    else:  # SLURM signals both
        job.send_signal(signal.SIGTERM)
        os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
    assert job.wait(timeout=20) == 130
    requeued = tmp_path / "requeued"
    assert requeued.exists() == (event == "time limit")
    assert not requeued.exists() or requeued.read_text() == "requeue 70_3\n"


SBATCH = """#!/bin/bash
cp "${!#}" "$SUBMITTED"
! grep -q refused "${!#}" && echo "70;cluster"
"""


def test_slurm_gets_one_array(command: Command, tmp_path: Path, monkeypatch):
    (tmp_path / "commands").mkdir()
    for name in ("sbatch", "srun"):
        path = tmp_path / "commands" / name
        path.write_text(SBATCH)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'commands'}:{os.environ['PATH']}")
    monkeypatch.setenv("SUBMITTED", str(tmp_path / "submitted"))
    args = ["hydra/launcher=slurm", "hydra.launcher.partition=refused", "resume=auto"]
    result = command("train", "-m", *args, "devices=2", "seed=0,1,2")
    assert result.status == 1
    assert result.lines[-1].startswith("train.py: hydra/launcher=slurm: ")
    text = (tmp_path / "submitted").read_text()
    assert {"--array=0-2%3", "--partition=refused", "--gpus-per-node=2", "--requeue"} <= {
        line.removeprefix("#SBATCH ") for line in text.splitlines()
    }


def script_of(folder: Path, code: str) -> Path:
    """Writes a stand-in for train.py, whose `here` is the folder."""
    path = folder / "train.py"
    path.write_text(f"import os, pathlib, signal, sys, time\nhere = {str(folder)!r}\n{code}")
    return path


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
def test_signals_reach_a_process(tmp_path: Path, times: int, capsys: pytest.CaptureFixture[str]):
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
    before = signal.getsignal(signal.SIGTERM)
    watcher = signal_when(tmp_path / "ready", times)
    with pytest.raises(RunInterrupted), Processes([{}]) as processes:
        processes.run("run", script_of(tmp_path, code), [])
    watcher.join()
    assert capsys.readouterr().out.count("stopping all runs after their steps") == 1
    assert (tmp_path / "left").exists() == (times == 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_reaches_a_process_that_is_being_started(tmp_path: Path, monkeypatch):
    start, started = subprocess.Popen, []

    def slow(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    script = script_of(tmp_path, "time.sleep(60)")
    with pytest.raises(RunInterrupted), Processes([{}]) as processes:
        monkeypatch.setattr(subprocess, "Popen", slow)
        processes.run("run", script, [])
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("print('one\\ntrain.py: two', file=sys.stderr); sys.exit(1)", 1, "two"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "train.py was ended by SIGKILL"),
        ("sys.exit(0)", 0, "train.py ended with status 0"),
    ],
)
def test_a_process_returns_its_status_and_error(tmp_path: Path, code: str, status: int, error: str):
    with Processes([{}]) as processes:
        assert processes.run("run", script_of(tmp_path, code), []) == (status, error)


MEET = """
share = os.environ["SHARE"]
print("with share", share)
pathlib.Path(here, "in-" + share).touch()
while len(list(pathlib.Path(here).glob("in-*"))) < 2:
    time.sleep(0.01)
"""
TWO = [{"SHARE": "a"}, {"SHARE": "b"}]


def test_processes_have_their_own_shares_and_logs(tmp_path: Path):
    script = script_of(tmp_path, f"{MEET}sys.exit('failed with ' + share)")
    logs = tmp_path / "logs"
    with Processes(TWO, logs) as processes:
        results = processes.map(lambda name: processes.run(name, script, []), "xyz")
    assert {path.name for path in logs.iterdir()} == {"x.log", "y.log", "z.log"}
    for name, (status, error) in zip("xyz", results, strict=True):
        out, err = (logs / f"{name}.log").read_text().splitlines()
        assert status == 1 and error == err == f"failed with {out.split()[2]}"
    assert {error[-1] for _, error in results} == {"a", "b"}


def test_a_share_of_the_cores_is_that_of_automatic_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CORES, "6")
    folder = ["dataset=image_folder", "dataset.root=x"]
    assert compose("train", folder).raw["dataset"]["workers"] == 6
    assert compose("train", [*folder, "devices=2"]).raw["dataset"]["workers"] == 3
    assert compose("train", [*folder, "dataset.workers=1"]).raw["dataset"]["workers"] == 1
    assert compose("train", ["dataset=digits"]).raw["dataset"]["workers"] == 0  # as its file says


def test_a_signal_reaches_all_processes_and_prevents_new_ones(tmp_path: Path):
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
    script = script_of(tmp_path, code)
    watcher = signal_when(tmp_path / "ready", 1)
    with pytest.raises(RunInterrupted), Processes(TWO) as processes:
        processes.map(lambda name: processes.run(name, script, []), "xyz")
    watcher.join()
    assert {path.name for path in tmp_path.glob("left-*")} == {"left-a", "left-b"}


def test_visible_gpus_follow_the_environment(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ranks.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8a")
    assert ranks.visible_gpus() == ["5", "GPU-8a"]


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        ("0", 1, "0 0 0"),
        ("0 1", 1, "0 1 0"),
        ("0 1 2 3 4", 2, "0,1 2,3 0,1"),
        ("7 9", 2, "7,9 7,9"),
    ],
)
def test_shares_take_gpus_in_turn(monkeypatch, gpus: str, devices: int, expected: str):
    monkeypatch.setattr(ranks, "visible_gpus", gpus.split)
    found = shares(len(expected.split()), devices)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in found] == expected.split()


def test_shares_divide_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("reproduction.start.processes.usable_cores", lambda: 16)
    monkeypatch.setattr(ranks, "visible_gpus", lambda: [])
    assert shares(2, 2) == [{"OMP_NUM_THREADS": "4", CORES: "8"}] * 2
    assert shares(1, 1) == [{"OMP_NUM_THREADS": "16", CORES: "16"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert shares(3, 1) == [{"OMP_NUM_THREADS": "1", CORES: "5"}] * 3
