"""Stage 1: the GPU computes what the CPU does, waits where it must, and survives what may happen.

A part takes a Scope and yields its findings; `parts.py` holds the largest. On a CPU everything
runs as well, against itself, but for what only a GPU has.
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

from reproduction.config import CONF_DIR
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
    SMALL,
    UNDROPPED,
    Finding,
    Scope,
    distance_of_losses,
    small_trainer,
    steps_of,
)

SOURCE = CONF_DIR.parent / "src"
ONLY_ON_GPU = "needs a GPU"
GIB = 2**30


def waits(scope: Scope) -> Iterator[Finding]:
    """Where a step, and an evaluation, wait for the device: HTM once, for its assignment."""
    if scope.device.type != "cuda":
        yield Finding("waits", ONLY_ON_GPU)
        return
    for stack in EVERY_STACK:
        trainer = small_trainer(scope.device, SMALL, stack, "bf16")
        images, classes = _pinned()
        step = partial(trainer.train_step, images, classes, len(images))
        step()  # allocates, and chooses kernels
        found = _waits_of(step)
        is_right = len(found) == ("htm" in stack)
        yield Finding(f"a step, {'+'.join(stack) or 'plain'}", _places(found), is_right)
    model, normalize = trainer.module.model, trainer.update.inputs.normalize
    few, many = (
        _waits_of(partial(evaluate, model, normalize, [_pinned()] * n, trainer.world, "bf16"))
        for n in (1, 5)
    )
    yield Finding("an evaluation of 5 batches", _places(many), len(many) == len(few))


def _pinned() -> list[Tensor]:
    images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
    return [images.pin_memory(), (torch.arange(8) % 10).pin_memory()]


def _waits_of(work: Callable[[], object]) -> list[str]:
    """Our file and line of each."""
    found: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            stack = [f for f in traceback.extract_stack() if f.filename.startswith(str(SOURCE))]
            found.extend(f"{Path(f.filename).name}:{f.lineno}" for f in stack[-1:])

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            setattr(warnings, "showwarning", note)  # which alone is called where it happens
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found


def _places(found: list[str]) -> str:
    return ", ".join(found) or "none"


def quickstart(scope: Scope) -> Iterator[Finding]:
    """The quick start, stopped by SIGTERM and gone on with; its weights on both devices."""
    device = scope.device.type
    told = [f"device={device}", "name=quickstart", "resume=auto"]
    if scope.tiny:
        told += ["dataset.limit=60", "recipe.epochs=2", "recipe.batch_size=2", "recipe.log_every=1"]
        told += ["model.embed_dim=16"]
    run = RunFolder(Path("outputs", "quickstart"))
    first = _program("train.py", *told)
    while first.poll() is None and not run.metrics_path.exists():
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    first.communicate()
    status = run.read_summary().get("status")
    yield Finding("after SIGTERM", f"{status}, status {first.returncode}", status == "interrupted")
    again = _program("train.py", *told)
    last = again.communicate()[0].strip().rpartition("\n")[2]
    yield Finding("gone on with", f"status {again.returncode}: {last}", again.returncode == 0)
    found = []
    for where in (device, "cpu"):
        said = _program("eval.py", f"run={run.path}", f"device={where}").communicate()[0]
        found += [float(text) for text in re.findall(r"top-1 ([\d.]+) %", said)]
    is_right = len(found) == 2 and abs(found[0] - found[1]) <= 0.3
    yield Finding(f"top-1 [%] by eval.py on {device} and cpu", str(found), is_right)


def _program(script: str, *told: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(CONF_DIR.parent / script), *told]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def memory(scope: Scope) -> Iterator[Finding]:
    """A batch that does not fit ends in one line, and a smaller one works after it."""
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
    """Steps that are not finite leave the parameters alone; the next one changes them."""
    for precision, told in (("float16", ()), ("bf16", ("recipe.non_finite=skip",))):
        trainer = small_trainer(scope.device, SMALL, BOTH, precision, *told)
        steps_of(trainer, 6, 1)
        before = _parameters(trainer)
        poison = trainer.module.model.register_forward_hook(lambda m, a, out: out * float("nan"))
        steps_of(trainer, 6, 1)
        poison.remove()
        kept = torch.equal(before, _parameters(trainer))
        steps_of(trainer, 6, 1)
        moved = not torch.equal(before, _parameters(trainer))
        figure = f"left alone: {kept}, changed by the next: {moved}"
        yield Finding(f"{precision} {''.join(told)}".strip(), figure, kept and moved)


def _parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.module.parameters()])


def one_rank(scope: Scope) -> Iterator[Finding]:
    """A process group of one rank, by NCCL on a GPU, with DistributedDataParallel forced."""
    alone = steps_of(small_trainer(scope.device, SMALL, BOTH, "float32", *UNDROPPED), 6, 3)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "check", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    )
    with join_world(scope.device.type) as world:
        trainer = small_trainer(world.device, SMALL, BOTH, "float32", *UNDROPPED)
        devices = [world.device] if world.device.type == "cuda" else None
        trainer.update.parallel = DistributedDataParallel(trainer.module, device_ids=devices)
        in_group = steps_of(trainer, 6, 3)
        summed = torch.ones(3, device=world.device)
        dist.all_reduce(summed)
        yield Finding("backend", f"{dist.get_backend()}, sum {summed.tolist()}")
    far = distance_of_losses(alone, in_group)
    yield Finding("against a process alone", f"losses differ by {far:.1e}", far < 1e-4)


def compiling(scope: Scope) -> Iterator[Finding]:
    """`compile=true`: seconds, graphs, and losses beside those of eager steps."""
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
        lines += steps_of(trainer, batch, 1)  # of the same images
        graphs.append(counters["stats"]["unique_graphs"])
        first, again = (after - before for before, after in pairwise(graphs))
        figure = f"{seconds:.0f} s, {first} graphs, {again} more by a second step"
        yield Finding(f"{model}: first step", figure, again == 0)
        far = distance_of_losses(lines[:1], eager[:1])
        yield Finding(f"{model}: loss", f"differs by {far:.1e}", far < 1e-3)


def same_seed(scope: Scope) -> Iterator[Finding]:
    """Two trainings by one seed, dropout included."""
    one, other = (
        steps_of(small_trainer(scope.device, SMALL, ALL, "bf16", LAYERS), 32, 5) for _ in range(2)
    )
    far = max(abs(x["loss"] - y["loss"]) for x, y in zip(one, other, strict=True))
    yield Finding("losses of 5 steps", "equal" if far == 0 else f"differ by {far:.1e}", far < 1e-2)
