"""Studies: rows to train, and the tables of runs."""
