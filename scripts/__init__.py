"""Commands besides train.py and eval.py."""

from pydantic import PositiveInt, TypeAdapter


def positive(text: str) -> int:
    """Argument type of a positive integer."""
    return TypeAdapter(PositiveInt).validate_python(text)
