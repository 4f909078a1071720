"""These tests need a cluster of SLURM, and disturb it: only `make test-slurm` collects them."""

import os

collect_ignore = [] if "TEST_SLURM" in os.environ else ["test_slurm.py"]
