"""What a run writes and prints, and what eval.py and sweeps make of it."""

import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tests.doors import (
    ROOT,
    SMALL,
    SMALL_VIT,
    Result,
    Run,
    evaluate,
    same,
    script,
    snapshot,
    train,
)
from tests.images import OWN, disturbed, write_images

STEP_KEYS = {
    *("step", "epoch", "loss", "lr", "images_per_second", "mixed_samples", "mixed_tokens"),
    *("difficulty", "gain_max", "gain_mean"),
}
SUMMARY_KEYS = {
    *("top1_last", "top1_best", "top1_median10", "top5_last", "top5_best", "parameters"),
    *("seconds", "images_per_second", "threads", "seed", "versions", "git_revision", "hardware"),
}
MIXED = (
    *("augmentation=[mixup,cutmix,htm,vtm]", "augmentation.htm.tau=2.4"),
    *("recipe.transforms.erasing_prob=0.5", *SMALL),
)
FOLDER = [word for word in SMALL if "limit" not in word]  # for other images than digits
DIVERGE = ("recipe.optimizer=sgd", "recipe.lr=1e30", "recipe.warmup_lr=1e30")


class Trained(NamedTuple):
    result: Result
    run: Run


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with every kind of mixing but manifold mixup."""
    root = tmp_path_factory.mktemp("mixed")
    result = train("name=mine", f"output_root={root}", *MIXED)
    assert result.status == 0, result.err
    return Trained(result, Run(root / "mine"))


def test_run_folder_has_metrics_summary_and_config(mixed: Trained):
    (out, err), run = mixed.result[1:], mixed.run
    assert "Traceback" not in err
    assert "training: cct_2_3x2 on 60 images of digits" in out
    assert "top-1" in out
    assert [(line["step"], line["epoch"]) for line in run.steps] == [
        *((1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2))
    ]
    assert all(set(line) == STEP_KEYS for line in run.steps)
    assert all(math.isfinite(value) for line in run.steps for value in line.values())
    assert any(line["mixed_samples"] > 0 for line in run.steps)
    assert all(line["mixed_samples"] <= 20 and line["mixed_tokens"] <= 64 for line in run.steps)
    assert all(line["gain_max"] >= line["gain_mean"] for line in run.steps)
    assert [set(line) for line in run.epochs] == [{"epoch", "top1", "top5", "eval_loss"}] * 2
    assert set(run.summary) >= SUMMARY_KEYS
    assert run.summary["status"] == "finished"
    assert run.config["augmentation"]["htm"]["layer"] == 1
    assert run.config["recipe"]["epochs"] == 2
    for epoch in (1, 2):
        lines = [line for line in run.steps if line["epoch"] == epoch]
        loss, samples = (sum(line[key] for line in lines) / 3 for key in ("loss", "mixed_samples"))
        assert f"/2  loss {loss:.3f}  mixed {samples:.3g} " in out


def test_results_depend_on_the_seed_but_not_on_workers(here: Path, mixed: Trained):
    assert train("name=again", "dataset.workers=2", *MIXED).status == 0
    assert same(Run("outputs/again"), mixed.run) == []
    assert train("name=seed", "seed=1", *MIXED).status == 0
    ours, theirs = (run.checkpoint()["module"] for run in (Run("outputs/seed"), mixed.run))
    assert ours["model.head.weight"].ne(theirs["model.head.weight"]).any()


def test_eval_gives_the_results_of_the_run(here: Path, mixed: Trained):
    run = mixed.run
    summary = mixed.run.summary
    last = evaluate(f"run={run.path}", "device=cpu")
    assert last.status == 0
    assert f"top-1 {summary['top1_last']:.2f} %" in last.out
    assert run.evaluation().items() >= run.epochs[-1].items()
    best = evaluate(f"run={run.path}", "weights=best", "dataset.workers=1", "device=cpu")
    assert f"top-1 {summary['top1_best']:.2f} %" in best.out
    path = run.path / "checkpoints" / "best.safetensors"
    same_file = ("model.embed_dim=16", "dataset.eval_limit=60", "device=cpu")
    assert f"top-1 {summary['top1_best']:.2f} %" in evaluate(f"checkpoint={path}", *same_file).out
    assert evaluate(f"run={run.path}", "recipe.precision=bf16", "device=cpu").status == 0
    (half,) = run.path.glob("evaluation-last-digits-*.json")
    assert 0 < abs(json.loads(half.read_text())["eval_loss"] - run.epochs[-1]["eval_loss"]) < 0.05
    diverged = {name: value * math.nan for name, value in load_file(path).items()}
    save_file(diverged, "diverged.safetensors")
    result = evaluate("checkpoint=diverged.safetensors", *same_file)
    assert result.status == 1
    assert "loss is nan" in result.lines[-1]


def test_best_weights_hold_the_plain_model(mixed: Trained):
    state = mixed.run.checkpoint()["module"]
    best = mixed.run.best()
    assert {f"model.{name}" for name in best} == {x for x in state if x.startswith("model.")}
    assert any(name.startswith("scorenets.") for name in state)


def test_eval_of_other_images_keeps_the_runs_statistics(here: Path, mixed: Trained):
    root = write_images(here / "images", [*"0123456789"], train=1, held_out=1)
    losses = []
    for more in ([], ["dataset.mean=[0.305,0.305,0.305]"], ["dataset.mean=[0.1,0.1,0.1]"]):
        words = (f"run={mixed.run.path}", "dataset=image_folder", f"dataset.root={root}", *more)
        assert evaluate(*words, "device=cpu").status == 0
        newest = max(mixed.run.path.glob("evaluation-last-*"), key=os.path.getmtime)
        losses.append(json.loads(newest.read_text())["eval_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_an_evaluation_is_named_after_all_that_changes_it(here: Path, mixed: Trained):
    """Other images or another precision replace no result, and each says what it is of."""
    run = Run(shutil.copytree(mixed.run.path, "mine"))
    words = (f"run={run.path}", "device=cpu", "weights=best")
    assert evaluate(*words).status == 0
    files = {*run.path.glob("evaluation-best*.json")}
    before = run.evaluation("best")
    for more in ("recipe.precision=bf16", "dataset.eval_limit=20"):
        assert evaluate(*words, more).status == evaluate(*words, more).status == 0
        (path,) = {*run.path.glob("evaluation-best*.json")} - files
        key, _, value = more.partition("=")
        assert str(json.loads(path.read_text())["settings"][key]) == value
        assert str(before["settings"][key]) != value
        files.add(path)
    assert run.evaluation("best") == before


def test_run_without_htm_mixes_nothing(here: Path):
    assert train("name=mine", "augmentation=[]", *SMALL).status == 0
    run = Run("outputs/mine")
    assert [(x["mixed_samples"], x["mixed_tokens"]) for x in run.steps] == [(0, 0)] * 6
    assert not any("difficulty" in line for line in run.steps)
    assert "htm" not in run.summary
    assert not (run.path / "mixed_pairs.png").exists()


def test_divergence_fails_the_run_and_names_the_step(here: Path):
    result = train("name=mine", *DIVERGE, "recipe.clip_grad_norm=null", *SMALL)
    assert result.status == 1
    assert len(result.lines) == 1
    assert "step 2: the " in result.err
    assert "resume=auto" in result.err
    run = Run("outputs/mine")
    assert run.summary["status"] == "failed"
    assert "step 2" in run.summary["error"]
    assert [line["step"] for line in run.steps] == [1]
    last = ("recipe.optimizer=sgd", "recipe.lr=1e37", "recipe.max_steps=1", "augmentation=[]")
    result = train("name=last", *SMALL, *last)
    assert result.status == 1
    assert "the held-out loss is" in result.lines[-1]
    assert Run("outputs/last").summary["status"] == "failed"
    assert not (here / "outputs/last/checkpoints/best.safetensors").exists()


def test_scorenet_learns_from_its_loss(here: Path):
    states = []
    for weight in (0.001, 0.0):
        words = (f"augmentation.htm.score_loss_weight={weight}", "recipe.lr=0.01", *SMALL)
        assert train(f"name={weight}", *words).status == 0
        states.append(Run(f"outputs/{weight}").checkpoint()["module"])
    for name in ("scorenets.1.head.weight", "scorenets.1.pool.weight"):
        assert not torch.allclose(states[0][name], states[1][name], rtol=0.05)


def test_first_lines_and_summary_say_the_numbers_of_auto(here: Path):
    """For 10 classes and 64 tokens; guessing scores ln 10 = 2.30 nats."""
    result = train("name=mine", *SMALL)
    assert "\nhtm: tau = 1\nhtm: rho = 0.02\n" in result.out
    assert Run("outputs/mine").summary["htm"] == {"tau": [1.0], "rho": [0.02]}
    assert Run("outputs/mine").config["augmentation"]["htm"]["tau"] == "auto"
    layers = ("augmentation=[htm]", "augmentation.htm.layer=[0,1]", "augmentation.htm.rho=0")
    result = train("name=two", *layers, "augmentation.htm.tau=[2.4,auto]", *SMALL)
    assert "htm: tau = 2.4, 1\nhtm: rho = 0, 0\n" in result.out
    assert "2.303 of a guess" in result.out
    for line in Run("outputs/two").steps:
        assert line["mixed_samples"] >= max(line["mixed_samples/0"], line["mixed_samples/1"])
        assert line["mixed_tokens"] >= max(line["mixed_tokens/0"], line["mixed_tokens/1"])
        assert line["difficulty"] == pytest.approx(
            (line["difficulty/0"] + line["difficulty/1"]) / 2
        )


def test_a_finished_run_is_printed_and_not_extended(here: Path):
    first = train("name=mine", *SMALL)
    before = snapshot()
    again = train("name=mine", "resume=auto", *SMALL)
    assert again.status == 0
    assert again.out.splitlines()[-2:] == first.out.splitlines()[-2:]
    for words in (("resume=auto", *SMALL, "recipe.epochs=5"), SMALL):
        result = train("name=mine", *words)
        assert (result.status, len(result.lines)) == (2, 1)
        assert "outputs/mine" in result.err
    assert snapshot() == before
    best = "model.weights=outputs/mine/checkpoints/best.safetensors"
    assert train("name=next", best, *SMALL, "recipe.max_steps=1").status == 0


def test_evaluations_and_the_result_of_a_run(here: Path):
    """13 epochs of one batch; all are evaluated, or every second and the last."""
    few = (*OWN, *FOLDER, "+dataset.options.train=20", "recipe.epochs=13", "seed=2")
    for every in (1, 2):
        result = train(f"name={every}", f"recipe.evaluate_every={every}", *few)
        run = Run(f"outputs/{every}")
        assert [x["epoch"] for x in run.epochs] == sorted({*range(every, 14, every), 13})
        assert len(run.steps) == 13
        assert result.out.count("top-1") == len(run.epochs) + 1
        for k in ("top1", "top5"):
            values = [line[k] for line in run.epochs]
            assert run.summary[f"{k}_last"] == values[-1]
        top1 = [line["top1"] for line in run.epochs]
        assert run.summary["top1_best"] == max(top1)
        late = [line["top1"] for line in run.epochs if line["epoch"] > 3]
        assert run.summary["top1_median10"] == median(late)
        if every == 1:
            others = median(top1[-11:]), median(top1[-9:])
            assert median(late) == median(top1[-10:])
            assert median(late) not in others


def test_the_loss_of_an_epoch_is_the_mean_of_the_updates_that_float16_did_not_skip(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU, where a command refuses float16 because it is slow."""
    for module in ("reproduction.training.run", "reproduction.training.ranks"):
        monkeypatch.setattr(f"{module}.resolve_device", lambda *asked: "cpu")
    words = ("recipe.precision=float16", "recipe.epochs=1", "recipe.batch_size=6")
    large = "augmentation.htm.score_loss_weight=300"  # overflows until the scale has halved
    result = train("name=mine", *SMALL, *words, "augmentation.htm.tau=2.3", large)
    assert result.status == 0, result.err
    run = Run("outputs/mine")
    made = [line for line in run.steps if not line["skipped"]]
    assert 0 < len(made) < len(run.steps) == 10
    assert run.summary["skipped_steps"] == len(run.steps) - len(made)
    shown = {}
    for key, lines in (("made", made), ("all", run.steps)):
        means = [fmean(line[name] for line in lines) for name in ("loss", "mixed_samples")]
        shown[key] = "loss {:.3f}  mixed {:.3g} ".format(*means)
    assert shown["made"] != shown["all"]
    assert shown["made"] in result.out
    mixed = fmean(line["mixed_samples"] for line in made)
    assert run.summary["mixed_samples"] == pytest.approx(mixed)


def test_the_first_of_equal_epochs_is_the_best(here: Path):
    """With a tiny learning rate, weights differ and accuracies do not."""
    still = ("recipe.lr=1e-6", "recipe.min_lr=0", "recipe.warmup_epochs=0", "recipe.epochs=2")
    assert train("name=mine", *OWN, *FOLDER, *still, "dataset.validation=0.3").status == 0
    run = Run("outputs/mine")
    assert len({line["val_top1"] for line in run.epochs}) == 1
    states = {x["epoch"]: x["module"] for x in map(run.checkpoint, range(len(run.checkpoints)))}
    best = run.best()
    name = "head.weight"
    assert torch.equal(best[name], states[1][f"model.{name}"])
    assert not torch.equal(best[name], states[2][f"model.{name}"])
    assert run.summary["selected_epoch"] == 1
    assert run.summary["top1_selected"] == run.summary["top1_last"]


def test_max_steps_ends_a_run_within_an_epoch(here: Path):
    assert train("name=mine", "recipe.max_steps=4", *SMALL).status == 0
    assert (len(Run("outputs/mine").steps), len(Run("outputs/mine").epochs)) == (4, 2)


def test_off_epoch_stops_mixing_also_of_a_resumed_run(here: Path):
    """In the last epoch the weights of ScoreNet do not change."""
    words = (
        *("name=mine", "augmentation=[mixup,htm,vtm,manifold_mixup]", "augmentation.htm.tau=inf"),
        *("augmentation.manifold_mixup.layers=[0]", "augmentation.off_epoch=2", *SMALL),
        "recipe.epochs=3",
    )
    assert train(*words).status == 0
    run = Run("outputs/mine")
    steps = [{k: x for k, x in line.items() if k != "images_per_second"} for line in run.steps]
    assert [line["mixed_samples"] > 0 for line in steps] == [True] * 6 + [False] * 3
    assert ["difficulty" not in line for line in steps] == [False] * 6 + [True] * 3
    last = run.checkpoint()["module"]
    before = run.checkpoint(1)["module"]
    for name, value in last.items():
        assert torch.equal(value, before[name]) == name.startswith("scorenets"), name
    run.checkpoints[0].unlink()  # falls back to the end of the second epoch
    (run.path / "summary.json").unlink()
    assert train(*words, "resume=auto").status == 0
    assert [{k: line[k] for k in steps[0] if k in line} for line in run.steps] == steps


def test_image_folder_trains_and_evaluates_by_its_root(here: Path):
    root = write_images(here / "images", ["dark", "grey", "light"], train=8, held_out=4)
    (root / "train" / "dark" / "notes.TXT").touch()
    result = train("name=mine", "dataset=image_folder", f"dataset.root={root}", *FOLDER)
    assert result.status == 0, result.err
    assert "on 24 images of image_folder, 3 classes, 12 held out, htm+vtm" in result.out
    assert "1 .txt" in result.err
    assert "on 12 images" in evaluate("run=outputs/mine", "device=cpu").out
    root.rename(here / "others")
    moved = evaluate("run=outputs/mine", f"dataset.root={here / 'others'}", "device=cpu")
    assert moved.status == 0
    assert "on 12 images" in moved.out


def test_the_documented_commands_fine_tune_a_pretrained_vit(here: Path):
    write_images(here / "path/to/images", ["cat", "dog", "elk"], train=8, held_out=4)
    start = timm.create_model("test_vit", img_size=32).state_dict()
    save_file(start, "start.safetensors")
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    title = "### Your own images\n"
    section = pages.replace("\\\n", "").partition(title)[2].partition("\n##")[0]
    section = section.replace(
        "model.pretrained=augreg_in21k_ft_in1k", "model.weights=start.safetensors"
    )
    small = (*SMALL_VIT, "model.image_size=32", "recipe.epochs=1", "device=cpu")
    for name, line in re.findall(r"^python ((?:scripts/)?\w+)\.py (.*)$", section, re.M):
        words = shlex.split(line)
        run_it = {"train": train, "eval": evaluate}.get(name)
        if run_it is None:
            result = script(name.removeprefix("scripts/"), *words)
        else:
            result = run_it(*words, *(small if name == "train" else ()))
        assert result.status == 0, result.err
    tuned = timm.create_model(
        "test_vit", num_classes=3, img_size=32, checkpoint_path="mine.safetensors"
    ).state_dict()
    change = (tuned["patch_embed.proj.weight"] - start["patch_embed.proj.weight"]).abs().max()
    assert 0 < change < start["patch_embed.proj.weight"].std() / 10


@pytest.mark.slow
def test_compiled_run_resumes_exactly_and_equals_the_plain_one(here: Path):
    words = (*OWN, *FOLDER, "augmentation.htm.tau=2.4")
    assert train("name=plain", *words).status == 0
    assert train("name=whole", "compile=true", *words).status == 0
    with disturbed("fail", at=100):
        assert train("name=parts", "compile=true", *words).status == 1
    assert train("name=parts", "compile=true", "resume=auto", *words).status == 0
    whole = Run("outputs/whole")
    plain = Run("outputs/plain")
    assert same(Run("outputs/parts"), whole) == []
    for ours, theirs in zip(whole.lines, plain.lines, strict=True):
        speed = {"images_per_second": 0}
        assert ours | speed == pytest.approx(theirs | speed, rel=1e-4)
    assert evaluate("run=outputs/whole", *OWN[1:2], "weights=best", "device=cpu").status == 0


def test_a_missing_compiler_ends_a_run_in_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    result = train("name=mine", "compile=true", *SMALL, apart=True)
    assert (result.status, len(result.lines)) == (1, 1)
    assert "compile=true" in result.err
