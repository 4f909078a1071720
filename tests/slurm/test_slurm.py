"""Sweeps on a real cluster of SLURM: every run ends as an undisturbed one, or its end is told.

The jobs of one partition must be preempted by those of another, with a grace period of seconds, and
all machines must see this folder and the folders of these tests.
"""

import re
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
    eventually,
    line_of,
    same,
    statuses,
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
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        tiers[facts["PartitionName"]] = int(facts["PriorityTier"])
    return sorted(tiers, key=lambda name: tiers[name])


LOW, *_, HIGH = partitions()
LONG = (
    SMALL,
    "recipe.epochs=100",
    "checkpoint.every_epochs=10",
    "dataset.workers=0",
    "resume=auto",
)


@pytest.fixture(autouse=True)
def cancelled(here: Path) -> Iterator[None]:
    """Ends the jobs that a failed test leaves."""
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


def begun(name: str) -> str:
    """Waits until a run trains in a job, and returns the job."""
    path = Path("outputs", name)
    eventually(lambda: len(Run(path).epochs) > 5)
    (job,) = re.findall(r"job (\S+)", (path / ".lock").read_text())
    return job


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


# --- what ends a job, and not its run ------------------------------------------------------------


# --- what ends a run -----------------------------------------------------------------------------


# --- who submits ---------------------------------------------------------------------------------


def test_several_tasks_of_a_run_are_refused():
    words = line_of((LONG, "name=mine"))
    command = ["srun", f"-p{LOW}", "-n2", "-N1", sys.executable, str(ROOT / "train.py"), *words]
    tasks = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is training outputs/mine" in tasks.stderr
    assert statuses() == ["finished"]


# --- without submitit ----------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["preempted", "scancel"])
def test_the_batch_file_of_the_page_tells_preemption_from_scancel(
    event: str, whole: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    Path("mine.yaml").write_text("{title: One, rows: {mine: ['augmentation=[htm,vtm]']}, seeds: 1}")
    (batch,) = codes((ROOT / "docs/clusters.md").read_text(), "bash")
    replaced = {
        "--array=0-23": "--array=0-0",
        "#SBATCH --gpus-per-node": "# no",
        "=8": "=1",
        ".venv/bin/python": sys.executable,
        "table1 task": f"mine.yaml {' '.join(line_of(LONG))} name=mine task",
    }
    for old, new in replaced.items():
        assert old in batch
        batch = batch.replace(old, new)
    Path("batch").write_text(batch)
    array = told("sbatch", "--parsable", f"-p{LOW}", "batch").strip()
    job = begun("mine")
    assert job == f"{array}_0"
    if event == "preempted":
        preempt(job)
    else:
        told("scancel", job)
    eventually(lambda: job not in queue())
    if event == "preempted":
        assert same(Run("outputs/mine"), whole) == []
        assert accounted(job) == ["REQUEUED|0:0", "COMPLETED|0:0"]
    else:
        assert statuses() == ["interrupted"]
