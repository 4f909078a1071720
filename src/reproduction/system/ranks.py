"""Rank, world size and restarts, read from the environment without importing torch."""

import os

MEETING = "REPRODUCTION_MEETING"  # the file at which ranks meet that a run has started itself


def is_first_rank() -> bool:
    """Whether this process prints and writes files for all ranks."""
    return launched_ranks() is None or os.environ.get("RANK", "0") == "0"


def launched_ranks() -> int | None:
    """Returns the world size under torchrun or our own launcher, None otherwise."""
    is_launched = {"TORCHELASTIC_RUN_ID", MEETING} & os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if is_launched and "WORLD_SIZE" in os.environ else None


def local_ranks() -> int | None:
    """Returns the number of ranks on this machine, None if not launched."""
    ranks = launched_ranks()
    return None if ranks is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def restarts() -> tuple[int, int]:
    """Returns (restarts so far, maximum number of restarts)."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    done, allowed = (int(os.environ.get(name, "0")) for name in names)
    return done, allowed
