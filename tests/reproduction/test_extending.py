"""Every example of docs/extending.md, from a folder outside of the repository, and what it does."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from tests.images import OWN, disturbed
from tests.pages import codes
from tests.programs import (
    ROOT,
    SMALL,
    Overrides,
    Run,
    assert_refused,
    assert_succeeded,
    evaluate,
    load_run,
    run,
    runs,
    same,
    script,
    train,
    trained,
)

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
# A loss that is a module, whose weights are frozen
FILES["teacher.py"] = """
import torch
import torch.nn.functional as F
from torch import nn

from reproduction import load_run
from tokenmixup import training_loss


class Teacher(nn.Module):
    def __init__(self, run, weight=0.5, temperature=2.0):
        super().__init__()
        self.model, _, _ = load_run(run)
        self.weight, self.temperature = weight, temperature

    def forward(self, output, batch, step):
        with torch.no_grad():
            theirs = F.log_softmax(self.model(batch.images) / self.temperature, dim=1)
        ours = F.log_softmax(output.logits.float() / self.temperature, dim=1)
        distance = F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
        return training_loss(output) + self.weight * self.temperature**2 * distance
"""
TEACHER = "python train.py recipe.loss=teacher:Teacher +recipe.loss_options.run=outputs/teacher"
COMMANDS = {
    " ".join(shlex.split(line)[2:]): shlex.split(line)[2:]
    for text in (*codes(PAGE, "sh"), TEACHER)
    for line in text.splitlines()
}
# What mixes at once, so that rules have something to do; without it the first epochs mix nothing.
MIXES = ("augmentation.htm.tau=inf", "augmentation.htm.rho=0")
STEPS = ("recipe.epochs=1", "recipe.max_steps=3")
every_example = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(autouse=True)
def files(here: Path, request: pytest.FixtureRequest) -> None:
    for name, text in FILES.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if "teacher" in request.node.name:
        trained(SMALL, "recipe.max_steps=1", name="teacher")


def small(name: str) -> Overrides:
    """The overrides of an example, of a small run."""
    overrides = COMMANDS[name]
    sizes = SMALL[1:] if "model=custom" in overrides else SMALL
    mixes = (
        () if any(override.startswith("augmentation=[cutmix") for override in overrides) else MIXES
    )
    return (overrides, sizes, mixes)  # flags of Hydra come first


def asked(run: Run) -> list[str]:
    """The overrides by which eval.py may run the code of a run: those that it names itself."""
    result = evaluate(f"run={run.path}")
    return re.findall(r"add (\S+)", result.err)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run without an example."""
    return trained(SMALL, MIXES, STEPS, root=tmp_path_factory.mktemp("plain"))


@every_example
def test_an_example_trains_three_steps_is_evaluated_and_exported(name: str, plain: Run):
    assert_succeeded(train(small(name), STEPS, "name=mine"))
    mine = Run("outputs/mine")
    assert len(mine.steps) == 3
    assert same(mine, plain)
    named = asked(mine)
    assert_succeeded(evaluate("run=outputs/mine", named), "of digits")
    assert mine.evaluation()["top1"] == mine.summary["top1_last"]
    assert_succeeded(evaluate("run=outputs/mine", named, "export=mine.safetensors"))
    source = dict(override.split("=") for override in named).get("model.source")
    if source is not None:  # another data set beside the code of one's model
        assert_succeeded(evaluate("run=outputs/mine", named, "dataset=digits"), "of digits")
    model, _, classes = load_run("outputs/mine", source=source)
    assert len(classes) == 10
    assert not model.training


@pytest.mark.slow
@every_example
def test_an_example_resumes_exactly(name: str):
    images = (OWN, "dataset.limit=null", "dataset.eval_limit=null")
    overrides = (small(name), images, "resume=auto")
    assert_succeeded(train(overrides, "name=whole"))
    with disturbed("SIGTERM", at=45):
        assert train(overrides, "name=mine", "output_root=stopped").status == 130
    assert_succeeded(train(overrides, "name=mine", "output_root=stopped"), "resuming after step")
    assert same(Run("outputs/whole"), Run("stopped/mine")) == []


@pytest.mark.slow
@every_example
def test_an_example_is_swept_and_compiled(name: str):
    overrides = ("-m", small(name), "seed=0,1", "jobs=2", STEPS, "compile=true")
    result = run("train.py", overrides, apart=True)
    assert_succeeded(result, "2 of 2 runs are finished")
    hashes = [each.summary["weights_sha256"] for each in runs() if each.path.name != "teacher"]
    assert len({*hashes}) == 2
    assert_succeeded(script("runs", "outputs"), "finished runs")


ECE = "recipe.metrics.ece=calibration:error"
SURE = "recipe.metrics.sure=calibration:confidence"
STUDY = f"""
title: Is it calibrated?
overrides: [+{ECE}, {", ".join(SMALL)}, recipe.epochs=1]
rows:
  low: [recipe.lr=0.0001]
  high: {{overrides: [recipe.lr=0.01], against: low}}
tested: ece on test
"""


@pytest.mark.slow
def test_a_metric_stands_in_lines_and_tables_and_a_study_is_tested_on_it(here: Path):
    (here / "mine.yaml").write_text(STUDY)
    assert_succeeded(script("reproduce", "mine.yaml"), "ece [1]", "6 of 6 runs are finished")
    first = runs()[0]
    value = first.epochs[-1]["ece"]
    assert 0 < value < 1
    assert first.summary["ece_last"] == value
    (path,) = Path("outputs/report").glob("mine-*.csv")
    numbers = pd.read_csv(path).set_index(["outcome", "row"])
    assert numbers.loc[("ece", "high"), "pairs"] == 3
    assert numbers.loc[("ece", "high"), "p"] <= 1
    assert_succeeded(evaluate(f"run={first.path}"))
    assert "ece" not in first.evaluation()
    assert_succeeded(evaluate(f"run={first.path}", ECE, SURE), ", ece 0.", ", sure 0.")
    assert first.evaluation()["ece"] == pytest.approx(value)
    (here / "mine.yaml").write_text(STUDY.replace("tested: ece", "tested: sure"))
    assert_refused(script("reproduce", "mine.yaml"), "has no recipe.metrics.sure")


def test_runs_that_differ_in_a_metric_alone_are_each_checked_before_the_first_one(here: Path):
    metrics = "+recipe.metrics.ece=calibration:error,calibration:eror"
    result = train("-m", SMALL, metrics, "name='mine-${recipe.metrics.ece}'")
    assert_refused(result, "recipe.metrics.ece=calibration:eror", "has no attribute 'eror'")
    assert not runs()


@pytest.mark.slow
def test_a_metric_is_of_the_images_of_all_ranks():
    run = trained(SMALL, f"+{ECE}", f"+{SURE}", "devices=2", "recipe.epochs=1")
    (line,) = run.epochs
    assert_succeeded(evaluate("run=outputs/mine", ECE, SURE))
    for name in ("ece", "sure"):
        assert run.evaluation()[name] == pytest.approx(line[name], abs=1e-6)


def test_an_input_mixing_is_counted_and_stands_alone():
    overrides = ("--config-dir", "mine", SMALL, STEPS, "augmentation=[resizemix]")
    run = trained(overrides)
    assert {line["input_mixed_samples"] for line in run.steps} == {20}
    assert "resizemix" in run.summary["command"]
    result = train(overrides, "augmentation=[resizemix,mixup]")
    assert_refused(result, "augmentation.own.resizemix: stands alone", "without mixup")
    assert_refused(train(overrides, "+augmentation.own.resizemix.options.size=3"), "size")
    source = "augmentation.own.resizemix.source=resizemix:mi"
    assert_refused(train(overrides, source), source, "has no attribute")


WIDE = """
import resizemix

def mix(**options):
    of = resizemix.mix(**options)

    def wide(images, classes, rng):
        mixed, partners, weights = of(images, classes, rng)
        return mixed.double(), partners, weights.double()

    return wide
"""


def test_a_mixing_with_wrong_weights_ends_the_run():
    Path("wide.py").write_text(WIDE.replace("weights.double()", "2 * weights"))
    overrides = ("--config-dir", "mine", SMALL, STEPS, "augmentation=[resizemix]")
    result = train(overrides, "augmentation.own.resizemix.source=wide:mix", "name=wide")
    assert result.status == 1
    assert "must be from 0 to 1" in result.err.splitlines()[-1]


@pytest.mark.parametrize("key", ["recipe.loss_options.run", "recipe.metrics.sure"])
def test_an_option_without_plus_is_shown_with_it(key: str):
    assert_refused(train(SMALL, f"{key}=outputs"), f"use +{key}=outputs")


def test_pictures_and_counts_of_a_model_with_an_adapter_of_its_own():
    (overrides,) = [overrides for overrides in COMMANDS.values() if "model=custom" in overrides]
    mine = trained(SMALL[1:], MIXES, STEPS, overrides, "augmentation=[htm,vtm]")
    report = (mine.path / "report.md").read_text()
    for picture in ("mixed_pairs.png", "saliency.png"):
        assert f"![{picture}]" in report, report
    other = script("look", str(mine.path), "model.source=vit:other")
    assert_refused(other, "to run it, add model.source=vit:vit")
    result = script("look", str(mine.path), "model.source=vit:vit")
    assert_succeeded(result, "replaced tokens")
