"""Weight files of ours and of other programs: what a run begins with, evaluates, exports."""

import argparse
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from tests.conftest import slow
from tests.programs import (
    SMALL,
    Overrides,
    Run,
    assert_refused,
    assert_succeeded,
    evaluate,
    initial_model,
    load_run,
    overrides_of,
    snapshot,
    train,
    trained,
)
from tests.reproduction.recorded import FIXTURES, Recorded

State = dict[str, Tensor]
PUBLISHED = yaml.safe_load((FIXTURES / "published_names.yaml").read_text())
VIT = ("model=vit_tiny_patch16_224", "model.image_size=32", "augmentation=[]")
# The CCT that was recorded with the published code.
RECORDED_CCT = overrides_of("""
    model=cct_2_3x2 model.embed_dim=32 model.depth=4 model.mlp_ratio=2
    model.positional_embedding=learnable augmentation=[]
""")
TINY = ("model.embed_dim=16", "augmentation=[]")


same = partial(assert_close, atol=0, rtol=0)  # states, entry by entry


def begun(path: Path, *overrides: Overrides, classes: int = 10) -> State:
    """The weights of a run that begins with those of a file."""
    return initial_model(overrides, f"model.weights={path}", classes=classes).state_dict()


def as_published_cct(state: State) -> dict[str, Any]:
    """Wraps a state as the published training script of CCT does."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    args = argparse.Namespace(lr=6e-4, mean=[0.5, 0.5, 0.5], amp=True, resume="", seed=None)
    return {
        "epoch": 299,
        "arch": "cct_7_3x1_32",
        "state_dict": OrderedDict(state),
        "args": args,
        "optimizer": optimizer.state_dict(),
        "amp_scaler": {"scale": 65536.0},
        "metric": 83.57,
    }


def groups_of(block: int, settings: dict[str, int]) -> list[str]:
    """The groups of parameters of a block of a published file."""
    groups = ["block"]
    if block == settings.get("vtm"):
        groups.append("separate")
    else:
        groups.append("fused")
    if block == settings.get("htm"):
        groups.append("scorenet")
    return groups


def published_shapes(kind: str, file: str) -> dict[str, list[Any]]:
    """The names and shapes of a published file; `classes` stands for their number."""
    facts = PUBLISHED[kind]
    shapes = dict(facts["once"])
    for block in range(facts["depth"]):
        for group in groups_of(block, facts["files"][file]):
            for name, shape in facts[group].items():
                shapes[name.format(block)] = shape
    return shapes


def published_state(kind: str, file: str) -> State:
    """Parameters of the names and shapes of a published file, which take no space on disk."""
    classes = PUBLISHED[kind]["files"][file]["classes"]
    value = torch.full((1,), 0.01)
    state = {}
    for name, shape in published_shapes(kind, file).items():
        sizes = [classes if size == "classes" else size for size in shape]
        state[name] = value.expand(sizes)
    return state


PUBLISHED_FILES = [(kind, file) for kind, facts in PUBLISHED.items() for file in facts["files"]]
PUBLISHED_MODELS = {"cct": "model=cct_7_3x1", "vit": "model=vit_base_patch16_224"}


@pytest.mark.parametrize(("kind", "file"), PUBLISHED_FILES)
def test_published_names_and_shapes_fit_the_models(here: Path, kind: str, file: str):
    torch.save(published_state(kind, file), here / "x.pth")
    classes = PUBLISHED[kind]["files"][file]["classes"]
    with torch.device("meta"):
        begun(here / "x.pth", PUBLISHED_MODELS[kind], "augmentation=[]", classes=classes)


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
    model = initial_model(RECORDED_CCT, f"model.weights={here / 'file.any'}").eval()
    expected = arrays.tensor("eval_logits")
    with torch.no_grad():
        difference = model(arrays.tensor("images")) - expected
    assert difference.abs().max() <= 1e-4 * expected.abs().max()


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


@pytest.mark.parametrize("container", CONTAINERS)
def test_state_dicts_are_found_in_all_common_containers(here: Path, container: str):
    """The suffix of a file does not matter."""
    state = initial_model(TINY).state_dict()
    torch.save(CONTAINERS[container](state), "weights.any")
    same(begun(here / "weights.any", TINY), state)


@pytest.mark.parametrize("overrides", [TINY, slow(VIT)], ids=str)
def test_a_head_for_other_classes_stays_new(here: Path, overrides: tuple[str, ...]):
    torch.manual_seed(0)
    donor = initial_model(overrides, classes=7).state_dict()
    torch.save(donor, here / "x.pth")
    same(begun(here / "x.pth", overrides, classes=7), donor)
    torch.manual_seed(5)
    other = begun(here / "x.pth", overrides, classes=3)
    torch.manual_seed(5)
    fresh = initial_model(overrides, classes=3).state_dict()
    head = {name: value for name, value in fresh.items() if name.startswith("head.")}
    same(other, donor | head)


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with HTM and VTM, whose last weights are not its best."""
    return trained("recipe.max_steps=5", SMALL, root=tmp_path_factory.mktemp("donor"))


def test_a_run_begins_with_the_weights_of_another(donor: Run, here: Path):
    """Of its checkpoint, which holds ScoreNet too, and of its best weights."""
    last = donor.checkpoints[0]
    best = donor.path / "checkpoints" / "best.safetensors"
    same(begun(last, "model.embed_dim=16"), load_run(donor.path).model.state_dict())
    same(begun(best, "model.embed_dim=16"), donor.best())
    result = train(f"model.weights={last}", "name=other", "recipe.max_steps=1", SMALL)
    assert_succeeded(result, f"initial weights: 29 parameters of {last}, and its head\n")
    assert str(last) in Run("outputs/other").summary["initial_weights"]


def tiny_state(**changes: Tensor | None) -> State:
    """The default model's state with parameters replaced, or removed if None; `__` is a dot."""
    state = initial_model(TINY).state_dict()
    for key, value in changes.items():
        name = key.replace("__", ".")
        state.pop(name, None)
        if value is not None:
            state[name] = value
    return state


class Intruder:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


QUERY = {"classifier.blocks.0.self_attn.query.weight": torch.ones(16, 16)}
REFUSED = {  # what is in the file, part of the line
    "missing": (lambda: tiny_state(norm__bias=None), "norm.bias"),
    "extra": (lambda: tiny_state(typo=torch.ones(1)), "typo"),
    "shape": (lambda: tiny_state(norm__bias=torch.ones(3)), "norm.bias"),
    "integers": (lambda: tiny_state(norm__bias=torch.ones(16).long()), "norm.bias"),
    "head without bias": (lambda: tiny_state(head__bias=None), "head.bias"),
    "another model": (lambda: initial_model(VIT).state_dict(), "cls_token"),
    "nothing": (dict, "pos_embed"),
    "list": (lambda: [1, 2], "list"),
    "settings": (lambda: {"lr": 1, 2: 3}, "lr"),
    "query without key": (lambda: tiny_state() | QUERY, "query"),
    "code": (
        lambda: {"state_dict": tiny_state(), "args": argparse.Namespace(lr=Intruder())},
        "Weights only load failed",
    ),
    "objects of numpy": (
        lambda: {"state_dict": tiny_state(), "accs": np.array([Intruder()], object)},
        "Weights only load failed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_do_not_fit_are_refused_in_one_line(here: Path, case: str):
    content, part = REFUSED[case]
    torch.save(content(), "x.pth")
    before = snapshot()
    assert_refused(train("model.weights=x.pth", SMALL), "model.weights=x.pth", part)
    assert snapshot() == before, "code of the file was executed, or something written"


NO_STATE: dict[str, Callable[[Path], object]] = {  # what stands at x.pth
    "text": lambda path: path.write_text("hi"),
    "empty": lambda path: path.touch(),
    "folder": lambda path: path.mkdir(),
    "no file": lambda path: None,
    "a bare pickle": lambda path: path.write_bytes(pickle.dumps(Intruder(), protocol=2)),
}


@pytest.mark.parametrize("kind", NO_STATE)
def test_what_is_no_file_of_weights_is_refused_in_one_line(here: Path, kind: str):
    NO_STATE[kind](here / "x.pth")
    before = snapshot()
    assert_refused(train("model.weights=x.pth", SMALL), "model.weights=x.pth")
    assert snapshot() == before, "code of the file was executed, or something written"


def test_an_exported_vit_is_loaded_by_timm(here: Path):
    donor = initial_model(VIT).eval()
    torch.save({"model": donor.state_dict()}, "x.pt")
    assert_succeeded(evaluate("checkpoint=x.pt", VIT[:2], "export=vit.safetensors"))
    settings: dict[str, Any] = {"img_size": 32, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", checkpoint_path="vit.safetensors", **settings)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), donor(images))


def test_export_of_a_run_writes_its_weights_once(donor: Run, here: Path):
    overrides = [f"run={donor.path}", "weights=best", "export=best.safetensors"]
    assert_succeeded(evaluate(overrides))
    same(load_file("best.safetensors"), donor.best())
    before = snapshot()
    assert_refused(evaluate(overrides), "best.safetensors")
    assert snapshot() == before
