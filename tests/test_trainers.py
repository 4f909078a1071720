"""The examples of docs/trainers.md train: mixed samples are logged, and digits are recognised."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmixup import TokenMixup

PAGE = (Path(__file__).parents[1] / "docs/trainers.md").read_text()


def mixed_samples_logged(section: str, names: dict[str, Any]) -> float:
    if section == "timm":
        return names["result"]["mixed_samples"]
    if section == "Lightning":
        return names["trainer"].callback_metrics["mixed_samples"]
    logs = [log["mixed_samples"] for log in names["trainer"].state.log_history if "loss" in log]
    assert len(logs) == 10
    return logs[-1]


@pytest.mark.parametrize(
    "section",
    [
        "timm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Hugging Face", "Lightning")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_examples_train(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    introduction, *sections = re.split(r"^## (.*)\n", PAGE, flags=re.M)
    text = dict(zip(sections[::2], sections[1::2], strict=True))[section]
    for code in re.findall(r"```python\n(.*?)```", introduction + text, re.DOTALL):
        exec(code, names)
    module: TokenMixup = names["module"].eval()
    images, classes = names["held_out"].tensors
    accuracy = (module(images).argmax(dim=1) == classes).float().mean()
    mixed = mixed_samples_logged(section, names)
    print(f"{section}: accuracy {accuracy:.3f}, mixed samples {mixed:.0f}")
    assert accuracy > 0.5 and mixed > 0
