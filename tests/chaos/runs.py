"""Short runs in processes that can be killed, and the comparison of two runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reproduction.models.weights import read_file
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import flatten
from reproduction.system.errors import UserError
from reproduction.training.checkpoint import load_last

SMALL = (
    *("augmentation=[mixup,cutmix,htm,vtm]", "augmentation.htm.tau=inf", "augmentation.htm.rho=0"),
    *("model.embed_dim=16", "dataset.limit=80", "recipe.batch_size=10", "recipe.epochs=12"),
    *("recipe.transforms.erasing_prob=0.5", "recipe.log_every=2", "device=cpu"),
    "checkpoint.every_minutes=1e-6",  # after every step
)
PATIENCE = 300.0  # seconds for start-up and some steps on a shared machine
# Keys that depend on speed, directly or by the number of digits of such values (metrics_size).
TIMES = {"seconds", "train_seconds", "eval_seconds", "metrics_size", "images_per_second"}
RESULTS = ("top1_", "top5_", "epochs", "steps", "status", "parameters", "seed", "devices")


class Run(NamedTuple):
    """A run root/name, started by `launcher` if that is not empty; its messages are beside it."""

    root: Path
    name: str
    args: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / self.name)

    def errors(self) -> str:
        return (self.root / f"{self.name}.err").read_text()

    def last(self, rank: int = 0) -> tuple[int, int]:
        """Returns the process of a rank and its completed steps, or zeros before the first."""
        log = self.root / f"{self.name}.steps.{rank}"
        lines = log.read_text().splitlines() if log.exists() else []
        process, step = lines[-1].split() if lines else (0, 0)
        return int(process), int(step)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Starts or resumes the run in its own session and kills all its processes on exit."""
        child = ("-m", "tests.chaos.child", str(self.root / f"{self.name}.steps"))
        base = (f"name={self.name}", f"output_root={self.root}", "resume=auto")
        with (self.root / f"{self.name}.err").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, *self.launcher, *child, *base, *SMALL, *self.args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def reaches(self, process: subprocess.Popen[bytes], step: int) -> bool:
        """Waits until the run has completed `step`; returns False if it ends first."""
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            if self.last()[1] >= step:
                return True
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.001)
        return False

    def finish(self) -> RunFolder:
        """Starts or resumes the run, waits until it has finished and returns its folder."""
        with self.started() as process:
            assert process.wait(PATIENCE) == 0, self.errors()
        return self.folder


def differences(one: RunFolder, other: RunFolder) -> list[str]:
    """Returns the differences in checkpoint, best weights, metrics and results, except times."""
    return [
        *_compare_checkpoints(one, other),
        *_compare_metrics(one, other),
        *_compare_results(one, other),
    ]


def _compare_checkpoints(one: RunFolder, other: RunFolder) -> Iterator[str]:
    for name, read in (("checkpoint", last_state), ("best.safetensors", _best)):
        try:
            ours, theirs = (dict(_leaves(read(run))) for run in (one, other))
        except UserError as error:
            yield f"{one.path.name}: {name}: {error}"
            continue
        for key in sorted(ours.keys() | theirs.keys()):
            if key.rpartition(".")[2] not in TIMES and not _is_same(ours.get(key), theirs.get(key)):
                yield f"{one.path.name}: {name}: {key}"


def last_state(run: RunFolder) -> dict[str, Any]:
    """Returns the newest training state; raises UserError if none is readable."""
    newest = load_last(run)
    if newest is None:
        raise UserError(f"{run.path}: holds no checkpoint")
    return newest[1]


def _best(run: RunFolder) -> Any:
    return read_file(f"checkpoint={run.best_path}", run.best_path)


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every entry of a training state."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        yield from _leaves(dict(enumerate(state)), name)
    else:
        yield name, state


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()


def _compare_metrics(one: RunFolder, other: RunFolder) -> Iterator[str]:
    for kind, ours, theirs in zip(
        ("batches", "epochs"), one.read_metrics(), other.read_metrics(), strict=True
    ):
        if len(ours) != len(theirs):
            yield f"{one.path.name}: {len(ours)} lines of {kind} for {len(theirs)}"
        for mine, its in zip(ours, theirs, strict=False):
            if _without_times(mine) != _without_times(its):
                yield f"{one.path.name}: line of {kind}: {mine}"


def _compare_results(one: RunFolder, other: RunFolder) -> Iterator[str]:
    ours, theirs = (
        {key: value for key, value in flatten(run.read_summary()) if key.startswith(RESULTS)}
        for run in (one, other)
    )
    if ours != theirs:
        yield f"{one.path.name}: summary: {ours} for {theirs}"


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMES}
