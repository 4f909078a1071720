"""The paper's tables and sweeps, as runs."""
