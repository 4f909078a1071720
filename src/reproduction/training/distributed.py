"""One process or many: torchrun's ranks, or ranks that we start ourselves."""

import errno
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reproduction.system.errors import (
    STOP_SIGNALS,
    PlainError,
    RankFailed,
    Stopped,
    UserError,
    first_line,
)
from reproduction.system.hardware import usable_cores
from reproduction.system.ranks import launched_ranks, local_ranks, restarts

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

Settings = TypeVar("Settings")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

GLOO = "gloo/transport"  # in what gloo says of a peer; NCCL raises a DistError
SECONDS_FOR_PEERS = 2
START_METHOD = "spawn"  # of ranks; CUDA does not work in a fork
TOLD_BY_US = (  # loggers of what one line of ours says
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)
SIGNALLED = 128  # what a shell adds to a signal's number
SIGNALLING: dict[str, Any] = {  # settings of the launcher that older versions of torch lack
    "signals_to_handle": ",".join(signum.name for signum in STOP_SIGNALS),
    "shutdown_timeout": 300,  # seconds that ranks have to end their step, or an evaluation
}


@dataclass(frozen=True)
class World:
    """This process among its peers; `neighbours` are the processes of those on this machine."""

    rank: int
    size: int
    device: torch.device
    neighbours: tuple[int, ...] = ()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def is_incomplete(self) -> bool:
        """Whether a neighbour is gone: what waits for it, as NCCL does for minutes, is in vain."""
        return any(not _is_there(process) for process in self.neighbours)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; changes `values`."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The maximum over all ranks, on every rank; changes `values`."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def union(self, numbers: set[int], bound: int) -> set[int]:
        """The numbers below `bound` that any rank has; all have to ask."""
        if self.size == 1 or not bound:
            return numbers
        has = torch.zeros(bound, dtype=torch.int32, device=self.device)
        has[sorted(numbers)] = 1
        return set(self.sum(has).nonzero().flatten().tolist())

    def share(self, value: Shared) -> Shared:
        """The first rank's value, on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def share_buffers(self, module: nn.Module) -> None:
        """Takes over the first rank's buffers: batch normalisation sees its own share only."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def resolve_device(device: str, devices: int) -> str:
    """`cpu` or `cuda`; UserError for a GPU that is not there."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus > 0 else "cpu"
    local = local_ranks() or devices
    if device == "cuda" and gpus == 0:
        raise UserError("device=cuda: this machine has no CUDA GPU, allowed is cpu")
    if device == "cuda" and local > gpus:
        raise UserError(
            f"devices={devices}: this machine has {gpus} CUDA GPUs, allowed is 1..{gpus}"
        )
    return device


def visible_gpus() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if chosen is None else chosen.split(",")
    return names[:count]


def allow_tf32(is_allowed: bool) -> None:
    """Whether this process's float32 products and convolutions on a GPU may be TF32's.

    Torch would allow it to convolutions alone.
    """
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Joins the process group that the environment describes, NCCL on CUDA and gloo on a CPU."""
    if launched_ranks() is None:
        yield World(0, 1, torch.device(device))
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    with _leaving_blame_to_peers():
        store, rank, size = next(iter(dist.rendezvous("env://")))
        # torchrun keeps its store when it starts ranks again, and with it addresses of dead ones
        store = dist.PrefixStore(f"start_{restarts()[0]}", store)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield World(rank, size, place, _neighbours(store, rank, size))
        finally:
            dist.destroy_process_group()


def _neighbours(store: dist.Store, rank: int, size: int) -> tuple[int, ...]:
    """The processes of the other ranks on this machine."""
    machine = socket.gethostname()
    store.set(f"place of {rank}", f"{os.getpid()} {machine}")
    places = (store.get(f"place of {peer}").decode() for peer in range(size) if peer != rank)
    found = (place.split(" ", 1) for place in places)
    return tuple(int(process) for process, where in found if where == machine)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


@contextmanager
def _leaving_blame_to_peers() -> Iterator[None]:
    """A rank that finds another gone raises RankFailed, once the launcher has seen that one."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and GLOO not in str(error):
            raise
        with suppress(Stopped):
            time.sleep(SECONDS_FOR_PEERS)  # the launcher ends this rank sooner
        raise RankFailed(f"another rank is gone ({first_line(error)})") from error


def launch(
    function: Callable[[Settings], Result], settings: Settings, devices: int, max_restarts: int = 0
) -> Result:
    """Runs `function(settings)` on `devices` ranks of torch's elastic launcher.

    If one fails or is killed, all are started again, `max_restarts` times at most. Returns rank 0's
    result. Their UserError and Stopped are raised as such, another error as RankFailed. Its
    handlers of signals stay set.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in TOLD_BY_US:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logs = TemporaryDirectory()  # of what ranks tell the launcher, which would leave it behind
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method=START_METHOD,
        logs_specs=DefaultLogsSpecs(logs.name),
        **{key: value for key, value in SIGNALLING.items() if hasattr(LaunchConfig, key)},
    )
    try:
        with logs, _sharing_cores(devices):
            result = elastic_launch(config, _on_rank)(function, settings)[0]
    except SignalException as error:  # the launcher has passed it on and waited for the ranks
        raise Stopped(error.sigval) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode - SIGNALLED in STOP_SIGNALS:
            raise Stopped(failure.exitcode - SIGNALLED) from None
        raise RankFailed(f"rank {rank}: {_how(failure)}") from None
    if isinstance(result, UserError):
        raise result
    return result


@contextmanager
def _sharing_cores(devices: int) -> Iterator[None]:
    """Ranks divide the cores, unless the environment says otherwise; it does so for them alone."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(max(1, usable_cores() // devices))
    try:
        yield
    finally:
        del os.environ[name]


def _how(failure: "ProcessFailure") -> str:
    """How a rank ended, in one line."""
    if failure.exitcode < 0:
        return f"killed by {failure.signal_name()}"
    told = failure.message
    line = str(told["message"] if isinstance(told, dict) else told).splitlines()[-1]
    return line.removeprefix(f"{PlainError.__name__}: ")


def _on_rank(function: Callable[[Settings], Result], settings: Settings) -> Result | UserError:
    """Runs in a rank: a UserError, which all ranks share, is handed back; others are printed."""
    Thread(target=_end_with_launcher, daemon=True).start()
    try:
        return function(settings)
    except UserError as error:
        return error
    except Stopped as stopped:  # nobody may be there to take a result
        sys.exit(SIGNALLED + stopped.signum)
    except PlainError:  # one line tells it, or another rank has
        raise
    except Exception:
        traceback.print_exc()
        raise


def _end_with_launcher() -> None:
    """A launcher that is gone holds the run's folder no longer, so that nothing may write there."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
