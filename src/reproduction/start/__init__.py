"""One way to start: from a command line to checked runs, here, in processes or on a cluster."""
