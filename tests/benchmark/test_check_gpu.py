"""`python -m scripts.check_gpu` at tiny size on a CPU: its parts and its command."""

import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.check_gpu import __main__ as command
from scripts.check_gpu import parts as parts_module
from scripts.check_gpu.__main__ import PARTS, STAGES, Limited, main, run_part
from scripts.check_gpu.figures import _covered
from scripts.check_gpu.parts import (
    CASES,
    SMALL,
    DrawnOnHost,
    Finding,
    Scope,
    Trained,
    losses,
    train,
)

TINY = Scope(torch.device("cpu"), tiny=True)
IN_PROCESSES = ("quickstart", "one_rank", "compiling")  # start processes or leave traces here
STAGE_LIMIT = 9 * 60


@pytest.mark.parametrize("name", [name for name in PARTS if name not in IN_PROCESSES])
def test_parts_report_findings_and_no_errors(name: str):
    findings = [*PARTS[name].part(TINY)]
    assert findings
    assert all(finding.is_right is not False for finding in findings), findings


def test_stages_fit_into_nine_minutes():
    assert len(CASES) >= 31
    assert all(sum(x.limit for x in parts.values()) <= STAGE_LIMIT for parts in STAGES.values())


def altered(trained: Trained, **changes: Any) -> Trained:
    """Returns a copy with another last loss or other gradients."""
    *first, last = trained.lines
    gradients = [changes.get("gradient", lambda x: x)(x) for x in trained.gradients]
    return Trained([*first, {**last, "loss": changes.get("loss", last["loss"])}], gradients)


@pytest.mark.parametrize("name", [f"{SMALL} htm+vtm bf16", "SGD, scaler, skipping"])
@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        pytest.param({}, True, id="none"),
        pytest.param({"loss": 3.0}, False, id="loss"),
        pytest.param({"loss": math.nan}, False, id="no loss"),
        pytest.param({"gradient": torch.zeros_like}, False, id="no gradient"),
        pytest.param({"gradient": lambda x: 3 * x}, False, id="scale"),
        pytest.param({"gradient": lambda x: torch.randn_like(x) * x.norm()}, False, id="noise"),
        pytest.param({"gradient": lambda x: x * torch.nan}, False, id="nan"),
    ],
)
def test_losses_notices_differences(
    monkeypatch, name: str, changes: dict[str, Any], is_right: bool
):
    right = trained(name)
    results = iter([altered(right, **changes), right])
    monkeypatch.setattr(parts_module, "CASES", {name: CASES[name]})
    monkeypatch.setattr(parts_module, "train", lambda *_: next(results))
    (finding,) = losses(TINY)
    assert finding.is_right is is_right, finding


@cache
def trained(name: str) -> Trained:
    return train(TINY.device, CASES[name])


@pytest.mark.parametrize("rule", ["order=published", "matching=random"])
def test_rules_are_checked_on_easy_and_hard_samples(rule: str):
    assert all(0 < line["mixed_samples"] < CASES[rule].batch for line in trained(rule).lines)


def test_drawn_on_host_gives_the_same_numbers_on_every_device():
    def draw(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        like = torch.empty(2, 3, device=device)
        return [torch.randperm(5, device=device), torch.rand_like(like)]

    expected = draw("cpu")
    with DrawnOnHost():
        draws = draw("cpu")
        assert [x.device.type for x in draw("meta")] == ["meta", "meta"]
    assert all(map(torch.equal, draws, expected))


def test_covered_counts_overlaps_once():
    assert _covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


def call(monkeypatch: pytest.MonkeyPatch, outputs: Path, *args: str) -> int:
    argv = ["check_gpu", "--device", "cpu", "--tiny", "--outputs", str(outputs), *args]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_command_adds_findings_to_those_of_earlier_parts(monkeypatch, capsys, tmp_path: Path):
    verdicts = {"waits": None, "memory": False, "loader": True}
    monkeypatch.setattr(
        command,
        "run_part",
        lambda name, scope: {"findings": [(name, "a|b\nc", verdicts[name])], "seconds": 0.1},
    )
    assert call(monkeypatch, tmp_path, "--parts", "waits") == 0
    assert call(monkeypatch, tmp_path, "--parts", "memory") == 1
    assert call(monkeypatch, tmp_path, "--parts", "loader") == 0  # the status is of this call alone
    text = (tmp_path / "check-gpu" / "check.md").read_text()
    assert "| memory | memory | a\\|b c | WRONG |" in text and "not a measurement" in text
    assert text in capsys.readouterr().out
    report = json.loads((tmp_path / "check-gpu" / "check.json").read_text())
    assert [*report["parts"]] == ["waits", "memory", "loader"]
    assert call(monkeypatch, tmp_path, "--parts", "nothing") == 2
    assert capsys.readouterr().err.startswith("check_gpu: argument --parts: invalid choice")


def test_run_part_stops_a_hanging_part_and_keeps_its_findings(monkeypatch):
    """The part's process ignores the patch and runs the real part, which takes longer."""
    monkeypatch.setitem(PARTS, "waits", Limited(PARTS["waits"].part, 1))
    result = run_part("waits", TINY)
    assert result["findings"][-1] == Finding("the process", "stopped at its limit of 1 s", False)


def test_run_part_runs_from_any_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "src")  # relative to the caller, not to the part's folder
    findings = run_part("waits", TINY)["findings"]
    assert findings == [["waits", "needs a GPU", None]]
