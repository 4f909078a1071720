"""Programs on a device: the quick start, stopped, resumed and evaluated."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import SMALL, Run, evaluate, eventually, started, train


@pytest.mark.slow
def test_the_quickstart_is_stopped_resumed_and_evaluated_alike_on_both_devices(
    device: torch.device, here: Path, record_property: Any
):
    tiny = [*SMALL] if device.type == "cpu" else []
    overrides = [*tiny, f"device={device.type}", "name=quickstart", "resume=auto"]
    with started(*overrides) as process:
        eventually(lambda: Path("outputs/quickstart/metrics.jsonl").exists())
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert Run("outputs/quickstart").summary["status"] in ("interrupted", "finished")
    resumed = train(*overrides)
    assert resumed.status == 0, resumed.err
    found = [evaluate("run=outputs/quickstart", f"device={x}") for x in (device.type, "cpu")]
    top1 = [float(re.findall(r"top-1 ([\d.]+) %", result.out)[0]) for result in found]
    record_property("top-1 [%]", top1)
    assert abs(top1[0] - top1[1]) <= 0.3
