"""What a process knows of its peers from its environment alone, before torch is imported."""

import os


def is_first_rank() -> bool:
    """Whether this process speaks and writes for all ranks."""
    return launched_ranks() is None or os.environ.get("RANK", "0") == "0"


def launched_ranks() -> int | None:
    """How many ranks torchrun, or our own launcher, has started; None outside of it."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ
    return int(os.environ["WORLD_SIZE"]) if is_launched else None


def local_ranks() -> int | None:
    """How many of them are on this machine."""
    ranks = launched_ranks()
    return None if ranks is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def is_a_rank(devices: int) -> bool:
    """Whether this process is one of the ranks, or the only one: none has to be started."""
    return devices == 1 or launched_ranks() is not None


def restarts() -> tuple[int, int]:
    """How often all ranks have been started again, and how often they may be."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    done, allowed = (int(os.environ.get(name, "0")) for name in names)
    return done, allowed


def launcher() -> str:
    """What ranks that are started again have in common with those before them."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none" and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return run  # of several machines, whose first rank may move
    return f"{run} by process {os.getppid()}"
