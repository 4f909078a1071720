"""Compiled blocks: equal results, no recompilation, the plain model in evaluation."""

import copy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from reproduction.models import build
from reproduction.models.build import check_compiler, compile_blocks
from reproduction.runs.folder import RunFolder
from tests.conftest import CLASSES, small_cct, small_vit
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_training import assert_same_result, interrupt_at, without_times
from tokenmixup import TokenMixup, attach, training_loss

BLOCKS = 4
INDUCTOR = build.COMPILER
# Skips precompiled headers and the check of vector instructions.
QUICK: dict[str, object] = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
with_dropout = pytest.mark.parametrize(
    "build",
    [
        partial(small_cct, 0.1, 0.1, BLOCKS),
        partial(small_vit, attn_drop_rate=0.1, drop_path_rate=0.1, depth=BLOCKS),
    ],
    ids=["cct", "vit"],
)


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts compilations, with a backend that needs no C++ compiler."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(build, "COMPILER", partial(torch.compile, backend=counter, dynamic=False))
    torch.compiler.reset()
    check_compiler.cache_clear()
    yield counter
    check_compiler.cache_clear()


def mixing(build: Callable[[], torch.nn.Module]) -> TokenMixup:
    """Builds a model with HTM, then VTM; samples of class 0 are easy."""
    torch.manual_seed(0)
    vtm = {"layer": 2, "kappa": 3}
    module = attach(build(), CLASSES, htm={"layer": 1, "rho": 0.0}, vtm=vtm).train()
    with torch.no_grad():
        module.scorenet.head.weight.zero_()
        module.scorenet.head.bias.copy_(9.0 * torch.eye(CLASSES)[0])
    return module


def batch_of(module: TokenMixup, size: int, easy: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    pixels = 32 if hasattr(module.model, "patch_embed") else 16
    images = torch.randn(size, 3, pixels, pixels, generator=generator)
    return images, torch.eye(CLASSES)[(torch.arange(size) >= easy).long()]


def trained(module: TokenMixup, size: int = 6, easy: int = 3) -> list[Tensor]:
    """Returns logits, targets, loss and gradients of a training step."""
    torch.manual_seed(1)
    module.zero_grad()
    output = module(*batch_of(module, size, easy))
    assert output.stats["mixed_samples"] == easy
    loss = training_loss(output, 0.1)
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [output.logits, output.targets, loss, *gradients]


@with_dropout
def test_compiled_blocks_equal_plain_ones_with_dropout(build: Callable[[], Any]):
    module = mixing(build)
    plain = trained(module)
    compile_blocks(module)
    for ours, theirs in zip(trained(module), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@with_dropout
def test_nothing_is_compiled_again_as_the_number_of_easy_samples_changes(
    build: Callable[[], Any], counter: CompileCounterWithBackend
):
    module = mixing(build)
    compile_blocks(module)
    for size in (6, 5):
        trained(module, size)
    # for each size: the last block, the MLP of the others, and ScoreNet, mask and ratio of HTM
    assert counter.frame_count == 2 * 5
    for easy in (0, 1, 4, 5):
        trained(module, 6, easy)
        trained(module, 5, easy)
    assert counter.frame_count == 2 * 5


def test_all_blocks_are_compiled_beyond_the_recompile_limit(counter: CompileCounterWithBackend):
    """Each block has its own stochastic depth rate, so torch would stop at its limit."""
    module = attach(small_cct(drop_path=0.3, depth=3), CLASSES).train()
    with torch._dynamo.config.patch(recompile_limit=2):  # the default is 8
        compile_blocks(module)
        for size in (6, 5):
            module(*batch_of(module, size, 3))
    assert counter.frame_count == 2 * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"htm": {"layer": [0, 2]}},
        {"htm": {"layer": 0}, "vtm": {"layer": 3}},
        {"htm": {"layer": 1}, "manifold_mixup": {"layers": [0]}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_manually_compiled_blocks_train(settings: dict[str, Any]):
    module = attach(small_vit(depth=BLOCKS), CLASSES, **settings).train()
    for block in module.model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager", dynamic=False)
    for easy in (3, 2, 1):
        output = module(*batch_of(module, 6, easy))
        training_loss(output, 0.1).backward()


def test_equal_blocks_are_compiled_once(counter: CompileCounterWithBackend):
    module = mixing(small_vit)
    compile_blocks(module)
    trained(module)
    # a block and the MLP of blocks whose attention is replaced; 3 parts of HTM
    assert counter.frame_count == 2 + 3


def test_compiling_keeps_evaluation_and_parameter_names(counter: CompileCounterWithBackend):
    module = mixing(small_cct)
    images, _ = batch_of(module, 6, 0)
    plain, names = module.eval()(images), list(module.state_dict())
    compile_blocks(module)
    assert torch.equal(module(images), plain)
    assert list(module.state_dict()) == names
    assert counter.frame_count == 0


def test_copied_model_runs_its_own_blocks():
    module = mixing(small_cct)
    compile_blocks(module)
    copied = copy.deepcopy(module)
    before = trained(copied)
    with torch.no_grad():
        for parameter in module.model.blocks.parameters():
            parameter.zero_()
    for ours, theirs in zip(trained(copied), before, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_run_resumes_exactly_and_is_evaluated_uncompiled(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counter: CompileCounterWithBackend,
):
    settings = ["augmentation.htm.tau=2.4", *SMALL]
    assert command("train", "name=plain", *settings).status == 0
    assert counter.frame_count == 0
    assert command("train", "name=undisturbed", "compile=true", *settings).status == 0
    assert counter.frame_count == 2 + 3  # the compiler check and an MLP; 3 parts of HTM
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, RuntimeError("the machine is taken back"))
        assert command("train", "name=parts", "compile=true", *settings).status == 1
    assert command("train", "name=parts", "compile=true", "resume=auto", *settings).status == 0
    plain, undisturbed, parts = (
        RunFolder(tmp_path / "outputs" / x) for x in ("plain", "undisturbed", "parts")
    )
    assert_same_result(undisturbed, parts)
    for ours, theirs in zip(undisturbed.read_metrics(), plain.read_metrics(), strict=True):
        for line, other in zip(without_times(ours), without_times(theirs), strict=True):
            assert line == pytest.approx(other, rel=1e-4)
    result = command("eval", f"run={undisturbed.path}", "weights=best", "device=cpu")
    assert (
        result.status == 0 and f"top-1 {undisturbed.read_summary()['top1_best']:.2f}" in result.out
    )


def test_every_run_of_a_sweep_is_compiled(
    command: Command, monkeypatch: pytest.MonkeyPatch, counter: CompileCounterWithBackend
):
    """torch's limit counts the blocks of all runs of a process."""
    monkeypatch.setattr(build, "BATCH_SIZES", 1)
    compiled = []
    for seed in range(4):
        before = counter.frame_count
        args = ["compile=true", f"seed={seed}", "model.depth=3", "recipe.max_steps=1", *SMALL]
        assert command("train", *args).status == 0
        compiled.append(counter.frame_count - before)
    assert compiled[1] > 2 and compiled[1:] == [compiled[1]] * 3


def test_missing_compiler_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "COMPILER", INDUCTOR)
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/compiler")}):
        result = command("train", "name=mine", "compile=true", *SMALL)
    assert result.status == 2
    (line,) = result.lines
    assert "compile=true: " in line and "a C++ compiler" in line and "/no/compiler" in line
    assert line.endswith("allowed is false")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no C++ compiler")
def test_check_compiler_finds_the_compiler_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "COMPILER", INDUCTOR)
    with torch._inductor.config.patch(QUICK):
        check_compiler("cpu")
