"""Training steps and evaluation on a device: equal to the CPU's, few waits, safe failures."""

import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import compress, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from reproduction.config import ROOT
from reproduction.data.workers import Batch
from reproduction.errors import PlainError
from reproduction.models import build
from reproduction.training.evaluate import Scorer, predict
from reproduction.training.graph import WARM_UP
from reproduction.training.metrics import not_finite
from reproduction.training.ranks import join_world
from tests.conftest import slow
from tests.gpu.cases import (
    AVERAGE,
    BOTH,
    CASES,
    CCT,
    CLIP,
    EVERY_STACK,
    GRAPH,
    NO_DROPOUT,
    QUICK_CASES,
    SMALL,
    TINY_CASES,
    TOLERANCES,
    VIT,
    Trained,
    distance,
    distance_of_losses,
    scheduled_steps,
    small_trainer,
    steps_of,
    train,
)
from tests.gpu.conftest import device_of
from tests.poison import KINDS, Poison
from tests.programs import PLACES
from tests.rehearsal import rehearsed

WAYS = ("false", "true", "cuda-graph")  # values of `compile`
CPU = torch.device("cpu")
COMPILED = [  # model, batch size, stack, how
    (model, batch, stack, compiling)
    for model, batch in ((CCT, 32), (VIT, 8))
    for stack in ([], BOTH)
    for compiling in ("true", "cuda-graph")
]
Record = Callable[[str, object], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_gpu = device_of(metafunc.config) == "cuda"
    if "case" in metafunc.fixturenames:
        rest = [case for case in TINY_CASES if case not in QUICK_CASES]
        tiny = [*QUICK_CASES, *map(slow, rest)]
        metafunc.parametrize("case", CASES if on_gpu else tiny)
    if "compiled" in metafunc.fixturenames:
        metafunc.parametrize(
            "compiled", COMPILED if on_gpu else [(SMALL, 6, BOTH, "true")], ids=str
        )


@cache
def trained_here(name: str) -> Trained:
    return train(CPU, CASES[name])


def test_losses_and_gradients_equal_the_cpus(
    case: str, device: torch.device, record_property: Record
):
    there = train(device, CASES[case])
    here = trained_here(case)
    far = distance(there, here)
    record_property("losses differ by", f"{far.losses:.1e}")
    record_property("gradients by", f"{far.gradients:.1e}")
    record_property("mixed", f"{mixed_in(there)}, {mixed_in(here)}")
    if "htm" in CASES[case].stack:
        assert all(line["mixed_tokens"] > 0 for line in here.lines)
    assert far.is_small(CASES[case].precision), far


def mixed_in(trained: Trained) -> str:
    line = trained.lines[-1]
    return f"{line['mixed_samples']} x {line['mixed_tokens']:.2f}"


def waits_of(work: Callable[[], object]) -> list[str]:
    """File and line in our code of each wait for the device."""
    places: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if ROOT / "src" in path.parents:
                places.append(f"{path.name}:{frame.lineno}")
                return

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            setattr(warnings, "showwarning", note)  # called within the stack of the wait
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return places


def pinned_batch() -> list[Tensor]:
    images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
    return [images.pin_memory(), (torch.arange(8) % 10).pin_memory()]


@pytest.mark.parametrize("stack", EVERY_STACK, ids=str)
def test_a_step_never_waits(stack: list[str], gpu: torch.device, record_property: Record):
    trainer = small_trainer(gpu, stack, "bf16")
    step = partial(trainer.train_step, *pinned_batch(), 8)
    step()  # allocates memory and selects kernels
    places = waits_of(step)
    record_property("waits", ", ".join(places) or "none")
    assert not places


def test_an_evaluation_waits_once(gpu: torch.device, record_property: Record):
    trainer = small_trainer(gpu, [], "bf16")
    model = trainer.module.model
    normalize = trainer.inputs.normalize
    world = trainer.world

    def waits_in(batches: int) -> list[str]:
        batch = Batch(*pinned_batch(), places=[*range(8)])
        scorer = Scorer({}, world)

        def evaluate() -> None:
            predict(model, normalize, [batch] * batches, world, "bf16", scorer)
            scorer.scores()

        return waits_of(evaluate)

    few = waits_in(1)
    many = waits_in(5)
    record_property("waits in 5 batches", ", ".join(many))
    assert len(many) == len(few)


def test_a_group_of_one_rank_trains_like_a_process_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, record_property: Record
):
    """With NCCL on a GPU, and DistributedDataParallel around the module."""
    alone = steps_of(small_trainer(device, BOTH, "float32", *NO_DROPOUT), 6, 3)
    rank = {"TORCHELASTIC_RUN_ID": "check", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rank["TORCHELASTIC_RESTART_COUNT"] = "0"
    for name, value in {**rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with join_world(device.type) as world:
        trainer = small_trainer(world.device, BOTH, "float32", *NO_DROPOUT)
        devices = [world.device] if world.device.type == "cuda" else None
        trainer.parallel = DistributedDataParallel(trainer.module, device_ids=devices)
        in_group = steps_of(trainer, 6, 3)
        summed = torch.ones(3, device=world.device)
        dist.all_reduce(summed)
        record_property("backend", dist.get_backend())
        assert summed.tolist() == [1, 1, 1]
    error = distance_of_losses(alone, in_group)
    record_property("losses differ by", f"{error:.1e}")
    assert error < 1e-4


@pytest.fixture
def compiler(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets the compiler; on a CPU it only traces, so that a test needs no C++ compiler."""
    if device.type == "cpu":
        options = {key: value for key, value in build.COMPILER.items() if key != "options"}
        monkeypatch.setattr(build, "COMPILER", {**options, "backend": "aot_eager"})
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
def test_compiled_steps_give_the_losses_of_eager_ones_by_one_graph(
    compiled: tuple[str, int, list[str], str], device: torch.device, record_property: Record
):
    model, batch, stack, compiling = compiled
    trainer = small_trainer(device, stack, "float32", f"compile={compiling}", model=model)
    eager = small_trainer(device, stack, "float32", model=model)
    before = counters["stats"]["unique_graphs"]
    lines = steps_of(trainer, batch, 4)
    error = distance_of_losses(lines, steps_of(eager, batch, 4))
    record_property("losses differ by", f"{error:.1e}")
    assert error <= TOLERANCES["float32"]
    if "htm" in stack:
        assert lines[-1]["mixed_tokens"] > 0
    is_compiled = compiling == "true" or device.type == "cuda"  # of which a CPU's graph is none
    assert counters["stats"]["unique_graphs"] - before == is_compiled


@pytest.fixture
def graphs(device: torch.device) -> Iterator[None]:
    """On a CPU the steps run that a graph would replay."""
    with rehearsed() if device.type == "cpu" else nullcontext():
        yield


PARTS = 3
POISONED = [  # optimizer, precision, compile, what is not finite, in which micro-batch
    ("adamw", "float32", "false", "loss", 0),
    ("sgd", "float32", "false", "gradient", 1),
    ("sgd", "bf16", "true", "loss", 1),
    ("adamw", "bf16", "cuda-graph", "gradient", 0),
]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "optimizer, precision, how, kind, part",
    [
        *POISONED,
        *(
            slow(*case)
            for case in product(("adamw", "sgd"), TOLERANCES, WAYS, KINDS, range(PARTS))
            if case not in POISONED
        ),
    ],
)
def test_a_step_that_is_not_finite_is_seen_in_its_line(
    optimizer: str,
    precision: str,
    how: str,
    kind: str,
    part: int,
    device: torch.device,
    request: pytest.FixtureRequest,
):
    """Float16's scaler skips the update after a gradient, and goes on."""
    if how == "cuda-graph":
        request.getfixturevalue("graphs")
    overrides = (f"recipe.optimizer={optimizer}", f"recipe.grad_accum_steps={PARTS}", AVERAGE)
    poison = Poison(PARTS, device)
    with mock.patch(PLACES["loss"], poison):
        trainer = small_trainer(device, BOTH, precision, *overrides, CLIP, f"compile={how}")
        steps_of(trainer, 6, WARM_UP + 1)
        before = {name: x.clone() for name, x in trainer.module.named_parameters()}
        poison.put(kind, part)
        (line,) = steps_of(trainer, 6, 1)
    reason = not_finite(line, precision == "float16")
    if precision == "float16" and kind == "gradient":
        assert not reason
        assert not math.isfinite(line["gradient_norm"])
        assert float(trainer.scaler.get_scale()) < 2**16
        after = dict(trainer.module.named_parameters())
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    else:
        assert kind in reason


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("float32", ("recipe.grad_accum_steps=2",)),
        slow("bf16", ("recipe.optimizer=sgd", "recipe.lr=0.05")),
        slow("float16", ()),
    ],
    ids=str,
)
def test_a_graph_of_the_step_equals_eager_steps(
    precision: str, more: tuple[str, ...], device: torch.device, record_property: Record
):
    """With all that may be in one, of two sizes. On a CPU the step is not captured."""
    stack = ["mixup", "cutmix", *BOTH]
    overrides = GRAPH + more
    graph = small_trainer(device, stack, precision, *overrides, "compile=cuda-graph")
    eager = small_trainer(device, stack, precision, *overrides, "compile=false")
    lines = scheduled_steps(graph)
    expected = scheduled_steps(eager)
    assert graph.graph is not None
    assert len(graph.graph.captured) == 2
    good = [math.isfinite(line["gradient_norm"]) for line in expected]
    assert [math.isfinite(line["gradient_norm"]) for line in lines] == good
    assert any(good)
    error = distance_of_losses(list(compress(lines, good)), list(compress(expected, good)))
    record_property("losses differ by", f"{error:.1e}")
    record_property("mixed tokens", f"{expected[-1]['mixed_tokens']:.2f}")
    assert all(line["mixed_tokens"] > 0 for line in expected)
    assert error <= TOLERANCES[precision]
    if device.type == "cpu":
        assert error == 0
        ours = graph.evaluated.state_dict()
        theirs = eager.evaluated.state_dict()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_graph_replays_without_waiting(gpu: torch.device, record_property: Record):
    trainer = small_trainer(gpu, ["mixup", "cutmix", *BOTH], "float16", "compile=cuda-graph")
    step = partial(trainer.train_step, *pinned_batch(), 8)
    for _ in range(WARM_UP + 1):
        step()
    places = waits_of(step)
    record_property("waits", ", ".join(places) or "none")
    assert not places


def refusal_of_a_capture() -> str:
    """The error of a step that waits for the device."""
    trainer = small_trainer(torch.device("cuda"), [], "float32", "compile=cuda-graph")

    def waiting(gradients: list[Tensor]) -> Tensor:
        norm = get_total_norm(gradients)
        return norm * float(norm)

    place = mock.patch("reproduction.training.step.get_total_norm", waiting)
    with place, pytest.raises(PlainError) as error:
        steps_of(trainer, 8, WARM_UP + 1)
    return str(error.value)


def test_a_step_that_waits_for_the_device_is_not_captured(
    gpu: torch.device, record_property: Record
):
    """In a process of its own, since a capture that fails leaves generators behind as they are."""
    with get_context("spawn").Pool(1) as pool:
        said = pool.apply(refusal_of_a_capture)
    record_property("said", said)
    assert said.startswith("compile=cuda-graph: the step cannot be captured (")


STILL = (
    "recipe.lr=1e-20",
    "recipe.min_lr=0",
    "recipe.warmup_lr=0",
    "recipe.transforms.erasing_prob=0",
)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("has_dropout", [True, False])
def test_steps_of_a_graph_draw_new_random_numbers(has_dropout: bool, device: torch.device):
    """Weights and images stay the same, so that only dropout can change the loss."""
    dropout = NO_DROPOUT
    if has_dropout:
        dropout = ("model.attn_drop=0.5",)
    trainer = small_trainer(device, BOTH, "float32", "compile=cuda-graph", *STILL, *dropout)
    losses: list[float] = []
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    for trainer.step in range(WARM_UP + 3):
        parts = trainer.train_step(images, torch.arange(6), 6)
        losses += [float(part["loss"].total) for part in parts]
    different = set(losses)
    if has_dropout:
        assert len(different) == WARM_UP + 3, losses
    else:
        assert len(different) == 1, losses
