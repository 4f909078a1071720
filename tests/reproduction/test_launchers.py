"""Hydra's launchers: sweep points in processes, failures, restarts, shares of GPUs and cores."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from reproduction.commands.launchers import gpu_share

from reproduction.studies.launch import Share, shares
from reproduction.training import distributed

pytestmark = pytest.mark.all_digits
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
