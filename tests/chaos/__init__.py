"""Runs that are killed, compared with undisturbed ones: `make chaos`."""
