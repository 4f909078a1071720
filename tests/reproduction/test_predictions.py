"""Predictions of eval.py, load_run and exported weights equal a loop over the images."""

import pickle
import re
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from timm.data import create_transform

from tests.images import OWN, SOURCE, write_images
from tests.pages import codes, section
from tests.programs import (
    ROOT,
    SHORT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    build_model,
    config_of,
    evaluate,
    load_run,
    overrides_of,
    predictions,
    snapshot,
    trained,
)

CLASSES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
DIGITS = [str(digit) for digit in range(10)]
FOLDER = (
    "dataset=image_folder",
    "dataset.root=images",
    "dataset.workers=0",
    SHORT,
    overrides_of("dataset.mean=[0.5,0.4,0.3] recipe.transforms.eval_crop_pct=0.8 augmentation=[]"),
)
MEAN = torch.tensor([0.5, 0.4, 0.3])[:, None, None]
STD = torch.tensor([0.5, 0.5, 0.5])[:, None, None]
PAGE = (ROOT / "docs" / "using.md").read_text()
Row = dict[str, str]


class Predicted(NamedTuple):
    """What is predicted for an image: the five best classes."""

    names: list[str]
    probabilities: list[float]


def predicted(run: Run, files: list[Path]) -> list[Predicted]:
    """Predicts image by image with the best weights."""
    model = build_model(config_of("model.embed_dim=16").model, len(CLASSES)).eval()
    model.load_state_dict(run.best())
    crop = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=0.8, normalize=False)
    found = []
    for file in files:
        pixels = crop(Image.open(file).convert("RGB")).float() / 255
        image = (pixels - MEAN) / STD
        with torch.no_grad():
            best = model(image[None])[0].softmax(0).topk(5)
        found.append(Predicted([CLASSES[i] for i in best.indices], best.values.tolist()))
    return found


def best_of(row: Row) -> Predicted:
    """The five best classes of a row."""
    places = ["", "_2", "_3", "_4", "_5"]
    names = [row[f"predicted{place}"] for place in places]
    return Predicted(names, [float(row[f"probability{place}"]) for place in places])


@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_equal_a_loop_over_the_files(here: Path, ranks: int):
    write_images(here / "images", CLASSES, train=4, held_out=3)
    for name in ("bee/1.png", "gnu/2.png"):
        Path("images/val", name).unlink()
    run = trained(FOLDER)
    config = run.path / "config.yaml"  # as a GPU may have trained it
    config.write_text(config.read_text().replace("compile: false", "compile: cuda-graph"))
    overrides = (f"run={run.path}", "weights=best", "predictions=x.csv", f"devices={ranks}")
    result = evaluate(overrides)
    assert_succeeded(result)
    rows = predictions("x.csv")
    files = sorted(Path("images/val").rglob("*.png"))
    assert len(rows) == 19
    for row, file, expected in zip(rows, files, predicted(run, files), strict=True):
        found = best_of(row)
        assert row["image"] == str(file)
        assert row["class"] == file.parent.name
        assert found.names == expected.names
        assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-4)
    assert_accuracies_follow(result.out, rows)


def assert_accuracies_follow(out: str, rows: list[Row]) -> None:
    """Asserts that the printed accuracies are those of the file."""
    printed = re.findall(r"top-1 (.+?) %, top-5 (.+?) %, .* on (\d+) images", out)
    top1 = np.mean([row["class"] == row["predicted"] for row in rows])
    top5 = np.mean([row["class"] in best_of(row).names for row in rows])
    assert printed == [(f"{100 * top1:.2f}", f"{100 * top5:.2f}", str(len(rows)))]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(OWN, SHORT, root=tmp_path_factory.mktemp("digits"))


class Tables(NamedTuple):
    """The files that an evaluation with predictions writes, and what it prints."""

    rows: list[Row]
    classes: list[Row]
    out: str


def tables_of(run: Run, *overrides: str) -> Tables:
    """Evaluates a copy of a run."""
    path = shutil.copytree(run.path, "mine")
    result = evaluate(f"run={path}", SOURCE, "predictions=x.csv", overrides)
    assert_succeeded(result)
    (classes,) = Path(path).glob("*-classes.csv")
    return Tables(predictions("x.csv"), predictions(classes), result.out)


LIMITS = {  # overrides -> the number of images
    ("dataset.eval_limit=10",): 10,
    ("+dataset.options.held_out=1", "dataset.eval_limit=null", "devices=2"): 1,
}


@pytest.mark.parametrize("overrides", LIMITS, ids=["one process", "more ranks than images"])
def test_tables_follow_from_the_predictions(
    here: Path, digits_run: Run, overrides: tuple[str, ...]
):
    """Each image is predicted once."""
    found = tables_of(digits_run, *overrides)
    assert len({row["image"] for row in found.rows}) == len(found.rows) == LIMITS[overrides]
    assert_accuracies_follow(found.out, found.rows)
    true = [row["class"] for row in found.rows]
    guessed = [row["predicted"] for row in found.rows]
    expected = confusion_matrix(true, guessed, labels=DIGITS)
    for digit, counts in enumerate(expected):
        of_class = found.classes[digit]
        assert of_class["class"] == str(digit)
        assert int(of_class["images"]) == counts.sum()
        if counts.sum():
            assert of_class["top1"] == f"{100 * counts[digit] / counts.sum():.2f}"


def test_a_run_on_a_function_predicts_a_folder_without_it(here: Path, digits_run: Run):
    write_images(here / "photos", DIGITS, train=1, held_out=1)
    assert_succeeded(evaluate(f"run={digits_run.path}", "images=photos", "predictions=y.csv"))
    assert len(predictions("y.csv")) == 20


@pytest.fixture(scope="module")
def folder_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a folder that is gone."""
    root = tmp_path_factory.mktemp("folder")
    with chdir(root):
        write_images(root / "images", CLASSES, train=2, held_out=1)
        run = trained(FOLDER, root=root)
        shutil.rmtree("images")
    return run


@pytest.fixture
def photos(here: Path) -> list[str]:
    """Three photos in the order in which they are predicted."""
    Path("photos/a/b").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    sideways = Image.Exif()
    sideways[274] = 6
    Image.fromarray(noise[..., :3]).save("photos/a/b/x.JPG", exif=sideways)
    Image.fromarray(noise).save("photos/a/y.png")
    Image.fromarray(noise[..., 0]).save("photos/z.webp")
    return ["photos/z.webp", "photos/a/y.png", "photos/a/b/x.JPG"]


def test_load_run_predicts_what_is_in_the_file(folder_run: Run, photos: list[str]):
    overrides = (f"run={folder_run.path}", "images=photos", "predictions=x.csv")
    before = snapshot(folder_run.path)
    assert_succeeded(evaluate(overrides), "3 images of photos")
    rows = predictions("x.csv")
    assert [row["image"] for row in rows] == photos
    assert list(rows[0])[:4] == ["image", "predicted", "probability", "predicted_2"]
    assert snapshot(folder_run.path) == before
    model, transform, classes = load_run(folder_run.path)
    images = pickle.loads(pickle.dumps(transform))(photos)  # as a spawned worker gets it
    assert torch.equal(images, transform([Image.open(path) for path in photos]))
    with torch.no_grad():
        best = model(images).softmax(1).max(1)
    assert [row["predicted"] for row in rows] == [classes[i] for i in best.indices]
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx(best.values.tolist(), rel=1e-4)


@pytest.mark.parametrize("folder", ["none", "nowhere"])
def test_a_folder_without_images_is_refused(here: Path, folder_run: Run, folder: str):
    Path("none").mkdir()
    overrides = (f"run={folder_run.path}", f"images={folder}", "predictions=y.csv")
    assert_refused(evaluate(overrides), f"images={folder}")


@pytest.mark.parametrize(
    ("folder", "weights", "part"),
    [
        ("nowhere", "last", "nowhere"),
        ("mine", "first", "weights=first"),
        ("mine", "best", "weights=best"),
    ],
)
def test_loading_refuses_what_is_missing(
    here: Path, digits_run: Run, folder: str, weights: str, part: str
):
    shutil.copytree(digits_run.path, "mine")
    Path("mine/checkpoints/best.safetensors").unlink()
    with pytest.raises(Exception, match=f"{folder}|{part}") as error:
        load_run(folder, weights)
    assert len(str(error.value).splitlines()) == 1


def test_documented_code_predicts_a_folder_and_reads_weights(
    here: Path, capfd: pytest.CaptureFixture[str]
):
    trained("augmentation=[]", SMALL, name="quickstart")
    root = write_images(here / "path" / "to" / "images", ["x"], train=1, held_out=1)
    (code,) = codes(section(PAGE, "### In other programs"))
    exec(code, {})
    lines = capfd.readouterr().out.splitlines()
    files = [f"path/to/images/{split}/x/0.png" for split in ("train", "val")]
    assert [re.sub(r": \d, [01]\.\d{3}$", "", line) for line in lines] == files
    assert_succeeded(evaluate("run=outputs/quickstart", "export=cct.safetensors"))
    names: dict[str, Any] = {}
    (code,) = codes(section(PAGE, "### Exported weights"))
    exec(code, names)
    model, transform, classes = load_run("outputs/quickstart")
    image = Image.open(next(root.rglob("*.png")))
    ours = transform(image)[None]
    theirs = names["transform"](image)[None]
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert names["about"]["tokenmixup.classes"] == classes
    with torch.no_grad():
        assert torch.equal(model(ours), names["model"].eval()(ours))
