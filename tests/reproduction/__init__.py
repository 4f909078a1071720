"""Tests of the experiments; some record expected values again as `python -m tests...`."""

import sys

try:
    import pytest  # noqa: F401
except ModuleNotFoundError:
    sys.exit(f"{sys.orig_argv[0]} -m tests...: needs pytest, which make setup-dev installs")
