"""Figure files: PNG and PDF, marks, failures and sizes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from reproduction.reporting.figures import draw_accuracy, draw_mixed_samples, figure, running_mean


def steps(number: int) -> list[dict[str, float]]:
    return [
        {
            "step": i,
            "epoch": 1 + i // 10,
            "loss": 2.0,
            "difficulty": 1 + i % 3,
            "mixed_samples": i % 8,
            "mixed_tokens": 3.0,
        }
        for i in range(1, number)
    ]


def test_figures_are_reproducible_png_and_pdf_files(tmp_path: Path):
    digests = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        draw_mixed_samples(folder / "curve.png", steps(50), 8)
        assert {path.name for path in folder.iterdir()} == {"curve.png", "curve.pdf"}
        files = (folder / "curve.png", folder / "curve.pdf")
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert digests[0] == digests[1]


def test_figure_shows_its_mark(tmp_path: Path, drawn_texts):
    for name, mark in (("plain", None), ("marked", "smoke scale")):
        with figure(tmp_path / f"{name}.png", mark=mark) as axes:
            axes.plot([0, 1], [0, 1])
    assert "smoke scale" in drawn_texts["marked"] and "smoke scale" not in drawn_texts["plain"]
    plain, marked = (Image.open(tmp_path / f"{name}.png") for name in ("plain", "marked"))
    assert plain.size == marked.size and plain.tobytes() != marked.tobytes()


def test_figures_need_no_backend(tmp_path: Path):
    code = "from pathlib import Path; from reproduction.reporting.gallery import figure\n"
    code += "with figure(Path('a.png')) as axes: axes.plot([0, 1], [0, 1])"
    environment = os.environ | {"MPLBACKEND": "that-is-not-installed"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "a.pdf").exists()


def test_failing_figure_leaves_no_file(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), figure(tmp_path / "bad.png"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_pdf_of_many_batches_stays_small(tmp_path: Path):
    epochs = [{"epoch": 1, "top1": 1.0, "eval_loss": 1.0}]
    draw_accuracy(tmp_path / "many.png", steps(50_000), epochs)
    assert (tmp_path / "many.pdf").stat().st_size < 500_000


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=20), st.integers(1, 25))
def test_running_mean_averages_a_centred_window(values: list[float], window: int):
    starts = range(-(window // 2), len(values) - window // 2)
    expected = [np.mean(values[max(0, start) : start + window]) for start in starts]
    assert running_mean(values, window) == pytest.approx(expected)


@pytest.mark.parametrize(("key", "images"), [("top1", "held-out"), ("val_top1", "validation")])
def test_accuracy_names_its_images_and_the_best_epoch(tmp_path: Path, drawn_texts, key, images):
    """The first of several best epochs counts, as in training."""
    loss = {"eval_loss": 1.0, "val_loss": 1.0}
    epochs = [{"epoch": n, key: top1, **loss} for n, top1 in enumerate([1.0, 7.0, 7.0, 3.0], 1)]
    draw_accuracy(tmp_path / "accuracy.png", steps(40), epochs)
    assert {f"{images} top-1 [%]", "best: 7.00 %, epoch 2"} <= {*drawn_texts["accuracy"]}
