"""Stage 1: a GPU computes the same as the CPU, synchronises only if needed, and survives failures.

A part takes a Scope and yields its findings; the largest is in `parts.py`. Except for checks that
need a GPU, everything also runs on a CPU, against itself.
"""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from reproduction.config import ROOT
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import PlainError
from reproduction.training.distributed import join_world
from reproduction.training.evaluate import evaluate
from reproduction.training.loop import Trainer
from scripts.benchmark.measure import CCT, VIT
from scripts.check_gpu.parts import (
    ALL,
    BOTH,
    EVERY_STACK,
    LAYERS,
    NO_DROPOUT,
    SMALL,
    Finding,
    Scope,
    distance_of_losses,
    small_trainer,
    steps_of,
)

SOURCE = ROOT / "src"
ONLY_ON_GPU = "needs a GPU"
GIB = 2**30


def waits(scope: Scope) -> Iterator[Finding]:
    """Where a step and an evaluation wait for the device: HTM once, for its assignment."""
    if scope.device.type != "cuda":
        yield Finding("waits", ONLY_ON_GPU)
        return
    for stack in EVERY_STACK:
        trainer = small_trainer(scope.device, SMALL, stack, "bf16")
        images, classes = _pinned()
        step = partial(trainer.train_step, images, classes, len(images))
        step()  # allocates memory and selects kernels
        places = _waits_of(step)
        is_right = len(places) == ("htm" in stack)
        yield Finding(f"a step, {'+'.join(stack) or 'plain'}", _joined(places), is_right)
    model, normalize = trainer.module.model, trainer.inputs.normalize
    few, many = (
        _waits_of(partial(evaluate, model, normalize, [_pinned()] * n, trainer.world, "bf16"))
        for n in (1, 5)
    )
    yield Finding("an evaluation of 5 batches", _joined(many), len(many) == len(few))


def _pinned() -> list[Tensor]:
    images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
    return [images.pin_memory(), (torch.arange(8) % 10).pin_memory()]


def _waits_of(work: Callable[[], object]) -> list[str]:
    """File and line in our code of each wait."""
    places: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            stack = [f for f in traceback.extract_stack() if f.filename.startswith(str(SOURCE))]
            places.extend(f"{Path(f.filename).name}:{f.lineno}" for f in stack[-1:])

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            setattr(warnings, "showwarning", note)  # called within the stack of the wait
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return places


def _joined(places: list[str]) -> str:
    return ", ".join(places) or "none"


def quickstart(scope: Scope) -> Iterator[Finding]:
    """The quick start, stopped by SIGTERM and resumed; its accuracy on both devices."""
    device = scope.device.type
    overrides = [f"device={device}", "name=quickstart", "resume=auto"]
    if scope.tiny:
        overrides += ["dataset.limit=60", "model.embed_dim=16"]
        overrides += ["recipe.epochs=2", "recipe.batch_size=2", "recipe.log_every=1"]
    run = RunFolder(Path("outputs", "quickstart"))
    first = _start("train.py", *overrides)
    while first.poll() is None and not run.metrics_path.exists():
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    first.communicate()
    status = run.read_summary().get("status")
    yield Finding("after SIGTERM", f"{status}, status {first.returncode}", status == "interrupted")
    again = _start("train.py", *overrides)
    last = again.communicate()[0].strip().rpartition("\n")[2]
    yield Finding("after resuming", f"status {again.returncode}: {last}", again.returncode == 0)
    top1 = []
    for where in (device, "cpu"):
        output = _start("eval.py", f"run={run.path}", f"device={where}").communicate()[0]
        top1 += [float(text) for text in re.findall(r"top-1 ([\d.]+) %", output)]
    is_right = len(top1) == 2 and abs(top1[0] - top1[1]) <= 0.3
    yield Finding(f"top-1 [%] by eval.py on {device} and cpu", str(top1), is_right)


def _start(script: str, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / script), *overrides]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def memory(scope: Scope) -> Iterator[Finding]:
    """A batch that does not fit raises a one-line error; a smaller one works afterwards."""
    if scope.device.type != "cuda":
        yield Finding("out of memory", ONLY_ON_GPU)
        return
    total = torch.cuda.get_device_properties(scope.device).total_memory
    trainer = small_trainer(scope.device, CCT, BOTH, "bf16")
    torch.cuda.set_per_process_memory_fraction(GIB / total)
    try:
        steps_of(trainer, 2048, 1)
        yield Finding("a batch beyond 1 GiB", "fits", False)
    except PlainError as error:
        yield Finding("a batch beyond 1 GiB", str(error), "the GPU's memory" in str(error))
    loss = steps_of(trainer, 8, 1)[-1]["loss"]
    yield Finding("a smaller batch after it", f"loss {loss:.3f}", loss < float("inf"))


def skipping(scope: Scope) -> Iterator[Finding]:
    """Non-finite steps leave the parameters unchanged; the next step changes them."""
    for precision, overrides in (("float16", ()), ("bf16", ("recipe.non_finite=skip",))):
        trainer = small_trainer(scope.device, SMALL, BOTH, precision, *overrides)
        steps_of(trainer, 6, 1)
        before = _parameters(trainer)
        poison = trainer.module.model.register_forward_hook(lambda m, a, out: out * float("nan"))
        steps_of(trainer, 6, 1)
        poison.remove()
        kept = torch.equal(before, _parameters(trainer))
        steps_of(trainer, 6, 1)
        moved = not torch.equal(before, _parameters(trainer))
        figure = f"left unchanged: {kept}, changed by the next: {moved}"
        yield Finding(f"{precision} {''.join(overrides)}".strip(), figure, kept and moved)


def _parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.module.parameters()])


def one_rank(scope: Scope) -> Iterator[Finding]:
    """A process group of one rank, with NCCL on a GPU and DistributedDataParallel forced."""
    alone = steps_of(small_trainer(scope.device, SMALL, BOTH, "float32", *NO_DROPOUT), 6, 3)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "check", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    )
    with join_world(scope.device.type) as world:
        trainer = small_trainer(world.device, SMALL, BOTH, "float32", *NO_DROPOUT)
        devices = [world.device] if world.device.type == "cuda" else None
        trainer.parallel = DistributedDataParallel(trainer.module, device_ids=devices)
        in_group = steps_of(trainer, 6, 3)
        summed = torch.ones(3, device=world.device)
        dist.all_reduce(summed)
        yield Finding("backend", f"{dist.get_backend()}, sum {summed.tolist()}")
    error = distance_of_losses(alone, in_group)
    yield Finding("against a process alone", f"losses differ by {error:.1e}", error < 1e-4)


def compiling(scope: Scope) -> Iterator[Finding]:
    """`compile=true`: seconds, graphs, and losses compared with those of eager steps."""
    from torch._dynamo.utils import counters

    sizes = [(SMALL, 6)] if scope.tiny else [(CCT, 32), (VIT, 8)]
    for model, batch in sizes:
        eager = steps_of(small_trainer(scope.device, model, BOTH, "float32"), batch, 3)
        trainer = small_trainer(scope.device, model, BOTH, "float32", "compile=true")
        graphs = [counters["stats"]["unique_graphs"]]
        start = time.perf_counter()
        lines = steps_of(trainer, batch, 1)
        seconds = time.perf_counter() - start
        graphs.append(counters["stats"]["unique_graphs"])
        lines += steps_of(trainer, batch, 1)  # on the same images
        graphs.append(counters["stats"]["unique_graphs"])
        first, again = (after - before for before, after in pairwise(graphs))
        figure = f"{seconds:.0f} s, {first} graphs, {again} more by a second step"
        yield Finding(f"{model}: first step", figure, first > 0 and again == 0)
        error = distance_of_losses(lines[:1], eager[:1])
        yield Finding(f"{model}: loss", f"differs by {error:.1e}", error < 1e-3)


def same_seed(scope: Scope) -> Iterator[Finding]:
    """Two trainings with the same seed, with dropout."""
    one, other = (
        steps_of(small_trainer(scope.device, SMALL, ALL, "bf16", LAYERS), 32, 5) for _ in range(2)
    )
    error = max(abs(x["loss"] - y["loss"]) for x, y in zip(one, other, strict=True))
    figure = "equal" if error == 0 else f"differ by {error:.1e}"
    yield Finding("losses of 5 steps", figure, error < 1e-2)
