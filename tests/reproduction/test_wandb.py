"""wandb and TensorBoard receive all lines of a run, and their failures do not stop training."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reproduction.config import Wandb
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError
from reproduction.training import loggers
from tests.reproduction.conftest import SMALL, Command, at_step, trained_run
from tests.reproduction.test_training import assert_same_result, folder, interrupt_at
from tests.reproduction.wandb_service import Service, serving

pytestmark = pytest.mark.usefixtures("unevaluated")

KEY = "0123456789abcdef0123456789abcdef01234567"
SHORT = [*SMALL, "recipe.epochs=1", "recipe.log_every=1"]
ONLINE = ["logger=wandb", "logger.wandb.mode=online", *SHORT]
OFFLINE = ["name=mine", "logger=wandb", "logger.wandb.mode=offline", *SHORT]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets fake credentials, an unreachable service and timeouts of a second."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(loggers, "INIT_SECONDS", 1.0)
    monkeypatch.setattr(loggers, "FINISH_SECONDS", 1.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, unevaluated: None) -> RunFolder:
    """The same run without wandb."""
    return trained_run(tmp_path_factory.mktemp("plain"), *SHORT)


def assert_all_lines(service: Service, run: RunFolder) -> None:
    lines = service.lines[run.read_summary()["wandb_id"]]
    steps, epochs = run.read_metrics()
    logged = [{k: v for k, v in line.items() if not k.startswith("_")} for line in lines]
    expected = [{k: v for k, v in line.items() if v is not None} for line in steps]
    assert [x for x in logged if "step" in x] == expected
    assert [x for x in logged if "step" not in x] == epochs


def test_wandb_gets_every_line_and_nothing_else(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        result = command("train", *ONLINE, "name=mine")
    assert (result.status, result.err) == (0, "")
    assert f"\nwandb: {service.url}/somebody/tokenmixup/runs/" in result.out
    assert_all_lines(service, folder(tmp_path))
    assert_same_result(folder(tmp_path), plain)
    sent = "\n".join(service.requests)
    assert "otel" not in sent and "system." not in sent and "output.log" not in sent


@pytest.mark.slow
def test_unreachable_wandb_causes_a_warning_and_a_complete_offline_record(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    """Unreachable from the start, or from the middle of training."""
    never = command("train", *ONLINE, "name=never")
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        at_step(monkeypatch, 1, service.stop)
        lost = command("train", *ONLINE, "name=lost")
    for result, warning in (
        (never, "warning: wandb cannot be reached, the run is recorded offline ("),
        (lost, "warning: wandb upload timed out after 1 s"),
    ):
        assert (result.status, len(result.lines)) == (0, 1), result.err
        assert result.lines[0].startswith(warning)
    assert "connection refused" in never.err
    commands = f"{never.out}\n{lost.err}".split(": wandb sync ")[1:]
    paths = [part for command in commands for part in command.splitlines()[0].split()]
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        subprocess.run([sys.executable, "-m", "wandb", "sync", *paths], check=True)
    for name in ("never", "lost"):
        assert_same_result(folder(tmp_path, name), plain)
        assert_all_lines(service, folder(tmp_path, name))


def test_run_refused_by_wandb_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving(status=403) as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        result = command("train", *ONLINE, "name=mine", "logger.wandb.entity=them")
    assert (result.status, len(result.lines)) == (2, 1)
    assert result.err.startswith("train.py: logger.wandb.mode=online: ")
    assert "403" in result.err and "not for you" in result.err
    assert not folder(tmp_path).config_path.exists()
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", "/nonexistent")  # without credentials
    result = command("train", *ONLINE, "name=mine")
    assert result.lines == [
        "train.py: logger.wandb.mode=online: No API key configured. Use `wandb login` to log in. "
        "(or choose offline or disabled)"
    ]


TYPED = [f"logger.wandb.{x}" for x in ("mode=online", "project=typed", "entity=me")]


@pytest.mark.slow
@pytest.mark.parametrize("typed", [[], TYPED], ids=["", "typed"])
def test_keys_that_are_null_follow_wandbs_variables(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str]
):
    """With WANDB_MODE=offline nothing is sent, unless the command line says online."""
    for name, value in {"MODE": "offline", "PROJECT": "theirs", "ENTITY": "them"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        result = command("train", "name=mine", "logger=wandb", *typed, *SHORT)
    assert (result.status, result.err) == (0, "")
    sent = "\n".join(service.requests)
    assert ('"project":"typed"' in sent and '"entity":"me"' in sent) == bool(typed)
    assert bool(sent) == bool(typed)
    assert ("wandb: recorded offline" in result.out) == (not typed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "expected"),
    [(None, "online"), ("dryrun", "offline"), ("disabled", "disabled")],
)
def test_the_project_is_ours_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, expected: str
):
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    silent = Wandb(mode=None, project=None, entity=None)
    found = loggers.from_environment(silent)
    assert (found.mode, found.project, found.entity) == (expected, "tokenmixup", None)
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(UserError, match=r"logger=wandb: its environment is invalid: .*online"):
        loggers.from_environment(silent)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # no entry
    with pytest.raises(UserError, match="invalid: Could not determine home directory"):
        loggers.from_environment(silent)


@pytest.mark.slow
def test_killed_wandb_process_only_causes_one_warning(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    def kill() -> None:
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                if "wandb-core" in Path(f"/proc/{child}/cmdline").read_text():
                    os.kill(int(child), signal.SIGKILL)

    at_step(monkeypatch, 1, kill)
    result = command("train", *OFFLINE)
    assert result.status == 0, result.err
    assert len(result.lines) == 1
    assert result.lines[0].startswith("warning: wandb failed ")
    assert_same_result(folder(tmp_path), plain)


@pytest.mark.slow
def test_resumed_run_continues_its_wandb_run_and_writes_no_secrets(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_do_not_tell", "MY_PASSWORD": "open_sesame"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    remote = "https://me:ghp_do_not_tell@example.org/me/mine.git"
    for args in (["init", "--quiet"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, KeyboardInterrupt())
        patch.setenv("WANDB_SWEEP_ID", "sweep")  # by an agent, and continued by hand
        patch.setenv("WANDB_RUN_ID", "agents")
        assert command("train", *OFFLINE).status == 130
    wandb_id = folder(tmp_path).read_summary()["wandb_id"]
    assert wandb_id == "agents"
    assert command("train", *OFFLINE, "resume=auto").status == 0
    assert folder(tmp_path).read_summary()["wandb_id"] == wandb_id
    recorded = [path.name for path in folder(tmp_path).path.glob("wandb/offline-run-*")]
    assert len(recorded) == 2 and all(f"-{wandb_id}" in name for name in recorded)
    files = [path for path in folder(tmp_path).path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        written = path.read_bytes()
        for secret in (*secrets.values(), "ghp_do_not_tell", "example.org"):
            assert secret.encode() not in written, path


def scalars(run: RunFolder) -> dict[str, dict[int, float]]:
    """Reads the scalars of a run with TensorBoard: name -> step -> value."""
    events = EventAccumulator(str(run.path / "tensorboard"), {"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: {x.step: x.value for x in events.Scalars(name)} for name in names}


@pytest.mark.slow
def test_tensorboard_gets_every_line_beside_wandb_also_after_resuming(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: RunFolder
):
    both = ["name=mine", "logger=[wandb,tensorboard]", "logger.wandb.mode=offline", *SHORT]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, KeyboardInterrupt())
        assert command("train", *both).status == 130
    run = folder(tmp_path)
    assert command("train", *both, "resume=auto").status == 0
    assert_same_result(run, plain)
    assert list((run.path / "wandb").glob("offline-run-*"))
    steps, epochs = run.read_metrics()
    logged = scalars(run)
    assert set(logged) == {*steps[0], *epochs[0]} - {"step", "epoch"}
    for name in set(steps[0]) - {"step", "epoch"}:
        expected = {line["step"]: line[name] for line in steps}
        assert logged[name] == pytest.approx(expected, rel=1e-6)
    for name in ("top1", "top5", "eval_loss"):
        assert logged[name] == pytest.approx({steps[-1]["step"]: epochs[-1][name]})


def test_failing_tensorboard_does_not_stop_training(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    result = command("train", "name=mine", "logger=tensorboard", *SHORT)
    assert result.status == 0
    assert "tensorboard failed 4 times (OSError: no space left), all lines are in" in result.err


def test_wandb_run_is_closed_if_tensorboard_cannot_start(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[str] = []
    original = loggers.WandbLog.close

    def close(self: loggers.WandbLog, status: str) -> None:
        closed.append(status)
        original(self, status)

    def fail(*args: object, **settings: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(loggers.WandbLog, "close", close)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.__init__", fail)
    both = ["name=mine", "logger=[wandb,tensorboard]", "logger.wandb.mode=offline", *SHORT]
    result = command("train", *both)
    assert result.status == 1 and "no space left" in result.lines[-1]
    assert closed == ["failed"]
