"""Random combinations of valid settings train and resume exactly."""

from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from reproduction.config import STACK, Config
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.start.resolve import resolve
from reproduction.system.errors import PlainError, UserError
from reproduction.training import train
from reproduction.training.train import run_training
from tests.conftest import settled
from tests.reproduction.conftest import SMALL, at_step
from tests.reproduction.test_training import assert_same_result
from tokenmixup.rules import CHOICES as RULES

STEPS = 6  # of the runs of SMALL
EXAMPLES = settings.default.max_examples // 14  # 7, or more by the chosen profile
CHOICES: dict[str, list[Any]] = {
    "model.depth": [2, 3],
    "model.pooling": ["sequence", "class_token"],
    "model.positional_embedding": ["learnable", "sine"],
    "model.checkpoint_blocks": ["true", "false"],
    "model.attn_drop": [0, 0.1],
    "augmentation.off_epoch": ["null", 1],
    "augmentation.mixup.prob": [1, 0.5],
    "augmentation.manifold_mixup.layers": ["[0]", "[0,1]"],
    "augmentation.htm.layer": [0, 1, [0, 1]],
    "augmentation.htm.tau": [0, 2.3, "inf"],
    "augmentation.htm.pooling": ["auto", "attention", "average"],
    "augmentation.htm.stop_gradient": ["true", "false"],
    "augmentation.htm.rollout_steps": [0, 0, 1],
    **{f"augmentation.htm.{option}": [*table] for option, table in RULES.items()},
    "augmentation.vtm.layer": [1, 1, "[1,2]"],
    "augmentation.vtm.stop_gradient": ["true", "false"],
    "recipe.grad_accum_steps": [1, 3],
    "recipe.optimizer": ["adamw", "sgd"],
    "recipe.momentum": [0, 0.9],
    "recipe.schedule_step": ["epoch", "batch"],
    "recipe.clip_grad_norm": ["null", 1.0],
    "recipe.ema_decay": ["null", 0.9],
    "recipe.precision": ["float32", "bf16", "float16"],
    "recipe.evaluate_every": [1, 2],
    "recipe.transforms.auto_augment": ["null", "rand-m9-mstd0.5-inc1", "3a"],
    "recipe.transforms.erasing_mode": ["const", "rand", "pixel"],
    "checkpoint.every_minutes": ["null", 1e-6],  # after every step
    "checkpoint.keep": [1, 2],
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    stack = draw(st.sets(st.sampled_from(STACK)))
    left_out = tuple(f"augmentation.{name}." for name in {*STACK} - stack)
    keys = [key for key in CHOICES if not key.startswith(left_out)]
    values = {key: draw(st.sampled_from(CHOICES[key])) for key in keys}
    values = settled(values, prefix="augmentation.htm.")
    line = [f"{key}={value}" for key, value in values.items()]
    return [*SMALL, f"augmentation=[{','.join(sorted(stack))}]", *line]


def resolved(root: str, name: str, line: list[str]) -> Config:
    args = [*line, f"output_root={root}", f"name={name}", "resume=auto"]
    return resolve(compose("train", args))


def fail() -> None:
    raise RuntimeError("any error")


@pytest.fixture(autouse=True)
def float16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains the scaler too, which a run on a CPU does not get to."""
    monkeypatch.setattr(train, "resolve_device", lambda *args: "cpu")


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command_lines(), st.integers(0, STEPS - 1))
def test_runs_with_any_settings_resume_exactly(line: list[str], step: int):
    with TemporaryDirectory() as root:
        try:
            undisturbed, failing = (
                resolved(root, name, line) for name in ("undisturbed", "failing")
            )
        except UserError:  # an invalid combination
            assume(False)
        run_training(undisturbed)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(PlainError, match="any error"):
            at_step(patch, step, fail)
            run_training(failing)
        run_training(failing)
        assert_same_result(RunFolder.of(undisturbed), RunFolder.of(failing))
