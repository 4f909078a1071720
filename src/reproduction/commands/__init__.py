"""What train.py, eval.py and export.py do."""
