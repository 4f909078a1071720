"""Predictions of eval.py, load_run and exported weights equal a loop over the images."""

import csv
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from timm.data import create_transform

from tests.doors import (
    ROOT,
    SMALL,
    Run,
    build_model,
    config_of,
    evaluate,
    load_run,
    snapshot,
    train,
)
from tests.images import OWN, write_images

CLASSES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
NO_LIMITS = [x for x in SMALL if "limit" not in x]
FOLDER = (
    *("dataset=image_folder", "dataset.root=images", "dataset.workers=0", *NO_LIMITS),
    *("dataset.mean=[0.5,0.4,0.3]", "recipe.transforms.eval_crop_pct=0.8", "augmentation=[]"),
)
PAGE = (ROOT / "docs" / "using.md").read_text()
Row = dict[str, str]


def read(path: Path | str) -> list[Row]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def trained(*words: str) -> str:
    result = train("name=mine", *words)
    assert result.status == 0, result.err
    return "outputs/mine"


def predicted(files: list[Path]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Predicts image by image with the best weights: path, and the five best classes."""
    model = build_model(config_of("model.embed_dim=16").model, len(CLASSES)).eval()
    model.load_state_dict(Run("outputs/mine").best())
    crop = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=0.8, normalize=False)
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.5, 0.4, 0.3], [0.5] * 3))
    found = []
    for file in files:
        pixels = crop(Image.open(file).convert("RGB")).float() / 255
        with torch.no_grad():
            probabilities = model(((pixels - mean) / std)[None]).softmax(1)[0].tolist()
        ranked = sorted(zip(probabilities, CLASSES, strict=True), reverse=True)[:5]
        found.append((str(file), [(name, p) for p, name in ranked]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_predictions_equal_a_loop_over_the_files(here: Path, ranks: int):
    write_images(here / "images", CLASSES, train=4, held_out=3)
    Path("images/val/bee/1.png").unlink()
    run = trained(*FOLDER)
    config = Path(run, "config.yaml")  # as a GPU may have trained it
    config.write_text(config.read_text().replace("compile: false", "compile: cuda-graph"))
    result = evaluate(f"run={run}", "weights=best", "predictions=x.csv", f"devices={ranks}")
    assert result.status == 0, result.err
    rows = read("x.csv")
    files = sorted(Path("images/val").rglob("*.png"))
    assert len(rows) == len(files) == 20
    for row, (image, best) in zip(rows, predicted(files), strict=True):
        assert row["image"] == image
        assert row["class"] == Path(image).parent.name
        names = [row["predicted"], *(row[f"predicted_{rank}"] for rank in range(2, 6))]
        values = [row["probability"], *(row[f"probability_{rank}"] for rank in range(2, 6))]
        assert names == [name for name, _ in best]
        assert [float(x) for x in values] == pytest.approx([p for _, p in best], rel=1e-4)
    assert_accuracies_follow(result.out, rows)


def assert_accuracies_follow(out: str, rows: list[Row]) -> None:
    """Asserts that the printed accuracies are those of the file."""
    printed = re.findall(r"top-1 (.+?) %, top-5 (.+?) %, .* on (\d+) images", out)
    best = [key for key in rows[0] if key.startswith("predicted")]
    first = np.mean([row["class"] == row["predicted"] for row in rows])
    five = np.mean([row["class"] in [row[key] for key in best] for row in rows])
    assert printed == [(f"{100 * first:.2f}", f"{100 * five:.2f}", str(len(rows)))]


@pytest.mark.parametrize("ranks", [1, 4])
def test_tables_follow_from_the_predictions(here: Path, ranks: int):
    """Also with more ranks than images, which are named by their place."""
    few = ["dataset.eval_limit=10", "dataset.source=tests.images:digits"]
    run = trained(*OWN, *NO_LIMITS, *few[:1])
    assert evaluate(f"run={run}", *few[1:]).status == 0
    assert not [*Path(run).glob("*.csv")]
    limit = [few[0]] if ranks == 1 else ["+dataset.options.held_out=3", "dataset.eval_limit=null"]
    result = evaluate(f"run={run}", *few[1:], *limit, "predictions=x.csv", f"devices={ranks}")
    assert result.status == 0, result.err
    rows = read("x.csv")
    names = [str(digit) for digit in range(10)]
    assert_accuracies_follow(result.out, rows)
    (stem,) = (str(x).removesuffix("-confusion.csv") for x in Path(run).glob("*-confusion.csv"))
    kinds = "confusion", "classes"
    confusion, classes = (read(f"{stem}-{kind}.csv") for kind in kinds)
    pairs = ([row[key] for row in rows] for key in ("class", "predicted"))
    expected = confusion_matrix(*pairs, labels=names)
    assert [[int(row[name]) for name in names] for row in confusion] == expected.tolist()
    for name, row, counts in zip(names, classes, expected, strict=True):
        assert (row["class"], int(row["images"])) == (name, counts.sum())
        if counts.sum():
            assert row["top1"] == f"{100 * counts[int(name)] / counts.sum():.2f}"
    if ranks == 4:
        assert [row["image"] for row in rows] == ["0", "1", "2"]
    assert f"{stem}-confusion.png" in result.out
    assert Path(f"{stem}-confusion.png").is_file()
    write_images(here / "photos", names, train=1, held_out=1)
    result = evaluate(f"run={run}", "images=photos", "predictions=y.csv")  # runs no function
    assert result.status == 0 and len(read("y.csv")) == 20, result.err


def test_folder_without_classes_is_predicted_as_by_load_run(here: Path):
    write_images(here / "images", CLASSES, train=2, held_out=1)
    run = trained(*FOLDER)
    shutil.rmtree("images")  # the run's own images are not needed
    Path("photos/a/b").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    sideways = Image.Exif()
    sideways[274] = 6
    Image.fromarray(noise[..., :3]).save("photos/a/b/x.JPG", exif=sideways)
    Image.fromarray(noise).save("photos/a/y.png")
    Image.fromarray(noise[..., 0]).save("photos/z.webp")
    for other in ("a/broken.png", "notes.txt", ".hidden.png"):
        Path("photos", other).write_bytes(b"no image")
    before = snapshot("outputs")
    result = evaluate(f"run={run}", "images=photos", "predictions=x.csv")
    assert result.status == 0 and "3 images of photos" in result.out, result.err
    assert "photos/a/broken.png: no readable image" in result.err
    assert "1 .txt" in result.err
    assert len(result.lines) == 2
    assert snapshot("outputs") == before
    rows = read("x.csv")
    paths = [row["image"] for row in rows]
    assert paths == ["photos/z.webp", "photos/a/y.png", "photos/a/b/x.JPG"]
    assert [*rows[0]][:4] == ["image", "predicted", "probability", "predicted_2"]
    model, transform, classes = load_run(run)
    images = pickle.loads(pickle.dumps(transform))(paths)  # as a spawned worker gets it
    assert torch.equal(images, transform([Image.open(path) for path in paths]))
    with torch.no_grad():
        best = model(images).softmax(1).max(1)
    assert [row["predicted"] for row in rows] == [classes[i] for i in best.indices]
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx(best.values.tolist(), rel=1e-4)
    Path("none").mkdir()
    for folder in ("none", "nowhere"):
        result = evaluate(f"run={run}", f"images={folder}", "predictions=y.csv")
        assert result.status == 2
        assert len(result.lines) == 1
        assert f"images={folder}" in result.err


def test_loading_refuses_what_is_missing(here: Path):
    run = trained(*OWN, *NO_LIMITS)
    Path(run, "checkpoints/best.safetensors").unlink()
    for folder, weights in (("nowhere", "last"), (run, "first"), (run, "best")):
        with pytest.raises(Exception, match=f"{folder}|weights={weights}") as error:
            load_run(folder, weights)
        assert len(str(error.value).splitlines()) == 1


def codes_of(section: str) -> list[str]:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n##")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_documented_code_predicts_a_folder_reads_weights_and_traces_the_model(
    here: Path, capfd: pytest.CaptureFixture[str]
):
    assert train("name=quickstart", "augmentation=[]", *SMALL).status == 0
    root = write_images(here / "path" / "to" / "images", ["x"], train=1, held_out=1)
    (code,) = codes_of("In other programs")
    exec(code, {})
    lines = capfd.readouterr().out.splitlines()
    files = [f"path/to/images/{split}/x/0.png" for split in ("train", "val")]
    assert [re.sub(r": \d, [01]\.\d{3}$", "", line) for line in lines] == files
    assert evaluate("run=outputs/quickstart", "export=cct.safetensors").status == 0
    names: dict[str, Any] = {}
    (code,) = codes_of("Exported weights")
    exec(code, names)
    model, transform, classes = load_run("outputs/quickstart")
    image = Image.open(next(root.rglob("*.png")))
    ours = transform(image)[None]
    theirs = names["transform"](image)[None]
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert names["about"]["classes"] == classes
    with torch.no_grad():
        assert torch.equal(model(ours), names["model"].eval()(ours))
    code, _ = codes_of("ONNX")
    exec(code, names)
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        difference = names["program"].module()(images) - names["model"](images)
    assert difference.abs().max() < 1e-5
