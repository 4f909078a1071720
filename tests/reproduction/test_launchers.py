"""Hydra's launchers: sweep points in processes, failures, restarts, shares of GPUs and cores."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submitit.core.job_environment import JobEnvironment

from reproduction.commands import launchers
from reproduction.commands.cli import run
from reproduction.commands.jobs import check_all, resolve
from reproduction.commands.launchers import gpu_share
from reproduction.config import Config
from reproduction.runs.folder import RunFolder, find_runs
from reproduction.studies.launch import Share, shares
from reproduction.system.errors import RunInterrupted
from reproduction.training import distributed
from reproduction.training.train import run_training
from tests.reproduction.conftest import SMALL, Command, CommandResult
from tests.reproduction.test_training import assert_same_result

pytestmark = pytest.mark.all_digits
REFUSED = {
    "hydra/launcher=slurm": ["hydra/launcher=slurm", "add -m"],
    "-m hydra/launcher=slurm seed=0,1": ["resume=never", "must be auto", "hydra/launcher=slurm"],
    "-m hydra/launcher=parallel,slurm": ["hydra/launcher=parallel,slurm", "must be one of"],
    "-m hydra/launcher=paralel": ["hydra/launcher=paralel", "parallel, joblib, slurm"],
    "-m hydra/launcher=parallel hydra.launcher.jobs=2": ["hydra.launcher.jobs", "n_jobs"],
    "-m hydra/launcher=parallel seed=0,0": ["2 points of the sweep share this folder"],
    "-m hydra/launcher=parallel hydra/sweeper=optuna": ["hydra/sweeper: not available here"],
    "-m hydra/launcher=slurm resume=auto recipe.epochs=3,0": ["recipe.epochs=0"],
}


@pytest.mark.parametrize("line", REFUSED)
def test_invalid_launcher_options_are_refused_in_one_line(
    command: Command, tmp_path: Path, line: str
):
    result = command("train", *line.split())
    assert result.status == 2
    assert len(result.lines) == 1, result.err
    assert all(part in result.err for part in REFUSED[line]), result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", ["parallel", "slurm"])
def test_missing_plugin_is_named(command: Command, monkeypatch, launcher: str):
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    result = command("train", "-m", f"hydra/launcher={launcher}", "resume=auto", "seed=0,1")
    assert result.status == 2
    (line,) = result.lines
    assert f"launcher={launcher}" in line and "pip install -r requirements-cluster.txt" in line


def test_launcher_settings_are_shown(command: Command):
    result = command("train", "hydra/launcher=slurm", "--cfg", "hydra", "-p", "hydra.launcher")
    assert (result.status, result.err) == (0, "")
    assert "partition: null" in result.out and "array_parallelism: 256" in result.out


@pytest.fixture
def sweep(monkeypatch, capfd, tmp_path: Path) -> Callable[..., CommandResult]:
    """`sweep(*args)` runs train.py -m in this process, without reports, which take longest."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> CommandResult:
        monkeypatch.setattr("sys.argv", ["train.py", "-m", *SMALL, *args])
        with pytest.raises(SystemExit) as end:
            run("train", resolve, check_all, run_training)
        return CommandResult(int(end.value.code or 0), *capfd.readouterr())

    return call


def test_parallel_sweep_trains_all_points_and_reports_failures_last(sweep):
    result = sweep("hydra/launcher=parallel", "recipe.lr=0.001,1e30")
    assert result.status == 1
    runs = [
        folder.read_summary() | folder.read_config() for folder in find_runs("outputs").values()
    ]
    statuses = {run["recipe"]["lr"]: run["status"] for run in runs}
    assert statuses == {0.001: "finished", 1e30: "failed"}
    assert result.lines[-1].startswith("train.py: step ")
    assert "is kept as failed" in result.lines[-1]
    assert sum(line.startswith("train.py: ") for line in result.lines) == 1
    names = tuple(f"{folder.path.name}: " for folder in find_runs("outputs").values())
    first, *lines, last = result.out.splitlines()
    assert first.endswith("waiting for the runs") and last == "1 of 2 runs are finished"
    assert all(line.startswith(names) for line in lines)
    assert {line.split(": ")[1].partition(" ")[0] for line in lines} >= {"run", "training", "epoch"}


def interrupt_once(root: Path, after: int) -> threading.Thread:
    """Sends SIGUSR1 to the first process under `root` that has trained `after` steps."""

    def watch() -> None:
        while True:
            for path in root.glob("*/metrics.jsonl"):
                if len(path.read_text().splitlines()) >= after:
                    process = (path.parent / ".lock").read_text().split()[1]
                    os.kill(int(process), signal.SIGUSR1)
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_sweep_by_submitit_goes_on_after_sigusr1_as_if_nothing_had_been(
    sweep, tmp_path: Path, monkeypatch
):
    args = ["recipe.epochs=4", "recipe.log_every=1", "augmentation.htm.tau=3"]
    monkeypatch.setattr(JobEnvironment, "USR_SIG", "USR1")  # in jobs the variable sets it
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    watcher = interrupt_once(tmp_path / "outputs", after=2)
    result = sweep("hydra/launcher=submitit_local", "resume=auto", *args)
    watcher.join()
    assert (result.status, result.err) == (0, "")
    printed = [path.read_text() for path in tmp_path.glob("outputs/.sweeps/*/.submitit/*/*.out")]
    assert [text.count("Requeued job") for text in printed] == [1]
    assert sweep("output_root=undisturbed", *args).status == 0
    (undisturbed,) = find_runs("undisturbed").values()
    assert_same_result(RunFolder(Path("outputs", undisturbed.path.name)), undisturbed)


def test_parallel_points_get_their_own_gpus(sweep, monkeypatch):
    seen: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # restored after the jobs have set it
    monkeypatch.setattr(distributed, "visible_gpus", lambda: ["4", "6"])
    monkeypatch.setattr(
        "tests.reproduction.test_launchers.run_training",
        lambda _: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]),
    )
    assert sweep("hydra/launcher=parallel", "hydra.launcher.n_jobs=1", "seed=0,1,2").status == 0
    assert seen == ["4", "4", "4"]


def in_new_process(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts Python on `code` with the modules of these tests."""
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, **options)


TAKE = """
import os, pathlib, sys
from reproduction.commands.launchers import Parallel
with Parallel(pathlib.Path(sys.argv[1]), ["4", "6"], 1).training("run", 2):
    print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
input()
"""


def test_a_process_that_replaces_another_gets_the_gpu_that_is_free(tmp_path: Path):
    """It waits for the one that it replaces, whichever number it has."""
    processes = []

    def start() -> subprocess.Popen[str]:
        processes.append(in_new_process(TAKE, str(tmp_path), stdin=subprocess.PIPE))
        return processes[-1]

    first, second = start(), start()
    assert first.stdout is not None and second.stdout is not None
    gpu = first.stdout.readline()
    assert {gpu, second.stdout.readline()} == {"4\n", "6\n"}
    third = start()
    assert third.stdout is not None
    assert select.select([third.stdout], [], [], 1.0)[0] == []  # both are taken
    first.kill()
    assert third.stdout.readline() == gpu
    for process in processes:
        process.kill()
        process.communicate()


SWEEP = """
import pathlib, signal, sys, time
import joblib
from reproduction.commands.launchers import Parallel
from reproduction.system.errors import RunInterrupted
from reproduction.training.endings import handling

def train(number, folder, parallel):
    try:
        with parallel.training(str(number), 4):
            requests = []
            with handling(lambda *stop: requests.append(stop)):
                folder.joinpath(f"begun{number}").touch()
                while number and not requests:
                    time.sleep(0.05)
            if requests:
                folder.joinpath(f"saved{number}").touch()
                raise RunInterrupted("interrupted")
    except RunInterrupted as error:
        return error

folder = pathlib.Path(sys.argv[1])
folder.joinpath("slots").mkdir()
parallel = Parallel(folder / "slots", [], 1)
with parallel.starting():
    jobs = (joblib.delayed(train)(number, folder, parallel) for number in range(3))
    print([str(outcome) for outcome in joblib.Parallel(4, backend="loky")(jobs)])
"""


@pytest.mark.parametrize("child_stops_first", [False, True])
def test_ctrl_c_lets_every_parallel_run_end_its_step_and_save(
    tmp_path: Path, child_stops_first: bool
):
    """One of the four processes has ended its run and one has none."""
    process = in_new_process(SWEEP, str(tmp_path), start_new_session=True)
    while len([*tmp_path.glob("begun*")]) < 3 and process.poll() is None:
        time.sleep(0.05)
    if child_stops_first:
        (tmp_path / "slots" / "stopped").touch()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.communicate(timeout=60)[0] == "['None', 'interrupted', 'interrupted']\n"
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved1", "saved2"}
    assert not (tmp_path / "slots").exists()


def test_a_stopped_sweep_starts_no_further_run_and_says_how_to_continue(sweep, monkeypatch):
    def stop(config: Config) -> None:
        started.append(config.seed)
        raise RunInterrupted("interrupted; this run is kept")

    started: list[int] = []
    monkeypatch.setattr("tests.reproduction.test_launchers.run_training", stop)
    result = sweep("hydra/launcher=parallel", "hydra.launcher.n_jobs=1", "seed=0,1,2")
    assert (result.status, started) == (130, [0])
    (line,) = result.lines
    assert line == "train.py: interrupted; repeat the command with resume=auto to continue"


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
    assert {"--array=0-2%3", "--partition=refused", "--signal=USR2@120", "--gpus-per-node=2"} <= {
        line.removeprefix("#SBATCH ") for line in text.splitlines()
    }


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        ("0", 1, "0 0 0"),
        ("0 1", 1, "0 1 0"),
        ("0 1 2 3 4", 2, "0,1 2,3 0,1"),
        ("7 9", 2, "7,9 7,9"),
    ],
)
def test_gpu_share_cycles_through_groups(gpus: str, devices: int, expected: str):
    numbers = range(len(expected.split()))
    assert [gpu_share(gpus.split(), n, devices) for n in numbers] == expected.split()


def test_visible_gpus_follow_the_environment(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert distributed.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8a")
    assert distributed.visible_gpus() == ["5", "GPU-8a"]


def test_shares_divide_gpus_cores_and_workers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("reproduction.studies.launch.usable_cores", lambda: 16)
    monkeypatch.setattr(distributed, "visible_gpus", lambda: list("0123"))
    two = shares(2, 2)
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in two] == ["0,1", "2,3"]
    assert {(share.environment["OMP_NUM_THREADS"], share.workers) for share in two} == {("4", 4)}
    assert len(shares(6, 1)) == 6
    monkeypatch.setattr(distributed, "visible_gpus", lambda: ["0"])
    both = shares(2, 1)  # on one GPU
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in both] == ["0", "0"]
    assert [share.workers for share in both] == [8, 8]
    assert shares(1, 1)[0].workers is None  # its own
    monkeypatch.setattr(distributed, "visible_gpus", lambda: [])
    assert shares(2, 1) == [Share({"OMP_NUM_THREADS": "8"}, 8)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert shares(3, 1) == [Share({"OMP_NUM_THREADS": "1"}, 5)] * 3
