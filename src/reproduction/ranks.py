"""What a process knows of its peers from its environment alone, before torch is imported."""

import os


def is_first_rank() -> bool:
    """Whether this process speaks and writes for all ranks."""
    return launched_ranks() is None or os.environ.get("RANK", "0") == "0"


def launched_ranks() -> int | None:
    """How many ranks torchrun, or our own launcher, has started; None outside of it."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ
    return int(os.environ["WORLD_SIZE"]) if is_launched else None
