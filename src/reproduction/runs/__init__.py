"""From a command line to a run and its folder."""
