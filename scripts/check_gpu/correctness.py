"""Stage 1: the GPU computes what the CPU does, waits where it must, and survives what may happen.

A part takes a Scope and yields its findings. On a CPU everything runs as well, against itself, but
for what only a GPU has.
"""

import math
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from reproduction.config import CONF_DIR
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import PlainError
from reproduction.training.distributed import join_world
from reproduction.training.evaluate import evaluate
from reproduction.training.loop import Trainer
from reproduction.training.metrics import Line
from scripts.benchmark.measure import CCT, VIT
from scripts.benchmark.steps import sharp_trainer, step_config

SMALL = "cct_2_3x2"
BOTH, ALL = ["htm", "vtm"], ["mixup", "cutmix", "manifold_mixup", "htm", "vtm"]
EVERY_STACK: list[list[str]] = [[], ["htm"], ["vtm"], BOTH]
UNDROPPED = ("model.drop_path=0", "model.attn_drop=0")
LAYERS = "augmentation.manifold_mixup.layers=[0,1]"
SOURCE = CONF_DIR.parent / "src"
ONLY_ON_GPU = "needs a GPU"
GIB = 2**30


class Scope(NamedTuple):
    """Where, and how much: `tiny` tries the parts out."""

    device: torch.device
    tiny: bool = False


class Finding(NamedTuple):
    """What was tried, what came of it, and whether that is right; None where nothing is judged."""

    what: str
    figure: str
    is_right: bool | None = None


Part = Callable[[Scope], Iterator[Finding]]


class Case(NamedTuple):
    """Steps that a GPU and a CPU both take."""

    model: str
    batch: int
    stack: list[str]
    precision: str
    told: tuple[str, ...] = ()
    steps: int = 2
    sharpness: float = 12  # of attention; in deep models more would make rounding errors large


# precision -> share by which losses, and by which gradients, may differ
FAR = {"float32": (1e-3, 1e-2), "bf16": (4e-2, 0.5), "float16": (1e-2, 0.1)}
SMALLEST = 0.01  # of the largest gradient: smaller ones are compared with that
CLIP, AVERAGE = "recipe.clip_grad_norm=1", "recipe.ema_decay=0.9"
SKIP = "recipe.non_finite=skip"
SPLIT = "augmentation.htm.tau=2.31"  # easy and hard samples in both batches
RULES = (
    *("detector=gradient", "detector=random", "rho=0.01", "matching=random", "labels=count"),
    *("mask_rule=published", "order=published", "pooling=average", "stop_gradient=true"),
)
AT_32 = ("model.image_size=32", "augmentation.vtm.kappa=2")
CASES: dict[str, Case] = {
    **{
        f"{SMALL} {'+'.join(stack) or 'plain'} {precision}": Case(SMALL, 6, stack, precision)
        for precision in FAR
        for stack in EVERY_STACK
    },
    "all five, accumulating, averaging, clipping": Case(
        SMALL, 7, ALL, "float32", (LAYERS, "recipe.grad_accum_steps=3", AVERAGE, CLIP)
    ),
    "all five, scaler, accumulating, clipping": Case(
        SMALL, 7, ALL, "float16", (LAYERS, "recipe.grad_accum_steps=2", CLIP)
    ),
    "SGD, scaler, skipping": Case(
        SMALL, 6, BOTH, "float16", ("recipe.optimizer=sgd", "recipe.lr=0.01", SKIP)
    ),
    "skipping, averaging": Case(SMALL, 6, BOTH, "float32", (SKIP, AVERAGE)),
    **{rule: Case(SMALL, 6, BOTH, "bf16", (SPLIT, f"augmentation.htm.{rule}")) for rule in RULES},
    "rollout": Case(
        SMALL, 6, BOTH, "bf16", ("augmentation.htm.layer=0", "augmentation.htm.rollout_steps=1")
    ),
    "CCT-7/3x1": Case(CCT, 3, BOTH, "float32", (), 1, 6),
    "CCT-7/3x1, gradient": Case(
        CCT, 3, ["htm"], "bf16", ("augmentation.htm.detector=gradient",), 1, 6
    ),
    "ViT-B/16 at 32 px, all five": Case(VIT, 3, ALL, "float32", AT_32, 1, 3),
    "ViT-B/16 at 32 px, published": Case(
        VIT, 3, BOTH, "bf16", (*AT_32, "augmentation.vtm.class_token_offset=published"), 1, 3
    ),
    "ViT-B/16 at 32 px, rollout": Case(
        VIT, 3, BOTH, "float32", (*AT_32, "augmentation.htm.rollout_steps=2"), 1, 3
    ),
}


class Trained(NamedTuple):
    """What the steps of a case have left."""

    lines: list[Line]
    gradients: list[Tensor]  # on the host, as the optimiser's first moments keep them


class DrawnOnHost(TorchFunctionMode):
    """Draws on the CPU what a step draws on its device, whose generators give other numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.randperm and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.rand_like:
            return torch.rand(args[0].shape).to(args[0].device)
        return func(*args, **kwargs)


def losses(scope: Scope) -> Iterator[Finding]:
    """Losses and gradients of the steps, mixed samples and replaced tokens."""
    for name in [*CASES][: 1 if scope.tiny else None]:
        case = CASES[name]
        try:
            there, here = (train(device, case) for device in (scope.device, torch.device("cpu")))
        except Exception as error:
            yield Finding(name, f"{type(error).__name__}: {error}", False)
            continue
        of_losses = _distance(there.lines, here.lines)
        of_gradients = distance_of_gradients(there.gradients, here.gradients)
        mixed = [
            f"{line['mixed_samples']} x {line['mixed_tokens']:.2f}"
            for line in (there.lines[-1], here.lines[-1])
        ]
        figure = f"losses differ by {of_losses:.1e}, gradients by {of_gradients:.1e}; mixed "
        most = FAR[case.precision]
        is_right = of_losses <= most[0] and of_gradients <= most[1]
        yield Finding(name, figure + ", ".join(mixed), is_right)


def train(device: torch.device, case: Case) -> Trained:
    """The steps of a case on a device."""
    told = (*UNDROPPED, "recipe.transforms.erasing_mode=const", *case.told)
    config = step_config(case.model, case.stack, case.precision, *told)
    trainer = sharp_trainer(config, device, sharpness=case.sharpness)
    with DrawnOnHost():
        lines = steps_of(trainer, case.batch, case.steps)
    kept = [trainer.update.optimizer.state[p] for p in trainer.module.parameters()]
    moments = [state.get("exp_avg", state.get("momentum_buffer")) for state in kept]
    return Trained(lines, [moment.float().cpu() for moment in moments])


def _distance(lines: list[Line], others: list[Line]) -> float:
    """The largest difference of losses, as a share of them; inf where one is not finite."""
    shares = [abs(x["loss"] / y["loss"] - 1) for x, y in zip(lines, others, strict=True)]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def distance_of_gradients(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of a tensor, as a share of its norm; inf where one is not finite."""
    norms = [float(y.norm()) for y in expected]
    least = SMALLEST * max(norms)
    shares = [
        float((x - y).norm()) / max(norm, least)
        for x, y, norm in zip(found, expected, norms, strict=True)
    ]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def small_trainer(
    device: torch.device, model: str, stack: list[str], precision: str, *told: str
) -> Trainer:
    """With new weights of sharp attention, alike on every device."""
    return sharp_trainer(step_config(model, stack, precision, *told), device)


def steps_of(trainer: Trainer, batch: int, steps: int) -> list[Line]:
    """Trains on random images, others in every step, and tells the lines of its log."""
    generator, size = torch.Generator().manual_seed(3), trainer.config.model.image_size
    for _ in range(steps):
        shape = (batch, 3, size, size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        classes = torch.randint(len(trainer.classes), (batch,), generator=generator)
        parts = trainer.train_step(images, classes, batch)
        trainer.step += 1
        trainer.metrics.add(trainer.step, 1, 0.1, parts, trainer.update.not_finite)
    return trainer.metrics.fetch()


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
    far = _distance(alone, in_group)
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
        far = _distance(lines[:1], eager[:1])
        yield Finding(f"{model}: loss", f"differs by {far:.1e}", far < 1e-3)


def same_seed(scope: Scope) -> Iterator[Finding]:
    """Two trainings by one seed, dropout included."""
    runs = [
        [
            x["loss"]
            for x in steps_of(small_trainer(scope.device, SMALL, ALL, "bf16", LAYERS), 32, 5)
        ]
        for _ in range(2)
    ]
    far = max(abs(x - y) for x, y in zip(*runs, strict=True))
    yield Finding("losses of 5 steps", "equal" if far == 0 else f"differ by {far:.1e}", far < 1e-2)
