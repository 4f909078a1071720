"""SLURM job arrays: the batch script runs with stand-ins for SLURM's commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction.commands.jobs import resolve
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.studies import slurm
from reproduction.studies.plan import PlannedRun, Settings, plan
from reproduction.studies.slurm import Resources, array_script, render
from reproduction.studies.states import read_state
from reproduction.system.errors import UserError
from reproduction.training.train import run_training
from scripts.reproduce import parser, reproduce
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_runner import Holder
from tests.reproduction.test_training import assert_same_result

pytestmark = pytest.mark.all_digits
ROOT = Path(__file__).parents[2]
SLOW = """import runpy, time
from reproduction.reporting import report
from reproduction.training.loop import Trainer
report._draw = lambda folder, config: []
step = Trainer.train_step
def slow(*args):
    time.sleep(0.1)
    return step(*args)
Trainer.train_step = slow
runpy.run_path({train!r}, run_name="__main__")
"""

# A rank of a run on two nodes: it writes down its arguments when it is stopped.
RANK = """import os, pathlib, signal, sys, time
here, rank = pathlib.Path({here!r}), os.environ["RANK"] + "-of-" + os.environ["WORLD_SIZE"]
def end(*_):
    (here / ("stopped-" + rank)).write_text("\\n".join(sys.argv[1:]))
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
(here / ("ready-" + rank)).touch()
time.sleep(300)
"""

# srun starts the step on every node; scancel signals it.
COMMANDS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < ${SLURM_JOB_NUM_NODES:-1}; node++)); do
  "$@" & steps[node]=$!
done
echo "${steps[@]}" > "$STEPS"
for step in "${steps[@]}"; do
  wait "$step" || status=$?
done
exit "${status:-0}"
""",
    "scancel": 'kill "-${1#--signal=}" $(cat "$STEPS")',
    "scontrol": "[[ $1 != show ]] || echo localhost",
    "sbatch": 'cp "${!#}" "$SUBMITTED"; ! grep -q refused "${!#}" && echo "70;cluster"',
}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs stand-ins for SLURM's commands; returns the file that records their calls."""
    commands, calls = tmp_path / "commands", tmp_path / "calls"
    commands.mkdir()
    for name, code in COMMANDS.items():
        path = commands / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{code}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    monkeypatch.setenv("SUBMITTED", str(tmp_path / "submitted"))
    return calls


def small_run(**changes: str) -> PlannedRun:
    """Returns a run whose overrides contain everything that a shell could misread."""
    typed = {"output_root": "'it\\'s $HOME'", "name": "'a \"run\"'", "resume": "auto", **changes}
    overrides = [*SMALL, "recipe.log_every=1", *(f"{key}={text}" for key, text in typed.items())]
    return PlannedRun(
        config=resolve(compose("train", overrides)), overrides=tuple(overrides), labels=("small",)
    )


def execute(script: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Executes the script as the first task of a job array."""
    task = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "71"}
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]"}
    return subprocess.Popen(["bash", str(script)], env=os.environ | task | nodes | environment)


def test_a_task_is_queued_again_near_its_time_limit_and_goes_on(
    calls: Path, tmp_path: Path, monkeypatch
):
    here = tmp_path / "it's $(here)"
    here.mkdir()
    monkeypatch.chdir(here)
    train = here / "train.py"
    train.write_text(SLOW.format(train=str(slurm.TRAIN)))
    monkeypatch.setattr(slurm, "TRAIN", train)
    run = small_run()
    script = tmp_path / "job.sbatch"
    script.write_text(render("small", [run], Resources(no_gpu=True, cpus=1), here))
    monkeypatch.chdir(tmp_path)  # the script goes there itself
    first = execute(script)
    folder = RunFolder(here / run.config.output_root / run.name)
    while not folder.metrics_path.exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGUSR1)
    assert first.wait() == 130
    assert "scontrol requeue 70_0" in calls.read_text().splitlines()
    assert read_state(folder).status == "interrupted" and folder.last_path.exists()
    assert execute(script).wait() == 0
    assert read_state(folder).status == "finished"
    assert calls.read_text().count("scontrol requeue") == 1
    undisturbed = replace(run.config, output_root=str(tmp_path), name="undisturbed", device="cpu")
    run_training(undisturbed)
    assert_same_result(folder, RunFolder.of(undisturbed))


def test_ranks_of_all_nodes_are_stopped_near_the_time_limit(
    calls: Path, tmp_path: Path, monkeypatch
):
    (tmp_path / "train.py").write_text(RANK.format(here=str(tmp_path)))
    monkeypatch.setattr(slurm, "TRAIN", tmp_path / "train.py")
    script = tmp_path / "job.sbatch"
    resources = Resources(devices=2, nodes=2, no_gpu=True, cpus=1)
    run = small_run(devices="2")
    script.write_text(render("small", [run], resources, tmp_path))
    task = execute(script, SLURM_JOB_NUM_NODES="2")
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert task.poll() is None
        time.sleep(0.02)
    task.send_signal(signal.SIGUSR1)
    assert task.wait() == 1
    assert "scontrol requeue 70_0" in calls.read_text().splitlines()
    arguments = {path.name: path.read_text().splitlines() for path in tmp_path.glob("stopped-*")}
    assert set(arguments) == {"stopped-0-of-2", "stopped-1-of-2"}
    assert all(args == [*run.overrides, "device=cpu"] for args in arguments.values())


def test_sigterm_is_left_to_slurm(calls: Path, tmp_path: Path, monkeypatch):
    """SIGTERM ends the run, here with status 7, and does not requeue the task.

    The run takes a moment to end, like runs that save: bash loses the status of a step that ends in
    the same millisecond as the signal reaches the shell.
    """
    code = "import pathlib, signal, sys, time\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(7)))\n"
    code += f"pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(60)\n"
    (tmp_path / "train.py").write_text(code)
    monkeypatch.setattr(slurm, "TRAIN", tmp_path / "train.py")
    script = tmp_path / "job.sbatch"
    script.write_text(render("small", [small_run()], Resources(), tmp_path))
    task = execute(script)
    while not (tmp_path / "ready").exists():
        assert task.poll() is None
        time.sleep(0.02)
    task.send_signal(signal.SIGTERM)  # as SLURM does, to the shell and to the step
    os.kill(int((tmp_path / "steps").read_text()), signal.SIGTERM)
    assert task.wait() == 7
    assert "requeue" not in calls.read_text()


def test_script_passes_the_overrides_unchanged(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [small_run(), small_run(name="'b'", seed="1")]
    (tmp_path / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    monkeypatch.setattr(slurm, "TRAIN", tmp_path / "train.py")
    text = render("small", runs, Resources(no_gpu=True), tmp_path)
    for number, run in enumerate(runs):
        result = subprocess.run(
            ["bash", "-c", text.replace("srun --kill-on-bad-exit=1 --cpus-per-task=8", "")],
            env=os.environ | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": str(number)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(result.stdout) == [*run.overrides, "device=cpu"]


RESOURCES = {
    "plain": Resources(),
    "full": Resources(
        devices=8,
        nodes=2,
        cpus=6,
        partition="gpu",
        account="my account",
        time="24:00:00",
        memory="64G",
        parallel=4,
        sbatch=["--qos=long", "--constraint='a&b'"],
    ),
}


@pytest.mark.parametrize("resources", RESOURCES.values(), ids=RESOURCES)
def test_shellcheck_and_bash_accept_the_script(resources: Resources):
    runs = [small_run(output_root="outputs", name=f"run-{seed}") for seed in range(2)]
    text = render("small", runs, resources, Path("outputs"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=places)
    assert shellcheck is not None, "see requirements-dev.txt"
    checked = subprocess.run(
        [shellcheck, "-"], input=text, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_options_of_sbatch():
    text = render("small", [small_run()] * 9, RESOURCES["full"], Path("/logs"))
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert lines == [
        "--job-name=small",
        "--array=0-8%4",
        "--output=/logs/%x-%A_%a.log",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--partition=gpu",
        "--account='my account'",
        "--time=24:00:00",
        "--mem=64G",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=24",
        "--gpus-per-node=4",
        "--requeue",
        "--qos=long",
        "--constraint='a&b'",
    ]
    assert "--nnodes=2 --nproc-per-node=4" in text and "device=cuda)" in text
    with pytest.raises(UserError, match="nodes=3: devices=8"):
        Resources(devices=8, nodes=3)


def call(*args: str) -> int:
    """make reproduce-table3 LAUNCHER=slurm, in the folder of the test."""
    line = ["table3", "--scale", "digits", "--seeds", "1", "--launcher", "slurm", *args]
    return reproduce(parser().parse_args(line))


def test_reproduce_submits_unfinished_runs(calls: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("--partition", "gpu") == 0
    out = capsys.readouterr().out
    (script,) = (tmp_path / "outputs/digits/.slurm").iterdir()
    assert f"submitted {script.relative_to(tmp_path)} as job 70" in out and "--status" in out
    assert calls.read_text() == f"sbatch --parsable {script.relative_to(tmp_path)}\n"
    assert (tmp_path / "submitted").read_text() == script.read_text()
    assert "#SBATCH --array=0-2\n" in script.read_text()
    assert "#SBATCH --partition=gpu\n" in script.read_text()


def test_array_script_omits_finished_and_running_runs(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(scale="digits")
    done, held, left = plan("table3", settings, 1)
    done.folder.create(done.config)
    done.folder.write_summary(status="finished", top1_last=1.0)
    done.folder.report_path.touch()
    holder = Holder(held.folder)
    script = array_script("table3", [done, held, left], settings, Resources())
    assert script is not None and "--array=0-0" in script
    assert left.name in script and held.name not in script and done.name not in script
    assert array_script("table3", [done, held], settings, Resources()) is None
    holder.close()
    (done.folder.path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json"):
        array_script("table3", [done], settings, Resources())


def test_script_option_only_prints_the_script(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "table3 --scale digits --seeds 1 --devices 2 --nodes 2 --sbatch=--qos=x --script"
    assert reproduce(parser().parse_args([*line.split(), "--launcher", "slurm"])) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n") and "#SBATCH --qos=x\n" in out
    assert out.count("experiment=table3/") == 3 and "--nnodes=2 --nproc-per-node=1" in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--nodes", "2"], "nodes=2: devices=1"),
        (["--partition", "refused"], "sbatch has refused outputs/digits/.slurm/table3-"),
        (["--jobs", "2"], "jobs=2: goes with launcher=joblib only"),
        (["--launcher", "local", "--script"], "script: goes with launcher=slurm only"),
        (["--launcher", "local", "--no-gpu"], "no_gpu=True: goes with launcher=slurm only"),
        (["--launcher", "local", "--memory", "1G"], "memory=1G: goes with launcher=slurm only"),
    ],
)
def test_invalid_submissions_are_refused(calls, tmp_path, monkeypatch, args, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(named)):
        call(*args)


def test_missing_slurm_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no sbatch on this machine"):
        call()
    assert list(tmp_path.iterdir()) == []


def test_hydras_launcher_submits_one_array(calls: Path, tmp_path: Path, command: Command):
    args = ["hydra/launcher=slurm", "hydra.launcher.partition=refused", "resume=auto"]
    result = command("train", "-m", *args, "devices=2", "seed=0,1,2")
    assert result.status == 1
    assert result.lines[-1].startswith("train.py: hydra/launcher=slurm: ")
    text = (tmp_path / "submitted").read_text()
    assert {"--array=0-2%3", "--partition=refused", "--signal=USR2@120", "--gpus-per-node=2"} <= {
        line.removeprefix("#SBATCH ") for line in text.splitlines()
    }
