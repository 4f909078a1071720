"""`python -m scripts.check_gpu`, tiny on a CPU: parts in this process, and what runs them."""

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
from scripts.check_gpu import parts as of_parts
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
IN_PROCESSES = ("quickstart", "one_rank", "compiling")  # start some, or leave traces in this one
STAGE_LIMIT = 9 * 60


@pytest.mark.parametrize("name", [name for name in PARTS if name not in IN_PROCESSES])
def test_every_part_finds_something_and_nothing_wrong(name: str):
    findings = [*PARTS[name].part(TINY)]
    assert findings
    assert all(finding.is_right is not False for finding in findings), findings


def test_stages_keep_to_nine_minutes():
    assert len(CASES) == 31
    assert all(sum(x.limit for x in parts.values()) <= STAGE_LIMIT for parts in STAGES.values())


def altered(trained: Trained, **changes: Any) -> Trained:
    """With another last loss, or gradients."""
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
def test_a_difference_is_noticed(monkeypatch, name: str, changes: dict[str, Any], is_right: bool):
    right = trained(name)
    found = iter([altered(right, **changes), right])
    monkeypatch.setattr(of_parts, "CASES", {name: CASES[name]})
    monkeypatch.setattr(of_parts, "train", lambda *_: next(found))
    (finding,) = losses(TINY)
    assert finding.is_right is is_right, finding


@cache
def trained(name: str) -> Trained:
    return train(TINY.device, CASES[name])


@pytest.mark.parametrize("rule", ["order=published", "matching=random"])
def test_rules_are_tried_on_easy_and_hard_samples(rule: str):
    assert all(0 < line["mixed_samples"] < CASES[rule].batch for line in trained(rule).lines)


def test_steps_draw_the_same_numbers_on_every_device():
    def drawn(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        like = torch.empty(2, 3, device=device)
        return [torch.randperm(5, device=device), torch.rand_like(like)]

    expected = drawn("cpu")
    with DrawnOnHost():
        found = drawn("cpu")
        assert [x.device.type for x in drawn("meta")] == ["meta", "meta"]
    assert all(map(torch.equal, found, expected))


def test_a_union_counts_no_time_twice():
    assert _covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


def call(monkeypatch: pytest.MonkeyPatch, outputs: Path, *args: str) -> int:
    told = ["check_gpu", "--device", "cpu", "--tiny", "--outputs", str(outputs), *args]
    monkeypatch.setattr(sys, "argv", told)
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_findings_are_added_to_those_of_earlier_parts(monkeypatch, capsys, tmp_path: Path):
    ends = {"waits": None, "memory": False, "loader": True}
    monkeypatch.setattr(
        command,
        "run_part",
        lambda name, scope: {"findings": [(name, "a|b\nc", ends[name])], "seconds": 0.1},
    )
    assert call(monkeypatch, tmp_path, "--parts", "waits") == 0
    assert call(monkeypatch, tmp_path, "--parts", "memory") == 1
    assert call(monkeypatch, tmp_path, "--parts", "loader") == 0  # of this call alone
    text = (tmp_path / "check-gpu" / "check.md").read_text()
    assert "| memory | memory | a\\|b c | WRONG |" in text and "not a measurement" in text
    assert text in capsys.readouterr().out
    report = json.loads((tmp_path / "check-gpu" / "check.json").read_text())
    assert [*report["parts"]] == ["waits", "memory", "loader"]
    assert call(monkeypatch, tmp_path, "--parts", "nothing") == 2
    assert capsys.readouterr().err.startswith("check_gpu: argument --parts: invalid choice")


def test_a_part_that_hangs_is_stopped_and_keeps_what_it_has_found(monkeypatch):
    """Its process does not know of the patch: it is the real part, which needs longer."""
    monkeypatch.setitem(PARTS, "waits", Limited(PARTS["waits"].part, 1))
    found = run_part("waits", TINY)
    assert found["findings"][-1] == Finding("the process", "stopped at its limit of 1 s", False)


def test_a_process_of_its_own_finds_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "src")  # of where it is called, not of the part's folder
    findings = run_part("waits", TINY)["findings"]
    assert findings == [["waits", "needs a GPU", None]]
