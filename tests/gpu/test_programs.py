"""Programs on a device: the quick start, stopped, resumed and evaluated; these tests' options."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doors import SMALL, Run, evaluate, eventually, started, train
from tests.gpu.conftest import Report, pytest_configure


@pytest.mark.slow
def test_the_quickstart_is_stopped_resumed_and_evaluated_alike_on_both_devices(
    device: torch.device, here: Path, record_property: Any
):
    tiny = [*SMALL] if device.type == "cpu" else []
    words = [*tiny, f"device={device.type}", "name=quickstart", "resume=auto"]
    with started(*words) as process:
        eventually(lambda: Path("outputs/quickstart/metrics.jsonl").exists())
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert Run("outputs/quickstart").summary["status"] in ("interrupted", "finished")
    resumed = train(*words)
    assert resumed.status == 0, resumed.err
    found = [evaluate("run=outputs/quickstart", f"device={x}") for x in (device.type, "cpu")]
    top1 = [float(re.findall(r"top-1 ([\d.]+) %", result.out)[0]) for result in found]
    record_property("top-1 [%]", top1)
    assert abs(top1[0] - top1[1]) <= 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "device=cuda: this machine has no CUDA GPU, allowed is cpu"),
    ],
)
def test_a_missing_gpu_or_folder_is_refused_before_any_test(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config: Any = SimpleNamespace(getoption=options.get)
    with pytest.raises(pytest.UsageError, match=message):
        pytest_configure(config)


def test_the_report_shows_what_was_found_failed_and_not_run(tmp_path: Path):
    report = Report(tmp_path / "check" / "check.md", "cpu")
    for name, outcome, why in (
        ("one", "passed", None),
        ("two[a|b]", "failed", "line\nE  assert 1 == 2\n\nfile.py:1: AssertionError"),
        ("three", "skipped", ("file", 1, "Skipped: needs a GPU")),
    ):
        found = [("waits", "none")] if outcome != "skipped" else []
        settings: Any = {"nodeid": f"file::test_{name}", "outcome": outcome, "longrepr": why}
        for when in ("setup", "call", "teardown"):
            result: Any = settings if when == "call" else settings | {"outcome": "passed"}
            report.pytest_runtest_logreport(
                pytest.TestReport(
                    location=("", 0, ""), keywords={}, when=when, user_properties=found, **result
                )
            )
    head, _, *table = report.path.read_text().splitlines()
    assert "cpu, torch" in head and head.endswith("not a measurement.")
    assert table == [
        "| test | found | |",
        "|---|---|---|",
        "| one | waits: none | ok |",
        "| two[a\\|b] | waits: none; E assert 1 == 2 | WRONG |",
        "| three | Skipped: needs a GPU | not run |",
    ]
