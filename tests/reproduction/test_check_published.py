"""check_published.py, with stand-ins for the published checkpoints of equal names and shapes."""

import json
from pathlib import Path

import pytest
import torch

from reproduction.data.stand_ins import make_stand_ins
from reproduction.system.errors import PlainError
from reproduction.training import evaluate
from scripts import check_published
from tests.reproduction.test_weights import as_published_cct, published_shapes


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr("sys.argv", ["check_published.py", *map(str, args)])
    try:
        check_published.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_existing_files_are_evaluated_and_missing_ones_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shapes = published_shapes("cct", "cct_cifar10_HTM")
    state = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    (tmp_path / "weights").mkdir()
    torch.save(as_published_cct(state), tmp_path / "weights/cct_cifar10_HTM.pth.tar")
    (tmp_path / "weights/vit_imagenet_VTM.pth").write_bytes(b"unread")
    make_stand_ins("cifar10", tmp_path / "data")
    options = ("--data", tmp_path / "data", "--outputs", tmp_path / "outputs")
    assert run(monkeypatch, tmp_path / "weights", *options) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(check_published.FILES) and len(lines) == 9
    result = json.loads((tmp_path / "outputs/evaluations/cct_cifar10_HTM.json").read_text())
    assert result["images"] == 50
    top1 = f"{result['top1']:.2f} % ({result['top1'] - 97.57:+.2f})"
    row = "CCT-7/3x1(1500) + HTM on CIFAR-10, printed 97.57 %"
    assert lines["cct_cifar10_HTM"] == f"{row}: {top1}"
    assert lines["cct_cifar100_HVTM"].endswith("printed 83.57 %: no such file")
    assert "printed 82.30 %: not evaluated, dataset.root=" in lines["vit_imagenet_VTM"]


def test_failing_evaluation_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise PlainError("evaluation does not fit into the GPU's memory")

    monkeypatch.setattr(evaluate, "_evaluate_on_rank", fail)
    for name in ("cct_cifar10_HTM.pth", "cct_cifar10_VTM.pth"):
        (tmp_path / name).write_bytes(b"unread")
    make_stand_ins("cifar10", tmp_path / "data")
    assert run(monkeypatch, tmp_path, "--data", tmp_path / "data") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and sum("does not fit into" in line for line in lines) == 2


def test_empty_folder_is_refused_with_the_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds none of cct_cifar10_HTM.*, cct_cifar10_VTM.*," in line
