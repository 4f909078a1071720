"""Counts how often a training step synchronises with the device.

Nothing synchronises on a CPU, so the step runs on torch's meta device, whose tensors have no
values. Every operation that needs values on the host is counted and gets made-up numbers.
`make check-gpu` counts on a real GPU.
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
from tokenmixup.rules import CHOICES

aten = torch.ops.aten
DATA_DEPENDENT = (aten.nonzero, aten.masked_select, aten.repeat_interleave, aten._unique2)
COPIES = 2  # gains and flags of easy samples, with a single wait
STACKS = {"plain": [], "HTM": ["htm"], "VTM": ["vtm"], "HTM and VTM": ["htm", "vtm"]}


class Synchronisations(TorchDispatchMode):
    """Counts operations on meta tensors that need values on the host, and makes values up."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            name = func.overloadpacket.__name__
            if func.overloadpacket is aten._local_scalar_dense:
                self.counts[name] += 1
                return 1.0
            if func.overloadpacket is aten._to_copy and str(kwargs.get("device")) == "cpu":
                self.counts["copy"] += 1
                return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if func.overloadpacket in DATA_DEPENDENT or _by_mask(func, args):
                self.counts[name] += 1
        return func(*args, **kwargs)


def _by_mask(func: Any, args: Any) -> bool:
    """Returns whether a boolean mask indexes a tensor, which needs its number of elements."""
    by_index = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
    return by_index and any(x is not None and x.dtype == torch.bool for x in args[1])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts synchronisations; disables autocast, which does not support the meta device."""
    with pytest.MonkeyPatch.context() as patch, Synchronisations() as mode:
        patch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
        patch.setattr(torch, "is_autocast_enabled", lambda device: False)
        patch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
        yield mode.counts


def trainer_on(device: str, stack: list[str], *overrides: str) -> Trainer:
    trainer = small_trainer(stack, *overrides, device=device)
    for group in trainer.optimizer.param_groups:
        group["fused"] = device != "meta"  # which fused kernels do not support
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
    with counted() as counts:
        for _ in range(2):
            step(trainer)
    assert counts == ({"copy": 2 * COPIES} if "htm" in stack else {})


@pytest.mark.parametrize("matching", ["optimal", "random"])
def test_with_kernels_a_step_never_waits(monkeypatch: pytest.MonkeyPatch, matching: str):
    for module in ("assignment", "attention", "horizontal", "rules"):
        monkeypatch.setattr(f"tokenmixup.{module}.has_kernels", lambda x: True)
    trainer = trainer_on("meta", ["htm", "vtm"], f"augmentation.htm.matching={matching}")
    with counted() as counts:
        step(trainer)
    assert counts == {}


def test_htm_waits_once_per_micro_batch_and_averaging_never():
    overrides = ("recipe.grad_accum_steps=3", "recipe.ema_decay=0.9")
    # timm's average needs a generator, which meta lacks
    average = trainer_on("cpu", [], *overrides).average
    assert average is not None
    average.module.to("meta")
    trainer = trainer_on("meta", ["htm", "vtm"], overrides[0])
    trainer.average = average
    with counted() as counts:
        step(trainer)
    assert counts == {"copy": 3 * COPIES}


@pytest.mark.parametrize(
    ("option", "name"), [(option, name) for option, table in CHOICES.items() for name in table]
)
def test_rules_of_htm_add_no_wait(option: str, name: Any):
    trainer = trainer_on("meta", ["htm", "vtm"])
    htm = HTM(layer=1, **{option: name})
    module = attach(trainer.module.model, 10, htm=htm).to("meta").train()
    with counted() as counts:
        module(torch.zeros(6, 3, 32, 32, device="meta"), torch.zeros(6, 10, device="meta"))
    assert counts == {"copy": COPIES}


def test_synchronisations_are_counted():
    x = torch.zeros(4, device="meta")
    with counted() as counts:
        assert float(x.sum()) == 1
        assert x.cpu().tolist() == [1, 1, 1, 1]
        with pytest.raises((RuntimeError, NotImplementedError)):
            x[x > 0]
    assert counts == {"_local_scalar_dense": 1, "copy": 1, "index": 1}


def test_evaluation_waits_once_for_all_batches():
    trainer = trainer_on("meta", [])
    normalize = trainer.inputs.normalize
    batch = [torch.zeros(6, 3, 32, 32, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)]
    with counted() as counts:
        evaluate(trainer.module.model, normalize, [batch] * 3, trainer.world, "float32")
    assert counts == {"copy": 1}
