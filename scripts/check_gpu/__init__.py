"""Checks and measures a machine with a GPU: `python -m scripts.check_gpu`."""
