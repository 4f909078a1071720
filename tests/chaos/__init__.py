"""Harm that is done on purpose, and what becomes of it: `python -m tests.chaos`."""
