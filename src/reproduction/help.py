"""What is said of overrides and files that Hydra refuses: one line, which names them."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from traceback import walk_tb

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from reproduction.errors import UserError

ERRORS = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)


@contextmanager
def hydra_errors(*overrides: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line, which names an override or all of them."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        is_of_hydra = frame.f_globals.get("__name__", "").startswith("hydra.")
        is_ours = isinstance(error, UserError | BrokenPipeError)
        if is_ours or not (isinstance(error, ERRORS) or is_of_hydra):
            raise
        text = f"{error}{_near_key(error.__cause__ or error)}"
        if overrides and not any(
            override.lstrip("+~").partition("=")[0] in text for override in overrides
        ):
            text = f"{' '.join(overrides)}: {text}"
        raise UserError(text) from error


def _near_key(cause: BaseException) -> str:
    """Says which key may be meant by one that is not in the configuration."""
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError) or cause.parent_node is None:
        return ""
    group, dot, _ = str(cause.full_key).rpartition(".")
    names = [f"{group}{dot}{name}" for name in cause.parent_node]
    near = get_close_matches(str(cause.full_key), names, n=1)
    return f", perhaps {near[0]}" if near else ""
