"""What a run writes and prints, and what eval.py and sweeps make of it."""

import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests import programs
from tests.images import OWN, SOURCE, disturbed, write_images
from tests.pages import section
from tests.programs import (
    ROOT,
    SHORT,
    SMALL,
    SMALL_VIT,
    Line,
    Result,
    Run,
    assert_refused,
    assert_same_lines,
    assert_succeeded,
    build_trainer,
    evaluate,
    of_runs,
    overrides_of,
    same,
    snapshot,
    statuses,
    train,
    trained,
)

STEP_KEYS = set(
    overrides_of("""
        step epoch loss lr gradient_norm images_per_second input_mixed_samples easy_samples
        mixed_samples mixed_tokens difficulty gain_max gain_mean
    """)
)
SUMMARY_KEYS = set(
    overrides_of("""
        top1_last top1_best top1_median10 top5_last top5_best parameters seconds
        images_per_second seed starts run_hash
    """)
)
MIXED = (
    "augmentation=[mixup,cutmix,htm,vtm]",
    "augmentation.htm.tau=2.4",
    "augmentation.htm.rho=0",
    "recipe.transforms.erasing_prob=0.5",
    SMALL,
)


class Trained(NamedTuple):
    result: Result
    run: Run


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with every kind of mixing but manifold mixup."""
    root = tmp_path_factory.mktemp("mixed")
    result = train("name=mine", f"output_root={root}", MIXED)
    assert_succeeded(result)
    return Trained(result, Run(root / "mine"))


def test_a_run_logs_each_step(mixed: Trained):
    places = [(line["step"], line["epoch"]) for line in mixed.run.steps]
    assert places == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    for line in mixed.run.steps:
        assert set(line) == STEP_KEYS
        assert all(map(math.isfinite, line.values()))
        assert line["mixed_samples"] <= line["easy_samples"] <= 20
        assert line["input_mixed_samples"] in (0, 20)
        assert line["mixed_tokens"] <= 64
        assert line["gain_max"] >= line["gain_mean"]
    for name in ("easy_samples", "mixed_samples", "input_mixed_samples"):
        assert max(line[name] for line in mixed.run.steps) > 0


def test_a_run_ends_with_its_summary(mixed: Trained):
    assert_succeeded(mixed.result, "training: cct_2_3x2 on 60 images of digits", "top-1")
    assert "Traceback" not in mixed.result.err
    keys = [set(line) for line in mixed.run.epochs]
    assert keys == [{"epoch", "top1", "top5", "eval_loss"}] * 2
    assert mixed.run.summary["status"] == "finished"
    assert set(mixed.run.summary) >= SUMMARY_KEYS
    assert mixed.run.config["recipe"]["epochs"] == 2
    assert mixed.run.config["augmentation"]["htm"]["layer"] == 1


def test_a_model_begins_with_weights_by_its_seed():
    heads = []
    for seed in (0, 1):
        trainer = build_trainer("augmentation=[]", "model.embed_dim=16", f"seed={seed}")
        heads.append(trainer.module.model.head.weight)
    assert not torch.equal(*heads)


@pytest.mark.parametrize(("weights", "key"), [("last", "top1_last"), ("best", "top1_best")])
def test_eval_gives_the_results_of_the_run(here: Path, mixed: Trained, weights: str, key: str):
    overrides = (f"run={mixed.run.path}", f"weights={weights}", "dataset.workers=1", "device=cpu")
    top1 = mixed.run.summary[key]
    assert_succeeded(evaluate(overrides), f"top-1 {top1:.2f} %")
    if weights == "last":
        assert mixed.run.evaluation().items() >= mixed.run.epochs[-1].items()


ALONE = ("model.embed_dim=16", "dataset.eval_limit=60", "device=cpu")  # what a file does not say


def test_a_file_of_weights_is_evaluated_alone(here: Path, mixed: Trained):
    path = mixed.run.path / "checkpoints" / "best.safetensors"
    top1 = mixed.run.summary["top1_best"]
    assert_succeeded(evaluate(f"checkpoint={path}", ALONE), f"top-1 {top1:.2f} %")


def test_weights_that_diverged_have_no_result(here: Path, mixed: Trained):
    diverged = {name: value * math.nan for name, value in mixed.run.best().items()}
    save_file(diverged, "diverged.safetensors")
    result = evaluate("checkpoint=diverged.safetensors", ALONE)
    assert result.status == 1
    assert "loss is nan" in result.lines[-1]


def test_best_weights_hold_the_plain_model(mixed: Trained):
    state = mixed.run.checkpoint()["module"]
    of_model = {name for name in state if name.startswith("model.")}
    of_scorenet = {name for name in state if name.startswith("scorenets.")}
    assert {f"model.{name}" for name in mixed.run.best()} == of_model
    assert of_scorenet


def test_eval_of_other_images_keeps_the_runs_statistics(here: Path, mixed: Trained):
    root = write_images(here / "images", list("0123456789"), train=1, held_out=1)
    overrides = (
        f"run={mixed.run.path}",
        "dataset=image_folder",
        f"dataset.root={root}",
        "device=cpu",
    )
    losses = []
    for more in ([], "dataset.mean=[0.305,0.305,0.305]", "dataset.mean=[0.1,0.1,0.1]"):
        assert_succeeded(evaluate(overrides, more))
        newest = max(mixed.run.path.glob("evaluation-last-*"), key=os.path.getmtime)
        losses.append(json.loads(newest.read_text())["eval_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_an_evaluation_is_named_after_all_that_changes_it(here: Path, mixed: Trained):
    """Other images or another precision replace no result, and each says what it is of."""
    run = Run(shutil.copytree(mixed.run.path, "mine"))
    overrides = (f"run={run.path}", "device=cpu", "weights=best")
    assert_succeeded(evaluate(overrides))
    files = set(run.path.glob("evaluation-best*.json"))
    before = run.evaluation("best")
    for key, value in (("dataset.eval_limit", 20), ("recipe.precision", "bf16")):
        assert_succeeded(evaluate(overrides, f"{key}={value}"))
        assert_succeeded(evaluate(overrides, f"{key}={value}"))
        (path,) = set(run.path.glob("evaluation-best*.json")) - files
        found = json.loads(path.read_text())
        assert found["settings"][key] == value
        assert before["settings"][key] != value
        files.add(path)
    assert before["eval_loss"] != found["eval_loss"]
    assert found["eval_loss"] == pytest.approx(before["eval_loss"], abs=0.05)
    assert run.evaluation("best") == before


def test_run_without_htm_mixes_nothing(here: Path):
    run = trained("augmentation=[]", SMALL)
    assert len(run.steps) == 6
    for line in run.steps:
        for name in ("input_mixed_samples", "easy_samples", "mixed_samples", "mixed_tokens"):
            assert line[name] == 0
        assert "difficulty" not in line
    assert not (run.path / "mixed_pairs.png").exists()


def test_a_held_out_loss_that_diverges_fails_the_run(here: Path):
    last = ("recipe.optimizer=sgd", "recipe.lr=1e37", "recipe.max_steps=1", "augmentation=[]")
    result = train("name=last", SMALL, last)
    assert result.status == 1
    assert "the held-out loss is" in result.lines[-1]
    assert statuses() == ["failed"]
    assert not (here / "outputs/last/checkpoints/best.safetensors").exists()


def test_lines_have_the_figures_of_each_layer_and_their_means(here: Path):
    layers = ("augmentation=[htm]", "augmentation.htm.layer=[0,1]", "augmentation.htm.rho=0")
    two = trained(layers, "augmentation.htm.tau=[2.4,auto]", SMALL)
    for line in two.steps:
        for name in ("easy_samples", "mixed_samples"):
            assert line[name] >= line[f"{name}/0"]
            assert line[name] >= line[f"{name}/1"]
        mean = (line["difficulty/0"] + line["difficulty/1"]) / 2
        assert line["difficulty"] == pytest.approx(mean)


def test_a_finished_run_is_printed_and_not_extended(here: Path):
    first = train("name=mine", SMALL)
    ours = of_runs(snapshot())
    again = train("name=mine", "resume=auto", SMALL)
    assert_succeeded(again)
    assert of_runs(snapshot()) == ours
    before = snapshot()
    assert again.out.splitlines()[-2:] == first.out.splitlines()[-2:]
    longer = train("name=mine", "resume=auto", SMALL, "recipe.epochs=5")
    assert_refused(longer, "outputs/mine")
    assert_refused(train("name=mine", SMALL), "outputs/mine")
    assert snapshot() == before
    best = "model.weights=outputs/mine/checkpoints/best.safetensors"
    trained(best, SMALL, "recipe.max_steps=1", name="next")


EVERY = {1: list(range(1, 14)), 2: [2, 4, 6, 8, 10, 12, 13]}  # of how many -> which epochs


@pytest.mark.parametrize("every", EVERY)
def test_evaluations_and_the_result_of_a_run(here: Path, every: int):
    """13 epochs of one batch; all are evaluated, or every second and the last."""
    few = overrides_of("+dataset.options.train=20 recipe.epochs=13 seed=2")
    result = train("name=mine", f"recipe.evaluate_every={every}", OWN, SHORT, few)
    run = Run("outputs/mine")
    assert [line["epoch"] for line in run.epochs] == EVERY[every]
    assert len(run.steps) == 13
    assert result.out.count("top-1") == len(run.epochs) + 1
    assert run.summary["top1_last"] == run.epochs[-1]["top1"]
    assert run.summary["top5_last"] == run.epochs[-1]["top5"]
    top1 = [line["top1"] for line in run.epochs]
    late = [line["top1"] for line in run.epochs if line["epoch"] > 3]
    assert run.summary["top1_best"] == max(top1)
    assert run.summary["top1_median10"] == median(late)
    if every == 1:
        assert late == top1[-10:]
        assert median(late) != median(top1[-11:]), "choose another seed"
        assert median(late) != median(top1[-9:]), "choose another seed"


def test_updates_that_float16_skips_are_counted(here: Path, monkeypatch: pytest.MonkeyPatch):
    """On a CPU, where a command refuses float16 because it is slow."""
    for module in ("reproduction.training.run", "reproduction.training.trial"):
        monkeypatch.setattr(f"{module}.resolve_device", lambda *asked: "cpu")
    overrides = ("recipe.precision=float16", "recipe.epochs=1", "recipe.batch_size=6")
    large = "augmentation.htm.score_loss_weight=300"  # overflows until the scale has halved
    assert_succeeded(train("name=mine", SMALL, overrides, "augmentation.htm.tau=2.3", large))
    run = Run("outputs/mine")
    skipped = [line for line in run.steps if line["gradient_norm"] is None]
    assert 0 < len(skipped) < len(run.steps) == 10
    assert run.summary["skipped_steps"] == len(skipped)


REMARKS = {  # overrides, and what the run says of them
    "augmentation.htm.tau=0.5": [
        "no token was replaced in this run: no sample was easy",
    ],
    "augmentation.htm.tau=inf augmentation.htm.rho=inf": [
        "no token was replaced in this run: no gain was above rho"
    ],
    "augmentation.htm.tau=inf augmentation.htm.rho=0": [],
}


@pytest.mark.parametrize("overrides", REMARKS)
def test_a_run_says_what_was_mixed_and_if_its_tau_mixes_nothing(here: Path, overrides: str):
    result = train("name=mine", SMALL, overrides.split())
    assert_succeeded(result)
    text = result.out + result.err
    for part in REMARKS[overrides]:
        assert text.count(part) == 1
    if not REMARKS[overrides]:
        for epoch in (1, 2):
            lines = [line for line in Run("outputs/mine").steps if line["epoch"] == epoch]
            mixed = sum(line["mixed_samples"] for line in lines)
            tokens = sum(line["mixed_samples"] * line["mixed_tokens"] for line in lines)
            told = f"easy 100 %, mixed {100 * mixed / 60:.3g} %, {tokens / mixed:.3g} tokens each"
            assert told in text
        assert "no token was replaced" not in text


def test_max_steps_ends_a_run_within_an_epoch(here: Path):
    """Of 20, 19 and 19 images."""
    mixing = overrides_of("augmentation=[htm] augmentation.htm.tau=inf dataset.limit=58")
    run = trained("recipe.max_steps=5", SMALL, mixing, "recipe.drop_last=false")
    assert len(run.steps) == 5
    assert len(run.epochs) == 2
    assert run.summary["easy_share"] == 1
    assert run.summary["images"] == 58 + 20 + 19


def without_speed(lines: list[Line]) -> list[Line]:
    return [line | {"images_per_second": 0} for line in lines]


def test_off_epoch_stops_mixing_also_of_a_resumed_run(here: Path):
    """In the last epoch the weights of ScoreNet do not change."""
    stack = overrides_of("""
        augmentation=[mixup,htm,vtm,manifold_mixup] augmentation.htm.tau=inf
        augmentation.manifold_mixup.layers=[0] augmentation.off_epoch=2
    """)
    overrides = (stack, SMALL, "recipe.epochs=3")
    run = trained(overrides)
    steps = without_speed(run.steps)
    mixes = [line["easy_samples"] > 0 for line in steps]
    assert [line["input_mixed_samples"] for line in steps[6:]] == [0] * 3
    assert mixes == [True] * 6 + [False] * 3
    assert ["difficulty" in line for line in steps] == mixes
    last = run.checkpoint()["module"]
    before = run.checkpoint(1)["module"]
    for name, value in last.items():
        stays = torch.equal(value, before[name])
        assert stays == name.startswith("scorenets"), name
    run.checkpoints[0].unlink()  # falls back to the end of the second epoch
    (run.path / "summary.json").unlink()
    trained(overrides, "resume=auto")
    assert without_speed(run.steps) == steps


def test_the_documented_commands_fine_tune_a_pretrained_vit(here: Path):
    write_images(here / "path/to/images", ["cat", "dog", "elk"], train=8, held_out=4)
    start = timm.create_model("test_vit", img_size=32).state_dict()
    save_file(start, "start.safetensors")
    page = (ROOT / "docs" / "using.md").read_text().replace("\\\n", "")
    text = section(page, "### Your own images")
    text = text.replace("model.pretrained=augreg_in21k_ft_in1k", "model.weights=start.safetensors")
    small = (SMALL_VIT, "model.image_size=32", "recipe.epochs=1", "device=cpu")
    commands = re.findall(r"^python (\S+) (.*)$", text, re.MULTILINE)
    assert {program for program, _ in commands} >= {"train.py", "eval.py"}
    for program, line in commands:
        more = small if program == "train.py" else ()
        assert_succeeded(programs.run(program, shlex.split(line), more))
    tuned = timm.create_model(
        "test_vit", num_classes=3, img_size=32, checkpoint_path="mine.safetensors"
    )
    weight = start["patch_embed.proj.weight"]
    change = tuned.state_dict()["patch_embed.proj.weight"] - weight
    assert 0 < change.abs().max() < weight.std() / 10


@pytest.mark.slow
def test_compiled_run_resumes_exactly_and_equals_the_plain_one(here: Path):
    overrides = (OWN, SHORT, "augmentation.htm.tau=2.4")
    plain = trained(overrides, name="plain")
    whole = trained("compile=true", overrides, name="whole")
    with disturbed("fail", at=100):
        assert train("name=parts", "compile=true", overrides).status == 1
    parts = trained("compile=true", "resume=auto", overrides, name="parts")
    assert same(parts, whole) == []
    assert_same_lines(whole.lines, plain.lines, rel=1e-4)
    assert_succeeded(evaluate("run=outputs/whole", SOURCE, "weights=best", "device=cpu"))
