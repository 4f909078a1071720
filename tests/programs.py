"""The programs of the experiments by command lines, and the files of a run.

The only file of the tests that knows how a program is started, how a run folder is read, and what
the experiments call their parts. Programs run in this process, in the current folder: `train(...)`,
`evaluate(...)` and `script(NAME, ...)` take the overrides of a command line, also in groups:
`train(SMALL, "name=mine")`. With PROGRAMS=process, or `apart=True`, each gets a process of its own.
"""

import csv
import json
import logging
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
import yaml
from hydra._internal.hydra import Hydra
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor, nn

from reproduction import load_run  # noqa: F401
from reproduction.compose import compose
from reproduction.config import ROOT, Config, validated
from reproduction.identity import flat, run_hash  # noqa: F401
from reproduction.models.build import (
    build_model,
    build_module,
    load_initial_weights,
    without_weights,
)
from reproduction.models.cct import CCT  # noqa: F401
from reproduction.reporting import report
from reproduction.studies.study import planned
from scripts import bench
from tests.images import read
from tokenmixup import TokenMixup
from tokenmixup.output import Stat

Line = dict[str, Any]
Overrides = str | Iterable["Overrides"]  # an override, or a group of them


def overrides_of(text: str) -> tuple[str, ...]:
    """The overrides of a text, none of which has a space."""
    return tuple(text.split())


def line_of(overrides: Overrides) -> list[str]:
    """The overrides of a group, also those of the groups in it."""
    if isinstance(overrides, str):
        return [overrides]
    return [override for part in overrides for override in line_of(part)]


# A run of seconds: a shallow, narrow CCT on a few digits, otherwise the defaults.
SMALL = overrides_of("""
    model.embed_dim=16 dataset.limit=60 dataset.eval_limit=60 recipe.batch_size=20
    recipe.epochs=2 recipe.log_every=2 checkpoint.every_epochs=1 device=cpu dataset.workers=0
""")
SHORT = tuple(x for x in SMALL if "limit" not in x)  # for other images than digits
SMALL_VIT = ("model.architecture=test_vit", "model.depth=6")  # timm's own test model, width 64
TORCHRUN = overrides_of("-m torch.distributed.run --nproc-per-node=2")
PATIENCE = 300.0  # seconds for what takes seconds, on a shared machine
# Keys that depend on speed, directly or by the number of digits of such values (metrics_size).
TIMES = {"seconds", "train_seconds", "eval_seconds", "metrics_size", "images_per_second"}
RESULTS = ("top1_", "top5_", "epochs", "steps", "status", "parameters", "seed", "devices")


class Result(NamedTuple):
    """The exit status and the output of a program."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


def assert_refused(result: Result, *named: str, status: int = 2) -> None:
    """Asserts that a program ended with this status and in one line, which names all these."""
    assert result.status == status, result
    assert len(result.lines) == 1, result
    for part in named:
        assert part in result.err, result


def assert_succeeded(result: Result, *parts: str) -> None:
    """Asserts that a program succeeded, and printed all these."""
    assert result.status == 0, result
    for part in parts:
        assert part in result.out, result


def run(
    program: str,
    *overrides: Overrides,
    apart: bool = False,
    draws: bool = True,
    spawns: bool = False,
) -> Result:
    """Runs a program of the repository, and returns what it prints.

    Unless it `draws`, pictures are empty files: to draw them takes longer than a small run.
    Unless it `spawns`, its ranks are copies of this process, which has imported all they need.
    Hydra composes each command twice, first to see if it is a sweep: here once.
    """
    if apart or os.environ.get("PROGRAMS") == "process":
        with started(overrides, program=program) as process:
            return ended(process)
    _forget()
    path = str(ROOT / program)
    with ExitStack() as stack:
        out = stack.enter_context(_captured(1))
        err = stack.enter_context(_captured(2))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(sys, "argv", [path, *line_of(overrides)]))
        handlers = list(logging.root.handlers)  # Hydra adds its own
        stack.enter_context(mock.patch.object(logging.root, "handlers", handlers))
        if not any("hydra.mode" in override for override in line_of(overrides)):
            stack.enter_context(mock.patch.object(Hydra, "get_mode", lambda *_, **given: None))
        if not draws:
            stack.enter_context(_undrawn())
        if not spawns:
            stack.enter_context(mock.patch.object(mp, "spawn", forked))
        status = _status_of(path)
        return Result(status, _read(out), _read(err))


def forked(*given: Any, **how: Any) -> Any:
    """Starts ranks as copies of this process, but that they have read no image."""
    read.update(train=0, held_out=0)
    return mp.start_processes(*given, **how, start_method="fork")


train = partial(run, "train.py", draws=False)
evaluate = partial(run, "eval.py", draws=False)


def code_of_a_copy(*overrides: Overrides) -> int | None:
    """Trains in a copy of this process, which may be killed; its exit code is then negative."""
    copy = mp.get_context("fork").Process(target=train, args=overrides)
    copy.start()
    copy.join(PATIENCE)
    return copy.exitcode


def script(name: str, *overrides: Overrides, apart: bool = False) -> Result:
    """Runs a script; the one that trains draws no pictures."""
    draws = name != "reproduce" or "--no-train" in overrides
    return run(f"scripts/{name}.py", overrides, apart=apart, draws=draws)


def trained(
    *overrides: Overrides, name: str = "mine", root: str | Path = "outputs", **how: Any
) -> "Run":
    """Trains a run to its end."""
    assert_succeeded(train(overrides, f"name={name}", f"output_root={root}", **how))
    return Run(Path(root, name))


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()


@contextmanager
def _undrawn() -> Iterator[None]:
    """Lets the pictures of a run be empty files, and those of an evaluation."""
    undrawn = dict.fromkeys(report.OF_TRAINED, _touch)
    with (
        mock.patch.dict(report.OF_TRAINED, undrawn),
        mock.patch.multiple(report, draw_accuracy=_touch, draw_mixed_samples=_touch),
        mock.patch.object(Figure, "savefig", lambda figure, path, **settings: path.touch()),
    ):
        yield


def _touch(path: Path, *_: Any) -> str:
    path.touch()
    return "not drawn"


def _status_of(path: str) -> int:
    """Runs a program as `__main__`, and returns its exit status as Python does."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextmanager
def _captured(number: int) -> Iterator[Any]:
    """Writes output 1 or 2 of this process, and of those that it starts, to the file it yields."""
    name = ("stdout", "stderr")[number - 1]
    with tempfile.TemporaryFile("w+", buffering=1) as file, mock.patch.object(sys, name, file):
        before = os.dup(number)
        os.dup2(file.fileno(), number)
        try:
            yield file
        finally:
            os.dup2(before, number)
            os.close(before)


def _forget() -> None:
    """Clears what functions of the experiments hold, such as open data, as in a new process."""
    ours = [module for name, module in sys.modules.items() if name.startswith("reproduction.")]
    for module in ours:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def started(
    *overrides: Overrides, program: str = "train.py", launcher: Overrides = (), **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Starts a program in a session of its own, whose processes are all killed at the end."""
    code = [str(ROOT / program)]
    if program.startswith("scripts/"):  # which import each other, and so are started as modules
        code = ["-m", program.removesuffix(".py").replace("/", ".")]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    standard = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, *line_of([launcher, code, overrides])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
        **standard | options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ended(process: subprocess.Popen[str], patience: float = PATIENCE) -> Result:
    """Waits for the end of a program, and returns what it printed."""
    out, err = process.communicate(timeout=patience)
    return Result(process.returncode, out, err)


def children(process: int) -> list[int]:
    """The processes that a process has started, as far as they live."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    text = "".join(path.read_text() for path in tasks)
    return [int(pid) for pid in text.split()]


def command_of(process: int) -> str:
    path = Path(f"/proc/{process}/cmdline")
    return path.read_text() if path.exists() else ""


def eventually(condition: Callable[[], Any], patience: float = PATIENCE) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Run:
    """The files of a run folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def lines(self) -> list[Line]:
        """The lines of metrics.jsonl; one that a kill has cut short is left out."""
        path = self.path / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if "step" in line]

    @property
    def epochs(self) -> list[Line]:
        return [line for line in self.lines if "step" not in line]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "config.yaml").read_text())

    @property
    def checkpoints(self) -> list[Path]:
        """The files to resume from, newest first."""
        files = (self.path / "checkpoints").glob("last*.pt")
        return sorted(files, key=lambda path: (len(path.name), path.name))

    def checkpoint(self, age: int = 0) -> dict[str, Any]:
        """The newest state of training, or an older one: `step`, `module`, `model_ema`, ..."""
        return torch.load(self.checkpoints[age], weights_only=True)

    def best(self) -> dict[str, Tensor]:
        return load_file(self.path / "checkpoints" / "best.safetensors")

    def evaluation(self, weights: str = "last") -> dict[str, Any]:
        return json.loads((self.path / f"evaluation-{weights}.json").read_text())

    def facts(self) -> dict[str, Any]:
        """State, best weights, lines and results by dotted names, but for times."""
        results = {key: x for key, x in self.summary.items() if key.startswith(RESULTS)}
        state = self.checkpoint()
        for copy in ("config", "summary"):  # which are compared as files
            state.pop(copy, None)
        parts = {"state": state, "best": self.best(), "lines": self.lines}
        leaves = _leaves({**parts, "summary": results})
        return {key: x for key, x in leaves if key.rpartition(".")[2] not in TIMES}


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every entry of nested mappings and lists."""
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, Tensor):
        yield name, (state.dtype, state.shape, state.numpy(force=True).tobytes())
    else:
        yield name, state


def same(run: Run, other: Run) -> list[str]:
    """Returns the names of the facts in which two runs differ."""
    ours = run.facts()
    theirs = other.facts()
    return [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


# What a run calls in its step, in its loader (also in a worker) and in its evaluation.
PLACES = {
    "step": "reproduction.training.step.learning_rate",
    "loader": "reproduction.data.loaders.seed_generators",
    "evaluation": "reproduction.training.evaluate.evaluating",
    "loss": "reproduction.training.step.training_loss",
    "gain": "tokenmixup.assignment.check_finite",
}


@contextmanager
def planted(place: str, bug: Callable[[], object]) -> Iterator[None]:
    """Lets the programs of this process meet a bug."""
    with mock.patch(PLACES[place], lambda *_: bug()):
        yield


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def runs(root: str | Path = "outputs") -> list[Run]:
    return [Run(path.parent) for path in sorted(Path(root).glob("*/config.yaml"))]


def statuses() -> list[str]:
    return [run.summary["status"] for run in runs()]


def cells(text: str) -> list[list[str]]:
    """The cells of all rows of the Markdown tables in a text."""
    rows = []
    for line in text.splitlines():
        is_rule = set(line) <= set("|-: ")
        if line.startswith("|") and not is_rule:
            row = line.split("|")[1:-1]
            rows.append([cell.strip() for cell in row])
    return rows


def predictions(path: str | Path) -> list[dict[str, str]]:
    """The rows of a file of predictions, or of another table of eval.py."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def as_recorded(line: Line) -> Line:
    """A line of metrics.jsonl by the names of recorded ones, which called easy samples mixed.

    Their tokens were those replaced in each easy sample.
    """
    if "easy_samples" not in line:
        return line
    easy = line["easy_samples"]
    tokens = line["mixed_samples"] * line["mixed_tokens"] / max(easy, 1)
    later = ("easy_samples", "input_mixed_samples")
    others = {key: value for key, value in line.items() if key not in later}
    return others | {"mixed_samples": easy, "mixed_tokens": tokens}


def assert_same_lines(ours: list[Line], theirs: list[Line], **bound: float) -> None:
    """Compares lines of metrics.jsonl but for the speed, within `abs` or `rel`."""
    speed = {"images_per_second": 0}
    for line, other in zip(ours, theirs, strict=True):
        assert line | speed == pytest.approx(other | speed, **bound)


def config_of(*overrides: Overrides) -> Config:
    """The configuration of a command line."""
    return compose(line_of(overrides))


def hash_of(raw: dict[str, Any]) -> str:
    """The hash of a saved configuration."""
    return run_hash(validated(Config, raw))


def report_name(study: str, seeds: int | None, scale: str, *overrides: Overrides) -> str:
    """The name of the files to which a command writes the table of its study."""
    _, (part,) = planned(study, seeds, scale, line_of(overrides))
    return part.file


def dry(*overrides: Overrides) -> tuple[dict[str, Any], str]:
    """The configuration of a command line as nested mappings, and the hash of its run."""
    config = config_of(overrides)
    return asdict(config), run_hash(config)


def initial_model(*overrides: Overrides, classes: int = 10) -> nn.Module:
    """The plain model with which a run of these overrides begins."""
    config = config_of(overrides).model
    model = build_model(config, classes)
    load_initial_weights(config, model)
    return model


class Step(NamedTuple):
    """What a training step has computed, and the trainer, whose weights it has updated."""

    losses: list[float]  # of each micro-batch
    gradients: dict[str, Tensor]  # as the optimiser got them, by the names of `trainer.module`
    lr: float
    parts: list[dict[str, Stat]]  # figures of each micro-batch
    trainer: Any


def build_trainer(*overrides: Overrides) -> Any:
    """The trainer of a run of these overrides, without its images."""
    return bench.build_trainer(line_of(overrides))


def step(trainer: Any, batch: tuple[Tensor, Tensor]) -> Step:
    """Trains a step on images (`b 3 h w`, uint8) and classes (`b`).

    Overrides build a new trainer.
    """
    images, classes = batch
    if isinstance(trainer, tuple | list):
        trainer = build_trainer(trainer)
    gradients: dict[str, Tensor] = {}

    def keep(optimizer: Any, *_: Any) -> None:
        for name, parameter in trainer.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()

    handle = trainer.optimizer.register_step_pre_hook(keep)
    try:
        parts = trainer.train_step(images, classes, len(images))
    finally:
        handle.remove()
    losses = [value_of_stat(part["loss"]) for part in parts]
    return Step(losses, gradients, trainer.lr, parts, trainer)


def value_of_stat(stat: Stat) -> float:
    """A figure that has a divisor, 0 for 0 / 0."""
    assert stat.divisor is not None
    return float(stat.total) / max(float(stat.divisor), 1)


def meta_module(*overrides: Overrides, classes: int = 10) -> TokenMixup:
    """The module of a run, without values and weights from files."""
    config = config_of(overrides)
    with torch.device("meta"):
        return build_module(without_weights(config.model), config.augmentation, classes)


def snapshot(folder: str | Path = ".") -> dict[str, object]:
    """Maps every path under a folder to its content or link target; does not follow links."""
    entries: dict[str, object] = {}
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(root, name)
            if path.is_symlink():
                entries[str(path)] = os.readlink(path)
            elif path.is_file():
                entries[str(path)] = path.read_bytes()
            else:
                entries[str(path)] = None
    return entries


def of_runs(files: dict[str, object]) -> dict[str, object]:
    """Leaves out of a snapshot what Hydra writes for each command."""
    return {x: content for x, content in files.items() if not re.search(r"\.hydra|train\.log", x)}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Undoes `flat`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
    return tree
