"""The models of the paper and their weights."""
