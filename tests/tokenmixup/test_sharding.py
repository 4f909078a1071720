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


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(6, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(6, 3, 32, 32, generator=generator), targets


def sharded(module: TokenMixup, mesh: DeviceMesh) -> Any:
    for block in module.model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


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
def test_sharded_models_train_and_evaluate_as_whole_ones(batch, mesh, settings):
    plain = attach(small_vit(), CLASSES, **settings)
    modules = [plain, sharded(copy.deepcopy(plain), mesh)]
    assert all(isinstance(p, DTensor) for p in modules[1].parameters())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    for step in range(2):
        losses = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            torch.manual_seed(step)
            losses.append(training_loss(module.train()(*batch), 0.5))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    for ours, theirs in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(whole(ours.detach()), whole(theirs.detach()))
    assert torch.equal(*(module.eval()(batch[0]) for module in modules))


def test_pairs_of_a_sharded_model_need_a_registered_method(batch, mesh):
    plain = attach(small_vit(), CLASSES, htm={"layer": 1, **ALL})
    module = sharded(copy.deepcopy(plain), mesh)
    register_fsdp_forward_method(module, "mixed_pairs")
    ours = module.mixed_pairs(*batch)
    theirs = plain.mixed_pairs(*batch)
    assert theirs is not None
    assert torch.equal(ours.mask, theirs.mask)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rollout_steps": 1}, "htm.rollout_steps"),
        ({"detector": "gradient"}, "htm.detector=gradient"),
    ],
    ids=str,
)
def test_detectors_that_run_blocks_themselves_are_refused(batch, mesh, settings, key):
    module = sharded(attach(small_vit(), CLASSES, htm={"layer": 1, **settings}), mesh).train()
    with pytest.raises(ValueError, match=f"{key}.*: needs parameters without FSDP"):
        module(*batch)
    module.stop_mixing()
    assert module(*batch).score_loss is None


def test_a_model_that_is_sharded_already_is_refused(mesh):
    model: nn.Module = small_vit()
    fully_shard(model.blocks[1], mesh=mesh)  # type: ignore[index, arg-type]
    with pytest.raises(ValueError, match="is sharded by fully_shard: attach first"):
        attach(model, CLASSES, htm={"layer": 0})
