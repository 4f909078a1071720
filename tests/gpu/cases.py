"""Steps that a GPU and the CPU compute alike: their configurations, and how far results differ."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reproduction.training.metrics import BatchMetrics, Line
from reproduction.training.step import Trainer
from scripts.bench import build_trainer
from tests.conftest import other_rules

SMALL = "cct_2_3x2"
CCT = "cct_7_3x1"
VIT = "vit_base_patch16_224"
TRAINED_AS = {  # model -> overrides of its own recipe, classes, factor on its q, k and v
    SMALL: (["dataset=digits", "recipe=quickstart"], 10, 12),
    CCT: (["dataset=cifar100", "recipe=cifar_cct"], 100, 6),
    VIT: (["dataset=imagenet1k", "recipe=imagenet_vit"], 1000, 3),
}
# precision -> tolerated relative difference of the losses of equal steps, computed otherwise
TOLERANCES = {"float32": 1e-3, "bf16": 4e-2, "float16": 1e-2}
BOTH = ["htm", "vtm"]
ALL = ["mixup", "cutmix", "manifold_mixup", "htm", "vtm"]
EVERY_STACK: list[list[str]] = [[], ["htm"], ["vtm"], BOTH]
NO_DROPOUT = ("model.drop_path=0", "model.attn_drop=0")
LAYERS = "augmentation.manifold_mixup.layers=[0,1]"
CLIP = "recipe.clip_grad_norm=1"
AVERAGE = "recipe.ema_decay=0.9"
SPLIT = "augmentation.htm.tau=2.31"  # easy and hard samples in both batches
# With rho=0 both cycles of three samples would gain alike, and rounding choose the donors.
AT_32 = ("model.image_size=32", "augmentation.vtm.kappa=2", "augmentation.htm.rho=0.02")
GRADIENTS = {"float32": 1e-2, "bf16": 0.5, "float16": 0.1}  # tolerated relative differences
MIN_NORM = 0.01  # times the largest gradient norm: smaller norms are replaced by this in ratios


class Case(NamedTuple):
    """A configuration whose steps are compared between a device and the CPU."""

    model: str
    batch: int
    stack: list[str]
    precision: str
    overrides: tuple[str, ...] = ()
    steps: int = 2


RULES = [*other_rules(), "rho=0.01", "pooling=average", "stop_gradient=true"]
CASES: dict[str, Case] = {
    **{
        f"{SMALL} {'+'.join(stack) or 'plain'} {precision}": Case(SMALL, 6, stack, precision)
        for precision in TOLERANCES
        for stack in EVERY_STACK
    },
    "all five, accumulating, averaging, clipping": Case(
        SMALL, 7, ALL, "float32", (LAYERS, "recipe.grad_accum_steps=3", AVERAGE, CLIP)
    ),
    "all five, scaler, accumulating, clipping": Case(
        SMALL, 7, ALL, "float16", (LAYERS, "recipe.grad_accum_steps=2", CLIP)
    ),
    "SGD, scaler, averaging": Case(
        SMALL, 6, BOTH, "float16", ("recipe.optimizer=sgd", "recipe.lr=0.01", AVERAGE)
    ),
    **{rule: Case(SMALL, 6, BOTH, "bf16", (SPLIT, f"augmentation.htm.{rule}")) for rule in RULES},
    "rollout": Case(
        SMALL, 6, BOTH, "bf16", ("augmentation.htm.layer=0", "augmentation.htm.rollout_steps=1")
    ),
    "CCT-7/3x1": Case(CCT, 3, BOTH, "float32", (), 1),
    "CCT-7/3x1, gradient": Case(
        CCT, 3, ["htm"], "bf16", ("augmentation.htm.detector=gradient",), 1
    ),
    "ViT-B/16 at 32 px, all five": Case(VIT, 3, ALL, "float32", AT_32, 1),
    "ViT-B/16 at 32 px, published": Case(
        VIT, 3, BOTH, "float32", (*AT_32, "augmentation.vtm.class_token_offset=published"), 1
    ),
    "ViT-B/16 at 32 px, rollout": Case(
        VIT, 3, BOTH, "float32", (*AT_32, "augmentation.htm.rollout_steps=2"), 1
    ),
}
# On a CPU, which would take minutes for the others.
TINY_CASES = [
    name for name, case in CASES.items() if case.model == SMALL and case.precision != "float16"
]
QUICK_CASES = (f"{SMALL} htm+vtm bf16", "all five, accumulating, averaging, clipping")


class Trained(NamedTuple):
    """The results of a case's steps."""

    lines: list[Line]
    gradients: list[Tensor]  # on the host, from the optimiser's first moments


class Distance(NamedTuple):
    """The largest relative differences of losses and of gradient tensors; inf if not finite."""

    losses: float
    gradients: float

    def is_small(self, precision: str) -> bool:
        same_losses = self.losses <= TOLERANCES[precision]
        same_gradients = self.gradients <= GRADIENTS[precision]
        return same_losses and same_gradients


class DrawnOnHost(TorchFunctionMode):
    """Draws a step's random numbers on the CPU, since generators differ between devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.randperm and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.rand_like:
            return torch.rand(args[0].shape).to(args[0].device)
        return func(*args, **kwargs)


def train(device: torch.device, case: Case) -> Trained:
    """Runs the steps of a case on a device."""
    overrides = (*NO_DROPOUT, "recipe.transforms.erasing_mode=const", *case.overrides)
    trainer = small_trainer(device, case.stack, case.precision, *overrides, model=case.model)
    with DrawnOnHost():
        lines = steps_of(trainer, case.batch, case.steps)
    states = [trainer.optimizer.state[p] for p in trainer.module.parameters()]
    moments = [state.get("exp_avg", state.get("momentum_buffer")) for state in states]
    return Trained(lines, [moment.float().cpu() for moment in moments])


def small_trainer(
    device: torch.device, stack: list[str], precision: str, *overrides: str, model: str = SMALL
) -> Trainer:
    """A trainer of a new model with sharp attention, with equal weights on every device.

    HTM mixes every sample, unless it is overridden.
    """
    recipe, classes, sharpness = TRAINED_AS[model]
    own = [f"model={model}", *recipe, f"device={device.type}", f"recipe.precision={precision}"]
    own.append(f"augmentation=[{','.join(stack)}]")
    if "htm" in stack:
        own.append("augmentation.htm.tau=inf")
    trainer = build_trainer([*own, *overrides], classes)
    blocks: Any = trainer.module.model.blocks
    with torch.no_grad():
        for block in blocks:
            block.attn.qkv.weight.mul_(sharpness)
    return trainer


def steps_of(trainer: Trainer, batch: int, steps: int) -> list[Line]:
    """Trains on random images, new ones in every step, and returns the metrics."""
    return _steps(trainer, [batch] * steps)


GRAPH = (  # of a graph and of eager steps: all that may be in a step
    "recipe.transforms.erasing_prob=0.5",
    "recipe.transforms.erasing_mode=pixel",
    "model.attn_drop=0.1",
    "model.drop_path=0.1",
    AVERAGE,
    CLIP,
    "recipe.epochs=40",
    "recipe.warmup_epochs=5",
    "recipe.schedule_step=epoch",
)
# Of the batches, each size with a graph; a CPU takes seconds for a step.
SIZES = {"cuda": [8] * 9 + [7] * 4 + [8] * 7, "cpu": [4, 4, 3, 4, 3]}


def scheduled_steps(trainer: Trainer) -> list[Line]:
    """Trains on batches of SIZES with a learning rate that changes with each, in float32."""

    def as_float32(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] = float(torch.tensor(group["lr"]))

    trainer.optimizer.register_step_pre_hook(as_float32)
    return _steps(trainer, SIZES[trainer.world.device.type])


def _steps(trainer: Trainer, batches: list[int]) -> list[Line]:
    generator = torch.Generator().manual_seed(3)
    size = trainer.config.model.image_size
    lines = BatchMetrics(trainer.world)
    for batch in batches:
        shape = (batch, 3, size, size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        classes = torch.randint(len(trainer.classes), (batch,), generator=generator)
        micro_batches = trainer.train_step(images, classes, batch)
        lines.add({"step": trainer.step}, batch, micro_batches)
    return lines.fetch()[0]


def distance(there: Trained, here: Trained) -> Distance:
    norms = [float(y.norm()) for y in here.gradients]
    least = MIN_NORM * max(norms)
    gradients = [
        float((x - y).norm()) / max(norm, least)
        for x, y, norm in zip(there.gradients, here.gradients, norms, strict=True)
    ]
    return Distance(distance_of_losses(there.lines, here.lines), _largest(gradients))


def distance_of_losses(lines: list[Line], others: list[Line]) -> float:
    pairs = zip(lines, others, strict=True)
    return _largest([abs(x["loss"] / y["loss"] - 1) for x, y in pairs])


def _largest(values: list[float]) -> float:
    if all(map(math.isfinite, values)):
        return max(values)
    return math.inf
