"""Sweeps on a real cluster of SLURM: every run ends as an undisturbed one, or its end is told.

The jobs of one partition must be preempted by those of another, with a grace period of seconds, and
all machines must see this folder and the folders of these tests.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.doors import (
    ROOT,
    SHORT,
    SMALL,
    Result,
    Run,
    assert_refused,
    assert_succeeded,
    ended,
    eventually,
    line_of,
    run,
    runs,
    same,
    started,
    statuses,
    train,
    trained,
    words_of,
)
from tests.images import OWN, disturbed
from tests.pages import codes

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
SLURM = words_of(f"-m hydra/launcher=submitit_slurm hydra.launcher.partition={LOW}")
MINE = (OWN, SHORT, "resume=auto")
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


@contextmanager
def sweeping(*words: object) -> Iterator[subprocess.Popen[str]]:
    with started(SLURM, LONG, words) as process:  # type: ignore[arg-type]
        yield process


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing has disturbed."""
    return trained(LONG, name="whole", root=tmp_path_factory.mktemp("whole"))


def assert_whole(result: Result, whole: Run, name: str = "mine") -> None:
    assert_succeeded(result, "runs are finished")
    assert "Traceback" not in result.err
    assert same(Run(Path("outputs", name)), whole) == []


# --- what ends a job, and not its run ------------------------------------------------------------


@pytest.mark.parametrize("event", ["preempted", "requeue", "TERM", "USR1", "USR2", "HUP"])
def test_a_job_that_is_queued_again_ends_as_an_undisturbed_run(event: str, whole: Run):
    with sweeping("name=mine") as process:
        job = begun("mine")
        if event == "preempted":
            preempt(job)
        elif event == "requeue":
            told("scontrol", "requeue", job)
        else:
            told("scancel", f"--signal={event}", job)
        result = ended(process)
    assert_whole(result, whole)
    assert len(Run("outputs/mine").summary["starts"]) == 2
    assert accounted(job)[-1] == "COMPLETED|0:0"


def test_a_run_ends_in_spite_of_time_limits():
    limit = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=20")
    words = (LONG, "recipe.epochs=600")
    with started(SLURM, words, limit, "name=mine") as process:
        result = ended(process, 900)
    assert_whole(result, trained(words, name="whole", root="other"))
    assert len(Run("outputs/mine").summary["starts"]) > 1


def test_a_run_that_needs_more_time_than_allowed_is_told():
    limit = "timeout_min=1 signal_delay_s=20 max_num_timeout=0"
    words = [f"hydra.launcher.{word}" for word in limit.split()]
    result = train(SLURM, LONG, "recipe.epochs=5000", words, "name=mine", apart=True)
    assert result.status == 1
    assert result.lines[-1].count("timed-out too many times") == 1
    assert "1 interrupted" in result.out


def test_a_run_on_a_node_that_dies_goes_on_on_another(whole: Run):
    with sweeping("name=mine") as process:
        job = begun("mine")
        node = node_of(job)
        told("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        back = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
        subprocess.run(back, capture_output=True, check=False)  # it may have returned by itself
        result = ended(process)
    assert_whole(result, whole)


# --- what ends a run -----------------------------------------------------------------------------


def test_scancel_ends_a_run_and_one_that_waits_and_the_same_command_trains_both(whole: Run):
    with sweeping("name=mine,other", "hydra.launcher.array_parallelism=1") as process:
        job = begun("mine")
        told("scancel", job.replace("_0", "_1"))
        told("scancel", job)
        result = ended(process)
    assert result.status == 1
    assert "0 of 2 runs are finished, 1 interrupted, 1 not started" in result.out
    assert f"job {job} " in result.lines[0]
    assert len(result.lines) == 2
    assert {x.name for x in Path("outputs").iterdir()} == {".sweeps", "mine", "report"}
    assert accounted(job)[-1].startswith("CANCELLED")
    assert_whole(train(SLURM, LONG, "name=mine,other", apart=True), whole)


@pytest.mark.parametrize("signum", ["SIGUSR1", "SIGKILL"])
def test_a_run_that_is_killed_or_stopped_is_told_or_goes_on(signum: str):
    with disturbed(signum, at=70):
        result = train(SLURM, MINE, "seed=0,1", apart=True)
    if signum == "SIGUSR1":
        assert_succeeded(result, "2 of 2 runs are finished")
    else:
        assert result.status == 1
        assert len(result.lines) == 2
        assert "0 of 2 runs are finished, 2 interrupted" in result.out
        assert_succeeded(train(SLURM, MINE, "seed=0,1", apart=True))
    assert same(runs()[0], trained("seed=0", MINE, name="whole", root="other")) == []


def test_a_job_that_fails_has_its_line_and_its_status():
    result = train(SLURM, SMALL, "resume=auto", "recipe.lr=1e30,0.001", apart=True)
    assert result.status == 1
    assert "1 of 2 runs are finished, 1 failed" in result.out
    (line,) = result.lines
    assert "kept as failed" in line
    (log,) = Path("outputs").glob(".sweeps/*/.submitit/*_0/*.err")
    assert line in log.read_text()
    assert sorted(accounted(log.parent.name.partition("_")[0])) == ["COMPLETED|0:0", "FAILED|1:0"]


def test_what_only_the_machine_lacks_that_submits_is_a_remark_and_each_job_checks_itself():
    result = train(
        SLURM, SMALL, "resume=auto", "recipe.precision=float16", "device=auto", apart=True
    )
    remark, line = result.lines
    assert remark.startswith("not here: recipe.precision=float16")
    assert line.startswith("train.py: recipe.precision=float16")
    assert result.status == 2
    assert "0 of 1 runs are finished, 1 not started" in result.out
    assert runs() == []


def test_a_mistyped_partition_is_told_in_a_line():
    words = (SLURM, SMALL, "resume=auto", "hydra.launcher.partition=mine")
    assert_refused(train(words, apart=True), "hydra/launcher=submitit_slurm", "invalid partition")
    assert runs() == []


# --- who submits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_same_command_waits_for_jobs_of_one_that_was_ended(signum: int, whole: Run):
    """One job runs then, the other waits."""
    words = ("name=mine,other", "hydra.launcher.array_parallelism=1")
    with sweeping(words) as process:
        begun("mine")
        process.send_signal(signum)
        result = ended(process)
    if signum == signal.SIGINT:
        assert result.status == 130
        assert result.lines[-1].count("the jobs go on until `scancel`") == 1
    assert len(queue()) == 2
    with sweeping(words) as process, sweeping(words) as beside:
        results = [ended(process), ended(beside)]
    for result in results:
        assert_whole(result, whole)
        assert result.out.count("is not submitted again") == 2
    assert len(Run("outputs/mine").summary["starts"]) == 1
    assert_succeeded(train(SLURM, LONG, words, apart=True), "2 of 2 runs are finished")
    assert queue() == {}
    assert len([*Path("outputs").glob(".sweeps/*/.submitit/*_submission.sh")]) <= 1


def test_a_study_is_trained_and_several_ranks_are_queued_again():
    Path("mine.yaml").write_text("{title: One, rows: {plain: ['augmentation=[]']}, seeds: 2}")
    words = ("mine.yaml", SLURM[1:], "devices=2", "hydra.launcher.cpus_per_task=2", MINE)
    with disturbed("SIGUSR2", at=40):
        result = run("scripts/reproduce.py", words, apart=True)
    assert_succeeded(result, "2 of 2 runs are finished")
    assert statuses() == ["finished"] * 2
    logs = "".join(path.read_text() for path in Path("outputs").glob(".sweeps/*/.submitit/*/*.err"))
    assert "Traceback" not in logs
    assert len(runs()[0].summary["starts"]) == 2


def test_several_tasks_of_a_run_are_refused():
    words = (SMALL, "resume=auto", "name=mine")
    result = train(SLURM, words, "hydra.launcher.tasks_per_node=2")
    assert_refused(result, "hydra.launcher.tasks_per_node=2", "devices=N")
    words = line_of((LONG, "name=mine"))
    command = ["srun", f"-p{LOW}", "-n2", "-N1", sys.executable, str(ROOT / "train.py"), *words]
    tasks = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is training outputs/mine; a run is one task of a job" in tasks.stderr
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
