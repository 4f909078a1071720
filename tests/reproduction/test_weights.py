"""Weight files of ours and of other programs: what a run begins with, evaluates, exports."""

import argparse
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.doors import SMALL, Run, evaluate, initial_model, load_run, script, snapshot, train
from tests.reproduction.recorded import FIXTURES, Recorded

State = dict[str, Tensor]
PUBLISHED = yaml.safe_load((FIXTURES / "published_names.yaml").read_text())
VIT_BASE = "model=vit_base_patch16_224"
VIT = ("model=vit_tiny_patch16_224", "model.image_size=32", "augmentation=[]")
# The CCT that was recorded with the published code.
RECORDED_CCT = (
    *("model=cct_2_3x2", "model.embed_dim=32", "model.depth=4", "model.mlp_ratio=2"),
    *("model.positional_embedding=learnable", "augmentation=[]"),
)
TINY = ("model.embed_dim=16", "augmentation=[]")


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def begun(path: Path, *words: str, classes: int = 10) -> State:
    """The weights of a run that begins with those of a file."""
    return initial_model(*words, f"model.weights={path}", classes=classes).state_dict()


def as_published_cct(state: State) -> dict[str, Any]:
    """Wraps a state as the published training script of CCT does."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    args = argparse.Namespace(lr=6e-4, mean=[0.5, 0.5, 0.5], amp=True, resume="", seed=None)
    more = {"optimizer": optimizer.state_dict(), "amp_scaler": {"scale": 65536.0}, "metric": 83.57}
    return {
        "epoch": 299,
        "arch": "cct_7_3x1_32",
        "state_dict": OrderedDict(state),
        "args": args,
    } | more


def published_state(kind: str, file: str) -> State:
    """Parameters of the names and shapes of a published file, which take no space on disk."""
    facts = PUBLISHED[kind]
    settings = facts["files"][file]
    shapes = dict(facts["once"])
    for block in range(facts["depth"]):
        groups = ["block", "separate" if block == settings.get("vtm") else "fused"]
        groups += ["scorenet"] * (block == settings.get("htm"))
        shapes |= {n.format(block): s for group in groups for n, s in facts[group].items()}
    sizes = {
        name: [settings["classes"] if n == "classes" else n for n in s]
        for name, s in shapes.items()
    }
    return {name: torch.full((1,), 0.01).expand(size) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("kind", "file"), [(kind, name) for kind in PUBLISHED for name in PUBLISHED[kind]["files"]]
)
def test_published_names_and_shapes_fit_the_models(here: Path, kind: str, file: str):
    torch.save(published_state(kind, file), here / "x.pth")
    classes = PUBLISHED[kind]["files"][file]["classes"]
    words = ("model=cct_7_3x1" if kind == "cct" else VIT_BASE, "augmentation=[]")
    with torch.device("meta"):
        begun(here / "x.pth", *words, classes=classes)


def with_module_prefix(state: State) -> dict[str, Any]:
    return {"model": {f"module.{name}": value for name, value in state.items()}}


@pytest.mark.parametrize(
    ("recorded", "written"),
    [
        ("cct_base", dict),  # as the files of Compact-Transformers
        ("cct_base", with_module_prefix),
        ("cct_vtm", as_published_cct),
        ("cct_htm_then_vtm", as_published_cct),
    ],
)
def test_published_weights_give_the_published_logits(here: Path, recorded: str, written: Any):
    arrays = Recorded(recorded)
    torch.save(written(arrays.under("state")), here / "file.any")
    model = initial_model(*RECORDED_CCT, f"model.weights={here / 'file.any'}").eval()
    expected = arrays.tensor("eval_logits")
    with torch.no_grad():
        far = (model(arrays.tensor("images")) - expected).abs().max()
    assert far <= 1e-4 * expected.abs().max()


def doubled(state: State) -> State:
    return {name: 2 * value for name, value in state.items()}


CONTAINERS = {
    "bare": lambda state: state,
    "model": lambda state: {"model": state, "epoch": 3},
    "state_dict": lambda state: {"state_dict": state, "args": argparse.Namespace(lr=0.1)},
    "ema": lambda state: {"state_dict": doubled(state), "state_dict_ema": state},
    "ddp": lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}},
    "compiled": lambda state: {f"_orig_mod.module.{k}": v for k, v in state.items()},
    "numpy's numbers": lambda state: {"model": state, "epoch": np.int64(3), "acc": np.float32(97)},
    "parameters": lambda state: {k: nn.Parameter(v) for k, v in state.items()},
}


@pytest.mark.parametrize("container", [*CONTAINERS, "safetensors", "legacy"])
def test_state_dicts_are_found_in_all_common_containers(here: Path, container: str):
    """The suffix of a file does not matter."""
    state = initial_model(*TINY).state_dict()
    path = here / "weights.any"
    if container == "safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        content = CONTAINERS.get(container, dict)(state)
        zipped = container != "legacy"
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert same(begun(path, *TINY), state)


@pytest.mark.parametrize("words", [TINY, pytest.param(VIT, marks=pytest.mark.slow)], ids=str)
def test_a_head_for_other_classes_stays_new(here: Path, words: tuple[str, ...]):
    torch.manual_seed(0)
    donor = initial_model(*words, classes=7).state_dict()
    torch.save(donor, here / "x.pth")
    assert same(begun(here / "x.pth", *words, classes=7), donor)
    torch.manual_seed(5)
    other = begun(here / "x.pth", *words, classes=3)
    torch.manual_seed(5)
    fresh = initial_model(*words, classes=3).state_dict()
    for name, value in other.items():
        assert torch.equal(value, (fresh if name.startswith("head.") else donor)[name]), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with HTM and VTM, whose last weights are not its best."""
    root = tmp_path_factory.mktemp("trained")
    result = train("name=mine", f"output_root={root}", "recipe.max_steps=5", *SMALL)
    assert result.status == 0, result.err
    return Run(root / "mine")


def test_a_run_begins_with_the_weights_of_another(trained: Run, here: Path):
    """Of its checkpoint, which holds ScoreNet too, and of its best weights."""
    (last, *_), best = trained.checkpoints, trained.path / "checkpoints" / "best.safetensors"
    assert same(begun(last, TINY[0]), load_run(trained.path).model.state_dict())
    assert same(begun(best, TINY[0]), trained.best())
    result = train(f"model.weights={last}", "name=other", "recipe.max_steps=1", *SMALL)
    assert result.status == 0, result.err
    assert f"initial weights: 29 parameters of {last}, and its head\n" in result.out
    assert str(last) in Run("outputs/other").summary["initial_weights"]


def tiny_state(**changes: Tensor | None) -> State:
    """The default model's state with parameters replaced, or removed if None; `__` is a dot."""
    state = initial_model(*TINY).state_dict()
    for name, value in changes.items():
        state.pop(name.replace("__", "."), None)
        if value is not None:
            state[name.replace("__", ".")] = value
    return state


class Intruder:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


QUERY = {"classifier.blocks.0.self_attn.query.weight": torch.ones(16, 16)}
TWICE = {"classifier.norm.bias": torch.ones(16), "norm.bias": torch.ones(16)}
REFUSED = {  # what is in the file, part of the line
    "missing": (lambda: tiny_state(norm__bias=None), "norm.bias"),
    "extra": (lambda: tiny_state(typo=torch.ones(1)), "typo"),
    "shape": (lambda: tiny_state(norm__bias=torch.ones(3)), "norm.bias"),
    "integers": (lambda: tiny_state(norm__bias=torch.ones(16).long()), "int64"),
    "head without bias": (lambda: tiny_state(head__bias=None), "head.bias"),
    "another model": (lambda: initial_model(*VIT).state_dict(), "cls_token"),
    "nothing": (dict, "pos_embed"),
    "list": (lambda: [1, 2], "list"),
    "settings": (lambda: {"lr": 1, 2: 3}, "lr"),
    "query without key": (lambda: tiny_state() | QUERY, "query"),
    "one twice": (lambda: tiny_state() | TWICE, "norm.bias"),
    "code": (
        lambda: {"state_dict": tiny_state(), "args": argparse.Namespace(lr=Intruder())},
        "mkdir",
    ),
    "objects of numpy": (
        lambda: {"state_dict": tiny_state(), "accs": np.array([Intruder()], object)},
        "_reconstruct",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED, "text", "empty", "no file", "folder"])
def test_weights_that_do_not_fit_are_refused_in_one_line(here: Path, case: str):
    content, part = REFUSED.get(case, (None, "model.weights=x.pth"))
    if content is not None:
        torch.save(content(), "x.pth")
    elif case != "no file":
        Path("x.pth").mkdir() if case == "folder" else Path("x.pth").write_text(
            "hi" * (case == "text")
        )
    before = snapshot()
    result = train("model.weights=x.pth", *SMALL)
    assert (result.status, len(result.lines)) == (2, 1), result
    assert "model.weights=x.pth" in result.err
    assert part in result.err
    assert snapshot() == before, "code of the file was executed, or something written"


def test_numbers_of_numpy_beside_weights_are_told_as_plain_ones(here: Path):
    torch.save({"model": tiny_state(), "epoch": np.int64(3), "step": np.float64(9)}, "x.pt")
    words = ("dataset=digits", "dataset.eval_limit=10", "device=cpu")
    result = evaluate("checkpoint=x.pt", "model.embed_dim=16", *words)
    assert result.status == 0, result.err
    (file,) = Path("outputs/evaluations").glob("*.json")
    found = json.loads(file.read_text())
    assert (found["epoch"], found["step"]) == (3, 9)


def test_an_exported_vit_is_loaded_by_timm(here: Path):
    donor = initial_model(*VIT).eval()
    torch.save({"model": donor.state_dict()}, "x.pt")
    result = evaluate("checkpoint=x.pt", *VIT[:2], "export=vit.safetensors")
    assert result.status == 0, result.err
    settings: dict[str, Any] = {"img_size": 32, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", checkpoint_path="vit.safetensors", **settings)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), donor(images))


def test_export_of_a_run_writes_its_weights_once(trained: Run, here: Path):
    words = [f"run={trained.path}", "weights=best", "export=best.safetensors"]
    assert evaluate(*words).status == 0
    assert same(load_file("best.safetensors"), trained.best())
    before = snapshot()
    result = evaluate(*words)
    assert (result.status, len(result.lines)) == (2, 1)
    assert "best.safetensors" in result.err
    assert snapshot() == before


def test_published_checkpoints_are_evaluated_and_missing_ones_named(here: Path):
    """On digits, which have the 10 classes of CIFAR-10."""
    Path("files").mkdir()
    state = published_state("cct", "cct_cifar10_HTM")
    torch.save(as_published_cct(state), "files/cct_cifar10_HTM.pth.tar")
    Path("files/cct_cifar10_VTM.pth").write_bytes(b"unread")
    Path("files/notes.txt").write_text("of no model")
    words = ["dataset=digits", "dataset.eval_limit=10", "device=cpu"]
    result = script("check_published", "files", *words)
    assert result.status == 1, result.err  # one is not readable
    lines = dict(line.split(": ", 1) for line in result.out.splitlines())
    assert len(lines) == 9
    assert "printed 97.57 %" in lines["cct_cifar10_HTM"]
    assert "10.00 % (-87.57)" in lines["cct_cifar10_HTM"]
    assert "cct_cifar10_VTM.pth: not readable" in lines["cct_cifar10_VTM"]
    assert lines["vit_imagenet_HVTM"].endswith("printed 82.32 %: no such file")
    result = script("check_published", str(here))
    assert (result.status, len(result.lines)) == (2, 1)
    assert "cct_cifar10_HTM.*" in result.err
