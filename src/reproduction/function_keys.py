"""Keys that choose a function: by a name of ours, or by the import path of yours.

A path is `package.module:factory`. A factory is called with the options beside its key, by name,
and what it returns is used. Ours are entries of tables, found by the same paths.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core.core_schema import no_info_after_validator_function

from reproduction.errors import OneLineError, UserError, first_line

PATH = re.compile(r"(?a)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
FORM = "package.module:factory"


class Refused(ValueError):
    """What is wrong with an object or its options, in a line that needs no name of an error."""


def module_of(path: str) -> ModuleType:
    """Imports the module of a path, also from the folder of the command, which is searched last."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # processes that this one starts are in the same folder
    return import_module(path.partition(":")[0])


def file_of(path: str) -> str:
    """Returns the name of the file that a path names, and the sha256 of its content."""
    file = Path(str(module_of(path).__file__))
    return f"{file.name} with sha256 {sha256(file.read_bytes()).hexdigest()[:8]}"


def placed(error: Exception) -> str:
    """Returns the type of an error of any code, its message, and where it was raised."""
    place = extract_tb(error.__traceback__)[-1]
    return f"{first_line(error)} ({place.filename}:{place.lineno})"


# What a run does with the code: reads images, builds the model, mixes inputs, mixes tokens, takes
# the rest of a step, evaluates.
Role = Literal["images", "model", "inputs", "tokens", "step", "evaluation"]


@dataclass(frozen=True)
class FunctionKey:
    """What may stand at a key of the configuration that chooses a function."""

    key: str
    role: Role
    # the paths of ours by name: to list them, nothing is imported
    ours: Mapping[str, str] = field(default_factory=dict)

    def at(self, name: str) -> "FunctionKey":
        """Returns the key of one name, if it has a `*` for them."""
        return replace(self, key=self.key.replace("*", name))

    def override(self, chosen: str) -> str:
        """Returns what is typed to choose this."""
        return f"{self.key}={chosen}"

    def path(self, chosen: str) -> str:
        """Returns the path that a name stands for, or that stands here itself."""
        return self.ours.get(chosen, chosen)

    def is_own(self, chosen: str) -> bool:
        """Whether this is no entry of the table: code that must be asked for."""
        return self.path(chosen) not in self.ours.values()

    def checked(self, chosen: str) -> str:
        """Returns a name of ours or a path; ValueError for anything else."""
        if not isinstance(chosen, str) or not PATH.fullmatch(self.path(chosen)):
            names = ", ".join([*self.ours, FORM])
            raise ValueError(f"must be one of {names}")
        return chosen

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Has the schema check what stands at a key that is annotated with this."""
        return no_info_after_validator_function(self.checked, handler(source))

    def factory(self, chosen: str) -> Callable[..., Any]:
        """Returns the factory of a name or a path."""
        path = self.path(chosen)
        found: Any = module_of(path)
        for name in path.partition(":")[2].split("."):
            found = getattr(found, name)
        return found

    def made(self, chosen: str, options: Mapping[str, Any]) -> Any:
        """Returns what the factory makes of the options; UserError if it makes nothing."""
        with self.refusing(chosen):
            return self.factory(chosen)(**options)

    @contextmanager
    def refusing(self, chosen: str, override: str = "") -> Iterator[None]:
        """Turns what fails into one line: of `override`, if that is to blame, or of this key."""
        override = override or self.override(chosen)
        try:
            yield
        except OneLineError:
            raise
        except Refused as error:
            raise UserError(f"{override}: {error}") from error
        except Exception as error:  # from any code
            reason = placed(error) if self.is_own(chosen) else first_line(error)
            raise UserError(f"{override}: {reason}") from error
