"""The validation split: which images it has, what a run evaluates when, and what it then says."""

from pathlib import Path

import numpy as np

from tests.doors import SMALL, Run, evaluate, same, train
from tests.images import OWN, digits, disturbed, recorded, write_images

TEST_KEYS = {"top1_last", "top5_last", "top1_selected", "top5_selected"}
VALIDATION_KEYS = {"val_top1_last", "val_top1_selected", "selected_epoch"}
# 60 digits to train on, of which 15 are for validation, and 30 held out
SPLIT = (*OWN, "dataset.validation=0.25", *(x for x in SMALL if "limit" not in x))
TARGETS = np.array(digits()[0].targets)
FOLDER = (
    *("dataset=image_folder", "dataset.root=images", "model.image_size=16", "model.embed_dim=16"),
    *("recipe.batch_size=6", "recipe.epochs=1", "dataset.workers=0", "device=cpu"),
)


def images_of(log: Path) -> tuple[list[int], list[int], int]:
    """Images of a run of one epoch, as it read them: trained on, for validation, number held out.

    Before the run, it tries the first image; after it, pictures show some.
    """
    reads = [line.split()[:2] for line in log.read_text().splitlines()]
    order = [int(index) for half, index in reads if half == "train"][1:]
    return order[:45], order[45:60], sum(half == "held_out" for half, _ in reads)


def split(seed: int = 0, *overrides: str) -> tuple[list[int], list[int], int]:
    log = Path(f"log-{seed}-{len(overrides)}")
    words = [*SPLIT, "recipe.epochs=1", f"seed={seed}", *overrides]
    with recorded(log):
        result = train(*words, f"name={log}")
    assert result.status == 0, result.err
    assert "on 45 images of custom, 10 classes, 30 held out, 15 for validation" in result.out
    return images_of(log)


def test_split_is_stratified_and_no_image_of_it_is_trained_on(here: Path):
    trained, validation, held_out = split()
    assert sorted(trained + validation) == [*range(60)]
    assert held_out == 30
    assert validation == sorted(validation)
    assert trained != sorted(trained)
    whole, part = (np.bincount(TARGETS[index], minlength=10) for index in (range(60), validation))
    assert (abs(part - whole / 4) < 1).all(), part  # 1 or 2 of each class


def test_split_depends_on_its_own_seed_alone(here: Path):
    first, again, other = (
        split(seed, *more)[1] for seed, *more in ((0,), (1,), (0, "dataset.validation_seed=1"))
    )
    assert first == again != other


def test_test_set_is_evaluated_once_for_the_last_and_the_selected_epoch(here: Path):
    with recorded(here / "log"):
        result = train("name=run", *SPLIT, "recipe.epochs=4", "recipe.lr=0.02", "seed=1")
    assert result.status == 0, result.err
    reads = [line.split()[0] for line in (here / "log").read_text().splitlines()]
    run = Run("outputs/run")
    summary = run.summary
    epochs = run.epochs
    assert all(set(line) == {"epoch", "val_top1", "val_top5", "val_loss"} for line in epochs)
    best = max(epochs, key=lambda line: line["val_top1"])  # the first of equal ones
    equal = [line["epoch"] for line in epochs if line["val_top1"] == best["val_top1"]]
    of_loss = min(epochs, key=lambda line: line["val_loss"])
    assert len(equal) > 1 and 1 < best["epoch"] < of_loss["epoch"], "choose another seed"
    assert set(summary) >= TEST_KEYS | VALIDATION_KEYS
    assert summary["selected_epoch"] == best["epoch"]
    assert reads[: 1 + 4 * (45 + 15)] == ["train"] * 241
    assert reads.count("held_out") == 60
    assert reads[241:301] == ["held_out"] * 60
    assert summary["val_top1_selected"] == best["val_top1"]
    assert summary["val_top1_last"] == epochs[-1]["val_top1"]
    assert [summary[x] for x in ("top1_best", "top1_median10", "top5_best")] == [None] * 3
    for weights, word in (("last", "last"), ("best", "selected")):
        words = ["run=outputs/run", f"weights={weights}", "dataset.source=tests.images:digits"]
        assert "on 30 images of custom" in evaluate(*words).out
        scores = run.evaluation(weights)
        assert [summary[f"{x}_{word}"] for x in ("top1", "top5")] == [
            scores["top1"],
            scores["top5"],
        ]


def test_run_that_ends_in_its_last_evaluation_resumes_alike(here: Path):
    words = [*SPLIT, "recipe.lr=0.02"]
    assert train("name=whole", *words).status == 0
    with disturbed("SIGTERM", at=1, half="held_out"):
        assert train("name=stopped", *words).status == 130
    whole = Run("outputs/whole")
    stopped = Run("outputs/stopped")
    assert stopped.summary["status"] == "interrupted"
    assert train("name=stopped", *words, "resume=auto").status == 0
    assert same(whole, stopped) == []
    keys = TEST_KEYS | VALIDATION_KEYS
    assert {x: whole.summary[x] for x in keys} == {x: stopped.summary[x] for x in keys}


def test_folder_with_val_and_test_is_validated_on_val_and_tested_at_the_end(here: Path):
    write_images(here / "images", ["cat", "dog"], train=6, held_out=2, test=4)
    refused = train(*FOLDER, "dataset.validation=0.2")
    assert refused.status == 2
    assert len(refused.lines) == 1
    assert "dataset.validation=0.2" in refused.err
    assert not (here / "outputs").exists()
    result = train("name=run", *FOLDER)
    assert result.status == 0 and not result.err, result.err
    assert "on 12 images of image_folder, 2 classes, 8 held out, 4 for validation" in result.out
    summary = Run("outputs/run").summary
    assert set(summary) >= TEST_KEYS | VALIDATION_KEYS
    assert summary["top1_best"] is None
    assert "on 8 images of image_folder" in evaluate("run=outputs/run").out
