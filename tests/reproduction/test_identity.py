"""The identity of a run: every setting that changes a result, as the present schema reads it."""

import dataclasses
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doors import ROOT, SMALL, Run, dry, evaluate, flat, hash_of, nested, runs, train
from tests.images import write_images
from tokenmixup import HTM, VTM, ManifoldMixup

STACK = "augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]"
WORDS = {
    "cct": [STACK, "model=cct_7_3x1"],
    "vit": [STACK, "model=vit_tiny_patch16_224"],
    "timm": ["model=timm", "model.architecture=resnet18", "augmentation=[]"],
    "custom": [
        "augmentation=[mixup,cutmix]",
        "dataset=custom",
        "dataset.source=own:images",
        "+dataset.options.at=1",
    ],
}
NO_RESULT = (  # keys and groups that change no result, and so not the run; every other key counts
    *("name", "output_root", "resume", "device", "compile", "checkpoint", "logger"),
    *("dataset.workers", "model.checkpoint_blocks", "recipe.log_every"),
)
OTHER: dict[str, Any] = {  # valid values where a number or a flag cannot just be changed
    **{"device": "cpu", "resume": "auto", "name": "x", "output_root": "x"},
    **{"model.weights": "x.pt", "model.positional_embedding": "sine"},
    **{"model.pooling": "class_token", "model.global_pool": "avg", "model.pretrained": "x"},
    **{"model.mlp_drop_rate": 0.1, "model.package": "torchvision", "model.stem": "cifar"},
    **{"dataset.root": "x", "dataset.mean": [0.1, 0.2, 0.3], "dataset.std": [0.1, 0.2, 0.3]},
    **{"dataset.limit": 9, "dataset.eval_limit": 9},
    **{"dataset.source": "own:others", "dataset.workers": 9},
    **{"augmentation.off_epoch": 1, "recipe.ema_decay": 0.9},
    **{"augmentation.manifold_mixup.layers": [1]},
    **{"augmentation.htm.tau": 1.0, "augmentation.htm.rho": 0.1},
    **{"augmentation.htm.pooling": "average", "augmentation.htm.detector": "random"},
    **{"augmentation.htm.matching": "random", "augmentation.htm.mask_rule": "published"},
    **{"augmentation.htm.labels": "count", "augmentation.htm.order": "published"},
    **{"augmentation.htm.difficulty": "excess", "augmentation.htm.rollout_steps": 1},
    **{"augmentation.vtm.class_token_offset": "published", "recipe.max_steps": 9},
    **{"recipe.optimizer": "sgd", "recipe.schedule_step": "epoch", "recipe.precision": "bf16"},
    **{"recipe.clip_grad_norm": 9.0, "checkpoint.every_epochs": 9},
    **{"recipe.transforms.scale": [0.5, 0.6]},
    **{"recipe.transforms.interpolation": "random", "recipe.transforms.auto_augment": "v0"},
    **{"recipe.transforms.erasing_mode": "rand"},
}


FOLDER = ["dataset=image_folder"]


def raw_of(*words: str) -> dict[str, Any]:
    return dry(*words)[0]


def changed(key: str, value: Any) -> Any:
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float | str), f"{key}: name another value in OTHER"
    if isinstance(value, str):
        return f"{value}x"
    return 2 * value if value > 1 else value + 1 if type(value) is int else value / 2 or 1e-7


@pytest.mark.parametrize("kind", WORDS)
def test_every_key_counts_unless_it_changes_no_result(kind: str):
    settings = dict(flat(raw_of(*WORDS[kind])))
    before = hash_of(nested(settings))
    skipped = {"model.family"}  # and what other keys forbid, or that is not set
    skipped |= {"model.patch_size"} if kind != "vit" else set()
    for key, value in settings.items():
        is_group = value is None and key.partition(".")[0] in ("augmentation", "logger")
        if key not in skipped and (not is_group or key in OTHER):
            is_other = hash_of(nested(settings | {key: changed(key, value)})) != before
            is_fixed = key == "dataset.root" and settings["dataset.name"] == "digits"
            counts = not is_fixed and not any(f"{key}.".startswith(f"{x}.") for x in NO_RESULT)
            assert is_other == counts, key


def test_values_count_however_they_are_spelled():
    for one, other in [
        (["recipe.lr=1"], ["recipe.lr=1.0"]),
        (["recipe.warmup_lr=0"], ["recipe.warmup_lr=0.0"]),
        (["augmentation=[vtm,htm]"], ["augmentation=[htm,vtm]"]),
        ([*FOLDER, "dataset.root=x/y/../z/"], [*FOLDER, "dataset.root=./x/z"]),
    ]:
        assert dry(*one)[1] == dry(*other)[1]


def test_runs_of_earlier_revisions_are_found_and_read(here: Path):
    """With keys that are gone, without later ones; first defaults of `auto` are no `auto`."""
    first = ("augmentation.htm.tau=2.0", "augmentation.htm.rho=0.005")
    older = raw_of(*first)
    older["dataset"]["content"] = "digest"
    older["recipe"]["non_finite"] = older["augmentation"]["htm"]["non_finite"] = "fail"
    for key in ("labels", "tau", "rho"):
        del older["augmentation"]["htm"][key]
    del older["checkpoint"], older["dataset"]["validation"]
    assert hash_of(older) == hash_of(raw_of(*first)) != hash_of(raw_of())
    skips = deepcopy(older)
    skips["recipe"]["non_finite"] = "skip"

    assert train("name=mine", *SMALL).status == 0
    run = Run("outputs/mine")
    saved = run.config
    saved["model"]["drop"] = 0.0
    del saved["augmentation"]["htm"]["labels"], saved["checkpoint"]
    (run.path / "config.yaml").write_text(yaml.safe_dump(saved))
    again = train("resume=auto", *SMALL)
    assert again.status == 0
    assert "mine: top-1" in again.out
    assert not again.err
    assert evaluate("run=outputs/mine").status == 0
    other = train("name=mine", "resume=auto", *SMALL, "recipe.lr=5e-5")
    assert other.status == 2
    assert "recipe.lr=5e-05 instead of 0.002" in other.err
    (run.path / "config.yaml").write_text(yaml.safe_dump({**saved, "recipe": skips["recipe"]}))
    result = train("name=mine", "resume=auto", *SMALL)
    assert result.status == 2
    assert "recipe.non_finite=skip" in result.err
    assert len(result.lines) == 1


def test_labels_of_cutmix_by_area_are_read_and_others_refused_by_name(here: Path):
    words = (*SMALL, "augmentation=[cutmix]")
    assert train("name=mine", *words).status == 0
    run = Run("outputs/mine")
    saved = run.config
    for labels, status in (("area", 0), ("attention", 2)):
        saved["augmentation"]["cutmix"]["labels"] = labels
        (run.path / "config.yaml").write_text(yaml.safe_dump(saved))
        result = evaluate("run=outputs/mine")
        assert result.status == status, result
        assert ("augmentation.cutmix.labels=attention" in result.err) == (status == 2)


NAMES = {  # of folders at revision 2e7fa4c
    (): "cct_2_3x2-digits-htm+vtm-s0-6b0816a9",
    ("experiment=table1/cifar100_htm",): "table1-cifar100_htm-s0-433c13f2",
}


def test_folders_are_named_as_at_earlier_revisions(here: Path):
    for words, name in NAMES.items():
        for more in ([], ["recipe.log_every=7"]):
            assert (f"outputs/{name}\n" in train(*words, *more, "dry_run=1").out) == (not more)


def test_a_run_is_found_whatever_its_log_and_wherever_its_project_lies(here: Path):
    """The folder of another `log_every` is gone on with; a project may be moved as a whole."""
    project = here / "here"
    write_images(project / "images", ["cat", "dog"], train=6, held_out=2)
    os.chdir(project)
    words = [x for x in SMALL if not x.startswith("dataset.")]
    words += [*FOLDER, "dataset.root=images", "model.image_size=16", "resume=auto"]
    first = train(*words)
    assert first.status == 0, first.err
    (run,) = runs()
    seconds = run.summary["seconds"]
    os.chdir(here)
    project.rename("there")
    os.chdir("there")
    for more in ([], ["recipe.log_every=7"], ["dataset.root=images/"]):
        again = train(*words, *more)
        assert again.status == 0 and not again.err, again.err
        assert [x.path for x in runs()] == [run.path]
        assert runs()[0].summary["seconds"] == seconds


OWN_ARRAYS = """
import numpy as np

def images(value: int = 0):
    arrays = [np.full((8, 8), 20 * i, np.uint8) for i in range(12)]
    arrays[0] = arrays[0] + np.uint8(value)
    pairs = [(image, i % 2) for i, image in enumerate(arrays)]
    return pairs, pairs[:4]
"""


def test_a_run_on_arrays_is_not_taken_for_one_on_other_pixels(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(here)
    source = here / "arrays_of_mine.py"
    source.write_text(OWN_ARRAYS)
    words = [x for x in SMALL if not x.startswith("dataset.")]
    words += ["dataset=custom", "dataset.source=arrays_of_mine:images", "resume=auto"]
    assert train(*words, "name=mine").status == 0
    assert train(*words, "name=mine").status == 0
    source.write_text(OWN_ARRAYS.replace("value: int = 0", "value: int = 1"))
    del sys.modules["arrays_of_mine"]
    importlib.invalidate_caches()
    refused = train(*words, "name=mine")
    assert (refused.status, len(refused.lines)) == (2, 1)
    assert "pixels" in refused.err


def test_files_of_the_method_list_all_options_of_the_library():
    for kind in (HTM, VTM, ManifoldMixup):
        content = yaml.safe_load((ROOT / "conf/augmentation" / f"{kind.key}.yaml").read_text())
        assert [*content[kind.key]] == [option.name for option in dataclasses.fields(kind)]


SHARED = [  # rows of the paper's tables that are one run
    {"table1/cifar100_baseline", "table3/baseline", "table5/mixup_cutmix"},
    {"table1/cifar100_htm", "table3/attention", "table4/full", "table5/mixup_cutmix_htm"},
    {"table1/cifar100_htm_vtm", "table5/mixup_cutmix_htm_vtm"},
    {"table1/cifar100_vtm", "table5/mixup_cutmix_vtm"},
    {"table3/random", "table4/without_tokens"},
]


def test_rows_of_the_same_settings_are_one_run():
    names = defaultdict(set)
    for path in sorted((ROOT / "src/reproduction/studies/paper").glob("table*.yaml")):
        for row, key in keys_of_rows(path):
            names[key].add(f"{path.stem}/{row}")
    shared = [x for x in names.values() if len(x) > 1]
    assert len(names) > 20
    assert len(shared) == 5
    assert all(x in shared for x in SHARED)


def test_published_results_are_found_by_the_rows_of_their_studies():
    """A failure means: a setting or a default has changed without a word on what it meant."""
    lines = [
        json.loads(line)
        for path in sorted((ROOT / "results").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(lines) >= 175
    found = {}
    for study in {line["name"].split("-")[0] for line in lines}:
        for row, key in keys_of_rows(ROOT / f"results/{study}.yaml"):
            found[key] = f"{study}-{row}"
    for line in lines:
        settings = {key: from_json(value) for key, value in line["config"].items()}
        row = line["name"].rpartition("-s")[0]
        assert found[hash_of(nested(settings | {"seed": 0}))] == row


def keys_of_rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the name of each row of a study and the hash of its run with seed 0."""
    study = yaml.safe_load(path.read_text())
    for name, row in study["rows"].items():
        words = row if isinstance(row, list) else row["overrides"]
        yield name, dry(*study.get("overrides", []), *words)[1]


def from_json(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf") else value
