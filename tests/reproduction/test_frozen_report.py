"""The text files of the report of a few stored runs are frozen.

tests/fixtures/runs holds these runs without config.yaml, which is composed here: runs are matched
by their configuration, and its values may change. report-SCALE.sha256 beside it holds the digest of
each text file. After an intended change, replace it by the digests that the failing test shows.
"""

import dataclasses
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from reproduction.config import Config
from reproduction.studies import overview
from scripts import report
from tests.reproduction.tables import COUNTS, Configs

EPOCHS = 310  # of every stored run
FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNS = {  # folder without "-SEED" -> cell or value of a sweep; later runs are newer
    "htm-0-again": "table1/cifar100_htm",
    "htm": "table1/cifar100_htm",
    "baseline": "table1/cifar100_baseline",
    "vtm": "table1/cifar100_vtm",
    "cifar10-vtm": "table1/cifar10_vtm",
    "gradient": "table3/gradient",
    "without-scorenet": "table4/without_scorenet",
    "without-tokens": "table4/without_tokens",
    "none": "table5/none",
    "none-htm": "table5/htm",
    "tau-0": "tau=0",
    "tau-1": "tau=1",
    "kappa-3": "kappa=3",
    "short": "table1/cifar10_htm",  # has other epochs and belongs to no cell
    "broken": "table1/cifar100_htm",  # a summary that contradicts itself
}


@pytest.fixture(scope="module")
def trained(configs: Configs) -> Configs:
    return {name: for_epochs(config, EPOCHS) for name, config in configs.items()}


def for_epochs(config: Config, epochs: int) -> Config:
    return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, epochs=epochs))


@pytest.fixture
def outputs(tmp_path: Path, trained: Configs) -> Path:
    """The stored runs with their configurations and figures."""
    outputs = tmp_path / "outputs"
    shutil.copytree(FIXTURES / "runs", outputs)
    order = list(RUNS)
    for summary in outputs.glob("*/summary.json"):
        name, _, seed = summary.parent.name.rpartition("-")
        name, seed = (name, seed) if name in RUNS else (summary.parent.name, "0")
        config = dataclasses.replace(trained[RUNS[name]], seed=int(seed))
        config = for_epochs(config, EPOCHS - 10) if name == "short" else config
        text = yaml.safe_dump(dataclasses.asdict(config))
        summary.with_name("config.yaml").write_text(text)
        os.utime(summary, (order.index(name), order.index(name)))
    for picture in ("saliency.png", "saliency.pdf", "mixed_pairs.png", "mixed_pairs.pdf"):
        Image.new("RGB", (60, 30)).save(outputs / "htm-0" / picture)
    return outputs


@pytest.mark.parametrize("scale", ["full", "smoke"])
def test_report_of_stored_runs_has_the_recorded_texts(
    scale: str, outputs: Path, trained: Configs, monkeypatch: pytest.MonkeyPatch
):
    if scale == "smoke":
        outputs = outputs.rename(outputs.with_name("smoke")).parent
    monkeypatch.setattr(overview, "point_configs", lambda *args: trained)
    monkeypatch.setattr(overview, "count", lambda papers: COUNTS)
    monkeypatch.setattr(sys, "argv", ["report", "--outputs", str(outputs), "--scale", scale])
    report.main()
    (folder,) = outputs.glob("**/report")
    texts = [path for path in sorted(folder.iterdir()) if path.suffix not in (".png", ".pdf")]
    digests = "".join(f"{digest(path)}  {path.name}\n" for path in texts)
    assert digests == (FIXTURES / f"report-{scale}.sha256").read_text()


def digest(path: Path) -> str:
    """Digests a text without embedded figures and the last digits of numbers."""
    shown = re.sub(r'"data:image/png;base64,[^"]*"', '""', path.read_text())
    shown = re.sub(r"\d+\.\d{9,}(e-?\d+)?", lambda number: f"{float(number[0]):.8g}", shown)
    return hashlib.sha256(shown.encode()).hexdigest()
