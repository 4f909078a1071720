"""A mistake ends with status 2 and one line that names it, and leaves nothing behind."""

import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import doors
from tests.doors import (
    ROOT,
    SHORT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    evaluate,
    eventually,
    runs,
    snapshot,
    started,
    train,
    trained,
)
from tests.images import write_images

TABLE: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("bad_input.yaml").read_text()
)
CONFIGS: dict[str, Any] = {  # runs -> a text, or what is changed in a recipe
    "brackets": "a: [1",
    "unknown": {"lrr": 1},
    "negative": {"lr": -1},
    "none": {},
    "good": {},
}


def write_files() -> None:
    """Writes the files that the table names."""
    Path("folder").mkdir()
    Path("table.csv").write_text("not ours\n")
    Path("lines.jsonl").write_text("{}\n{}\n")
    Path("noise.pt").write_bytes(bytes(range(256)))
    torch.save({"weight": torch.ones(2)}, "other.pt")
    config, _ = doors.dry("name=good", "output_root=runs")
    for name, change in CONFIGS.items():
        folder = Path("runs", name, "checkpoints")
        folder.mkdir(parents=True)
        text = change
        if isinstance(change, dict):
            text = yaml.safe_dump({**config, "recipe": config["recipe"] | change})
        folder.with_name("config.yaml").write_text(text)
        if name != "none":
            (folder / "last.pt").write_bytes(Path("other.pt").read_bytes())
    Path("runs/thesis").mkdir()
    Path("runs/thesis/thesis.txt").write_text("not ours")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    with chdir(folder):
        write_files()
    return folder


@pytest.mark.parametrize("kind", TABLE)
def test_a_mistake_is_refused_in_one_line_that_names_it(
    kind: str, files: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(files)
    for command, named in TABLE[kind].items():
        words = shlex.split(command, posix="${" not in command)
        program = "train.py"
        if words[0].endswith(".py"):
            program = words.pop(0)
        before = snapshot()
        result = doors.run(program, words)
        assert_refused(result, named)
        line = result.err.removesuffix("\n")
        assert line.startswith(f"{Path(program).name}: "), command
        assert line.isprintable(), command
        assert len(line) < 2100, command
        assert snapshot() == before, command


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has a GPU")
def test_a_missing_gpu_is_named(here: Path):
    assert_refused(train("device=cuda"), "device=cuda")
    assert_refused(train("compile=cuda-graph", "device=cpu"), "compile=cuda-graph")
    assert not snapshot()


def test_a_graph_is_refused_where_its_job_lands_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """The machine that has checked the job has one."""
    monkeypatch.setattr("reproduction.sweep.Checks.check_device", lambda *_: None)
    assert_refused(train(SMALL, "compile=cuda-graph", "device=cpu"), "compile=cuda-graph: is for")


def test_weights_of_other_classes_are_refused(here: Path):
    root = write_images(Path("images"), ["cat", "dog"], train=4, held_out=2)
    data = ("dataset=image_folder", f"dataset.root={root}", "dataset.workers=0")
    trained(data, SHORT)
    for half in ("train", "val"):
        Path(root, half, "cat").rename(Path(root, half, "elk"))
    for which in ("last", "best"):
        result = evaluate("run=outputs/mine", f"weights={which}")
        assert result.status == 2
        assert "cat" in result.err
        assert "elk" in result.err
    assert [run.path.name for run in runs()] == ["mine"]


def test_a_run_outlives_its_terminal(here: Path):
    with started("name=mine", SMALL) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stderr.close()
        eventually(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert Run("outputs/mine").summary["status"] == "finished"


@pytest.mark.parametrize("model", ["cct_2_3x2", "vit_tiny_patch16_224"])
def test_help_says_what_is_allowed_for_every_key(here: Path, model: str):
    stack = "augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]"
    words = [f"model={model}", stack, "logger=[wandb,tensorboard]"]
    allowed = dict(re.findall(r"^([\w.]+) +(\S.*)$", train(words, "--help").out, re.MULTILINE))
    shown = yaml.safe_load(train(words, "--cfg", "job").out)
    others = ("logger.", "augmentation.chosen.")
    missing = [key for key in keys_of(shown) if key not in allowed]
    assert [key for key in missing if not key.startswith(others)] == []
    assert "auto" in allowed["augmentation.htm.tau"]
    assert "cuda-graph" in allowed["compile"]
    assert "augmentation.own" not in allowed  # which is typed augmentation.NAME
    assert "float16" in allowed["recipe.precision"]
    assert ">= 1" in allowed["recipe.epochs"]
    assert ("model.conv_layers" in allowed) == (model == "cct_2_3x2")
    assert not snapshot()


@pytest.mark.parametrize("choice", ["dataset=custom", "model=timm", "dataset=image_folder"])
def test_help_does_not_need_what_must_be_set(here: Path, choice: str):
    result = train("--help", choice)
    assert_succeeded(result)
    shown = re.findall(r"^([\w.]+) .* \[(.+)\]$", result.out, re.MULTILINE)
    values = dict(shown)
    assert values["dataset.root"] == "null"
    assert values["compile"] == "false"
    assert "None" not in values.values()
    missing = {key for key, value in values.items() if value == "???"}
    assert (
        missing
        == {
            "dataset=custom": {"dataset.source"},
            "model=timm": {"model.architecture", "model.name"},
            "dataset=image_folder": set(),
        }[choice]
    )


def keys_of(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += keys_of(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return found


GLOBAL = b"# @package _global_\n"
CONTENTS = {  # of a file of YAML -> what is said of it
    b"recipe:\n\tlr: 3\n": "line 3, `lr: 3`: a tab",
    b"recipe: {lr: 1,\n  lr: 2}\n": "line 3, `lr: 2}`: lr stands here twice",
    b"# caf\xe9\nseed: 3\n": "line 2: is no UTF-8 text",
    b"seed: [1\n": "line 3, `the end`: expected ',' or ']'",
    b"seed: 3\0\n": "line 2: a character that no text has",
    b"- seed\n": "",
    b"seed": "",
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_of_yaml_is_refused_by_its_name_and_line(here: Path, content: bytes):
    path = here / "my" / "experiment" / "x.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(GLOBAL + content)
    told = f"{path}{', ' * bool(CONTENTS[content])}{CONTENTS[content]}"
    words = ("--config-dir", "my", "experiment=x", "dry_run=1")
    assert_refused(train(words), told)
    assert_refused(train("-m", words, "seed=0,1"), told)
    assert_refused(doors.script("reproduce", str(path), "dry_run=1"), told)


def test_a_byte_order_mark_is_no_part_of_a_file(here: Path):
    path = here / "my" / "experiment" / "x.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xef\xbb\xbf" + GLOBAL + b"seed: 3\n")
    assert "-s3-" in train("--config-dir", "my", "experiment=x", "dry_run=1").out


@pytest.mark.parametrize("group", ["experiment", "of_mine"])
@pytest.mark.parametrize("head", ["", "# mine\n# @package _global_\n"])
def test_a_forgotten_package_is_named(here: Path, group: str, head: str):
    path = here / "my" / group / "x.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"{head}seed: 3\n")
    told = f"{path}: must begin with the line `# @package _global_`"
    assert_refused(train("--config-dir", "my", f"+{group}=x", "dry_run=1"), told)


def test_what_a_file_names_is_not_blamed_on_the_words(here: Path):
    path = here / "my" / "experiment" / "x.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(GLOBAL + b"defaults:\n  - override /recipe: nix\n")
    result = train("--config-dir", "my", "experiment=x", "dry_run=1")
    assert_refused(result, "train.py: In 'train': Could not find 'recipe/nix'; allowed: ")


@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
@pytest.mark.parametrize("place", [("--config-dir", "my"), ("hydra.searchpath=[my]",)])
def test_files_of_ones_own_are_among_what_is_allowed(
    here: Path, place: tuple[str, ...], mode: tuple[str, ...]
):
    path = here / "my" / "augmentation" / "resizemix.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("chosen: {resizemix: true}\n")
    result = train(mode, place, "augmentation=[resizemx,htm]")
    assert_refused(result, "augmentation/resizemx", "perhaps resizemix; allowed: cutmix")


FILES_OF_KEYS = ["augmentation/*", "dataset/*", "logger/*", "model/*", "recipe/*", "train"]


@pytest.mark.parametrize("files", FILES_OF_KEYS)
def test_every_key_has_a_comment_in_one_file_of_its_group(files: str):
    text = ""
    for path in (ROOT / "conf").glob(f"{files}.yaml"):
        text += re.sub(r"(?ms)^(defaults|hydra):.*?(?=^\S|\Z)", "", path.read_text()) + "\n"
    keys = re.findall(r"^ *(\w+): +[^ #\n].*?( #.*)?$", text, re.MULTILINE)
    commented = {key for key, comment in keys if comment}
    assert commented
    assert {key for key, _ in keys} == commented
