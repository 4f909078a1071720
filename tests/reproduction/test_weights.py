"""Weight files of other programs are read, fitted to models, exported, or refused."""

import argparse
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

from reproduction.models.build import build_model, load_initial_weights
from reproduction.models.names import convert_names
from reproduction.models.weights import matching_state, read_file, read_weights
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError
from reproduction.training.checkpoint import save_last
from tests.conftest import small_cct, small_vit
from tests.reproduction.conftest import SMALL, Command, config_of
from tests.reproduction.recorded import FIXTURES, Recorded, recorded_cct
from tokenmixup import attach

pytestmark = pytest.mark.all_digits
PUBLISHED = yaml.safe_load((FIXTURES / "published_names.yaml").read_text())
PUBLISHED_FILES = [(kind, name) for kind in PUBLISHED for name in PUBLISHED[kind]["files"]]
VIT_BASE = "vit_base_patch16_224"
State = dict[str, Tensor]


def configured(*overrides: str, classes: int) -> nn.Module:
    config = config_of(*overrides).model
    model = build_model(config, classes)
    load_initial_weights(config, model)
    return model


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def as_published_cct(state: State) -> dict[str, Any]:
    """Wraps a state like the published CCT training script."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    return {
        "epoch": 299,
        "arch": "cct_7_3x1_32",
        "state_dict": OrderedDict(state),
        "optimizer": optimizer.state_dict(),
        "version": 2,
        "args": argparse.Namespace(lr=6e-4, mean=[0.5, 0.5, 0.5], amp=True, resume="", seed=None),
        "amp_scaler": {"scale": 65536.0, "growth_interval": 2000, "_growth_tracker": 0},
        "metric": 83.57,
    }


def published_shapes(kind: str, file: str) -> dict[str, list[int]]:
    """Returns the names and shapes of the parameters of a published file."""
    facts = PUBLISHED[kind]
    settings = facts["files"][file]
    shapes = dict(facts["once"])
    for block in range(facts["depth"]):
        groups = ["block", "separate" if block == settings.get("vtm") else "fused"]
        groups += ["scorenet"] * (block == settings.get("htm"))
        for group in groups:
            shapes |= {name.format(block): shape for name, shape in facts[group].items()}
    classes = settings["classes"]
    return {k: [classes if n == "classes" else n for n in shape] for k, shape in shapes.items()}


@pytest.mark.parametrize(("kind", "file"), PUBLISHED_FILES)
def test_published_names_and_shapes_fit_the_models(kind: str, file: str):
    classes = PUBLISHED[kind]["files"][file]["classes"]
    shapes = published_shapes(kind, file)
    with torch.device("meta"):
        model = configured(f"model={'cct_7_3x1' if kind == 'cct' else VIT_BASE}", classes=classes)
        state = convert_names({name: torch.empty(shape) for name, shape in shapes.items()})
    expected = model.state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected.items()}


def with_module_prefix(state: State) -> dict[str, Any]:
    return {"model": {f"module.{name}": value for name, value in state.items()}}


@pytest.mark.parametrize(
    ("recorded", "written"),
    [
        ("cct_base", dict),  # like the files of Compact-Transformers
        ("cct_base", with_module_prefix),
        ("cct_vtm", as_published_cct),
        ("cct_htm_then_vtm", as_published_cct),
        ("vit_htm_then_vtm", OrderedDict),
    ],
)
def test_published_weights_give_the_published_logits(tmp_path, recorded, written):
    arrays = Recorded(recorded)
    torch.save(written(arrays.under("state")), tmp_path / "file.any")
    model = arrays.build().eval()
    model.load_state_dict(matching_state(read_weights("checkpoint", tmp_path / "file.any"), model))
    with torch.no_grad():
        logits = model(arrays.tensor("images"))
    expected = arrays.tensor("eval_logits")
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_convert_names_maps_the_class_token_of_compact_transformers():
    state = {"classifier.class_emb": torch.ones(1, 1, 4), "classifier.fc.bias": torch.zeros(2)}
    assert list(convert_names(state)) == ["cls_token", "head.bias"]


ATTENTION, MLP = "MultiHeadDotProductAttention_1", "MlpBlock_3"
BLOCK = {  # names and shapes of the original ViT-Tiny's arrays
    **{f"{ATTENTION}/{x}/kernel": (192, 3, 64) for x in ("query", "key", "value")},
    **{f"{ATTENTION}/{x}/bias": (3, 64) for x in ("query", "key", "value")},
    f"{ATTENTION}/out/kernel": (3, 64, 192),
    f"{ATTENTION}/out/bias": (192,),
    **{f"LayerNorm_{i}/{x}": (192,) for i in (0, 2) for x in ("scale", "bias")},
    f"{MLP}/Dense_0/kernel": (192, 768),
    f"{MLP}/Dense_0/bias": (768,),
    f"{MLP}/Dense_1/kernel": (768, 192),
    f"{MLP}/Dense_1/bias": (192,),
}
ORIGINAL = {
    "cls": (1, 1, 192),
    "embedding/kernel": (16, 16, 3, 192),
    "embedding/bias": (192,),
    "Transformer/posembed_input/pos_embedding": (1, 5, 192),
    **{f"Transformer/encoderblock_{i}/{x}": BLOCK[x] for i in range(12) for x in BLOCK},
    **{f"Transformer/encoder_norm/{x}": (192,) for x in ("scale", "bias")},
    "head/kernel": (192, 7),
    "head/bias": (7,),
}


def test_arrays_of_the_original_vit_are_read_by_timm(tmp_path: Path):
    path, small = tmp_path / "ViT.npz", ["augmentation=[]", "model.image_size=32"]
    np.savez(path, **{name: np.ones(shape) for name, shape in ORIGINAL.items()})
    vit = ["model=vit_tiny_patch16_224", *small, f"model.weights={path}"]
    for classes, is_new in ((7, False), (3, True)):
        state = configured(*vit, classes=classes).state_dict()
        assert (state["head.weight"] == 1).all() != is_new
        assert all((x == 1).all() for name, x in state.items() if "head" not in name)
    with pytest.raises(UserError, match=rf"^model.weights={path}: RuntimeError: .* size"):
        configured(*vit, "model.architecture=vit_small_patch16_224", classes=7)
    with pytest.raises(UserError, match="no attribute 'load_pretrained'"):
        configured(f"model.weights={path}", classes=7)


def doubled(state: State) -> State:
    return {name: 2 * value for name, value in state.items()}


@pytest.mark.parametrize(
    "written",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"state_dict": doubled(state), "state_dict_ema": state},
        lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}},
        lambda state: {f"_orig_mod.module.{k}": v for k, v in state.items()},
        lambda state: {k: nn.Parameter(v) for k, v in state.items()},
    ],
    ids=["bare", "model", "state_dict", "ema", "ddp", "compiled", "parameters"],
)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_state_dicts_are_found_in_all_common_containers(tmp_path, written, legacy):
    donor = small_vit()
    path = tmp_path / "weights.safetensors"  # the suffix does not matter
    torch.save(written(donor.state_dict()), path, _use_new_zipfile_serialization=not legacy)
    weights = read_weights("checkpoint", path)
    assert same(matching_state(weights, donor), donor.state_dict())
    assert weights.classes is None


def test_safetensors_are_recognised_by_content(tmp_path):
    donor = small_vit()
    save_file(donor.state_dict(), tmp_path / "weights.bin", metadata={"format": "pt"})
    weights = read_weights("checkpoint", tmp_path / "weights.bin")
    assert same(matching_state(weights, donor), donor.state_dict())


def test_read_weights_of_a_training_state_gives_plain_model_and_classes(tmp_path):
    model = small_cct()
    module = attach(model, 5, htm={"layer": 1, "tau": 2.0, "rho": 0.1})
    assert any(name.startswith("scorenets.") for name in module.state_dict())
    save_last(tmp_path / "last.pt", {"module": module.state_dict(), "classes": list("abcde")})
    weights = read_weights("checkpoint", tmp_path / "last.pt")
    assert same(weights.state, model.state_dict())
    assert weights.classes == list("abcde")


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("cct_2_3x2", "head"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("vit_tiny_patch16_224", "head"), ("resnet18", "fc"))
        ),
    ],
)
def test_training_starts_from_a_file_and_keeps_a_new_head(tmp_path, model, head):
    small = [f"model={model}", "model.image_size=32", "augmentation=[]"]
    path = tmp_path / "weights.pth"
    donor = configured(*small, classes=7).state_dict()
    torch.save(donor, path)
    start = [*small, f"model.weights={path}"]
    assert same(configured(*start, classes=7).state_dict(), donor)
    torch.manual_seed(5)
    other = configured(*start, classes=3).state_dict()
    torch.manual_seed(5)
    fresh = configured(*small, classes=3).state_dict()
    for name, value in other.items():
        is_new = name.startswith(f"{head}.")
        assert torch.equal(value, (fresh if is_new else donor)[name]), name
    torch.save({k: v for k, v in donor.items() if k != f"{head}.bias"}, path)
    with pytest.raises(
        UserError, match=rf"model.weights={path}.* lacks parameters: 1 \({head}.bias\)$"
    ):
        configured(*start, classes=3)


def cct_state(**changes: Tensor | None) -> State:
    """Returns a small CCT's state with parameters replaced, or removed if None; `__` is a dot."""
    state = small_cct().state_dict()
    for name, value in changes.items():
        state.pop(name.replace("__", "."), None)
        if value is not None:
            state[name.replace("__", ".")] = value
    return state


def recorded_state(**changes: Tensor | None) -> State:
    """Returns a small CCT's state in published names, changed like `cct_state`."""
    arrays = np.load(FIXTURES / "cct_base.npz")
    state = {k.removeprefix("state/"): torch.from_numpy(arrays[k]) for k in arrays if "state" in k}
    for name, value in changes.items():
        if value is not None:
            state[name.replace("__", ".")] = value
        else:
            del state[name.replace("__", ".")]
    return state


QUERY = "classifier__blocks__0__self_attn__query__weight"
REFUSED_BY_SMALL_CCT = {
    "missing": (lambda: cct_state(norm__bias=None), r"lacks parameters: 1 \(norm.bias\)$"),
    "extra": (lambda: cct_state(typo=torch.ones(1)), r"has others: 1 \(typo\)$"),
    "shape": (
        lambda: cct_state(norm__bias=torch.ones(3)),
        r"1 of other shapes: norm.bias is \[3\], the model has \[32\]$",
    ),
    "integers": (
        lambda: cct_state(norm__bias=torch.ones(32, dtype=torch.int64)),
        r"norm.bias is \[32\] of torch.int64, the model has \[32\]$",
    ),
    "another model": (
        lambda: small_vit().state_dict(),
        r"lacks parameters: 3 \(token.*pool.bias\), has others: 7 \(cls_token.*, \.\.\.\)$",
    ),
    "nothing": (dict, r"lacks parameters: 52 \(pos_embed, tokenizer\S+, blocks\S+, \.\.\.\)$"),
    "list": (lambda: [1, 2], r"holds no state dict but list$"),
    "settings": (lambda: {"lr": 1, 2: 3}, r"these are not parameters: 2 \(lr, 2\)$"),
}
REFUSED_BY_RECORDED_CCT = {
    "published, missing": (
        lambda: recorded_state(classifier__norm__bias=None),
        r"lacks parameters: 1 \(norm.bias\)$",
    ),
    "published, query without key": (
        lambda: recorded_state(**{QUERY: torch.ones(32, 32)}),
        r"has others: 1 \(blocks.0.attn.query.weight\)$",
    ),
    "published, unknown part of a block": (
        lambda: recorded_state(classifier__blocks__0__small_h_mlp__weight=torch.ones(1)),
        r"has others: 1 \(classifier.blocks.0.small_h_mlp.weight\)$",
    ),
    "published, one twice": (
        lambda: recorded_state(head__bias=torch.ones(10)),
        r"two parameters map to head.bias",
    ),
}
REFUSED: list[Any] = [
    pytest.param(build, content, message, id=case)
    for build, cases in (
        (small_cct, REFUSED_BY_SMALL_CCT),
        (recorded_cct, REFUSED_BY_RECORDED_CCT),
    )
    for case, (content, message) in cases.items()
]


@pytest.mark.parametrize(("build", "content", "message"), REFUSED)
def test_weights_that_do_not_fit_are_refused(tmp_path, build, content, message):
    path = tmp_path / "x.pth"
    torch.save(content(), path)
    with pytest.raises(UserError, match=message) as refused:
        matching_state(read_weights("checkpoint", path), build())
    assert str(refused.value).startswith(f"checkpoint={path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"accuracy: 98", "not readable: ValueError: neither safetensors nor torch.save$"),
        (b"", "neither safetensors"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "notes.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_weights("checkpoint", path)


def test_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        read_weights("checkpoint", tmp_path)


class Intruder:
    """Creates a folder when unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_read_weights_executes_nothing(tmp_path: Path):
    made, path = tmp_path / "made", tmp_path / "x.pth"
    torch.save({"state_dict": cct_state(), "args": argparse.Namespace(lr=Intruder(made))}, path)
    with pytest.raises(UserError, match=r"not readable: it names \w+\.mkdir, which is not"):
        read_weights("checkpoint", path)
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.is_dir(), "the file is not dangerous"


def test_numpy_scalars_beside_the_tensors_are_read(tmp_path: Path):
    path, state = tmp_path / "x.pth", cct_state()
    best = {"best_acc": np.float64(3), "epoch": np.int64(7), "is_best": np.bool_(True)}
    torch.save({"state_dict": state, **best, "half": np.float16(0.5)}, path)
    assert same(read_weights("checkpoint", path).state, state)
    assert read_file("checkpoint", path)["best_acc"] == 3


def cct_file(path: Path, classes: int) -> Path:
    """Writes the default model in published names, with split qkv in the last block."""
    model = configured(classes=classes)
    names = {
        "norm1": "pre_norm",
        "norm2": "norm1",
        "attn": "self_attn",
        "pos_embed": "positional_emb",
    }
    state: State = {}
    for name, value in model.state_dict().items():
        parts = name.replace("mlp.fc", "linear").replace("head.", "fc.").split(".")
        new = ".".join(names.get(part, part) for part in parts)
        new = new if new.startswith("tokenizer.") else f"classifier.{new}"
        if "blocks.1." in new and "qkv" in new:
            thirds = dict(zip(("query", "key", "value"), value.chunk(3), strict=True))
            state |= {new.replace("qkv", k): third for k, third in thirds.items()}
        else:
            state[new] = value
    torch.save(as_published_cct(state), path)
    return path


def test_eval_accepts_published_files_with_the_classes_of_the_data(
    command: Command, tmp_path: Path
):
    result = command("eval", f"checkpoint={cct_file(tmp_path / 'ten.pth.tar', 10)}", "device=cpu")
    assert result.status == 0, result.err
    assert "on 360 images of digits" in result.out
    result = command("eval", f"checkpoint={cct_file(tmp_path / 'hundred.pth.tar', 100)}")
    assert result.status == 2
    assert "head.weight is [100, 128], the model has [10, 128]" in result.err
    assert len(result.lines) == 1


def test_initial_weights_are_checked_before_the_first_run(command: Command, tmp_path: Path):
    file = cct_file(tmp_path / "x.pth.tar", 100)
    result = command("train", "-m", f"model.weights={file}", "model.depth=2,3", *SMALL)
    assert result.status == 2
    assert f"model.weights={file}: does not fit the model" in result.err
    assert len(result.lines) == 1
    assert not (tmp_path / "outputs").exists()
    small = [x for x in SMALL if "embed_dim" not in x]
    other = command("train", f"model.weights={file}", "name=started", *small)
    assert other.status == 0, other.err
    loaded = f"29 parameters of {file}, but a new head for 10 classes"
    assert f"initial weights: {loaded}\n" in other.out
    run = RunFolder(tmp_path / "outputs" / "started")
    assert run.read_summary()["initial_weights"] == loaded
    assert f"| initial weights | {loaded} |" in run.report_path.read_text()


def test_exported_vit_is_loaded_by_timm(command: Command, tmp_path: Path):
    vit = ["model=vit_tiny_patch16_224", "model.image_size=32"]
    donor = configured(*vit, classes=10).eval()
    module = attach(donor, 10, vtm={"layer": 1, "kappa": 1})
    torch.save({"module": module.state_dict()}, tmp_path / "x.pt")
    result = command("export", "checkpoint=x.pt", *vit, "output=files/vit.safetensors")
    assert result.status == 0, result.err
    file = tmp_path / "files" / "vit.safetensors"
    settings: dict[str, Any] = {"img_size": 32, "num_classes": 10}
    name = "vit_tiny_patch16_224"
    plain = timm.create_model(name, checkpoint_path=str(file), **settings)
    overlaid = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file), "num_classes": 10},
        **settings,
    )
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(images), donor(images))
        assert torch.equal(overlaid.eval()(images), donor(images))


@pytest.mark.parametrize(
    ("package", "architecture"),
    [("timm", "test_resnet"), ("timm", "test_convnext"), ("torchvision", "squeezenet1_1")],
    ids=["fc", "head.fc", "a convolution"],
)
def test_models_with_any_head_name_are_exported(
    command: Command, tmp_path: Path, package: str, architecture: str
):
    line = ["model=resnet18", f"model.package={package}", f"model.architecture={architecture}"]
    donor = configured(*line, "augmentation=[]", classes=7)
    torch.save(donor.state_dict(), tmp_path / "x.pt")
    result = command("export", "checkpoint=x.pt", *line, "output=x.safetensors")
    assert result.status == 0, result.err
    assert same(load_file(tmp_path / "x.safetensors"), donor.state_dict())


def test_export_of_a_run_needs_no_data_and_does_not_overwrite(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    config = tmp_path / "outputs/mine/config.yaml"
    saved = yaml.safe_load(config.read_text())
    saved["dataset"] |= {"name": "imagenet1k", "root": "elsewhere"}
    config.write_text(yaml.safe_dump(saved))
    for which, output in (("last", "a.safetensors"), ("best", "b.safetensors")):
        result = command("export", "run=outputs/mine", f"weights={which}", f"output={output}")
        assert result.status == 0, result.err
    best = load_file(tmp_path / "outputs/mine/checkpoints/best.safetensors")
    assert same(load_file(tmp_path / "b.safetensors"), best)
    results = set()
    for name in ("outputs/mine/checkpoints/last.pt", "a.safetensors"):
        result = command("eval", f"checkpoint={name}", "model.embed_dim=16", "device=cpu")
        after = " (step 6, 2 completed epochs)" if name.endswith("last.pt") else ""
        assert result.out.startswith(f"{name}{after}: top-1 "), result.err
        results.add(result.out.splitlines()[0].partition(": ")[2])
    assert len(results) == 1
    before = (tmp_path / "a.safetensors").read_bytes()
    result = command("export", "run=outputs/mine", "weights=best", "output=a.safetensors")
    assert (result.status, len(result.lines)) == (2, 1)
    assert "output=a.safetensors: already exists" in result.err
    assert (tmp_path / "a.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("checkpoint=x.pth", "output=None: must be a file ending in .safetensors"),
        ("checkpoint=x.pth output=y.pth", "output=y.pth: must be a file ending in .safetensors"),
        ("checkpoint=x.pth output=/dev/null/y.safetensors", "not a writable folder"),
        ("checkpoint=x.pth output=y.safetensors dataset=digits", "dataset=digits: not allowed"),
        ("checkpoint=x.pth output=y.safetensors model=cct_7_3x1", "does not fit the model"),
        ("output=y.safetensors", "set exactly one of them, a run folder or a file"),
    ],
)
def test_export_refuses_invalid_arguments_in_one_line(
    command: Command, tmp_path: Path, line: str, part: str
):
    torch.save(cct_state(), tmp_path / "x.pth")
    result = command("export", *line.split())
    assert (result.status, len(result.lines)) == (2, 1), result
    assert part in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["x.pth"]
