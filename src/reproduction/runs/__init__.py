"""Composing, parsing and storing the configuration of a run."""
