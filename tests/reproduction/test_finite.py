"""NaN and infinity end a run with an error that names the step; float16's scaler skips the step."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reproduction.system.errors import PlainError
from reproduction.training import preflight, train
from reproduction.training.endings import explaining_step
from reproduction.training.loop import Trainer
from reproduction.training.metrics import BatchMetrics, Line, NonFinite
from tests.reproduction.conftest import SMALL, Command, small_trainer
from tests.reproduction.test_average import trainer_of as average_trainer
from tests.reproduction.test_training import MIXED, assert_same_result, folder, interrupt_at
from tokenmixup import assignment
from tokenmixup.watch import AttentionMap

pytestmark = pytest.mark.usefixtures("unevaluated")

CPU = torch.device("cpu")
Poison = Callable[[pytest.MonkeyPatch, Trainer], None]


def trainer_of(*overrides: str) -> Trainer:
    small = ("model.embed_dim=16", "recipe.warmup_epochs=0")
    return small_trainer(["htm", "vtm"], *small, *overrides)


def line_of(trainer: Trainer, images: Tensor | None = None) -> Line:
    """Trains one step and returns its metrics."""
    if images is None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=generator)
    with explaining_step(trainer.step + 1, trainer.config):
        parts = trainer.train_step(images, torch.arange(6), 6)
    metrics = BatchMetrics(trainer.world)
    trainer.step += 1
    metrics.add({"step": trainer.step}, 6, [x.metrics for x in parts])
    return metrics.fetch()[0]


def outputs(module: nn.Module, value: float) -> Callable[[], None]:
    """Lets a module return `value`; call the returned function to undo."""
    return module.register_forward_hook(lambda m, args, out: torch.full_like(out, value)).remove


def of_attention(value: float) -> Poison:
    def poison(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        own = AttentionMap.received
        patch.setattr(AttentionMap, "received", lambda *args: own(*args).fill_(value))

    return poison


def of_gains(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    score: Any = lambda saliency, rho: torch.full((6, 6), torch.nan)  # noqa: E731
    patch.setattr(trainer.module, "rules", trainer.module.rules._replace(score=score))


@pytest.mark.parametrize("poison", [of_attention(torch.nan), of_attention(torch.inf), of_gains])
def test_non_finite_gains_never_reach_the_assignment(
    monkeypatch: pytest.MonkeyPatch, poison: Poison
):
    original = assignment.linear_sum_assignment

    def solve(gain: Any, **kwargs: Any) -> Any:
        assert np.isfinite(gain).all(), "gains are not finite"
        return original(gain, **kwargs)

    trainer = trainer_of()
    poison(monkeypatch, trainer)
    monkeypatch.setattr("tokenmixup.assignment.linear_sum_assignment", solve)
    with pytest.raises(PlainError, match="step 1: the saliency gain is not finite"):
        line_of(trainer)


def broken(part: str, trainer: Trainer) -> Callable[[], None]:
    """Breaks a part of the model; call the returned function to undo."""
    module: Any = trainer.module
    if part == "difficulty":
        return outputs(module.scorenet.head, torch.nan)
    if part == "logits":
        return outputs(module.model.head, torch.inf)
    gradient = module.model.head.weight.register_hook(lambda grad: grad * torch.inf)
    return gradient.remove


@pytest.mark.parametrize("clip", ["null", "1.0"])
@pytest.mark.parametrize("part", ["difficulty", "logits", "gradient"])
def test_non_finite_values_are_named_with_their_step(part: str, clip: str):
    trainer, counter = trainer_of(f"recipe.clip_grad_norm={clip}"), NonFinite(scales=False)
    lines = [line_of(trainer)]
    broken(part, trainer)
    lines.append(line_of(trainer))
    assert [line["step"] for line in counter.writable(lines)] == [1]
    named = "the gradient is not finite" if part == "gradient" else "the loss is nan"
    with pytest.raises(PlainError, match=f"step 2: {named}; try "):
        counter.check(lines)


def test_a_gain_that_is_not_finite_is_named_where_no_exception_told_it():
    line = {"step": 3, "loss": math.nan, "gain_max": math.nan, "skipped": 1}
    with pytest.raises(PlainError, match="step 3: the saliency gain is not finite"):
        NonFinite(scales=True).check([line])


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_step_skipped_by_the_scaler_is_counted_and_changes_nothing(clip: str):
    """The loss is finite, the scaled gradient is not; averages and statistics are unchanged."""
    overrides = ["recipe.precision=float16", "recipe.ema_decay=0.75", "recipe.lr=0.1"]
    overrides += [f"recipe.clip_grad_norm={clip}"]
    trainer = average_trainer(*overrides)
    assert trainer.average is not None
    average = trainer.average.module.state_dict(prefix="average.")
    held = {**trainer.module.state_dict(), **average}
    counter, lines = NonFinite(scales=True), list[Line]()
    before = {name: value.clone() for name, value in held.items()}
    for step, scale in enumerate((1e38, 1024.0)):
        trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": scale})
        lines.append(line_of(trainer, torch.randn(6, 3, 8, 8)))
        assert math.isfinite(lines[-1]["loss"]) and float(trainer.not_finite) == (step == 0)
        same = [torch.equal(held[name], before[name]) for name in held]
        assert all(same) if step == 0 else not any(same)
    counter.check(lines)
    assert [line["skipped"] for line in counter.writable(lines)] == [1, 0]
    assert counter.state_dict() == {"skipped": 1, "in_a_row": 0}


def test_a_hundred_steps_in_a_row_skipped_by_the_scaler_end_the_run():
    skipped, good, lost = (
        {"step": 9, "loss": loss, "skipped": flag}
        for loss, flag in ((1.0, 1), (1.0, 0), (torch.nan, 1))
    )
    counter = NonFinite(scales=True)
    counter.check([*[skipped] * 99, good, *[skipped] * 99])
    again = NonFinite(scales=True)
    again.load_state_dict(counter.state_dict())
    with pytest.raises(PlainError, match=r"step 9: 100 updates in a row .* gradient is not finite"):
        again.check([skipped])
    with pytest.raises(PlainError, match="step 9: the loss is nan; try"):
        NonFinite(scales=True).check([lost])
    with pytest.raises(PlainError, match="step 9: the gradient is not finite"):
        NonFinite(scales=False).check([skipped])


@pytest.mark.slow
def test_run_with_skipped_steps_resumes_exactly_and_counts_them(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    args = ("recipe.precision=float16", *MIXED, *SMALL)
    original = Trainer.train_step

    def sometimes_broken(self: Trainer, *args: Any) -> Any:
        undo = broken("gradient", self) if self.step in (1, 4) else (lambda: None)
        result = original(self, *args)
        undo()
        return result

    monkeypatch.setattr(train, "resolve_device", lambda *args: "cpu")  # refuses float16
    monkeypatch.setattr(preflight, "resolve_device", lambda *args: "cpu")
    monkeypatch.setattr(Trainer, "train_step", sometimes_broken)
    assert command("train", "name=undisturbed", *args).status == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, KeyboardInterrupt())
        assert command("train", "name=mine", *args).status == 130
    assert command("train", "name=mine", *args, "resume=auto").status == 0
    assert_same_result(folder(tmp_path), folder(tmp_path, "undisturbed"))
    steps, _ = folder(tmp_path).read_metrics()
    assert [line["skipped"] for line in steps] == [0, 1, 0, 0, 1, 0]
    assert folder(tmp_path).read_summary()["skipped_steps"] == 2
