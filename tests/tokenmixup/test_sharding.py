"""FSDP2: attach, then shard. One rank on a CPU trains as without it, bit for bit."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tests.conftest import CLASSES, small_vit
from tokenmixup import TokenMixup, attach, training_loss

ALL = {"tau": float("inf"), "rho": 0.0}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(module: TokenMixup, mesh: DeviceMesh) -> Any:
    for block in module.model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


@pytest.mark.parametrize(
    "settings",
    [
        {"htm": {"layer": 1, **ALL}, "vtm": {"layer": 2}},
        {"htm": {"layer": 3, **ALL}, "vtm": {"layer": 1}},
        {"htm": {"layer": [1, 3], **ALL}, "checkpoint_blocks": True},
        {"manifold_mixup": {"layers": [0, 1]}},
    ],
    ids=str,
)
def test_sharded_models_train_and_evaluate_as_whole_ones(images, targets, mesh, settings):
    plain = attach(small_vit(), CLASSES, **settings)
    module = sharded(copy.deepcopy(plain), mesh)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    assert losses_of(module, images, targets) == losses_of(plain, images, targets)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    assert torch.equal(module.eval()(images), plain.eval()(images))


def losses_of(module: nn.Module, images: Tensor, targets: Tensor) -> list[float]:
    """Of two steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = training_loss(module.train()(images, targets), 0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_pairs_of_a_sharded_model_need_a_registered_method(images, targets, mesh):
    plain = attach(small_vit(), CLASSES, htm={"layer": 1, **ALL})
    module = sharded(copy.deepcopy(plain), mesh)
    register_fsdp_forward_method(module, "mixed_pairs")
    ours = module.mixed_pairs(images, targets)
    theirs = plain.mixed_pairs(images, targets)
    assert theirs is not None
    assert torch.equal(ours.mask, theirs.mask)
