"""Benchmarks training on this machine: `python -m scripts.benchmark`."""
