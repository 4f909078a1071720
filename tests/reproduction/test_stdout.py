"""Progress output."""

import os
import re
import subprocess
import sys

import pytest

from reproduction.config import CONF_DIR
from reproduction.runs.compose import compose
from reproduction.runs.identity import flatten
from reproduction.start import resolve as jobs
from reproduction.system.terminal import say
from tests.reproduction.conftest import Command


def test_say_ignores_a_closed_pipe(monkeypatch: pytest.MonkeyPatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        os.close(read)
        say("the first line detects it")
        say("later lines are dropped")
        monkeypatch.undo()


def test_scripts_end_silently_when_nobody_reads():
    script = "from reproduction.system.terminal import one_line_errors\n"
    script += "with one_line_errors('script'):\n    print('a', flush=True)\n    print('b' * 10**6)"
    for lines in (script, script.replace("flush=True", "flush=False")):
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", lines], stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


def test_help_of_evaluation_and_export_lists_the_keys_that_apply(command: Command):
    kinds = {
        "eval": {*jobs.EVALUATED_RUN, *jobs.PREDICTED_RUN, *jobs.EVALUATED_FILE},
        "export": {*jobs.EXPORTED_RUN, *jobs.EXPORTED_FILE},
    }
    for script, keys in kinds.items():
        groups = {key.partition(".")[0] for key in keys}
        assert {*re.findall(r"^(\w+)  ", command(script, "--help").out, re.MULTILINE)} == groups


def test_hydra_gets_options_and_names_as_the_programs_do(command: Command):
    shown = command("train", "seed=1", "--cfg", "job", "name=a#b").out.splitlines()
    assert "seed: 1" in shown and "name: a#b" in shown


@pytest.mark.parametrize("model", ["cct_2_3x2", "vit_tiny_patch16_224", "resnet18"])
def test_help_of_training_says_what_is_allowed_for_every_key(command: Command, model: str):
    stack = "mixup,cutmix" + ",manifold_mixup,htm,vtm" * (model != "resnet18")
    words = [f"model={model}", f"augmentation=[{stack}]", "logger=[wandb,tensorboard]"]
    listed = command("train", *words, "--help").out.partition("== Allowed values ==")[2]
    ranges = dict(line.split(maxsplit=1) for line in listed.splitlines() if "  " in line)
    keys = {key for key, value in flatten(compose("train", words).raw) if value != {}}
    assert keys <= {*ranges}
    assert ranges["recipe.ema_decay"] == "number >= 0 and < 1 or null"
    assert ranges["recipe.transforms.scale"] == "2 values: number > 0"
    assert ranges["augmentation.htm.order"] == "in_place, published"
    assert ranges["compile"] == "true, false or cuda-graph"
    assert ("model.patch_size" in ranges) == (model != "resnet18")


@pytest.mark.parametrize("group", ["augmentation", "dataset", "logger", "model", "recipe", ""])
def test_every_key_has_a_comment_in_one_file_of_its_group(group: str):
    files = (CONF_DIR / group).glob("*.yaml") if group else [CONF_DIR / "train.yaml"]
    text = "\n".join(
        re.sub(r"(?ms)^(defaults|hydra):.*?(?=^\S|\Z)", "", x.read_text()) for x in files
    )
    keys = re.findall(r"^ *(\w+): +[^ #\n].*?( #.*)?$", text, re.MULTILINE)
    assert keys and {key for key, _ in keys} == {key for key, comment in keys if comment}
