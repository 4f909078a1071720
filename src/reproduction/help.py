"""What is said of words and files that Hydra refuses: one line, which names what is allowed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from reproduction.config import CONF_DIR
from reproduction.errors import UserError, nearest

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
        text = told(error)
        if words and not any(word.lstrip("+~").partition("=")[0] in text for word in words):
            text = f"{' '.join(words)}: {text}"
        raise UserError(text) from error


def told(error: Exception) -> str:
    """Returns the message of an error; of an unknown key or file, what is allowed instead."""
    cause: Any = error.__cause__ if isinstance(error.__cause__, ERRORS) else error
    group, _, name = str(getattr(cause, "missing_cfg_file", "")).partition("/")
    if isinstance(cause, MissingConfigException) and name and group != "hydra":
        files = (CONF_DIR / group).rglob("*.yaml")
        allowed = sorted(str(x.relative_to(CONF_DIR / group).with_suffix("")) for x in files)
        return (
            f"{group}={name}: no such file{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
        )
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key}: must be set"
    parent = getattr(cause, "parent_node", None)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and parent is not None:
        key, allowed = str(cause.full_key), [*map(str, parent)]
        if not allowed:
            return f"{key}: no such key; +{key}=... adds it"
        near = nearest(key.rpartition(".")[2], allowed)
        return f"{key}: no such key{near}; allowed: {', '.join(allowed)}"
    if isinstance(error, YAMLError):
        return str(error)
    return re.split(r"\n(?=\s|See )", str(cause))[0]  # without advice that is not for us
