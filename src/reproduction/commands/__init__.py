"""The commands behind train.py, eval.py and export.py."""
