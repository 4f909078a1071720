"""Harm that is done on purpose, and what must come of it."""
