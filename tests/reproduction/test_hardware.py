"""Names of CPUs and GPUs, also in the summary of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.system import hardware
from reproduction.system.hardware import hardware_name, join_hardware, usable_cores
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import SMALL, Command


def test_hardware_name_of_a_cpu_states_its_usable_cores(tmp_path: Path, monkeypatch):
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: Some  Xeon @ 2 GHz\nmodel name\t: other\n")
    monkeypatch.setattr(hardware, "CPU_INFO", facts)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    assert hardware_name("cpu") == "Some Xeon @ 2 GHz (2 cores)"
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    facts.write_text("Hardware : none\n")
    assert hardware_name("cpu").endswith(" (1 core)")
    assert hardware_name("cpu").strip() != "(1 core)"


def test_usable_cores_respect_the_affinity():
    if hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert usable_cores() == 1
        finally:
            os.sched_setaffinity(0, before)
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.max": "max 100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_usable_cores_respect_the_quota(
    tmp_path: Path, monkeypatch, files: dict[str, str], cores: int
):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert usable_cores() == cores


def test_hardware_name_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Something")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hardware_name("cuda") == hardware_name("auto") == "NVIDIA Something"
    assert "NVIDIA" not in hardware_name("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware_name("auto") == hardware_name("cpu")


def test_join_hardware_lists_hardware_in_order():
    assert join_hardware(None, "A") == join_hardware("A", "A") == "A"
    assert join_hardware("A", "B") == "A, then B"
    assert join_hardware("A, then B", "A") == "A, then B"


def test_summary_lists_the_hardware_of_a_moved_run(command: Command, tmp_path: Path, monkeypatch):
    original = Trainer.train_step

    def step(self: Trainer, *args: Any) -> Any:
        if self.step == 4 and hardware.usable_cores() == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(hardware, "_processor", lambda: "CPU")
    for cores, status in ((3, 130), (5, 0)):
        monkeypatch.setattr(hardware, "usable_cores", lambda cores=cores: cores)
        assert command("train", "name=moved", "resume=auto", *SMALL).status == status
    summary = json.loads((tmp_path / "outputs/moved/summary.json").read_text())
    assert summary["hardware"] == "CPU (3 cores), then CPU (5 cores)"
