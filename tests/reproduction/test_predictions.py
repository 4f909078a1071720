"""Predictions of eval.py, load_run and exported weights equal a loop over the images."""

import csv
import json
import pickle
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.metrics import confusion_matrix
from timm.data import create_transform

from reproduction import load_run
from reproduction.data.sources import _open
from reproduction.models.build import build_model
from reproduction.system.errors import UserError
from reproduction.training.distributed import World
from reproduction.training.predictions import Predictions, Recorder, write_predictions
from tests.reproduction.conftest import SMALL, Command, config_of, load_source, write_images

CLASSES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
DATA = ["dataset=image_folder", "dataset.root=images", "dataset.workers=0"]
FOLDER = [*DATA, "dataset.mean=[0.5,0.4,0.3]", "recipe.transforms.eval_crop_pct=0.8"]
PAGE = (Path(__file__).parents[2] / "docs" / "predictions.md").read_text()
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train(command: Command, *overrides: str) -> None:
    typed = " ".join(overrides)
    odd = {"embed_dim": "model=", "limit": "image_folder"}  # setting of SMALL -> what has no such
    left_out = [name for name, other in odd.items() if other in typed]
    small = [x for x in SMALL if not any(name in x for name in left_out)]
    result = command("train", "name=mine", *small, "augmentation=[]", *overrides)
    assert result.status == 0, result.err


def predicted(
    run: Path, files: list[Path], root: Path
) -> list[tuple[str, list[tuple[str, float]]]]:
    """Predicts image by image: path, and the five best classes with their probabilities."""
    config = config_of("model.embed_dim=16")
    model = build_model(config.model, len(CLASSES)).eval()
    model.load_state_dict(load_file(run / "checkpoints" / "best.safetensors"))
    crop = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=0.8, normalize=False)
    found = []
    for file in files:
        pixels = crop(Image.open(file).convert("RGB")).float() / 255
        mean, std = (torch.tensor(x)[:, None, None] for x in ([0.5, 0.4, 0.3], [0.5] * 3))
        with torch.no_grad():
            probabilities = model(((pixels - mean) / std)[None]).softmax(1)[0].tolist()
        ranked = sorted(zip(probabilities, CLASSES, strict=True), reverse=True)[:5]
        found.append((str(file.relative_to(root)), [(name, p) for p, name in ranked]))
    return found


@pytest.mark.parametrize(
    ("ranks", "memory"),
    [(1, 0), (2, 64), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 64), (2, 0)))],
)
def test_predictions_equal_a_loop_over_the_files(
    command: Command, tmp_path: Path, ranks: int, memory: int
):
    root = write_images(tmp_path / "images", CLASSES, train=4, held_out=3)
    (root / "val" / "bee" / "1.png").write_bytes(b"broken")
    skip = ["dataset.broken_images=skip", f"dataset.memory_mib={memory}"]
    train(command, *FOLDER, *skip)
    run = tmp_path / "outputs" / "mine"
    args = ["run=outputs/mine", "weights=best", "predictions=new/x.csv", f"devices={ranks}"]
    result = command("eval", *args)
    assert result.status == 0, result.err
    files = [file for file in sorted((root / "val").rglob("*.png")) if file.stat().st_size > 9]
    rows = read(tmp_path / "new" / "x.csv")
    assert len(rows) == len(files) == 20
    for row, (image, best) in zip(rows, predicted(run, files, tmp_path), strict=True):
        assert row["image"] == image and row["class"] == Path(image).parent.name
        names = [row["predicted"], *(row[f"predicted_{rank}"] for rank in range(2, 6))]
        values = [row["probability"], *(row[f"probability_{rank}"] for rank in range(2, 6))]
        assert names == [name for name, _ in best]
        assert [float(x) for x in values] == pytest.approx([p for _, p in best], rel=1e-4)
    assert_accuracies_follow(result.out, rows)
    _open.cache_clear()


def assert_accuracies_follow(out: str, rows: list[Row]) -> None:
    """Asserts that the printed accuracies are those of the file."""
    printed = re.findall(r"top-1 (.+?) %, top-5 (.+?) %, .* on (\d+) images", out)
    best = [key for key in rows[0] if key.startswith("predicted")]
    first = np.mean([row["class"] == row["predicted"] for row in rows])
    five = np.mean([row["class"] in [row[key] for key in best] for row in rows])
    assert printed == [(f"{100 * first:.2f}", f"{100 * five:.2f}", str(len(rows)))]


@pytest.mark.draws
def test_tables_and_picture_follow_from_the_predictions(
    command: Command, tmp_path: Path, drawn_texts: dict[str, list[str]]
):
    train(command)
    assert command("eval", "run=outputs/mine").status == 0
    assert not list((tmp_path / "outputs/mine").glob("*.csv"))
    result = command("eval", "run=outputs/mine", "predictions=x.csv")
    assert result.status == 0, result.err
    rows, names = read(tmp_path / "x.csv"), [str(digit) for digit in range(10)]
    assert [row["image"] for row in rows] == [str(position) for position in range(60)]
    assert_accuracies_follow(result.out, rows)
    expected = confusion_matrix(*([row[key] for row in rows] for key in ("class", "predicted")))
    stem = str(tmp_path / "outputs/mine/evaluation-last")
    confusion, classes = (read(Path(f"{stem}-{name}.csv")) for name in ("confusion", "classes"))
    assert [[int(row[name]) for name in names] for row in confusion] == expected.tolist()
    for name, row, counts in zip(names, classes, expected, strict=True):
        assert (row["class"], int(row["images"])) == (name, counts.sum())
        assert row["top1"] == f"{100 * counts[int(name)] / counts.sum():.2f}"
    drawn = drawn_texts["evaluation-last-confusion"]
    assert {str(count) for count in expected.flat if count} | set(names) <= set(drawn)
    assert f"{stem}-confusion.png".removeprefix(f"{tmp_path}/") in result.out
    assert Path(f"{stem}-confusion.png").is_file() and Path(f"{stem}-confusion.pdf").is_file()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_restore_the_order_of_the_images(ranks: int):
    """Also if there are fewer images than ranks. The class of image i is i."""
    source = load_source("digits", None, None)
    held_out = source.held_out.take(range(5))

    class Rank(World):
        def gather(self, value: Any) -> list[Any]:
            gathered.append(value)
            return gathered

    gathered: list[Any] = []
    for rank in range(ranks):
        recorder = Recorder()
        for image in range(rank, 5, ranks):
            recorder.add(torch.eye(10)[[image]], torch.tensor([image]))
        if rank < ranks - 1:
            gathered.append([torch.cat(x).numpy() for x in zip(*recorder.batches, strict=True)])
    world = Rank(ranks - 1, ranks, torch.device("cpu"))
    found = recorder.gather(world, type(source)(held_out, held_out, source.classes))
    assert found.images == ["0", "1", "2", "3", "4"]
    assert found.targets.tolist() == found.best[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_names_that_are_no_text_or_hold_commas_stay_one_field(tmp_path: Path):
    images, names = ["a,b\n.png", b"\xff.png".decode(errors="surrogateescape")], ['x "y"', "z"]
    one = np.array([[0, 1], [1, 0]])
    found = Predictions(images, names, np.array([0, 0]), one, np.array([[0.75, 0.25]] * 2))
    write_predictions(tmp_path / "x.csv", found)
    rows = read(tmp_path / "x.csv")
    assert [row["image"] for row in rows] == ["a,b\n.png", "\\udcff.png"]
    assert list(rows[1].values())[1:] == ['x "y"', "z", "0.75", 'x "y"', "0.25"]


def test_a_file_that_cannot_be_written_ends_before_evaluation(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(command)
    monkeypatch.setattr("reproduction.training.evaluate.evaluate", None)
    before = sorted(tmp_path.rglob("*"))
    for file, part in (
        (f"{'x' * 250}.csv", "File name too long"),
        (f"{'x/' * 3000}.csv", "File name too long"),
        ("x.csv", "2 points of the sweep share it"),
    ):
        sweep = ["-m", "weights=last,best"] if "points" in part else []
        result = command("eval", *sweep, "run=outputs/mine", f"predictions={file}")
        assert (result.status, len(result.lines)) == (2, 1) and part in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_loaded_run_predicts_as_eval(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", CLASSES, train=4, held_out=2)
    sideways = Image.open(root / "val/ant/0.png")
    exif = sideways.getexif()
    exif[274] = 6  # orientation
    sideways.save(root / "val/ant/0.png", exif=exif)
    train(command, *FOLDER)
    assert command("eval", "run=outputs/mine", "predictions=x.csv").status == 0
    model, transform, classes = load_run("outputs/mine")
    assert classes == CLASSES and not model.training
    for row in read(tmp_path / "x.csv"):
        with torch.no_grad():
            probabilities = model(transform(Image.open(row["image"]))[None]).softmax(1)[0]
        assert classes[probabilities.argmax()] == row["predicted"]
        assert float(probabilities.max()) == pytest.approx(float(row["probability"]), rel=1e-4)
    _open.cache_clear()


def test_folder_without_classes_is_predicted_as_by_load_run(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", CLASSES, train=2, held_out=1)
    train(command, *FOLDER)
    shutil.rmtree(root)  # the run's own images are not needed
    here = tmp_path / "photos"
    (here / "a" / "b").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    sideways = Image.Exif()
    sideways[274] = 6
    Image.fromarray(noise[..., :3]).save(here / "a" / "b" / "x.JPG", exif=sideways)
    Image.fromarray(noise).save(here / "a" / "y.png")
    Image.fromarray(noise[..., 0]).save(here / "z.webp")
    for other in ("a/broken.png", "notes.txt", ".hidden.png"):
        (here / other).write_bytes(b"no image")
    before = sorted((tmp_path / "outputs").rglob("*"))
    result = command("eval", "run=outputs/mine", "images=photos", "predictions=x.csv")
    assert result.status == 0, result.err
    assert result.out.splitlines() == [
        "outputs/mine/checkpoints/last.pt: 3 images of photos, 1 left out",
        "written to x.csv",
    ]
    assert "warning: left out: photos/a/broken.png: no readable image: " in result.err
    assert "warning: files left out by their ending: 1 .txt" in result.err
    assert sorted((tmp_path / "outputs").rglob("*")) == before
    rows = read(tmp_path / "x.csv")
    paths = [row["image"] for row in rows]
    assert paths == ["photos/z.webp", "photos/a/y.png", "photos/a/b/x.JPG"]
    assert [*rows[0]][:4] == ["image", "predicted", "probability", "predicted_2"]
    model, transform, classes = load_run("outputs/mine")
    again = pickle.loads(pickle.dumps(transform))  # as a spawned worker gets it
    assert "mean=[0.5, 0.4, 0.3]" in repr(again) and "CenterCrop" in repr(again)
    images = again(paths)
    assert torch.equal(images, transform([Image.open(path) for path in paths]))
    with torch.no_grad():
        best = model(images).softmax(1).max(1)
    assert [row["predicted"] for row in rows] == [classes[i] for i in best.indices]
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx(best.values.tolist(), rel=1e-4)
    (tmp_path / "none").mkdir()
    result = command("eval", "run=outputs/mine", "images=none", "predictions=y.csv")
    assert result.status == 2 and result.lines[0].startswith("eval.py: images=none: holds no image")


def test_loading_refuses_what_is_missing(command: Command, tmp_path: Path):
    train(command)
    for folder, weights, part in (
        ("nowhere", "last", "nowhere is not a run folder: there is no such folder"),
        ("outputs/mine", "first", "weights=first: must be last or best"),
        ("outputs/mine", "best", "run=outputs/mine: holds no best.safetensors yet"),
    ):
        (tmp_path / "outputs/mine/checkpoints/best.safetensors").unlink(missing_ok=True)
        with pytest.raises(UserError, match=re.escape(part)):
            load_run(folder, weights)


@pytest.mark.slow
def test_loading_imports_no_hydra_and_the_package_no_torch(command: Command, tmp_path: Path):
    train(command)
    code = (
        "import sys, reproduction\n"
        "assert 'torch' not in sys.modules\n"
        "reproduction.load_run('outputs/mine')\n"
        "print({'hydra', 'omegaconf'} & {*sys.modules})"
    )
    command_line = [sys.executable, "-c", code]
    result = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


@pytest.mark.parametrize(
    "model",
    [
        ["model.embed_dim=16"],
        ["model=vit_tiny_patch16_224", "model.architecture=test_vit", "model.depth=6"],
        ["model=resnet18", "model.architecture=test_resnet", "model.stem=imagenet"],
    ],
    ids=["cct", "vit", "library"],
)
def test_exported_metadata_rebuild_the_model(command: Command, tmp_path: Path, model: list[str]):
    config = config_of(*model, "model.image_size=32", "augmentation=[]")
    donor = build_model(config.model, 7).eval()
    torch.save(donor.state_dict(), tmp_path / "x.pt")
    args = ["checkpoint=x.pt", *model, "model.image_size=32", "output=x.safetensors"]
    result = command("export", *args)
    assert result.status == 0, result.err
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        about = file.metadata()
    assert about["preprocessing"] == "null"  # the file does not tell
    module, _, name = about["constructor"].rpartition(".")
    rebuilt = getattr(import_module(module), name)(**json.loads(about["arguments"]))
    rebuilt.load_state_dict(load_file(tmp_path / "x.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(images), donor(images))


def codes_of(section: str) -> list[str]:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def quickstart(command: Command, tmp_path: Path) -> Path:
    """A small run of that name, as on the page, and a folder of images."""
    train(command, "name=quickstart")
    return write_images(tmp_path / "path" / "to" / "images", ["x"], train=1, held_out=1)


def test_the_documented_code_predicts_a_folder(quickstart: Path, capfd: pytest.CaptureFixture[str]):
    (code,) = codes_of("In other programs")
    exec(code, {})
    lines = capfd.readouterr().out.splitlines()
    assert [re.sub(r": \d, [01]\.\d{3}$", "", line) for line in lines] == [
        "path/to/images/train/x/0.png",
        "path/to/images/val/x/0.png",
    ]


def test_the_documented_code_reads_exported_weights(quickstart: Path, command: Command):
    result = command("export", "run=outputs/quickstart", "output=cct.safetensors")
    assert result.status == 0, result.err
    names: dict[str, Any] = {}
    (code,) = codes_of("Exported weights")
    exec(code, names)
    model, transform, classes = load_run("outputs/quickstart")
    image = Image.open(next(quickstart.rglob("*.png")))
    ours, theirs = transform(image)[None], names["transform"](image)[None]
    assert torch.allclose(ours, theirs, atol=1e-5) and names["about"]["classes"] == classes
    with torch.no_grad():
        assert torch.equal(model(ours), names["model"].eval()(ours))


@pytest.mark.parametrize(
    "model",
    [
        [],
        pytest.param(
            ["model=vit_tiny_patch16_224", "model.architecture=test_vit", "model.depth=6"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_documented_code_traces_the_model(command: Command, tmp_path: Path, model: list[str]):
    train(command, "name=quickstart", "model.image_size=32", *model)
    names: dict[str, Any] = {}
    code, _ = codes_of("ONNX")
    exec(code, names)
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        difference = names["program"].module()(images) - names["model"](images)
    assert difference.abs().max() < 1e-5
