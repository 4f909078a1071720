"""Commands besides train.py and eval.py."""

from pathlib import Path

from pydantic import PositiveInt, TypeAdapter

from reproduction.errors import check_name


def positive(text: str) -> int:
    """Argument type of a positive integer."""
    return TypeAdapter(PositiveInt).validate_python(text)


def output(text: str) -> Path:
    """Argument type of a file that is written at the end."""
    path = Path(text)
    check_name("output", path)
    return path
