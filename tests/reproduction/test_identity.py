"""The identity of a run: every setting that changes a result, as the present schema reads it."""

import dataclasses
from copy import deepcopy
from typing import Any

import pytest
import yaml

from reproduction.config import CONF_DIR
from reproduction.runs import folder
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import flatten, hash_of, nested
from reproduction.studies.page import RESULTS
from reproduction.studies.study import points, read
from reproduction.studies.table import read_store
from reproduction.system.errors import UserError
from tests.reproduction.conftest import SMALL, Command, config_of
from tokenmixup import HTM, VTM, ManifoldMixup

STACK = "augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]"
WORDS = {
    "cct": [STACK, "model=cct_7_3x1"],
    "vit": [STACK, "model=vit_tiny_patch16_224"],
    "library": ["model=timm", "model.architecture=resnet18", "augmentation=[]"],
    "custom": ["dataset=custom", "dataset.source=own:images", "+dataset.options.at=1"],
}
NO_RESULT = (  # keys and groups that change no result, and so not the run; every other key counts
    *("name", "output_root", "resume", "device", "compile", "checkpoint", "logger"),
    *("dataset.workers", "dataset.memory_mib", "model.checkpoint_blocks"),
)
OTHER: dict[str, Any] = {  # valid values where a number or a flag cannot just be changed
    **{
        "device": "cpu",
        "resume": "auto",
        "name": "x",
        "output_root": "x",
    },
    **{"model.weights": "x.pt", "model.patch_size": 2, "model.positional_embedding": "sine"},
    **{"model.pooling": "class_token", "model.global_pool": "avg", "model.pretrained": "x"},
    **{"model.mlp_drop_rate": 0.1, "model.package": "torchvision", "model.stem": "cifar"},
    **{"dataset.root": "x", "dataset.mean": [0.1, 0.2, 0.3], "dataset.std": [0.1, 0.2, 0.3]},
    **{"dataset.limit": 9, "dataset.eval_limit": 9, "dataset.memory_mib": 9},
    **{"dataset.source": "own:others", "augmentation.off_epoch": 1},
    **{"augmentation.cutmix.labels": "attention", "augmentation.manifold_mixup.layers": [1]},
    **{
        "augmentation.htm.tau": 1.0,
        "augmentation.htm.rho": 0.1,
    },
    **{"augmentation.htm.pooling": "average", "augmentation.htm.detector": "random"},
    **{"augmentation.htm.matching": "random", "augmentation.htm.mask_rule": "published"},
    **{"augmentation.htm.labels": "count", "augmentation.htm.order": "published"},
    **{"augmentation.htm.difficulty": "excess", "augmentation.htm.rollout_steps": 1},
    **{"augmentation.vtm.class_token_offset": "published", "recipe.max_steps": 9},
    **{"recipe.optimizer": "sgd", "recipe.schedule_step": "epoch", "recipe.precision": "bf16"},
    **{"recipe.clip_grad_norm": 9.0, "recipe.ema_decay": 0.9, "checkpoint.every_epochs": 9},
    **{"recipe.transforms.scale": [0.5, 0.6], "recipe.transforms.ratio": [0.5, 0.6]},
    **{"recipe.transforms.interpolation": "random", "recipe.transforms.auto_augment": "v0"},
    **{"recipe.transforms.erasing_mode": "rand"},
}


def raw_of(*words: str) -> dict[str, Any]:
    return dataclasses.asdict(config_of(*words, needs_data=False))


def changed(key: str, value: Any) -> Any:
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float | str), f"{key}: name another value in OTHER"
    return f"{value}x" if isinstance(value, str) else value + 1 if type(value) is int else 0.47


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_every_key_counts_unless_it_changes_no_result(words: list[str]):
    settings = dict(flatten(raw_of(*words)))
    before = hash_of(nested(settings))
    for key, value in settings.items():
        is_group = value is None and key.partition(".")[0] in ("augmentation", "logger")
        if key != "model.family" and (not is_group or key in OTHER):
            is_other = hash_of(nested(settings | {key: changed(key, value)})) != before
            is_fixed = key == "dataset.root" and settings["dataset.name"] == "digits"
            counts = not is_fixed and not any(f"{key}.".startswith(f"{x}.") for x in NO_RESULT)
            assert is_other == counts, key


def test_numbers_and_paths_count_however_they_are_spelled():
    folder = ("dataset=image_folder", "dataset.root=a")
    for one, other in [
        (["recipe.lr=1"], ["recipe.lr=1.0"]),
        (["recipe.warmup_lr=0"], ["recipe.warmup_lr=0.0"]),
        (["augmentation=[vtm,htm]"], ["augmentation=[htm,vtm]"]),
        ([*folder], ["dataset=image_folder", "dataset.root=b/../a"]),
    ]:
        first, second = (hash_of(raw_of(*words)) for words in (one, other))
        assert first == second
    assert hash_of(raw_of(*folder)) != hash_of(raw_of("dataset=image_folder", "dataset.root=b"))


def test_runs_of_earlier_revisions_are_found_and_read(command: Command):
    """With keys that are gone, without later ones; first defaults of `auto` are no `auto`."""
    first = ("augmentation.htm.tau=2.0", "augmentation.htm.rho=0.005")
    older = raw_of(*first) | {"restarts": 3}
    older["recipe"]["non_finite"] = older["augmentation"]["htm"]["non_finite"] = "fail"
    for key in ("labels", "tau", "rho"):
        del older["augmentation"]["htm"][key]
    del older["checkpoint"], older["dataset"]["validation"]
    assert hash_of(older) == hash_of(raw_of(*first)) != hash_of(raw_of())
    skips = deepcopy(older)
    skips["recipe"]["non_finite"] = "skip"
    with pytest.raises(UserError, match=r"recipe\.non_finite=skip"):
        hash_of(skips)

    assert command("train", "name=mine", *SMALL).status == 0
    run = RunFolder("outputs/mine")
    saved = run.read_config() | {"restarts": 3}
    del saved["augmentation"]["htm"]["labels"], saved["checkpoint"]
    run.config_path.write_text(yaml.safe_dump(saved))
    assert [*folder.find_runs("outputs")] == [hash_of(saved)]
    again = command("train", "resume=auto", *SMALL)
    assert again.status == 0 and "after 2 epochs" in again.out and not again.err
    assert command("eval", "run=outputs/mine").status == 0
    other = command("train", "name=mine", "resume=auto", *SMALL, "recipe.lr=1e-5")
    assert other.status == 2 and "recipe.lr=1e-05 instead of 0.002" in other.err
    run.config_path.write_text(yaml.safe_dump({**saved, "recipe": skips["recipe"]}))
    result = command("train", "name=mine", "resume=auto", *SMALL)
    assert result.status == 2 and "recipe.non_finite=skip" in result.err


def test_files_of_the_method_list_all_options_of_the_library():
    for kind in (HTM, VTM, ManifoldMixup):
        content = yaml.safe_load((CONF_DIR / "augmentation" / f"{kind.key}.yaml").read_text())
        assert [*content[kind.key]] == [option.name for option in dataclasses.fields(kind)]


def test_published_results_are_found_by_the_rows_of_their_studies():
    """A failure means: a setting or a default has changed without a word on what it meant."""
    runs, found = read_store(*sorted(RESULTS.glob("*.jsonl"))), {}
    for study in runs.folder.str.split("-").str[0].unique():
        rows = points(study, read(RESULTS / f"{study}.yaml"))
        found |= {point.key: point.label.replace("/", "-") for point in rows}
    assert len(runs) >= 175
    for run in runs.itertuples():
        row = run.folder.rpartition("-s")[0]
        assert found[run.key].replace("+", "") == row.replace("+", ""), run.folder
