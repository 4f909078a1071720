"""The identity of a run outlasts new options and changed defaults."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic.dataclasses import dataclass

from reproduction.config import CONF_DIR, FORBID, Config, Recipe
from reproduction.runs import folder, parse
from reproduction.runs import identity as rule
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import (
    hash_of,
    identity,
    omitted_values,
    options_of,
    run_hash,
    short_digest,
)
from reproduction.studies.plan import points_of, studies_of
from reproduction.studies.publish import RESULTS
from reproduction.studies.runs import read_store
from reproduction.studies.study import Settings
from reproduction.system.errors import UserError
from tests.reproduction.conftest import SMALL, Command, config_of, small_trainer


@dataclass(config=FORBID, frozen=True, kw_only=True)
class LaterRecipe(Recipe):
    nesterov: bool = False


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Later(Config):
    recipe: LaterRecipe


@dataclass(config=FORBID, frozen=True, kw_only=True)
class LatestRecipe(Recipe):
    nesterov: bool = True


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Latest(Config):
    recipe: LatestRecipe


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`schema(Later)` replaces the configuration's type."""

    def replace(kind: type[Config], **first_defaults: Any) -> None:
        for module in (rule, parse):
            monkeypatch.setattr(module, "Config", kind)
        monkeypatch.setattr(rule, "FIRST_DEFAULTS", rule.FIRST_DEFAULTS | first_defaults)
        omitted_values.cache_clear()

    yield replace
    monkeypatch.undo()
    omitted_values.cache_clear()


FIRST = ("augmentation.htm.tau=2.0", "augmentation.htm.rho=0.005")


def plain(*overrides: str) -> dict[str, Any]:
    return dataclasses.asdict(config_of(*overrides))


def with_nesterov(raw: dict[str, Any], value: bool) -> dict[str, Any]:
    return {**raw, "recipe": {**raw["recipe"], "nesterov": value}}


def test_new_option_leaves_earlier_runs_as_they_are(schema: Any, tmp_path: Path):
    before, key = plain(f"output_root={tmp_path}", "name=mine", "resume=auto"), hash_of(plain())
    RunFolder(tmp_path / "mine").create(config_of(f"output_root={tmp_path}", "name=mine"))
    schema(Later)
    config = parse.parse(before, needs_data=False)
    assert isinstance(config, Later) and config.recipe.nesterov is False
    assert rule.run_hash(config) == key == hash_of(with_nesterov(before, False))
    assert folder.find_runs(tmp_path)[key].path.name == "mine"
    RunFolder(tmp_path / "mine").check(config)  # accepts it
    other = parse.parse(with_nesterov(before, True), needs_data=False)
    assert rule.run_hash(other) != key
    with pytest.raises(UserError, match=r"this one has recipe\.nesterov=True instead of False; "):
        RunFolder(tmp_path / "mine").check(other)


def test_runs_with_keys_of_earlier_revisions_are_found_and_read():
    older = plain() | {"restarts": 3}
    older["augmentation"]["htm"]["non_finite"] = "fail"
    older["checkpoint"]["every_steps"] = 3
    older["recipe"]["non_finite"] = "fail"
    assert hash_of(older) == hash_of(plain())
    assert parse.parse_saved(older, needs_data=False) == parse.parse_saved(plain())
    older["augmentation"]["htm"]["non_finite"] = "skip"
    assert hash_of(older) != hash_of(plain())
    assert parse.parse_saved(older, needs_data=False) == parse.parse_saved(plain())


def test_changed_default_leaves_earlier_runs_as_they_are(schema: Any, tmp_path: Path):
    """Those without the key, those with its first default and those with its present one."""
    older = plain()
    runs = [older, with_nesterov(older, False), with_nesterov(older, True)]
    schema(Later)
    before = [hash_of(run) for run in runs]
    schema(Latest, **{"recipe.nesterov": False})
    assert [hash_of(run) for run in runs] == before
    assert before[0] == before[1] != before[2]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    saved = RunFolder(tmp_path).read_config()
    assert parse.parse(saved, needs_data=False).recipe.nesterov is False  # type: ignore
    assert parse.parse(older, needs_data=False).recipe.nesterov is True  # type: ignore
    assert "recipe.nesterov" in identity(with_nesterov(older, True))


def test_run_saved_without_keys_of_later_options_is_found(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    run = RunFolder(tmp_path / "outputs/mine")
    saved = run.read_config()
    key, older = hash_of(saved), deepcopy(saved)
    del older["augmentation"]["htm"]["labels"], older["checkpoint"]
    run.config_path.write_text(yaml.safe_dump(older))
    assert hash_of(older) == key and list(folder.find_runs(tmp_path / "outputs")) == [key]
    again = command("train", "name=mine", "resume=auto", *SMALL)
    assert again.status == 0 and "after 2 epochs" in again.out and not again.err
    assert command("eval", "run=outputs/mine").status == 0


STACK = ["mixup", "htm", "vtm"]
CHANGES = [
    *("seed=1", "model.depth=3", "model.attn_drop=0.3"),
    *("augmentation.htm.rho=0", "augmentation.htm.detector=random", "augmentation.vtm.kappa=5"),
    *("recipe.label_smoothing=0.3", "recipe.optimizer=sgd"),
    *("recipe.grad_accum_steps=2", "recipe.precision=bf16", "recipe.transforms.erasing_prob=1"),
]
NO_CHANGES = ["model.checkpoint_blocks=true", "dataset.workers=3", "checkpoint.keep=3"]


def losses(*overrides: str) -> list[float]:
    """Returns the losses of two steps with the same weights and images."""
    trainer, generator = small_trainer(STACK, *overrides), torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=generator)
        found += [float(part.loss) for part in trainer.train_step(images, torch.arange(6), 6)]
        trainer.step += 1
    return found


def test_a_key_that_changes_a_loss_changes_the_hash():
    small = ["model.embed_dim=16"]
    before, hashed = losses(*small), run_hash(config_of(*small))
    for change in [*CHANGES, *NO_CHANGES]:
        is_other = losses(*small, change) != before
        assert is_other == (change in CHANGES), change
        assert is_other == (run_hash(config_of(*small, change)) != hashed), change


def test_identity_holds_the_word_auto():
    """Also after tau and rho of 2.0 and 0.005, the first defaults, became auto."""
    auto, first = identity(plain()), identity(plain(*FIRST))
    keys = [f"augmentation.htm.{name}" for name in ("tau", "rho")]
    assert [auto[key] for key in keys] == ["auto", "auto"]
    assert not {*keys} & {*first}


def test_group_without_values_of_its_own_is_set():
    """Manifold mixup with nothing but its first defaults is not the run without it."""
    defaults = {"manifold_mixup": {"alpha": 2.0, "layers": [0, 1, 2]}, "htm": None}
    assert identity({"augmentation": defaults}) == {"augmentation.manifold_mixup": "set"}


SHARED = [  # experiments that are one run
    ("table1/cifar100_baseline", "table5/mixup_cutmix"),
    (
        *("table1/cifar100_htm", "table3/attention", "table4/full"),
        "table5/mixup_cutmix_htm",
    ),
    ("table1/cifar100_htm_vtm", "table5/mixup_cutmix_htm_vtm"),
    ("table1/cifar100_vtm", "table5/mixup_cutmix_vtm"),
    ("table3/random", "table4/without_tokens"),
]


def test_experiments_of_the_same_settings_are_one_run():
    """test_recipes.py compares the values of Tables 1 and 2 with the published ones."""
    folder, names = CONF_DIR / "experiment", defaultdict(list)
    for path in sorted(folder.rglob("*.yaml")):
        name = str(path.relative_to(folder).with_suffix(""))
        names[run_hash(config_of(f"experiment={name}", needs_data=False))].append(name)
    assert sorted(tuple(x) for x in names.values() if len(x) > 1) == sorted(SHARED)


def test_published_results_are_found_by_the_rows_of_their_studies():
    """A failure means: a setting or a default has changed without a word on what it meant."""
    runs, found = read_store(RESULTS), {}
    for study in runs.folder.str.split("-").str[0].unique():
        points = points_of(studies_of(f"{RESULTS / study}.yaml"), Settings())
        found |= {point.key: point.label.replace("/", "-") for point in points}
    assert len(runs) >= 175
    for run in runs.itertuples():
        row = run.folder.rpartition("-s")[0]
        assert found[run.key].replace("+", "") == row.replace("+", ""), run.folder


def test_new_options_have_defaults():
    """A failure means: a new option has none, which makes strangers of all earlier runs."""
    required = {key for key, default in options_of(Config) if default is dataclasses.MISSING}
    assert short_digest(sorted(required)) == "e8946171"
