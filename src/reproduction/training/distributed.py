"""One process or many: ranks started by torchrun or by `on_ranks`."""

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
from functools import partial
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
from reproduction.system.terminal import warn

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

Settings = TypeVar("Settings")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

GLOO = "gloo/transport"  # in gloo's messages about a lost peer; NCCL raises a DistError
SECONDS_FOR_PEERS = 2
START_METHOD = "spawn"  # of ranks; CUDA does not work after a fork
QUIET_LOGGERS = (  # `on_ranks` reports the same in one line
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)
SIGNAL_STATUS = 128  # exit status of a signal, as in a shell: 128 + its number


@dataclass(frozen=True)
class World:
    """This process among its peers; `neighbours` are the process ids of those on this machine."""

    rank: int
    size: int
    device: torch.device
    neighbours: tuple[int, ...] = ()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def has_lost_neighbour(self) -> bool:
        """Whether a neighbour has died; NCCL would wait for it for minutes."""
        return not all(_is_alive(process) for process in self.neighbours)

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Takes the maximum of `values` over all ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, value: Shared) -> list[Shared]:
        """Returns the values of all ranks on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def share(self, value: Shared) -> Shared:
        """Returns the first rank's value on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def share_buffers(self, module: nn.Module) -> None:
        """Copies the first rank's buffers: batch normalisation sees only its rank's share."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            # NCCL would warn that it has to guess the device
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def data_parallel(module: nn.Module, world: World) -> nn.Module:
    """Wraps a module so that backward passes reduce its gradients over the ranks, if several."""
    if world.size == 1:
        return module
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)


def resolve_device(device: str, devices: int, precision: str = "float32") -> str:
    """Returns `cpu` or `cuda`; UserError if there are not enough GPUs, or for float16 on a CPU."""
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
    if device == "cpu" and precision == "float16":
        raise UserError(
            "recipe.precision=float16: takes minutes a batch on a CPU, allowed are "
            "recipe.precision=float32 and bf16"
        )
    return device


def visible_gpus() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if chosen is None else chosen.split(",")
    return names[:count]


def allow_tf32(is_allowed: bool) -> None:
    """Allows or forbids TF32 for float32 matrix products and convolutions of this process.

    By default torch allows it for convolutions only.
    """
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Joins the process group described by the environment: NCCL on CUDA, gloo on a CPU."""
    if launched_ranks() is None:
        yield World(0, 1, torch.device(device))
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    with _reporting_lost_peers():
        store, rank, size = next(iter(dist.rendezvous("env://")))
        # torchrun keeps its store over restarts, with the addresses of dead ranks
        store = dist.PrefixStore(f"start_{restarts()[0]}", store)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield World(rank, size, place, _neighbours(store, rank, size))
        finally:
            dist.destroy_process_group()


def _neighbours(store: dist.Store, rank: int, size: int) -> tuple[int, ...]:
    """The process ids of the other ranks on this machine."""
    machine = socket.gethostname()
    store.set(f"place of {rank}", f"{os.getpid()} {machine}")
    places = (store.get(f"place of {peer}").decode() for peer in range(size) if peer != rank)
    pairs = (place.split(" ", 1) for place in places)
    return tuple(int(process) for process, host in pairs if host == machine)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


@contextmanager
def _reporting_lost_peers() -> Iterator[None]:
    """Raises RankFailed if another rank is gone, after the launcher had time to notice that one."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and GLOO not in str(error):
            raise
        with suppress(Stopped):
            time.sleep(SECONDS_FOR_PEERS)  # the launcher ends this rank sooner
        raise RankFailed(f"another rank is gone ({first_line(error)})") from error


def on_ranks(function: Callable[[Settings], Result], devices: int) -> Callable[[Settings], Result]:
    """Returns the function itself if this is a rank, else what runs it on `devices` new ranks."""
    if devices == 1 or launched_ranks() is not None:
        return function
    return partial(_run_on_new_ranks, function, devices)


def _run_on_new_ranks(
    function: Callable[[Settings], Result], devices: int, settings: Settings
) -> Result:
    """Returns the first rank's result.

    If a rank fails or is killed, torch's elastic launcher ends the others. UserError and Stopped
    are raised as such, any other error as RankFailed. The launcher's signal handlers stay set.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logs = TemporaryDirectory()  # the launcher would leave its own behind
    handled = [x.name for x in STOP_SIGNALS if signal.getsignal(x) != signal.SIG_IGN]
    settings_of_signals: dict[str, Any] = {  # older versions of torch lack them
        "signals_to_handle": ",".join(handled),
        "shutdown_timeout": 300,  # seconds for ranks to end their step or evaluation
    }
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # this machine's name need not resolve
        max_restarts=0,
        start_method=START_METHOD,
        logs_specs=DefaultLogsSpecs(logs.name),
        **{key: x for key, x in settings_of_signals.items() if hasattr(LaunchConfig, key)},
    )
    try:
        with logs, _dividing_cores(devices):
            result = elastic_launch(config, _on_rank)(function, settings)[0]
    except SignalException as error:  # the launcher has forwarded it and waited for the ranks
        raise Stopped(error.sigval) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if (signum := failure.exitcode - SIGNAL_STATUS) in STOP_SIGNALS:
            raise Stopped(signum) from None
        raise RankFailed(f"rank {rank}: {_failure_line(failure)}") from None
    if isinstance(result, UserError):
        raise result
    return result


@contextmanager
def _dividing_cores(devices: int) -> Iterator[None]:
    """Divides the cores among the ranks to be started, unless OMP_NUM_THREADS is set."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(max(1, usable_cores() // devices))
    try:
        yield
    finally:
        del os.environ[name]


def _failure_line(failure: "ProcessFailure") -> str:
    """Describes in one line how a rank ended."""
    if failure.exitcode < 0:
        return f"killed by {failure.signal_name()}"
    message = failure.message
    line = str(message["message"] if isinstance(message, dict) else message).splitlines()[-1]
    return line.removeprefix(f"{PlainError.__name__}: ")


def _on_rank(function: Callable[[Settings], Result], settings: Settings) -> Result | UserError:
    """Runs in each rank. Returns a UserError, which all ranks share; prints unexpected errors."""
    Thread(target=_exit_with_launcher, daemon=True).start()
    try:
        return function(settings)
    except UserError as error:
        return error
    except Stopped as stopped:  # the launcher may not take a result any more
        sys.exit(SIGNAL_STATUS + stopped.signum)
    except PlainError:  # needs no traceback
        raise
    except Exception:
        warn(traceback.format_exc())
        raise


def _exit_with_launcher() -> None:
    """Kills this rank once the launcher, which holds the lock of the run's folder, is gone."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
