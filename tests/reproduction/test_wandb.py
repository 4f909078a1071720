"""wandb and TensorBoard beside a training: reached or not, in its middle, what they are told."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reproduction.commands.jobs import resolve
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.training import loggers
from reproduction.training.train import run_training
from tests.reproduction.conftest import SMALL, Command, at_step
from tests.reproduction.test_training import assert_same_result, interrupt_at
from tests.reproduction.wandb_service import Service, serving

pytestmark = pytest.mark.usefixtures("unevaluated")

KEY = "0123456789abcdef0123456789abcdef01234567"
SHORT = [*SMALL, "recipe.epochs=1", "recipe.log_every=1"]
ONLINE = ["logger=wandb", "logger.wandb.mode=online", *SHORT]
OFFLINE = ["name=mine", "logger=wandb", "logger.wandb.mode=offline", *SHORT]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of nobody, for a service of nobody's, waited for by seconds."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(loggers, "INIT_SECONDS", 1.0)
    monkeypatch.setattr(loggers, "FINISH_SECONDS", 1.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, unevaluated: None) -> RunFolder:
    """The same run without wandb."""
    root = tmp_path_factory.mktemp("plain")
    run_training(resolve(compose("train", ["name=whole", f"output_root={root}", *SHORT])))
    return RunFolder(root / "whole")


def run_of(tmp_path: Path, name: str = "mine") -> RunFolder:
    return RunFolder(tmp_path / "outputs" / name)


def assert_all_lines(service: Service, run: RunFolder) -> None:
    lines = service.lines[run.read_summary()["wandb_id"]]
    steps, epochs = run.read_metrics()
    told = [{k: v for k, v in line.items() if not k.startswith("_")} for line in lines]
    theirs = [{k: v for k, v in line.items() if v is not None} for line in steps]
    assert [x for x in told if "step" in x] == theirs
    assert [x for x in told if "step" not in x] == epochs


def test_a_service_that_takes_all_gets_every_line_and_nothing_else(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        ended = command("train", *ONLINE, "name=mine")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"wandb: {service.url}/somebody/tokenmixup/runs/")
    assert_all_lines(service, run_of(tmp_path))
    assert_same_result(run_of(tmp_path), plain)
    said = "\n".join(service.said)
    assert "otel" not in said and "system." not in said and "output.log" not in said


def test_a_service_out_of_reach_costs_a_warning_and_the_record_is_complete(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    """From the start on, and from the middle of training on."""
    never = command("train", *ONLINE, "name=never")
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        at_step(monkeypatch, 1, service.stop)
        lost = command("train", *ONLINE, "name=lost")
    for ended, warning in (
        (never, "warning: wandb cannot be reached, the run is recorded offline ("),
        (lost, "warning: wandb upload timed out after 1 s"),
    ):
        assert (ended.status, len(ended.lines)) == (0, 1), ended.err
        assert ended.lines[0].startswith(warning)
    assert "connection refused" in never.err
    told = f"{never.out}\n{lost.err}".split(": wandb sync ")[1:]
    places = [part for command in told for part in command.splitlines()[0].split()]
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        subprocess.run([sys.executable, "-m", "wandb", "sync", *places], check=True)
    for name in ("never", "lost"):
        assert_same_result(run_of(tmp_path, name), plain)
        assert_all_lines(service, run_of(tmp_path, name))


def test_what_the_service_refuses_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving(status=403) as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        ended = command("train", *ONLINE, "name=mine", "logger.wandb.entity=them")
    assert (ended.status, len(ended.lines)) == (2, 1)
    assert ended.err.startswith("train.py: logger.wandb.mode=online: ")
    assert "403" in ended.err and "not for you" in ended.err
    assert not run_of(tmp_path).path.exists()


def test_a_wandb_that_dies_ends_no_training_and_is_said_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    def kill() -> None:
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                if "wandb-core" in Path(f"/proc/{child}/cmdline").read_text():
                    os.kill(int(child), signal.SIGKILL)

    at_step(monkeypatch, 1, kill)
    ended = command("train", *OFFLINE)
    assert ended.status == 0, ended.err
    assert len(ended.lines) == 1
    assert ended.lines[0].startswith("warning: wandb failed ")
    assert_same_result(run_of(tmp_path), plain)


def test_a_resumed_run_goes_on_in_its_wandb_run_and_no_secret_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_do_not_tell", "MY_PASSWORD": "open_sesame"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    remote = "https://me:ghp_do_not_tell@example.org/me/mine.git"
    for told in (["init", "--quiet"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *told], cwd=tmp_path, check=True)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, KeyboardInterrupt())
        assert command("train", *OFFLINE).status == 130
    known = run_of(tmp_path).read_summary()["wandb_id"]
    assert command("train", *OFFLINE, "resume=auto").status == 0
    assert run_of(tmp_path).read_summary()["wandb_id"] == known
    recorded = [path.name for path in run_of(tmp_path).path.glob("wandb/offline-run-*")]
    assert len(recorded) == 2 and all(f"-{known}" in name for name in recorded)
    files = [path for path in run_of(tmp_path).path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        written = path.read_bytes()
        for secret in (*secrets.values(), "ghp_do_not_tell", "example.org"):
            assert secret.encode() not in written, path


def scalars(run: RunFolder) -> dict[str, dict[int, float]]:
    """Name -> step -> value, as TensorBoard's own reader has them."""
    found = EventAccumulator(str(run.path / "tensorboard"), {"scalars": 0}).Reload()
    names = found.Tags()["scalars"]
    return {name: {x.step: x.value for x in found.Scalars(name)} for name in names}


def test_tensorboard_gets_every_line_beside_wandb_also_of_a_run_that_goes_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    both = ["name=mine", "logger=[wandb,tensorboard]", "logger.wandb.mode=offline", *SHORT]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, KeyboardInterrupt())
        assert command("train", *both).status == 130
    run = run_of(tmp_path)
    assert command("train", *both, "resume=auto").status == 0
    assert_same_result(run, plain)
    assert list((run.path / "wandb").glob("offline-run-*"))
    steps, epochs = run.read_metrics()
    told = scalars(run)
    assert set(told) == {*steps[0], *epochs[0]} - {"step", "epoch"}
    for name in set(steps[0]) - {"step", "epoch"}:
        expected = {line["step"]: line[name] for line in steps}
        assert told[name] == pytest.approx(expected, rel=1e-6)
    for name in ("top1", "top5", "eval_loss"):
        assert told[name] == pytest.approx({steps[-1]["step"]: epochs[-1][name]})


def test_what_breaks_in_tensorboard_ends_no_training(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    ended = command("train", "name=mine", "logger=tensorboard", *SHORT)
    assert ended.status == 0
    assert "tensorboard failed 4 times (OSError: no space left), all lines are in" in ended.err


def test_a_wandb_run_is_ended_where_tensorboard_cannot_begin(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[str] = []
    whole = loggers.WandbLog.close

    def close(self: loggers.WandbLog, status: str) -> None:
        closed.append(status)
        whole(self, status)

    def fail(*args: object, **settings: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(loggers.WandbLog, "close", close)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.__init__", fail)
    both = ["name=mine", "logger=[wandb,tensorboard]", "logger.wandb.mode=offline", *SHORT]
    ended = command("train", *both)
    assert ended.status == 1 and "no space left" in ended.lines[-1]
    assert closed == ["failed"]
