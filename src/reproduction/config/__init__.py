"""The typed configuration."""
