"""The identity of a run: every setting that changes a result, as the present schema reads it."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.config import DATA, HTM_RULES, LOSS, MODEL, OPTIMIZER
from tests.programs import (
    ROOT,
    SHORT,
    SMALL,
    Overrides,
    Run,
    assert_refused,
    assert_succeeded,
    dry,
    evaluate,
    flat,
    hash_of,
    nested,
    overrides_of,
    script,
    snapshot,
    train,
    trained,
)
from tokenmixup import HTM, VTM, ManifoldMixup

STACK = "augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]"
OVERRIDES = {
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
# Keys and groups that change no result, and so not the run; every other key counts.
NO_RESULT = overrides_of("""
    name output_root resume device compile checkpoint logger dataset.workers
    model.checkpoint_blocks recipe.log_every recipe.metrics recipe.metrics_options
""")
OTHER: dict[str, Any] = {  # valid values where a number or a flag cannot just be changed
    "device": "cpu",
    "resume": "auto",
    "name": "x",
    "output_root": "x",
    "model.weights": "x.pt",
    "model.positional_embedding": "sine",
    "model.pooling": "class_token",
    "model.global_pool": "avg",
    "model.pretrained": "x",
    "model.mlp_drop_rate": 0.1,
    "model.package": "torchvision",
    "model.htm_layer": 7,
    "model.vtm_layer": 7,
    "model.stem": "cifar",
    "dataset.root": "x",
    "dataset.mean": [0.1, 0.2, 0.3],
    "dataset.std": [0.1, 0.2, 0.3],
    "dataset.limit": 9,
    "dataset.eval_limit": 9,
    "dataset.workers": 9,
    "augmentation.off_epoch": 1,
    "augmentation.manifold_mixup.layers": [1],
    "augmentation.htm.tau": 1.0,
    "augmentation.htm.rho": 0.1,
    "augmentation.htm.pooling": "average",
    "augmentation.htm.order": "published",
    "augmentation.htm.difficulty": "excess",
    "augmentation.htm.rollout_steps": 1,
    "augmentation.vtm.class_token_offset": "published",
    "recipe.ema_decay": 0.9,
    "recipe.max_steps": 9,
    "recipe.schedule_step": "epoch",
    "recipe.precision": "bf16",
    "recipe.clip_grad_norm": 9.0,
    "checkpoint.every_epochs": 9,
    "recipe.transforms.scale": [0.5, 0.6],
    "recipe.transforms.interpolation": "random",
    "recipe.transforms.auto_augment": "v0",
    "recipe.transforms.erasing_mode": "rand",
}


FUNCTIONS = {
    function_key.key for function_key in (DATA, MODEL, *HTM_RULES.values(), OPTIMIZER, LOSS)
}


def raw_of(*overrides: Overrides) -> dict[str, Any]:
    return dry(overrides)[0]


def changed(key: str, value: Any) -> Any:
    if key in OTHER or key in FUNCTIONS:
        return OTHER.get(key, "own:others")
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}x"
    assert isinstance(value, int | float), f"{key}: name another value in OTHER"
    if value > 1:
        return 2 * value
    if isinstance(value, int):
        return value + 1
    return value / 2 or 1e-7


def changes_no_result(key: str) -> bool:
    return key in NO_RESULT or key.startswith(tuple(f"{group}." for group in NO_RESULT))


def is_compared(kind: str, key: str, value: Any) -> bool:
    """Whether a key can be changed alone: it is set, and no other key forbids it."""
    if key == "model.family" or (key == "model.patch_size" and kind != "vit"):
        return False
    group, _, _ = key.partition(".")
    is_absent = value is None and group in ("augmentation", "logger")
    return not is_absent or key in OTHER


@pytest.mark.parametrize("kind", OVERRIDES)
def test_every_key_counts_unless_it_changes_no_result(kind: str):
    settings = dict(flat(raw_of(OVERRIDES[kind])))
    before = hash_of(nested(settings))
    for key, value in settings.items():
        if not is_compared(kind, key, value):
            continue
        is_other = hash_of(nested(settings | {key: changed(key, value)})) != before
        is_fixed = key == "dataset.root" and settings["dataset.name"] == "digits"
        counts = not is_fixed and not changes_no_result(key)
        assert is_other == counts, key


def edit(run: Run, key: str, value: Any) -> None:
    """Changes a setting in the config.yaml of a run."""
    settings = dict(flat(run.config)) | {key: value}
    (run.path / "config.yaml").write_text(yaml.safe_dump(nested(settings)))


def test_an_edited_configuration_does_not_make_another_run_of_one_that_was_trained(here: Path):
    run = trained(SMALL)
    trained(SMALL, "seed=1", name="other")
    edit(run, "dataset.workers", 0)  # of the machine, not of the run
    assert_succeeded(train(SMALL, "name=mine", "resume=auto"))
    edit(run, "recipe.epochs", 3)
    before = snapshot()
    told = ("config.yaml", "was changed", run.summary["run_hash"])
    for epochs in (2, 3):
        overrides = (SMALL, f"recipe.epochs={epochs}", "name=mine", "resume=auto")
        assert_refused(train(overrides), *told)
    assert_refused(evaluate("run=outputs/mine"), *told)
    assert_succeeded(script("runs", "outputs"), "1 finished run", "unusable: ", *told)
    assert_refused(script("runs", str(run.path)), "outputs/mine: unusable: ", *told)
    assert snapshot() == before
    edit(run, "recipe.epochs", 2)
    assert_succeeded(train(SMALL, "name=mine", "resume=auto"))


OWN_ARRAYS = """
import os
import numpy as np

def images():
    arrays = [np.full((8, 8), 10 * i, np.uint8) for i in range(20)]
    if "CHANGED" in os.environ:
        arrays[int(os.environ["CHANGED"])][0, 0] += 1
    pairs = [(image, i % 2) for i, image in enumerate(arrays)]
    return pairs[:12], pairs[12:16], pairs[16:]
"""


def test_a_run_on_arrays_is_not_taken_for_one_on_other_pixels(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """Be it one pixel of the images for training, held out, or for validation."""
    monkeypatch.syspath_prepend(here)
    (here / "arrays_of_mine.py").write_text(OWN_ARRAYS)
    overrides = (SHORT, "dataset=custom", "dataset.source=arrays_of_mine:images", "resume=auto")
    trained(overrides)
    trained(overrides)
    for place in (0, 12, 16):
        monkeypatch.setenv("CHANGED", str(place))
        assert_refused(train(overrides, "name=mine"), "pixels")


def test_files_of_the_method_list_all_options_of_the_library():
    for kind in (HTM, VTM, ManifoldMixup):
        path = ROOT / "conf/augmentation" / f"{kind.key}.yaml"
        content = yaml.safe_load(path.read_text())
        options = [option.name for option in dataclasses.fields(kind)]
        assert list(content[kind.key]) == options


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
    shared = [rows for rows in names.values() if len(rows) > 1]
    assert len(names) > 20
    assert sorted(map(sorted, shared)) == sorted(map(sorted, SHARED))


def test_published_results_are_found_by_the_rows_of_their_studies():
    """A failure means: a setting or a default has changed without a line on what it meant."""
    lines = []
    for path in (ROOT / "results").glob("*.jsonl"):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) >= 175
    found = {}
    for study in {line["name"].split("-")[0] for line in lines}:
        for row, key in keys_of_rows(ROOT / f"results/{study}.yaml"):
            found[key] = f"{study}-{row}"
    for line in lines:
        row, _, _ = line["name"].rpartition("-s")
        assert line["name"].endswith(hash_of(from_json(line["config"])))
        assert found[hash_of(from_json({**line["config"], "seed": 0}))] == row


def keys_of_rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the name of each row of a study and the hash of its run with seed 0."""
    study = yaml.safe_load(path.read_text())
    shared = study.get("overrides", [])
    for name, row in study["rows"].items():
        if isinstance(row, dict):
            yield name, dry(shared, row["overrides"])[1]
        else:
            yield name, dry(shared, row)[1]


def from_json(value: Any) -> Any:
    return json.loads(json.dumps(value).replace('"inf"', "Infinity"))
