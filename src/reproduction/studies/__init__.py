"""Studies: the runs of the paper's tables and sweeps, their launchers and results."""
