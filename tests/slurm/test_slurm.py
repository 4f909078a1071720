"""Sweeps on a real cluster of SLURM: every run ends as an undisturbed one, or its end is told.

The jobs of one partition must be preempted by those of another, with a grace period of seconds, and
all machines must see this folder and the folders of these tests.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import codes
from tests.programs import (
    ROOT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    ended,
    eventually,
    line_of,
    same,
    script,
    started,
    statuses,
    train,
    trained,
)

pytestmark = pytest.mark.usefixtures("here")


def told(*command: str) -> str:
    """What a command of SLURM prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def partitions() -> list[str]:
    """The partitions, the one whose jobs are preempted first."""
    tiers = {}
    for line in told("scontrol", "--oneliner", "show", "partition").splitlines():
        facts = dict(part.split("=", 1) for part in line.split() if "=" in part)
        tiers[facts["PartitionName"]] = int(facts["PriorityTier"])
    return sorted(tiers, key=lambda name: tiers[name])


LOW, *_, HIGH = partitions()
LONG = (
    SMALL,
    "recipe.epochs=100",
    "checkpoint.every_epochs=10",
    "resume=auto",
)
SUBMITIT = (
    "-m",
    "hydra/launcher=submitit_slurm",
    f"hydra.launcher.partition={LOW}",
    "hydra.launcher.cpus_per_task=1",
    "hydra.launcher.array_parallelism=2",
)


@pytest.fixture(autouse=True)
def cancelled(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets jobs find this code, and ends those that a failed test leaves."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    yield
    told("scancel", "--me")
    eventually(lambda: not queue())


def queue() -> dict[str, str]:
    """The states of the jobs that wait or run."""
    lines = told("squeue", "--me", "--noheader", "--array", "--format=%i %T").splitlines()
    return dict(line.split() for line in lines)


def accounted(job: str) -> list[str]:
    """The states and statuses of all starts of a job."""
    time.sleep(2)  # until the data base has it
    command = ["sacct", "-X", "--duplicates", "--noheader", "--parsable2", "-o", "State,ExitCode"]
    return told(*command, "-j", job).split("\n")[:-1]


def has_begun() -> bool:
    """Whether the run `mine` trains."""
    return len(Run("outputs/mine").epochs) > 5


def node_of(job: str) -> str:
    return told("squeue", "--noheader", "--format=%N", "--job", job).strip()


def preempt(job: str) -> None:
    """Submits a job that takes the node of another one."""
    node = f"-w{node_of(job)}"
    told("sbatch", f"-p{HIGH}", node, "--exclusive", "--wrap=sleep 3", "-o/dev/null")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing has disturbed."""
    return trained(LONG, name="whole", root=tmp_path_factory.mktemp("whole"))


def submitted(*changes: str, minutes: int = 60) -> str:
    """Submits the batch file of the page for a run of a study, and returns its array."""
    Path("mine.yaml").write_text("{title: One, rows: {mine: ['augmentation=[htm,vtm]']}, seeds: 1}")
    (batch,) = codes((ROOT / "docs/clusters.md").read_text(), "bash")
    replaced = {
        "--array=0-23": "--array=0-0",
        "#SBATCH --gpus-per-node": "# no",
        "--time=24:00:00": f"--time={minutes}",
        "=8": "=1",
        ".venv/bin/python": sys.executable,
        "table1 task": f"mine.yaml {' '.join(line_of((LONG, changes)))} name=mine task",
    }
    for old, new in replaced.items():
        assert old in batch
        batch = batch.replace(old, new)
    Path("batch").write_text(batch)
    return told("sbatch", "--parsable", f"-p{LOW}", "batch").strip()


def take_down(job: str) -> None:
    """Lets the node of a job die."""
    node = f"NodeName={node_of(job)}"
    told("scontrol", "update", node, "State=DOWN", "Reason=test")
    back = ["scontrol", "update", node, "State=RESUME"]
    subprocess.run(back, capture_output=True, check=False)  # it may have returned by itself


EVENTS = {
    "preemption": preempt,
    "requeue": lambda job: told("scontrol", "requeue", job),
    "the death of a node": take_down,
}


@pytest.mark.parametrize("event", EVENTS)
def test_what_ends_a_job_of_the_batch_file_does_not_end_its_run(event: str, whole: Run):
    job = f"{submitted()}_0"
    eventually(has_begun)
    EVENTS[event](job)
    eventually(lambda: job not in queue())
    assert same(Run("outputs/mine"), whole) == []
    assert len(accounted(job)) == 2
    assert accounted(job)[-1] == "COMPLETED|0:0"


def test_a_run_of_the_batch_file_ends_in_spite_of_its_time_limit():
    longer = "recipe.epochs=800"
    job = f"{submitted(longer, minutes=4)}_0"
    eventually(lambda: job not in queue(), patience=1200)
    assert same(Run("outputs/mine"), trained(LONG, longer, name="whole", root="other")) == []
    assert len(Run("outputs/mine").summary["starts"]) > 1


def test_scancel_ends_a_run_of_the_batch_file():
    job = f"{submitted()}_0"
    eventually(has_begun)
    told("scancel", job)
    eventually(lambda: job not in queue())
    assert statuses() == ["interrupted"]


def test_a_sweep_by_submitit_goes_on_after_ctrl_c_and_scancel(whole: Run):
    """Two at a time, so that others wait; a login node has no GPU, and checks for none."""
    sweep = (SUBMITIT, LONG, "name=mine,b,c,d")
    with started(sweep) as process:
        eventually(has_begun)
        process.send_signal(signal.SIGINT)
        assert ended(process).status == 130
    assert "running" in script("runs", "outputs").out
    refused = train("name=mine", LONG)
    assert_refused(refused, "is training outputs/mine")
    told("scancel", "--me")
    eventually(lambda: not queue())
    assert statuses()[-1] == "interrupted"
    with started(sweep) as process:
        result = ended(process, 1200)
    assert_succeeded(result, "4 of 4 runs are finished")
    assert same(Run("outputs/mine"), whole) == []


def test_several_tasks_of_a_run_are_refused():
    overrides = line_of((LONG, "name=mine"))
    command = ["srun", f"-p{LOW}", "-n2", "-N1", sys.executable, str(ROOT / "train.py"), *overrides]
    tasks = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is training outputs/mine" in tasks.stderr
    assert statuses() == ["finished"]
