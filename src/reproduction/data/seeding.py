"""Randomness as a function of what it is for, whatever process draws it and in which order."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What randomness is for; the first part of a key, so that two uses never share one."""

    AUGMENT = 1
    MIX_INPUTS = 2
    DROPOUT = 3
    ERASE_BOXES = 4
    ERASE_NOISE = 5


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seeds all generators by `key` for a while."""
    with generators_kept():
        seed_generators(*key)
        yield


def seed_generators(*key: int) -> None:
    """Seeds Python's, numpy's and torch's CPU generators by `key`: a Purpose and numbers.

    Generators of a GPU are left alone: dropout draws from them.
    """
    python_seed, numpy_seed, torch_seed = np.random.SeedSequence(key).generate_state(3).tolist()
    random.seed(python_seed)
    np.random.seed(numpy_seed)
    torch.default_generator.manual_seed(torch_seed)


def seed_device(device: torch.device, *key: int) -> None:
    """Seeds torch's generators of the CPU and of the current GPU, from which dropout draws.

    `torch.manual_seed` asks for every kind of device each time, 0.2 ms of the host's.
    """
    seed = seed_of(*key)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_of(*key: int) -> int:
    """The seed of one generator by `key`: a Purpose and numbers."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves the same generators as they were. Takes longer than seeding them: numpy's is slow."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
