"""TokenMixupTask in a loop with the calls of timm's train.py."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2
from timm.task import resume_task_checkpoint
from timm.utils import CheckpointSaver
from torch import Tensor, nn

from tests.conftest import CLASSES
from tokenmixup import TokenMixupTask, attach, training_loss

SETTINGS: dict[str, Any] = {"htm": {"layer": 1, "tau": 9.0, "rho": 0.0}, "vtm": {"layer": 2}}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=3,
        num_heads=3,
        num_classes=CLASSES,
    )


def a_task(**options: Any) -> Any:
    return TokenMixupTask(attach(plain_model(), CLASSES, **SETTINGS), verbose=False, **options)


def a_batch(b: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(b, 3, 32, 32, generator=generator), torch.arange(b) % CLASSES


@pytest.fixture
def one_rank(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_task_returns_the_loss_the_logits_and_the_statistics():
    task, (images, classes) = a_task(), a_batch()
    expected = copy.deepcopy(task.get_trainable_module())(images, F.one_hot(classes, CLASSES))
    result = task(images, classes)
    assert result.keys() == {"loss", "output", *expected.stats}
    torch.testing.assert_close(result["output"], expected.logits)
    torch.testing.assert_close(result["loss"], training_loss(expected))
    assert result["mixed_samples"] == 6 and result["mixed_tokens"] > 0


def test_task_smooths_classes_but_not_the_targets_of_mixup():
    images, classes = a_batch()
    smooth = (0.8 * F.one_hot(classes, CLASSES) + 0.2 / CLASSES).float()
    loss = a_task()(images, smooth)["loss"]
    torch.testing.assert_close(a_task(smoothing=0.2)(images, classes)["loss"], loss)
    mixed = Mixup(prob=0.0, label_smoothing=0.2, num_classes=CLASSES)(images, classes)
    torch.testing.assert_close(a_task()(*mixed)["loss"], loss)
    with pytest.raises(ValueError, match=r"smoothing=0\.2: must be 0 with probabilities"):
        a_task(smoothing=0.2)(*mixed)


@pytest.mark.parametrize("wrong", [-0.1, 1.0])
def test_task_refuses_a_wrong_smoothing(wrong: float):
    with pytest.raises(ValueError, match="must be at least 0 and below 1"):
        a_task(smoothing=wrong)


def test_evaluation_is_the_plain_model():
    images, _ = a_batch()
    task, plain = a_task(), plain_model().eval()
    task.setup_ema()
    for ema in (False, True):
        assert torch.equal(task.get_eval_model(ema=ema).eval()(images), plain(images))
    assert task.get_checkpoint_state()["state_dict"].keys() == plain.state_dict().keys()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_task_trains_in_timms_loop(compiled: bool, tmp_path: Path, one_rank: None):
    images, classes = a_batch()
    task = a_task(smoothing=0.1)
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt="adamw", lr=1e-3)
    task.setup_ema(decay=0.5)
    if compiled:
        assert task.compile(backend="eager") is task.get_eval_model()
    task.prepare_distributed()
    losses = []
    for _ in range(4):
        task.train()
        with task.no_sync():
            losses.append(task(images, classes)["loss"].item())
        result = task(images, classes)
        result["loss"].backward()
        nn.utils.clip_grad_norm_(task.get_clip_parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        task.update_ema()
        evaluator = task.create_evaluator()
        with torch.no_grad():
            logits = task.get_eval_model().eval()(images)
        evaluator.update(logits, classes)
    assert losses[-1] < losses[0] and evaluator.compute()["top1"] > 0
    saver = CheckpointSaver(
        task.get_trainable_module(), optimizer, checkpoint_dir=str(tmp_path), task=task
    )
    saver.save_checkpoint(0)
    resumed = a_task()
    resumed.setup_ema()
    assert resume_task_checkpoint(resumed, str(tmp_path / "last.pth.tar"), log_info=False) == 1
    for name, value in task.get_trainable_module().module.state_dict().items():
        assert torch.equal(resumed.get_trainable_module().state_dict()[name], value), name


def test_clipping_without_the_head_keeps_the_scorenets():
    task = a_task()
    module = task.get_trainable_module()
    left_out = {*module.parameters()} - {*task.get_clip_parameters(exclude_head=True)}
    assert left_out == {*module.model.head.parameters()}


def test_only_the_task_needs_timm():
    code = (
        "import sys; sys.modules['timm'] = None\n"
        "from tokenmixup import *\n"
        "import tokenmixup\n"
        "try: tokenmixup.TokenMixupTask\n"
        "except ImportError as error: print(error.name)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[:1] in (["timm"], ["timm.data"], ["timm.data.mixup"])
