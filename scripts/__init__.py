"""Commands beside train.py and eval.py."""
