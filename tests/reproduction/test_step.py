"""Updates in micro-batches equal those of full batches, except that HTM pairs within each."""

import time
import traceback
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from reproduction.training.distributed import World, data_parallel
from reproduction.training.loop import MicroBatch, Trainer
from reproduction.training.metrics import BatchMetrics
from tests.reproduction.conftest import Command, small_trainer
from tokenmixup.horizontal import mix_horizontal

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
PLAIN = ["model.embed_dim=16", "model.attn_drop=0", "model.drop_path=0", "recipe.warmup_epochs=0"]
RHO = "augmentation.htm.rho=0.0002"  # of which tokens are replaced
SGD = [*PLAIN, "recipe.optimizer=sgd", "recipe.lr=0.1"]  # Adam's steps take the sign of noise


def trainer_of(stack: list[str], count: int, *overrides: str) -> Trainer:
    return small_trainer(stack, f"recipe.grad_accum_steps={count}", *overrides)


def images_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count) % 10


class Twice(World):
    """Two ranks with equal inputs."""

    def sum(self, values: Tensor) -> Tensor:
        return 2 * values


def line_of(parts: list[MicroBatch], world: World = ALONE) -> dict[str, float]:
    metrics = BatchMetrics(world)
    metrics.add({}, 1, [part.metrics for part in parts])
    (line,) = metrics.fetch()
    return line


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("stack", [[], ["vtm"]], ids=str)
def test_updates_in_micro_batches_equal_full_batches(stack: list[str], count: int):
    """7 images, so that sizes differ."""
    full, cut = trainer_of(stack, 1, *SGD), trainer_of(stack, count, *SGD)
    for _ in range(3):
        ours, theirs = (line_of(x.train_step(*images_of(7), 7)) for x in (cut, full))
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    for ours, theirs in zip(cut.module.parameters(), full.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_clipping_uses_the_unscaled_norm(precision: str):
    """The length of a plain SGD step is the learning rate times the maximum norm."""
    plain = [*SGD, "recipe.momentum=0", "recipe.weight_decay=0", "recipe.clip_grad_norm=0.01"]
    trainer = trainer_of([], 1, *plain, f"recipe.precision={precision}")
    before = [p.detach().clone() for p in trainer.module.parameters()]
    trainer.train_step(*images_of(6), 6)
    moved = [now - was for now, was in zip(trainer.module.parameters(), before, strict=True)]
    length = torch.cat([x.detach().flatten() for x in moved]).norm()
    assert float(length) == pytest.approx(0.1 * 0.01, rel=0.02)


def test_pairs_are_matched_within_a_micro_batch():
    mixed = [
        line_of(trainer_of(["htm"], count, *PLAIN, RHO).train_step(*images_of(6), 6))
        for count in (1, 2, 6)
    ]
    assert [line["mixed_samples"] for line in mixed] == [6, 6, 6]
    assert mixed[0]["mixed_tokens"] > 1 and mixed[1]["mixed_tokens"] > 1
    assert mixed[2]["mixed_tokens"] == 0  # a micro-batch of one sample


def test_metrics_of_an_update_average_over_all_images():
    parts = trainer_of(["htm"], 2, *PLAIN, RHO).train_step(*images_of(5), 5)
    assert [len(part.output.logits) for part in parts] == [3, 2]
    line = line_of(parts)

    def mean(values: list[Tensor | None]) -> float:
        large, small = values
        assert large is not None and small is not None
        assert float(large.detach()) != float(small.detach())
        return (3 * float(large.detach()) + 2 * float(small.detach())) / 5

    stats = [part.output.stats for part in parts]
    assert [of["difficulty"] for of in stats] == [part.output.score_loss for part in parts]
    assert line["loss"] == pytest.approx(mean([part.loss for part in parts]), abs=1e-6)
    assert line["difficulty"] == pytest.approx(mean([of["difficulty"] for of in stats]))
    assert line["mixed_samples"] == 5
    assert line["mixed_tokens"] == pytest.approx(mean([of["mixed_tokens"] for of in stats]))
    both = line_of(parts, Twice(0, 1, CPU))
    assert (both["mixed_samples"], both["loss"]) == (10, pytest.approx(line["loss"]))
    assert (both["gain_max"], both["gain_mean"]) == (line["gain_max"], line["gain_mean"])
    gains = torch.cat([part.output.gain[part.output.mask] for part in parts])
    assert line["gain_max"] == gains.max() == max(of["gain_max"] for of in stats)
    assert line["gain_mean"] == pytest.approx(float(gains.mean()))


def test_images_per_second_cover_all_batches_since_the_last_fetch(
    monkeypatch: pytest.MonkeyPatch,
):
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    trainer = trainer_of([], 2, *PLAIN)
    metrics = BatchMetrics(World(0, 1, CPU))
    for seconds, batches, speed in ((2.0, 3, 9.0), (4.0, 2, 3.0)):
        for step in range(batches):
            parts = trainer.train_step(*images_of(6), 6)
            metrics.add({"step": step}, 6, [x.metrics for x in parts])
        now[0] += seconds
        assert [line["images_per_second"] for line in metrics.fetch()] == [speed] * batches


@pytest.mark.parametrize("modes", [("cuda-graph", "false"), ("false", "cuda-graph")])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_goes_on_in_a_graph_or_without(modes: tuple[str, str], optimizer: str):
    """A learning rate that float32 holds, since a graph reads it from a tensor."""
    same = [*PLAIN, f"recipe.optimizer={optimizer}", "recipe.lr=0.0625", "recipe.min_lr=0.0625"]
    begun, resumed = (trainer_of([], 1, *same, f"compile={mode}") for mode in modes)
    for trainer in (begun, resumed):
        for step in range(2):
            trainer.schedule(step, 0)
            trainer.train_step(*images_of(6), 6)
            trainer.step += 1
        if trainer is begun:
            state = deepcopy(begun.state())
            resumed.restore("checkpoint", state)
    for step in range(2, 4):
        begun.schedule(step, 0)
        begun.train_step(*images_of(6), 6)
        begun.step += 1
    assert begun.step == resumed.step == 4
    for ours, theirs in zip(resumed.module.parameters(), begun.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def alone() -> Iterator[None]:
    """Initialises a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_are_reduced_once_per_update(alone: None):
    trainer = trainer_of([], 3, *PLAIN)
    trainer.world = World(0, 2, CPU)
    trainer.parallel = data_parallel(trainer.module, trainer.world)
    sums = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sums.append(bucket.is_last())
        done = torch.futures.Future[Tensor]()
        done.set_result(bucket.buffer())
        return done

    trainer.parallel.register_comm_hook(None, count)
    for _ in range(2):
        trainer.train_step(*images_of(6), 12)
    assert sums.count(True) == 2


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_follows_the_recipe(allowed: bool):
    trainer_of([], 1, f"recipe.tf32={str(allowed).lower()}")
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed


def test_twelve_calls_lead_from_the_command_to_algorithm_1(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    """The twelfth is `mix_horizontal`; train.py itself and the plain model are not counted."""
    stacks: list[list[str]] = []

    def mix(*args: Any) -> Any:
        frames = traceback.extract_stack()
        parts = [{*Path(frame.filename).parts} for frame in frames]
        own = [
            {"reproduction", "tokenmixup", "train.py"} & x and not {"tests", "cct.py"} & x
            for x in parts
        ]
        stacks.append([frame.name for frame, is_own in zip(frames, own, strict=True) if is_own])
        return mix_horizontal(*args)

    monkeypatch.setattr("tokenmixup.module.mix_horizontal", mix)
    args = ["dataset.limit=10", "recipe.epochs=1", "recipe.batch_size=10", "dataset.workers=0"]
    result = command("train", "model.embed_dim=16", *args)
    assert result.status == 0, result.err
    training = ["run", "_in_turn", "main", "run_training", "train", "fit", "train_step"]
    assert stacks[0] == [*training, "_update", "forward", "_run", "_run_block"]
