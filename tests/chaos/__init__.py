"""Fault injection: `python -m tests.chaos`."""
