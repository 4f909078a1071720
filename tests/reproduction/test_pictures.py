"""The figures of the report: contents, reasons for missing figures, and marks."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from reproduction.reporting import pictures as module
from reproduction.reporting.curriculum import Trace, _draw_training
from reproduction.reporting.curves import Epoch
from reproduction.reporting.figures import figure
from reproduction.reporting.pictures import Picture, draw_pictures
from reproduction.reporting.render import as_json, as_markdown
from reproduction.studies.overview import build_tables
from reproduction.system.errors import UserError
from tests.reproduction.tables import (
    Configs,
    rising,
    sources_of,
    tables_of,
    write_metrics,
    write_run,
)

pytestmark = pytest.mark.usefixtures("drawn_texts")
HTM, IMAGENET = "table1/cifar100_htm", "table2/imagenet1k_htm"
LATENCY: dict[str, Any] = {
    **{"hardware": "Some CPU", "device": "cpu", "precision": "float32", "batch_size": 128},
    **{"model": "cct_7_3x1", "repeats": 30, "torch": "2.9"},
    "detectors": {
        "gradient": {"median_ms": 900.0, "low_ms": 880.0, "high_ms": 950.0},
        "attention": {"median_ms": 60.0, "low_ms": 58.0, "high_ms": 66.0},
        "random": {"median_ms": 12.0, "low_ms": 11.5, "high_ms": 13.0},
    },
}
DIFFICULTY = {"edges": [0, 1, 2, 3], "counts": [5, 10, 5], "tau": 2.0, "images": 20}


def draw(
    outputs: Path, configs: Configs, scale: str = "full", only: str = ""
) -> dict[str, Picture]:
    """Draws the figures of a report of `outputs`; returns them by name.

    `only` is a prefix of their names, as drawing all takes seconds.
    """
    folder = outputs / "report"
    folder.mkdir(exist_ok=True)
    sources = sources_of(outputs, configs, scale)
    tables = build_tables(sources)
    planned = [x for x in module._planned(sources, tables) if x[0].startswith(only)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_planned", lambda *args: planned)
        return {picture.name: picture for picture in draw_pictures(sources, tables, folder)}


def write_htm(outputs: Path, configs: Configs, seed: int = 0, epochs: int = 40) -> Path:
    """Writes a finished run with metrics, distribution of the difficulty and figures."""
    run = write_run(outputs, configs[HTM], seed, name=f"htm{seed}")
    write_metrics(run / "metrics.jsonl", rising(epochs))
    (run / "difficulty.json").write_text(json.dumps(DIFFICULTY))
    for name in ("saliency", "mixed_pairs"):
        with figure(run / f"{name}.png", figsize=(1, 1)) as axes:
            axes.plot([seed, 1])
    entropies = {"gradient": 4.5, "full_rollout": 5.25, "one_step": 5.0, "uniform": 5.545}
    (run / "saliency.json").write_text(json.dumps(entropies))
    return run


def test_missing_figures_state_the_command_that_makes_them(tmp_path: Path, configs: Configs):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "figure4.png").write_text("of an earlier report")
    missing = {name: p.missing or "" for name, p in draw(tmp_path, configs, "smoke").items()}
    for name, command in {
        "latency": "python scripts/measure_latency.py --scale smoke",
        "sweep-tau": "make sweep-tau SCALE=smoke",
        "sweep-rho": "make sweep-rho SCALE=smoke",
        "sweep-kappa": "make sweep-kappa SCALE=smoke",
        "figure3": "make reproduce-figure3 SCALE=smoke",
        "mixed_pairs": "make reproduce-figure3 SCALE=smoke",
        "figure4": "make reproduce-figure4 SCALE=smoke",
    }.items():
        assert command in missing.pop(name)
    assert missing == {} and list((tmp_path / "report").iterdir()) == []
    assert "make sweep-tau trains" in str(draw(tmp_path, configs)["sweep-tau"].missing)


def test_sensitivity_plot_marks_values_without_runs(tmp_path: Path, configs: Configs, drawn_texts):
    for name in (HTM, "tau=0", "tau=inf", "table1/cifar100_baseline"):
        for seed in (0, 1):
            write_run(tmp_path, configs[name], seed)
    pictures = draw(tmp_path, configs)
    texts = drawn_texts["sweep-tau"]
    assert texts.count("not run") == 5 and {"0", "0.5", "inf", "tau"} <= set(texts)
    assert {"baseline (n = 2)", "tau = 2 (as in Table 1)", "the paper: 83.56"} <= set(texts)
    assert "Not run: 0.5, 1, 1.5, 3, 4." in pictures["sweep-tau"].caption
    assert "tau = 2: 80.50 +/- 0.71 %" in pictures["sweep-tau"].alt
    assert {"rho", "0", "0.001", "inf"} <= set(drawn_texts["sweep-rho"])
    assert pictures["sweep-kappa"].missing is not None


def test_figure_4_shows_all_seeds_and_the_regimes(tmp_path: Path, configs: Configs, drawn_texts):
    for seed in (0, 1):
        write_htm(tmp_path, configs, seed)
    picture = draw(tmp_path, configs, only="figure4")["figure4"]
    assert {"(A)", "(B)", "(C)", "tau = 2: below is easy"} <= set(drawn_texts["figure4"])
    assert "abrupt rise after epoch 2, converged by epoch" in " ".join(drawn_texts["figure4"])
    assert "a thin line for each seed (0, 1)" in picture.caption
    assert "6.0 samples per batch in the first epoch and 96.0 in the last" in picture.alt
    assert "difficulty.json" not in picture.caption


def test_figure_4_of_a_short_run_marks_no_regimes(tmp_path: Path, configs: Configs, drawn_texts):
    write_htm(tmp_path, configs, epochs=2)
    picture = draw(tmp_path, configs, "smoke", only="figure4")["figure4"]
    texts = drawn_texts["figure4"]
    assert "2 epochs are too few to identify regimes" in texts and "smoke scale" in texts
    assert not {"(A)", "(B)", "(C)"} & set(texts)
    assert "2 epochs are too few to identify regimes." in picture.caption


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "difficulty.json is missing"),
        ("{", "difficulty.json cannot be read"),
        (json.dumps({**DIFFICULTY, "counts": [5, 10]}), "difficulty.json cannot be read"),
        (json.dumps({**DIFFICULTY, "images": 21}), "difficulty.json cannot be read"),
    ],
)
def test_figure_4_states_a_missing_distribution(tmp_path, configs, drawn_texts, text, reason):
    run = write_htm(tmp_path, configs)
    (run / "difficulty.json").unlink()
    if text is not None:
        (run / "difficulty.json").write_text(text)
    picture = draw(tmp_path, configs, only="figure4")["figure4"]
    assert f"seed 0: {reason}" in drawn_texts["figure4"]
    hint = "to write it again, delete report.md and run make reproduce-figure4"
    assert f"{reason}; {hint}." in picture.caption


def test_figure_4_omits_and_names_runs_without_metrics(tmp_path: Path, configs: Configs):
    write_htm(tmp_path, configs, 0)
    (write_htm(tmp_path, configs, 1) / "metrics.jsonl").write_text("{\n")
    caption = draw(tmp_path, configs, only="figure4")["figure4"].caption
    assert "each seed (0)" in caption and "Without htm1: metrics.jsonl: not readable" in caption
    (tmp_path / "htm0" / "metrics.jsonl").unlink()
    assert "Without htm0" in str(draw(tmp_path, configs, only="figure4")["figure4"].missing)


def test_figure_4_draws_no_tau_when_all_samples_are_mixed(
    tmp_path: Path, configs: Configs, drawn_texts
):
    stack = configs[HTM].augmentation
    assert stack.htm is not None
    open_stack = dataclasses.replace(stack, htm=dataclasses.replace(stack.htm, tau=math.inf))
    changed = {**configs, HTM: dataclasses.replace(configs[HTM], augmentation=open_stack)}
    write_htm(tmp_path, changed)
    draw(tmp_path, changed, only="figure4")
    assert drawn_texts["figure4"].count("tau = inf: every sample is easy") == 2


def test_figure_4_shows_a_tau_above_the_curve():
    epochs = np.ones((5, len(Epoch._fields)))
    _, panels = plt.subplots(3)
    _draw_training(panels, [Trace(0, epochs, "")], epochs, batch_size=8, tau=5.0)
    assert panels[2].get_ylim()[1] > 5
    plt.close()


def test_figure_3_and_pairs_are_of_the_lowest_finished_seed(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], 0, status="failed")
    runs = [write_htm(tmp_path, configs, seed) for seed in (2, 1)]
    names = ("figure3", "mixed_pairs")
    pictures = {name: draw(tmp_path, configs, only=name)[name] for name in names}
    for name, file in (("figure3", "saliency"), ("mixed_pairs", "mixed_pairs")):
        for suffix in (".png", ".pdf"):
            copied = (tmp_path / "report" / f"{name}{suffix}").read_bytes()
            assert copied == (runs[1] / f"{file}{suffix}").read_bytes()
        assert "From htm1" in pictures[name].caption
    assert (
        "gradient 4.50, full rollout 5.25, one step 5.00 nats; uniform 5.54"
        in pictures["figure3"].caption
    )
    assert "figure3_imagenet1k" not in draw(tmp_path, configs, only="figure3")


def test_figures_show_the_mark_of_the_scale(tmp_path, configs, drawn_texts):
    run = write_htm(tmp_path, configs)
    pictures = draw(tmp_path, configs, "smoke")
    for name, picture in pictures.items():
        assert (picture.missing is None) == (name in drawn_texts)
        assert picture.missing is not None or "smoke scale" in drawn_texts[name]
    assert set(drawn_texts) >= {"figure3", "mixed_pairs", "figure4", "sweep-tau", "sweep-rho"}
    copied = (tmp_path / "report" / "figure3.png").read_bytes()
    assert copied != (run / "saliency.png").read_bytes()


def test_a_damaged_picture_of_a_run_is_named(tmp_path: Path, configs: Configs):
    run = write_htm(tmp_path, configs)
    picture = run / "saliency.png"
    picture.write_bytes(picture.read_bytes()[:60])
    missing = str(draw(tmp_path, configs, "smoke")["figure3"].missing)
    assert f"{picture} cannot be copied: " in missing


def test_figures_that_a_run_lacks_are_named(tmp_path: Path, configs: Configs):
    run = write_htm(tmp_path, configs)
    (run / "mixed_pairs.pdf").unlink()
    (run / "saliency.json").unlink()
    write_run(tmp_path, configs[IMAGENET], name="imagenet")
    pictures = draw(tmp_path, configs)
    assert "htm0 has no mixed_pairs.png and .pdf" in str(pictures["mixed_pairs"].missing)
    assert "saliency.json, which holds the entropies, cannot be read" in pictures["figure3"].caption
    assert "imagenet has no saliency.png" in str(pictures["figure3_imagenet1k"].missing)


def texts_of(outputs: Path, configs: Configs, row: str) -> dict[str, str]:
    table = tables_of(outputs, configs)[0][3]
    (record,) = (record for record in table.records if record.row == row)
    return {column.title: column.text(record) for column in table.columns}


def test_latency_is_shown_in_table_3_and_its_figure(tmp_path: Path, configs: Configs, drawn_texts):
    (tmp_path / "latency.json").write_text(json.dumps(LATENCY))
    picture = draw(tmp_path, configs, only="latency")["latency"]
    gradient = texts_of(tmp_path, configs, "gradient")
    assert gradient["latency (ms)"] == "900.0 (880.0 to 950.0), x15.0"
    assert gradient["latency paper (ms)"] == "236.0, x14.8"
    table = tables_of(tmp_path, configs)[0][3]
    entries = {entry["row"]: entry for entry in json.loads(as_json(table))["records"]}
    assert entries["random"]["latency_ms"] == 12 and entries["random"]["latency_high_ms"] == 13
    assert entries["random"]["latency_ratio"] == pytest.approx(0.2)
    assert entries["random"]["paper_latency_ms"] == 5
    assert "Some CPU, cct_7_3x1, batch of 128, float32, torch 2.9" in as_markdown(table).replace(
        "\\", ""
    )
    assert {"900 ms\nx15.0", "60 ms\nx1.0", "236 ms\nx14.8", "gradient"} <= set(
        drawn_texts["latency"]
    )
    assert "gradient 900 ms, attention 60 ms, random 12 ms" in picture.alt


def test_missing_latency_is_noted(tmp_path: Path, configs: Configs):
    table = tables_of(tmp_path, configs)[0][3]
    assert texts_of(tmp_path, configs, "random")["latency (ms)"] == "-"
    assert texts_of(tmp_path, configs, "random")["latency paper (ms)"] == "5.0, x0.3"
    assert sum("scripts/measure_latency.py" in note for note in table.notes) == 1
    others = [t for number, t in tables_of(tmp_path, configs)[0].items() if number != 3]
    assert not any("latency" in as_json(other) for other in others)


@pytest.mark.parametrize(
    "changes", [{"detectors": {"gradient": {"median_ms": -1}}}, {"hardware": 3}, None]
)
def test_broken_latency_file_is_refused(tmp_path: Path, configs: Configs, changes):
    text = "{" if changes is None else json.dumps({**LATENCY, **changes})
    (tmp_path / "latency.json").write_text(text)
    with pytest.raises(UserError, match=r"latency\.json") as refused:
        sources_of(tmp_path, configs)
    assert "\n" not in str(refused.value) and "remove it" in str(refused.value)
