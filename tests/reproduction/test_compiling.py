"""Compiled runs: equal results, exact resumption, the plain model in evaluation."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from torch._dynamo.testing import CompileCounterWithBackend

from reproduction.models import build
from reproduction.models.build import check_compiler, compile_module
from reproduction.runs.folder import RunFolder
from tests.conftest import CLASSES, small_cct
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_training import assert_same_result, interrupt_at, without_times
from tokenmixup import attach

INDUCTOR = build.COMPILER
# Skips precompiled headers and the check of vector instructions.
QUICK: dict[str, object] = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts graphs, with a backend that needs no C++ compiler."""
    counter = CompileCounterWithBackend("aot_eager")
    settings = {"fullgraph": True, "dynamic": False, "backend": counter}
    monkeypatch.setattr(build, "COMPILER", settings)
    torch.compiler.reset()
    check_compiler.cache_clear()
    yield counter
    check_compiler.cache_clear()


@pytest.mark.slow
def test_graphs_of_every_batch_size_are_kept(counter: CompileCounterWithBackend):
    """Beyond torch's limit, which all modules share, compiling would fail."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for depth in (1, 2):
            module = attach(small_cct(depth=depth), CLASSES).train()
            compile_module(module)
            for size in (6, 5, 3):
                module(torch.randn(size, 3, 16, 16), torch.eye(CLASSES)[[0] * size])
    assert counter.frame_count == 2 * 3


@pytest.mark.slow
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
    assert counter.frame_count == 1 + 1  # the compiler check and the module
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


def test_every_run_of_a_sweep_is_compiled(command: Command, counter: CompileCounterWithBackend):
    """torch's limit counts the graphs of all runs of a process."""
    compiled = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for depth in (2, 3, 4):
            before = counter.frame_count
            args = ["compile=true", f"model.depth={depth}", "recipe.max_steps=1", *SMALL]
            assert command("train", f"name=depth{depth}", *args).status == 0
            compiled.append(counter.frame_count - before)
    assert compiled == [2, 1, 1]  # the first run also checks the compiler


@pytest.mark.slow
def test_a_convolutional_network_is_compiled_too(
    command: Command, counter: CompileCounterWithBackend
):
    line = ["model=resnet18", "augmentation=[]", "recipe.epochs=1", "recipe.batch_size=16"]
    line += ["dataset.limit=32", "dataset.workers=0", "device=cpu", "recipe.evaluate_every=1"]
    assert command("train", "name=mine", "compile=true", *line).status == 0
    assert counter.frame_count == 1 + 1


def test_what_is_no_graph_ends_in_one_line(command: Command, monkeypatch: pytest.MonkeyPatch):
    forward: Any = small_cct().blocks[0].__class__.forward

    def printing(block: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(block, x)

    monkeypatch.setattr("reproduction.models.cct.CCTBlock.forward", printing)
    result = command("train", "name=mine", "compile=true", *SMALL)
    assert result.status == 1
    assert "compile=true: torch cannot compile cct_2_3x2 as one graph" in result.lines[-1]


def test_missing_compiler_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "COMPILER", INDUCTOR)
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/compiler")}):
        result = command("train", "name=mine", "compile=true", *SMALL)
    assert result.status == 2
    (line,) = result.lines
    assert "compile: does not work" in line and "a C++ compiler" in line and "/no/compiler" in line
    assert line.endswith("allowed is false")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no C++ compiler")
def test_check_compiler_finds_the_compiler_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "COMPILER", INDUCTOR)
    with torch._inductor.config.patch(QUICK):
        check_compiler("cpu")
