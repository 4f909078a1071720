"""wandb and TensorBoard receive all lines of a run, and their failures do not stop training."""

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.images import OWN, disturbed
from tests.programs import (
    SHORT,
    Run,
    assert_refused,
    assert_succeeded,
    same,
    train,
    trained,
)
from tests.reproduction.wandb_service import Service, serving

KEY = "0123456789abcdef0123456789abcdef01234567"
MINE = (OWN, SHORT, "name=mine", "resume=auto")
OFFLINE = ("logger=wandb", "logger.wandb.mode=offline", MINE)
ONLINE = ("logger=wandb", "logger.wandb.mode=online", MINE)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run without loggers."""
    return trained(MINE, root=tmp_path_factory.mktemp("plain"))


def assert_all_lines(service: Service, run: Run) -> None:
    """An epoch's may also tell its step."""
    logged = service.lines[run.summary["wandb_id"]]
    for sent, line in zip(logged, run.lines, strict=True):
        own = {key: value for key, value in sent.items() if not key.startswith("_")}
        if "step" not in line:
            own.pop("step", None)
        assert own == line


def test_wandb_gets_every_line_and_nothing_else(
    here: Path, monkeypatch: pytest.MonkeyPatch, plain: Run
):
    overrides = ("logger.wandb.project=typed", "logger.wandb.entity=me")
    with serving() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        result = train(ONLINE, overrides)
    assert_succeeded(result, f"\nwandb: {service.url}/")
    assert result.err == ""
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
        result = train(ONLINE)
    assert_refused(result, "logger.wandb", "not for you")
    assert not (here / "outputs/mine/config.yaml").exists()
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", "/nonexistent")  # without credentials
    assert_refused(train(ONLINE), "No API key")


def test_a_resumed_run_continues_its_wandb_run_and_writes_no_secrets(
    here: Path, monkeypatch: pytest.MonkeyPatch, plain: Run
):
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_do_not_tell", "MY_PASSWORD": "open_sesame"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    remote = "https://me:ghp_do_not_tell@example.org/me/mine.git"
    subprocess.run(["git", "init", "--quiet"], check=True)
    subprocess.run(["git", "remote", "add", "origin", remote], check=True)
    with disturbed("SIGTERM", at=45):
        assert train(OFFLINE).status == 130
    run = Run("outputs/mine")
    wandb_id = run.summary["wandb_id"]
    assert_succeeded(train(OFFLINE))
    assert run.summary["wandb_id"] == wandb_id
    assert same(run, plain) == []
    recorded = [path.name for path in run.path.glob("wandb/offline-run-*")]
    assert len(recorded) == 2
    assert all(f"-{wandb_id}" in name for name in recorded)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    for path in files:
        written = path.read_bytes()
        for secret in [KEY, "hf_do_not_tell", "open_sesame", "ghp_do_not_tell", "example.org"]:
            assert secret.encode() not in written, path


Scalars = dict[str, dict[int, float]]  # name -> step -> value


def scalars_of(run: Run) -> Scalars:
    """What TensorBoard has."""
    events = EventAccumulator(str(run.path / "tensorboard"), {"scalars": 0}).Reload()
    found: Scalars = {}
    for name in events.Tags()["scalars"]:
        found[name] = {event.step: event.value for event in events.Scalars(name)}
    return found


def expected_scalars(run: Run) -> Scalars:
    """The numbers of all lines; those of an epoch are of its last step."""
    last = {line["epoch"]: line["step"] for line in run.steps}
    found: Scalars = defaultdict(dict)
    for line in run.lines:
        step = line.get("step", last[line["epoch"]])
        for name in line.keys() - {"step", "epoch"}:
            found[name][step] = line[name]
    return found


def test_tensorboard_gets_every_line_beside_wandb_also_after_resuming(here: Path, plain: Run):
    both = ("logger=[wandb,tensorboard]", "logger.wandb.mode=offline", MINE)
    with disturbed("SIGTERM", at=45):
        assert train(both).status == 130
    assert_succeeded(train(both))
    run = Run("outputs/mine")
    assert same(run, plain) == []
    assert list(run.path.glob("wandb/offline-run-*"))
    logged = scalars_of(run)
    expected = expected_scalars(run)
    assert logged.keys() == expected.keys()
    for name, values in expected.items():
        assert logged[name] == pytest.approx(values, rel=1e-6), name


def test_a_failing_logger_does_not_stop_training(
    here: Path, monkeypatch: pytest.MonkeyPatch, plain: Run
):
    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    result = train("logger=tensorboard", MINE)
    assert_refused(result, "tensorboard failed ", "no space left", status=0)
    result = train("logger=tensorboard", "+logger.tensorboard.foo=1", MINE, "name=odd")
    assert result.status == 2
    assert "logger.tensorboard" in result.lines[-1]
    assert same(Run("outputs/mine"), plain) == []
