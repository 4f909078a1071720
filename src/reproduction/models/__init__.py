"""The models of the paper."""
