"""`pytest tests/gpu` runs on a CPU at tiny size, `pytest tests/gpu --device cuda` on a GPU.

`--report FILE.md` writes what every test found, after each test.
"""

from pathlib import Path

import pytest
import torch

from reproduction.errors import UserError
from reproduction.files import write_text
from reproduction.machine import git_revision, hardware_name
from reproduction.training.ranks import resolve_device

RESULTS = {"passed": "ok", "failed": "WRONG", "skipped": "not run"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="of tests/gpu")
    parser.addoption("--report", type=Path, metavar="FILE.md", help="table of tests/gpu")


def device_of(config: pytest.Config) -> str:
    """`--device`; cpu if tests/gpu is only a part of the tests, which do not have the option."""
    return config.getoption("device", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a missing GPU, or a report that cannot be written, before any test."""
    path: Path | None = config.getoption("report", None)
    try:
        device = resolve_device(device_of(config), 1)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    if path is not None and not hasattr(config, "workerinput"):  # of xdist
        config.pluginmanager.register(Report(path, device))


class Report:
    """A Markdown table with a row for each test, written after each."""

    def __init__(self, path: Path, device: str):
        self.path = path
        about = "" if device == "cuda" else " A test with tiny sizes, not a measurement."
        machine = f"{hardware_name(device)}, {device}, torch {torch.__version__}"
        self.lines = [
            f"{machine}, revision {git_revision()}.{about}",
            "",
            "| test | found | |",
            "|---|---|---|",
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = [f"{name}: {value}" for name, value in report.user_properties]
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            found.append(next((line for line in lines if line.startswith("E ")), lines[-1]))
        elif isinstance(report.longrepr, tuple):  # why it was skipped
            found.append(report.longrepr[2])
        cell = " ".join("; ".join(found).split()).replace("|", "\\|")
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("|", "\\|")
        self.lines.append(f"| {name} | {cell} | {RESULTS[report.outcome]} |")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "\n".join(self.lines) + "\n")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(device_of(request.config))


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The GPU; skips the test on a CPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device
