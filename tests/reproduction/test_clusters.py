"""What a sweep on a cluster knows without one: squeue is a script, and nothing is submitted."""

import os
from pathlib import Path

import pytest

from tests.doors import (
    SHORT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    eventually,
    runs,
    started,
    train,
)
from tests.images import OWN, disturbed

pytestmark = pytest.mark.usefixtures("here")
SLURM = ("-m", "hydra/launcher=submitit_slurm", "resume=auto")
MINE = (OWN, SHORT, "resume=auto", "name=mine")


@pytest.fixture
def squeue(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, whose answers are the lines of the file; the last one is given for ever."""
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    script = here / "squeue"
    script.write_text(
        "#!/bin/sh\nhead -n 1 answers\n[ $(wc -l < answers) = 1 ] || sed -i 1d answers\n"
    )
    script.chmod(0o755)
    answers = here / "answers"
    answers.write_text("\n")
    return answers


OF_MINE = "from hydra_plugins.checked import SlurmLauncher\n\nclass Mine(SlurmLauncher): pass\n"


def test_what_only_the_machine_lacks_that_submits_is_a_remark(
    squeue: Path, monkeypatch: pytest.MonkeyPatch
):
    words = (SMALL, "device=auto", "recipe.precision=float16", "dataset=cifar10")
    assert_refused(train("-m", words), "recipe.precision=float16")
    Path("hydra_plugins").mkdir()
    Path("hydra_plugins/of_mine.py").write_text(OF_MINE)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    mine = train(SLURM, words, "hydra.launcher._target_=hydra_plugins.of_mine.Mine", apart=True)
    for result in (train(SLURM, words), mine):
        assert "not here: recipe.precision=float16: is for a GPU" in result.lines[0]
        assert "not here: dataset.root=data" in result.lines[1]
        assert "pip install submitit" in result.lines[2]
    assert_refused(train(SLURM, SMALL, "recipe.lr=-1"), "recipe.lr=-1")
    assert runs() == []


def test_a_run_that_a_job_trains_is_waited_for_and_its_folder_tells_its_end(
    squeue: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with disturbed("SIGTERM", at=70):
        assert train(MINE).status == 130
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    squeue.write_text("70_3 RUNNING\n70_3 RUNNING\n70_3 PENDING\n71 RUNNING\n")
    result = train(SLURM, MINE)
    assert result.status == 1
    for line in ("job 70_3 is RUNNING, and is not submitted again", "1 RUNNING", "1 PENDING"):
        assert line in result.out
    (line,) = result.lines
    assert "outputs/mine: interrupted after epoch 1 of 2, and job 70_3 has ended" in line
    assert_succeeded(train(MINE))
    squeue.write_text("70_3 RUNNING\n")
    assert_succeeded(train(SLURM, MINE), "1 of 1 runs are finished")


def test_a_queue_that_does_not_answer_is_told(squeue: Path, monkeypatch: pytest.MonkeyPatch):
    squeue.with_name("squeue").write_text("#!/bin/sh\nexit 1\n")
    assert_refused(train(SLURM, SMALL), "squeue does not answer", status=1)
    monkeypatch.setenv("PATH", "nowhere")
    assert_refused(train(SLURM, SMALL), "submitit_slurm", "there is no SLURM on this machine")


def test_a_run_is_one_task_of_a_job(monkeypatch: pytest.MonkeyPatch):
    for word in ("hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2"):
        assert_refused(train(SLURM, SMALL, word), word, "devices=N")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    with started(SMALL, "recipe.epochs=1000", "name=mine") as process:
        eventually(lambda: Run("outputs/mine").lines)
        again = train(SMALL, "recipe.epochs=1000", "name=mine", "resume=auto")
        assert_refused(again, f"process {process.pid}", "job 5", "devices=N")
