"""`make bench`: what it prints and writes, at tiny size."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.programs import assert_succeeded, cells, script

MODEL = "cct_2_3x2"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU")
@pytest.mark.slow
def test_bench_times_plain_steps_beside_htm_and_vtm(here: Path):
    result = script("bench", MODEL, "--rounds", "2", "--out", "new/bench.csv")
    assert_succeeded(result)
    steps = pd.read_csv("new/bench.csv").set_index("method")
    assert list(steps.index) == ["plain", "HTM", "VTM", "both", "plain again"]
    assert steps.ratio["plain"] == 1
    assert list(steps.index[steps.tokens > 1]) == ["HTM", "both"]
    shown = {name: others for name, *others in cells(result.out)}
    assert shown["HTM"][0] == f"{steps.ms['HTM']:.4g}"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU")
def test_latency_of_each_detector_stands_beside_the_papers(here: Path):
    result = script("bench", "--detectors", "--rounds", "1")
    assert_succeeded(result)
    steps = pd.read_csv("outputs/bench.csv").set_index("method")
    assert steps["paper [ms]"].dropna().to_dict() == {"attention": 16, "gradient": 236, "random": 5}
    assert steps["added [ms]"]["gradient"] > steps["added [ms]"]["attention"]
