"""What scripts share: arguments, whose errors take one line, and tables as wide as the terminal."""

import argparse
import sys
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from reproduction.system.errors import UserError

WIDTH = 180  # of a table where there is no terminal to fit


class Parser(argparse.ArgumentParser):
    """Raises UserError for what it cannot read."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def print_tables(*tables: Table) -> None:
    Console(width=None if sys.stdout.isatty() else WIDTH).print(*tables, sep="\n")
