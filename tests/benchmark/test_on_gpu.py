"""`make on-gpu`: its parts at tiny size on a CPU, their files, and the end of a part that hangs."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from reproduction.studies.runs import read_store
from reproduction.studies.study import Settings
from reproduction.system.errors import RunInterrupted
from scripts.on_gpu import __main__ as on_gpu
from scripts.on_gpu import assignment, seeds, steps
from scripts.on_gpu.sheet import Sheet, read_sheet, sheet_as_markdown
from tokenmixup.assignment import optimal_donors

CPU = torch.device("cpu")


@pytest.fixture
def sheet(tmp_path: Path) -> Sheet:
    return Sheet(tmp_path / "part.json", CPU, time.time() + 60)


def donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """As the kernel, by scipy."""
    if not gain[is_easy].isfinite().all():
        return torch.arange(len(gain)).where(~is_easy, -1)
    return optimal_donors(gain, is_easy)


def use(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    name = "tokenmixup.device_assignment"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(device_donors=kernel))  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_assignments_are_timed_and_compared_with_scipy(sheet: Sheet, monkeypatch):
    use(monkeypatch, donors)
    assignment.measure_assignment(sheet)
    tables = read_sheet(sheet.path)["tables"]
    assert len(tables[assignment.TIMES]) == 4
    assert all(row["kernel [us]"] > 0 for row in tables[assignment.TIMES].values())
    (row,) = tables[assignment.VALUES].values()
    assert row["matrices"] == 57 and row["not exact"] == 0


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (lambda gain, is_easy: donors(gain, is_easy).flip(0), "a hard sample has a donor"),
        (lambda gain, is_easy: donors(gain.T, is_easy), "uniform, 8 easy"),
        (lambda gain, is_easy: donors(gain.nan_to_num(), is_easy), "a gain of nan"),
    ],
    ids=["not allowed", "transposed", "nan"],
)
def test_donors_that_are_wrong_are_named(sheet: Sheet, kernel: Any, found: str):
    assignment.compare_donors(sheet, 8, kernel)
    row = sheet.tables[assignment.VALUES]["8 samples"]
    assert row["not exact"] > 0 and found in row["which"]


def test_values_times_and_kernels_of_steps_are_written(sheet: Sheet):
    steps.compare_values(sheet)
    steps.measure_times(sheet)
    steps.measure_kernels(sheet)
    values, times, kernels = read_sheet(sheet.path)["tables"].values()
    assert [name.rpartition("=")[2] for name in values] == ["false", "cuda-graph"]
    for row in values.values():
        assert row["losses"] < 1e-5 and len(row["errors"]) == row["mixed alike"] == 3
        assert row["mixed"] != "0 to 0" and row["weights"] < 1e-4
    eager, (graph, *_) = [*times][:5], [*times][5:]
    assert eager == ["plain", "plain, again", "HTM", "HTM and VTM", "VTM"]
    assert graph == "plain, compile=cuda-graph" and len(times) == 2 * len(eager) + 1
    assert times["complete"] == {"rounds": steps.FEW} and times["HTM"]["tokens"] > 1
    assert len(kernels) == 1 + steps.LARGEST_KERNELS and kernels["all"]["share"] == pytest.approx(1)
    text = sheet_as_markdown(sheet.path, 3)
    assert "| plain, again |" in text and "... 28 more rows" in text and "errors" not in text


def test_steps_with_other_values_are_seen(monkeypatch):
    """The second trainer of a comparison gets other images."""
    images_of, calls = steps.random_batch, []

    def random_batch(trainer: Any, batch: int, seed: int) -> Any:
        calls.append(seed)
        return images_of(trainer, batch, seed + (len(calls) > 4))

    monkeypatch.setattr(steps, "random_batch", random_batch)
    case = steps.CASES[0]._replace(batch=4)
    row = steps.differences(*(steps.trained(case, "false", 3, CPU) for _ in range(2)))
    assert row["errors"][0] == 0 and row["losses"] > 1e-3 and row["weights"] > 1e-3
    assert row["in step"] > 1


def test_a_sheet_goes_on_with_what_failed_or_was_cut_off(sheet: Sheet, monkeypatch):
    sheet.put("table", "done", {"ms": 1.0})
    sheet.put("table", "partly", {"ms": 2.0, "partly": "trying"})
    with sheet.trying("table", "failed"):
        raise RuntimeError("no memory\nmore")
    again = Sheet(sheet.path, CPU, 0)
    assert [again.has("table", name) for name in ("done", "partly", "failed")] == [
        True,
        False,
        False,
    ]
    assert again.tables["table"]["failed"] == {"failed": "RuntimeError: no memory"}
    content = read_sheet(sheet.path)
    content["head"]["hardware"] = "another card"
    sheet.path.write_text(json.dumps(content))
    assert Sheet(sheet.path, CPU, 0).tables == {}


def interpreter(folder: Path, body: str) -> str:
    """A program that is started in place of Python."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_part_that_hangs_is_ended_with_its_children_at_its_limit(monkeypatch, tmp_path: Path):
    pid = tmp_path / "pid"
    body = f"""
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
open({str(pid)!r}, "w").write(str(child.pid))
time.sleep(60)"""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, body))
    monkeypatch.setattr(on_gpu, "GRACE", 0.5)
    start = time.monotonic()
    assert on_gpu.run_part("values", "cpu", tmp_path / "values.json", 3) is None
    assert time.monotonic() - start < 20
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has fetched its status
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.1)


def test_a_part_that_crashes_says_why_and_the_next_one_starts(monkeypatch, capsys, tmp_path: Path):
    body = "import sys; print(sys.argv[3]); sys.exit('first\\nRuntimeError: no kernel')"
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, body))
    words = ["--device", "cpu", "--parts", "a,d", "--outputs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["on-gpu", *words])
    with pytest.raises(SystemExit) as end:
        on_gpu.main()
    out = capsys.readouterr().out
    assert end.value.code == 1
    assert out.count("the part ended with status 1: RuntimeError: no kernel") == 2
    assert "a: assignment, at most " in out and "d: kernels, at most " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "a,x"], "parts=a,x: 'x' must be one of a, b, c, d, e"),
        (["--minutes", "0"], "argument --minutes: '0' is not 1 or more"),
        (["--outputs", "/dev/null"], "outputs=/dev/null: "),
    ],
)
def test_bad_arguments_are_refused_in_one_line(monkeypatch, capsys, words, message: str):
    monkeypatch.setattr(sys, "argv", ["on-gpu", "--device", "cpu", *words])
    with pytest.raises(SystemExit) as end:
        on_gpu.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"on-gpu: {message}")


def test_seeds_that_are_not_published_are_next(sheet: Sheet, tmp_path: Path):
    settings = Settings(outputs=str(tmp_path))
    found = {str(seed): seed for seed in seeds.unfinished(sheet, settings)}
    own = {name: len(x.runs) for name, x in found.items() if name.startswith("cifar10_1k, ")}
    assert own == {f"cifar10_1k, seed {seed}": 3 if seed == 6 else 7 for seed in (6, 7, 8, 9)}
    assert "NVIDIA H200" in found["cifar10_1k, seed 6"].hardware
    assert {"cifar10_1k_long, seed 11", "cifar10_cct7, seed 0"} < set(found)
    assert not any(name.startswith("digits") for name in found)
    (waiting,) = sheet.tables[seeds.TITLE].items()
    assert waiting[0] == "cifar10_1k_labels" and "has a value ???" in waiting[1]["failed"]


STUDY = """
title: For a GPU
about: A test.
overrides:
  [model.embed_dim=16, dataset.limit=60, dataset.eval_limit=60, recipe.epochs=1, device=cpu]
rows: {none: ['augmentation=[]'], htm: ['augmentation=[htm]']}
seeds: 1
"""


@pytest.mark.slow
def test_seeds_are_trained_whole_until_the_time_is_over(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(seeds, "RESULTS", tmp_path)
    (tmp_path / "tiny.yaml").write_text(STUDY)
    outputs = tmp_path / "outputs"
    settings = Settings(outputs=str(outputs))
    sheet = Sheet(outputs / "on-gpu" / "seeds.json", CPU, time.time() + 500)
    seeds.train_seeds(sheet, 2)
    (row,) = read_sheet(sheet.path)["tables"][seeds.TITLE].values()
    lines = outputs / "on-gpu" / "results" / "tiny.jsonl"
    assert row == {"runs": "2 of 2 here", "published in": str(lines)}
    assert not [*seeds.unfinished(sheet, settings)]
    store = read_store(lines.parent)
    assert [*store.seed] == [0, 0] and [*store.hardware] == [sheet.head["hardware"]] * 2
    folders = [path.name for path in (outputs / "published").iterdir()]
    assert sorted(folders) == sorted(store.folder)
    kept = lines.read_text().splitlines()[0]  # as if the seed had been cut off while published
    lines.write_text(kept.replace(sheet.head["hardware"], "Another card") + "\n")
    (seed,) = seeds.unfinished(sheet, settings)
    assert len(seed.runs) == 1 and seed.hardware == {"Another card", sheet.head["hardware"]}
    shutil.rmtree(seed.runs[0].folder.path)
    seeds.train_seeds(sheet, 2)
    row = sheet.tables[seeds.TITLE]["tiny, seed 0"]
    assert row["waits for"] == "Another card" and row["runs"] == "0 of 1 here"


def test_seeds_that_the_time_ends_are_to_be_resumed(tmp_path: Path, monkeypatch):
    def waits(*_: object) -> dict[str, str]:
        time.sleep(30)  # until the signal, for which `train_all_apart` has its own handler
        return {}

    def stopped(*_: object) -> None:
        raise RunInterrupted("interrupted")

    run: Any = SimpleNamespace(is_done=lambda: False)
    seed = seeds.Seed(Path("tiny.yaml"), 0, [run, run], set())
    monkeypatch.setattr(seeds, "unfinished", lambda *_: iter([seed, seed]))
    monkeypatch.setattr(seeds, "SAVING", 0.5)
    monkeypatch.setattr(seeds, "prepare", lambda *_: None)
    monkeypatch.setattr(seeds, "train_all_apart", waits)
    before = signal.signal(signal.SIGTERM, stopped)
    sheet = Sheet(tmp_path / "outputs" / "on-gpu" / "seeds.json", CPU, time.time() + 3)
    try:
        seeds.train_seeds(sheet, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = read_sheet(sheet.path)["tables"][seeds.TITLE]
    assert rows == {"tiny, seed 0": {"runs": "0 of 2 here", "partly": "to be trained"}}
    seeds.train_seeds(Sheet(sheet.path, CPU, time.time()), 1)  # too late to begin
    assert read_sheet(sheet.path)["tables"][seeds.TITLE] == rows


@pytest.mark.slow
def test_the_command_measures_a_part_in_a_process_of_its_own(monkeypatch, capsys, tmp_path: Path):
    words = ["--device", "cpu", "--parts", "b", "--outputs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["on-gpu", *words])
    with pytest.raises(SystemExit) as end:
        on_gpu.main()
    assert end.value.code == 0
    assert (
        "| cct_2_3x2, cutmix+htm+vtm, float32, batch of 4, compile=false |"
        in capsys.readouterr().out
    )
    assert sorted(path.name for path in (tmp_path / "on-gpu").iterdir()) == [
        "values.json",
        "values.md",
    ]
