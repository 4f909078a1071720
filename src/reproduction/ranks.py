"""What a process knows of its peers from its environment alone, before torch is imported."""

import os


def is_first_rank() -> bool:
    """Whether this process speaks and writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def launched_ranks() -> int | None:
    """How many ranks torchrun, or our own launcher, has started; None outside of it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
