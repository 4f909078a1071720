"""A compiled module is one graph, equal to eager bit for bit, for every method and model.

`aot_eager` traces as inductor does and runs eager's own kernels. `make test` runs one case of
each, `make test-all` all of them.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import CLASSES, assert_nothing_is_left, gradients_of, of_each, small_vit
from tests.tokenmixup.models import EXAMPLES, WITH_MEMORY, build
from tokenmixup import TokenMixup, attach, training_loss

HTM: dict[str, Any] = {"layer": 1, "rho": 0.0}
VTM: dict[str, Any] = {"layer": 2, "kappa": 3}
BOTH: dict[str, Any] = {"htm": HTM, "vtm": VTM}
SETTINGS: dict[str, dict[str, Any]] = {
    "several layers": {
        "htm": {"layer": [0, 2], "rho": 0.0},
        "vtm": {"layer": [1, 2], "kappa": [2, 3]},
    },
    "rollout": {"htm": {**HTM, "rollout_steps": 1}, "vtm": VTM},
    "published": {
        "htm": {**HTM, "mask_rule": "published", "order": "published"},
        "vtm": {**VTM, "class_token_offset": "published"},
    },
    "gradient": {"htm": {**HTM, "detector": "gradient"}},
    "checkpointing": {"htm": {**HTM, "layer": 0}, "checkpoint_blocks": True},
}
slow = pytest.mark.slow
OTHERS = ("eva02", "beit", "relpos", "torchvision", "hf vit", "encoder", "by hand", "swin, padded")
OTHERS += ("swin v2", "pvt v2, pooled", "hiera")
STEPS = ((6, 3), (6, 0), (6, 6), (5, 2))  # samples and easy ones among them
dropping_vit = partial(small_vit, attn_drop_rate=0.1, drop_path_rate=0.1, depth=3)


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch.compiler.reset()


def mixing(module: TokenMixup) -> TokenMixup:
    """Samples of class 0 become the easy ones."""
    with torch.no_grad():
        for scorenet in module.scorenets.values():
            scorenet.head.weight.zero_()  # type: ignore[union-attr, operator]
            scorenet.head.bias.copy_(9.0 * torch.eye(CLASSES)[0])  # type: ignore[union-attr, operator]
    return module.train()


def pair(make: Callable[[], nn.Module], **settings: Any) -> tuple[TokenMixup, TokenMixup]:
    torch.manual_seed(0)
    module = mixing(attach(make(), CLASSES, **settings))
    return module, copy.deepcopy(module)


def compiled(module: TokenMixup) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    module.compile(backend=counter, fullgraph=True, dynamic=False)
    return counter


def batch_of(pixels: int, size: int, easy: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, 3, pixels, pixels, generator=generator)
    return images, torch.eye(CLASSES)[(torch.arange(size) >= easy).long()]


def step(
    module: nn.Module,
    pixels: int,
    size: int,
    easy: int,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Returns output, loss and gradients of a training step."""
    torch.manual_seed(seed)
    module.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        output = module(*batch_of(pixels, size, easy))
        loss = training_loss(output, 0.1)
    loss.backward()
    found = [x for x in output if isinstance(x, Tensor)]
    gradients = gradients_of(module).values()
    return [*found, loss, *gradients]


def assert_same_steps(
    one: nn.Module,
    other: nn.Module,
    pixels: int,
    steps: Any = STEPS,
    precision: torch.dtype = torch.float32,
) -> None:
    for seed, (size, easy) in enumerate(steps):
        ours = step(one, pixels, size, easy, seed, precision)
        theirs = step(other, pixels, size, easy, seed, precision)
        for found, expected in zip(ours, theirs, strict=True):
            assert torch.equal(found, expected)


def test_one_graph_for_each_size_whatever_the_number_of_easy_samples():
    eager, module = pair(dropping_vit, **BOTH)
    counter = compiled(module)
    assert_same_steps(module, eager, 32)
    assert counter.frame_count == 2
    assert_nothing_is_left(module)


@pytest.mark.parametrize("name", of_each(SETTINGS, ("published",)))
def test_every_method_is_one_graph(name: str):
    eager, module = pair(dropping_vit, **SETTINGS[name])
    counter = compiled(module)
    assert_same_steps(module, eager, 32, STEPS[:2])
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", of_each(OTHERS, ()))
def test_every_example_of_model_is_one_graph(name: str):
    if name == "hf vit" and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11 tells transformers that it exports, which then passes a mask")
    model, adapter = build(name)
    settings = BOTH
    if name not in WITH_MEMORY:
        settings = {"htm": {**HTM, "layer": EXAMPLES[name].layers[1]}}
    eager, module = pair(lambda: model, adapter=adapter, **settings)
    counter = compiled(module)
    assert_same_steps(module, eager, EXAMPLES[name].pixels, STEPS[:2])
    assert counter.frame_count == 1


@slow
def test_autocast_is_one_graph_with_eager_gradients():
    """The compiled backward pass is without autocast, as the eager one: ScoreNet's is exact."""
    eager, module = pair(dropping_vit, htm=HTM)
    counter = compiled(module)
    assert_same_steps(module, eager, 32, STEPS[:2], torch.bfloat16)
    assert counter.frame_count == 1


@slow
def test_manifold_mixup_is_one_graph_for_each_layer_that_is_drawn():
    eager, module = pair(dropping_vit, htm=HTM, manifold_mixup={"layers": [0, 1]})
    counter = compiled(module)
    assert_same_steps(module, eager, 32, [(6, 3)] * 6)
    assert counter.frame_count == 2


@slow
def test_the_end_of_mixing_is_one_new_graph():
    eager, module = pair(dropping_vit, **BOTH)
    counter = compiled(module)
    for stops in (False, True):
        if stops:
            eager.stop_mixing()
            module.stop_mixing()
        assert_same_steps(module, eager, 32, STEPS[:2])
    assert counter.frame_count == 2


@slow
def test_ranks_average_the_gradients_of_one_graph_each(tmp_path: Path):
    """Two ranks by gloo, with the same batch: the gradients are those of one process."""
    eager, _ = pair(dropping_vit, **BOTH)
    expected = step(eager, 32, 6, 3)
    arguments = (str(tmp_path / "meeting"), [x.detach() for x in expected])
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=2, start_method="spawn")


def _rank(rank: int, meeting: str, expected: list[Tensor]) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    _, module = pair(dropping_vit, **BOTH)
    counter = compiled(module)
    parallel = DistributedDataParallel(module)
    for _ in range(2):
        found = step(parallel, 32, 6, 3)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    assert counter.frame_count == 1
    torch.distributed.destroy_process_group()
