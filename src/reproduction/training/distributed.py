"""One process or many: torchrun's ranks, or ranks that we start ourselves."""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reproduction.errors import STOP_SIGNALS, Stopped, UserError
from reproduction.hardware import usable_cores
from reproduction.ranks import launched_ranks

Settings = TypeVar("Settings")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

SIGNALLED = 128  # what a shell adds to a signal's number
SIGNALLING: dict[str, Any] = {  # settings of the launcher that older versions of torch lack
    "signals_to_handle": ",".join(signum.name for signum in STOP_SIGNALS),
    "shutdown_timeout": 300,  # seconds that ranks have to end their step, or an evaluation
}


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
        """The sum over all ranks, on every rank; changes `values`."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

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
    local = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    if device == "cuda" and gpus == 0:
        raise UserError("device=cuda: this machine has no CUDA GPU, allowed is cpu or auto")
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
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()


def launch(function: Callable[[Settings], Result], settings: Settings, devices: int) -> Result:
    """Runs `function(settings)` here, or on `devices` ranks of torch's elastic launcher.

    Returns rank 0's result. UserError and Stopped of ranks are raised as such; another error is
    printed by its rank and raised as RuntimeError.
    """
    if devices == 1 or launched_ranks() is not None:
        return function(settings)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // devices)))
    for name in ("agent.server.api", "multiprocessing.api"):  # one line of ours says it
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        **{key: value for key, value in SIGNALLING.items() if hasattr(LaunchConfig, key)},
    )
    try:
        result = elastic_launch(config, _on_rank)(function, settings)[0]
    except SignalException as error:  # the launcher has passed it on and waited for the ranks
        raise Stopped(error.sigval) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode - SIGNALLED in STOP_SIGNALS:
            raise Stopped(failure.exitcode - SIGNALLED) from None
        told = failure.message
        reason = str(told["message"] if isinstance(told, dict) else told).splitlines()[-1]
        raise RuntimeError(f"rank {rank}: {reason}") from None
    if isinstance(result, UserError):
        raise result
    return result


def _on_rank(function: Callable[[Settings], Result], settings: Settings) -> Result | UserError:
    """Runs in a rank: a UserError, which all ranks share, is handed back; others are printed."""
    try:
        return function(settings)
    except UserError as error:
        return error
    except Stopped as stopped:  # nobody may be there to take a result
        sys.exit(SIGNALLED + stopped.signum)
    except Exception:
        traceback.print_exc()
        raise
