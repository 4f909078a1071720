"""Commands besides train.py and eval.py."""
