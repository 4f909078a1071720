"""wandb and TensorBoard receive all lines of a run, and their failures do not stop training."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.doors import SMALL, Run, eventually, same, started, train
from tests.images import OWN, disturbed
from tests.reproduction.wandb_service import Service, serving

KEY = "0123456789abcdef0123456789abcdef01234567"
SHORT = (*OWN, *(word for word in SMALL if "limit" not in word), "name=mine", "resume=auto")
OFFLINE = ("logger=wandb", "logger.wandb.mode=offline", *SHORT)
ONLINE = ("logger=wandb", "logger.wandb.mode=online", *SHORT)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run without loggers."""
    root = tmp_path_factory.mktemp("plain")
    assert train(*SHORT, f"output_root={root}").status == 0
    return Run(root / "mine")


def assert_all_lines(service: Service, run: Run) -> None:
    """An epoch's may also tell its step."""
    logged = service.lines[run.summary["wandb_id"]]
    for sent, line in zip(logged, run.lines, strict=True):
        own = {key: x for key, x in sent.items() if not key.startswith("_")}
        assert {"step": own.get("step"), **line} == {"step": None, **own}


def test_wandb_gets_every_line_and_nothing_else(
    here: Path, monkeypatch: pytest.MonkeyPatch, plain: Run
):
    words = ("logger.wandb.project=typed", "logger.wandb.entity=me")
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        result = train(*ONLINE, *words)
    assert (result.status, result.err) == (0, "")
    assert f"\nwandb: {service.url}/" in result.out
    assert_all_lines(service, Run("outputs/mine"))
    assert same(Run("outputs/mine"), plain) == []
    sent = "\n".join(service.requests)
    assert '"project":"typed"' in sent
    assert '"entity":"me"' in sent
    assert "otel" not in sent
    assert "system." not in sent
    assert "output.log" not in sent


def test_a_run_refused_by_wandb_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch):
    with serving(status=403) as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        result = train(*ONLINE)
    assert (result.status, len(result.lines)) == (2, 1)
    assert "logger.wandb" in result.err
    assert "not for you" in result.err
    assert not (here / "outputs/mine/config.yaml").exists()
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", "/nonexistent")  # without credentials
    result = train(*ONLINE)
    assert (result.status, len(result.lines)) == (2, 1)
    assert "No API key" in result.err


@pytest.mark.slow
def test_a_killed_wandb_process_only_causes_a_warning(here: Path):
    run = Run("outputs/mine")
    with started(*OFFLINE, "recipe.epochs=40") as process:
        eventually(lambda: run.steps)
        (child,) = (x for x in descendants(process.pid) if "wandb-core" in command_of(x))
        os.kill(child, signal.SIGKILL)
        err = process.communicate(timeout=300)[1]
    assert process.returncode == 0, err
    (line,) = err.splitlines()
    assert line.startswith("warning: wandb failed ")
    assert "metrics.jsonl" in line
    assert len(run.steps) == 120
    assert run.summary["status"] == "finished"


def descendants(process: int) -> list[int]:
    text = "".join(x.read_text() for x in Path(f"/proc/{process}/task").glob("*/children"))
    own = [int(word) for word in text.split()]
    return [*own, *(x for child in own for x in descendants(child))]


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def test_a_resumed_run_continues_its_wandb_run_and_writes_no_secrets(
    here: Path, monkeypatch: pytest.MonkeyPatch, plain: Run
):
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_do_not_tell", "MY_PASSWORD": "open_sesame"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    remote = "https://me:ghp_do_not_tell@example.org/me/mine.git"
    for words in (["init", "--quiet"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *words], check=True)
    with disturbed("SIGTERM", at=45):
        assert train(*OFFLINE).status == 130
    run = Run("outputs/mine")
    wandb_id = run.summary["wandb_id"]
    assert train(*OFFLINE).status == 0
    assert run.summary["wandb_id"] == wandb_id
    assert same(run, plain) == []
    recorded = [path.name for path in run.path.glob("wandb/offline-run-*")]
    assert len(recorded) == 2
    assert all(f"-{wandb_id}" in name for name in recorded)
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        written = path.read_bytes()
        for secret in (*secrets.values(), "ghp_do_not_tell", "example.org"):
            assert secret.encode() not in written, path


def test_tensorboard_gets_every_line_beside_wandb_also_after_resuming(here: Path, plain: Run):
    both = ("logger=[wandb,tensorboard]", "logger.wandb.mode=offline", *SHORT)
    with disturbed("SIGTERM", at=45):
        assert train(*both).status == 130
    assert train(*both).status == 0
    run = Run("outputs/mine")
    assert same(run, plain) == []
    assert [*run.path.glob("wandb/offline-run-*")]
    events = EventAccumulator(str(run.path / "tensorboard"), {"scalars": 0}).Reload()
    assert {*events.Tags()["scalars"]} == {*run.steps[0], *run.epochs[0]} - {"step", "epoch"}
    last = {line["epoch"]: line["step"] for line in run.steps}
    for name in events.Tags()["scalars"]:
        logged = {event.step: event.value for event in events.Scalars(name)}
        expected = {
            line.get("step", last[line["epoch"]]): line[name] for line in run.lines if name in line
        }
        assert logged == pytest.approx(expected, rel=1e-6), name


def test_a_failing_logger_does_not_stop_training(
    here: Path, monkeypatch: pytest.MonkeyPatch, plain: Run
):
    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    result = train("logger=tensorboard", *SHORT)
    assert (result.status, len(result.lines)) == (0, 1)
    assert "tensorboard failed " in result.err
    assert "no space left" in result.err
    result = train("logger=tensorboard", "+logger.tensorboard.foo=1", *SHORT, "name=odd")
    assert result.status == 2
    assert "logger.tensorboard" in result.lines[-1]
    assert same(Run("outputs/mine"), plain) == []
