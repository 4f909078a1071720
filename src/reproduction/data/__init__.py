"""Data sets, transforms and loaders."""
