"""The cost of runs: sizes, FLOPs, speeds, hours and their tables."""

import io
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from reproduction.config import CONF_DIR, Config
from reproduction.data.folders import data_sizes
from reproduction.data.sources import load_source
from reproduction.models.build import build_model, count_macs, without_weights
from reproduction.reporting.cells import read_cells
from reproduction.studies import speed as measuring
from reproduction.studies import states
from reproduction.studies.cost import (
    Speed,
    add_costs,
    hours_table,
    hours_text,
    read_costs,
    run_hours,
    sizes_of,
    speed_key,
    speed_table,
    training_flops,
)
from reproduction.studies.plan import PlannedRun, Settings, plan, studies_of
from reproduction.studies.speed import measure_speed
from reproduction.studies.states import state_table
from reproduction.system.errors import UserError
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import config_of, write_images
from tests.reproduction.tables import Configs

pytestmark = pytest.mark.all_digits

SPEED = Speed(
    batch_size=8, training=100.0, slowest=90.0, fastest=110.0, evaluation=200.0, macs=10**9
)
SCRIPT = Path(__file__).parents[2] / "scripts" / "cost.py"


def test_experiments_state_images_and_flops(configs: Configs):
    macs: dict[tuple[str, int], int] = {}
    for cell in read_cells():
        config = configs[cell.experiment]
        train, _, classes = sizes_of(config)
        if (config.model.name, classes) not in macs:
            with torch.device("meta"):
                model = build_model(without_weights(config.model), classes)
            macs[config.model.name, classes] = count_macs(model, config.model.image_size).total
        flops = training_flops(config, macs[config.model.name, classes])
        assert (
            f"# Cost: {config.recipe.epochs} epochs of {train:,} images, {flops / 1e18:.2f} EFLOP; "
            f"hours: python scripts/cost.py table{cell.table}"
        ) in (CONF_DIR / "experiment" / f"{cell.experiment}.yaml").read_text().splitlines()
    assert len(macs) == 3


def test_training_flops_are_six_per_mac():
    config = config_of("recipe.epochs=10", "dataset.limit=100")
    assert training_flops(config, 1_000) == 6 * 1_000 * 100 * 10


def test_data_sizes_equal_the_loaded_data(tmp_path: Path):
    digits = load_source("digits", None, None)
    assert data_sizes("digits", None) == (len(digits.train), len(digits.held_out), 10)
    root = str(write_images(tmp_path, ["a", "b", "c"], train=4, held_out=2))
    assert data_sizes("image_folder", root) == (12, 6, 3)
    assert sizes_of(config_of("dataset.limit=150")).train == 150
    assert sizes_of(config_of("dataset.limit=150")).held_out == 360
    with pytest.raises(UserError, match=r"dataset\.root=nowhere"):
        data_sizes("image_folder", "nowhere")


SAME_SPEED = ["seed=3", "augmentation.htm.tau=0", "augmentation.htm.rho=0.1", "dataset.limit=60"]
SAME_SPEED += ["recipe.epochs=3", "devices=4", "device=cpu"]
OTHER_SPEED = ["augmentation.vtm.kappa=4", "augmentation.htm.detector=gradient"]
OTHER_SPEED += ["recipe.batch_size=32", "recipe.precision=bf16", "augmentation=[htm]"]


@pytest.mark.parametrize("change", SAME_SPEED + OTHER_SPEED)
def test_speed_key_depends_only_on_options_that_change_speed(change: str):
    assert (speed_key(config_of(change)) == speed_key(config_of())) == (change in SAME_SPEED)


def test_run_hours_include_evaluation_and_devices():
    config = config_of("recipe.epochs=10", "dataset.limit=100")
    seconds = 10 * (100 / 100.0 + 360 / 200.0)
    assert run_hours(config, SPEED) == pytest.approx(seconds / 3600)
    assert run_hours(replace(config, devices=4), SPEED) == pytest.approx(seconds / 3600 / 4)


def test_hours_text_rounds_to_three_digits():
    assert [hours_text(x) for x in (0.00952, 2.031, 99.94, 52345.6)] == [
        *("0.00952", "2.03", "99.9", "52,346")
    ]


def test_costs_are_kept_by_hardware(tmp_path: Path):
    path = tmp_path / "new" / "cost.json"
    assert read_costs(path) == {}
    add_costs(path, "A", {"one": SPEED})
    add_costs(path, "A", {"two": SPEED})
    faster = replace(SPEED, training=500.0)
    add_costs(path, "B", {"one": faster})
    assert read_costs(path) == {"A": {"one": SPEED, "two": SPEED}, "B": {"one": faster}}


@pytest.mark.parametrize("text", ["", "[]", '{"A": 1}', '{"A": {"one": {"typo": 1}}}'])
def test_read_costs_refuses_broken_files(tmp_path: Path, text: str):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(UserError, match="remove it and measure again"):
        read_costs(path)


SMALL = ["model.embed_dim=16", "augmentation=[mixup,cutmix,htm,vtm]", "recipe.batch_size=6"]


def test_measure_speed_times_training_steps_that_mix_every_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "ROUND_SECONDS", 0.01)
    original, seen = Trainer.train_step, []

    def step(self: Trainer, images: Any, targets: Any, global_size: int) -> Any:
        (part,) = parts = original(self, images, targets, global_size)
        seen.append((len(images), global_size, int(part.output.stats["mixed_samples"]), self.step))
        assert self.module.training
        return parts

    monkeypatch.setattr(Trainer, "train_step", step)
    speed = measure_speed(config_of(*SMALL), "cpu")
    timed = [batch for batch in seen if batch[0] == 6]
    assert speed.batch_size == 6 and len(timed) >= 7
    assert all(step[:3] == (6, 6, 6) for step in timed)
    assert len({step[3] for step in seen}) == len(seen)  # every step mixes new inputs
    assert 0 < speed.slowest <= speed.training <= speed.fastest
    assert speed.evaluation > 0 and speed.macs > 0
    assert list(tmp_path.iterdir()) == []


def test_measure_speed_limits_cpu_steps_to_two_seconds(monkeypatch):
    def half_a_second(work: Any, calls: int = 1) -> float:
        work()
        return 0.5

    monkeypatch.setattr(measuring, "time_calls", half_a_second)
    assert measure_speed(config_of(*SMALL, "recipe.batch_size=64"), "cpu").batch_size == 8
    assert measure_speed(config_of(*SMALL), "cpu").batch_size == 6  # the batch size of the recipe
    assert measure_speed(config_of(*SMALL), "cpu", 10).batch_size == 10
    assert measure_speed(config_of(*SMALL), "cpu", 10).training == 10 / 0.5
    in_parts = config_of(*SMALL, "recipe.batch_size=64", "recipe.grad_accum_steps=3")
    assert measure_speed(in_parts, "cpu").batch_size == 12
    with pytest.raises(UserError, match=r"--batch-size=2: recipe.grad_accum_steps=3"):
        measure_speed(in_parts, "cpu", 2)


def test_a_batch_beyond_the_memory_of_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "train_step", full)
    with pytest.raises(UserError, match=r"--batch-size=10: too large for the memory of this GPU"):
        measure_speed(config_of(*SMALL), "cpu", 10)


def texts(table: Table) -> list[str]:
    file = io.StringIO()
    Console(width=200, file=file).print(table)
    return file.getvalue().splitlines()


def hours_shown(runs: Sequence[PlannedRun], settings: Settings) -> list[str]:
    rows = [line.split("│") for line in texts(state_table(runs, settings, False)) if "│" in line]
    return [row[6].strip() for row in rows if row[2].strip()]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, list[PlannedRun]]:
    """Two seeds of Table 3 at digits scale: three runs each."""
    settings = Settings(scale="digits", outputs=str(tmp_path_factory.mktemp("plan")))
    return settings, plan("table3", settings, 2)


def test_state_table_estimates_hours_from_speeds_of_this_hardware(planned, monkeypatch):
    settings, runs = planned
    monkeypatch.setattr(states, "hardware_name", lambda device: f"mine ({device})")
    hint = "make cost"
    assert hours_shown(runs, settings) == [""] * 6
    assert any(hint in line for line in texts(state_table(runs, settings, True)))
    path = Path(settings.outputs, "cost.json")
    add_costs(path, "another", {speed_key(run.config): SPEED for run in runs})
    assert hours_shown(runs, settings) == [""] * 6
    add_costs(path, "mine (auto)", {speed_key(runs[0].config): SPEED})
    about = f"~{hours_text(run_hours(runs[0].config, SPEED))}"
    assert hours_shown(runs, settings) == [about, "", "", about, "", ""]
    assert any(hint in line for line in texts(state_table(runs, settings, True)))
    add_costs(path, "mine (auto)", {speed_key(run.config): SPEED for run in runs})
    assert hours_shown(runs, settings) == [about] * 6
    assert not any(hint in line for line in texts(state_table(runs, settings, True)))
    runs[0].folder.create(runs[0].config)
    runs[0].folder.write_summary(status="finished", top1_last=1.0, epochs=24, seconds=36)
    assert hours_shown(runs, settings) == ["0.01", about, about, "~0.01", about, about]


def test_hours_table_counts_shared_runs_once(planned):
    settings, runs = planned
    studies = {name: plan(name, settings, 2) for name in ("table3", "table4")}
    everything = {run.name: run for runs in studies.values() for run in runs}.values()
    speeds = {speed_key(run.config): SPEED for run in everything}
    each = run_hours(runs[0].config, SPEED)
    rows = [line.split("│") for line in texts(hours_table(studies, speeds, 4)) if "│" in line]
    assert [[cell.strip() for cell in row[1:5]] for row in rows] == [
        [name, str(n), hours_text(n * each), hours_text(n * each / 4)]
        for name, n in (("table3", 6), ("table4", 10), ("together", 12))
    ]
    assert any("ideal scaling" in line for line in texts(hours_table(studies, speeds, 4)))
    assert not any("ideal scaling" in line for line in texts(hours_table(studies, speeds, 1)))
    shown = texts(speed_table(list(everything), speeds, "[mine]"))
    assert "[mine]" in shown[0]
    assert sum("12.5" in line for line in shown) == 6  # steps/s, a row for each run of seed 0


def test_studies_of_a_scale_have_cells():
    assert "table2" in studies_of("full") and "table2" not in studies_of("digits")
    assert {"table4", "sweep-kappa"} <= set(studies_of("digits"))


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["cost.py", *args])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_command_measures_each_speed_once(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    measured: list[str] = []

    def fake(config: Config, device: str, batch_size: int | None) -> Speed:
        assert (device, batch_size) == ("cpu", 5)
        measured.append(speed_key(config))
        return SPEED

    monkeypatch.setattr(measuring, "measure_speed", fake)
    options = ["--scale", "digits", "--seeds", "2", "--device", "cpu", "--batch-size", "5"]
    call(monkeypatch, "table3", "table4", *options)
    assert len(measured) == len(set(measured)) == 5  # of 16 cells and seeds
    (speeds,) = json.loads(Path("outputs/cost.json").read_text()).values()
    assert set(speeds) == set(measured)
    out = capsys.readouterr().out
    assert out.count("measuring ") == 5 and "together" in out and "2 seeds" in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["table2", "--scale", "digits"], "table2"),
        (["table3", "--dataset", "image_folder"], "image_folder"),
    ],
)
def test_unsuitable_studies_are_refused_in_one_line(monkeypatch, tmp_path, capsys, args, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *args)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cost.py: ") and named in line
    assert list(tmp_path.iterdir()) == []
