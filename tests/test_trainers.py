"""docs/library.md runs from top to bottom, with its trainers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs/library.md").read_text()


def codes(page: str) -> Iterator[tuple[str, str]]:
    """Yields the section and the text of each code of a page."""
    introduction, *sections = re.split(r"^###? (.*)\n", page, flags=re.M)
    for title, text in (("", introduction), *zip(sections[::2], sections[1::2], strict=True)):
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            yield title, code


@pytest.mark.parametrize("all_trainers", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_the_page_runs_and_its_trainers_learn(
    all_trainers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From top to bottom, in one namespace; samples are mixed, and digits are recognised."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    for section, code in codes(PAGE):
        if all_trainers or section not in ("Hugging Face", "Lightning"):
            exec(code, names)
        if section in ("", "timm", "Hugging Face", "Lightning") and "module" in code:
            images, classes = names["held_out"][:]
            guessed = names["module"].eval()(images).argmax(dim=1)
            assert (guessed == classes).float().mean() > 0.5, section
    assert names["output"].stats["mixed_tokens"] > 0
    assert names["result"]["mixed_samples"] > 0
    if all_trainers:
        assert names["trainer"].callback_metrics["mixed_samples"] > 0
