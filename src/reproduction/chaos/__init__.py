"""Harm that is done on purpose by `make chaos`, and what becomes of it."""

PARTS = ("kills", "ranks", "settings", "disk", "evaluation", "lock", "files")
