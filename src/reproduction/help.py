"""What is said of words and files that Hydra refuses: one line, which names what is allowed."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from hydra.errors import HydraException
from omegaconf.errors import (
    OmegaConfBaseException,
)
from yaml import YAMLError

from reproduction.errors import UserError

ERRORS = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)


@contextmanager
def hydra_errors(*words: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line, which names the words if it names none."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        is_of_hydra = frame.f_globals.get("__name__", "").startswith("hydra.")
        is_ours = isinstance(error, UserError | BrokenPipeError)
        if is_ours or not (isinstance(error, ERRORS) or is_of_hydra):
            raise
        text = str(error)
        if words and not any(word.lstrip("+~").partition("=")[0] in text for word in words):
            text = f"{' '.join(words)}: {text}"
        raise UserError(text) from error
