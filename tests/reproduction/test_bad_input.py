"""What a user may mistype: one line that names it, status 2, no traceback, nothing on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from reproduction import cli
from reproduction import compose as composing
from reproduction.compose import compose
from reproduction.config import CONF_DIR
from reproduction.data.sources import _open
from reproduction.models.build import build_model
from reproduction.parse import parse
from tests.reproduction.conftest import SMALL, Command, write_images

# command line -> what its one line must contain
MISTYPED = {
    "recipe.epochs=0": ["recipe.epochs=0", "greater than or equal to 1"],
    "recipe.epochs=ten": ["recipe.epochs=ten", "valid integer"],
    "recipe.epochs=2.5": ["recipe.epochs=2.5", "valid integer"],
    "recipe.lr=-1e-3": ["recipe.lr=-0.001", "greater than 0"],
    "recipe.lr=nan": ["recipe.lr=nan", "finite"],
    "recipe.batch_size=0": ["recipe.batch_size=0", "greater than or equal to 1"],
    "recipe.ema_decay=1": ["recipe.ema_decay=1", "less than 1"],
    "recipe.grad_accum_steps=0": ["recipe.grad_accum_steps=0", "greater than or equal to 1"],
    "recipe.grad_accum_steps=6 dataset.limit=55 recipe.batch_size=10 devices=2": [
        "recipe.grad_accum_steps=6",
        "leave 4 images to a rank, allowed is 1..4",
    ],
    "model=resnet18 augmentation=[] recipe.batch_size=6 recipe.grad_accum_steps=4": [
        "recipe.batch_size=6",
        "one image",
    ],
    "recipe.batch_size=64 devices=3": ["recipe.batch_size=64", "devices=3"],
    "devices=0": ["devices=0", "greater than or equal to 1"],
    "device=tpu": ["device=tpu", "'auto', 'cpu' or 'cuda'"],
    "seed=true": ["seed=True", "integer"],
    "seed=-1": ["seed=-1", "greater than or equal to 0"],
    "recipe.precision=fp16": ["recipe.precision=fp16", "'float16'"],
    "recipe.warmup_epochs=99": ["recipe.warmup_epochs=99", "recipe.epochs="],
    "recipe.lrr=1": ["recipe.lrr", "unknown key", "lr,"],
    "+recipe.lrr=1": ["recipe.lrr=1", "unknown key", "lr,"],
    "typo=1": ["typo", "unknown key", "recipe"],
    "+typo=1": ["typo=1", "unknown key", "recipe"],
    "model=cct7": ["model=cct7", "no such option", "cct_7_3x1"],
    "augmentation=[mixup,cutout]": [
        "augmentation=cutout",
        "cutmix, htm, manifold_mixup, mixup, vtm",
    ],
    "augmentation.htm.detector=salient": ["augmentation.htm.detector=salient", "attention"],
    "augmentation.htm.ablate=all": ["augmentation.htm.ablate=all", "labels"],
    "augmentation.htm.mask_rule=own": ["augmentation.htm.mask_rule=own", "published"],
    "augmentation.htm.order=front": ["augmentation.htm.order=front", "in_place"],
    "augmentation.vtm.class_token_offset=published": ["pools no class token", "allowed is paper"],
    "augmentation.htm.rollout_steps=-1": ["augmentation.htm.rollout_steps=-1"],
    "augmentation.htm.rollout_steps=1": ["rollout_steps=1", "0 blocks after htm.layer=1"],
    "augmentation.htm.layer=0 augmentation.htm.rollout_steps=1 augmentation.htm.detector=random": [
        "augmentation.htm.rollout_steps=1",
        "detector=random",
    ],
    "augmentation=[manifold_mixup]": ["manifold_mixup.layers=[0, 1, 2]", "has 0..1"],
    "augmentation=[manifold_mixup] augmentation.manifold_mixup.layers=[]": ["layers=[]"],
    "augmentation=[manifold_mixup] augmentation.manifold_mixup.layers=[1,1]": ["layers=[1, 1]"],
    "augmentation=[manifold_mixup] augmentation.manifold_mixup.alpha=0": ["alpha=0"],
    "experiment=table9": ["experiment=table9", "no such option"],
    "augmentation.htm.tau=-0.5": ["augmentation.htm.tau=-0.5", "greater than or equal to 0"],
    "augmentation.htm.tau=nan": ["augmentation.htm.tau=nan", "greater than or equal to 0"],
    "augmentation.htm.rho=1.5": ["augmentation.htm.rho=1.5", "0..1", "inf"],
    "augmentation.htm.rho=nan": ["augmentation.htm.rho=nan", "0..1"],
    "augmentation.htm.layer=2": ["augmentation.htm.layer=2", "0..1"],
    "augmentation.vtm.layer=0": ["augmentation.vtm.layer=0", "greater than or equal to 1"],
    "augmentation.vtm.kappa=0": ["augmentation.vtm.kappa=0", "greater than or equal to 1"],
    "augmentation.vtm.kappa=65": ["augmentation.vtm.kappa=65", "1..64"],
    "augmentation.htm.pooling=class_token": ["pooling=class_token", "auto, attention or average"],
    "augmentation=[mixup] augmentation.htm.tau=1": ["augmentation.htm", "does not name htm"],
    "augmentation=[mixup] +augmentation.htm.tau=1": ["augmentation.htm", "does not name htm"],
    "augmentation=[] augmentation.vtm.kappa=3": ["augmentation.vtm", "does not name vtm"],
    "augmentation=[[htm]]": ["augmentation=[[htm]]"],
    "augmentation.htm=null": ["augmentation.htm", "leave it out"],
    "~augmentation.htm": ["augmentation.htm", "the stack names it"],
    "--config-name=eval": ["--config-name", "not available"],
    "-m recipe.batch_size=20,1 devices=2": ["recipe.batch_size=1", "devices=2"],
    "-m dataset.limit=60,5000": ["dataset.limit=5000", "1437"],
    "-m model=vit_tiny_patch16_224 model.depth=12,5": ["model.depth=5", "12 blocks"],
    "model=vit_tiny_patch16_224 model.architecture=xcit_nano_12_p16_224": [
        "model=vit_tiny_patch16_224",
        "block 0 is XCABlock",
    ],
    "model=vit_tiny_patch16_224 model.architecture=resnet18": ["model.architecture=resnet18"],
    "dataset.limit=3 devices=4": ["devices=4", "3 training images"],
    "output_root=/dev/null": ["output_root=/dev/null", "writable"],
    "recipe.transforms.scale=[2,3]": ["recipe.transforms.scale=[2.0, 3.0]"],
    "recipe.transforms.scale=[1.0,0.5]": ["recipe.transforms.scale=[1.0, 0.5]"],
    "recipe.transforms.auto_augment=rand-m9-mstd0.5.5": ["auto_augment=rand-m9-mstd0.5.5"],
    "logger=wandb logger.mode=online": ["logger.mode=online", "offline"],
    "recipe.lr": ["recipe.lr", "key=value"],
    "recipe.lr=[1,2": ["recipe.lr=[1,2", "key=value"],
    "=3": ["=3"],
    "seed=0,1": ["seed=0,1", "--multirun"],
    "--sweep": ["--sweep", "--help"],
    "-m augmentation.htm.tau=0.5,1,-1": ["augmentation.htm.tau=-1"],
    "-m name=x seed=0,1": ["name=x", "2 points"],
    "-m --cfg job": ["--multirun", "without --cfg"],
    "name=a/b": ["name=a/b", "plain folder name"],
    "name=..": ["name=..", "leading dot"],
    "model.name=../x": ["model.name=../x", "plain folder name"],
    "hydra.run.dir=/tmp/x": ["hydra.run.dir", "launcher and sweeper"],
    "-m seed=0,0": ["2 points of the sweep are this one run"],
    "-m seed=glob(*)": ["seed=glob(*)", "no points"],
    "dataset=image_folder": ["dataset.root=null", "image_folder"],
    "dataset=image_folder dataset.root=nowhere": ["dataset.root=nowhere", "train/<class>/"],
    "dataset=imagenet1k": ["dataset.root=data/imagenet", "train/<class>/"],
    "dataset.root=data": ["dataset.root=data", "digits needs no folder"],
    "dataset.mean=0.5": ["dataset.mean=0.5", "list"],
    "dataset.std=[0,1,1]": ["dataset.std.0=0", "greater than"],
    "dataset.limit=2000": ["dataset.limit=2000", "1437"],
    "logger.mode=offline": ["logger.mode", "unknown key"],
    "logger=wandb logger.mode=sometimes": ["logger.mode=sometimes", "'offline'"],
    "recipe.transforms.auto_augment=rand": ["auto_augment=rand", "rand-m9-mstd0.5-inc1"],
    "model=vit_tiny_patch16_224 model.image_size=225": ["model.image_size=225", "16"],
    "model=vit_tiny_patch16_224 model.weights=no.pth": ["model.weights=no.pth", "no such file"],
    "recipe.lr=${nope}": ["nope"],
    "model=resnet18": ["augmentation=[htm,vtm]", "resnet18", "augmentation=[mixup,cutmix]"],
    "model=resnet18 augmentation=[mixup,vtm] augmentation.vtm.layer=1": [
        "augmentation=[mixup,vtm]"
    ],
    "experiment=table1/cifar100_htm model=wrn_40_4": ["[mixup,cutmix,htm]", "wrn_40_4"],
    "-m model=cct_2_3x2,regnety_040": ["regnety_040"],
    "model=resnet18 augmentation=[] compile=true": ["compile=true", "cct or vit"],
    "compile=yes": ["compile=yes", "boolean"],
    "model=resnet18 augmentation=[] model.htm_layer=2": ["model.htm_layer", "unknown key"],
    "model=resnet18 augmentation=[] model.architecture=res": ["model.architecture=res", "timm"],
    "model=resnet18 augmentation=[] +model.options.depth=3": ["model.options=", "'depth'"],
    "model=resnet18 augmentation=[] +model.options.drop_rate=null": [
        "model.options.drop_rate=null"
    ],
    "model=resnet18 augmentation=[] +model.options.pretrained=true": [
        "model.options=",
        "pretrained",
    ],
    "model=resnet18 augmentation=[] +model.options.features_only=true": [
        "one logit for each class"
    ],
    "model=resnet18 augmentation=[] model.package=keras": ["model.package=keras", "'torchvision'"],
    "model=mobilenetv2_200 augmentation=[] model.stem=cifar": ["model.stem=cifar", "imagenet"],
    "model=densenet264 augmentation=[] model.image_size=8": ["model.image_size=8"],
    "model=resnet18 augmentation=[] recipe.batch_size=1": ["recipe.batch_size=1", "one image"],
    "model=cvt_6_4 model.image_size=30": ["model.image_size=30", "multiple of 4"],
    "model.patch_size=4": ["model.conv_layers=2", "model.patch_size=4"],
    "model.conv_layers=null": ["model.conv_layers=None"],
    "~seed": ["seed", "no value"],
}


def assert_refused(ended, tmp_path: Path, parts: list[str], script: str = "train") -> None:
    assert ended.status == 2, ended
    assert len(ended.lines) == 1, ended.err
    assert ended.err.startswith(f"{script}.py: ")
    for part in parts:
        assert part in ended.err
    assert [path for path in tmp_path.rglob("*") if path != tmp_path / "outputs"] == []


@pytest.mark.parametrize("line", MISTYPED)
def test_train_refuses_in_one_line(
    command: Command, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/nonexistent")  # nobody's wandb credentials
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert_refused(command("train", *line.split()), tmp_path, MISTYPED[line])


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has a GPU")
def test_train_refuses_a_gpu_that_is_not_there(command: Command, tmp_path: Path):
    assert_refused(command("train", "device=cuda"), tmp_path, ["device=cuda", "cpu or auto"])


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["run=None", "checkpoint=None"]),
        ("run=nowhere", ["nowhere", "config.yaml"]),
        ("checkpoint=no.pt", ["checkpoint=no.pt", "no such file"]),
        ("run=a checkpoint=b", ["run=a", "checkpoint=b"]),
        ("run=nowhere weights=first", ["weights=first", "last or best"]),
        ("run=nowhere recipe.lr=1", ["recipe.lr=1", "does not belong"]),
        ("checkpoint=no.pt augmentation=[htm]", ["augmentation=[htm]", "does not belong"]),
    ],
)
def test_eval_refuses_in_one_line(command: Command, tmp_path: Path, line: str, parts: list[str]):
    assert_refused(command("eval", *line.split()), tmp_path, parts, "eval")


def test_an_experiment_file_cannot_turn_on_what_its_stack_does_not_name(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even with all settings of the augmentation."""
    conf = tmp_path / "conf"
    for path in CONF_DIR.rglob("*.yaml"):
        copied = conf / path.relative_to(CONF_DIR)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(path.read_text())
    htm = yaml.safe_load((CONF_DIR / "augmentation" / "htm.yaml").read_text())
    experiment = {"defaults": [{"override /augmentation": ["mixup"]}], "augmentation": htm}
    text = "# @package _global_\n" + yaml.safe_dump(experiment, sort_keys=False)
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "sly.yaml").write_text(text)
    monkeypatch.setattr(cli, "CONF_DIR", conf)
    monkeypatch.setattr(composing, "CONF_DIR", conf)
    ended = command("train", "experiment=sly")
    assert ended.status == 2
    assert "augmentation=[mixup] does not name htm" in ended.err
    assert not (tmp_path / "outputs").exists()


def test_image_folder_refuses_classes_that_differ(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=1, held_out=1)
    (root / "val" / "dog").rename(root / "val" / "dogs")
    ended = command("train", "dataset=image_folder", f"dataset.root={root}")
    assert ended.status == 2
    assert "same classes, 'dog'" in ended.err
    assert not (tmp_path / "outputs").exists()


def test_imagenet1k_refuses_other_folders(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", ["n1", "n2"], train=1, held_out=1)
    ended = command("train", "dataset=imagenet1k", f"dataset.root={root}")
    assert ended.status == 2
    assert "1000 classes, found 2" in ended.err


def test_a_taken_folder_is_refused_or_continued(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    before = (tmp_path / "outputs/mine/summary.json").read_text()
    again = command("train", "name=mine", *SMALL)
    assert again.status == 2
    assert "resume=auto" in again.err and "another name" in again.err
    other = command("train", "name=mine", "resume=auto", "seed=5", *SMALL)
    assert other.status == 2
    assert "seed=5 (there 0)" in other.err
    same = command("train", "name=mine", "resume=auto", "dataset.workers=1", *SMALL)
    assert same.status == 0
    assert "mine: top-1" in same.out
    assert (tmp_path / "outputs/mine/summary.json").read_text() == before


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    file = tmp_path / "outputs/mine/checkpoints/last.pt"
    wide = command("eval", f"checkpoint={file}", "model.embed_dim=32")
    assert wide.status == 2
    assert "the model has" in wide.err
    deep = command("eval", f"checkpoint={file}", "model.embed_dim=16", "model.depth=3")
    assert deep.status == 2
    assert "blocks.2" in deep.err
    file.write_bytes(file.read_bytes()[:1000])
    cut = command("eval", f"checkpoint={file}")
    assert cut.status == 2
    assert "not readable" in cut.err
    assert len(cut.lines) == 1


def test_other_classes_are_refused(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=4, held_out=2)
    small = [x for x in SMALL if "limit" not in x]
    data = ["dataset=image_folder", f"dataset.root={root}", "dataset.workers=0"]
    assert command("train", "name=mine", *data, *small).status == 0
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "elk")
    for which in (["run=outputs/mine"], ["run=outputs/mine", "weights=best"]):
        _open.cache_clear()
        ended = command("eval", *which)
        assert ended.status == 2
        assert "cat, dog" in ended.err and "dog, elk" in ended.err


def test_evaluation_does_not_need_the_weights_that_training_started_from(
    command: Command, tmp_path: Path
):
    vit = ["model=vit_tiny_patch16_224", "model.image_size=32", "dataset.limit=8", "device=cpu"]
    start = tmp_path / "start.pth"
    config = parse(compose("train", vit).raw)
    torch.save(build_model(config.model, 10).state_dict(), start)
    args = [*vit, f"model.weights={start}", "recipe.epochs=1", "recipe.batch_size=8"]
    assert command("train", "name=mine", *args).status == 0
    start.unlink()
    assert command("eval", "run=outputs/mine").status == 0


def test_ranks_of_something_else_are_none_of_ours(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "1")  # as a cluster may leave it, without torchrun
    assert command("train", "name=mine", *SMALL).status == 0
    again = command("train", "name=mine", "seed=7", *SMALL)
    assert again.status == 2
    assert "resume=auto" in again.err


def test_a_run_killed_before_its_configuration_was_written_can_begin_again(
    command: Command, tmp_path: Path
):
    (tmp_path / "outputs/mine/checkpoints").mkdir(parents=True)
    assert command("train", "name=mine", *SMALL).status == 2
    assert command("train", "name=mine", "resume=auto", *SMALL).status == 0
    (tmp_path / "outputs/other").mkdir()
    (tmp_path / "outputs/other/thesis.txt").write_text("not ours")
    refused = command("train", "name=other", "resume=auto", *SMALL)
    assert refused.status == 2
    assert "is no run folder" in refused.err


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(command: Command, tmp_path: Path, workers: int):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=4, held_out=2)
    broken = root / "val" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    small = [x for x in SMALL if "limit" not in x]
    data = ["dataset=image_folder", f"dataset.root={root}", f"dataset.workers={workers}"]
    held = command("train", "name=mine", *data, *small)
    assert (held.status, len(held.lines)) == (2, 1)
    assert f"{broken}: no readable image" in held.err
    assert not list((tmp_path / "outputs").iterdir())
    ended = command("train", "name=mine", "dataset.memory_mib=0", *data, *small)
    assert ended.status == 1
    assert f"{broken}: no readable image" in ended.lines[-1]


def test_images_of_more_than_8_bits_are_refused_rather_than_clipped(
    command: Command, tmp_path: Path
):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=2, held_out=2)
    for path in (root / "train").rglob("*.png"):
        Image.fromarray(np.full((8, 8), 3000, dtype=np.uint16)).save(path)
    ended = command("train", "dataset=image_folder", f"dataset.root={root}", "dataset.workers=0")
    assert ended.status == 2
    assert "convert them to 8 bits" in ended.err and ".png" in ended.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"PK"])
def test_files_that_are_no_checkpoints_are_refused(
    command: Command, tmp_path: Path, content: bytes
):
    for name in ("x.pt", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        ended = command("eval", f"checkpoint={name}")
        assert ended.status == 2, ended.err
        assert f"checkpoint={name}: not readable" in ended.err
        assert len(ended.lines) == 1
