"""Batches of images, which processes load: what they hand over, and how they begin and end."""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.util import Finalize, get_temp_dir
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from reproduction.errors import STOP_SIGNALS, OneLineError, PlainError, UserError

# The name of a socket has at most 107 bytes; this is what multiprocessing adds to TMPDIR.
LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
# Open files of a process, and more for each of its workers: of three loaders the pipes, batches on
# their way, and sockets that hand them over.
FILES, FILES_OF_A_WORKER = 32, 32
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108


class Example(NamedTuple):
    """An image for the model."""

    place: int  # in its half
    image: Tensor  # 3 s s, uint8
    target: int


class Batch(NamedTuple):
    """Examples as the model takes them."""

    images: Tensor  # b 3 s s, uint8
    classes: Tensor  # b
    places: list[int]  # b, of the images in their half


class Images(Protocol):
    """Images by keys, of which the loader gets those of a batch."""

    def __getitems__(self, keys: list[Any], /) -> list[Example]: ...


class Worker(ForkProcess):
    """A process that loads images, to be told from other children of this process."""


class Workers(ForkContext):
    """Forks workers, which shares images in memory; spawned ranks would default to spawning."""

    Process = Worker


class Loader:
    """Yields batches, which worker processes load; an error is that of the worker."""

    def __init__(
        self,
        images: Images,
        batches: Iterable[list[Any]],
        workers: int,
        pin: bool,
    ):
        if workers > 0:
            _check_limit_of_files(workers)
            _end_workers_at_exit()
            _choose_socket_folder()
        self._loader: Any = DataLoader(
            _ErrorsAsValues(images),
            batch_sampler=batches,
            collate_fn=_collated_or_error,
            num_workers=workers,
            multiprocessing_context=Workers() if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # worker seeds must not draw from dropout's generator
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        """Lets the workers begin at once."""
        return self._unpacked(iter(self._loader))

    def _unpacked(self, batches: Iterator[Batch | OneLineError]) -> Iterator[Batch]:
        for batch in batches:
            if isinstance(batch, OneLineError):
                try:
                    raise batch
                finally:
                    del batch  # which would keep this frame, and so the workers
            yield batch


@dataclass(frozen=True)
class _ErrorsAsValues(Dataset[Any]):
    """Returns an error that ends the run: raised in a worker, torch would turn it into text."""

    images: Images

    def __getitems__(self, keys: list[Any]) -> list[Example] | OneLineError:
        try:
            return self.images.__getitems__(keys)
        except OneLineError as error:
            return error


def _collated_or_error(examples: list[Example] | OneLineError) -> Batch | OneLineError:
    return examples if isinstance(examples, OneLineError) else collated(examples)


def collated(examples: list[Example]) -> Batch:
    """Returns examples as a batch; in a worker in memory that it shares."""
    images, classes = default_collate([(x.image, x.target) for x in examples])
    return Batch(images, classes, [x.place for x in examples])


def _check_limit_of_files(workers: int) -> None:
    """Raises PlainError if this process may not open the files of a loader's workers.

    A worker that cannot hand over its images would print tracebacks, or let the run wait forever.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_OF_A_WORKER * workers
    if soft != resource.RLIM_INFINITY and needed > soft:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if needed > allowed:
            rule = f"needs {needed} open files, the limit is {hard}; raise it by `ulimit -n`"
            raise PlainError(f"dataset.workers={workers}: {rule}, or lower dataset.workers")


def _begin_worker(worker: int) -> None:
    """Keeps a worker running until its parent ends it, if a signal reaches the process group.

    Its thread that hands over images says nothing if the parent, which stops, does not take them.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    sys.excepthook = lambda *error: None  # which ends no process


@cache
def _end_workers_at_exit() -> None:
    """Registers `_end_workers`, also for the end of multiprocessing processes."""
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    """Kills workers that are still referenced, as by the traceback of an error.

    Otherwise multiprocessing sends SIGTERM, which they ignore, and waits forever.
    """
    workers = [x for x in multiprocessing.active_children() if isinstance(x, Worker)]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # silences torch's report of killed workers
        for worker in workers:
            worker.kill()


def _choose_socket_folder() -> None:
    """Lets multiprocessing make its folder where the names of its sockets are short enough.

    Workers send images through sockets in it. If TMPDIR were too long, they would wait forever.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_TMPDIR:
        return
    writable = [folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)]
    if not writable:
        raise UserError(f"TMPDIR={usual}: has more than {LONGEST_TMPDIR} bytes")
    tempfile.tempdir = writable[0]
    try:
        get_temp_dir()  # makes the folder, which this process and its workers then keep
    finally:
        tempfile.tempdir = usual
