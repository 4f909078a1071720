"""One process or many: the ranks that torchrun has started, or that `on_ranks` starts."""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from reproduction.config import Config
from reproduction.errors import (
    STOP_SIGNALS,
    OneLineError,
    RankFailed,
    Stopped,
    UserError,
    warn,
)
from reproduction.machine import MEETING, is_first_rank, launched_ranks, local_ranks, usable_cores
from reproduction.training.stop import ending, handling, stop_at_once

Result = TypeVar("Result")

SECONDS_OF_OTHERS = 2.0  # for ranks that know the reason to say it first
GRACE_SECONDS = 10.0  # for the other ranks to end by themselves, then to end on SIGTERM
SIGNAL_STATUS = 128  # exit status of a signal, as in a shell: 128 + its number


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Returns the maximum of `values` over all ranks, on every rank: nan if one of them is."""
        of_ranks = [values]
        if self.size > 1:  # a reduction may drop nan, which another rank's number replaces
            of_ranks = [torch.empty_like(values) for _ in range(self.size)]
            dist.all_gather(of_ranks, values)
        return torch.stack(of_ranks).amax(dim=0)

    def gather(self, value: Result) -> list[Result]:
        """Returns the values of all ranks on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Result) -> Result:
        """Returns the first rank's value on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Copies the first rank's buffers: batch normalisation sees only its rank's images."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            device_ids = None
            if self.device.type == "cuda":  # NCCL would warn that it has to guess the device
                device_ids = [self.device.index]
            dist.barrier(device_ids=device_ids)

    def parallel(self, module: nn.Module) -> nn.Module:
        """Wraps a module so that backward passes reduce its gradients over the ranks."""
        if self.size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)


def resolve_device(
    device: str, devices: int, precision: str = "float32", compile: bool | str = False
) -> str:
    """Returns `cpu` or `cuda`; UserError if there are not enough GPUs, or for what needs one."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus > 0 else "cpu"
    if device == "cuda" and local_ranks(devices) > gpus:
        raise UserError(f"device=cuda devices={devices}: this machine has {gpus} CUDA GPUs")
    if device == "cpu" and precision == "float16":
        raise UserError("recipe.precision=float16: is for a GPU; a CPU takes float32 or bf16")
    if device == "cpu" and compile == "cuda-graph":
        raise UserError("compile=cuda-graph: is for a GPU; a CPU takes false or true")
    return device


def visible_gpus() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return names.split(",")[:count]


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Joins the process group described by the environment: NCCL on CUDA, gloo on a CPU."""
    if launched_ranks() is None:
        yield World(0, 1, torch.device(device))
        return
    torch_device = torch.device(device)
    if device == "cuda":
        torch_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(torch_device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if MEETING in os.environ:
        store: dist.Store = dist.FileStore(os.environ[MEETING], size)
    else:  # torchrun keeps its store over restarts, with the addresses of dead ranks
        store, rank, size = next(iter(dist.rendezvous("env://")))
        store = dist.PrefixStore(f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, torch_device)
    finally:
        dist.destroy_process_group()


@dataclass
class Ended:
    """How the processes of `_spawned` have ended."""

    signals: list[int]  # to this process, which forwards them
    outcomes: dict[int, Any]  # what ranks have returned or raised, but for those that were killed
    codes: list[int]  # exit statuses by rank, negative for a signal
    first: int  # the rank that was the first to end by an error, else 0


def on_ranks(function: Callable[[Config], Result], config: Config) -> Result:
    """Returns the first rank's `function(config)`: of this process if it is a rank or alone.

    Else of `config.devices` new processes. Any error but a signal's Stopped is a OneLineError.
    """
    if config.devices == 1 or launched_ranks() is not None:
        with as_rank():
            return function(config)
    return cast(Result, _result(_spawned(function, config)))


def _spawned(function: Callable[[Config], Any], config: Config) -> Ended:
    """Runs a function in `config.devices` new processes, to their end."""
    received: list[int] = []
    pids: list[int] = []

    def forward(signum: int, _: Any) -> None:
        """Forwards a signal to the ranks; a second Ctrl-C ends them at once."""
        at_once = bool(received) and signum == signal.SIGINT
        received.append(signum)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if at_once else signum)

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)  # says it too
    first = 0
    with TemporaryDirectory() as meeting, handling(forward):
        given = function, config, Path(meeting)
        ranks = mp.spawn(_new_rank, given, config.devices, join=False)  # CUDA: not after a fork
        pids += ranks.pids()
        if received:  # while they were started
            forward(received[0], None)
        try:
            while not ranks.join(grace_period=GRACE_SECONDS):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            first = error.error_index
        outcomes = _outcomes(Path(meeting))
    return Ended(received, outcomes, [process.exitcode for process in ranks.processes], first)


def _outcomes(meeting: Path) -> dict[int, Any]:
    """What ranks have returned or raised, by rank."""
    paths = [path for path in sorted(meeting.iterdir()) if path.name.isdecimal()]
    return {int(path.name): pickle.loads(path.read_bytes()) for path in paths}  # noqa: S301 - ours


def _result(ended: Ended) -> Any:
    """What the ranks return; raises the error of the one that says why they end."""
    reasons = []
    for rank, outcome in ended.outcomes.items():
        if isinstance(outcome, OneLineError) and not isinstance(outcome, RankFailed):
            reasons.append(rank)
    # The first one to end may only know that another is gone.
    rank = reasons[0] if reasons else ended.first
    code = ended.codes[rank]
    if rank in ended.outcomes:
        outcome = ended.outcomes[rank]
        if isinstance(outcome, UserError):
            raise outcome
        if isinstance(outcome, OneLineError):
            raise RankFailed(f"rank {rank}: {outcome}")
        return outcome
    if ended.signals:
        raise Stopped(ended.signals[0])
    if code - SIGNAL_STATUS in STOP_SIGNALS:
        raise Stopped(code - SIGNAL_STATUS)
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else "died"
    raise RankFailed(f"rank {rank}: {reason}")


@contextmanager
def as_rank() -> Iterator[None]:
    """Around each rank, and a process that is alone: the one place that explains errors."""
    with handling(stop_at_once):
        try:
            yield
        except Exception as error:
            # No variable holds the new error: its traceback would hold this frame, and the model.
            raise _after_the_others(ending(error)) from error


def _after_the_others(end: OneLineError) -> OneLineError:
    """Returns the error. A rank of torchrun prints it; programs print that of the first one.

    It waits before: torchrun ends it if the first one has the same error. A rank that only knows
    that another is gone waits too, and prints nothing, so that the other one is named.
    """
    is_gone = isinstance(end, RankFailed)
    is_silent = launched_ranks() is not None and MEETING not in os.environ and not is_first_rank()
    if is_gone or is_silent:
        time.sleep(SECONDS_OF_OTHERS)
    if is_silent and not is_gone:
        warn(f"rank {os.environ['RANK']}: {end}")
    return end


def _new_rank(rank: int, function: Callable[[Config], Any], config: Config, meeting: Path) -> None:
    """Runs in a new process, whose outcome is a file in the folder `meeting`."""
    Thread(target=_exit_with_launcher, daemon=True).start()
    size = str(config.devices)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, MEETING: str(meeting / "store")}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // config.devices))
    try:
        with as_rank():
            outcome = function(config)
    except OneLineError as error:
        outcome = error
    except Stopped as stopped:
        sys.exit(SIGNAL_STATUS + stopped.signum)
    (meeting / str(rank)).write_bytes(pickle.dumps(outcome))
    sys.exit(isinstance(outcome, OneLineError))


def _exit_with_launcher() -> None:
    """Kills this rank once the launcher, which holds the lock of the run's folder, is gone."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
