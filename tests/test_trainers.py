"""docs/library.md runs from top to bottom; timm's training task does what timm's own does."""

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2
from timm.task import resume_task_checkpoint
from timm.utils import CheckpointSaver
from torch import Tensor, nn

from tests.conftest import CLASSES, small_vit
from tokenmixup import TokenMixupTask, attach, training_loss

PAGE = (Path(__file__).parents[1] / "docs/library.md").read_text()
SETTINGS: dict[str, Any] = {"htm": {"layer": 1, "tau": 9.0, "rho": 0.0}, "vtm": {"layer": 2}}


def codes(page: str) -> Iterator[tuple[str, str]]:
    """Yields the section and the text of each code of a page."""
    introduction, *sections = re.split(r"^###? (.*)\n", page, flags=re.M)
    for title, text in (("", introduction), *zip(sections[::2], sections[1::2], strict=True)):
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            yield title, code


@pytest.mark.parametrize("all_trainers", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_the_page_runs_and_its_trainers_learn(
    all_trainers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From top to bottom, in one namespace; samples are mixed, and digits are recognised."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    for section, code in codes(PAGE):
        if all_trainers or section not in ("Hugging Face", "Lightning"):
            exec(code, names)
        if section in ("", "timm", "Hugging Face", "Lightning") and "module" in code:
            images, classes = names["held_out"][:]
            guessed = names["module"].eval()(images).argmax(dim=1)
            assert (guessed == classes).float().mean() > 0.5, section
    assert names["output"].stats["mixed_tokens"] > 0 and names["result"]["mixed_samples"] > 0
    if all_trainers:
        assert names["trainer"].callback_metrics["mixed_samples"] > 0


def a_task(**options: Any) -> Any:
    torch.manual_seed(0)
    return TokenMixupTask(attach(small_vit(), CLASSES, **SETTINGS), verbose=False, **options)


def a_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 32, 32, generator=generator), torch.arange(6) % CLASSES


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
    for wrong, batch in ((0.2, mixed), (-0.1, None), (1.0, None)):
        with pytest.raises(ValueError, match=f"smoothing={wrong}: must be"):
            a_task(smoothing=wrong)(*batch)


def test_the_plain_model_is_evaluated_saved_and_clipped():
    task, (images, _) = a_task(), a_batch()
    task.setup_ema()
    for ema in (False, True):
        logits = task.get_eval_model(ema=ema).eval()(images)
        assert torch.equal(logits, small_vit().eval()(images))
    assert task.get_checkpoint_state()["state_dict"].keys() == small_vit().state_dict().keys()
    module = task.get_trainable_module()
    left_out = {*module.parameters()} - {*task.get_clip_parameters(exclude_head=True)}
    assert left_out == {*module.model.head.parameters()}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_task_trains_in_timms_loop(compiled: bool, tmp_path: Path):
    meeting = f"file://{tmp_path}/ranks"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
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
    assert losses[-1] < losses[0]
    trained, folder = task.get_trainable_module(), str(tmp_path)
    saver = CheckpointSaver(trained, optimizer, checkpoint_dir=folder, task=task)
    saver.save_checkpoint(0)
    resumed = a_task()
    resumed.setup_ema()
    assert resume_task_checkpoint(resumed, str(tmp_path / "last.pth.tar"), log_info=False) == 1
    for name, value in trained.module.state_dict().items():
        assert torch.equal(resumed.get_trainable_module().state_dict()[name], value), name
    dist.destroy_process_group()


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
