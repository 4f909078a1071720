"""Errors, files, hardware, ranks and terminal output."""
