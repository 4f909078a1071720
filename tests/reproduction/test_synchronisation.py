"""How often a training step waits for the device.

On a CPU nothing waits, so the step runs on torch's meta device: what lies there has no values, as
little as the host has those of a GPU before it asks for them. Every question is counted, and
answered with numbers of its own. `make check-gpu` counts on a GPU itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reproduction.training.evaluate import evaluate
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import small_trainer
from tokenmixup import HTM, attach

aten = torch.ops.aten
DATA_DEPENDENT = (aten.nonzero, aten.masked_select, aten.repeat_interleave, aten._unique2)
COPIES = 2  # gains and flags of easy samples, for which one wait is enough
STACKS = {"plain": [], "HTM": ["htm"], "VTM": ["vtm"], "HTM and VTM": ["htm", "vtm"]}


class Questions(TorchDispatchMode):
    """Counts what the host asks of tensors without values, and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            name = func.overloadpacket.__name__
            if func.overloadpacket is aten._local_scalar_dense:
                self.asked[name] += 1
                return 1.0
            if func.overloadpacket is aten._to_copy and str(kwargs.get("device")) == "cpu":
                self.asked["copy"] += 1
                return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if func.overloadpacket in DATA_DEPENDENT or _by_mask(func, args):
                self.asked[name] += 1
        return func(*args, **kwargs)


def _by_mask(func: Any, args: Any) -> bool:
    """Whether a mask chooses the elements: their number is asked for."""
    by_index = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
    return by_index and any(x is not None and x.dtype == torch.bool for x in args[1])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What is asked for while the context lasts. Autocast knows no meta device: it stays off."""
    with pytest.MonkeyPatch.context() as patch, Questions() as questions:
        patch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
        patch.setattr(torch, "is_autocast_enabled", lambda device: False)
        patch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
        yield questions.asked


def trainer_on(device: str, stack: list[str], *told: str) -> Trainer:
    trainer = small_trainer(stack, *told, device=device)
    for group in trainer.update.optimizer.param_groups:
        group["fused"] = device != "meta"  # which no fused kernel knows
    return trainer


def step(trainer: Trainer, batch_size: int = 6) -> None:
    device = trainer.world.device
    images = torch.zeros(batch_size, 3, 32, 32, device=device)
    trainer.train_step(
        images, torch.zeros(batch_size, dtype=torch.int64, device=device), batch_size
    )


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_htm_waits_once_a_step_for_two_copies_to_the_host_and_nothing_else(stack: list[str]):
    trainer = trainer_on("meta", stack)
    with counted() as asked:
        for _ in range(2):
            step(trainer)
    assert asked == ({"copy": 2 * COPIES} if "htm" in stack else {})


def test_accumulating_waits_once_for_each_micro_batch_and_averaging_never():
    told = ("recipe.grad_accum_steps=3", "recipe.ema_decay=0.9")
    average = trainer_on("cpu", [], *told).update.average  # timm makes a generator, meta has none
    assert average is not None
    average.module.to("meta")
    trainer = trainer_on("meta", ["htm", "vtm"], told[0])
    trainer.update.average = average
    with counted() as asked:
        step(trainer)
    assert asked == {"copy": 3 * COPIES}


def test_leaving_out_what_is_not_finite_asks_no_more():
    trainer = trainer_on("meta", ["htm"], "recipe.non_finite=skip")
    trainer.update.optimizer.step = lambda: None  # only fused kernels are told what to leave out
    with counted() as asked:
        step(trainer)
    assert asked == {"copy": COPIES}


@pytest.mark.parametrize(
    "settings",
    [
        {"detector": "random"},
        {"labels": "count"},
        {"mask_rule": "published"},
        {"order": "published"},
    ],
    ids=str,
)
def test_no_rule_of_htm_asks_more_often(settings: dict[str, str]):
    trainer = trainer_on("meta", ["htm", "vtm"])
    htm = HTM(layer=1, **settings)  # type: ignore[arg-type]
    module = attach(trainer.module.model, 10, htm=htm).to("meta").train()
    with counted() as asked:
        module(torch.zeros(6, 3, 32, 32, device="meta"), torch.zeros(6, 10, device="meta"))
    assert asked == {"copy": COPIES}


def test_questions_are_counted():
    x = torch.zeros(4, device="meta")
    with counted() as asked:
        assert float(x.sum()) == 1
        assert x.cpu().tolist() == [1, 1, 1, 1]
        with pytest.raises((RuntimeError, NotImplementedError)):
            x[x > 0]
    assert asked == {"_local_scalar_dense": 1, "copy": 1, "index": 1}


def test_an_evaluation_asks_once_whatever_its_batches():
    trainer = trainer_on("meta", [])
    normalize = trainer.update.inputs.normalize
    batch = [torch.zeros(6, 3, 32, 32, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)]
    with counted() as asked:
        evaluate(trainer.module.model, normalize, [batch] * 3, trainer.world, "float32")
    assert asked == {"copy": 1}
