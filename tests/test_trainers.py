"""docs/library.md runs from top to bottom, with its trainers."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from tests.conftest import slow
from tests.pages import codes
from tests.programs import ROOT

PAGE = (ROOT / "docs/library.md").read_text()


class Code(NamedTuple):
    """A code of the page, and the title above it."""

    section: str
    text: str


def all_codes() -> list[Code]:
    found = []
    for part in re.split("^## ", f"\n{PAGE}", flags=re.MULTILINE):
        title, _, text = part.partition("\n")
        found += [Code(title, code) for code in codes(text)]
    return found


def train_as_timm(task: Any, optimizer: Any, data: Any) -> float:
    """The calls of timm's `train.py`; returns the mixed samples of the last batch."""
    for _ in range(10):
        task.train()
        for batch, classes in DataLoader(data, batch_size=64, shuffle=True):
            result = task(batch, classes)
            result["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(result["mixed_samples"])


@pytest.mark.parametrize("all_trainers", [False, slow(True)])
@pytest.mark.filterwarnings("ignore")
def test_the_page_runs_and_its_trainers_learn(
    all_trainers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From top to bottom, in one namespace; samples are mixed, and digits are recognised."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    for section, code in all_codes():
        if all_trainers or section not in ("Hugging Face", "Lightning"):
            exec(code, names)
        if section == "timm":
            mixed = train_as_timm(names["task"], names["optimizer"], names["train"])
            assert mixed > 0
        if section in ("", "timm", "Hugging Face", "Lightning") and "module" in code:
            images, classes = names["held_out"][:]
            guessed = names["module"].eval()(images).argmax(dim=1)
            assert (guessed == classes).float().mean() > 0.5, section
    assert names["output"].stats["mixed_tokens"] > 0
    if all_trainers:
        assert names["trainer"].callback_metrics["mixed_samples"] > 0
