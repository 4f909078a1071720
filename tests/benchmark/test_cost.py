"""`make cost`: the speed of a run and the hours of studies."""

import json
import sys
from pathlib import Path

import pytest

from reproduction.studies.plan import plan
from reproduction.studies.study import Settings
from scripts.benchmark.cost import (
    Speed,
    graph_table,
    hours_table,
    hours_text,
    main,
    run_hours,
    speed_key,
    trainable,
)
from scripts.benchmark.steps import COMPILING
from scripts.benchmark.timing import Spread

SPEED = Speed(batch_size=2, training=Spread(100.0, 90.0, 110.0), evaluation=400.0)


def test_hours_count_every_epoch_with_its_evaluation_and_every_run_once():
    studies = {name: plan(name, Settings(), seeds=1) for name in ("table4", "figure4")}
    run = studies["figure4"][0]
    hours = run.config.recipe.epochs * (50_000 / 100 + 10_000 / 400) / 3600
    assert run_hours(run.config, SPEED) == pytest.approx(hours)
    speeds = {speed_key(run.config): SPEED for runs in studies.values() for run in runs}
    lines = hours_table(studies, speeds, devices=2).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2:] == [
        ["table4", "5", hours_text(5 * hours), hours_text(5 * hours / 2)],
        ["figure4", "1", hours_text(hours), hours_text(hours / 2)],
        ["together", "5", hours_text(5 * hours), hours_text(5 * hours / 2)],
    ]


def test_cost_measures_runs_of_the_same_speed_once(monkeypatch, capsys):
    options = ["--scale", "digits", "--seeds", "2", "--batch-size", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["cost.py", "figure4", "figure3", *options])
    main()
    out = capsys.readouterr().out
    assert out.count("measuring") == 1
    assert "images/s" in out and "| together |" in out


def test_a_cpu_measures_runs_of_float16_in_float32():
    run = plan("figure4", Settings(), seeds=1)[0]
    found = [trainable(run, device).config.recipe.precision for device in ("cuda", "cpu")]
    assert found == ["float16", "float32"]


def test_hours_in_a_graph_come_from_the_file_of_on_gpu(tmp_path: Path):
    path = tmp_path / "times.json"
    assert graph_table([], path) is None
    graph = {"HTM and VTM, compile=" + COMPILING[-1]: {"images/s": 20_972.2}}
    tables = {
        "steps: cct_7_3x1, batch of 128, bf16": graph,
        "steps: vit_base_patch16_224, x": graph,
    }
    path.write_text(json.dumps({"head": {"hardware": "a card"}, "tables": tables}))
    runs = plan("table1", Settings(), seeds=2)
    last = graph_table(runs, path).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in last[4:]]
    assert last[0].startswith("In a graph, a card, steps alone (")
    both = [run for run in runs if {"htm", "vtm"} <= {*run.config.augmentation.stack}]
    assert len(rows) == len(both) / 2 > 0
    hours = {row[0]: row[-1] for row in rows}
    for run in both:
        images = 50_000 * run.config.recipe.epochs
        assert hours[", ".join(run.labels)] == hours_text(images / 20_972.2 / 3600)
    assert {*hours.values()} == {"1"}  # 75.5 million images: 1,510 epochs
    assert graph_table(plan("table3", Settings(), seeds=1)[:1], path) is None
